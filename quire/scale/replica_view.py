"""What a front knows about one replica: the link to it, its load, and its last figures.

The link is what `WorkerProcess` is for a worker on the same machine. The replica watches its worker for hangs. A front
only notices that the stream of messages ends.

Reports of several replicas are combined: figures are added, and block maps are put side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from quire.core.kv_cache import CacheStats
from quire.core.levels.levels import LevelStats
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.worker.client import Generation, WorkerConnection
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Blocks,
    Cancel,
    Finish,
    FromWorker,
    ReplicaStatus,
    Stats,
    TierStats,
    ToWorker,
    Working,
    encode,
    from_worker,
)
from quire.errors import QueueFull
from quire.scale.routing import ReplicaLoad
from quire.scale.transport import ReplicaGone, Transport

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
    return Stats(
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
    levels: dict[str, list[LevelStats]] = {}
    for level in (level for one in found for level in one.levels):
        levels.setdefault(level.level, []).append(level)
    return replace(_add(found), levels=tuple(map(_add, levels.values())))


def counters_of(stats: Stats) -> Stats:
    """The figures of a replica that has left: its counts, and nothing at present."""
    tiers = tuple(TierStats(0, 0, 0.0) for _ in stats.tiers)
    return Stats(
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


KEEPALIVE_S = 5.0  # replicas drop a front that sends nothing for `SILENT_LIMIT_S`

log = logging.getLogger(__name__)


class ReplicaLink:
    """Exchanges messages with one replica. `on_end`: called once, with the reason, unless it was closed on purpose."""

    def __init__(
        self,
        replica: str,
        transport: Transport,
        on_message: Callable[[FromWorker], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.replica = replica
        self.pid = 0
        self._transport = transport
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._limit_s: float | None = None
        self._heard_s = self._loop.time()
        self.announced_s = 0.0
        self._unsent: list[bytes] = []
        self._num_unsent = 0  # bytes
        self._has_unsent = asyncio.Event()
        self._is_connected = asyncio.Event()  # a message was received
        self._tasks = (self._loop.create_task(self._read()), self._loop.create_task(self._write()))

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def silence_s(self) -> float:
        return self._loop.time() - self._heard_s

    def send(self, message: ToWorker) -> None:
        """Send a message without blocking. Raises QueueFull if too much is unread, except for Cancel and Finish."""
        if self._is_over:
            return
        frame = encode(message)
        if self._num_unsent + len(frame) > MAX_UNSENT and not isinstance(message, Cancel | Finish):
            raise QueueFull(f"{self._num_unsent} bytes are waiting to be read by replica {self.replica}")
        self._unsent.append(frame)
        self._num_unsent += len(frame)
        self._has_unsent.set()

    def expect_message(self, limit_s: float | None) -> None:
        """Count silence from now on, unless a message was expected already. None: no message is expected."""
        if self._limit_s is None and limit_s is not None:
            self._heard_s, self.announced_s = self._loop.time(), 0.0
        self._limit_s = limit_s

    def end(self, reason: str = "") -> None:
        if not self._is_over:
            self._is_over = True
            self._cancel_tasks()
            self._loop.call_soon(self._on_end, reason or "ended")

    async def close(self) -> None:
        self._is_over = True
        self._cancel_tasks()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _read(self) -> None:
        stream = self._transport.messages(self.replica)
        try:
            async for frames in stream:
                self._is_connected.set()
                for message in map(from_worker.decode, frames):
                    self._heard_s = self._loop.time()
                    self.announced_s = message.limit_s if isinstance(message, Working) else 0.0
                    if not self._is_over:
                        self._on_message(message)
                if self._is_over:
                    return
            self.end()
        except ReplicaGone as error:
            log.info("replica %s: %s", self.replica, error)
            self.end()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("messages of replica %s could not be read", self.replica)
            self.end("sent messages that could not be read")
        finally:
            with suppress(Exception):
                await stream.aclose()

    async def _write(self) -> None:
        """Send the messages that have collected, in one call. If there are none for a while, an empty call is sent."""
        await self._is_connected.wait()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_unsent.wait(), KEEPALIVE_S)
            self._has_unsent.clear()
            frames, self._unsent, self._num_unsent = self._unsent, [], 0
            try:
                await self._transport.send(self.replica, frames)
            except ReplicaGone as error:
                log.info("replica %s: %s", self.replica, error)
                self.end()
                return
            except Exception:
                log.exception("messages to replica %s could not be sent", self.replica)
                self.end("could not be sent messages")
                return


RECONNECT_S = 1.0  # pause before the first attempt to connect again; it doubles with each failure
MAX_RECONNECT_S = 30.0


class ReplicaView:
    """One replica. `number`: its place in the router. `fingerprint`: of the model and settings that it must have."""

    def __init__(self, replica: str, number: int, connection: WorkerConnection, fingerprint: str) -> None:
        self.replica = replica
        self._fingerprint = fingerprint
        self.number = number
        self.connection = connection
        self.num_free_blocks = 0
        self.num_routed = 0  # requests
        self.is_accepting = True  # False: it is being stopped, and ends its requests
        self.stats: Stats | None = None  # the last known
        self._num_ends = 0  # of connections in a row that served nothing
        self._scheduling: Scheduling | None = None
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

    def _limits(self, config: EngineConfig) -> Scheduling:
        """The replica's settings, which never change."""
        if self._scheduling is None:
            assert self.connection.facts is not None
            self._scheduling = config.scheduling(self.connection.facts.capacity)
        return self._scheduling

    def status(self, config: EngineConfig) -> ReplicaStatus:
        cache = CacheStats.none() if self.stats is None else self.stats.cache
        num_blocks = self._limits(config).num_blocks - 1  # without the null block
        return ReplicaStatus(
            self.replica,
            self.is_accepting,
            self.connection.num_requests,
            self.num_routed,
            num_blocks,
            self.num_free_blocks,
            cache.num_queried_tokens,
            cache.num_hit_tokens,
        )

    def load(self, config: EngineConfig) -> ReplicaLoad:
        """Its load: from this front's own requests, which is at once, and from its last report."""
        for generation in [one for one in self._sent if _has_begun(one)]:
            del self._sent[generation]
        queued = [0, 0, 0]
        for generation, num_tokens in self._sent.items():
            queued[generation.answers.request.priority] += num_tokens
        limits = self._limits(config)
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=self.connection.num_requests,
            max_num_seqs=limits.max_num_seqs,
            num_free_blocks=self.num_free_blocks,
            num_blocks=limits.num_blocks,
        )


def _has_begun(generation: Generation) -> bool:
    """Whether its prompt is computed, or it has ended."""
    return generation.first_s is not None or generation.error is not None or generation.answers.is_finished
