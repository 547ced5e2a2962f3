"""uvicorn with what it lacks: deadlines and bounds for headers, an abort, news of a disconnect to every request of a
connection, a loop that sleeps while nothing happens, and signals that drain.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.errors import InvalidRequest
from quire.server.stream import ABORT

HEADER_S = 10.0  # from the first byte of a request, or from the connection on, to the end of its headers
IDLE_S = 75.0  # of a connection between two requests: longer than clients keep theirs, or they race with us
LINGER_S = 30.0  # for a reader of the last bytes
MAX_HEADER_BYTES = 64 << 10
SPARE_FILES = 128  # descriptors kept for everything but connections

log = logging.getLogger(__name__)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    max_connections = 4096
    header_s = HEADER_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # of names and values
        self._raw_bytes = 0  # since the last request's headers
        self._cycles: set[RequestResponseCycle] = set()
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections")
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        for cycle in self._cycles:  # a pipelined request behind the one that runs must not hide that the client left
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._header_timer is not None:  # still in the headers: one of them may have no end
            self._raw_bytes += len(data)
            if self._raw_bytes > 2 * MAX_HEADER_BYTES:
                self._refuse(431, "the headers are too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["extensions"] = {ABORT: self.transport.abort}
        self._header_bytes = 0
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError  # ends the parser, which calls send_400_response

    def on_headers_complete(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._raw_bytes = 0
        super().on_headers_complete()
        self._cycles = {cycle for cycle in self._cycles if not cycle.response_complete}
        if self.cycle is not None:
            self._cycles.add(self.cycle)

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the headers are too large")
        else:
            self._refuse(400, msg)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._linger()

    def shutdown(self) -> None:
        super().shutdown()
        self._linger()

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._refuse, 408, "no request came in time")

    def _refuse(self, status: int, text: str) -> None:
        if not self.transport.is_closing():
            head = f"HTTP/1.1 {status} \r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n{text}".encode())
            self.transport.close()
        self._linger()

    def _linger(self) -> None:
        """A transport that closes sends its last bytes first; whoever does not read them is not waited for."""
        if self.transport.is_closing() and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)


class _State(ServerState):
    """With a date that is made when it is needed, so that no timer has to run."""

    def __init__(self) -> None:
        self._at_s = 0
        self._headers: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now_s = int(time.time())
        if now_s != self._at_s:
            self._at_s = now_s
            self._headers = [(b"date", formatdate(now_s, usegmt=True).encode()), (b"server", b"quire")]
        return self._headers

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        pass


class HttpServer(uvicorn.Server):
    """Sleeps until it is told to stop. The first SIGTERM or SIGINT calls `on_stop`, whose end ends the server; every
    further one calls `on_hurry`."""

    def __init__(
        self, config: uvicorn.Config, on_stop: Callable[[], Awaitable[None]], on_hurry: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.server_state = _State()
        self._on_stop = on_stop
        self._on_hurry = on_hurry
        self._stopping: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def main_loop(self) -> None:
        await self._end.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # it is ending: another signal cannot make it end better

    def stop(self) -> None:
        """Begin to end, or hurry."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        else:
            self._on_hurry()

    async def _stop(self) -> None:
        try:
            await self._on_stop()
        finally:
            self._end.set()


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, or an error that says what to do. Before anything slow: a busy port is found at once."""
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
    """As many files as the system lets us have. Returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + SPARE_FILES
    if soft < wanted:
        new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, new), hard))
        soft = max(soft, new)
    return max(1, min(max_connections, soft - SPARE_FILES))


def make_config(app: Any, *, certfile: str | None, keyfile: str | None, root_path: str) -> uvicorn.Config:
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
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
        root_path=root_path,
        backlog=2048,
    )
