"""What a front knows about one replica: the link to it, its load, and its last figures.

The link is what `WorkerProcess` is for a worker on the same machine. The replica watches its worker for hangs. A front
only notices that the stream of messages ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from quire.core.kv_cache import CacheStats
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.worker.client import Generation, WorkerConnection
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Cancel,
    Finish,
    FromWorker,
    ReplicaStatus,
    Stats,
    ToWorker,
    Working,
    encode,
    from_worker,
)
from quire.errors import QueueFull
from quire.scale.combination import counters_of
from quire.scale.routing import ReplicaLoad
from quire.scale.transport import ReplicaGone, Transport

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
