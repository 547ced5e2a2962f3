"""Checks of lower tiers: counted bytes, loads and saves in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NoReturn

from quire.core.lower_tier import LowerTier
from quire.core.reads import PrefixRead, ReadState
from quire.core.scheduler import Scheduler
from quire.core.step import MemoryKind
from quire.core.tiers import Tiers
from quire.errors import InvariantViolation


def check_tiers(scheduler: Scheduler, tiers: Tiers, size: int) -> Iterator[None]:
    """Raise `InvariantViolation` if an invariant is broken. Yields after every `size` stored pieces."""
    loading: Counter[int] = Counter()  # by identity: content may be lost and saved again while it is loaded
    buffers: Counter[MemoryKind] = Counter()
    for load in tiers.loads:
        if load.state is not None and load.state.ref_count < 1:
            _fail(f"{load!r} does not hold its state")
        if not load.is_void:
            loading.update(map(id, load.reach.pieces))
        for stored, read_id in zip(load.reach.pieces, load.read_ids, strict=True):
            buffers[stored.content.kind] += read_id > 0
    for read in tiers.reads:
        if read.state is ReadState.READY:
            buffers.update(content.kind for content in read.pieces)
        elif read.state is ReadState.READING:
            buffers.update(read.kinds)
    if [buffers[kind] for kind in MemoryKind] != tiers.reads.num_buffers:
        _fail(f"{tiers.reads.num_buffers} buffers are counted for reads of {buffers}")
    if any(number > limit for number, limit in zip(tiers.reads.num_buffers, tiers.reads.limits, strict=True)):
        _fail(f"reads use {tiers.reads.num_buffers} buffers, of {tiers.reads.limits}")
    for tier in tiers.tiers:
        yield from _check_tier(tier, loading, size)
        num_pending = Counter(content.kind for content, to in tiers.saves.pending.items() if tier.tier in to)
        if [num_pending[kind] for kind in MemoryKind] != tier.num_reserved:
            _fail(f"{tier.tier} reserves {tier.num_reserved} slots for saves of {num_pending}")
    for request in scheduler.waiting.load_waiters:
        load_id = scheduler.waiting.load_waiters.load_of(request)
        awaited = tiers.loads.get(load_id) or tiers.reads.get(load_id)
        is_ready = isinstance(awaited, PrefixRead) and awaited.state is ReadState.READY
        if awaited is None or awaited.is_abandoned or is_ready:
            _fail(f"{request!r} waits for {awaited!r}, whose end it will not be told")
    yield


def _check_tier(tier: LowerTier, loading: Mapping[int, int], size: int) -> Iterator[None]:
    """Check the bytes of a tier, and the loads that its pieces count. `loading`: loads in flight by id of a piece."""
    num_bytes = 0
    for number, stored in enumerate(tier, 1):
        num_bytes += tier.sizes[stored.content.kind]
        if stored.num_loads != loading.get(id(stored), 0):
            _fail(f"{stored!r} counts {stored.num_loads} loads")
        if number % size == 0:
            yield
    if num_bytes != tier.num_bytes:
        _fail(f"{tier.tier} counts {tier.num_bytes} bytes, and stores {num_bytes}")
    for kind in MemoryKind:
        if tier.limits is not None and tier.count(kind) + tier.num_reserved[kind] > tier.limits[kind]:
            _fail(f"{tier.tier} has {tier.count(kind)} {kind.name} and {tier.num_reserved} reserved, of {tier.limits}")


def _fail(message: str) -> NoReturn:
    raise InvariantViolation(message)
