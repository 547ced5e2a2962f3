"""A replica of a model: one worker process, and the front that uses it.

A front is a server in front of the replicas. It sends the messages of the worker's protocol, and reads what the worker
answers as one stream of batches, so that a step is one message for all its requests. Knows nothing of Ray.

There is one front: one that connects takes the place of the one before it, which has ended. Ids of requests and queries
start with the number of their front (`FRONT_BITS`), so a front ignores what belongs to its predecessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec

from quire.engine.composition import EngineConfig
from quire.engine.worker.client import ANSWERS, HANG_LIMIT_S, LOAD_LIMIT_S, WorkerProcess
from quire.engine.worker.kv_events import CacheReport, split_keys
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Add,
    Answered,
    Ask,
    Cancel,
    Failed,
    Fingerprinted,
    Finish,
    FromWorker,
    GetStats,
    Load,
    Ready,
    Refused,
    Stats,
    Stepped,
    ToWorker,
    encode,
    to_worker,
)
from quire.errors import InvalidRequest, QueueFull, QuireError, WorkerDied, error_of

FRONT_BITS = 40  # of an id: its front is the rest
STATS_ID = 1  # query id of the replica itself, which is front 0
MAX_BATCHES = 100_000  # of one stream: Ray keeps a record of each while the stream is open
HANDOVER_S = 10.0  # for a front to open the next stream
SILENT_LIMIT_S = 30.0  # a front that has sent nothing for this long is gone: its requests are cancelled

log = logging.getLogger(__name__)


def ids_of(front: int) -> Iterator[int]:
    """The ids of a front's requests and queries. One front has one count for all its models, loaded again or not."""
    return count((front << FRONT_BITS) + 1)


class _Front:
    """A connected front: its open requests and queries, and the messages that it has not read yet."""

    def __init__(self, number: int, now_s: float) -> None:
        self.number = number
        self.heard_s = now_s
        self.request_ids: set[int] = set()
        self.query_ids: set[int] = set()
        self._frames: list[bytes] = []
        self._num_unread = 0  # bytes
        self._changed = asyncio.Event()
        self.is_closed = False

    @property
    def is_waiting(self) -> bool:
        """Whether it expects messages of the worker."""
        return bool(self.request_ids or self.query_ids)

    def push(self, frame: bytes) -> None:
        """Queue a message. A front that has stopped reading is closed: its queue must not fill the memory."""
        if self.is_closed:
            return
        self._frames.append(frame)
        self._num_unread += len(frame)
        self._changed.set()
        if self._num_unread > MAX_UNSENT:
            log.warning("front %d has left %d bytes unread: it is disconnected", self.number, self._num_unread)
            self._frames.clear()
            self.close()

    def close(self) -> None:
        self.is_closed = True
        self._changed.set()

    async def pop(self) -> list[bytes]:
        """The next messages; none: it was closed."""
        while not self._frames and not self.is_closed:
            self._changed.clear()
            await self._changed.wait()
        frames, self._frames, self._num_unread = self._frames, [], 0
        return frames


