"""Event streams with keep-alives during silence. An encoder makes the events, the dialect errors and keep-alives.

Two ways lead to the client:

- A new token is encoded and written to the transport in the call that received it from the worker. This is
  the path of nearly all tokens: see `TokenWriter`.
- Everything else (the start, the end, errors, text that arrives while the client does not read) is queued as deltas.
  The task of the response takes them and sends them with ASGI. While it is not waiting for deltas, tokens are queued
  too, so the order is kept.

The engine never waits for a reader: while the client does not read fast enough, tokens are queued, so a slow reader
gets fewer and longer writes. The connection of a reader that does not read is aborted by `HttpProtocol`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.outputs import Delta
from quire.errors import QuireError
from quire.server.errors import ApiError, Dialect, Kind, from_quire
from quire.server.http.server import BODY_WRITER, CHUNK_SIZES, BodyWriter
from quire.server.model_service import ActiveRequest, ClientGone

_encode = msgspec.json.Encoder().encode
log = logging.getLogger(__name__)


class EventEncoder(Protocol):
    """Makes the bytes of one stream: `begin`, then `feed` and `text_event` in any order, then `finish`."""

    @property
    def waits_for_start(self) -> bool:
        """Whether the first events need the cache explanation of the prompt, which is known when it starts."""

    def begin(self) -> bytes:
        """Events before the first delta, possibly none."""

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        """Events of deltas, each with its prompt's number. Empty: there is nothing to send yet."""

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """The event of a token that is plain text, in sample `index`. None: it must be passed to `feed`."""

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        """The bytes around the text in the events of all further tokens of plain text. The text is a JSON string.

        None: they are not constant, or not yet; `text_event` is used.
        """

    def finish(self) -> bytes:
        """Events after the last delta."""

    def fail(self, error: ApiError) -> bytes | None:
        """The event of a failure after `begin`. None: that of the dialect."""


class TokenWriter:
    """Writes the tokens of one prompt at once, if the task of the response is waiting and the client keeps up.

    `take_token` runs for every token of every stream, in the call that received the step from the worker: no task is
    woken, and nothing is allocated but the bytes that are written.
    """

    __slots__ = (
        "_active", "_after", "_before", "_encoder", "_flow", "_frames", "_index", "_number", "_size", "_write",
        "_writer", "last_s",
    )  # fmt: skip

    def __init__(self, number: int, active: ActiveRequest, encoder: EventEncoder, writer: BodyWriter) -> None:
        self._number = number  # of the prompt
        self._active = active
        self._encoder = encoder
        self._writer = writer
        self._write = writer.write_frame
        self._flow = writer.flow
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by sample, once they are constant
        # The frame of the sample that was written last. Kept here because a dictionary is in other cache lines: with
        # hundreds of streams, most of the time of a token is waiting for memory.
        self._index: int | None = None
        self._before = self._after = b""
        self._size = 0  # of an event without its text
        self.last_s = 0.0  # time of the last write

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        if not self._active.is_waiting or self._flow.write_paused:
            return False
        if index != self._index and not self._select(index):
            return self._take_other(index, token_id, text)
        string = _encode(text)
        try:
            self._write(b"".join((CHUNK_SIZES[self._size + len(string)], self._before, string, self._after)))
        except RuntimeError:
            return True  # the client has disconnected: `RequestContext` is about to end the request
        self.last_s = now_s
        return True

    def _select(self, index: int) -> bool:
        """Use the frame of another sample. False: there is none."""
        if (frame := self._frames.get(index)) is None:
            return False
        self._index, (self._before, after) = index, frame
        self._after = after + b"\r\n"
        self._size = len(self._before) + len(after)
        return True

    def _take_other(self, index: int, token_id: int, text: str) -> bool:
        """Take a token whose event does not have constant bytes around the text."""
        try:
            data = self._encoder.text_event(self._number, index, text)
            if data is None:
                data = self._encoder.feed([(self._number, Delta(index, text, (token_id,), (), None, None))])
            if data:
                self._writer.write(data)
                self.last_s = time.monotonic()
            if (found := self._encoder.text_frame(self._number, index)) is not None:
                self._frames[index] = found
        except Exception as error:  # must not affect the other requests of the step
            self._active.fail(error)
        return True

    def take_delta(self, delta: Delta) -> bool:
        if not self._active.is_waiting or self._flow.write_paused:
            return False
        try:
            if data := self._encoder.feed([(self._number, delta)]):
                self._writer.write(data)
                self.last_s = time.monotonic()
        except Exception as error:
            self._active.fail(error)
        return True


