"""Admission of waiting requests: prefix sharing, loads from lower levels, free blocks and preemption.

`StepBuilder` is the step that the planner and the admission fill together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from quire.core.cache import FROM_ZERO, NULL_BLOCK_ID, CacheExplanation, Linked, PrefixHit, StopReason
from quire.core.events import Admitted, Observer, Preempted, PrefixHitFound
from quire.core.kv_cache import KVCacheManager
from quire.core.memory import Memory, Pin
from quire.core.policy import Policy, RunningSet, WaitingQueue
from quire.core.request import Request, RequestState
from quire.core.step import BlockCopy, Content, SeqSlice
from quire.core.values import Level, Priority
from quire.errors import InvariantViolation


class StepBuilder:
    """Budget, turns, admissions and slices of the step that the planner builds."""

    __slots__ = (
        "admitted",
        "allotted",
        "awaiting",
        "budget",
        "closed_from",
        "copies",
        "decodes",
        "has_in_flight",
        "left_out",
        "needs",
        "now_ns",
        "num_drafts",
        "pending",
        "rationed",
        "saving",
        "short",
        "slices",
        "victims",
        "wanting",
        "window_copies",
    )

    def __init__(self, now_ns: int, budget: int, *, has_in_flight: bool) -> None:
        self.now_ns = now_ns
        self.budget = budget  # tokens left, not counting one reserved for every running request
        self.has_in_flight = has_in_flight  # the previous step is not committed yet
        self.closed_from: Priority | None = None  # this tier and those below it admit no more requests
        self.rationed: Collection[Priority] = ()  # tiers whose running requests need a turn to be in the step
        # Running requests of each tier that want a turn: for more than the reserved token, or for any token if rationed
        self.wanting: tuple[list[Request], list[Request], list[Request]] = ([], [], [])
        # Request id -> tokens that a turn gave it. Without an entry: one token, or none if rationed
        self.allotted: dict[int, int] = {}
        self.decodes: dict[tuple[Priority, str], int] = {}  # tier and tenant -> tokens that no turn gave
        self.left_out: list[Request] = []  # running requests that have work but got no token
        self.short: set[Priority] = set()  # tiers that wanted more than they got
        self.num_drafts = 0
        self.slices: list[SeqSlice] = []
        self.copies: list[BlockCopy] = []
        self.window_copies: list[BlockCopy] = []
        self.admitted: set[int] = set()  # ids of requests admitted in this step
        self.victims: list[Request] = []  # preempted in this step
        self.needs: dict[Priority, int] = {}  # tokens of the first waiting request of a tier, with a block of new ones
        self.saving: set[Priority] = set()  # tiers with a request that was preempted and has not caught up
        self.awaiting: Priority | None = None  # a request of this tier needs memory of one that is spared
        # Block number -> chain key of a block that running requests compute next -> those requests
        self.pending: dict[int, dict[bytes, list[Request]]] = {}

    def close(self, tiers: Collection[Priority]) -> None:
        """Stop admissions of these tiers and those below.

        Called if a waiting request of these tiers did not fit. A higher tier, whose turn comes later because these
        tiers were owed service, may still admit requests by preemption.
        """
        self.closed_from = min(tiers) if self.closed_from is None else min(self.closed_from, *tiers)

    def is_closed(self, tiers: Collection[Priority]) -> bool:
        return self.closed_from is not None and min(tiers) >= self.closed_from


MARGIN_STEPS = 2  # its last tokens are in flight: it has caught up when they are committed


class Start(NamedTuple):
    """A waiting request that would start as a spared one."""

    request: Request
    start: int  # the tokens before it are cached
    end: int  # it has caught up when it has computed the tokens before this


class GrowthRoom:
    """The spared requests that run, and the blocks that all running requests can need until these have caught up.

    A spared request computes its context again and a block of new tokens, paid by the credit of its tier. Until then no
    waiting request preempts it, but a running one that needs a block takes it from the lowest tier. Therefore
    admissions beside a spared request, and its own, leave free what the running requests can need in the meantime. They
    get a token in each step. How many steps a spared request takes depends on its turns: while room is left, it has the
    usual part of each step; when the room is just enough, it has all the tokens that it can use.
    """

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
        self.spared: list[Request] = []  # the running requests that have started as spared ones

    def forget_ended(self) -> None:
        """Forget requests that have caught up, ended or were preempted."""
        self.spared = [one for one in self.spared if one.state is RequestState.RUNNING and one.is_spared]

    def num_steps(self, start: Start | None = None, *, num_more: int = 0) -> int:
        """Steps until the spared requests and `start` have caught up, beside `num_more` requests. 0: there are none.

        The steps are counted at the highest rate that their turns can have beside the requests that run.
        """
        starts = [Start(one, one.num_planned, one.num_caught_up_at) for one in self.spared if one.is_spared]
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
        if self.spared == [request] and request.is_spared:
            end = request.num_caught_up_at
        return max(-(-end // self._cache.block_size) - len(request.block_table), 0)

    @property
    def is_tight(self) -> bool:
        """Whether the spared requests must compute as fast as they can, before the room for growth is used up."""
        if not self.spared:
            return False
        num_steps = self.num_steps() + 1
        return sum(self.growth(one, num_steps) for one in self._running) > self._cache.pool.num_free

    def concerns(self, request: Request) -> bool:
        """Whether a waiting request could take the memory of a spared one after its start."""
        return any(one.is_spared and one.priority >= request.priority for one in self.spared)


# A request computes after this many waits that brought it no further: what was loaded can be evicted again before it
# starts, if memory is short. Other waits lower the number of copies that are missing, so that they end too.
MAX_LOAD_WAITS = 2


class LoadAdmission:
    """Lets requests wait for loads from lower levels: they return to the queue when their load ends or is late."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._levels = cache.levels
        self._waiting = waiting

    @property
    def has_work(self) -> bool:
        """Whether a load is in flight, or a read that the next step should drop if nothing needs it."""
        return bool(self._levels.loads) or not all(read.is_abandoned for read in self._levels.reads.values())

    def park(self, request: Request, hit: PrefixHit, num_spare: int) -> bool:
        """Let a request that could start now wait for a read or a load that extends its hit.

        What is in host memory is copied to the device; what is on disk is read, and holds nothing on the device.
        Returns False if there is nothing to load, if computing is faster, or if less than `num_spare` blocks would be
        left, and room for the first waiting request of a higher tier.
        """
        reach = self._cache.worthwhile_reach(request, hit, may_read=request.num_load_waits < MAX_LOAD_WAITS)
        if reach is None or self._levels.shortage(reach) + num_spare + self._num_wanted_above(request) > 0:
            return False
        is_first = not request.num_missing_copies
        if not self._is_nearer(request, len(reach.pieces) + len(self._levels.unread(reach))):
            return False
        if is_first:
            request.num_unloaded_tokens = hit.start
        self._waiting.park_for_load(request, self._levels.bring(request, hit, reach).load_id)
        return True

    def _num_wanted_above(self, request: Request) -> int:
        """Blocks for the first waiting request of a higher tier: loads, one after the other, could keep it waiting."""
        head = self._waiting.head([tier for tier in Priority if tier < request.priority])
        return 0 if head is None else len(head[1].tokens) // self._cache.block_size + 1

    @staticmethod
    def _is_nearer(request: Request, num_missing: int) -> bool:
        """Whether a request may wait (again). `num_missing`: reads and copies that it lacks."""
        if request.num_missing_copies and num_missing >= request.num_missing_copies:
            request.num_load_waits += 1
            if request.num_load_waits >= MAX_LOAD_WAITS:
                return False
        request.num_missing_copies = num_missing
        return True

    def finish_read(self, read_id: int, failures: Collection[Content], read_ns: int = 0) -> None:
        """End a read, and send its waiters back to the queue. At their turn, what was read is copied to the device."""
        read = self._levels.reads.get(read_id)
        if read is None:
            return
        self._levels.finish_read(read, failures, read_ns)
        self._waiting.unpark_load(read_id)
        for request in read.users if failures and not read.is_void else ():
            self._give_up(request)

    def finish(self, load_id: int, failures: Collection[Content]) -> None:
        """End a load, and send its waiters back to the queue."""
        load = self._levels.loads.get(load_id)
        if load is None:
            return
        num_tokens, is_whole = self._levels.finish(load, failures)
        source = load.reach.source
        for request in self._waiting.unpark_load(load_id):
            if num_tokens:
                request.num_loaded_tokens += num_tokens
                request.loaded_from = Level.DISK if Level.DISK in (request.loaded_from, source) else Level.HOST
            if not is_whole and not load.is_void:
                self._give_up(request)

    def expire(self, now_ns: int) -> None:
        """Send requests back to the queue whose load takes too long, or is of no use since the cache was cleared."""
        for ended in self._levels.expire(now_ns) if self._levels.levels else ():
            for request in self._waiting.unpark_load(ended.load_id):
                if not ended.is_void:
                    self._give_up(request)

    @staticmethod
    def _give_up(request: Request) -> None:
        """Let a request compute what could not be read or loaded."""
        request.num_load_waits = MAX_LOAD_WAITS
        request.has_failed_load = True

    def note_start(self, request: Request, hit: PrefixHit) -> None:
        """Tell the saves if a request that starts would have used content that was evicted and is in no lower level."""
        if not self._levels.levels or request.num_preemptions or not self._cache.was_evicted(request, hit):
            return
        if self._cache.reach(request, hit) is None:
            self._levels.saves.note_regret()

    # Explanations

    def describe(self, request: Request, hit: PrefixHit, found: CacheExplanation) -> CacheExplanation:
        """Add the levels to the explanation of a hit from which a request starts."""
        if found.num_tokens:
            num_loaded = max(min(request.num_loaded_tokens, found.num_tokens - request.num_unloaded_tokens), 0)
            source = request.loaded_from if num_loaded and request.loaded_from is not None else Level.DEVICE
            found = replace(found, source=source, num_loaded_tokens=num_loaded)
        if found.reason in _FINAL:
            return found
        if request.has_failed_load:
            return replace(found, reason=StopReason.LOAD_FAILED)
        return found if self._cache.reach(request, hit) is None else replace(found, reason=StopReason.NOT_LOADED)

    def foresee(self, request: Request, hit: PrefixHit, found: CacheExplanation) -> CacheExplanation:
        """Explain what a request would reuse if it arrived now, with the loads that it would wait for."""
        if found.num_tokens:
            found = replace(found, source=Level.DEVICE)
        reach = self._cache.worthwhile_reach(request, hit)
        if reach is None:
            is_stored = self._cache.reach(request, hit) is not None
            return replace(found, reason=StopReason.NOT_LOADED) if is_stored else found
        is_complete = reach.start == len(request.tokens) - 1
        reason = StopReason.COMPLETE if is_complete else StopReason.NOT_FOUND
        num_blocks = reach.start // self._cache.block_size
        num_loaded = reach.start - hit.start
        return CacheExplanation(
            reach.start, num_blocks, reach.start, reason, source=reach.source, num_loaded_tokens=num_loaded
        )


