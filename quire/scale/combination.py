"""Combines the reports of several replicas: figures are added, and block maps are put side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from quire.core.kv_cache import CacheStats
from quire.core.levels.tiers import LowerTierStats
from quire.engine.worker.protocol import Blocks, Stats, TierStats

# Figures that describe the present. All others count since the start, so those of replicas that have left stay.
GAUGES = frozenset(
    {
        *("num_blocks", "num_free", "num_cached", "num_in_use", "num_shared", "num_pins", "num_pinned"),
        *("num_slots", "num_snapshots", "num_pieces", "num_bytes", "max_bytes", "num_running", "num_waiting"),
    }
)
Figures = TypeVar("Figures")


def add_stats(found: Sequence[Stats]) -> Stats:
    """The figures of a cluster. `found` is not empty."""
    first = found[0]
    return Stats(
        first.query_id,
        add_cache_stats([one.cache for one in found]),
        sum(one.num_running for one in found),
        sum(one.num_waiting for one in found),
        tuple(map(_add_waiting, zip(*(one.tiers for one in found), strict=True))),
        sum(one.num_preemptions for one in found),
        sum(one.num_steps for one in found),
        sum(one.num_violations for one in found),
        sum(one.num_drafted for one in found),
        sum(one.num_accepted for one in found),
    )


def add_cache_stats(found: Sequence[CacheStats]) -> CacheStats:
    tiers: dict[str, list[LowerTierStats]] = {}
    for tier in (tier for one in found for tier in one.tiers):
        tiers.setdefault(tier.tier, []).append(tier)
    return replace(_add(found), tiers=tuple(map(_add, tiers.values())))


def counters_of(stats: Stats) -> Stats:
    """The figures of a replica that has left: its counts, and nothing at present."""
    tiers = tuple(TierStats(0, 0, 0.0) for _ in stats.tiers)
    return Stats(
        stats.query_id,
        _without_gauges(stats.cache),
        0,
        0,
        tiers,
        stats.num_preemptions,
        stats.num_steps,
        stats.num_violations,
        stats.num_drafted,
        stats.num_accepted,
    )


def join_blocks(found: Sequence[Blocks]) -> Blocks:
    """The blocks of all replicas as one map, one replica after the other. `found` is not empty.

    All have the same number of blocks per cell.
    """
    first = found[0]
    assert all(one.blocks_per_cell == first.blocks_per_cell for one in found)
    shifts = offsets(one.num_blocks for one in found)
    return Blocks(
        first.query_id,
        sum(one.num_blocks for one in found),
        first.block_size,
        first.blocks_per_cell,
        tuple(run for one in found for run in one.cells),
        tuple(map(sum, zip(*(one.totals for one in found), strict=True))),
        max(one.max_holders for one in found),
        sum(one.num_pending for one in found),
        tuple(one for blocks in found for one in blocks.running),
        tuple(
            run._replace(first=run.first + by) for blocks, by in zip(found, shifts, strict=True) for run in blocks.held
        ),
    )


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where each of these parts begins when they are put side by side."""
    places, place = [], 0
    for size in sizes:
        places.append(place)
        place += size
    return places


def _add_waiting(tiers: tuple[TierStats, ...]) -> TierStats:
    return TierStats(
        sum(one.num_waiting for one in tiers),
        sum(one.num_tokens for one in tiers),
        max(one.oldest_age_s for one in tiers),
    )


def _add(found: Sequence[Figures]) -> Figures:
    """Add figures field by field. Fields that are not numbers are those of the first."""
    first: Any = found[0]
    values: dict[str, Any] = {}
    for field in fields(first):
        given = [value for one in found if (value := getattr(one, field.name)) is not None]
        if given and is_dataclass(given[0]):
            values[field.name] = _add(given)
        elif given and isinstance(given[0], int) and field.name != "break_even_tokens":
            values[field.name] = sum(given)
        else:
            values[field.name] = given[0] if given else None
    return cast(Figures, replace(first, **values))


def _without_gauges(figures: Figures) -> Figures:
    values: dict[str, Any] = {}
    for field in fields(figures):  # type: ignore[arg-type]
        value = getattr(figures, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            values[field.name] = _without_gauges(value)
        elif isinstance(value, tuple):
            values[field.name] = tuple(_without_gauges(one) if is_dataclass(one) else one for one in value)
        elif field.name in GAUGES and value is not None:
            values[field.name] = 0
    return replace(figures, **values)  # type: ignore[type-var]