class EventStream(Response):
    """A response whose body is written as tokens arrive."""

    def __init__(
        self,
        active: ActiveRequest,
        encoder: EventEncoder,
        headers: Mapping[str, str],
        dialect: Dialect,
        keep_alive_s: float,
    ) -> None:
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, dialect.stream_type)
        del self.headers["content-length"]
        self._dialect = dialect
        self._active = active
        self._encoder = encoder
        self._token_writers: list[TokenWriter] = []
        self._keep_alive_s = keep_alive_s  # longest silence, and longest delay of the response headers
        self._first: asyncio.Future[bytes | None] | None = None
        self._has_begun = False  # `encoder.begin` was called
        self._last_s = 0.0  # time of the last write
        self._is_writing = False
        self._is_ending = False
        self._ping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Wait for the first event, at most `keep_alive_s`: an error before it gets its own HTTP status."""
        self._first = asyncio.ensure_future(self._next())
        await asyncio.wait({self._first}, timeout=self._keep_alive_s)
        if self._first.done() and (error := self._first.exception()) is not None:
            self._active.close(error if isinstance(error, Exception) else None)
            raise error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # `RequestContext` watches for the disconnect
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._last_s = time.monotonic()
        self._timer = self._loop.call_later(self._keep_alive_s / 2, self._tick)
        error: Exception | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                await self._write_all(scope.pop(BODY_WRITER, None))
                last = self._encoder.finish()
            except Exception as problem:
                error = problem
            if error is not None:
                self._active.close(error)
                if not isinstance(error, ClientGone):
                    last = self._error_event(error)
            await self._end(last)
            self._active.close()  # after the last bytes: a shutdown cuts connections without open requests
        finally:
            self._timer.cancel()

    async def _write_all(self, writer: BodyWriter | None) -> None:
        assert self._first is not None
        chunk = await self._first
        if writer is not None and writer.is_usable:
            for number, generation in enumerate(self._active.generations):
                generation.sink = TokenWriter(number, self._active, self._encoder, writer)
                self._token_writers.append(generation.sink)
        while chunk is not None:
            if chunk:
                await self._write(chunk)
            chunk = await self._next()

    async def _next(self) -> bytes | None:
        """Wait for the next events, possibly none (b""). None: the answers have ended."""
        if not self._has_begun:
            if self._encoder.waits_for_start:
                await self._active.wait_start()
            self._has_begun = True
            if data := self._encoder.begin():
                return data
        batch = await self._active.next_batch()
        return self._encoder.feed(batch) if batch else None

    def _error_event(self, problem: Exception) -> bytes:
        error = api_error(problem, self._active.request_id)
        data = self._encoder.fail(error) if self._has_begun else None
        return self._dialect.event(error, self._active.request_id) if data is None else data

    async def _end(self, last: bytes) -> None:
        """Write the last events and end the body, after a keep-alive that is being written."""
        self._is_ending = True
        if self._ping is not None:
            await asyncio.wait({self._ping})
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._last_s = time.monotonic()

    def _tick(self) -> None:
        now_s = time.monotonic()
        last_s = max(self._last_s, *(one.last_s for one in self._token_writers), 0.0)
        is_silent = now_s - last_s >= self._keep_alive_s
        if is_silent and not self._is_writing and not self._is_ending:
            self._last_s = now_s
            self._ping = self._loop.create_task(self._write(self._dialect.keep_alive))
        self._timer = self._loop.call_later(self._keep_alive_s / 2, self._tick)


def api_error(error: Exception, request_id: str) -> ApiError:
    """The error that a client receives when a stream fails after its first event."""
    match error:
        case ApiError():
            return error
        case QuireError():
            return from_quire(error)
        case _:
            log.error("%s: a stream failed", request_id, exc_info=error)
            text = f"the server could not process this request; see {request_id} in the server log"
            return ApiError(Kind.FAILED, text, reason="internal")
