"""The timers of one connection and of one stream, with a fake clock."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from uvicorn.server import ServerState

from quire.engine.generation import Delta
from quire.errors import InvalidRequest
from quire.server import http
from quire.server.errors import ApiError, Kind
from quire.server.http import (
    FREE_BYTES,
    GRACE_S,
    LINGER_S,
    SPARE_FILES,
    EventStream,
    HttpProtocol,
    OpenConnections,
    bind,
    make_config,
    raise_file_limit,
)
from quire.server.models import ActiveRequest
from quire.server.protocols.openai import OPENAI

SLOW_S, HEADER_S = HttpProtocol.slow_reader_s, HttpProtocol.header_s


class Timer:
    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop whose time passes only when a test fires a timer."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *values: object) -> Timer:
        self.timers.append(Timer(delay_s, lambda: call(*values)))
        return self.timers[-1]

    def fire(self, delay_s: float) -> None:
        """Fire the one timer with this delay."""
        (timer,) = [timer for timer in self.timers if timer.delay_s == delay_s and not timer.is_cancelled]
        self.timers.remove(timer)
        timer.call()


class Transport:
    def __init__(self) -> None:
        self.num_unread = 0
        self.written = b""
        self.is_aborted = self.is_closed = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


class Connection:
    def __init__(self, state: ServerState | None = None) -> None:
        self.loop, self.transport = Loop(), Transport()
        config = make_config(lambda: None, certfile=None, keyfile=None, root_path="")
        config.load()
        self.protocol = HttpProtocol(config, state or ServerState(), {}, cast(asyncio.AbstractEventLoop, self.loop))
        self.protocol.connection_made(cast(asyncio.Transport, self.transport))

    def close(self) -> None:
        self.protocol.connection_lost(None)


def test_a_slow_reader_is_kept_and_one_that_does_not_read_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection()
    transport = connection.transport
    transport.num_unread = 100_000
    connection.protocol.pause_writing()
    for num_unread in (99_999, 70_000, 10):
        transport.num_unread = num_unread
        connection.loop.fire(SLOW_S)
        assert not transport.is_aborted
    connection.loop.fire(SLOW_S)
    assert transport.is_aborted
    assert "a client read nothing for 30 s: its connection is aborted" in caplog.text


def test_resuming_the_write_stops_the_timer() -> None:
    connection = Connection()
    connection.transport.num_unread = 100_000
    connection.protocol.pause_writing()
    connection.protocol.resume_writing()
    assert all(timer.is_cancelled for timer in connection.loop.timers if timer.delay_s == SLOW_S)


def test_a_lost_connection_has_no_timers() -> None:
    """Else the loop keeps the connection, and clients that reset their connections would use up the memory."""
    for error in (None, ConnectionResetError()):
        connection = Connection()
        connection.protocol.on_response_complete()  # starts the timer between two requests
        connection.transport.num_unread = 100_000
        connection.protocol.pause_writing()
        connection.protocol.connection_lost(error)
        assert [timer.delay_s for timer in connection.loop.timers if not timer.is_cancelled] == []


def test_a_connection_without_headers_gets_408_and_is_closed() -> None:
    connection = Connection()
    connection.protocol.data_received(b"GET /health HTTP/1.1\r\nhost: local")
    connection.loop.fire(HEADER_S)
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    assert connection.transport.is_closed
    connection.loop.fire(LINGER_S)  # the client does not read the response either
    assert connection.transport.is_aborted


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OpenConnections:
    """Shared by the connections of one test."""
    found = OpenConnections(max_bytes=100_000)
    monkeypatch.setattr(HttpProtocol, "others", found)
    return found


def test_many_small_headers_are_refused_for_their_memory() -> None:
    connection = Connection()
    connection.protocol.data_received(b"GET /health HTTP/1.1\r\nhost: local\r\n" + b"a:\r\n" * 1000)
    assert connection.transport.written.startswith(b"HTTP/1.1 431 ")
    assert len(connection.protocol.headers) < 500


def test_all_connections_share_a_budget_of_header_bytes(others: OpenConnections) -> None:
    half = b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 50_000
    first, second, third, small = [Connection() for _ in range(4)]
    for connection in (first, second):
        connection.protocol.data_received(half)
        assert not connection.transport.is_closing()
    third.protocol.data_received(half)
    assert third.transport.written.startswith(b"HTTP/1.1 503 ")
    small.protocol.data_received(half[:FREE_BYTES])
    assert not small.transport.is_closing()  # still accepted
    for connection in (first, second, third, small):
        connection.close()
    assert others.num_bytes == 0


class Waiting:
    def __init__(self, name: str, evicted: list[str]) -> None:
        self._name, self._evicted = name, evicted

    def evict(self) -> None:
        self._evicted.append(self._name)


def test_the_order_of_eviction() -> None:
    """Silent connections, then idle ones, then those without a complete body; none in its time of grace."""
    now_s = 0.0
    connections = OpenConnections(clock=lambda: now_s)
    evicted: list[str] = []
    half, idle, first, second, late, newcomer = (
        Waiting(name, evicted) for name in ("half", "idle", "first", "second", "late", "newcomer")
    )
    connections.sends(half)
    connections.waits(idle, was_served=True)
    connections.waits(first, was_served=False)
    connections.waits(second, was_served=False)
    assert not connections.evict_oldest(newcomer)
    now_s = GRACE_S
    connections.waits(late, was_served=False)
    while connections.evict_oldest(newcomer):
        pass
    assert evicted == ["first", "second", "idle", "half"]
    now_s = 2 * GRACE_S
    assert connections.evict_oldest(newcomer)
    assert evicted[-1] == "late"


def test_at_the_limit_the_oldest_silent_connection_is_evicted(
    others: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    del others
    monkeypatch.setattr(http, "GRACE_S", 0.0)
    monkeypatch.setattr(HttpProtocol, "max_connections", 2)
    state = ServerState()
    served = Connection(state)
    served.protocol.on_response_complete()  # idle, and older than the next one
    silent = Connection(state)
    silent.protocol.data_received(b"GET /health HTTP/1.1\r\nhost: local")  # half a header is no request
    newcomer = Connection(state)
    assert silent.transport.is_aborted
    silent.close()
    assert not served.transport.is_closing()
    assert not newcomer.transport.is_closing()
    newcomer.protocol.others.waits_no_more(newcomer.protocol)  # it has a request
    served.transport.num_unread = 10
    last = Connection(state)
    assert (served.transport.is_closed, served.transport.is_aborted) == (True, False)  # its last bytes are sent first
    served.close()
    last.protocol.others.waits_no_more(last.protocol)
    refused = Connection(state)
    assert refused.transport.written.startswith(b"HTTP/1.1 503 ")  # each of the others has a request
    assert not last.transport.is_closing()


class FakeEncoder:
    """Encodes the text of deltas as it is."""

    waits_for_start = False

    def begin(self) -> bytes:
        return b""

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join(delta.text.encode() for _, delta in batch)

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """None: `feed` encodes it."""

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        """None: there is none."""

    def finish(self) -> bytes:
        return b"end"

    def fail(self, error: ApiError) -> bytes | None:
        """None: the dialect's event."""


