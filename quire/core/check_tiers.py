"""Checks of lower tiers: counted bytes, loads and saves in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NoReturn

from quire.core.lower_tier import LowerTier
from quire.core.scheduler import Scheduler
from quire.core.step import MemoryKind, Tier
from quire.core.tiers import Tiers
from quire.errors import InvariantViolation


def check_tiers(scheduler: Scheduler, tiers: Tiers, size: int) -> Iterator[None]:
    """Raise `InvariantViolation` if an invariant is broken. Yields after every `size` stored pieces."""
    loading: Counter[int] = Counter()  # by identity: content may be lost and saved again while it is loaded
    num_loading_bytes: Counter[Tier] = Counter()
    sizes = {tier.tier: tier.sizes for tier in tiers.tiers}
    for load in tiers.loads:
        if load.state is not None and load.state.ref_count < 1:
            _fail(f"{load!r} does not hold its state")
        if not load.is_void:
            loading.update(map(id, load.reach.pieces))
        for stored in () if load.is_abandoned else load.reach.pieces:
            num_loading_bytes[stored.tier] += sizes[stored.tier][stored.content.kind]
    for tier in tiers.tiers:
        if tiers.num_loading_bytes.get(tier.tier, 0) != num_loading_bytes[tier.tier]:
            _fail(f"{tiers.num_loading_bytes} bytes are counted for loads of {num_loading_bytes}")
        yield from _check_tier(tier, loading, size)
        num_pending = Counter(content.kind for content, to in tiers.saves.pending.items() if tier.tier in to)
        if [num_pending[kind] for kind in MemoryKind] != tier.num_reserved:
            _fail(f"{tier.tier} reserves {tier.num_reserved} slots for saves of {num_pending}")
    for request in scheduler.waiting.load_waiters:
        awaited = tiers.loads.get(scheduler.waiting.load_waiters.load_of(request))
        if awaited is None or awaited.is_abandoned:
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
