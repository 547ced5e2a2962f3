"""Batch input: one request per line, in OpenAI's batch format or as a plain prompt.

An invalid line becomes an `InvalidLine`, which names the line and the field. Reading continues after it.

Ids are stored as digests, so that a million of them take 16 MiB.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, BinaryIO


class UniqueIds:
    """A hash table of 64-bit digests with open addressing. Among a million strings, the chance
    of any collision is below 1 in 10^7."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._num_ids = 0

    def add(self, text: str) -> bool:
        """Add a string. Returns False if it was present."""
        digest = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1
        slot = self._find(self._slots, digest)
        if self._slots[slot] == digest:
            return False
        self._slots[slot] = digest
        self._num_ids += 1
        if 2 * self._num_ids > len(self._slots):
            self._grow()
        return True

    def _grow(self) -> None:
        slots = array("Q", bytes(16 * len(self._slots)))
        for digest in self._slots:
            if digest:
                slots[self._find(slots, digest)] = digest
        self._slots = slots

    @staticmethod
    def _find(slots: array[int], digest: int) -> int:
        """The slot of a digest, or the empty slot where it belongs."""
        mask = len(slots) - 1
        slot = digest & mask
        while slots[slot] not in (0, digest):
            slot = (slot + 1) & mask
        return slot


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


class LineParser:
    """Turns the lines of one file into requests. Stores each custom_id, to refuse duplicates."""

    def __init__(self, settings: LineSettings) -> None:
        self._settings = settings
        self._ids = UniqueIds()

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
            if is_openai or not self._settings.allows_plain:
                url, body = _openai_request(value)
            else:
                url, body = CHAT, self._plain_body(value)
            custom_id = custom_id or f"line-{number}"
            if not self._ids.add(custom_id):
                text = f"custom_id = {custom_id!r:.80} is used by an earlier line"
                raise _Wrong(text, "custom_id", "duplicate_custom_id")
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
        if self._settings.system is not None and not _has_system(messages):
            messages = [{"role": "system", "content": self._settings.system}, *messages]
        return {**self._settings.defaults, **body, "messages": messages}

    def _check(self, url: str, body: dict[str, Any]) -> None:
        wanted = self._settings.endpoint
        if url not in ENDPOINTS:
            raise _Wrong(f"url = {url!r:.80} is not one of {', '.join(ENDPOINTS)}", "url", "invalid_url")
        if wanted is not None and url != wanted:
            raise _Wrong(f"url = {url!r} is not the endpoint of this batch, {wanted}", "url", "mismatched_endpoint")
        if body.get("stream"):
            raise _Wrong("body.stream = true is not supported: a batch returns whole answers", "body.stream")

    def _encode(self, body: dict[str, Any]) -> bytes:
        forced = {"model": self._settings.model, "priority": self._settings.priority}
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
