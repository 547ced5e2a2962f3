"""Measures a model in this process: concurrent clients, a shared prefix, drafts, fairness between priorities.

A `Session` runs requests on an engine and notes the times. `run_bench` runs the parts of a benchmark with it, all
except fairness, which has engines of its own:

1. Idle: HIGH requests, one at a time, on an idle engine.
2. Backlog: the same beside a constant backlog of LOW requests. Shows the cost of LOW work to HIGH requests over time.
3. Saturated: a constant backlog of both tiers. Shows whether LOW gets its guaranteed share.
4. Resumed: an engine with a small KV pool. A HIGH request preempts a LOW one and evicts its cached blocks. When LOW has
   resumed, the next HIGH request needs its memory. Shows that HIGH does not wait until LOW has caught up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from quire.bench.report import (
    LIVE_TOKENS,
    NUM_IDLE,
    SENTENCES,
    SHORT_PROMPT,
    TAIL_TOKENS,
    Baseline,
    BenchConfig,
    BenchReport,
    DraftsReport,
    FairnessReport,
    Level,
    Measurement,
    PrefixReport,
    Progress,
    ResumedReport,
    Sample,
    Setup,
    SiblingReport,
    SpeedupReport,
    backlog_report,
    backlog_size,
    latency,
    resumed_report,
    saturated_report,
)
from quire.core.step import StepPlan, TokenLogprobs
from quire.core.values import PackedPrompt, Priority, SamplingParams
from quire.engine.engine import Engine, StepEstimator, work_of
from quire.engine.generation import GenerationRequest
from quire.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.masks import Matcher
    from quire.text.tokenizer import Tokenizer


class Shape(NamedTuple):
    """Tokens of a request: of the prompt, and of the answer, which is never shorter."""

    prompt_tokens: int
    output_tokens: int


# The fairness part
HIGH_SHAPE = Shape(40, 32)
NUM_WARM_UP = 3
MAX_PAUSE_S = 0.2  # between two HIGH requests, so that they arrive at any point of a step
GRACE_S = 30.0  # time for a HIGH request that is running when its phase ends
SETTLE_SHARE = 0.25  # of a saturated phase passes before tokens are counted: the first requests start together
IDLE_S = 0.001
# The last phase: tokens of the KV pool, and requests of which two do not fit.
POOL_TOKENS = 1088
LARGE_HIGH, LARGE_LOW = Shape(960, 2), Shape(640, 400)
NUM_RESUMED = 3


@dataclass(slots=True, eq=False)
class Track:
    """Times and token counts of one request."""

    request_id: int
    arrived_s: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    is_finished: bool = False

    @property
    def first_s(self) -> float:
        return self.token_times[0]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


@dataclass(slots=True)
class Session:
    """Requests that run on an engine, with counters read from its plans."""

    engine: Engine
    next_id: Callable[[], int]
    estimator: StepEstimator | None = None
    tracks: dict[int, Track] = field(default_factory=dict)
    plan: StepPlan | None = None  # the last one
    num_steps: int = 0
    num_copies: int = 0
    num_prefill_tokens: int = 0

    def add(
        self,
        prompt: Sequence[int] | PackedPrompt,
        sampling: SamplingParams | int,
        *,
        salt: str = "",
        priority: Priority = Priority.NORMAL,
        matcher: Matcher | None = None,
    ) -> Track:
        """Add a request. A number of tokens for parameters: greedy, and exactly so many, as it has no stop tokens."""
        track = Track(self.next_id())
        if isinstance(sampling, int):
            sampling = SamplingParams(temperature=0.0, max_tokens=sampling)
        request = GenerationRequest.of(prompt, sampling, salt=salt, priority=priority)
        self.engine.add(track.request_id, request, matcher=matcher)
        self.tracks[track.request_id] = track
        return track

    def step(self) -> None:
        """Run a step. With an estimator, the scheduler learns the cost of rows, where they have one, as in a worker."""
        start_s = time.perf_counter()
        outputs = self.engine.step()
        now_s = time.perf_counter()
        if self.estimator is not None and self.engine.capacity.has_costly_rows and self.plan is not None:
            self.estimator.learn(work_of(self.plan), now_s - start_s)
            self.engine.scheduler.policy.ledger.cost = self.estimator.cost()
        for output in outputs:
            track = self.tracks[output.request_id]
            if output.error is not None:
                raise RequestFailed(f"request {output.request_id} failed: {output.error}")
            track.tokens += output.tokens
            track.token_times += [now_s] * len(output.tokens)
            track.logprobs += output.logprobs
            track.num_cached_tokens = output.num_cached_tokens
            track.is_finished = output.finish_reason is not None

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            self.step()

    def note(self, plan: StepPlan) -> None:
        """Count steps, copies and prefill tokens of a plan."""
        self.plan = plan
        self.num_steps += not plan.is_empty
        self.num_copies += len(plan.copies)
        self.num_prefill_tokens += sum(
            min(piece.length, piece.num_prompt_tokens - piece.start)
            for piece in plan.slices
            if piece.start < piece.num_prompt_tokens
        )


@contextmanager
def driven(engine: Engine, next_id: Callable[[], int], estimator: StepEstimator | None = None) -> Iterator[Session]:
    """A session on an engine.

    On exit, also after an error, all requests are ended, and `on_plan` and the cost of a step are restored.
    """
    session, before, ledger = Session(engine, next_id, estimator), engine.on_plan, engine.scheduler.policy.ledger
    cost = ledger.cost
    engine.on_plan = session.note
    try:
        yield session
    finally:
        engine.on_plan = before
        ledger.cost = cost
        for request_id, track in session.tracks.items():
            if not track.is_finished:
                engine.cancel(request_id)
        while engine.has_work:  # finish a step in flight: its result must not reach later requests
            engine.step()


class Prompts:
    """Prompts of real text in the model's tokens, different for every seed and every call."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._ids = tokenizer.encode(" ".join(SENTENCES))

    def draw(self, num_tokens: int) -> list[int]:
        """Tokens in random order, which take less time to make than text."""
        return self._random.choices(self._ids, k=num_tokens)

    def make(self, num_tokens: int) -> list[int]:
        ids = self._tokenizer.encode(self._text())
        while len(ids) < num_tokens:
            ids += self._tokenizer.encode(" " + self._text(), add_special=False)
        return ids[:num_tokens]

    def tails(self, count: int, num_tokens: int) -> list[list[int]]:
        """Token lists with different first tokens.

        With equal first tokens, the cache would reuse part of a block and copy it.
        """
        ids = self._tokenizer.encode(" " + self._text(), add_special=False)
        starts = list({token: index for index, token in reversed(list(enumerate(ids[:-num_tokens])))}.values())
        if len(starts) < count:
            raise InvalidRequest(f"tokenizer: {len(starts)} different tokens in {len(ids)}, but {count} are needed")
        return [ids[start : start + num_tokens] for start in starts[:count]]

    def _text(self) -> str:
        return " ".join(self._random.sample(SENTENCES, len(SENTENCES)))


