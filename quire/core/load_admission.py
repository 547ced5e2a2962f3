"""Requests that wait for loads from lower tiers: they return to the queue when their load ends or is late."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.core.events import Observer, PrefixLoaded
from quire.core.kv_cache import KVCacheManager
from quire.core.loads import PrefixLoad
from quire.core.prefix import CacheExplanation, PrefixHit, StopReason
from quire.core.reads import PrefixRead
from quire.core.request import Priority, Request
from quire.core.step import Content, Tier
from quire.core.waiting import WaitingQueue

# A request computes after this many waits that brought it no further: what was loaded can be evicted again before it
# starts, if memory is short. Other waits lower the number of copies that are missing, so that they end too.
MAX_LOAD_WAITS = 2


class LoadAdmission:
    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue, observe: Observer) -> None:
        self._cache = cache
        self._waiting = waiting
        self._observe = observe

    @property
    def has_any(self) -> bool:
        """Whether loads are in flight, which hold blocks until their copies are made."""
        return self._cache.tiers is not None and len(self._cache.tiers.loads) > 0

    @property
    def has_work(self) -> bool:
        """Whether a load is in flight, or a read that the next step should drop if nothing needs it."""
        tiers = self._cache.tiers
        return tiers is not None and (self.has_any or not all(read.is_abandoned for read in tiers.reads))

    def park(self, request: Request, hit: PrefixHit, num_spare: int) -> bool:
        """Let a request that could start now wait for a read or a load that extends its hit.

        What is in host memory is copied to the device; what is on disk is read, and holds nothing on the device.
        Returns False if there is nothing to load, if computing is faster, or if less than `num_spare` blocks would be
        left, and room for the first waiting request of a higher tier.
        """
        tiers = self._cache.tiers
        if tiers is None:
            return False
        reach = self._cache.worthwhile_reach(request, hit, may_read=request.num_load_waits < MAX_LOAD_WAITS)
        if reach is None or tiers.loads.shortage(hit, reach) + num_spare + self._num_wanted_above(request) > 0:
            return False
        unread = tiers.unread(reach)
        is_first = not request.num_missing_copies
        if not self._is_nearer(request, len(reach.pieces) + len(unread)):
            return False
        if is_first:
            request.num_unloaded_tokens = hit.start
        awaited: PrefixLoad | PrefixRead | None = tiers.loads.find(reach)
        if awaited is None:
            part = tiers.ready_part(hit, reach)
            tiers.read(unread, request)
            if part is None:
                awaited = tiers.reads.find(reach.pieces[0].content)
                assert awaited is not None, "its first piece is not in host memory, so it is read"
            else:
                awaited = tiers.begin(hit, part, is_part=part is not reach)
        self._waiting.park_for_load(request, awaited.load_id)
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

    def finish_read(self, read_id: int, failures: Collection[Content], read_ns: int) -> None:
        """End a read, and send its waiters back to the queue. At their turn, what was read is copied to the device."""
        tiers = self._cache.tiers
        read = None if tiers is None else tiers.reads.get(read_id)
        if tiers is None or read is None:
            return
        tiers.finish_read(read, failures, read_ns)
        self._waiting.unpark_load(read_id)
        for request in read.users if failures and not read.is_void else ():
            self._give_up(request)

    def finish(self, load_id: int, failures: Collection[Content]) -> None:
        """End a load, and send its waiters back to the queue."""
        tiers = self._cache.tiers
        load = None if tiers is None else tiers.loads.get(load_id)
        if tiers is None or load is None:
            return
        loaded = tiers.finish(load, failures)
        for request in self._waiting.unpark_load(load_id):
            if loaded.num_tokens:
                request.num_loaded_tokens += loaded.num_tokens
                request.loaded_from = Tier.DISK if Tier.DISK in (request.loaded_from, load.source) else Tier.HOST
            if not loaded.is_whole and not load.is_void:
                self._give_up(request)
        self._observe(PrefixLoaded(load.source, loaded.num_tokens, loaded.is_whole))

    def expire(self, now_ns: int) -> None:
        """Send requests back to the queue whose load takes too long, or is of no use since the cache was cleared."""
        tiers = self._cache.tiers
        for load_id, is_late in () if tiers is None else tiers.expire(now_ns):
            for request in self._waiting.unpark_load(load_id):
                if is_late:
                    self._give_up(request)

    @staticmethod
    def _give_up(request: Request) -> None:
        """Let a request compute what could not be read or loaded."""
        request.num_load_waits = MAX_LOAD_WAITS
        request.has_failed_load = True

    def note_start(self, request: Request, hit: PrefixHit) -> None:
        """Tell the saves if a request that starts would have used content that was evicted and is in no lower tier."""
        tiers = self._cache.tiers
        if tiers is None or request.num_preemptions or not self._cache.was_evicted(request, hit):
            return
        if self._cache.reach(request, hit) is None:
            tiers.saves.note_regret()

    # Explanations

    def describe(self, request: Request, hit: PrefixHit, found: CacheExplanation) -> CacheExplanation:
        """Add the tiers to the explanation of a hit from which a request starts."""
        if found.num_tokens:
            num_loaded = max(min(request.num_loaded_tokens, found.num_tokens - request.num_unloaded_tokens), 0)
            source = request.loaded_from if num_loaded and request.loaded_from is not None else Tier.DEVICE
            found = replace(found, source=source, num_loaded_tokens=num_loaded)
        if found.reason in _FINAL:
            return found
        if request.has_failed_load:
            return replace(found, reason=StopReason.LOAD_FAILED)
        return found if self._cache.reach(request, hit) is None else replace(found, reason=StopReason.NOT_LOADED)

    def foresee(self, request: Request, hit: PrefixHit, found: CacheExplanation) -> CacheExplanation:
        """Explain what a request would reuse if it arrived now, with the loads that it would wait for."""
        if found.num_tokens:
            found = replace(found, source=Tier.DEVICE)
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


# Reasons that do not depend on lower tiers: nothing more could be reused, or a running request computes the rest.
_FINAL = (StopReason.COMPLETE, StopReason.IN_FLIGHT, StopReason.OFF)
