"""Admission: which waiting request starts in a step, what it shares, and which requests are preempted for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from quire.core.draft import StepDraft
from quire.core.events import Admitted, Observer, Preempted, PrefixWaited
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Policy
from quire.core.prefix import CacheExplanation, PrefixHit
from quire.core.request import Request, RequestState
from quire.core.running import RunningSet
from quire.core.waiting import WaitingQueue
from quire.errors import InvariantViolation

# A resumed request whose blocks were lost is spared until it has computed this many new tokens. Otherwise it could
# spend all of its tier's share on the same prompt, again and again.
MAX_SPARED_TOKENS = 32


class _Way(NamedTuple):
    """What has to go for an admission."""

    num_pins: int
    victims: list[Request]


class Admission:
    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        running: RunningSet,
        waiting: WaitingQueue,
        *,
        max_chunk_tokens: int,
        observe: Observer,
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._running = running
        self._waiting = waiting
        self._max_chunk_tokens = max_chunk_tokens
        self._observe = observe
        self._failed_attempt: tuple[int, ...] = ()  # of `_find_way`
        self._failed_missing = 0

    def explain(self, request: Request, hit: PrefixHit) -> CacheExplanation:
        """Why this hit goes no further; what others are computing at this moment counts as in flight."""
        chain, size = self._cache.chain(request), self._cache.block_size

        def is_in_flight(number: int) -> bool:
            return any(
                owner.num_computed // size <= number < len(owner.tokens) // size
                and owner is not request
                and self._cache.chain(owner).key(number) == chain.key(number)
                for owner in self._running
            )

        return self._cache.explain(request, hit, is_in_flight)

    # Prefixes in flight

    def note_pending(self, step: StepDraft, owner: Request) -> None:
        """Remember the first full block of known tokens that a running request has still to compute.

        A request that shares a later block with it shares this one too.
        """
        number = owner.num_computed // self._cache.block_size
        is_known = (number + 1) * self._cache.block_size <= len(owner.tokens)
        if is_known and self.can_share(owner):
            name = self._cache.chain(owner).key(number)
            step.pending.setdefault(number, {}).setdefault(name, []).append(owner)

    def can_share(self, owner: Request) -> bool:
        """Whether the next block of a running request will be published: not after a `clear`, or a collision."""
        return self._cache.can_publish(owner, owner.num_computed // self._cache.block_size)

    def park(self, step: StepDraft, request: Request) -> bool:
        """Let a request wait for a prefix that a running one is computing. False if there is none."""
        found = self._find_owner(step, request)
        if found is None:
            return False
        self._waiting.park(request, *found)
        if not request.is_prefix_waiting:
            request.is_prefix_waiting = True
            self._observe(PrefixWaited(request.request_id))
        return True

    def _find_owner(self, step: StepDraft, request: Request) -> tuple[Request, int] | None:
        """Who computes what this request needs, and how many tokens it has to compute until both have it."""
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
            name = chain.key(number) if number < num_full else b""
            if name not in owners or self._cache.tree.standing(name) is not None:
                continue
            for owner in owners[name]:
                if self._is_owner(owner, request):
                    last = min(num_full, len(owner.tokens) // size)
                    return owner, size * chain.num_common(self._cache.chain(owner), number + 1, last)
        return None

    def _is_owner(self, owner: Request, request: Request) -> bool:
        return owner.state is RequestState.RUNNING and self._policy.is_ahead(owner, request)

    # Starting a request

    def try_admit(self, step: StepDraft, request: Request) -> bool:
        """Start a waiting request, or leave everything as it is.

        It gets blocks for its whole known context at once, and leaves one for each running request: they all grow, and
        would preempt it soon. What it lacks it may take from requests that it may preempt. A request that may not
        preempt leaves a place and a block for those that wait for a prefix, or all later ones would overtake them.
        """
        if not all(self._may_preempt(request, victim, step) for victim in step.victims):
            return False  # no ordinary admission in a step that preempted
        is_entitled = any(self._may_preempt(request, running, step) for running in self._running)
        num_kept = 0
        if not is_entitled:
            num_kept = min(self._waiting.num_prefix_waiters(request), self._running.max_num_seqs // 2)
        # A request of a tier that is owed waits for a place: what is free is for it, and others have to preempt.
        may_take_free = step.closed_from is None
        while True:
            victims = [
                running
                for running in self._running
                if self._may_preempt(request, running, step)
                and not running.is_spared
                and running.request_id not in step.admitted
            ]
            has_free_seq = may_take_free and self._running.num_free_seqs > num_kept
            if not victims and step.budget < 1:
                return False
            if not has_free_seq and not any(self._may_lose_place(victim) for victim in victims):
                return False
            hit = self._find_hit(request, step)
            hit, missing = self._find_room(request, hit, num_kept)
            if missing <= 0 and has_free_seq:
                if step.budget < 1:
                    return False
                self._admit(step, request, hit)
                return True
            if not victims and self._running and not self._needs_pins(request, hit):
                return False
            way = self._find_way(request, hit, missing, victims, has_free_seq=has_free_seq)
            if way is None:
                if not self._running and not step.has_in_flight:
                    raise InvariantViolation(f"{request!r} does not fit an empty pool")
                return False  # all that may go would not be enough: leave it alone
            for _ in range(way.num_pins):
                self._cache.pins.yield_oldest()
            for victim in way.victims:
                self.preempt(step, victim, request)
            may_take_free = may_take_free or bool(way.victims)

    def _may_lose_place(self, victim: Request) -> bool:
        """Whether its tier holds more places than it keeps."""
        num_kept = self._policy.num_seqs_kept(victim.priority, self._running.max_num_seqs)
        return self._running.counts[victim.priority] > num_kept

    def _may_preempt(self, request: Request, running: Request, step: StepDraft) -> bool:
        return self._policy.may_preempt(request, running, step.now_ns)

    def _find_room(self, request: Request, hit: PrefixHit, num_kept: int) -> tuple[PrefixHit, int]:
        """What of a hit to use, and how many blocks are then missing for the rest."""
        upto = len(request.tokens)
        missing = self._cache.shortage(request, upto, hit) + self._num_spare(request, hit) + num_kept
        if missing > 0 and hit.tail is not None:
            hit = hit.without_tail()  # a tail to copy from costs a block more while the step is in flight
            missing = self._cache.shortage(request, upto, hit) + self._num_spare(request, hit) + num_kept
        return hit, missing

    def _num_spare(self, request: Request, hit: PrefixHit) -> int:
        """Blocks to leave for the running requests: one each, or what they need until a resumed one has caught up.

        Until then it cannot be preempted, and a running request that found no block would have to wait for it.
        """
        num_steps = 0
        if request.num_preemptions:
            num_steps = (len(request.tokens) - hit.num_tokens) // self._max_chunk_tokens
        return len(self._running) * (1 + num_steps // self._cache.block_size)

    def _needs_pins(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request could not begin though all others were gone, as long as the pins stay."""
        num_needed = -(-len(request.tokens) // self._cache.block_size) - len(hit.blocks)
        return num_needed > self._cache.pool.num_usable - self._cache.pins.num_blocks

    def _find_way(
        self, request: Request, hit: PrefixHit, missing: int, victims: list[Request], *, has_free_seq: bool
    ) -> _Way | None:
        """The fewest pins, and then the fewest victims from the back, without which an admission fits.

        That takes a look at every block they hold, so a failure is remembered until something is released: a request
        that grows meanwhile takes as much as it could give.
        """
        attempt = (request.epoch, self._cache.pool.num_releases, has_free_seq, *[victim.epoch for victim in victims])
        if attempt == self._failed_attempt and missing >= self._failed_missing:
            return None
        num_missing = missing
        blocks = self._cache.pool.blocks
        kept = {block.block_id for block in hit.blocks}  # freed or not, these are the request's own
        holders: Counter[int] = Counter()

        def count_freed(block_ids: Iterable[int]) -> int:
            holders.update(block_ids)
            return sum(holders[block] == blocks[block].ref_count and block not in kept for block in block_ids)

        chosen: list[Request] = []
        candidates = victims[::-1]
        if not has_free_seq and (last := next(filter(self._may_lose_place, candidates), None)) is not None:
            candidates.remove(last)
            chosen.append(last)  # one request must give up its place; perhaps that is enough
            missing -= count_freed(last.block_table) + 1  # and the block it need not be left
        num_pins = 0
        for pin in self._cache.pins:
            if missing <= 0:
                break
            missing -= count_freed([block.block_id for block in pin.blocks])
            num_pins += 1
        for victim in candidates:
            if missing <= 0:
                break
            missing -= count_freed(victim.block_table) + 1
            chosen.append(victim)
        if missing <= 0 and (has_free_seq or chosen):
            return _Way(num_pins, chosen)
        self._failed_attempt, self._failed_missing = attempt, num_missing
        return None

    def _find_hit(self, request: Request, step: StepDraft) -> PrefixHit:
        hit = self._cache.match(request)
        parent = request.parent
        if parent is None or parent.state is not RequestState.RUNNING or request.sampling.prompt_logprobs is not None:
            return hit
        if self._may_preempt(request, parent, step):
            return hit  # a parent that may have to go is nothing to build on
        fork = self._cache.fork(parent, request)
        return fork if fork.num_tokens > hit.num_tokens else hit

    def _admit(self, step: StepDraft, request: Request, hit: PrefixHit) -> None:
        is_resumed = request.num_preemptions > 0
        if is_resumed:
            num_lost = len(request.tokens) - hit.num_tokens  # computed again
            request.num_spared_until = request.num_preempted_at + min(num_lost, MAX_SPARED_TOKENS)
        else:
            request.num_cached_tokens = hit.num_tokens
            request.cache_explanation = self.explain(request, hit)
        step.copies += self._cache.grow(request, len(request.tokens), hit)
        self._waiting.remove(request)
        request.urgency = self._policy.urgency(request, step.now_ns)
        request.waited_ns += step.now_ns - request.enqueued_ns
        request.parent = None  # a resumed request finds its blocks through the tree
        request.is_prefix_waiting = False
        step.admitted.add(request.request_id)
        batch_index = self._running.add(request)
        step.budget -= 1
        self.note_pending(step, request)
        self._observe(Admitted(request.request_id, request.priority, batch_index, request.waited_ns, is_resumed))

    def preempt(self, step: StepDraft, victim: Request, by: Request) -> None:
        """Put a running request back into the queue, with the age it had. Its computed blocks stay findable."""
        self._observe(Preempted(victim.request_id, victim.priority, by.request_id, victim.num_computed))
        victim.num_preempted_at = max(victim.num_preempted_at, victim.num_computed)
        self._running.vacate(victim)
        victim.num_preemptions += 1
        victim.earlier_waits_ns = victim.waited_ns
        victim.enqueued_ns = step.now_ns
        victim.state = RequestState.WAITING
        self._waiting.push(victim)
        step.victims.append(victim)
        step.budget += max(step.allotted.pop(victim.request_id, 1), 1)