class Replica:
    """Owns a worker. Belongs to one event loop. `on_end`: called with a reason when the worker has ended by itself."""

    def __init__(self, name: str, on_end: Callable[[str], None], hang_limit_s: float = HANG_LIMIT_S) -> None:
        self._name = name
        self._on_end = on_end
        self._hang_limit_s = hang_limit_s
        self._loop = asyncio.get_running_loop()
        self._front: _Front | None = None
        self._keys: set[bytes] = set()  # content of the cache, for fronts that connect later
        self._num_free_blocks = 0
        self._fingerprint = ""
        self._system_fingerprint: str | None = None  # if it was not known when the worker was ready
        self._facts: asyncio.Future[Ready] = self._loop.create_future()
        self._stats: asyncio.Future[Stats] | None = None
        self.error: QuireError | None = None  # why it ended
        self.process = WorkerProcess(self._take, self._take_end)

    async def start(self, path: Path, config: EngineConfig, chain_secret: bytes, fingerprint: str = "") -> Ready:
        """Load the model. Raises the worker's error. `fingerprint`: of the model and its settings, for fronts."""
        self._fingerprint = fingerprint
        self.process.send(Load(str(path), config, chain_secret=chain_secret, reports_cache=True))
        self.process.expect_message(LOAD_LIMIT_S)
        return await self._facts

    async def stats(self) -> Stats:
        """The worker's own figures. Concurrent calls share one query."""
        if self.error is not None:
            raise self.error
        if self._stats is None or self._stats.done():
            self.process.send(Ask(STATS_ID, GetStats()))
            self._stats = self._loop.create_future()
            self._watch()
        return await asyncio.shield(self._stats)

    # Called by fronts

    async def send(self, front: int, frames: Sequence[bytes]) -> None:
        """Pass a front's messages to the worker. An empty call only shows that the front is alive."""
        if self.error is not None:
            raise WorkerDied(str(self.error))
        found = self._find(front)
        found.heard_s = self._loop.time()
        for message in (to_worker.decode(frame) for frame in frames):
            if isinstance(message, Load):
                raise InvalidRequest("a front must not load a model")
            ids = _ids_of(message)
            try:
                self.process.send(message)
            except QueueFull as error:  # the other messages may be small enough, or allowed anyway
                found.push(encode(Refused(ids, type(error).__name__, str(error))))
                continue
            if isinstance(message, Add):
                found.request_ids.update(ids)
            elif isinstance(message, Cancel | Finish):  # the worker sends no output of the request after it
                found.request_ids.difference_update(ids)
            else:
                found.query_ids.update(ids)
        self._watch()

    async def messages(self, front: int, is_continued: bool = False) -> AsyncGenerator[list[bytes], None]:
        """The messages of the worker for a front, from now on. If the front closes the stream, it is disconnected.

        After `MAX_BATCHES` an empty batch tells the front to open another stream with `is_continued`.
        """
        if self.error is not None:
            raise WorkerDied(str(self.error))
        own = self._find(front) if is_continued else await self._connect(front)
        is_over = True
        try:
            for _ in range(MAX_BATCHES):
                if not (frames := await own.pop()):
                    return
                yield frames
            is_over = False
            yield []
            await asyncio.sleep(HANDOVER_S)  # the front closes this stream when the next one has begun
        finally:
            if is_over:
                self._drop(own)

    async def _connect(self, front: int) -> _Front:
        facts = await asyncio.shield(self._facts)
        if self._front is not None:
            self._drop(self._front)
        own = self._front = _Front(front, self._loop.time())
        if self._system_fingerprint is not None:
            facts = msgspec.structs.replace(facts, system_fingerprint=self._system_fingerprint)
        own.push(encode(msgspec.structs.replace(facts, fingerprint=self._fingerprint)))
        own.push(encode(CacheReport(b"".join(self._keys), b"", True, self._num_free_blocks)))
        return own

    def _find(self, front: int) -> _Front:
        if self._front is None or self._front.number != front:
            raise InvalidRequest(f"front {front} is not connected")
        return self._front

    def drop_silent_front(self) -> None:
        """Cancel the requests of a front that has died without closing its stream."""
        if (front := self._front) is not None and front.heard_s < self._loop.time() - SILENT_LIMIT_S:
            text = "a front has sent nothing for %g s: its %d requests are cancelled"
            log.warning(text, SILENT_LIMIT_S, len(front.request_ids))
            self._drop(front)

    async def close(self) -> None:
        """End the worker. Requests that run are lost."""
        if self._front is not None:
            self._front.close()
        await self.process.close()

    def _drop(self, front: _Front) -> None:
        if self._front is front:
            self._front = None
        front.close()
        for request_id in front.request_ids:
            self.process.send(Cancel(request_id))
        front.request_ids.clear()
        front.query_ids.clear()
        self._watch()

    # Called by the worker

    def _take(self, message: FromWorker) -> None:
        self._pass_on(message)
        if self._front is not None and self._front.is_closed:
            self._drop(self._front)
        self._watch()

    def _pass_on(self, message: FromWorker) -> None:
        """Pass a message to the front, unless it is for this replica itself."""
        match message:
            case Ready():
                self._facts.set_result(message)
                return
            case Failed(kind=kind, message=text):
                self.error = error_of(kind, text)
                return
            case Answered(query_id=query_id) if query_id == STATS_ID:
                if self._stats is not None and not self._stats.done():
                    self._stats.set_result(ANSWERS[Stats].decode(message.result))
                return
            case Stepped(outputs=outputs):
                ended = (one.request_id for one in outputs if one.finish_reason is not None or one.error is not None)
                self._settle(ended)
            case Refused(request_ids=request_ids):
                self._settle(request_ids)
            case CacheReport():
                self._note_cache(message)
            case Fingerprinted(system_fingerprint=system_fingerprint):
                self._system_fingerprint = system_fingerprint
            case Answered(query_id=query_id):
                self._settle((query_id,))
        if self._front is not None:
            self._front.push(encode(message))

    def _settle(self, ids: Iterable[int]) -> None:
        """Requests or queries have ended."""
        if self._front is not None:
            ended = set(ids)
            self._front.request_ids -= ended
            self._front.query_ids -= ended

    def _note_cache(self, report: CacheReport) -> None:
        if report.is_cleared:
            self._keys.clear()
        self._keys.difference_update(split_keys(report.removed))
        self._keys.update(split_keys(report.added))
        self._num_free_blocks = report.num_free_blocks

    def _take_end(self, reason: str) -> None:
        self.error = self.error or WorkerDied(f"the process that runs {self._name} {reason}")
        log.error("%s", self.error)
        if not self._facts.done():
            self._facts.set_exception(self.error)
        if self._stats is not None and not self._stats.done():
            self._stats.set_exception(self.error)
        if self._front is not None:
            self._front.push(encode(Failed(type(self.error).__name__, str(self.error))))
            self._front.close()
        self._on_end(str(self.error))

    def _watch(self) -> None:
        """Silence is a hang only while an output or an answer is expected."""
        if self._facts.done():
            is_busy = self._stats is not None and not self._stats.done()
            is_busy = is_busy or (self._front is not None and self._front.is_waiting)
            self.process.expect_message(self._hang_limit_s if is_busy else None)


def _ids_of(message: ToWorker) -> tuple[int, ...]:
    """The requests or the query of a message."""
    match message:
        case Add(request_ids=request_ids):
            return request_ids
        case Cancel(request_id=request_id) | Finish(request_id=request_id):
            return (request_id,)
        case Load():
            return ()
        case Ask(query_id=query_id):
            return (query_id,)