# Reasons that do not depend on lower levels: nothing more could be reused, or a running request computes the rest.
_FINAL = (StopReason.COMPLETE, StopReason.IN_FLIGHT, StopReason.OFF)


class Outcome(Enum):
    """What became of a waiting request that was next."""

    ADMITTED = auto()
    PARKED = auto()  # it waits for a load from a lower level
    BLOCKED = auto()  # it does not fit
    UNCOVERED = auto()  # the credit of its tier does not cover what it has to compute again


class _PreemptionPlan(NamedTuple):
    """Pins to drop (oldest first) and requests to preempt so that a waiting request can start."""

    num_pins: int
    victims: list[Request]


Missing = tuple[int, int]  # numbers of blocks and of window blocks that an admission lacks


class _FreedBlocks:
    """Counts the blocks that dropped pins and preempted requests would free for an admission."""

    def __init__(self, memory: Memory, hit: PrefixHit, missing: Missing, spare: Callable[[Request], int]) -> None:
        """`spare`: number of blocks that are left free for a running request."""
        self._spare = spare
        self._debt = memory.windows.debt
        # The request itself will hold the blocks of its hit, so a preemption does not free them.
        self._blocks = _Holders(memory.blocks.blocks, hit.blocks, missing[0])
        self._windows = _Holders(memory.windows.pool.blocks, (hit.continuation or FROM_ZERO).windows, missing[1])

    @property
    def is_enough(self) -> bool:
        return self._blocks.num_missing <= 0 and self._windows.num_missing <= 0

    def preempt(self, victim: Request) -> None:
        self._blocks.drop(victim.block_table, self._spare(victim))
        held = [block_id for block_id in victim.window_table if block_id != NULL_BLOCK_ID]
        self._windows.drop(held, self._debt(victim))

    def unpin(self, pin: Pin) -> None:
        self._blocks.drop([block.block_id for block in pin.held.blocks])
        self._windows.drop([block.block_id for block in pin.held.windows])


