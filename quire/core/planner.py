"""One pass over everyone: who computes what in the next step, who begins, who has to stand back.

First prompts and admissions, in the order of the policy's key: requests in prefill and requests that wait, merged,
share what the step's token budget has beyond one token for each who runs. Then everyone who runs, most urgent first,
gets the blocks for the next token; victims are taken from the back, so nobody who is in the plan already can be one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from quire.core.events import Admitted, Observer, Preempted, PrefixWaited, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Policy
from quire.core.prefix import CacheExplanation, PrefixHit
from quire.core.request import Request, RequestState
from quire.core.running import RunningSet
from quire.core.step import BlockCopy, SeqSlice
from quire.core.waiting import Key, WaitingQueue
from quire.errors import InvalidRequest, InvariantViolation

MAX_PREFIX_WAITERS = 1024  # stepped over in one pass, at a few microseconds each; beyond it nobody is admitted


class _Way(NamedTuple):
    """What has to go for an admission."""

    num_pins: int
    victims: list[Request]


class StepDraft:
    """A plan in the making."""

    __slots__ = (
        "admitted",
        "budget",
        "copies",
        "has_in_flight",
        "now_ns",
        "pending",
        "shares",
        "skipped",
        "slices",
        "victims",
    )

    def __init__(self, now_ns: int, budget: int, *, has_in_flight: bool) -> None:
        self.now_ns = now_ns
        self.budget = budget  # tokens left for prompts; every running request has one reserved, so no decode waits
        self.has_in_flight = has_in_flight  # a step before this one is not committed yet
        self.shares: dict[int, int] = {}  # request in prefill -> tokens it may compute
        self.slices: list[SeqSlice] = []
        self.copies: list[BlockCopy] = []
        self.admitted: set[int] = set()  # in this step
        self.victims: list[Request] = []  # preempted in this step
        # Block number -> chain key of a block that someone is to compute next -> the policy's key of the first of them
        self.pending: dict[int, dict[bytes, Key]] = {}
        self.skipped: list[Request] = []  # wait for a prefix in flight


class Planner:
    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        running: RunningSet,
        waiting: WaitingQueue,
        *,
        max_step_tokens: int,
        max_chunk_tokens: int,
        observe: Observer = ignore,
    ) -> None:
        if max_step_tokens < running.max_seqs:
            raise InvalidRequest(
                f"{max_step_tokens = } is less than max_seqs = {running.max_seqs}: every running request needs a token"
            )
        if max_chunk_tokens < 1:
            raise InvalidRequest(f"{max_chunk_tokens = } is less than 1")
        self._cache = cache
        self._policy = policy
        self._running = running
        self._waiting = waiting
        self.max_step_tokens = max_step_tokens
        self.max_chunk_tokens = max_chunk_tokens
        self._observe = observe
        self._failed_attempt: tuple[int, ...] = ()  # of `_find_way`
        self._failed_missing = 0

    def draft(self, now_ns: int, *, has_in_flight: bool) -> StepDraft:
        """Decide one step. Requests are admitted, preempted and advanced accordingly."""
        step = StepDraft(now_ns, self.max_step_tokens - len(self._running), has_in_flight=has_in_flight)
        self._share_prompts(step)
        for request in step.skipped:
            self._waiting.push(request)
        running, index = self._running.requests, 0
        while index < len(running):
            if self._plan(step, running[index]):
                index += 1
        return step

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

    # Prompts: those being computed and those that wait, merged by key

    def _share_prompts(self, step: StepDraft) -> None:
        prefills = [(self._key(r), r) for r in self._running if len(r.tokens) - r.num_computed > 1]
        prefills.sort(key=itemgetter(0), reverse=True)  # the first is at the end
        while (first := self._waiting.head()) is not None:
            key, head = first
            while prefills and prefills[-1][0] < key:
                self._continue_prompt(step, prefills.pop()[1])
            if len(step.skipped) >= MAX_PREFIX_WAITERS:
                break
            if self._awaits_prefix(step, head, key):
                self._skip(step, head)
            elif not self._try_admit(step, head):
                break  # nobody passes a head that does not fit
        while prefills:
            self._continue_prompt(step, prefills.pop()[1])

    def _key(self, request: Request) -> Key:
        return (self._policy.key(request), request.sequence)

    def _continue_prompt(self, step: StepDraft, request: Request) -> None:
        if request.state is RequestState.RUNNING:  # and not preempted just now
            self._share(step, request, len(request.tokens) - request.num_planned)
            self._note_pending(step, request)

    def _share(self, step: StepDraft, request: Request, num_wanted: int) -> None:
        """Let a prompt have as much of the budget as it wants and may; one token is its own."""
        if num_wanted > 1:
            extra = min(num_wanted - 1, step.budget, self.max_chunk_tokens - 1)
            step.budget -= extra
            step.shares[request.request_id] = 1 + extra

    # Everyone who runs

    def _plan(self, step: StepDraft, request: Request) -> bool:
        """Give a running request its slice. False if it had to preempt itself."""
        start = request.num_planned
        # The last token a request may have needs no KV: nothing is computed after it.
        length = min(len(request.tokens) + request.num_in_flight, request.token_limit - 1) - start
        if length <= 0:
            return True
        if length > 1:
            length = min(length, step.shares.get(request.request_id, 1))
        if start + length > len(request.block_table) * self._cache.block_size:
            if not self._make_room(step, request, start + length):
                return request.state is RequestState.RUNNING
            self._cache.grow(request, start + length)
        self._add_slice(step, request, start, length)
        return True

    def _add_slice(self, step: StepDraft, request: Request, start: int, length: int) -> None:
        tokens, end = request.tokens, start + length
        num_known = len(tokens)
        wants_token = end >= num_known
        if wants_token:
            request.num_in_flight += 1
        request.num_planned = end
        assert request.slot is not None
        step.slices.append(
            SeqSlice(
                request.request_id,
                request.epoch,
                request.slot,
                tokens[start:end] if start < num_known else (),
                start,
                length,
                request.block_table,
                tokens,
                wants_token,
                request.sampling,
                request.num_prompt_tokens,
            )
        )

    def _make_room(self, step: StepDraft, request: Request, upto: int) -> bool:
        """Free the blocks a running request needs: pins yield first, then whoever stands last. False if in vain."""
        while self._cache.shortage(request, upto) > 0:
            if self._cache.pins.yield_oldest():
                continue
            victim = self._running.requests[-1]
            if victim is request and len(self._running) == 1:
                if not step.has_in_flight:
                    raise InvariantViolation(f"{request!r} runs alone and cannot grow to {upto} tokens")
                return False  # copies in flight hold the rest; their commit frees it
            self._preempt(step, victim, request)
            if victim is request:
                return False
        return True

    # Admission

    def _awaits_prefix(self, step: StepDraft, request: Request, key: Key) -> bool:
        """Whether someone ahead of this request is computing what both need.

        Stateless: asked anew in every pass, so it is simply false once the owner is done, preempted or gone.
        """
        if request.sampling.prompt_logprobs is not None:
            return False
        parent = request.parent
        if parent is not None and parent.state is RequestState.RUNNING and self._key(parent) < key:
            return parent.num_computed < min(len(request.tokens), len(parent.tokens)) - 1
        if not self._cache.is_caching:
            return False
        chain, num_full = self._cache.chain(request), len(request.tokens) // self._cache.block_size
        for number, owners in step.pending.items():
            if number < num_full:
                name = chain.key(number)
                if name in owners and owners[name] < key and self._cache.tree.standing(name) is None:
                    return True
        return False

    def _note_pending(self, step: StepDraft, owner: Request) -> None:
        """Remember the first full block of known tokens that a running request has still to compute.

        Who shares a later one with it shares this one too.
        """
        number = owner.num_computed // self._cache.block_size
        is_known = (number + 1) * self._cache.block_size <= len(owner.tokens)
        if is_known and self._cache.can_publish(owner, number):
            owners, key = step.pending.setdefault(number, {}), self._key(owner)
            name = self._cache.chain(owner).key(number)
            owners[name] = min(key, owners.get(name, key))

    def _skip(self, step: StepDraft, request: Request) -> None:
        self._waiting.remove(request)
        step.skipped.append(request)
        if not request.is_prefix_waiting:
            request.is_prefix_waiting = True
            self._observe(PrefixWaited(request.request_id))

    def _try_admit(self, step: StepDraft, request: Request) -> bool:
        """Start a waiting request, or leave everything as it is.

        It gets blocks for its whole known context at once, and leaves one for each request that runs: they all grow,
        and would preempt it soon. What it lacks it may take from less urgent ones of lower tiers. Who may not preempt
        leaves a slot and a block for those who stepped aside for a prefix, or all who come later would pass them.
        """
        may_preempt, now_ns = self._policy.may_preempt, step.now_ns
        if not all(may_preempt(request, victim, now_ns) for victim in step.victims):
            return False  # no ordinary admission in a step that preempted
        is_entitled = any(may_preempt(request, running, now_ns) for running in self._running)
        num_kept = 0 if is_entitled else min(len(step.skipped), self._running.max_seqs // 2)
        while True:
            victims = [
                running
                for running in self._running
                if may_preempt(request, running, now_ns) and running.request_id not in step.admitted
            ]
            has_slot = self._running.num_free_slots > num_kept
            if not victims and (step.budget < 1 or not has_slot):
                return False
            hit = self._find_hit(request, now_ns)
            hit, missing = self._find_room(request, hit, len(self._running) + num_kept)
            if missing <= 0 and has_slot:
                if step.budget < 1:
                    return False
                self._admit(step, request, hit)
                return True
            if not victims and self._running and not self._needs_pins(request, hit):
                return False
            way = self._find_way(request, hit, missing, victims, has_slot=has_slot)
            if way is None:
                if not self._running and not step.has_in_flight:
                    raise InvariantViolation(f"{request!r} does not fit an empty pool")
                return False  # all that may go would not be enough: leave it alone
            for _ in range(way.num_pins):
                self._cache.pins.yield_oldest()
            for victim in way.victims:
                self._preempt(step, victim, request)

    def _find_room(self, request: Request, hit: PrefixHit, spare: int) -> tuple[PrefixHit, int]:
        """What of a hit to use, and how many blocks are then missing for the rest."""
        upto = len(request.tokens)
        missing = self._cache.shortage(request, upto, hit) + spare
        if missing > 0 and hit.tail is not None:
            hit = hit.without_tail()  # a tail to copy from costs a block more while the step is in flight
            missing = self._cache.shortage(request, upto, hit) + spare
        return hit, missing

    def _needs_pins(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request could not begin though everyone else were gone, as long as the pins stay."""
        num_needed = -(-len(request.tokens) // self._cache.block_size) - len(hit.blocks)
        return num_needed > self._cache.pool.num_usable - self._cache.pins.num_blocks

    def _find_way(
        self, request: Request, hit: PrefixHit, missing: int, victims: list[Request], *, has_slot: bool
    ) -> _Way | None:
        """The fewest pins, and then the fewest victims from the back, without which an admission fits.

        That takes a look at every block they hold, so a failure is remembered until something is released: whoever
        grows meanwhile takes as much as it could give.
        """
        attempt = (request.epoch, len(victims), self._cache.pool.num_releases)
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
        candidates = iter(reversed(victims))
        if not has_slot and (last := next(candidates, None)) is not None:
            chosen.append(last)  # someone has to leave a slot; perhaps that is enough
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
        if missing <= 0 and (has_slot or chosen):
            return _Way(num_pins, chosen)
        self._failed_attempt, self._failed_missing = attempt, num_missing
        return None

    def _find_hit(self, request: Request, now_ns: int) -> PrefixHit:
        hit = self._cache.match(request)
        parent = request.parent
        if parent is None or parent.state is not RequestState.RUNNING or request.sampling.prompt_logprobs is not None:
            return hit
        if self._policy.may_preempt(request, parent, now_ns):
            return hit  # a parent that may have to go is nothing to build on
        fork = self._cache.fork(parent, request)
        return fork if fork.num_tokens > hit.num_tokens else hit

    def _admit(self, step: StepDraft, request: Request, hit: PrefixHit) -> None:
        is_resumed = request.num_preemptions > 0
        if not is_resumed:
            request.num_cached_tokens = hit.num_tokens
            request.cache_explanation = self.explain(request, hit)
        step.copies += self._cache.grow(request, len(request.tokens), hit)
        self._waiting.remove(request)
        request.urgency = self._policy.urgency(request, step.now_ns)
        request.waited_ns += step.now_ns - request.enqueued_ns
        request.parent = None  # a resumed request finds its blocks through the tree
        request.is_prefix_waiting = False
        step.admitted.add(request.request_id)
        slot = self._running.add(request)
        step.budget -= 1
        self._share(step, request, len(request.tokens) - hit.num_tokens)
        self._note_pending(step, request)
        self._observe(Admitted(request.request_id, request.priority, slot, request.waited_ns, is_resumed))

    def _preempt(self, step: StepDraft, victim: Request, by: Request) -> None:
        """Put a running request back into the queue, with the age it had. Its computed blocks stay findable."""
        self._observe(Preempted(victim.request_id, victim.priority, by.request_id, victim.num_computed))
        self._running.vacate(victim)
        victim.num_preemptions += 1
        victim.earlier_waits_ns = victim.waited_ns
        victim.enqueued_ns = step.now_ns
        victim.state = RequestState.WAITING
        self._waiting.push(victim)
        step.victims.append(victim)
        step.budget += step.shares.pop(victim.request_id, 1)
