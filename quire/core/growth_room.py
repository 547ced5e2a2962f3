"""Room for running requests to grow beside spared ones, so that they do not take the memory of these.

A spared request computes its context again and a block of new tokens, paid by the credit of its tier. Until then no
waiting request preempts it, but a running one that needs a block takes it from the lowest tier. Therefore admissions
beside a spared request, and its own, leave free what the running requests can need in the meantime. They get a token in
each step. How many steps a spared request takes depends on its turns: while room is left, it has the usual part of each
step; when the room is just enough, it has all the tokens that it can use.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request, RequestState
from quire.core.running import RunningSet

MARGIN_STEPS = 2  # its last tokens are in flight: it has caught up when they are committed


class Start(NamedTuple):
    """A waiting request that would start as a spared one."""

    request: Request
    start: int  # the tokens before it are cached
    end: int  # it has caught up when it has computed the tokens before this


class GrowthRoom:
    """The spared requests that run, and the blocks that all running requests can need until these have caught up."""

    def __init__(
        self,
        cache: KVCacheManager,
        running: RunningSet,
        *,
        max_chunk_tokens: int,
        max_num_batched_tokens: int,
        max_mixed_tokens: int | None,
    ) -> None:
        self._cache = cache
        self._running = running
        self._max_chunk_tokens = max_chunk_tokens
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_mixed_tokens = max_mixed_tokens
        self._spared: list[Request] = []

    @property
    def has_spared(self) -> bool:
        return bool(self._spared)

    def begin_step(self) -> None:
        """Forget requests that have caught up, ended or were preempted."""
        if self._spared:
            self._spared = [one for one in self._spared if one.state is RequestState.RUNNING and one.is_spared]

    def add(self, request: Request) -> None:
        """Record a request that has started as a spared one."""
        self._spared.append(request)

    def num_steps(self, start: Start | None = None, *, num_more: int = 0) -> int:
        """Steps until the spared requests and `start` have caught up, beside `num_more` requests. 0: there are none.

        The steps are counted at the highest rate that their turns can have beside the requests that run.
        """
        starts = [Start(one, one.num_planned, one.num_caught_up_at) for one in self._spared if one.is_spared]
        if start is not None:
            starts.append(start)
        if not starts:
            return 0
        budget = self._max_num_batched_tokens - len(self._running) - num_more
        if self._max_mixed_tokens is not None:
            budget = min(budget, self._max_mixed_tokens)
        rate = min(self._max_chunk_tokens, 1 + max(budget, 0))
        num_steps = sum(-(-max(len(request.tokens) - start, 0) // rate) for request, start, _ in starts)
        # New tokens come one by one; if the request is held for guesses, each takes two steps.
        num_new = max(end - max(len(request.tokens), start) for request, start, end in starts)
        return num_steps + 2 * max(num_new, 0) + MARGIN_STEPS

    def growth(self, request: Request, num_steps: int) -> int:
        """Blocks that a running request can need in `num_steps` steps, in which the spared ones catch up."""
        end = min(request.num_tokens + num_steps, request.token_limit - 1)
        if self._spared == [request] and request.is_spared:
            end = request.num_caught_up_at
        return max(-(-end // self._cache.block_size) - len(request.block_table), 0)

    @property
    def is_tight(self) -> bool:
        """Whether the spared requests must compute as fast as they can, before the room for growth is used up."""
        if not self._spared:
            return False
        num_steps = self.num_steps() + 1
        return sum(self.growth(one, num_steps) for one in self._running) > self._cache.pool.num_free

    def concerns(self, request: Request) -> bool:
        """Whether a waiting request could take the memory of a spared one after its start."""
        return any(one.is_spared and one.priority >= request.priority for one in self._spared)
