"""Raw sockets: every state of a connection has an end; upgrades, trailers and bytes behind a request are handled."""

from __future__ import annotations

import io
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.selection import mostly_nightly
from tests.server.rig import FAKE, Server, serving
from tests.waiting import eventually

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 3000, "stream": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    key = ("--api-key", "sk-connections")
    with serving(str(tiny_model), *FAKE, "--device", "5ms", *key, key="sk-connections") as server:
        yield server


@pytest.fixture(scope="module")
def strict(tiny_model: Path) -> Iterator[Server]:
    """A server with short limits, for connections that are to be cut."""
    times = ("--header-timeout", "2", "--body-timeout", "2", "--slow-client-timeout", "1")
    key = ("--api-key", "sk-connections")
    with serving(str(tiny_model), *FAKE, "--device", "5ms", *times, *key, key="sk-connections") as server:
        yield server


def request(body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "authorization: Bearer sk-connections", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


def statuses(sock: socket.socket, count: int) -> list[int]:
    """Read the statuses of the next responses, in order."""
    data = b""
    while len(found := re.findall(rb"HTTP/1\.1 (\d+) ", data)) < count:
        if not (more := sock.recv(65536)):
            break
        data += more
    return [int(status) for status in found]


def ends(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_a_silent_connection_is_closed(strict: Server) -> None:
    with strict.raw() as sock:
        assert b" 408 " in ends(sock)


def test_an_empty_line_after_an_answer_does_not_keep_a_connection_open(strict: Server) -> None:
    with strict.raw() as sock:
        sock.sendall(request(BODY))
        assert statuses(sock, 1) == [200]
        sock.sendall(b"\r\n")
        ends(sock)


def test_a_body_after_its_response_does_not_keep_a_connection_open(strict: Server) -> None:
    with strict.raw() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        assert statuses(sock, 1) == [200]
        sock.sendall(b"x")
        ends(sock)


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_a_disconnect_is_noticed_behind_another_request(server: Server, pause_s: float) -> None:
    sock = server.raw()
    sock.sendall(request(LONG))
    assert statuses(sock, 1) == [200]
    time.sleep(pause_s)
    sock.sendall(request(BODY))
    time.sleep(pause_s)
    sock.close()
    server.wait_free()


def test_a_trailer_does_not_count_as_a_header(server: Server) -> None:
    data = b'{"prompt": "Hi"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with server.raw() as sock:
        sock.sendall(head + b"%x\r\n%s\r\n0\r\nx-api-key: sk-connections\r\n\r\n" % (len(data), data))
        assert statuses(sock, 1) == [401]


BAD = {
    "no HTTP": (b"\x00\x01 nonsense\r\n\r\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    "a bad path": (b"GET a%% HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "CONNECT": (b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a bad chunk": (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\nz", 400),
    "a large header": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 17) + b"\r\n\r\n", 431),
    "many headers": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 1000, 431),
    "a header without an end": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 18), 431),
}
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHATS = {
    "chat": request(BODY),
    "stream": request({**BODY, "stream": True}),
    "GET": GET,
    "HEAD": GET.replace(b"GET", b"HEAD"),
}


def responses(data: bytes) -> list[tuple[int, bytes]]:
    """Statuses and bodies of responses that follow each other. Fails if one of them is not complete."""
    found = []
    file = io.BytesIO(data)
    while line := file.readline():
        status, headers = (
            int(line.split()[1]),
            dict(iter(lambda: file.readline().rstrip().partition(b": ")[::2], (b"", b""))),
        )
        body = b""
        if headers.get(b"transfer-encoding") == b"chunked":
            while size := int(file.readline(), 16):
                body += file.read(size)
                assert file.readline() == b"\r\n"
            assert file.readline() == b"\r\n"
        else:
            size = int(headers[b"content-length"])
            body = file.read(size)
            assert len(body) == size, body
        found.append((status, body))
    return found


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_request_is_refused(server: Server, bad: str) -> None:
    data, status = BAD[bad]
    with server.raw() as sock:
        sock.sendall(data)
        assert [found for found, _ in responses(ends(sock))] == [status]


@pytest.mark.parametrize("behind", [GET, CHATS["chat"], b"GET /hea", *(data for data, _ in BAD.values())])
@pytest.mark.parametrize("first", CHATS)
def test_a_request_is_answered_and_what_follows_before_the_answer_is_not(
    server: Server, first: str, behind: bytes
) -> None:
    """The connection ends, so a client that has sent another request sends it again."""
    with server.raw() as sock:
        sock.sendall(CHATS[first] + behind)
        data = ends(sock)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", data) == [b"200"]
    assert b'"finish_reason":"length"' in data or first in ("GET", "HEAD")


@pytest.mark.parametrize("bad", ["no HTTP", "a large header"])
def test_bytes_in_the_middle_of_an_answer_let_it_end(server: Server, bad: str) -> None:
    with server.raw() as sock:
        sock.sendall(request({**LONG, "max_tokens": 100}))
        begun = sock.recv(1)  # the response has begun, and most of it is to come
        sock.sendall(BAD[bad][0])
        ((status, body),) = responses(begun + ends(sock))
    assert (status, b"[DONE]" in body) == (200, True)


def test_a_bad_body_is_refused_although_its_request_has_begun(server: Server) -> None:
    """It is the first of its connection, and its handler waits for the rest of the body."""
    with server.raw() as sock:
        sock.sendall(BAD["a bad chunk"][0].replace(b"host: a", b"host: localhost"))
        assert [status for status, _ in responses(ends(sock))] == [400]


def test_endless_bytes_behind_bad_ones_end_the_connection(server: Server) -> None:
    sock = server.begin({**LONG, "max_tokens": 10_000})
    with suppress(ConnectionError):
        for _ in range(1000):
            sock.sendall(b"nonsense" * 1024)
    with suppress(ConnectionError):
        while sock.recv(65536):
            pass
    assert server.wait_free()["num_running"] == 0


