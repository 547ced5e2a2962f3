"""R12: request smuggling, floods of headers, and mutated bodies.

The corpora of malformed HTTP and of invalid bodies are sent by tests/server/test_hostile.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from random import Random
from typing import Any

from tests.gauntlet.crowds import crowd_at, memory_of
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly, timed
from tests.gauntlet.flood import left_over, warm_up
from tests.server import corpus
from tests.server.rig import FAKE, Server, serving
from tests.waiting import HANG_S

MAX_ANSWER_S = 1.0
SECOND = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"prompt":"Hi"}'
SIZE = b"%d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
MIB = 1 << 20
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**40, 1e308, 0.1, "", "a", "\ud800", "\0", "x" * 70_000, [], {}, [[]], [None]),
    *({"type": "text"}, {"role": "tool", "content": []}, ["a"] * 300, {"a": {"b": {"c": [1]}}}, "user", "auto"),
)
_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}}}
_SHAPE = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}}
# Valid bodies with many fields.
RICH: dict[str, dict[str, Any]] = {
    **corpus.GOOD,
    corpus.CHAT: {
        **corpus.GOOD[corpus.CHAT],
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": _SHAPE},
        "logit_bias": {"5": 1},
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
    },
    corpus.MESSAGES: {
        **corpus.GOOD[corpus.MESSAGES],
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "input_schema": _TOOL["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
    },
    corpus.RESPONSES: {
        **corpus.GOOD[corpus.RESPONSES],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [{"type": "function", **_TOOL}],
        "text": {"format": {"type": "json_schema", **_SHAPE}},
        "reasoning": {"effort": "low"},
    },
}


def _post(headers: bytes, body: bytes) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n" + body + SECOND


def _chunk(line: bytes, end: bytes = b"\r\n0\r\n\r\n") -> bytes:
    return _post(CHUNKED, line + BODY + end)


# A proxy that divides these bytes in another way would not see the second request. All must be refused.
SMUGGLING = {
    "a length, then chunks": _post(b"content-length: " + SIZE + b"\r\n" + CHUNKED, b"0\r\n\r\n"),
    "chunks, then a length": _post(CHUNKED + b"content-length: 4\r\n", b"5c\r\n\r\n0\r\n\r\n"),
    "two lengths": _post(b"content-length: " + SIZE + b"\r\ncontent-length: 0\r\n", BODY),
    "two equal lengths": _post((b"content-length: " + SIZE + b"\r\n") * 2, BODY),
    "a list of lengths": _post(b"content-length: " + SIZE + b", " + SIZE + b"\r\n", BODY),
    "a folded length": _post(b"x: a\r\n content-length: 5\r\ncontent-length: " + SIZE + b"\r\n", BODY),
    "folded chunks": _post(b"transfer-encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
    "a header that ends with LF": _post(b"x: a\ncontent-length: " + SIZE + b"\r\n", BODY),
    "LF only": b"POST /tokenize HTTP/1.1\nhost: localhost\ncontent-length: 0\n\n" + SECOND,
    "chunks that end with LF": _post(CHUNKED, b"f\n" + BODY + b"\n0\n\n"),
    "CR only": _post(b"x: a\rcontent-length: 3\r\n", BODY),
    "an extension that ends with LF": _chunk(b"f;a\n"),
    "an extension with CR": _chunk(b"f;a\rb\r\n"),
    "a long extension": _chunk(b"f;" + b"a" * (2 * MIB) + b"\r\n"),
    "a chunk size with 0x": _chunk(b"0xf\r\n"),
    "a chunk size with a blank": _chunk(b"f \r\n"),
    "a chunk without an end": _chunk(b"f\r\n", b"XX0\r\n\r\n"),
    "an unknown coding": _post(b"transfer-encoding: xchunked\r\n", b"0\r\n\r\n"),
    "a coding after a tab": _post(b"transfer-encoding:\x0bchunked\r\n", b"0\r\n\r\n"),
    "a coding after chunked": _post(b"transfer-encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    "a quoted coding": _post(b'transfer-encoding: "chunked"\r\n', b"0\r\n\r\n"),
    "a blank before the colon": _post(b"content-length : 0\r\n", b""),
    "a blank in a name": _post(b"transfer -encoding: chunked\r\n", b"0\r\n\r\n"),
    "NUL in a name": _post(b"content\0-length: 5\r\n", BODY),
    "NUL in a value": _post(b"x: a\0\r\ncontent-length: 0\r\n", b""),
    "NUL first": b"\0" + _post(b"content-length: 0\r\n", b""),
    "a length with 0x": _post(b"content-length: 0xf\r\n", BODY),
    "a length with a sign": _post(b"content-length: +15\r\n", BODY),
    "a length with a blank": _post(b"content-length: 15 0\r\n", BODY),
    "a length with an underscore": _post(b"content-length: 1_5\r\n", BODY),
    "a header that begins with a blank": b"POST / HTTP/1.1\r\n content-length: 5\r\nhost: localhost\r\n\r\n" + SECOND,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nhost: localhost\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SECOND,
}
FLOODS: dict[str, Callable[[], bytes]] = {
    "10^6 headers": lambda: b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 10**6,
    "10^5 names": lambda: b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d:\r\n" % i for i in range(10**5)),
    "one header of 16 MiB": lambda: b"GET /health HTTP/1.1\r\nx: " + b"a" * (16 * MIB),
    "a path of 16 MiB": lambda: b"GET /" + b"a" * (16 * MIB),
    "trailers": lambda: _post(CHUNKED, b"0\r\n" + b"x: y\r\n" * 10**6),
}


class Tally:
    """Statuses and times of answers."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.statuses: Counter[int] = Counter()
        self.longest_s = 0.0

    def note(self, name: str, status: int, seconds: float, *, is_expected: bool = True) -> None:
        self.statuses[status] += 1
        if not is_expected or status >= 500 or seconds > MAX_ANSWER_S:
            self._say(f"{name}: {status} in {seconds:.1f} s")
        self.longest_s = max(self.longest_s, seconds)

    def num_between(self, low: int, high: int) -> int:
        return sum(count for status, count in self.statuses.items() if low <= status < high)


