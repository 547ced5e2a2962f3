"""What a front knows about one replica: its connection, its load, and its last figures.

Reports of several replicas are combined: figures are added, and block maps are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from quire.core.kv_cache import CacheStats
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.worker.client import Generation, WorkerConnection
from quire.engine.worker.protocol import Blocks, ReplicaStatus, Stats
from quire.scale.routing import ReplicaLoad

# Figures that describe the present. All others count since the start, so those of replicas that have left stay.
GAUGES = frozenset(
    {
        *("num_blocks", "num_free", "num_cached", "num_in_use", "num_shared", "num_pins", "num_pinned", "num_slots"),
        *("num_snapshots", "num_pieces", "num_bytes", "max_bytes", "num_running", "num_waiting", "num_tokens"),
        "oldest_age_s",
    }
)
NOT_ADDED = frozenset({"query_id", "break_even_tokens"})


def add_stats(found: Sequence[Stats]) -> Stats:
    """The figures of a cluster. `found` is not empty."""
    return msgspec.convert(_add("", [msgspec.to_builtins(one) for one in found]), Stats)


def counters_of(stats: Stats) -> Stats:
    """The figures of a replica that has left: its counts, and nothing at present."""
    return msgspec.convert(_without_gauges("", msgspec.to_builtins(stats)), Stats)


def _add(name: str, found: Sequence[Any]) -> Any:
    """Add values of one name. Levels are added by their name; of texts and floats, the first is taken."""
    given = [one for one in found if one is not None]
    first = given[0] if given else None
    if isinstance(first, dict):
        return {key: _add(key, [one[key] for one in given]) for key in first}
    if name == "levels":
        by_level: dict[str, list[Any]] = {}
        for level in (level for levels in given for level in levels):
            by_level.setdefault(level["level"], []).append(level)
        return [_add("", levels) for levels in by_level.values()]
    if isinstance(first, tuple):
        return [_add("", row) for row in zip(*given, strict=True)]
    if name == "oldest_age_s":
        return max(given)
    return sum(given) if isinstance(first, int) and name not in NOT_ADDED else first


def _without_gauges(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_gauges(key, one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_without_gauges("", one) for one in value]
    return 0 if name in GAUGES and value is not None else value


def join_blocks(found: Sequence[Blocks]) -> Blocks:
    """The blocks of all replicas as one map, one replica after the other. `found` is not empty.

    All have the same number of blocks per cell.
    """
    first = found[0]
    assert all(one.blocks_per_cell == first.blocks_per_cell for one in found)
    shifts = accumulate((one.num_blocks for one in found), initial=0)
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
            run._replace(first=run.first + by) for blocks, by in zip(found, shifts, strict=False) for run in blocks.held
        ),
    )


RECONNECT_S = 1.0  # pause before the first attempt to connect again; it doubles with each failure
MAX_RECONNECT_S = 30.0


class ReplicaView:
    """One replica. `fingerprint`: of the model and settings that it must have."""

    connection: WorkerConnection  # set when it is connected, again after its end

    def __init__(self, replica: str, config: EngineConfig, fingerprint: str) -> None:
        self.replica = replica
        self._config = config
        self._fingerprint = fingerprint
        self.num_free_blocks = 0
        self.num_routed = 0  # requests
        self.is_accepting = True  # False: it is being stopped, and ends its requests
        self.stats: Stats | None = None  # the last known
        self._num_ends = 0  # of connections in a row that served nothing
        self._limits: Scheduling | None = None
        self._sent: dict[Generation, int] = {}  # requests without a token so far -> prompt tokens to compute

    @property
    def is_foreign(self) -> bool:
        """Whether it has another model or other settings than this front."""
        return self.connection.facts is not None and self.connection.facts.fingerprint != self._fingerprint

    @property
    def is_open(self) -> bool:
        return self.connection.facts is not None and not self.is_foreign and not self.connection.process.is_over

    @property
    def figures(self) -> Stats | None:
        """The last known figures. Without a connection only the counts are valid."""
        return self.stats if self.stats is None or self.is_open else counters_of(self.stats)

    def note(self, generation: Generation, num_tokens: int) -> None:
        """Record a request that is sent there, with the tokens of its prompt that are expected not to be cached."""
        self._sent[generation] = num_tokens
        self.num_routed += 1

    def note_end(self, has_served: bool) -> float:
        """Record that the connection has ended. Returns the seconds after which to connect again."""
        self._sent.clear()
        self._num_ends = 1 if has_served else self._num_ends + 1
        return min(RECONNECT_S * 2.0 ** min(self._num_ends - 1, 10), MAX_RECONNECT_S)

    @property
    def limits(self) -> Scheduling:
        """The replica's settings, which never change."""
        if self._limits is None:
            assert self.connection.facts is not None
            self._limits = self._config.scheduling(self.connection.facts.capacity)
        return self._limits

    @property
    def num_blocks(self) -> int:
        """Without the null block."""
        return self.limits.num_blocks - 1

    def status(self) -> ReplicaStatus:
        cache = CacheStats.none() if self.stats is None else self.stats.cache
        return ReplicaStatus(
            self.replica,
            self.is_accepting,
            self.connection.num_requests,
            self.num_routed,
            self.num_blocks,
            self.num_free_blocks,
            cache.num_queried_tokens,
            cache.num_hit_tokens,
        )

    def load(self) -> ReplicaLoad:
        """Its load: from this front's own requests, which is at once, and from its last report."""
        for generation in [one for one in self._sent if _has_begun(one)]:
            del self._sent[generation]
        queued = [0, 0, 0]
        for generation, num_tokens in self._sent.items():
            queued[generation.answers.request.priority] += num_tokens
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=self.connection.num_requests,
            max_num_seqs=self.limits.max_num_seqs,
            num_free_blocks=self.num_free_blocks,
            num_blocks=self.limits.num_blocks,
        )


def _has_begun(generation: Generation) -> bool:
    """Whether its prompt is computed, or it has ended."""
    return generation.first_s is not None or generation.error is not None or generation.answers.is_finished