OFFERS = {
    "h2c": ("connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"),
    "websocket": ("Connection: upgrade", "UPGRADE: websocket"),
    "TLS": ("Connection: upgrade", "UPGRADE: TLS/1.0, HTTP/1.1"),
}


@pytest.mark.parametrize(
    ("offer", "step"), mostly_nightly([("h2c", 5), ("websocket", 100), ("TLS", 100), ("h2c", 1)], 3)
)
def test_an_offer_is_declined_wherever_its_bytes_are_split(server: Server, offer: str, step: int) -> None:
    """As sent by Java's client and curl --http2. The request is answered, with its body, and so is the next one."""
    whole = request({**BODY, "max_tokens": 1}, *OFFERS[offer])
    assert whole.startswith(b"POST")
    for at in range(1, len(whole), step):
        with server.raw() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(whole[:at])
            wait_read(sock)
            sock.sendall(whole[at:])
            assert statuses(sock, 1) == [200], at
            sock.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            assert b"HTTP/1.1 200 " in ends(sock)


def test_an_offer_with_a_chunked_body_byte_by_byte(server: Server) -> None:
    head, _, data = request(BODY, "connection: upgrade, close", "upgrade: h2c").partition(b"\r\n\r\n")
    head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
    with server.raw() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data):
            sock.sendall(bytes([byte]))
            wait_read(sock)
        assert [status for status, _ in responses(ends(sock))] == [200]


def wait_read(sock: socket.socket) -> None:
    """Wait until the server has read all bytes that were sent, so that it reads the next ones by themselves."""
    ours, theirs = f":{sock.getsockname()[1]:04X}", f":{sock.getpeername()[1]:04X}"

    def is_read() -> bool:
        """Whether the server's end has no unread bytes. A line has its address, the other's, a state, `sent:unread`."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        unread = [line[4][9:] for line in lines if line[1].endswith(theirs) and line[2].endswith(ours)]
        return unread in (["00000000"], [])

    eventually(is_read, "the server reads the bytes")


def test_a_body_after_an_upgrade_is_not_parsed_as_a_request(server: Server) -> None:
    """Wherever the header is split between two packets."""
    inner = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = b"POST /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n"
    head += b"content-length: %d\r\n\r\n" % len(inner)
    for at in range(1, len(head) + 1):
        with server.raw() as sock:
            sock.sendall(head[:at])
            wait_read(sock)
            sock.sendall(head[at:])
            wait_read(sock)
            sock.sendall(inner)
            assert b" 200 " not in ends(sock)


def test_expect_100_is_refused_without_reading_the_body(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n"
    with server.raw() as sock:
        sock.sendall(head)
        assert statuses(sock, 1) == [401]


def test_expect_100_is_answered_with_continue(server: Server) -> None:
    whole = request(BODY, "expect: 100-continue")
    at = whole.index(b"\r\n\r\n") + 4
    with server.raw() as sock:
        sock.sendall(whole[:at])
        assert statuses(sock, 1) == [100]
        sock.sendall(whole[at:])
        assert statuses(sock, 1) == [200]


def test_http_1_0_is_answered_and_closed(server: Server) -> None:
    with server.raw() as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in ends(sock)


def test_a_request_must_name_one_host(server: Server) -> None:
    for hosts in (b"", b"host: localhost\r\nhost: elsewhere\r\n"):
        with server.raw() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
            assert statuses(sock, 1) == [400]


def test_silent_connections_do_not_shut_out_other_clients(tiny_model: Path) -> None:
    """At the limit, connections without a complete request are closed. `test_http.py` shows their order."""
    options = ("--max-connections", "8", "--device", "50ms", "--api-key", "sk-connections")
    with serving(str(tiny_model), *FAKE, *options, key="sk-connections") as server:
        stream = server.begin(LONG)
        half = server.raw()
        half.sendall(request(BODY)[:-5])
        idle = server.raw()
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert statuses(idle, 1) == [200]
        silent = [server.raw() for _ in range(5)]
        running = [begin_when_allowed(server) for _ in range(7)]
        for sock in (*silent, idle, half):
            wait_closed(sock)
        assert stream.recv(100)  # not closed
        assert server.get("/health").status == 503  # all serve requests
        for sock in (stream, *running, *silent):
            sock.close()


def test_a_connection_with_an_answer_is_not_evicted_for_its_next_request(tiny_model: Path) -> None:
    """Its next request has no complete body. A connection whose answer came before the end of its body is idle."""
    options = ("--max-connections", "3", "--device", "50ms")
    with serving(str(tiny_model), *FAKE, *options) as server:
        stream = server.begin(LONG)
        stream.sendall(request(BODY)[:-5])
        early = server.raw()
        early.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n")
        assert statuses(early, 1) == [200]
        early.sendall(b"ab")
        second, third = begin_when_allowed(server), begin_when_allowed(server)
        wait_closed(early)
        assert server.get("/health").status == 503  # all have answers that run
        for sock in (stream, second, third):
            sock.close()


def begin_when_allowed(server: Server) -> socket.socket:
    """Begin a stream as soon as the connections that wait may be closed for it: they have a time of grace."""

    def begun() -> socket.socket | None:
        sock = server.raw()
        with suppress(ConnectionError):  # refused, or closed before its request was read
            server.send_request(LONG, sock=sock)
            if sock.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL) == b"HTTP/1.1 200":
                return sock
        sock.close()
        return None

    found = eventually(begun, "a connection gives way")
    assert found is not None
    return found


def wait_closed(sock: socket.socket) -> None:
    """Read until the server has closed the connection. Raises TimeoutError."""
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
