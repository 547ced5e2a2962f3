"""Hostile requests are refused clearly and do not disturb other requests.

One long stream runs during the whole corpus, from its first request to its last: it must be complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from _pytest.mark import ParameterSet

from tests.gauntlet.flood import text_of
from tests.gauntlet.secrets import KEY, PROMPT, hits, send_canaries
from tests.server import corpus
from tests.server.corpus import WIRE, Hostile, Wire
from tests.server.rig import FAKE, Server, ask_async, serving, status_of
from tests.waiting import HANG_S, eventually, repeating

MAX_CPU_S = 5.0  # of the server's process, for one refusal: it serves nothing else meanwhile
MAX_ERROR_BYTES = 4096
STREAM_TOKENS = 300
STREAM = {
    "messages": [{"role": "user", "content": "Tell me everything."}],
    "max_tokens": STREAM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENAI_TYPES = {"invalid_request_error", "permission_error"}
ANTHROPIC_TYPES = {"invalid_request_error", "not_found_error", "request_too_large", "permission_error"}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(str(tiny_model), *FAKE, "--device", "10ms") as found:
        yield found


@pytest.fixture(scope="module")
def worker(server: Server) -> int:
    return server.worker_pid


@pytest.fixture(scope="module")
def texts(server: Server, worker: int) -> Iterator[list[str]]:
    """The texts of long streams without a pause between them, of which at least one runs at any time."""
    del worker  # its pid is known before anything is sent
    found: list[str] = []
    is_flowing = threading.Event()

    def read_one() -> None:
        reply = asyncio.run(ask_async(server, corpus.CHAT, STREAM, on_data=lambda _: is_flowing.set()))
        assert (reply.status, reply.ending) == (200, "done"), reply.body[-500:]
        chunks = [data for _, data in reply.events if data != "[DONE]"]
        assert chunks[-1]["usage"]["completion_tokens"] == STREAM_TOKENS
        found.append(text_of(reply))

    with repeating(read_one):  # raises at the end what it raised
        assert is_flowing.wait(HANG_S)
        yield found


def cpu_s(server: Server) -> float:
    """CPU time of the server's own process."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def hostile_bodies() -> list[ParameterSet]:
    """`make test` sends each kind of body to one endpoint, so that all endpoints get some."""
    by_kind: dict[str, list[Hostile]] = defaultdict(list)
    for row in corpus.corpus():
        by_kind[row.name.removeprefix(row.path)].append(row)
    sent: Counter[str] = Counter()
    kept = set()
    for rows in by_kind.values():
        row = min(rows, key=lambda row: sent[row.path])
        sent[row.path] += 1
        kept.add(row.name)
    return [
        pytest.param(row, marks=() if row.name in kept else pytest.mark.nightly, id=row.name[:100])
        for row in corpus.corpus()
    ]


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("row", hostile_bodies())
def test_a_hostile_body_is_refused_clearly(server: Server, row: Hostile) -> None:
    before_s = cpu_s(server)
    answer = server.post(row.path, data=row.make())
    assert cpu_s(server) - before_s < MAX_CPU_S, "one body blocks the event loop"
    assert answer.status in row.statuses, answer.body[:500]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"]
    assert len(answer.body) < MAX_ERROR_BYTES
    error = error_of(row.path, answer.json)
    assert row.contains in error["message"]
    if row.names is not None:
        assert row.names in error["message"], error
        if "param" in error:  # only OpenAI's errors have this field
            assert error["param"] is not None
            assert error["param"].startswith(row.names), error


def error_of(path: str, body: Any) -> Any:
    """The error of a response in its protocol's format."""
    if path in (corpus.OLLAMA_CHAT, corpus.OLLAMA_GENERATE):
        assert set(body) == {"error"}
        assert body["error"]
        return {"message": body["error"]}
    if path in (corpus.MESSAGES, corpus.COUNT):
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["error"]["type"] in ANTHROPIC_TYPES
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] in OPENAI_TYPES
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("row", WIRE, ids=lambda row: row.name)
def test_invalid_http_is_refused(server: Server, row: Wire) -> None:
    before_s = cpu_s(server)
    with server.raw() as sock:
        answer = exchange(sock, row.make())
    assert cpu_s(server) - before_s < MAX_CPU_S, "one request blocks the event loop"
    assert status_of(answer) in row.statuses, answer[:500]


def exchange(sock: socket.socket, data: bytes) -> bytes:
    """Send as much as the server accepts, and read the headers of the response."""
    found = b""
    with contextlib.suppress(ConnectionError):  # the server may answer and close before it has read everything
        sock.sendall(data)
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in found and (chunk := sock.recv(1 << 16)):
            found += chunk
    return found


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(("method", "path", "statuses"), corpus.PATHS, ids=lambda value: str(value)[:60])
def test_odd_paths_are_not_found(server: Server, method: str, path: str, statuses: tuple[int, ...]) -> None:
    answer = server.ask(method, path)
    assert answer.status in statuses
    assert "x-injected" not in answer.headers
    assert len(answer.body) < MAX_ERROR_BYTES
    if method != "HEAD":
        assert answer.json["error"]["message"]
    if answer.status == 405:
        assert answer.headers["allow"]


@pytest.mark.usefixtures("texts")
def test_good_requests_are_served_among_the_bad_ones(server: Server) -> None:
    for path, body in corpus.GOOD.items():
        answer = server.post(path, body)
        assert answer.status == 200, (path, answer.body)


def test_the_concurrent_streams_were_complete(server: Server, worker: int, texts: list[str]) -> None:
    """Must run after all other tests with the streams."""
    eventually(lambda: texts, "a stream has ended")
    alone = server.post(corpus.CHAT, STREAM | {"stream": False, "stream_options": None}).json
    assert set(texts) == {alone["choices"][0]["message"]["content"]}, "one differs from the answer alone"
    assert server.worker_pid == worker
    assert server.get("/health").json["status"] == "ok"
    assert " ERROR " not in server.log
    assert "Traceback" not in server.log


# Numbers, on a server whose steps take no time: some requests ask for the longest possible answer


@pytest.mark.parametrize("path", corpus.NUMBERS)
def test_odd_numbers_are_accepted_or_refused_by_name(plain_server: Server, path: str) -> None:
    pid = plain_server.worker_pid
    num_taken = 0
    for where, name, value in corpus.numbers():
        if where != path:
            continue
        answer = plain_server.post(path, data=corpus.body_with(path, name, value))
        row = f"{path} {name}={value[:40]}: {answer.status} {answer.body[:300]!r}"
        is_number = value not in ("NaN", "Infinity", "[]", "{}", "true", "1e400")
        assert 400 <= answer.status < 500 or (is_number and answer.status == 200), row
        num_taken += answer.status == 200
        if answer.status != 200:
            message = error_of(path, answer.json)["message"]
            assert name in message or "not JSON" in message, row
    assert num_taken
    plain_server.wait_free()
    assert plain_server.worker_pid == pid
    assert "Traceback" not in plain_server.log


# Privacy


def test_prompts_answers_and_keys_are_not_in_logs_errors_or_metrics(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--api-key", KEY, "--log-level", "debug", key=KEY) as server:
        errors = send_canaries(server)
        outputs = [*errors, server.get("/metrics").body.decode(), str(server.stop()), server.log]
    for text in outputs:
        assert hits(text, (PROMPT, KEY)) == 0
    assert hits(outputs[-1]) == 0
