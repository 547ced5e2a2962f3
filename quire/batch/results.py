"""Batch output in OpenAI's format, one result per line; also reads which lines an output file already holds.

The `id` of a result ends with the number of its input line. A run that continues reads these numbers to find the
finished lines.

An interrupted run is continued if the output file belongs to the input and the settings. A small JSON file beside the
output, `OUT.batch.json`, records the size and digest of the input, and the settings. Lines may be appended to the input
between runs: only the recorded part must be unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire.batch.lines import BatchRequest, InvalidLine
from quire.errors import InvalidRequest

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
        return error_line(line.number, line.custom_id, line.code, line.message, batch_id, line.param)
    assert reply is not None, "a valid line has a reply"
    body = reply.body.strip()
    if b"\n" in body or b"\r" in body:
        body = json.dumps(json.loads(body)).encode()
    for data, escaped in _LINE_ENDS:
        body = body.replace(data, escaped)
    head = _encode({"id": result_id(line.number, batch_id), "custom_id": line.custom_id})
    response = _encode({"status_code": reply.status, "request_id": reply.request_id})
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head[:-1], response[:-1], body)


def error_line(
    number: int, custom_id: str | None, code: str, message: str, batch_id: str = "", param: str | None = None
) -> bytes:
    """The line of output for a request that was not sent."""
    error = {"code": code, "message": message, "line": number, "param": param}
    value = {"id": result_id(number, batch_id), "custom_id": custom_id, "response": None, "error": error}
    return _encode(value) + b"\n"


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


def scan_results(path: Path, scan: ResultScan | None = None) -> ResultScan:
    """Read the finished lines. Raises InvalidRequest if the file is not the output of a batch."""
    found = ResultScan() if scan is None else scan
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


class ResultFile:
    """An output file that is appended to. A line is written by one call, so that only the last can be incomplete.

    `scan`: what it holds. `lock`: released when it is closed.
    """

    def __init__(
        self, file: BinaryIO, scan: ResultScan | None = None, batch_id: str = "", lock: BinaryIO | None = None
    ) -> None:
        self._file = file
        self.scan = ResultScan() if scan is None else scan
        self._batch_id = batch_id
        self._lock = lock

    @classmethod
    def append(
        cls, path: Path, scan: ResultScan | None = None, batch_id: str = "", lock: BinaryIO | None = None
    ) -> ResultFile:
        """Append to a file after its complete lines, which are added to `scan`; the rest is truncated."""
        scan = ResultScan() if scan is None else scan
        num_bytes = scan_results(path, scan).num_bytes if path.exists() else 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return cls(os.fdopen(descriptor, "ab"), scan, batch_id, lock)

    def write(self, result: Result) -> None:
        self._append(result_line(result, self._batch_id))
        self.scan.add(result.line.number, result.is_good)

    def write_error(self, line: BatchRequest | InvalidLine, code: str, message: str) -> None:
        """Write an error for a line that was not sent."""
        self._append(error_line(line.number, line.custom_id, code, message, self._batch_id))
        self.scan.add(line.number, False)

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if self._lock is not None:
            self._lock.close()


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
    lock = _locked(notes)
    try:
        if is_overwriting:
            path.unlink(missing_ok=True)
        has_results = path.exists() and path.stat().st_size > 0
        if has_results:
            _check_same(path, notes, source, settings)
            if is_retrying:
                drop_failed(path)
        file = ResultFile.append(path, lock=lock)
        _write_notes(notes, lock, source, settings)
        return file
    except BaseException:
        lock.close()
        raise


def _locked(notes: Path) -> BinaryIO:
    """Lock the notes file. The operating system releases the lock when the process ends, even if it is killed."""
    file = os.fdopen(os.open(notes, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        out = notes.name.removesuffix(".batch.json")
        raise InvalidRequest(f"{out}: another `quire batch` is writing to it") from None
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
