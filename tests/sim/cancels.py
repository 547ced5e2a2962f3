"""Cancels at any moment of a request, generated from a seed: in the queue, in a prompt, in an answer, with a step in
flight, and after the end.

There is no runner: all tokens are 1. The pools are those of the seeded worlds. The worlds check everything after each
event; this checks only what a cancel may break, and is thirty times faster per cancel.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from quire.core.check import check_scheduler
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Aging, Fair, Fcfs, Policy
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import Priority, SamplingParams
from quire.errors import QueueFull
from tests.sim.world import FAIR, SALTS, TENANTS, Setup

CHECK_EVERY = 200  # steps between two checks of all invariants
DRAIN_EVERY = 1_000  # cancels after which all other requests are cancelled too, and the pools must be full
MAX_ANSWER = 12


class CancelStorm:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.setup = setup = Setup.draw(random, seed)
        self.cache = KVCacheManager(
            setup.num_blocks,
            setup.block_size,
            is_caching=setup.is_caching,
            window=setup.window,
            num_window_blocks=setup.num_window_blocks,
            num_states=setup.num_states,
            num_live_states=setup.num_live_states,
        )
        policy: Policy = Fair() if setup.patience_s == FAIR else Fcfs()
        if isinstance(setup.patience_s, float):
            policy = Aging(setup.patience_s)
        self.scheduler = Scheduler(
            self.cache,
            policy,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_chunk_tokens=setup.max_chunk_tokens,
            max_model_len=setup.max_model_len,
            max_waiting=setup.max_waiting,
        )
        self.live: dict[int, Request] = {}
        self.ended: deque[int] = deque(maxlen=8)
        self.in_flight: deque[StepPlan] = deque()
        self.counts: Counter[str] = Counter()
        self._next_id = 1
        self._now_ns = 0
        self._head = [random.randrange(3) for _ in range(self.scheduler.max_model_len)]

    def run(self, num_cancels: int) -> Counter[str]:
        """Run until so many requests were cancelled. `counts["leaked"]` is the number of units that stayed held."""
        next_drain = DRAIN_EVERY
        num_steps = 0
        while self.counts["cancels"] < num_cancels:
            self._add_some()
            self._cancel_some("before a step")
            self._step()
            num_steps += 1
            if num_steps % CHECK_EVERY == 0:
                check_scheduler(self.scheduler)
            if self.counts["cancels"] >= next_drain:
                next_drain += DRAIN_EVERY
                self._drain()
        self._drain()
        return self.counts

    def _add_some(self) -> None:
        for _ in range(self.random.choice((0, 1, 1, 2, 4))):
            if len(self.live) >= 2 * self.setup.max_num_seqs + 6:
                return
            try:
                request = self._make()
                self.scheduler.add(request, self._now_ns)
            except QueueFull:
                self.counts["refused"] += 1
                return
            self.live[request.request_id] = request

    def _make(self) -> Request:
        random, number = self.random, self._next_id
        self._next_id += 1
        sampling = SamplingParams(max_tokens=random.randint(1, MAX_ANSWER))
        parents = [one for one in self.live.values() if len(one.tokens) < self.scheduler.max_model_len]
        if parents and random.random() < 0.15:
            self.counts["forks"] += 1
            return random.choice(parents).branch(number, sampling)
        longest = min(40, self.scheduler.max_model_len - 1)
        num_shared = random.choice((0, random.randint(0, longest)))
        own = [random.randrange(3) for _ in range(random.randint(0, longest - num_shared))]
        return Request(
            number,
            [*self._head[:num_shared], *own] or [1],
            sampling,
            priority=random.choice(list(Priority)),
            salt=random.choice(SALTS),
            tenant=random.choice(TENANTS),
        )

    def _cancel_some(self, moment: str) -> None:
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            answering = [one for one in self.live.values() if one.num_output_tokens]
            some = answering if answering and self.random.random() < 0.5 else list(self.live.values())
            if some:
                self._cancel(self.random.choice(some), moment)
        if self.ended and self.random.random() < 0.1:  # the end and the cancel have crossed
            self.counts["after the end"] += 1
            assert not self.scheduler.cancel(self.random.choice(self.ended)), "an ended request was cancelled"

    def _cancel(self, request: Request, moment: str) -> None:
        place = "in the queue"
        if request.state is RequestState.RUNNING:
            place = "in the answer" if request.num_output_tokens else "in the prompt"
        self.counts[place] += 1
        self.counts[moment] += 1
        self.counts["cancels"] += 1
        assert self.scheduler.cancel(request.request_id), "a live request could not be cancelled"
        assert not request.block_table, "a cancelled request keeps blocks"
        assert request.state is RequestState.FINISHED
        del self.live[request.request_id]
        self.ended.append(request.request_id)

    def _step(self) -> None:
        self._now_ns += self.random.choice((0, 1_000, 1_000_000, 300_000_000))
        plan = self.scheduler.schedule(self._now_ns)
        if not plan.is_empty:
            self.in_flight.append(plan)
        self._cancel_some("with a step in flight")
        if len(self.in_flight) > (1 if self.setup.is_overlapped else 0) or (plan.is_empty and self.in_flight):
            self._commit()

    def _commit(self) -> None:
        plan = self.in_flight.popleft()
        tokens = tuple((1,) if piece.wants_token else () for piece in plan.slices)
        for update in self.scheduler.commit(plan, StepResult(tokens)):
            if update.finish_reason is not None:
                del self.live[update.request_id]
                self.ended.append(update.request_id)
                self.counts["finished"] += 1

    def _drain(self) -> None:
        """Cancel all other requests, and count what they leave behind."""
        for request in list(self.live.values()):
            self._cancel(request, "all at once")
        while self.in_flight:
            self._commit()
        assert not self.scheduler.has_work
        check_scheduler(self.scheduler)
        self.counts["leaked"] += self.cache.pool.num_usable - self.cache.pool.num_free
        for pool in self.cache.memory.pools[1:]:
            self.counts["leaked"] += pool.num_usable - pool.num_free
        self.counts["drains"] += 1


def run_storm(job: tuple[int, int]) -> Counter[str] | str:
    """Run a storm of (seed, number of cancels). Returns its counts, or what went wrong."""
    seed, num_cancels = job
    try:
        return CancelStorm(seed).run(num_cancels)
    except Exception as error:
        return f"storm {seed}: {type(error).__name__}: {error}"
