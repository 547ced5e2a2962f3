"""Lines of a file in, requests, results out: limits requests in flight, retries, and returns results as they arrive.

A line is a request in OpenAI's batch format or a plain prompt. An invalid one becomes an `InvalidLine`, which names the
line and the field; reading continues after it. Ids are stored as digests of 64 bits: among a million strings, the
chance of any collision is below 1 in 10^7.

A result is one line in OpenAI's format. Its `id` ends with the number of its input line, from which a run that
continues knows the finished lines. An interrupted run is continued if the output file belongs to the input and the
settings: a small JSON file beside the output, `OUT.batch.json`, records the size and digest of the input, and the
settings. Lines may be appended to the input between runs: only the recorded part must be unchanged.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire.errors import InvalidRequest, QuireError

CHAT = "/v1/chat/completions"
ENDPOINTS = (CHAT, "/v1/completions", "/v1/responses")
MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 512
_OPENAI_FIELDS = ("method", "url", "body")  # a line that has one of them is in OpenAI's format
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    number: int  # of its line, from 1
    custom_id: str
    url: str
    body: bytes  # JSON


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that cannot be sent."""

    number: int
    custom_id: str | None
    message: str  # names the line and the field
    param: str | None = None
    code: str = "invalid_line"


BatchLine = BatchRequest | InvalidLine


@dataclass(frozen=True, slots=True)
class LineSettings:
    """How lines become requests."""

    model: str | None = None  # replaces the model of every body; None: use that of the body
    priority: str | None = None  # the same for the priority
    endpoint: str | None = None  # the only URL that lines may have; None: any of ENDPOINTS
    allows_plain: bool = True  # accept plain prompts as well as OpenAI's format
    system: str | None = None  # the system message of plain prompts
    defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of the body of plain prompts


