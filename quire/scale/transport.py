"""Messages between a front and the replicas of a model.

`Transport` is what a front needs from a cluster; `quire/scale/ray_serve.py` implements it with Ray Serve. A
`ReplicaLink` is what `WorkerProcess` is for a worker on the same machine. The replica watches its worker for hangs. A
front only notices that the stream of messages ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from quire.engine.worker.client import WorkerLink
from quire.engine.worker.protocol import MAX_UNSENT, Cancel, Finish, FromWorker, ToWorker, encode, from_worker
from quire.errors import QueueFull

Batches = AsyncGenerator[list[bytes], None]
SetReplicas = Callable[[Collection[str]], Collection[str]]  # see `ClusterClient.set_replicas`


# What takes the replicas of a model, by its application. Ray sends the class of a router to other processes as a copy
# with variables of its own, so this is not defined beside it.
takers: dict[str, Callable[[dict[str, Any]], None]] = {}


class ReplicaGone(Exception):
    """A replica ended, or cannot be reached."""


class Transport(Protocol):
    """Messages between one front and the replicas of one model. Its methods raise ReplicaGone."""

    def start(self, set_replicas: SetReplicas) -> None:
        """Begin to report the replicas that accept requests, in the event loop of the front."""

    async def send(self, replica: str, frames: Sequence[bytes]) -> None:
        """Send messages to a replica."""

    def messages(self, replica: str) -> Batches:
        """The stream of messages of a replica."""

    async def close(self) -> None: ...


async def joined(open_stream: Callable[[bool], Batches]) -> Batches:
    """The messages of a replica, which ends its stream now and then to continue in another one.

    An empty batch is the last one of a stream that is continued. `open_stream`: opens the first one, or with True one
    that continues. A stream is closed only when the next one has begun: a replica that is being stopped would end if
    there were no stream for a moment.
    """
    earlier, current = None, open_stream(False)
    try:
        while True:
            async for frames in current:
                if earlier is not None:
                    await earlier.aclose()
                    earlier = None
                if not frames:
                    break
                yield frames
            else:
                return
            earlier, current = current, open_stream(True)
    finally:
        for stream in (earlier, current):
            if stream is not None:
                await stream.aclose()


KEEPALIVE_S = 5.0  # replicas drop a front that sends nothing for `SILENT_LIMIT_S`

log = logging.getLogger(__name__)


class ReplicaLink(WorkerLink):
    """Exchanges messages with one replica."""

    def __init__(
        self,
        replica: str,
        transport: Transport,
        on_message: Callable[[FromWorker], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(on_message, on_end)
        self.replica = replica
        self._transport = transport
        self._limit_s: float | None = None
        self._unsent: list[bytes] = []
        self._num_unsent = 0  # bytes
        self._has_unsent = asyncio.Event()
        self._is_connected = asyncio.Event()  # a message was received
        self._tasks = (
            self._loop.create_task(self._run(self._read, "sent messages that could not be read")),
            self._loop.create_task(self._run(self._write, "could not be sent messages")),
        )

    def send(self, message: ToWorker) -> None:
        if self.is_over:
            return
        frame = encode(message)
        if self._num_unsent + len(frame) > MAX_UNSENT and not isinstance(message, Cancel | Finish):
            raise QueueFull(f"{self._num_unsent} bytes are waiting to be read by replica {self.replica}")
        self._unsent.append(frame)
        self._num_unsent += len(frame)
        self._has_unsent.set()

    def expect_message(self, limit_s: float | None) -> None:
        if self._limit_s is None and limit_s is not None:
            self._heard_s, self.announced_s = self._loop.time(), 0.0
        self._limit_s = limit_s

    def end(self, reason: str = "") -> None:
        if not self.is_over:
            self.is_over = True
            self._cancel_tasks()
            self._loop.call_soon(self._on_end, reason or "ended")

    async def close(self) -> None:
        self.is_over = True
        self._cancel_tasks()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _run(self, work: Callable[[], Awaitable[None]], problem: str) -> None:
        try:
            await work()
            self.end()
        except ReplicaGone as error:
            log.info("replica %s: %s", self.replica, error)
            self.end()
        except Exception:
            log.exception("replica %s %s", self.replica, problem)
            self.end(problem)

    async def _read(self) -> None:
        async with aclosing(self._transport.messages(self.replica)) as stream:
            async for frames in stream:
                self._is_connected.set()
                for message in map(from_worker.decode, frames):
                    self._hear(message)
                if self.is_over:
                    return

    async def _write(self) -> None:
        """Send the messages that have collected, in one call. If there are none for a while, an empty call is sent."""
        await self._is_connected.wait()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_unsent.wait(), KEEPALIVE_S)
            self._has_unsent.clear()
            frames, self._unsent, self._num_unsent = self._unsent, [], 0
            await self._transport.send(self.replica, frames)
