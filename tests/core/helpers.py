"""Helpers of the core's tests: a scheduler on a fake runner, and short views of plans and pools."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, run_alone
from quire.core.cache import NO_HIT, BlockPool, KVCacheBlock
from quire.core.check import audit_cache
from quire.core.events import Event
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import UNITS, Fair, Ledger, Policy
from quire.core.request import Request
from quire.core.scheduler import Planner, Scheduler
from quire.core.step import StepPlan, StepResult, TokenUpdate
from quire.core.values import Priority, SamplingParams

NS = 1_000_000_000
VOCAB_SIZE = 1000
_T = TypeVar("_T")


def service_bound(ledger: Ledger, priority: Priority, tokens_ahead: int, drain_tokens: int, step_tokens: int) -> int:
    """Starvation bound: the number of tokens computed for all tiers before a waiting request starts.

    `tokens_ahead`: tokens that its own tier computes before it, including its own. `drain_tokens`: other requests may
    hold all batch rows and blocks when its turn comes; this is the number of tokens that they may compute before they
    release them. `step_tokens`: most tokens of a step; the debt of a tier is at most one step.
    """
    share = ledger.shares.get(priority, UNITS - sum(ledger.shares.values()))
    return -(-(tokens_ahead + 2 * step_tokens) * UNITS // share) + drain_tokens


def wait_bound(planner: Planner, num_spared_tokens: int | None = None) -> int:
    """Most steps that the first waiting request of the highest tier waits for memory of lower tiers.

    It is counted from the step on in which the request would fit if all requests of lower tiers were preempted, except
    those of a tier that is owed. `num_spared_tokens`: tokens that spared requests have yet to compute in that step;
    None: the most that the settings allow. They compute known tokens in chunks, and then a block of new ones; with
    guesses, a new token may take two steps. Steps whose tokens other requests use up, or in which others preempt, do
    not count. Without spared requests, it is 3 steps.
    """
    cache = planner._cache
    if num_spared_tokens == 0:
        return 3
    if num_spared_tokens is None:  # NORMAL and LOW save this much at most
        num_spared_tokens = 2 * (planner.max_num_batched_tokens + 2 * (cache.max_model_len + cache.block_size))
    rate = min(planner.max_chunk_tokens, planner.max_num_batched_tokens - planner._running.max_num_seqs)
    rate = min(rate, planner.max_mixed_tokens or rate)
    return -(-num_spared_tokens // max(rate, 1)) + 2 * cache.block_size + 3


def free_ids(pool: BlockPool) -> list[int]:
    """The whole free list, in order of eviction."""
    return [block.block_id for block in pool.free]


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def check_cache(cache: KVCacheManager, held: Iterable[int] = (), roots: Container[bytes] | None = None) -> None:
    """Check pool, tree and pins. `held`: ids of blocks that others than pins hold, one entry per reference."""
    counts = Counter(held)
    holders = [counts[block.block_id] for block in cache.pool.blocks]
    deque(audit_cache(cache, holders, roots), maxlen=0)


def compute(cache: KVCacheManager, request: Request, upto: int | None = None) -> None:
    """Grow, compute and publish a request as steps would, including the tail of its prompt."""
    upto = len(request.tokens) if upto is None else upto
    hit = NO_HIT if request.block_table else cache.match(request)
    cache.settle(cache.grow(request, upto, hit))
    request.num_computed = request.num_planned = upto
    cache.publish(request)
    cache.publish_tail(request)


def make_request(request_id: int, num_tokens: int, *, first: int = 0, max_tokens: int | None = None) -> Request:
    """A request with a prompt of consecutive numbers, so that tests can choose where two prompts diverge."""
    return Request(request_id, range(first, first + num_tokens), SamplingParams(max_tokens=max_tokens))


def pin_tokens(cache: KVCacheManager, pin_id: str, tokens: Iterable[int], salt: str, expires_ns: int) -> int:
    """Pin a prefix that need not be the prompt of a known request."""
    prefix = list(tokens)
    return cache.pin(pin_id, Request(0, prefix, salt=salt), len(prefix), expires_ns)


class Rig:
    """A scheduler on a fake runner, stepped manually, that records all events and updates."""

    def __init__(
        self,
        *,
        num_blocks: int = 33,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        max_chunk_tokens: int = 256,
        max_mixed_tokens: int | None = None,
        policy: Policy | None = None,
        max_waiting: int = 100,
        is_late: bool = True,
        window: int = 0,
        num_window_blocks: int = 0,
        num_states: int = 0,
        **cache_options: Any,
    ) -> None:
        self.events: list[Event] = []
        self.now_ns = 0
        self.window, self.has_states = window, num_states > 0
        memory: dict[str, Any] = {"window": window, "num_window_blocks": num_window_blocks, "num_states": num_states}
        self.cache = KVCacheManager(num_blocks, block_size, **memory, **cache_options)
        self.scheduler = Scheduler(
            self.cache,
            policy or Fair(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_mixed_tokens=max_mixed_tokens,
            max_waiting=max_waiting,
            observe=self.events.append,
        )
        capacity = Capacity(num_blocks, block_size, max_num_seqs, self.scheduler.max_model_len, VOCAB_SIZE, **memory)
        self.runner = FakeRunner(capacity, is_late=is_late)
        self.updates: list[TokenUpdate] = []

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = 8,
        priority: Priority = Priority.NORMAL,
        salt: str = "",
        tenant: str = "",
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(request_id, prompt, sampling, priority=priority, salt=salt, tenant=tenant)
        self.scheduler.add(request, self.now_ns)
        return request

    def launch(self) -> StepPlan:
        """Schedule a step and start it on the runner. `land` commits it."""
        plan = self.scheduler.schedule(self.now_ns)
        if not plan.is_empty:
            self.runner.forward(plan)
            self.runner.sample(None)
        return plan

    def land(self, plan: StepPlan) -> list[TokenUpdate]:
        updates = self.scheduler.commit(plan, self.runner.collect())
        self.updates += updates
        return updates

    def step(self) -> StepPlan:
        plan = self.launch()
        if not plan.is_empty:
            self.land(plan)
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until all requests have ended. Returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"requests have not ended after {max_steps} steps")

    def output_alone(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The answer of a request if it is the only one."""
        return run_alone(
            prompt,
            sampling,
            sampling.max_tokens or 0,
            block_size=self.cache.block_size,
            vocab_size=VOCAB_SIZE,
            window=self.window,
            has_states=self.has_states,
        )

    def happened(self, kind: type[_T]) -> list[_T]:
        return [event for event in self.events if isinstance(event, kind)]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(request, start, length) of every slice."""
    return [(piece.request_id, piece.start, piece.length) for piece in plan.slices]


def answer(plan: StepPlan, token: int = 1) -> StepResult:
    return StepResult(tuple((token,) if piece.wants_token else () for piece in plan.slices))
