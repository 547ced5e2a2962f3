"""R10: slow and silent clients. R31: clients that try to exhaust the memory of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.crowds import CHAT, Asker, Crowd, asking, crowd_at, memory_of, raise_file_limit
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly, timed
from tests.gauntlet.flood import left_over, percentile, warm_up
from tests.server.rig import request_bytes, serving
from tests.waiting import HANG_S, eventually

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PAGE = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF_HEADER = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
MAX_CLOSE_S = 15.0
MAX_SLOWER = 20.0  # percent
MIB = 1 << 20


def run_slow_clients(gauntlet: Gauntlet) -> Iterator[Figure]:
    raise_file_limit(8192)
    # The limits of the header and the body are the defaults.
    limits_s = gauntlet.size(10, 2)
    limits = [f"--{name}-timeout={limits_s}" for name in ("header", "body", "slow-client")]
    with serving(*gauntlet.one_model("--device", "5ms"), *limits) as server:
        base = warm_up(server)
        with asking(server) as asker:
            if not gauntlet.is_quick:
                os.nice(19)  # real attackers do not use the CPU of the server
            before_s = asker.take(gauntlet.size(200, 5))
            slow_s: list[float] = []
            for attack in (_silent_and_half_headers, _slow_writers_and_readers, _idle_connections):
                with crowd_at(server) as crowd:
                    yield from attack(gauntlet, crowd, asker)
                    slow_s += (found := asker.take())
                    gauntlet.say(f"{attack.__name__}: first token p99 {percentile(found, 99) * 1000:.0f} ms")
            before_s += asker.take(gauntlet.size(200, 5))
        before_ms, slow_ms = (percentile(times_s, 99) * 1000 for times_s in (before_s, slow_s))
        slower = 100 * (slow_ms / before_ms - 1)
        yield from (
            Figure("first token of other clients while there are no slow clients, p99", before_ms, "ms"),
            Figure("first token of other clients while there are slow clients, p99", slow_ms, "ms"),
            timed("increase of the time to the first token of other clients, p99", slower, MAX_SLOWER, "%"),
            Figure("requests of other clients answered", asker.num_answered, at_least=10),
            exactly("requests of other clients not answered", len(asker.problems)),
            *left_over(server, base),
        )


def _closed(crowd: Crowd, what: str) -> list[Figure]:
    return [
        Figure(
            f"{what} closed by the server",
            len(crowd.closed_after_s),
            at_least=len(crowd.closed_after_s) + len(crowd.sockets),
        ),
        Figure(
            f"{what}: longest time open", max(crowd.closed_after_s, default=0), "s", at_most=MAX_CLOSE_S, is_timed=True
        ),
    ]


def _silent_and_half_headers(gauntlet: Gauntlet, crowd: Crowd, asker: Asker) -> list[Figure]:
    """Half of the sockets begin a header, half send nothing. Each socket sends a byte about every eight seconds."""
    asker.take()
    count = gauntlet.size(2000, 100)
    # All of them are open at the same time: the first one is closed after 10 s.
    crowd.grow(2 * count, lambda number: HALF_HEADER if number % 2 else b"", per_s=450)

    def dribble() -> None:
        for sock in gauntlet.random.sample(list(crowd.sockets), len(crowd.sockets) // 160):
            crowd.send(sock, b"a")

    crowd.wait_closed(HANG_S, dribble)
    return _closed(crowd, "silent and half-header connections")


def _slow_writers_and_readers(gauntlet: Gauntlet, crowd: Crowd, asker: Asker) -> list[Figure]:
    """Clients that send their bodies one byte at a time, and clients that request pages and do not read them."""
    asker.take()
    crowd.grow(gauntlet.size(200, 20), lambda _: HALF_BODY, per_s=400)
    writers = list(crowd.sockets)
    readers = Crowd(crowd.server)  # its `look` is never called, so nothing is read
    for _ in range(gauntlet.size(30, 3)):
        readers.add(PAGE * 16, receive_bytes=4096)  # more than the kernel buffers
        crowd.look(0.25)
    asker.take()  # the time that the server needs to send pages is not measured here

    def write() -> None:
        for sock in gauntlet.random.sample(writers, len(writers) // 10):
            if sock in crowd.sockets:
                crowd.send(sock, b"x")

    try:
        crowd.wait_closed(HANG_S, write)
        eventually(lambda: _num_open(readers) == 0, "slow readers are disconnected")
        return [
            *_closed(crowd, "connections with slow bodies"),
            exactly("connections with slow readers left open", _num_open(readers)),
        ]
    finally:
        readers.leave()


def _num_open(crowd: Crowd) -> int:
    """Connections that the server still holds. Nothing is read from them, so the kernel is asked."""
    ours = {sock.getsockname() for sock in crowd.sockets}
    held = psutil.Process(crowd.server.process.pid).net_connections("tcp")
    return sum(1 for one in held if one.raddr and tuple(one.raddr) in ours)


def _idle_connections(gauntlet: Gauntlet, crowd: Crowd, asker: Asker) -> list[Figure]:
    """Keep-alive connections that were served once stay open, and do not slow other clients."""
    asker.take()
    count = gauntlet.size(2000, 100)
    crowd.grow(count, lambda _: HEALTH, per_s=800)
    crowd.look_until(lambda found: found.num_answered >= count, "all are served")
    asker.take(gauntlet.size(200, 5))
    return [Figure("idle connections kept open", len(crowd.sockets), at_least=count)]


def run_exhaustion(gauntlet: Gauntlet) -> Iterator[Figure]:
    raise_file_limit(12_000)
    # Enough room for all requests of the attack by pipelining, so that other clients do not wait for the model.
    options = ("--backend", "fake", "--device", "5ms", "--num-blocks", "10000", "--max-num-seqs", "256")
    for attack in (_large_bodies, _pipelined_bytes, _small_headers, _large_headers):
        # A new server each time: memory that an attack leaves in the heap would hide the growth by the next one.
        with serving(str(gauntlet.tiny), *options) as server:
            base = warm_up(server)
            with crowd_at(server) as crowd, asking(server) as asker, memory_of(server.process.pid) as memory:
                what, bar_mb, more = attack(gauntlet, crowd)
                asker.take(3)  # since the attack began; the next three run during all of it
                asker.take(3)
            gauntlet.say(f"{what}: {memory.growth_mb:.0f} MB")
            yield from (Figure(f"{what}: growth of memory", memory.growth_mb, "MB", at_most=bar_mb), *more)
            yield exactly(f"{what}: requests of other clients not answered", len(asker.problems))
            yield from left_over(server, base, prefix=f"{what}: ")


Attacked = tuple[str, float, list[Figure]]


def num_refused(crowd: Crowd) -> int:
    return len([one for one in crowd.received if b" 429 " in one or b" 503 " in one])


def _large_bodies(gauntlet: Gauntlet, crowd: Crowd) -> Attacked:
    """Many bodies of 15 MiB that never end. All together may hold 256 MiB."""
    count = gauntlet.size(96, 19)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {16 * MIB}\r\n\r\n".encode()
    data = b'{"messages": "' + b"a" * (15 * MIB)
    num_sent = sum(crowd.push(crowd.add(head), data) for _ in range(count))
    # The rest of a refused body is read for some seconds before its answer.
    crowd.look_until(num_refused, "some are refused")
    more = [
        Figure("unfinished large bodies: sent", num_sent / 1e6, "MB"),
        Figure("unfinished large bodies: refused", num_refused(crowd), at_least=1),
    ]
    return "unfinished large bodies", 400.0, more


def _pipelined_bytes(gauntlet: Gauntlet, crowd: Crowd) -> Attacked:
    """Pipelined requests, 2 MiB on each connection. A connection may hold 1 MiB, all connections together 64 MiB."""
    endless = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    waiting = request_bytes(CHAT, {"messages": [], "user": "u" * (60 << 10)}) * 15
    num_sent = 0
    for _ in range(gauntlet.size(100, 10)):
        sock = crowd.add(request_bytes(CHAT, endless))
        crowd.look(0.01)
        num_sent += crowd.push(sock, waiting + HALF_HEADER + b"a" * (60 << 10), 1.0)
    crowd.look(0.5)
    return "pipelined requests", 160.0, [Figure("pipelined requests: sent", num_sent / 1e6, "MB")]


def _small_headers(gauntlet: Gauntlet, crowd: Crowd) -> Attacked:
    """Headers with names of one character, 60 KiB on each connection."""
    data = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * (15 << 10)
    count = gauntlet.size(2000, 50)
    num_sent = sum(crowd.push(crowd.add(), data) for _ in range(count))
    crowd.wait_closed(HANG_S)  # the response is lost with data that the server has not read
    more = [
        Figure("many small headers: sent", num_sent / 1e6, "MB"),
        Figure("many small headers: connections closed", len(crowd.closed_after_s), at_least=count),
        Figure(
            "many small headers: answers with 431", len([one for one in crowd.received if b" 431 " in one]), at_least=1
        ),
    ]
    return "many small headers", 120.0, more


def _large_headers(gauntlet: Gauntlet, crowd: Crowd) -> Attacked:
    """One unfinished header of 60 KiB on each connection. All connections together may hold 64 MiB."""
    count = gauntlet.size(3500, 200)
    num_sent = sum(crowd.push(crowd.add(), HALF_HEADER + b"a" * (60 << 10)) for _ in range(count))
    crowd.look(0.5)
    return "unfinished large headers", 160.0, [Figure("unfinished large headers: sent", num_sent / 1e6, "MB")]


ROWS = (
    Row(
        "R10", "Slow and silent clients do not make other clients more than 20 % slower", run_slow_clients, limit_s=300
    ),
    Row("R31", "No client exhausts the memory of the server", run_exhaustion, limit_s=240),
)
