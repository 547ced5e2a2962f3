"""Runs the real scheduler on a trace with simulated time.

It compares policies and pool sizes without the hardware. Only the device is simulated: `StepTime` gives the duration of
a step. Queue, block pool, prefix tree, preemption and the step in flight are the production code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import accumulate, count
from math import ceil

from quire.core.cache import BLOCK_SIZE
from quire.core.events import Admitted, Event, Preempted, PrefixHitFound
from quire.core.kv_cache import CacheStats, KVCacheManager
from quire.core.memory import Place, choose_boundaries
from quire.core.policy import StepCost, make_policy
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult, TokenUpdate
from quire.core.values import NS_PER_S, Priority, SamplingParams
from quire.errors import ContextTooLong, InvalidRequest, QueueFull
from quire.sim.traces import TraceRequest

Progress = Callable[[int], None]  # with the number of requests that have ended


MAX_SAMPLES = 2_000  # points of a timeline, for runs of any length


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of a step: base_ms + token_us for each computed token + context_us for each KV token read."""

    base_ms: float
    token_us: float
    context_us: float

    def __post_init__(self) -> None:
        for name in ("base_ms", "token_us", "context_us"):
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise InvalidRequest(f"{name} = {value!r} is not from 0 to 1e9")
        if self.base_ms == self.token_us == 0:
            raise InvalidRequest("base_ms and token_us are both 0: steps would take no time")

    @property
    def cost(self) -> StepCost:
        """The cost passed to the scheduler, where rows cost time."""
        return StepCost(round(self.base_ms * 1e6), max(1, round(self.token_us * 1e3)))

    def step_ns(self, plan: StepPlan) -> int:
        context = sum(piece.start + piece.length for piece in plan.slices)
        return round(self.base_ms * 1e6 + self.token_us * 1e3 * plan.num_tokens + self.context_us * 1e3 * context)


@dataclass(frozen=True, slots=True)
class Machine:
    step_time: StepTime
    kv_bytes: int  # size of the KV cache per token
    has_costly_rows: bool = False
    state_bytes: int = 0  # size of one recurrent state; 0: the model has none


# Estimates from the figures in docs/performance.md. Other machines are described by four options of `quire sim`.
MACHINES: dict[str, Machine] = {
    "cpu-smollm2-135m": Machine(StepTime(base_ms=4.0, token_us=1650.0, context_us=7.0), 23_040, has_costly_rows=True),
    "h200-qwen3-0.6b": Machine(StepTime(base_ms=1.3, token_us=2.0, context_us=0.028), kv_bytes=114_688),
    "h200-llama3-8b": Machine(StepTime(base_ms=4.9, token_us=24.0, context_us=0.032), kv_bytes=131_072),
    "h200-qwen3.5-0.8b": Machine(
        StepTime(base_ms=1.8, token_us=3.0, context_us=0.003), kv_bytes=12_288, state_bytes=19_500_000
    ),
    "h200-qwen3.5-35b-a3b": Machine(
        StepTime(base_ms=3.8, token_us=20.0, context_us=0.005), kv_bytes=20_480, state_bytes=64_400_000
    ),
}


@dataclass(frozen=True, slots=True)
class SimConfig:
    scheduling_policy: str = "fair"
    patience: float | None = None  # None, here and below: the default of the policy
    normal_share: float | None = None
    low_share: float | None = None
    num_blocks: int = 2048
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int = 512
    max_mixed_tokens: int | None = None  # prompt tokens beside every 64 answers; None: no limit
    max_waiting: int = 100_000
    enable_prefix_caching: bool = True
    max_model_len: int | None = None  # None: the size of the pool
    has_costly_rows: bool = False  # as on a CPU: a step may leave out requests of lower tiers
    window: int = 0  # of the layers with a window
    num_window_blocks: int = 0  # 0: the window layers keep the KV of the whole context, like the others
    num_states: int = 0  # slots of recurrent states, one of which is the empty state; 0: the model has none
    places: tuple[Place, ...] = tuple(Place)  # where snapshots of states are stored
    interval: int = 0  # store snapshots in prompts every so many tokens as well; 0: no

    def make_scheduler(self, observe: Callable[[Event], None]) -> Scheduler:
        policy = make_policy(self.scheduling_policy, self.patience, self.normal_share, self.low_share)
        cache = KVCacheManager(
            self.num_blocks,
            self.block_size,
            is_caching=self.enable_prefix_caching,
            window=self.window,
            num_window_blocks=self.num_window_blocks,
            num_states=self.num_states,
            places={*self.places, Place.MESSAGE} if self.interval else self.places,
        )
        return Scheduler(
            cache,
            policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_mixed_tokens=self.max_mixed_tokens,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            observe=observe,
        )

    def boundaries(self, one: TraceRequest) -> tuple[int, ...]:
        """Positions in a prompt after which snapshots are stored: those that the engine chooses, or every `interval`.

        Messages start where shared parts end. A part of a few tokens is the header of the message after it.
        """
        found: list[int] = []
        for end in accumulate(num_tokens for _, num_tokens in one.shared):
            if not found or end - found[-1] >= self.block_size // 2:
                found.append(end)
        chosen = set(choose_boundaries(found)) if Place.MESSAGE in self.places else set()
        if self.interval:
            chosen.update(range(self.interval, one.prompt_tokens, self.interval))
        return tuple(sorted(chosen))


