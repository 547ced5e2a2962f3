"""Connections.

`HttpProtocol` extends uvicorn: timeouts and limits for headers, and aborts of stalled readers. It answers one request
at a time: a connection that sends another one meanwhile is closed after the answer. `HttpServer` has a main loop
without a timer, and signals that drain. All connections share limits of their number, and of the bytes of headers.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.errors import InvalidRequest
from quire.server.config import ServeConfig

FREE_BYTES = 8 << 10  # of each connection, not counted: small requests are served although others use up the budget
MAX_SHARED_BYTES = 64 << 20
GRACE_S = 0.5  # a connection is not evicted in this time: its request may have arrived and not been read yet


class OpenConnections:
    """The connections that wait for a request, and the bytes that all connections hold."""

    def __init__(self, max_bytes: int = MAX_SHARED_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self.num_bytes = 0  # those of each connection beyond FREE_BYTES
        # Connections before their first request, between requests, and in a body: evicted in this order, oldest first.
        self._silent: dict[HttpProtocol, float] = {}
        self._idle: dict[HttpProtocol, float] = {}
        self._sending: dict[HttpProtocol, float] = {}

    def waits(self, connection: HttpProtocol, *, was_served: bool) -> None:
        self.waits_no_more(connection)
        (self._idle if was_served else self._silent)[connection] = self._clock()

    def sends(self, connection: HttpProtocol) -> None:
        """Note that the headers of a request are complete and its body is not."""
        self.waits_no_more(connection)
        self._sending[connection] = self._clock()

    def waits_no_more(self, connection: HttpProtocol) -> None:
        for waiting in (self._silent, self._idle, self._sending):
            waiting.pop(connection, None)

    def evict_oldest(self, newcomer: HttpProtocol) -> bool:
        """Close the connection that has waited longest for a request. False: each has a request, or is new."""
        latest_s = self._clock() - GRACE_S
        for waiting in (self._silent, self._idle, self._sending):
            oldest, since_s = next(iter(waiting.items()), (newcomer, 0.0))
            if oldest is not newcomer and since_s <= latest_s:
                del waiting[oldest]
                oldest.evict()
                return True
        return False

    def change(self, num_before: int, num_after: int) -> bool:
        """Change the number of bytes that one connection holds. Returns whether they are within the budget."""
        self.num_bytes += max(0, num_after - FREE_BYTES) - max(0, num_before - FREE_BYTES)
        return num_after <= FREE_BYTES or self.num_bytes <= self._max_bytes


HEADER_S = 10.0  # from the connection, or from a request's first byte, to the end of the headers
IDLE_S = 75.0  # between two requests: longer than the limits of clients, so that the client closes first
LINGER_S = 30.0  # time for a client to read the last bytes
MAX_HEADER_BYTES = 64 << 10  # names, values and the overhead of each header
HEADER_OVERHEAD = 160  # bytes of the tuple and the two objects that hold a header
MAX_CHUNK_OVERHEAD = 1 << 20  # bytes of chunk sizes and extensions, besides eight for each byte of the body
MAX_IGNORED_BYTES = 1 << 20  # behind a request that is being answered
SPARE_FILES = 128  # file descriptors reserved for other uses than connections
MAC_MAX_FILES = 10_240  # macOS may refuse more open files, although it reports that there is no hard limit
BODY_WRITER = "quire.body_writer"  # key in the scope of a request
INVALID = "Invalid HTTP request received."

log = logging.getLogger(__name__)


class BodyWriter:
    """Writes parts of a streamed body straight to the transport, without a task and without ASGI messages.

    In the scope of each request, under `BODY_WRITER`. For use after the response was started with ASGI's `send`, while
    `flow.write_paused` is false. `send` may be used in between, and must be used for the end.
    """

    __slots__ = ("_cycle", "flow", "write_frame")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.flow = cycle.flow
        # Writes a part with its size and line ends. Raises RuntimeError if the client has disconnected.
        self.write_frame: Callable[[bytes], None] = cycle.transport.write

    @property
    def is_usable(self) -> bool:
        """Whether the response has been started and has a body in chunks."""
        cycle = self._cycle
        return cycle.response_started and cycle.chunked_encoding is True and cycle.scope["method"] != "HEAD"

    def write(self, data: bytes) -> None:
        """Write a part of the body, which must not be empty. Does nothing if the client has disconnected."""
        if not self._cycle.disconnected:
            self.write_frame(b"%x\r\n%b\r\n" % (len(data), data))


class _ChunkSizes(dict[int, bytes]):
    """The size lines of chunks, made once for each size."""

    def __missing__(self, size: int) -> bytes:
        line = self[size] = b"%x\r\n" % size
        return line


CHUNK_SIZES = _ChunkSizes()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Each state has a timeout: headers, idle between requests, unread responses, last bytes.

    `RequestContext` has the timeout of the body, and watches for a disconnect while an answer is generated.
    """

    others = OpenConnections()
    max_connections = 4096
    header_s = HEADER_S
    slow_reader_s = LINGER_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_in_headers = False
        self._is_in_body = False  # after a request's headers, before its end
        self._header_bytes = 0  # of the headers so far
        self._raw_bytes = 0  # since the last request's headers
        self._num_in_body = self._num_raw_in_body = 0  # bytes of the body; with the sizes and extensions of its chunks
        self._num_held = 0  # bytes of headers, as last counted
        self._declines_upgrade = False  # between the end of such a header and the second parse of its request
        self._is_last = False  # the connection ends with the current response; what follows its request is ignored
        self._num_ignored = 0
        if len(self.connections) > self.max_connections and not self.others.evict_oldest(self):
            self._refuse(503, "too many connections")
            return
        self.others.waits(self, was_served=False)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn keeps the timer, and with it the connection, after a reset
        self.others.change(self._num_held, 0)
        self.others.waits_no_more(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close a connection that waits for a request: its place is needed."""
        num_over = len(self.connections) - self.max_connections
        if self.transport.get_write_buffer_size() and num_over <= SPARE_FILES // 4:
            self.transport.close()  # after the last bytes of its response
            self._linger()
        else:
            self.transport.abort()

    # Input

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_last:
            self._num_ignored += len(data)
            if self._num_ignored > MAX_IGNORED_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing() or self._is_last:
            return
        if not self._is_answering:
            self._expect_headers()  # an empty line or the rest of a refused body does not stop the timer
        if self._header_timer is not None and not self._is_in_body:  # an endless header
            self._raw_bytes += len(data)
            if self._raw_bytes > 2 * MAX_HEADER_BYTES:
                self._refuse(431, "the headers are too large")
        if self._is_in_body:
            self._num_raw_in_body += len(data)
            if self._num_raw_in_body > MAX_CHUNK_OVERHEAD + 8 * self._num_in_body:
                self._refuse(400, "the chunks of the body have long extensions")
        if not self._count_held():
            self._refuse(503, "the headers of all connections are too large")

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            if not self._is_answering or self._is_in_body:  # else another request, or anything else, behind this one
                self.logger.warning(INVALID)
            is_long = self._header_bytes > MAX_HEADER_BYTES
            self._refuse(431 if is_long else 400, "the headers are too large" if is_long else INVALID)

    def _without_upgrade(self) -> bytes:
        """Return the head of the current request without its Upgrade header, for a new parser.

        Some clients (Java, curl --http2) offer HTTP/2 with each first request; a response in HTTP/1.1 declines the
        offer. The parser ends at the header of such a request, so that its body would be read as the next request.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._declines_upgrade = False
        return b"\r\n".join([*lines, b"", b""])

    def _count_held(self) -> bool:
        """Count the bytes of headers. Returns whether they are within the shared budget."""
        num_before, self._num_held = self._num_held, 0
        if self._is_in_headers:
            self._num_held = max(self._header_bytes, self._raw_bytes)
        elif self._is_answering:
            self._num_held = self._header_bytes + len(self.url)
        return self.others.change(num_before, self._num_held)

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise ValueError  # ends the parser with an HttpParserError
        super().on_message_begin()
        self._is_in_headers = True
        self._is_in_body = False
        self._header_bytes = 0
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += HEADER_OVERHEAD + len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError
        if not self._is_in_body:  # trailers of a chunked body are ignored: they must not set a key
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._declines_upgrade = self.parser.should_upgrade()
        if self._declines_upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise ValueError  # the rest is not HTTP, whatever its headers say
            return
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._is_in_headers = False
        self._raw_bytes = self._num_in_body = self._num_raw_in_body = 0
        super().on_headers_complete()  # raises if the path is invalid; else `self.cycle` is this request's
        self._is_in_body = True
        self.others.sends(self)
        self.cycle.scope[BODY_WRITER] = BodyWriter(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_in_body += len(body)

    def on_message_complete(self) -> None:
        if self._declines_upgrade:
            return
        self._is_in_body = False
        if self.cycle.response_complete:  # a refusal came before the end of the body
            self.others.waits(self, was_served=True)
        else:
            self.others.waits_no_more(self)
        super().on_message_complete()

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._headers_missing)

    def _headers_missing(self) -> None:
        self._header_timer = None
        self._refuse(408, "no request arrived in time")

    def on_response_complete(self) -> None:
        # It refers to the cycle, which would be freed only by a collection.
        self.cycle.scope.pop(BODY_WRITER, None)  # type: ignore[misc]
        super().on_response_complete()
        self._count_held()
        if not self.transport.is_closing():
            self.others.waits(self, was_served=True)
        elif self._is_last:
            self._linger()

    # Output

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _watch_writing(self, num_unread: int) -> None:
        self._write_timer = self.loop.call_later(self.slow_reader_s, self._still_writing, num_unread)

    def _still_writing(self, num_before: int) -> None:
        """Abort the connection if the client has read nothing since the last check."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread < num_before:
            self._watch_writing(num_unread)
        else:
            log.warning("a client read nothing for %g s: its connection is aborted", self.slow_reader_s)
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._linger()

    def shutdown(self) -> None:
        super().shutdown()
        self._linger()

    def cut(self) -> None:
        """Abort a connection with an unread response: the server is stopping."""
        if self._is_answering:
            self.transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        """Answer the request that is being read with an error and close, or end after the current response."""
        if self.transport.is_closing():
            self._linger()
        elif self._is_answering and not self._is_in_body:
            self._is_last = True
            self.cycle.keep_alive = False
        else:
            if not (self._is_in_body and self.cycle.response_started):
                head = f"HTTP/1.1 {status} \r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n"
                self.transport.write(f"{head}connection: close\r\n\r\n{text}".encode())
            self.transport.close()
            self._linger()

    def _linger(self) -> None:
        """Limit the time that a closing transport waits for the client to read the last bytes."""
        if self.transport.is_closing() and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)


@lru_cache(maxsize=1)
def _headers_at(now_s: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(now_s, usegmt=True).encode()), (b"server", b"quire")]


class _State(ServerState):
    """Makes the Date header when it is needed, so that no timer has to run."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return _headers_at(int(time.time()))

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        pass


class HttpServer(uvicorn.Server):
    """Runs until SIGTERM or SIGINT. The first signal awaits `on_stop` and then stops; further ones call `on_hurry`.

    `handles_signals`: only the main thread of a process can. Otherwise it runs until `stop`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_stop: Callable[[], Awaitable[None]],
        on_hurry: Callable[[], None],
        *,
        handles_signals: bool = True,
    ) -> None:
        super().__init__(config)
        self._handles_signals = handles_signals
        self.server_state = _State()
        self._on_stop = on_stop
        self._on_hurry = on_hurry
        self._stopping: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def main_loop(self) -> None:
        await self._end.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        numbers = (signal.SIGTERM, signal.SIGINT) if self._handles_signals else ()
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # already stopping: further signals have no effect

    def stop(self) -> None:
        """Begin the shutdown; if it has begun, call `on_hurry`."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        else:
            self._on_hurry()

    async def _stop(self) -> None:
        try:
            await self._on_stop()
        finally:
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, HttpProtocol):
                    connection.cut()
            self._end.set()


def bind(host: str, port: int) -> list[socket.socket]:
    """Return bound sockets. Called before anything slow, so that a busy port is reported at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidRequest(f"--host {host!r}: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = f"; --port {port + 1} may be free" if port else ""
        raise InvalidRequest(f"cannot listen on {host} port {port}: {reason}{hint}") from None
    listener.setblocking(False)
    return [listener]


def raise_file_limit(max_connections: int) -> int:
    """Raise the limit of open files as far as needed and allowed. Returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + SPARE_FILES
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        for new in (max(soft, allowed), max(soft, min(allowed, MAC_MAX_FILES))):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
                soft = new
                break
    return max(1, min(max_connections, soft - SPARE_FILES))


def make_config(app: Any, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        loop="auto",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=5,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        root_path=config.root_path,
        backlog=2048,
    )
