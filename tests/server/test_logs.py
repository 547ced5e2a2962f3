"""Log lines: their fields, what they never contain, and that a client cannot forge one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from msgspec.structs import fields, replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from quire.engine.process import MAX_LINES_PER_S, JsonFormatter, LimitedHandler, LineFormatter
from quire.server.launcher import setup_logging
from quire.server.metrics import MAX_VALUE_CHARS, RequestRecord, log_refusal, log_request, request_fields
from quire.server.request_context import MAX_WARNINGS, log_once
from tests.server.test_metrics import PAGE, RECORD

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<message>.*)"
)
# All known ways to end a line or to control a terminal.
FORGERY = "x\n2026-01-01T00:00:00.000Z INFO quire.request: forged\r\n\x00\x1b[2J\x85\u2028\u2029\u202e\ud800\x7f\x9b"
CANARY = "CANARY-7f3a9c"


@pytest.fixture
def logs() -> Iterator[Callable[..., io.StringIO]]:
    """Set up logging into a string, and restore the previous setup afterwards."""
    names = ("", "quire", "quire.request", "quire.server", "uvicorn", "uvicorn.error", "uvicorn.asgi", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]

    def setup(level: str = "info", *, as_json: bool = False) -> io.StringIO:
        stream = io.StringIO()
        logging.getLogger().handlers.clear()  # pytest's own handlers: xdist cannot send what these tests log
        setup_logging(level, as_json=as_json, stream=stream)
        return stream

    yield setup
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


def entries(stream: io.StringIO) -> list[re.Match[str]]:
    """Return the lines, each of which must be a log line or part of a traceback."""
    found = []
    for line in stream.getvalue().split("\n")[:-1]:
        if not line.startswith("  | "):
            match = LINE.fullmatch(line)
            assert match is not None, line
            found.append(match)
    return found


def test_a_text_line(logs: Callable[..., io.StringIO]) -> None:
    stream = logs()
    log_request(RECORD)
    (line,) = entries(stream)
    assert (line["level"], line["logger"]) == ("INFO", "quire.request")
    assert line["message"] == (
        "request_id=req_1 endpoint=/v1/chat/completions model=m key=alice tier=normal stream=true prompts=1 n=1 "
        "max_tokens=64 prompt_tokens=120 cached_tokens=96 completion_tokens=21 cache=diverged "
        "cache_source=disk queued_s=0.5 ttft_s=0.7 e2e_s=2.75 tokens_per_s=10.0 finish=stop"
    )


def test_a_json_line(logs: Callable[..., io.StringIO]) -> None:
    stream = logs(as_json=True)
    log_request(replace(RECORD, ttft_s=None, finish="error", error="died"))
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert list(entry)[:4] == ["time", "level", "logger", "message"]
    assert (entry["level"], entry["logger"]) == ("warning", "quire.request")
    assert (entry["prompt_tokens"], entry["stream"], entry["error"]) == (120, True, "died")
    assert "ttft_s" not in entry


def test_failures_of_the_server_are_warnings_and_client_errors_are_not(logs: Callable[..., io.StringIO]) -> None:
    stream = logs("warning")
    log_request(replace(RECORD, finish="error", error="invalid"))
    log_request(RECORD)
    for kind in ("failed", "died", "internal"):
        log_request(replace(RECORD, finish="error", error=kind))
    assert [line["message"].rpartition("error=")[2] for line in entries(stream)] == ["failed", "died", "internal"]


@pytest.mark.parametrize("as_json", [False, True])
def test_no_value_can_forge_a_line(logs: Callable[..., io.StringIO], as_json: bool) -> None:
    stream = logs(as_json=as_json)
    texts = {field.name: FORGERY for field in fields(RequestRecord) if "str" in str(field.type)}
    assert len(texts) == 9
    log_request(replace(RECORD, **texts))
    logging.getLogger("quire.server.app").warning("%s", FORGERY)
    logging.getLogger("quire.server.app").warning(FORGERY)
    try:
        raise ValueError(FORGERY)
    except ValueError:
        logging.getLogger("quire.server.app").exception("it %s", FORGERY)
    written = stream.getvalue()
    written.encode()  # no lone surrogate
    lines = written.split("\n")[:-1]
    assert not re.search(r"[^\n\x20-\x7e]", written)
    if as_json:
        assert len([json.loads(line) for line in lines]) == 4
        return
    assert len(entries(stream)) == 4
    assert not any(line.startswith("2026-01-01") for line in lines)


def test_values_of_a_line_can_be_parsed(logs: Callable[..., io.StringIO]) -> None:
    stream = logs()
    log_request(replace(RECORD, key="a b=c finish=stop", model='quo"te'))
    (line,) = entries(stream)
    words = dict(word.split("=", 1) for word in shlex.split(line["message"]))
    assert words["key"] == "a b=c finish=stop"
    assert words["model"] == 'quo"te'
    assert words["finish"] == "stop"


def test_long_values_are_cut(logs: Callable[..., io.StringIO]) -> None:
    stream = logs()
    log_request(replace(RECORD, model="x" * 100_000))
    logging.getLogger("quire").warning("y" * 100_000)
    assert len(stream.getvalue()) < 6_000
    assert request_fields(replace(RECORD, model="x" * 100_000))["model"] == "x" * MAX_VALUE_CHARS


def test_non_finite_numbers_are_left_out() -> None:
    assert "e2e_s" not in request_fields(replace(RECORD, duration_s=float("nan")))
    assert "queued_s" not in request_fields(replace(RECORD, queued_s=None))


def test_the_docs_name_every_field() -> None:
    section = PAGE.read_text().partition("## Logs")[2]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"time", "level", "logger", "message"}
    everything = replace(RECORD, finish="error", error="died")
    assert named == set(request_fields(everything))
    example = re.findall(r"^2026.*quire\.request: (.*)$", section, re.MULTILINE)[0]
    assert [word.partition("=")[0] for word in example.split()] == list(request_fields(RECORD))


@pytest.mark.parametrize("finish", ["error", "cancelled", "queue_full"])
def test_a_flood_of_refusals_is_limited_and_counted(finish: str) -> None:
    now_s = 100.0
    stream = io.StringIO()
    handler = LimitedHandler(stream, clock=lambda: now_s)
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("quire.request")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    logger.propagate = False
    try:
        for _ in range(1000):
            log_request(replace(RECORD, finish=finish))
        assert len(entries(stream)) == MAX_LINES_PER_S
        for _ in range(50):
            log_request(RECORD)  # served requests are always logged
        assert len(entries(stream)) == MAX_LINES_PER_S + 50
        now_s = 101.5
        log_request(replace(RECORD, finish=finish))
        report, last = entries(stream)[-2:]
        assert report["message"] == f"{1000 - MAX_LINES_PER_S} lines left out: more than {MAX_LINES_PER_S} in a second"
        assert "request_id" in last["message"]
        for _ in range(30):
            log_request(replace(RECORD, finish=finish))
        handler.close()  # closing reports the lines that were left out
        assert entries(stream)[-1]["message"].startswith("11 lines left out")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_one_logger_does_not_silence_another(logs: Callable[..., io.StringIO]) -> None:
    stream = logs()
    for _ in range(100):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("quire.engine.worker.client").error("the worker died")
    assert [line["logger"] for line in entries(stream)].count("uvicorn.error") == MAX_LINES_PER_S
    assert entries(stream)[-1]["message"] == "the worker died"


def test_log_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.request_context._logged", set())
    for _ in range(3):
        log_once("the field a is not known")
    assert caplog.messages == ["the field a is not known"]
    for number in range(2 * MAX_WARNINGS):
        log_once(f"{number}" + "k" * 1_000_000 * (number == 0))
    assert len(caplog.messages) == MAX_WARNINGS + 1
    assert "no more" in caplog.messages[-1]
    assert max(len(message) for message in caplog.messages) < 1000


def test_wrong_format_arguments_do_not_lose_the_line() -> None:
    record = logging.LogRecord("quire", logging.WARNING, "", 0, "%d files", ("three",), None)
    assert LineFormatter().format(record).endswith("WARNING quire: %d files")


def test_json_has_a_traceback_as_a_list() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("quire", logging.ERROR, "", 0, "failed", None, info)
    trace = json.loads(JsonFormatter().format(record))["trace"]
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "ValueError: no"


@pytest.mark.parametrize("as_json", [False, True])
def test_uvicorn_uses_the_same_format_and_logs_no_query_string(logs: Callable[..., io.StringIO], as_json: bool) -> None:
    stream = logs("debug", as_json=as_json)

    async def fail(request: Request) -> PlainTextResponse:
        del request
        raise RuntimeError("on purpose")

    async def ask() -> None:
        config = uvicorn.Config(Starlette(routes=[Route("/fail", fail)]), port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        for line in (f"GET /fail?api_key={CANARY} HTTP/1.1", f"GET /none?prompt={CANARY} HTTP/1.1", f"{CANARY}"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{line}\r\nhost: x\r\nauthorization: Bearer {CANARY}\r\nconnection: close\r\n\r\n".encode())
            await reader.read()
            writer.close()
        await server.shutdown()

    asyncio.run(ask())
    written = stream.getvalue()
    assert "RuntimeError: on purpose" in written
    assert "Invalid HTTP request received." in written
    assert CANARY not in written
    if not as_json:
        assert {line["logger"] for line in entries(stream)} == {"uvicorn.error"}


def test_a_record_has_no_text_to_leak() -> None:
    """A new field of the record must be added here, after a check that it holds no client text."""
    assert {field.name for field in fields(RequestRecord) if "str" in str(field.type)} == {
        *("id", "endpoint", "model", "key", "tier", "cache_reason", "cache_source", "finish", "error")
    }


@pytest.mark.parametrize(("level", "num_lines"), [("info", 1), ("warning", 0)])
def test_refusals_are_logged_by_level(level: str, num_lines: int, logs: Callable[..., io.StringIO]) -> None:
    stream = logs(level)
    log_refusal("req_1", "/v1/models", "alice", 404, "model_not_found", "model")
    assert len(entries(stream)) == num_lines