class Outcome(StrEnum):
    FINISHED = "finished"
    CUT = "cut"  # the answer reached the end of the context
    LEFT = "left"  # the client disconnected
    TOO_LONG = "too long"  # refused: longer than the context
    QUEUE_FULL = "queue full"  # refused: too many waiting requests


@dataclass(slots=True)
class RequestRecord:
    """Result of one request, as seen by its client."""

    priority: Priority
    arrival_s: float
    tenant: str = ""
    wait_s: float | None = None  # until its first admission
    ttft_s: float | None = None
    finish_s: float | None = None
    num_outputs: int = 0
    num_hit_tokens: int = 0  # of the prompt, not computed again
    num_kv_tokens: int = 0  # of the prompt, whose keys and values were cached
    outcome: Outcome = Outcome.LEFT

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft_s is None or self.finish_s is None or self.num_outputs < 2:
            return None
        return (self.finish_s - self.arrival_s - self.ttft_s) / (self.num_outputs - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the scheduler at one time."""

    time_s: float
    num_running: int
    num_waiting: int
    num_blocks_in_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The results of all requests of a trace."""

    records: tuple[RequestRecord, ...]
    num_preemptions: int
    makespan_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return sum(record.num_outputs for record in self.records) / self.makespan_s if self.makespan_s else 0.0

    def tier(self, priority: Priority) -> list[RequestRecord]:
        return [record for record in self.records if record.priority is priority]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport(RunReport):
    config: SimConfig
    timeline: tuple[Sample, ...]
    cache: CacheStats
    num_steps: int


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile. None if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


def simulate(
    trace: Sequence[TraceRequest], config: SimConfig, step_time: StepTime, progress: Progress = lambda _: None
) -> SimReport:
    """Simulate a whole trace."""
    replica = SimReplica(trace, config, step_time, make_records(trace), count(1), progress)
    for number, one in enumerate(trace):
        replica.run_until(to_ns(one.arrival_s))
        replica.push(number)
    replica.run_until(None)
    progress(len(trace))
    return replica.report()


class SimReplica:
    """One scheduler with simulated steps. Requests are pushed in the order of their arrival.

    `records`: of all requests of the trace. `numbers`: of requests that end; `progress` gets some of them. Replicas of
    a cluster share all of these.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: SimConfig,
        step_time: StepTime,
        records: list[RequestRecord],
        numbers: Iterator[int],
        progress: Progress,
    ) -> None:
        self.trace = trace
        self.config = config
        self.step_time = step_time
        self.records = records
        self._numbers = numbers
        self._progress = progress
        self.scheduler = config.make_scheduler(self._observe)
        if config.has_costly_rows:
            self.scheduler.policy.ledger.cost = step_time.cost
        self.now_ns = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.busy_ns = 0  # of steps
        self._inbox: deque[int] = deque()  # requests that have arrived, or will
        self._cancels: list[tuple[int, int]] = []  # (time, request), a heap
        self._outputs: dict[int, list[int]] = {}  # complete outputs of live requests
        self._timeline: list[Sample] = []
        self._in_flight: tuple[StepPlan, int] | None = None  # plan and its end time

    def push(self, number: int) -> None:
        """Send a request of the trace here. `run_until` must have reached its arrival."""
        one = self.trace[number]
        self._inbox.append(number)
        if one.cancel_after_s is not None:
            heappush(self._cancels, (to_ns(one.arrival_s + one.cancel_after_s), number))

    def run_until(self, limit_ns: int | None) -> None:
        """Run all steps that begin before this time; None: until all requests have ended."""
        while (limit_ns is None or self.now_ns < limit_ns) and (self._in_flight is not None or self._wait_for_work()):
            self._arrive()
            plan = self.scheduler.schedule(self.now_ns)
            self._commit()
            if not plan.is_empty:
                duration_ns = self.step_time.step_ns(plan)
                self._in_flight = plan, self.now_ns + duration_ns
                self.num_steps += 1
                self.busy_ns += duration_ns
            self._sample()  # also when idle, so that the timeline shows it as empty

    def _commit(self) -> None:
        """Advance the time to the end of the step in flight, and apply its result."""
        if self._in_flight is not None:
            plan, self.now_ns = self._in_flight
            self._in_flight = None
            self._deliver(self.scheduler.commit(plan, self._result(plan)))

    def report(self) -> SimReport:
        return SimReport(
            config=self.config,
            records=tuple(self.records),
            timeline=tuple(self._timeline),
            cache=self.scheduler.cache.stats(),
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            makespan_s=self.now_ns / NS_PER_S,
        )

    def _wait_for_work(self) -> bool:
        """Advance the time to the next arrival if there is no work.

        Returns False if there is none.
        """
        self._arrive()
        if self.scheduler.has_work:
            return True
        if not self._inbox:
            return False
        self.now_ns = max(self.now_ns, to_ns(self.trace[self._inbox[0]].arrival_s))
        return True

    def _arrive(self) -> None:
        """Process all arrivals and cancellations up to the current time."""
        while self._inbox and to_ns(self.trace[self._inbox[0]].arrival_s) <= self.now_ns:
            self._add(self._inbox.popleft())
        while self._cancels and self._cancels[0][0] <= self.now_ns:
            _, number = heappop(self._cancels)
            if self.scheduler.cancel(number):
                self._end(number, Outcome.LEFT)

    def _add(self, number: int) -> None:
        one = self.trace[number]
        request = Request(
            number,
            one.prompt_ids(number),
            SamplingParams(max_tokens=one.output_tokens),
            priority=one.priority,
            salt=one.salt,
            tenant=one.tenant,
            boundaries=self.config.boundaries(one),
        )
        try:
            self.scheduler.add(request, to_ns(one.arrival_s))
        except ContextTooLong:
            self._end(number, Outcome.TOO_LONG)
        except QueueFull:
            self._end(number, Outcome.QUEUE_FULL)
        else:
            self._outputs[number] = one.output_ids(number)

    def _result(self, plan: StepPlan) -> StepResult:
        """Result of a step, with tokens from the trace.

        Ended requests get a placeholder, which the scheduler drops.
        """
        tokens: list[tuple[int, ...]] = []
        for piece in plan.slices:
            output = self._outputs.get(piece.request_id)
            if not piece.wants_token:
                tokens.append(())
            elif output is None:
                tokens.append((0,))
            else:
                tokens.append((output[piece.start + piece.length - self.trace[piece.request_id].prompt_tokens],))
        return StepResult(tuple(tokens))

    def _deliver(self, updates: Sequence[TokenUpdate]) -> None:
        now_s = self.now_ns / NS_PER_S
        for update in updates:
            record = self.records[update.request_id]
            record.num_outputs += len(update.tokens)
            if record.ttft_s is None:
                record.ttft_s = now_s - record.arrival_s
            if update.finish_reason is not None:
                record.finish_s = now_s
                is_whole = record.num_outputs == self.trace[update.request_id].output_tokens
                self._end(update.request_id, Outcome.FINISHED if is_whole else Outcome.CUT)

    def _end(self, number: int, outcome: Outcome) -> None:
        self.records[number].outcome = outcome
        self._outputs.pop(number, None)
        if (num_ended := next(self._numbers)) % 16 == 0:
            self._progress(num_ended)

    def _observe(self, event: Event) -> None:
        match event:
            case Admitted(is_resumed=False):
                self.records[event.request_id].wait_s = event.waited_ns / NS_PER_S
            case Preempted():
                self.num_preemptions += 1
            case PrefixHitFound():
                record = self.records[event.request_id]
                if not record.num_kv_tokens:  # its first admission
                    record.num_hit_tokens, record.num_kv_tokens = event.num_tokens, event.num_kv_tokens

    def _sample(self) -> None:
        scheduler = self.scheduler
        in_use = scheduler.cache.pool.num_usable - scheduler.cache.pool.num_free
        now_s = self.now_ns / NS_PER_S
        self._timeline.append(Sample(now_s, len(scheduler.running), len(scheduler.waiting), in_use))
        if len(self._timeline) > 2 * MAX_SAMPLES:
            del self._timeline[1::2]  # keep every second sample


def make_records(trace: Sequence[TraceRequest]) -> list[RequestRecord]:
    return [RequestRecord(one.priority, one.arrival_s, one.tenant) for one in trace]


def to_ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