class FakeActiveRequest:
    """The parts of an `ActiveRequest` that a stream uses. Raises an error when it is released."""

    request_id = "req_1"
    is_closed = False
    generations = ()

    def __init__(self, problem: Exception) -> None:
        self.problem = problem
        self.may_fail = asyncio.Event()

    async def next_batch(self) -> list[tuple[int, Delta]]:
        await self.may_fail.wait()
        raise self.problem

    def close(self, error: Exception | None = None) -> None:
        self.is_closed = True
        self.error = error


def test_the_headers_of_a_stream_are_sent_with_its_first_keep_alive() -> None:
    """An earlier failure has its own status; a later one is an event."""

    async def serve() -> list[Any]:
        sent: list[Any] = []
        work = FakeActiveRequest(ApiError(Kind.OVERLOADED, "waited too long", reason="queue_timeout"))

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body") == OPENAI.keep_alive:
                work.may_fail.set()

        stream = EventStream(cast(ActiveRequest, work), FakeEncoder(), {}, OPENAI, keep_alive_s=0.01)
        await stream.begin()
        await stream({}, cast(Any, None), send)
        return sent

    head, *bodies = asyncio.run(serve())
    assert head["status"] == 200
    assert bodies[0]["body"] == OPENAI.keep_alive
    assert b"waited too long" in bodies[-1]["body"]
    assert bodies[-1]["more_body"] is False


def test_a_failure_before_the_first_keep_alive_has_its_own_status() -> None:
    async def serve() -> None:
        work = FakeActiveRequest(ApiError(Kind.OVERLOADED, "the queue is full"))
        work.may_fail.set()
        stream = EventStream(cast(ActiveRequest, work), FakeEncoder(), {}, OPENAI, keep_alive_s=600)
        with pytest.raises(ApiError, match="the queue is full"):
            await stream.begin()
        assert work.is_closed

    asyncio.run(serve())


def test_the_limit_of_open_files_is_raised_as_far_as_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, resource.RLIM_INFINITY]

    def set_limit(_kind: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("not allowed to raise maximum limit")
        limits[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert raise_file_limit(4096) == 4096
    assert raise_file_limit(50_000) == limits[0] - SPARE_FILES == 10_240 - SPARE_FILES


def test_an_address_that_cannot_be_used_is_an_error_before_anything_is_loaded() -> None:
    (own,) = bind("127.0.0.1", 0)
    with own:
        assert own.getsockname()[0] == "127.0.0.1"
        assert not own.getblocking()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, text in (
            (("127.0.0.1", port), f"port {port}: Address already in use; --port {port + 1} may be free"),
            (("192.0.2.1", 0), "cannot listen on 192.0.2.1 port 0: Cannot assign requested address"),
            (("no-such-host.invalid", 0), "--host 'no-such-host.invalid': "),
        ):
            with pytest.raises(InvalidRequest) as refused:
                bind(*address)
            assert text in str(refused.value)
            assert ("may be free" in str(refused.value)) == (address[1] > 0)