class _Wrong(Exception):
    def __init__(self, message: str, param: str | None = None, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with their numbers. A line above `max_bytes` is yielded as None."""
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        is_long = len(data) > max_bytes and not data.endswith(b"\n")
        while is_long and data and not data.endswith(b"\n"):
            data = file.readline(max_bytes)
        if number == 1:
            data = data.removeprefix(_BOM)
        if is_long:
            yield number, None
        elif data := data.strip():
            yield number, data


@dataclass(slots=True)
class LineParser:
    """Turns the lines of one file into requests. Stores each custom_id, to refuse duplicates."""

    settings: LineSettings
    _ids: set[bytes] = field(default_factory=set)  # digests

    def parse_all(self, file: BinaryIO) -> Iterator[BatchLine]:
        for number, data in read_lines(file):
            yield self.parse(number, data)

    def parse(self, number: int, data: bytes | None) -> BatchLine:
        custom_id: str | None = None
        try:
            value = _decode(data)
            is_openai = isinstance(value, dict) and any(name in value for name in _OPENAI_FIELDS)
            if isinstance(value, dict) and (is_openai or "custom_id" in value):
                custom_id = _custom_id(value)
            if is_openai or not self.settings.allows_plain:
                url, body = _openai_request(value)
            else:
                url, body = CHAT, self._plain_body(value)
            custom_id = custom_id or f"line-{number}"
            digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            if digest in self._ids:
                text = f"custom_id = {custom_id!r:.80} is used by an earlier line"
                raise _Wrong(text, "custom_id", "duplicate_custom_id")
            self._ids.add(digest)
            self._check(url, body)
            return BatchRequest(number, custom_id, url, self._encode(body))
        except _Wrong as error:
            return InvalidLine(number, custom_id, f"line {number}: {error}", error.param, error.code)

    def _plain_body(self, value: object) -> dict[str, Any]:
        """The body for a string, {"prompt": "..."} or {"messages": [...]}. Other fields of the object are kept."""
        given = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            raise _Wrong(f"a JSON {_kind(value)}, not an object or a string")
        body = {name: one for name, one in given.items() if name not in ("custom_id", "prompt", "messages")}
        if ("prompt" in given) == ("messages" in given):
            text = "neither prompt nor messages" if "prompt" not in given else "both prompt and messages"
            raise _Wrong(f"{text}: give one of them, or a request with url and body", "prompt")
        messages = given.get("messages")
        if messages is None:
            prompt = given.get("prompt")
            if not isinstance(prompt, str) or not prompt.strip():
                raise _Wrong(f"prompt = {prompt!r:.80} is not text or is empty", "prompt")
            messages = [{"role": "user", "content": prompt}]
        if not isinstance(messages, list) or not messages:
            raise _Wrong(f"messages = {messages!r:.80} is not a list of messages", "messages")
        if self.settings.system is not None and not _has_system(messages):
            messages = [{"role": "system", "content": self.settings.system}, *messages]
        return {**self.settings.defaults, **body, "messages": messages}

    def _check(self, url: str, body: dict[str, Any]) -> None:
        wanted = self.settings.endpoint
        if url not in ENDPOINTS:
            raise _Wrong(f"url = {url!r:.80} is not one of {', '.join(ENDPOINTS)}", "url", "invalid_url")
        if wanted is not None and url != wanted:
            raise _Wrong(f"url = {url!r} is not the endpoint of this batch, {wanted}", "url", "mismatched_endpoint")
        if body.get("stream"):
            raise _Wrong("body.stream = true is not supported: a batch returns whole answers", "body.stream")

    def _encode(self, body: dict[str, Any]) -> bytes:
        forced = {"model": self.settings.model, "priority": self.settings.priority}
        body = {**body, **{name: value for name, value in forced.items() if value is not None}}
        try:
            return json.dumps(body, separators=(",", ":")).encode()
        except RecursionError:
            raise _Wrong("nested too deeply", code="invalid_json_line") from None


def _decode(data: bytes | None) -> Any:
    if data is None:
        raise _Wrong(f"longer than {MAX_LINE_BYTES} bytes", code="line_too_long")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8: {error.reason} at byte {error.start}", code="invalid_json_line") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"not JSON: {error.msg} at character {error.pos + 1}", code="invalid_json_line") from None
    except RecursionError:
        raise _Wrong("nested too deeply", code="invalid_json_line") from None
    except ValueError as error:  # a constant, or a number of thousands of digits
        raise _Wrong(f"not JSON: {error}"[:200], code="invalid_json_line") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _openai_request(value: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _Wrong(f"a JSON {_kind(value)}, not an object with custom_id, method, url and body")
    if "custom_id" not in value:
        raise _Wrong("custom_id is missing", "custom_id", "missing_required_parameter")
    for name, kind in (("method", str), ("url", str), ("body", dict)):
        if name not in value:
            raise _Wrong(f"{name} is missing", name, "missing_required_parameter")
        if not isinstance(value[name], kind):
            wanted = "an object" if kind is dict else "a text"
            raise _Wrong(f"{name} is a JSON {_kind(value[name])}, not {wanted}", name)
    if value["method"].upper() != "POST":
        raise _Wrong(f"method = {value['method']!r:.80} is not POST", "method", "invalid_method")
    return value["url"], value["body"]


def _custom_id(value: dict[str, Any]) -> str | None:
    found = value.get("custom_id")
    if "custom_id" not in value:
        return None
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_ID_CHARS:
        raise _Wrong(f"custom_id = {found!r:.80} is not a text of 1 to {MAX_ID_CHARS} characters", "custom_id")
    return found


def _has_system(messages: list[Any]) -> bool:
    return any(isinstance(one, dict) and one.get("role") in ("system", "developer") for one in messages)


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


# Unicode line separators, which some programs treat as line ends. In JSON they occur only inside strings.
_LINE_ENDS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
_ID = re.compile(r"batch_req_(?:[0-9a-f]+_)?([1-9][0-9]{0,8})")


class Reply(NamedTuple):
    """The response to one request, of any status."""

    status: int
    request_id: str
    body: bytes  # JSON
    retry_after_s: float | None = None
    may_retry: bool = False

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class Result(NamedTuple):
    """One line of input and its result."""

    line: BatchRequest | InvalidLine
    reply: Reply | None  # None: the line was not sent

    @property
    def is_good(self) -> bool:
        return self.reply is not None and self.reply.is_good


def result_id(number: int, batch_id: str = "") -> str:
    """The id of a result. `batch_id`: hexadecimal; distinguishes the results of several batches."""
    return f"batch_req_{batch_id}_{number}" if batch_id else f"batch_req_{number}"


def result_line(result: Result, batch_id: str = "") -> bytes:
    """One line of output."""
    line, reply = result
    if isinstance(line, InvalidLine):
        error = {"code": line.code, "message": line.message, "line": line.number, "param": line.param}
        value = {"id": result_id(line.number, batch_id), "custom_id": line.custom_id, "response": None, "error": error}
        return _encode(value) + b"\n"
    assert reply is not None, "a valid line has a reply"
    body = reply.body.strip()
    if b"\n" in body or b"\r" in body:
        body = json.dumps(json.loads(body)).encode()
    for data, escaped in _LINE_ENDS:
        body = body.replace(data, escaped)
    head = _encode({"id": result_id(line.number, batch_id), "custom_id": line.custom_id})
    response = _encode({"status_code": reply.status, "request_id": reply.request_id})
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head[:-1], response[:-1], body)


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def num_completion_tokens(body: Any) -> int:
    """Completion tokens of an answer of any endpoint; 0 if it does not report them."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    found = usage.get("completion_tokens", usage.get("output_tokens"))
    return found if type(found) is int else 0


class LineSet:
    """A set of line numbers: one bit for each line of the file."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(max(at + 1 - len(self._bits), len(self._bits), 1024)))
        self._bits[at] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (number & 7) & 1)


@dataclass(slots=True)
class ResultScan:
    """Which lines have a result in an output file, or in several."""

    finished: LineSet = field(default_factory=LineSet)
    num_good: int = 0
    num_failed: int = 0
    num_bytes: int = 0  # of complete lines; an interruption may have left part of a line after them

    @property
    def num_finished(self) -> int:
        return self.num_good + self.num_failed

    def add(self, number: int, is_good: bool) -> None:
        self.finished.add(number)
        self.num_good += is_good
        self.num_failed += not is_good


def scan_results(path: Path, found: ResultScan) -> ResultScan:
    """Read the finished lines into `found`. Raises InvalidRequest if the file is not the output of a batch."""
    found.num_bytes = 0
    with path.open("rb") as file:
        for at, data in enumerate(file, 1):
            if not data.endswith(b"\n"):
                break
            number, is_good = _read_result(path, at, data)
            if number not in found.finished:
                found.add(number, is_good)
            found.num_bytes += len(data)
    return found


def drop_failed(path: Path) -> None:
    """Remove failed results from an output file, so that their lines run again. Replaces the file atomically."""
    draft = path.with_name(f"{path.name}.tmp")
    with path.open("rb") as file, draft.open("wb") as kept:
        for at, data in enumerate(file, 1):
            if data.endswith(b"\n") and _read_result(path, at, data)[1]:
                kept.write(data)
        kept.flush()
        os.fsync(kept.fileno())
    draft.replace(path)


def _read_result(path: Path, at: int, data: bytes) -> tuple[int, bool]:
    """The number of the input line, and whether it succeeded."""
    try:
        value = json.loads(data)
        found = _ID.fullmatch(value["id"])
        response = value["response"]
        is_good = response is not None and 200 <= response["status_code"] < 300
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
        is_good = False
    if found is None:
        raise InvalidRequest(f"{path}: line {at} is not a result of `quire batch`; --overwrite replaces the file")
    return int(found[1]), is_good


@dataclass(slots=True)
class ResultFile:
    """An output file that is appended to. A line is written by one call, so that only the last can be incomplete."""

    file: BinaryIO
    scan: ResultScan  # what it holds
    batch_id: str = ""
    lock: BinaryIO | None = None  # released when it is closed

    @classmethod
    def append(cls, path: Path, scan: ResultScan, batch_id: str = "", lock: BinaryIO | None = None) -> ResultFile:
        """Append to a file after its complete lines, which are added to `scan`; the rest is truncated."""
        num_bytes = scan_results(path, scan).num_bytes if path.exists() else 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return cls(os.fdopen(descriptor, "ab"), scan, batch_id, lock)

    def write(self, result: Result) -> None:
        self.file.write(result_line(result, self.batch_id))
        self.file.flush()
        self.scan.add(result.line.number, result.is_good)

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()
        if self.lock is not None:
            self.lock.close()


CHUNK_BYTES = 1 << 20


def fingerprint(path: Path, num_bytes: int | None = None) -> tuple[int, str]:
    """Size and digest of a file, or of its first `num_bytes` if it is longer."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES if num_bytes is None else min(CHUNK_BYTES, num_bytes - done)):
            digest.update(data)
            done += len(data)
    return done, digest.hexdigest()


def open_output(
    path: Path,
    source: Path | None,
    settings: Mapping[str, Any],
    *,
    is_overwriting: bool = False,
    is_retrying: bool = False,
) -> ResultFile:
    """Begin or continue an output file, and lock it.

    Raises InvalidRequest if it belongs to another input or other settings. `source`: the input; None if it is a pipe,
    which cannot be continued. `is_retrying`: failed lines run again.
    """
    notes = path.with_name(f"{path.name}.batch.json")
    try:
        lock = lock_file(notes)
    except BlockingIOError:
        raise InvalidRequest(f"{path.name}: another `quire batch` is writing to it") from None
    try:
        if is_overwriting:
            path.unlink(missing_ok=True)
        has_results = path.exists() and path.stat().st_size > 0
        if has_results:
            _check_same(path, notes, source, settings)
            if is_retrying:
                drop_failed(path)
        file = ResultFile.append(path, ResultScan(), lock=lock)
        _write_notes(notes, lock, source, settings)
        return file
    except BaseException:
        lock.close()
        raise


def lock_file(path: Path) -> BinaryIO:
    """Open and lock a file. Raises BlockingIOError if another process has locked it.

    The operating system releases the lock when the process ends, even if it is killed.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BlockingIOError from None
    return file


def _check_same(path: Path, notes: Path, source: Path | None, settings: Mapping[str, Any]) -> None:
    remedy = "give another output file, or --overwrite to replace it"
    try:
        found = json.loads(notes.read_bytes())
        before = int(found["input_bytes"]), str(found["input_sha256"])
        given = dict(found["settings"])
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{path} exists, and is not the output of an interrupted batch: {remedy}") from None
    if source is None:
        raise InvalidRequest(f"{path} exists, and a batch read from standard input cannot be continued: {remedy}")
    if fingerprint(source, before[0]) != before:
        raise InvalidRequest(f"{path} holds results of an input other than {source}: {remedy}")
    for name, value in settings.items():
        if given.get(name) != value:
            text = f"{path} was begun with {name} = {given.get(name)!r:.80}, not {value!r:.80}"
            raise InvalidRequest(f"{text}: {remedy}")


def _write_notes(notes: Path, lock: BinaryIO, source: Path | None, settings: Mapping[str, Any]) -> None:
    """Write the notes in place, because the file is locked, and in one call, so that they are never incomplete."""
    num_bytes, digest = (0, "") if source is None else fingerprint(source)
    value = {"input_bytes": num_bytes, "input_sha256": digest, "settings": dict(settings)}
    data = json.dumps(value, indent=1).encode() + b"\n"
    if notes.read_bytes() != data:
        os.pwrite(lock.fileno(), data, 0)
        os.ftruncate(lock.fileno(), len(data))
        os.fsync(lock.fileno())


READ_AHEAD_LINES = 64
READ_AHEAD_BYTES = 4 << 20


class ConnectionLost(QuireError):
    """A request got no answer. It may be sent again."""


class GaveUp(QuireError):
    """A request was refused or lost too often. Its line has no result, so the next run sends it again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to send a request again: after 429, 503 and lost connections."""

    max_tries: int | None = 20  # of one request; None: no limit
    first_wait_s: float = 0.5  # doubled each time, unless the server sends a time
    max_wait_s: float = 60.0

    def wait_s(self, num_tries: int, retry_after_s: float | None) -> float:
        """Time before the next try. Up to a quarter is added at random, so that requests do not return all at once."""
        wait_s = min(self.first_wait_s * 2 ** min(num_tries - 1, 30), self.max_wait_s)
        return (wait_s if retry_after_s is None else retry_after_s) * random.uniform(1.0, 1.25)


@dataclass(slots=True)
class BatchRunner:
    """One pass over the lines of a batch. Belongs to one event loop."""

    lines: Iterator[BatchLine]
    send: Callable[[BatchRequest], Awaitable[Reply]]
    on_result: Callable[[Result], None]
    max_in_flight: int = field(kw_only=True)
    retry: RetryPolicy = field(default_factory=RetryPolicy, kw_only=True)
    _ahead: deque[BatchLine] = field(default_factory=deque)  # lines that were read and not yet taken
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Run until every line has a result. Raises GaveUp or the first error of `send`, and cancels the rest."""
        tasks = [asyncio.create_task(self._work()) for _ in range(self.max_in_flight)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while (line := await self._take()) is not None:
            reply = await self._ask(line) if isinstance(line, BatchRequest) else None
            self.on_result(Result(line, reply))

    async def _take(self) -> BatchLine | None:
        async with self._reading:
            if not self._ahead:
                self._ahead.extend(await asyncio.to_thread(_read_ahead, self.lines))
            return self._ahead.popleft() if self._ahead else None

    async def _ask(self, request: BatchRequest) -> Reply:
        num_tries = 0
        while True:
            num_tries += 1
            retry_after_s: float | None = None
            try:
                reply = await self.send(request)
            except ConnectionLost as error:
                problem = str(error)
            else:
                if not reply.may_retry:
                    return reply
                problem, retry_after_s = f"HTTP {reply.status}", reply.retry_after_s
            if self.retry.max_tries is not None and num_tries >= self.retry.max_tries:
                raise GaveUp(f"line {request.number} was sent {num_tries} times without an answer: {problem}")
            await asyncio.sleep(self.retry.wait_s(num_tries, retry_after_s))


def _read_ahead(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """The next lines, bounded by number and size. Runs in a thread: it reads a file and parses JSON."""
    found: list[BatchLine] = []
    num_bytes = 0
    for line in lines:
        found.append(line)
        num_bytes += len(line.body) if isinstance(line, BatchRequest) else 0
        if len(found) >= READ_AHEAD_LINES or num_bytes >= READ_AHEAD_BYTES:
            break
    return found