class Bench:
    """State of a benchmark run: the engine, the source of prompts, and the progress."""

    def __init__(self, llm: LLM, config: BenchConfig, progress: Progress) -> None:
        self.engine = llm.engine
        self.config = config
        self.prompts = Prompts(llm.text.tokenizer, config.seed)
        self.num_threads: int = llm.engine.runner.facts().num_threads  # by default
        # More threads are not always faster for one stream.
        self.thread_choices = (1,) if self.num_threads == 1 else (self.num_threads, 1)
        self.next_id = llm.next_id
        self.begin_stage = progress

    def session(self, estimator: StepEstimator | None = None) -> AbstractContextManager[Session]:
        return driven(self.engine, self.next_id, estimator)

    def warm_up(self) -> None:
        """Run every code path once."""
        for num_threads in self.thread_choices:
            self.begin_stage("warming up")
            self.measure(1, 0, num_threads)
        if "speedup" in self.config.parts:
            for clients in self.config.batches:
                self.measure(clients, 0, self.num_threads, num_prompt=SHORT_PROMPT, num_output=2)

    def measure(
        self, clients: int, number: int, num_threads: int, *, num_prompt: int = 0, num_output: int = 0
    ) -> Measurement:
        """Measure clients that arrive together, each with its own prompt and salt, so that nothing is shared."""
        num_prompt, num_output = num_prompt or self.config.prompt_tokens, num_output or self.config.output_tokens
        prompts = [self.prompts.make(num_prompt) for _ in range(clients)]
        self.engine.clear_cache()
        self.engine.runner.use_threads(num_threads)
        try:
            with self.session() as session:
                begun_s = time.perf_counter()
                for prompt in prompts:
                    session.add(prompt, num_output, salt=f"bench {self.next_id()}")
                session.run()
        finally:
            self.engine.runner.use_threads(self.num_threads)
        tracks = list(session.tracks.values())
        times = sorted(at_s for track in tracks for at_s in track.token_times)
        all_begun_s = max(track.first_s for track in tracks)
        num_decoded = sum(at_s > all_begun_s for at_s in times)
        wall_s = times[-1] - begun_s
        return Measurement(
            clients=clients,
            round=number,
            num_threads=num_threads,
            wall_s=wall_s,
            num_output_tokens=len(times),
            num_cached_tokens=sum(track.num_cached_tokens for track in tracks),
            tokens_per_s=len(times) / wall_s,
            decode_tokens_per_s=num_decoded / (times[-1] - all_begun_s) if num_decoded else None,
            ttft_ms=median(track.ttft_s for track in tracks) * 1000,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: tuple[int, ...]
    tokens_per_s: float  # after the first token
    num_steps: int
    num_drafted: int
    num_accepted: int


def measure_drafts(bench: Bench) -> DraftsReport | None:
    """Measure in turn without and with drafts. None: the backend verifies none for this model, or they are off."""
    if not bench.engine.speculation.is_on:
        return None
    config, estimator = bench.config, StepEstimator()
    plain: list[_Run] = []
    drafted: list[_Run] = []
    for number in range(config.rounds):
        text = bench.prompts.make(config.prompt_tokens)
        prompt = text + text + text[: len(text) // 2]
        for runs, has_drafts in ((plain, False), (drafted, True)):
            bench.begin_stage(f"{'with' if has_drafts else 'without'} drafts, {number + 1} of {config.rounds}")
            runs.append(_run(bench, prompt, estimator, has_drafts=has_drafts))
    num_drafted, num_accepted = sum(one.num_drafted for one in drafted), sum(one.num_accepted for one in drafted)
    num_steps, num_plain_steps = sum(one.num_steps for one in drafted), sum(one.num_steps for one in plain)
    num_tokens = sum(len(one.tokens) for one in drafted)
    ratios = [after.tokens_per_s / before.tokens_per_s for before, after in zip(plain, drafted, strict=True)]
    return DraftsReport(
        tokens_per_s=median(one.tokens_per_s for one in drafted),
        tokens_per_s_without=median(one.tokens_per_s for one in plain),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        steps=num_steps,
        steps_without=num_plain_steps,
        draft_tokens=num_drafted,
        draft_tokens_accepted=num_accepted,
        acceptance=num_accepted / num_drafted if num_drafted else None,
        tokens_per_step=num_tokens / num_steps,
        is_equal=[one.tokens for one in plain] == [one.tokens for one in drafted],
    )


def _run(bench: Bench, prompt: list[int], estimator: StepEstimator, *, has_drafts: bool) -> _Run:
    engine, scheduler = bench.engine, bench.engine.scheduler
    before = scheduler.num_drafted, scheduler.num_accepted
    engine.clear_cache()
    engine.speculation.is_on = has_drafts
    try:
        with bench.session(estimator) as session:
            track = session.add(prompt, bench.config.output_tokens)
            session.run()
    finally:
        engine.speculation.is_on = True
    return _Run(
        tuple(track.tokens),
        (len(track.token_times) - 1) / (track.token_times[-1] - track.first_s),
        session.num_steps,
        scheduler.num_drafted - before[0],
        scheduler.num_accepted - before[1],
    )


@dataclass(frozen=True, slots=True)
class _Sharing:
    cold: Track
    live: Track
    hit: Track
    ref_counts: tuple[int, ...]  # of the blocks that both block tables contain, while both requests run
    num_copies: int


def measure_prefix(bench: Bench) -> PrefixReport:
    config, repeats = bench.config, []
    for number in range(config.rounds):
        bench.begin_stage(f"prefix, {number + 1} of {config.rounds}")
        repeats.append(_share_head(bench))
    siblings = _run_siblings(bench)
    cold_s, hit_s = median(one.cold.ttft_s for one in repeats), median(one.hit.ttft_s for one in repeats)
    shared_blocks = min(len(one.ref_counts) for one in repeats)
    counts = [count for one in repeats for count in one.ref_counts]
    copies = max(one.num_copies for one in repeats)
    cached_tokens = min(min(one.hit.num_cached_tokens, one.live.num_cached_tokens) for one in repeats)
    num_full = config.head_tokens // bench.engine.capacity.block_size
    is_held = set(counts) == {2} and copies == 0 and shared_blocks == num_full and cached_tokens == config.head_tokens
    return PrefixReport(
        head_tokens=config.head_tokens,
        ttft_cold_ms=cold_s * 1000,
        ttft_hit_ms=hit_s * 1000,
        ttft_live_ms=median(one.live.ttft_s for one in repeats) * 1000,
        ratio=cold_s / hit_s,
        shared_blocks=shared_blocks,
        ref_count_min=min(counts, default=0),
        ref_count_max=max(counts, default=0),
        copies=copies,
        cached_tokens=cached_tokens,
        siblings=siblings,
        is_held=is_held,
    )


def _share_head(bench: Bench) -> _Sharing:
    """Run one request with an empty cache, one while the first still decodes, and one after both."""
    head = bench.prompts.make(bench.config.head_tokens)
    tails = bench.prompts.tails(3, TAIL_TOKENS)
    scheduler = bench.engine.scheduler
    bench.engine.clear_cache()
    with bench.session() as session:
        cold = session.add([*head, *tails[0]], LIVE_TOKENS)
        session.run(until=lambda: bool(cold.token_times))
        live = session.add([*head, *tails[1]], 4)
        session.run(until=lambda: bool(live.token_times))
        tables = [
            request.block_table
            for one in (cold, live)
            if (request := scheduler.requests.get(one.request_id)) is not None
        ]
        common = [mine for mine, other in zip(*tables, strict=False) if mine == other] if len(tables) == 2 else []
        ref_counts = tuple(scheduler.cache.pool.blocks[block_id].ref_count for block_id in common)
        session.run()
        hit = session.add([*head, *tails[2]], 4)
        session.run()
    return _Sharing(cold, live, hit, ref_counts, session.num_copies)


def _run_siblings(bench: Bench) -> SiblingReport:
    config, block_size = bench.config, bench.engine.capacity.block_size
    bench.begin_stage(f"prefix, {config.num_siblings} siblings")
    bench.engine.clear_cache()
    prompt = bench.prompts.make(config.head_tokens)
    with bench.session() as session:
        tracks = [session.add(prompt, 4) for _ in range(config.num_siblings)]
        session.run()
    num_computed = session.num_prefill_tokens
    return SiblingReport(
        num_requests=config.num_siblings,
        prompt_tokens=len(prompt),
        prefill_tokens=num_computed,
        prefill_tokens_unshared=config.num_siblings * len(prompt),
        copies=session.num_copies,
        ttft_max_ms=max(track.ttft_s for track in tracks) * 1000,
        is_held=num_computed <= len(prompt) + (config.num_siblings - 1) * block_size,
    )


def measure_speedup(bench: Bench) -> SpeedupReport:
    """Measure each batch between two single streams, so that both see the same machine state."""
    config = bench.config
    singles: list[Measurement] = []
    batches: list[Measurement] = []
    for number in range(config.rounds):
        name = f"round {number + 1} of {config.rounds}"
        for num_threads in bench.thread_choices:
            bench.begin_stage(f"{name}: one at a time")
            singles.append(bench.measure(1, number, num_threads))
        for clients in config.batches:
            bench.begin_stage(f"{name}: {clients} clients")
            batches.append(bench.measure(clients, number, bench.num_threads))
            bench.begin_stage(f"{name}: one at a time")
            singles.append(bench.measure(1, number, _best(singles).num_threads))
    baseline = _baseline(singles)
    levels = tuple(
        _level([one for one in batches if one.clients == clients], baseline) for clients in bench.config.batches
    )
    num_cached = sum(one.num_cached_tokens for one in (*singles, *batches))
    return SpeedupReport(baseline, levels, (*singles, *batches), num_cached)


def _best(singles: Sequence[Measurement]) -> Measurement:
    return max(singles, key=lambda one: one.tokens_per_s)


def _baseline(singles: Sequence[Measurement]) -> Baseline:
    best = _best(singles)
    by_threads: dict[int, float] = {}
    for one in singles:
        by_threads[one.num_threads] = max(one.tokens_per_s, by_threads.get(one.num_threads, 0.0))
    return Baseline(
        tokens_per_s=best.tokens_per_s,
        decode_tokens_per_s=max(one.decode_tokens_per_s or 0.0 for one in singles),
        median_tokens_per_s=median(one.tokens_per_s for one in singles if one.num_threads == best.num_threads),
        num_threads=best.num_threads,
        best_by_threads=by_threads,
    )


def _level(measurements: Sequence[Measurement], baseline: Baseline) -> Level:
    rates = [one.tokens_per_s for one in measurements]
    rate = median(rates)
    decoding = [one.decode_tokens_per_s for one in measurements if one.decode_tokens_per_s is not None]
    decode_rate = median(decoding) if decoding else None
    return Level(
        clients=measurements[0].clients,
        tokens_per_s=rate,
        decode_tokens_per_s=decode_rate,
        ttft_ms=median(one.ttft_ms for one in measurements),
        ratio=rate / baseline.tokens_per_s,
        ratio_min=min(rates) / baseline.tokens_per_s,
        ratio_max=max(rates) / baseline.tokens_per_s,
        decode_ratio=None if decode_rate is None else decode_rate / baseline.decode_tokens_per_s,
        ratio_to_median=rate / baseline.median_tokens_per_s,
    )


@dataclass(slots=True)
class Load:
    """Requests of one tier, of which at least `num_requests` are outstanding at any time."""

    priority: Priority
    shape: Shape
    num_requests: int
    tracks: list[Track] = field(default_factory=list)
    outstanding: list[Track] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens so far. All of a prompt counts with its first token."""
        return sum(self.shape.prompt_tokens + len(track.tokens) for track in self.tracks if track.tokens)


class Traffic:
    """Single HIGH requests beside loads. Each has its own prompt and salt, so that nothing is cached."""

    def __init__(self, llm: LLM, session: Session, seed: int, *loads: Load) -> None:
        self._session = session
        self._next_id = llm.next_id
        self._prompts = Prompts(llm.text.tokenizer, seed)
        self._random = random.Random(seed)
        self._loads = loads

    def send(self, priority: Priority, shape: Shape) -> Track:
        prompt, salt = self._prompts.draw(shape.prompt_tokens), f"bench {self._next_id()}"
        return self._session.add(prompt, shape.output_tokens, salt=salt, priority=priority)

    def run(self, until: Callable[[], bool]) -> None:
        """Run steps, and replace requests of the loads that have ended."""
        while not until():
            for load in self._loads:
                load.outstanding = [track for track in load.outstanding if not track.is_finished]
                new = [self.send(load.priority, load.shape) for _ in range(load.num_requests - len(load.outstanding))]
                load.outstanding += new
                load.tracks += new
            if self._session.engine.has_work:
                self._session.step()
            else:
                time.sleep(IDLE_S)

    def run_until(self, end_s: float) -> None:
        self.run(lambda: time.perf_counter() >= end_s)

    def high_request(self, shape: Shape = HIGH_SHAPE, *, pause_s: float = 0.0, limit_s: float = inf) -> Track:
        """Run a HIGH request after a pause. It may arrive during a step; after `limit_s` it is left unfinished."""
        due_s = time.perf_counter() + pause_s
        self.run_until(due_s)
        track = self.send(Priority.HIGH, shape)
        track.arrived_s = due_s
        self.run(lambda: track.is_finished or time.perf_counter() > limit_s)
        return track

    def high_requests(self, is_over: Callable[[int, float], bool], limit_s: float = inf) -> list[Sample]:
        """Run requests one after another until `is_over`, which gets their number and the seconds since the start."""
        begun_s = time.perf_counter()
        samples: list[Sample] = []
        while not is_over(len(samples), time.perf_counter() - begun_s):
            track = self.high_request(pause_s=self._random.uniform(0, MAX_PAUSE_S), limit_s=begun_s + limit_s)
            samples.append(_sample(track, begun_s))
        return samples


def _sample(track: Track, phase_s: float) -> Sample:
    times_s = track.token_times or [time.perf_counter()]
    return Sample(track.arrived_s - phase_s, times_s[0] - track.arrived_s, len(track.tokens), times_s[-1] - times_s[0])


def measure_fairness(llm: LLM, config: BenchConfig, progress: Progress) -> FairnessReport:
    """Measure the first three phases. The engine must have room for `MAX_BACKLOG` waiting requests."""
    low_shape = Shape(config.prompt_tokens, config.output_tokens)
    longest = max(sum(low_shape), sum(HIGH_SHAPE))
    if longest > llm.max_model_len:
        raise InvalidRequest(f"fairness needs {longest} tokens of context, and the model has {llm.max_model_len}")
    estimator = StepEstimator()
    progress("fairness: HIGH alone")
    with driven(llm.engine, llm.next_id, estimator) as session:
        traffic = Traffic(llm, session, config.seed)
        traffic.high_requests(lambda number, _: number >= NUM_WARM_UP)
        idle = latency(traffic.high_requests(lambda number, _: number >= NUM_IDLE))
    progress("fairness: HIGH beside a LOW backlog")
    low = Load(Priority.LOW, low_shape, backlog_size(config, idle))
    with driven(llm.engine, llm.next_id, estimator) as session:
        traffic = Traffic(llm, session, config.seed, low)
        traffic.run(lambda: low.num_tokens > 0)
        begun_s = time.perf_counter()
        before = low.num_tokens
        high = traffic.high_requests(lambda _, passed_s: passed_s >= config.seconds, config.seconds + GRACE_S)
        low_rate = (low.num_tokens - before) / (time.perf_counter() - begun_s)
    backlog = backlog_report(config.seconds, low.num_requests, idle, high, low_rate)
    progress("fairness: both tiers saturated")
    seconds = config.seconds / 2
    loads = [Load(tier, HIGH_SHAPE, 2 * config.max_num_seqs) for tier in (Priority.HIGH, Priority.LOW)]
    with driven(llm.engine, llm.next_id, estimator) as session:
        traffic = Traffic(llm, session, config.seed, *loads)
        traffic.run_until(time.perf_counter() + seconds * SETTLE_SHARE)
        counts = [load.num_tokens for load in loads]
        traffic.run_until(time.perf_counter() + seconds)
        high_tokens, low_tokens = (load.num_tokens - count for load, count in zip(loads, counts, strict=True))
    return FairnessReport(idle, backlog, saturated_report(2 * config.max_num_seqs, high_tokens, low_tokens))


def measure_resumed(llm: LLM, seed: int) -> ResumedReport:
    """Measure the last phase, with a KV pool of `POOL_TOKENS`."""
    estimator = StepEstimator()
    idle = [_large_request(llm, estimator, seed, has_low=False) for _ in range(NUM_RESUMED)]
    high = [_large_request(llm, estimator, seed, has_low=True) for _ in range(NUM_RESUMED)]
    return resumed_report(POOL_TOKENS, idle, high)


def _large_request(llm: LLM, estimator: StepEstimator, seed: int, *, has_low: bool) -> Sample:
    """Run a large HIGH request, alone or behind a LOW request that has just resumed."""
    with driven(llm.engine, llm.next_id, estimator) as session:
        traffic = Traffic(llm, session, seed)
        if has_low:
            low = traffic.send(Priority.LOW, LARGE_LOW)
            traffic.run(lambda: bool(low.tokens))
            traffic.high_request(LARGE_HIGH)  # preempts it, and evicts its blocks
            traffic.run(lambda: len(llm.engine.scheduler.running) > 0)
        return _sample(traffic.high_request(LARGE_HIGH), 0.0)


def run_bench(llm: LLM, config: BenchConfig, progress: Progress = lambda *_: None) -> BenchReport:
    """Benchmark a loaded, idle model, all parts except fairness. Empties its prefix cache."""
    _check_fits(llm.engine, config)
    begun_s = time.perf_counter()
    bench = Bench(llm, config, progress)
    bench.warm_up()
    speedup = measure_speedup(bench) if "speedup" in config.parts else None
    prefix = measure_prefix(bench) if "prefix" in config.parts else None
    drafts = measure_drafts(bench) if "drafts" in config.parts else None
    llm.engine.clear_cache()
    return BenchReport(setup_of(llm), config, time.perf_counter() - begun_s, speedup, prefix, None, drafts)


def _check_fits(engine: Engine, config: BenchConfig) -> None:
    """Raise if requests would exceed the context, or would have to wait or be preempted."""
    capacity, max_model_len = engine.capacity, engine.scheduler.max_model_len
    if engine.has_work:
        raise InvalidRequest("engine: it has requests; a benchmark needs an idle engine")
    longest = {
        "speedup": config.prompt_tokens + config.output_tokens,
        "prefix": config.head_tokens + TAIL_TOKENS + LIVE_TOKENS,
        "drafts": 5 * config.prompt_tokens // 2 + config.output_tokens,
    }
    for part, num_tokens in longest.items():
        if part in config.parts and num_tokens > max_model_len:
            raise InvalidRequest(f"{part} needs {num_tokens} tokens of context, and the model has {max_model_len}")
    if config.head_tokens % capacity.block_size:
        raise InvalidRequest(f"head_tokens = {config.head_tokens} is not a multiple of {capacity.block_size = }")
    most = max(config.batches, default=1) if "speedup" in config.parts else 1
    if most > capacity.max_num_seqs:
        raise InvalidRequest(f"clients = {most} is more than max_num_seqs = {capacity.max_num_seqs}")
    num_needed = most * (-(-longest["speedup"] // capacity.block_size) + 1)
    if "prefix" in config.parts:
        num_own = -(-(TAIL_TOKENS + LIVE_TOKENS) // capacity.block_size) + 2
        num_needed = max(num_needed, config.head_tokens // capacity.block_size + config.num_siblings * num_own)
    if "drafts" in config.parts:
        num_needed = max(num_needed, -(-longest["drafts"] // capacity.block_size) + 1)
    if num_needed > capacity.num_blocks - 1:
        raise InvalidRequest(f"num_blocks = {capacity.num_blocks} is too few: the run needs {num_needed + 1}")


def setup_of(llm: LLM) -> Setup:
    capacity, facts = llm.engine.capacity, llm.engine.runner.facts()
    return Setup(
        model=llm.text.name,
        backend=facts.backend,
        device=facts.device,
        dtype=facts.dtype,
        num_threads=facts.num_threads,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=max(
            llm.config.max_num_batched_tokens or capacity.max_num_batched_tokens, capacity.max_num_seqs
        ),
    )