class _Holders:
    """Counts references that would be dropped, to find the blocks that lose their last one."""

    def __init__(self, blocks: Sequence[Linked], kept: Iterable[Linked], num_missing: int) -> None:
        self._blocks = blocks
        self._kept = {block.block_id for block in kept}
        self._dropped: Counter[int] = Counter()
        self.num_missing = num_missing

    def drop(self, block_ids: Sequence[int], num_spare: int = 0) -> None:
        """Drop references of blocks, and the need for `num_spare` blocks."""
        dropped, blocks, kept = self._dropped, self._blocks, self._kept
        dropped.update(block_ids)
        num_freed = sum(dropped[block] == blocks[block].ref_count and block not in kept for block in block_ids)
        self.num_missing -= num_freed + num_spare


class Admission:
    """Starts waiting requests, shares cached prefixes with them and preempts running requests for them."""

    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        running: RunningSet,
        waiting: WaitingQueue,
        *,
        room: GrowthRoom,
        max_chunk_tokens: int,
        observe: Observer,
    ) -> None:
        self._cache = cache
        self._room = room
        self._policy = policy
        self._running = running
        self._waiting = waiting
        self._max_chunk_tokens = max_chunk_tokens
        self._observe = observe
        self.loads = LoadAdmission(cache, waiting)
        self._failed_attempt: tuple[int, ...] = ()  # key of the last failed `_plan_preemption`
        self._failed_missing: Missing = (0, 0)

    def explain(self, request: Request, hit: PrefixHit, *, is_started: bool = False) -> CacheExplanation:
        """Explain where a hit ends and why.

        Blocks that other requests are computing now count as in flight. `is_started`: the request starts with this hit;
        otherwise it would first wait for loads from lower levels.
        """
        chain, size = self._cache.chain(request), self._cache.block_size

        def is_in_flight(number: int) -> bool:
            return any(
                owner.num_computed // size <= number < len(owner.tokens) // size
                and owner is not request
                and self._cache.chain(owner).key(number) == chain.key(number)
                for owner in self._running
            )

        found = self._cache.explain(request, hit, is_in_flight)
        return (self.loads.describe if is_started else self.loads.foresee)(request, hit, found)

    # Prefixes in flight

    def note_pending(self, step: StepBuilder, owner: Request) -> None:
        """Record the first full block of known tokens that a running request has yet to compute.

        A request that shares a later block with it shares this block too.
        """
        number = owner.num_computed // self._cache.block_size
        is_known = (number + 1) * self._cache.block_size <= len(owner.tokens)
        if is_known and self.can_share(owner):
            key = self._cache.chain(owner).key(number)
            step.pending.setdefault(number, {}).setdefault(key, []).append(owner)

    def can_share(self, owner: Request) -> bool:
        """Whether the next block of a running request will be published.

        False after a `clear` or a collision.
        """
        return self._cache.can_publish(owner, owner.num_computed // self._cache.block_size)

    def park(self, step: StepBuilder, request: Request) -> bool:
        """Let a request wait for a prefix that a running request is computing.

        Returns False if there is none.
        """
        found = self._find_owner(step, request)
        if found is None:
            return False
        self._waiting.park(request, *found)
        if self._cache.memory.is_hybrid:
            self._cache.memory.note_branch(*found)
        return True

    def _find_owner(self, step: StepBuilder, request: Request) -> tuple[Request, int] | None:
        """The running request that computes a shared prefix, and the length of that prefix in tokens."""
        if request.sampling.prompt_logprobs is not None:
            return None
        parent = request.parent
        if parent is not None and self._is_owner(parent, request):
            num_common = min(len(request.tokens), len(parent.tokens)) - 1
            return (parent, num_common) if parent.num_computed < num_common else None
        if not self._cache.is_caching:
            return None
        chain, size = self._cache.chain(request), self._cache.block_size
        num_full = len(request.tokens) // size
        for number, owners in step.pending.items():
            key = chain.key(number) if number < num_full else b""
            if key not in owners or self._has_passed(request, key, number):
                continue
            for owner in owners[key]:
                if self._is_owner(owner, request):
                    last = min(num_full, len(owner.tokens) // size)
                    return owner, size * chain.num_common(self._cache.chain(owner), number + 1, last)
        return None

    def _has_passed(self, request: Request, key: bytes, number: int) -> bool:
        """Whether a request does not need block `number` to be computed: the cache lets it start after that block."""
        if self._cache.tree.find(key) is None:
            return False
        return not self._cache.memory.is_hybrid or self._cache.match(request).start > number * self._cache.block_size

    def _is_owner(self, owner: Request, request: Request) -> bool:
        return owner.state is RequestState.RUNNING and self._policy.is_ahead(owner, request)

    # Starting a request

    def try_admit(self, step: StepBuilder, request: Request, *, is_owed: bool) -> Outcome:
        """Start a waiting request, or let it wait for a load. If it does not fit, change nothing.

        The request gets blocks for its whole known context at once. One block per running request is left free: running
        requests grow, and without free blocks they would soon preempt the new one. Missing blocks are taken from
        requests that it may preempt. A request that may not preempt leaves a batch row and a block free for each prefix
        waiter. Otherwise all later requests would overtake the waiters.

        `is_owed`: it is the turn of a tier with credit. A request that was preempted then starts only if the credit
        covers what it has to compute again. In other turns it starts anyway, and may be preempted at any time.
        """
        if not all(self._may_preempt(request, victim, step) for victim in step.victims):
            return Outcome.BLOCKED  # only a request that may preempt every victim of this step can still start
        if is_owed and request.num_preemptions and not self._is_covered(request, step):
            return Outcome.UNCOVERED
        is_entitled = any(self._may_preempt(request, running, step) for running in self._running)
        num_kept = 0
        if not is_entitled and self._running:  # else nothing would run while the waiters wait for a disk
            num_kept = min(self._waiting.num_prefix_waiters(request), self._running.max_num_seqs // 2)
        # A request of an owed tier is waiting: free batch rows are reserved for it, and other requests have to preempt.
        may_take_free = step.closed_from is None
        has_preempted = False
        while True:
            victims = [
                running
                for running in self._running
                if self._may_preempt(request, running, step) and running.request_id not in step.admitted
            ]
            has_free_seq = may_take_free and self._running.num_free_seqs > num_kept
            if not victims and step.budget < 1:
                return self._refuse(step, request, num_kept, victims)
            if not has_free_seq and not any(self._may_lose_row(victim) for victim in victims):
                return self._refuse(step, request, num_kept, victims)
            found = self._find_hit(request, step)
            hit, missing = self._find_room(request, found, num_kept)
            if max(missing) <= 0 and has_free_seq:
                # A request for which others were preempted starts at once. If there is no room to copy the tail of its
                # hit, there is none to load it either.
                return self._start(step, request, hit, num_kept, may_load=not has_preempted and hit is found)
            if not victims and self._running and not self._needs_pins(request, hit):
                return self._refuse(step, request, num_kept, victims)
            plan = self._plan_preemption(request, hit, missing, victims, has_free_seq=has_free_seq)
            if plan is None:
                if not self._running and not step.has_in_flight and not self._cache.levels.loads:
                    raise InvariantViolation(f"{request!r} does not fit an empty pool")
                # Preempting all candidates would not free enough: preempt none.
                return self._refuse(step, request, num_kept, victims)
            if step.budget < 1 and not plan.victims:
                return Outcome.BLOCKED  # no tokens are left in this step, and no victim gives any back
            for _ in range(plan.num_pins):
                self._cache.pins.yield_oldest()
            for victim in plan.victims:
                self.preempt(step, victim, request)
            may_take_free = may_take_free or bool(plan.victims)
            has_preempted = has_preempted or bool(plan.victims)

    def _start(self, step: StepBuilder, request: Request, hit: PrefixHit, num_kept: int, *, may_load: bool) -> Outcome:
        """Admit a request that fits, unless it should wait for a load first or no tokens are left in this step."""
        if may_load and self.loads.park(request, hit, num_kept + self._num_spare(request, hit)):
            return Outcome.PARKED
        if step.budget < 1:
            return Outcome.BLOCKED
        self._admit(step, request, hit)
        return Outcome.ADMITTED

    def _refuse(self, step: StepBuilder, request: Request, num_kept: int, victims: list[Request]) -> Outcome:
        """Record whether a request that does not fit would, if spared requests of lower tiers could be preempted."""
        spared = [one for one in self._running if one.is_spared and one.priority > request.priority]
        if spared:
            candidates = [one for one in self._running if one in victims or one in spared]
            found = self._find_hit(request, step)
            hit, missing = self._find_room(request, found, num_kept, is_guarded=False)
            has_free_seq = step.closed_from is None and self._running.num_free_seqs > num_kept
            freed = self._freed_blocks(request, hit, missing, num_steps=0)
            if self._choose_victims(freed, candidates, has_free_seq=has_free_seq) is not None:
                step.awaiting = request.priority if step.awaiting is None else min(step.awaiting, request.priority)
        return Outcome.BLOCKED

    def caught_up_at(self, request: Request) -> int:
        """Number of computed tokens at which a preempted request has made progress: a block more than before."""
        return min(max(request.num_preempted_at, 0) + self._cache.block_size, request.token_limit - 1)

    def _is_covered(self, request: Request, step: StepBuilder) -> bool:
        """Whether the credit of its tier lets a preempted request make progress."""
        hit = self._cache.without_tail(request, self._find_hit(request, step))  # there may be no room to copy the tail
        return self._policy.ledger.covers(request.priority, self.caught_up_at(request) - hit.start)

    def _may_lose_row(self, victim: Request) -> bool:
        """Whether the victim's tier holds more batch rows than its guaranteed number."""
        num_kept = self._policy.num_seqs_kept(victim.priority, self._running.max_num_seqs)
        return self._running.counts[victim.priority] > num_kept

    def _may_preempt(self, request: Request, running: Request, step: StepBuilder) -> bool:
        return self._policy.may_preempt(request, running, step.now_ns)

    def _find_room(
        self, request: Request, hit: PrefixHit, num_kept: int, *, is_guarded: bool = True
    ) -> tuple[PrefixHit, Missing]:
        """The part of a hit to use, and what is then missing.

        `is_guarded`: room for growth is left beside spared requests.
        """
        upto = len(request.tokens)
        missing = self._cache.shortage(request, upto, hit) + self._num_spare(request, hit, is_guarded=is_guarded)
        if missing + num_kept > 0 and hit.tail is not None:
            # The source of a tail copy occupies one more block while the step is in flight.
            hit = self._cache.without_tail(request, hit)
            missing = self._cache.shortage(request, upto, hit) + self._num_spare(request, hit, is_guarded=is_guarded)
        windows = self._cache.memory.windows
        return hit, (
            missing + num_kept,
            windows.shortage(request, hit.continuation or FROM_ZERO, self._running.requests),
        )

    def _num_spare(self, request: Request, hit: PrefixHit, *, is_guarded: bool = True) -> int:
        """Number of blocks to leave free: for the running requests, and for a resumed or guarded request itself."""
        if not self._running:
            return 0
        is_resumed = request.num_preemptions > 0
        num_steps = self._num_guarded_steps(request, hit) if is_guarded else 0
        if not num_steps:
            return len(self._running) * self._num_spare_each(request, hit) + is_resumed
        start = self._spared_start(request, hit)
        end = min(len(request.tokens) + num_steps, request.token_limit - 1)
        if start is not None and not self._room.spared:
            end = start.end
        size = self._cache.block_size
        num_own = max(-(-end // size) - -(-len(request.tokens) // size), is_resumed)
        return sum(self._num_spare_for(one, request, hit, num_steps) for one in self._running) + num_own

    def _num_guarded_steps(self, request: Request, hit: PrefixHit) -> int:
        """Number of steps for which running requests need room to grow, so that they preempt no spared request.

        0: the request would not run beside a spared one whose memory it could take, and would not be spared.
        """
        start = self._spared_start(request, hit)
        if start is None and not self._room.concerns(request):
            return 0
        return self._room.num_steps(start, num_more=1)

    def _spared_start(self, request: Request, hit: PrefixHit) -> Start | None:
        """The start of a request that would be spared: the credit of its tier covers it. None: it would not."""
        end = self.caught_up_at(request)
        is_spared = request.num_preemptions > 0 and self._policy.ledger.covers(request.priority, end - hit.start)
        return Start(request, hit.start, end) if is_spared else None

    def _freed_blocks(self, request: Request, hit: PrefixHit, missing: Missing, num_steps: int) -> _FreedBlocks:
        spare = partial(self._num_spare_for, request=request, hit=hit, num_steps=num_steps)
        return _FreedBlocks(self._cache.memory, hit, missing, spare)

    def _num_spare_for(self, running: Request, request: Request, hit: PrefixHit, num_steps: int) -> int:
        """Number of blocks to leave free for a running request."""
        if not num_steps:
            return self._num_spare_each(request, hit)
        return max(self._room.growth(running, num_steps), 1)

    def _num_spare_each(self, request: Request, hit: PrefixHit) -> int:
        """Number of blocks to leave free for each running request: one, or more beside a resumed request.

        Running requests that need a block while a resumed request computes its context again would preempt it, and all
        of that work would be lost.
        """
        if not request.num_preemptions:
            return 1
        return 1 + (len(request.tokens) - hit.start) // self._max_chunk_tokens // self._cache.block_size

    def _needs_pins(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request could not start on an otherwise empty pool because of the pinned blocks."""
        num_needed = -(-len(request.tokens) // self._cache.block_size) - len(hit.blocks)
        return num_needed > self._cache.pool.num_usable - self._cache.pins.num_blocks

    def _plan_preemption(
        self,
        request: Request,
        hit: PrefixHit,
        missing: Missing,
        victims: list[Request],
        *,
        has_free_seq: bool,
    ) -> _PreemptionPlan | None:
        """Find the fewest pins, then the fewest victims, that free enough for an admission.

        Victims are taken in reverse order of urgency. The search reads every block that the victims hold, so a failure
        is cached until a block is released. A victim that grows in the meantime does not change the result: the blocks
        it takes are those that its preemption would free in addition.
        """
        num_releases, num_steps = self._cache.memory.num_releases, self._num_guarded_steps(request, hit)
        attempt = (request.epoch, num_releases, has_free_seq, num_steps, *[victim.epoch for victim in victims])
        is_known = missing[0] >= self._failed_missing[0] and missing[1] >= self._failed_missing[1]
        if attempt == self._failed_attempt and is_known:
            return None
        freed = self._freed_blocks(request, hit, missing, num_steps)
        plan = self._choose_victims(freed, victims, has_free_seq=has_free_seq)
        if plan is None:
            self._failed_attempt, self._failed_missing = attempt, missing
        return plan

    def _choose_victims(
        self, freed: _FreedBlocks, victims: list[Request], *, has_free_seq: bool
    ) -> _PreemptionPlan | None:
        chosen: list[Request] = []
        candidates = victims[::-1]
        if not has_free_seq and (last := next(filter(self._may_lose_row, candidates), None)) is not None:
            candidates.remove(last)
            chosen.append(last)  # at least one request must give up its batch row
            freed.preempt(last)
        num_pins = 0
        for pin in self._cache.pins:
            if freed.is_enough:
                break
            freed.unpin(pin)
            num_pins += 1
        for victim in candidates:
            if freed.is_enough:
                break
            freed.preempt(victim)
            chosen.append(victim)
        if freed.is_enough and (has_free_seq or chosen):
            return _PreemptionPlan(num_pins, chosen)
        return None

    def _find_hit(self, request: Request, step: StepBuilder) -> PrefixHit:
        hit = self._cache.match(request)
        parent = request.parent
        if parent is None or parent.state is not RequestState.RUNNING or request.sampling.prompt_logprobs is not None:
            return hit
        if self._may_preempt(request, parent, step):
            return hit  # the admission may preempt this parent, so its blocks cannot be used
        fork = self._cache.fork(parent, request)
        return fork if (fork.start, fork.num_tokens) > (hit.start, hit.num_tokens) else hit

    def _admit(self, step: StepBuilder, request: Request, hit: PrefixHit) -> None:
        self.loads.note_start(request, hit)
        is_resumed = request.num_preemptions > 0
        if is_resumed:
            request.num_caught_up_at = self.caught_up_at(request)
            self._policy.ledger.set_aside(request, request.num_caught_up_at - hit.start)
            if request.is_covered:
                self._room.spared.append(request)
        else:
            request.num_cached_tokens = hit.start
            request.cache_explanation = self.explain(request, hit, is_started=True)
        step.copies += self._cache.grow(request, len(request.tokens), hit)
        if hit.num_tokens:
            self._observe(PrefixHitFound(request.request_id, hit.start, hit.num_tokens))
        if self._cache.memory.is_hybrid:
            step.window_copies += self._cache.memory.begin(request, hit)
        self._waiting.remove(request)
        request.urgency = self._policy.urgency(request, step.now_ns)
        request.waited_ns += step.now_ns - request.enqueued_ns
        request.parent = None  # a resumed request finds its blocks through the tree
        step.admitted.add(request.request_id)
        self._running.add(request)
        step.budget -= 1
        self.note_pending(step, request)
        self._observe(Admitted(request.request_id, request.waited_ns, is_resumed))

    def preempt(self, step: StepBuilder, victim: Request, by: Request) -> None:
        """Put a running request back into the queue.

        It keeps its age, and its computed blocks stay in the cache.
        """
        self._observe(Preempted(victim.request_id, by.request_id))
        ledger = self._policy.ledger
        ledger.give_back(victim)
        # Its tier saves credit for it from now on. Otherwise the credit that it gives back would exceed the limit.
        step.needs[victim.priority] = max(
            step.needs.get(victim.priority, 0), len(victim.tokens) + self._cache.block_size
        )
        step.saving.add(victim.priority)
        num_given = step.allotted.pop(victim.request_id, 0)
        ledger.refund(victim, num_given)  # this step does not compute them
        victim.num_preempted_at = max(victim.num_preempted_at, victim.num_computed)
        self._running.vacate(victim)
        victim.num_preemptions += 1
        victim.earlier_waits_ns = victim.waited_ns
        victim.enqueued_ns = step.now_ns
        victim.state = RequestState.WAITING
        self._waiting.push(victim)
        step.victims.append(victim)
        step.budget += max(num_given, 1)
