"""Event streams with keep-alives during silence. The dialect defines the framing.

The engine never waits for a reader: a slow reader gets fewer and longer writes, and the connection of a reader that
does not read is aborted by `HttpProtocol`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.server.active_request import ActiveRequest, ClientGone
from quire.server.errors import ApiError, Dialect, Kind, from_quire

log = logging.getLogger(__name__)


class EventStream(Response):
    """A response whose body is written as events arrive."""

    def __init__(
        self,
        active: ActiveRequest,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str],
        dialect: Dialect,
        keep_alive_s: float,
    ) -> None:
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, dialect.stream_type)
        del self.headers["content-length"]
        self._dialect = dialect
        self._active = active
        self._events = events
        self._keep_alive_s = keep_alive_s  # longest silence, and longest delay of the response headers
        self._first: asyncio.Future[bytes | None] | None = None
        self._last_s = 0.0  # time of the last write
        self._is_writing = False
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
        del scope, receive  # `RequestContext` watches for the disconnect
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer = self._loop.call_later(self._keep_alive_s / 2, self._tick)
        error: Exception | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._write_all()
            except Exception as problem:
                error = problem
            self._active.close(error)
            if error is not None and not isinstance(error, ClientGone):
                await self._write(
                    self._dialect.event(api_error(error, self._active.request_id), self._active.request_id)
                )
            await self._end()
        finally:
            self._timer.cancel()

    async def _write_all(self) -> None:
        assert self._first is not None
        chunk = await self._first
        while chunk is not None:
            if chunk:
                await self._write(chunk)
            chunk = await self._next()

    async def _end(self) -> None:
        """End the body, after a keep-alive that is being written."""
        if self._ping is not None:
            await asyncio.wait({self._ping})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        return await anext(self._events, None)

    async def _write(self, data: bytes) -> None:
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._last_s = self._loop.time()

    def _tick(self) -> None:
        now_s = self._loop.time()
        is_silent = now_s - self._last_s >= self._keep_alive_s
        if is_silent and not self._is_writing and not self._active.is_closed:
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