def run(gauntlet: Gauntlet) -> Iterator[Figure]:
    yield from _wire(gauntlet)
    yield from _mutants(gauntlet)


def _wire(gauntlet: Gauntlet) -> list[Figure]:
    """Send messages that smuggle a second request, and floods of headers."""
    tally = Tally(gauntlet.say)
    with serving(*gauntlet.one_model()) as server:
        base = warm_up(server)
        worker_pid = server.worker_pid
        num_smuggled = sum(_is_smuggled(server, tally, name, data) for name, data in SMUGGLING.items())
        floods = _flood(gauntlet, server)
        good = server.post(corpus.CHAT, corpus.GOOD[corpus.CHAT])
        return [
            Figure("messages that smuggle a second request", len(SMUGGLING), at_least=30),
            exactly("messages that smuggle a second request and are accepted", num_smuggled),
            timed("messages that smuggle a second request: longest time", tally.longest_s, MAX_ANSWER_S),
            *floods,
            exactly("restarts of the worker", int(server.worker_pid != worker_pid)),
            exactly("status of a valid request afterwards", good.status, 200),
            exactly("tracebacks in the log", server.log.count("Traceback")),
            *left_over(server, base),
        ]


def _is_smuggled(server: Server, tally: Tally, name: str, data: bytes) -> bool:
    """Whether the message is accepted, or the request after it is answered."""
    answer = b""
    begin = time.monotonic()
    with server.raw() as sock, contextlib.suppress(ConnectionError):
        with contextlib.suppress(OSError):  # the server may close while this sends
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(1 << 16):
            answer += piece
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)]
    is_refused = len(found) <= 1 and all(400 <= status < 500 for status in found)
    tally.note(name, found[0] if found else 0, time.monotonic() - begin, is_expected=is_refused)
    return not is_refused or b"smuggled" in answer


def _flood(gauntlet: Gauntlet, server: Server) -> list[Figure]:
    """Send floods of headers, several at once. All must be refused, and the memory of the server stay bounded."""
    num_refused = 0
    copies = gauntlet.size(8, 2)
    with memory_of(server.process.pid) as memory:
        for make in FLOODS.values():
            data = make()
            with crowd_at(server) as crowd:
                for _ in range(copies):
                    crowd.push(crowd.add(), data)
                crowd.wait_closed(60)
                num_refused += len(crowd.closed_after_s)
                refusals = (b" 431 ", b" 400 ", b" 414 ")
                # A client that still sends when the server closes may lose the answer: the connection is reset.
                assert all(not one or any(status in one for status in refusals) for one in crowd.received)
    return [
        exactly("floods of headers: connections left open", copies * len(FLOODS) - num_refused),
        Figure("floods of headers: growth of memory", memory.growth_mb, "MB", at_most=64),
    ]


def mutate_value(random: Random, value: Any, odd: Sequence[Any] = ODD) -> Any:
    """A copy with one part replaced by an odd value, removed, renamed, repeated or put into another one."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        rest = {key: kept for key, kept in value.items() if key != name}
        match random.randrange(10):
            case 0:
                return rest
            case 1:
                return {**rest, name + random.choice(("", "s", "\0", "_id")): random.choice(odd)}
            case _:
                return {**value, name: mutate_value(random, value[name], odd)}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        changed = mutate_value(random, value[place], odd)
        return [*value[:place], *[changed] * random.choice((0, 1, 1, 1, 3)), *value[place + 1 :]]
    return random.choice((*odd, [value], {"type": value}, {"$ref": value}))


def _mutants(gauntlet: Gauntlet) -> list[Figure]:
    """Valid bodies with a few parts changed, and some of them with a few bytes changed."""
    count = gauntlet.size(10_000, 150)
    tally = Tally(gauntlet.say)
    random = gauntlet.random
    with serving(str(gauntlet.tiny), *FAKE, "--max-model-len", "128") as server:
        worker_pid = server.worker_pid
        connection = HTTPConnection(*server.address, timeout=HANG_S)
        for _ in range(count):
            path, body = random.choice(list(RICH.items()))
            for _ in range(random.randrange(1, 4)):
                body = mutate_value(random, body)
            data = bytearray(json.dumps(body).encode())
            for _ in range(random.choice((0, 0, 1, 3))):
                data[random.randrange(len(data))] = random.randrange(256)
            begin = time.monotonic()
            connection.request("POST", path, bytes(data), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            tally.note(f"{path} {bytes(data)[:200]!r}", answer.status, time.monotonic() - begin)
        connection.close()
        server.wait_free()
        return [
            Figure("mutated bodies", count, at_least=gauntlet.size(10_000, 150)),
            Figure("mutated bodies refused", tally.num_between(400, 500), at_least=count // 3),
            exactly("mutated bodies: answers with 5xx", tally.num_between(500, 600)),
            timed("mutated bodies: longest time to an answer", tally.longest_s, MAX_ANSWER_S),
            exactly("mutated bodies: restarts of the worker", int(server.worker_pid != worker_pid)),
            exactly("mutated bodies: tracebacks in the log", server.log.count("Traceback")),
        ]


ROWS = (
    Row(
        "R12",
        "Smuggled requests, floods of headers and mutated bodies do not stop the server",
        run,
        limit_s=600,
    ),
)
