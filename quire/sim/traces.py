"""Traces: requests with arrival times, read from JSON lines or generated from a seed.

A line of a trace is an object with these fields:

    arrival_s        arrival time in seconds from the start
    prompt_tokens    length of the prompt
    output_tokens    length of the answer
    shared           optional: [[name, tokens], ...], the start of the prompt; equal names are equal text
    output           optional: a name for the answer, so that a later prompt can contain it
    prompt           optional, in place of prompt_tokens and shared: the token ids themselves
    priority         optional: HIGH, NORMAL (default) or LOW
    salt             optional: requests with different salts share nothing
    tenant           optional: tenants of one tier share it fairly
    session          optional: a conversation, for routers that keep it on one replica
    cancel_after_s   optional: the client disconnects this long after the arrival

The format of the public Mooncake traces is accepted as well (timestamp in ms, input_length, output_length, hash_ids of
512 tokens each).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from quire.core.values import MAX_SALT, MAX_TOKEN_ID, Priority
from quire.errors import InvalidRequest, TraceError

VOCAB_SIZE = 32_000
MOONCAKE_BLOCK = 512
MAX_TOKENS = 10_000_000  # per prompt or answer: more than any context, and small enough for memory
MAX_SECONDS = 1e9
MAX_REQUESTS = 1_000_000  # per synthetic trace


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    shared: tuple[tuple[str, int], ...] = ()
    output: str = ""
    prompt: tuple[int, ...] = ()
    priority: Priority = Priority.NORMAL
    salt: str = ""
    cancel_after_s: float | None = None
    tenant: str = ""
    session: str = ""

    def prompt_ids(self, number: int) -> list[int]:
        """Prompt of request `number` of a trace: its shared parts, then unique text."""
        if self.prompt:
            return list(self.prompt)
        ids: list[int] = []
        for name, count in self.shared:
            ids += text(name, count)
        return ids + text(f"own prompt {number}", self.prompt_tokens - len(ids))

    def output_ids(self, number: int) -> list[int]:
        return text(self.output or f"own output {number}", self.output_tokens)

    def as_line(self) -> str:
        """One line of a trace file, without empty optional fields."""
        fields = {name: value for name, value in asdict(self).items() if value not in ((), "", None)}
        if self.prompt:
            del fields["prompt_tokens"]
        fields["priority"] = self.priority.name
        return json.dumps(fields)


def text(name: str, count: int) -> list[int]:
    """The first `count` tokens of the text `name`: the same in every process and on every machine."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
    return Random(seed).choices(range(VOCAB_SIZE), k=count)


# Recorded traces


def read_trace(path: str) -> list[TraceRequest]:
    """Read a trace in order of arrival; `-` is standard input.

    Raises `TraceError` with line and field at the first error.
    """
    try:
        if path == "-":
            requests = list(_parse_lines("standard input", sys.stdin))
        else:
            with Path(path).open(encoding="utf-8-sig") as lines:
                requests = list(_parse_lines(path, lines))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not requests:
        raise TraceError(f"{path}: no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse_lines(name: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            fields = json.loads(line, object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise TraceError(f"{where}: not a JSON object on one line ({reason})") from None
        if not isinstance(fields, list) or not all(isinstance(pair, tuple) for pair in fields):
            raise TraceError(f"{where}: not a JSON object on one line")
        yield _parse(_Line(where, fields))


class _Line:
    """The fields of one line. Parsing removes them one by one; any that remain are unknown."""

    def __init__(self, where: str, pairs: Sequence[tuple[str, Any]]) -> None:
        self.where = where
        self.fields: dict[str, Any] = {}
        for field, value in pairs:
            if field in self.fields:
                raise self.error(field, "occurs twice")
            self.fields[field] = value
        # null is the same as a missing field
        self.fields = {field: value for field, value in self.fields.items() if value is not None}

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(f"{self.where}: field {field!r} {problem}")

    def wrong(self, field: str, value: Any, wanted: str) -> TraceError:
        shown = repr(value)
        return self.error(field, f"= {shown if len(shown) <= 60 else shown[:57] + '...'} is not {wanted}")

    def take(self, field: str) -> Any:
        if field not in self.fields:
            raise self.error(field, "is missing")
        return self.fields.pop(field)

    def seconds(self, field: str, most: float = MAX_SECONDS) -> float:
        value = self.take(field)
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise self.wrong(field, value, f"a number from 0 to {most:g}")
        return float(value)

    def count(self, field: str, least: int) -> int:
        value = self.take(field)
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            raise self.wrong(field, value, f"a whole number from {least} to {MAX_TOKENS}")
        return value

    def string(self, field: str) -> str:
        value = self.fields.pop(field, "")
        if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_SALT:
            raise self.wrong(field, value, f"a printable string of at most {MAX_SALT} characters")
        return value

    def finish(self, known: Iterable[str]) -> None:
        for field in self.fields:
            raise self.error(field, f"is unknown; known fields are {', '.join(known)}")


def _parse(line: _Line) -> TraceRequest:
    if "hash_ids" in line.fields or "input_length" in line.fields:
        return _mooncake(line)
    prompt = _token_ids(line) if "prompt" in line.fields else ()
    if prompt and (clash := [name for name in ("prompt_tokens", "shared") if name in line.fields]):
        raise line.error("prompt", f"cannot be combined with {' and '.join(clash)}")
    prompt_tokens = len(prompt) or line.count("prompt_tokens", 1)
    shared = _shared(line)
    if (num_shared := sum(count for _, count in shared)) > prompt_tokens:
        raise line.error("shared", f"has {num_shared} tokens, more than {prompt_tokens = }")
    request = TraceRequest(
        arrival_s=line.seconds("arrival_s"),
        prompt_tokens=prompt_tokens,
        output_tokens=line.count("output_tokens", 1),
        shared=shared,
        output=line.string("output"),
        prompt=prompt,
        priority=_priority(line),
        salt=line.string("salt"),
        tenant=line.string("tenant"),
        session=line.string("session"),
        cancel_after_s=line.seconds("cancel_after_s") if "cancel_after_s" in line.fields else None,
    )
    line.finish(TraceRequest.__dataclass_fields__)
    return request


def _mooncake(line: _Line) -> TraceRequest:
    prompt_tokens = line.count("input_length", 1)
    hashes = line.take("hash_ids")
    if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
        raise line.wrong("hash_ids", hashes, "a list of whole numbers")
    request = TraceRequest(
        arrival_s=line.seconds("timestamp", 1000 * MAX_SECONDS) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, line.count("output_length", 0)),
        shared=tuple((f"hash {one}", MOONCAKE_BLOCK) for one in hashes[: prompt_tokens // MOONCAKE_BLOCK]),
    )
    line.finish(("timestamp", "input_length", "output_length", "hash_ids"))
    return request


def _priority(line: _Line) -> Priority:
    value = line.fields.pop("priority", Priority.NORMAL.name)
    if not isinstance(value, str) or value.upper() not in Priority.__members__:
        raise line.wrong("priority", value, f"one of {', '.join(Priority.__members__)}")
    return Priority[value.upper()]


def _token_ids(line: _Line) -> tuple[int, ...]:
    value = line.take("prompt")
    if not isinstance(value, list) or not value:
        raise line.wrong("prompt", value, "a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise line.wrong(f"prompt[{position}]", token, f"a token id from 0 to {MAX_TOKEN_ID}")
    return tuple(value)


def _shared(line: _Line) -> tuple[tuple[str, int], ...]:
    value = line.fields.pop("shared", [])
    if not isinstance(value, list) or not all(_is_part(part) for part in value):
        raise line.wrong("shared", value, "a list of [name, tokens]")
    return tuple((name, count) for name, count in value)


def _is_part(part: Any) -> bool:
    match part:
        case [str(name), int(count)] if type(count) is int:
            return name.isprintable() and 1 <= count <= MAX_TOKENS
    return False


# Synthetic traces


def synthesize(num_requests: int, rate: float, *, seed: int = 0, chat_share: float = 0.6) -> list[TraceRequest]:
    """Generate the mixed load of a small team.

    It consists of chats of several turns (HIGH, with a shared system prompt), single questions (NORMAL) and long batch
    jobs over documents (LOW). Arrivals are Poisson with bursts. `rate` is in requests per second.
    """
    check_synthetic(num_requests, rate)
    random = Random(seed)
    chats: list[tuple[tuple[str, int], ...]] = []
    requests: list[TraceRequest] = []
    now_s = 0.0
    for number in range(num_requests):
        is_burst = random.random() < 0.2
        now_s += 0.0 if is_burst else random.expovariate(rate * 0.8)
        if random.random() < chat_share:
            requests.append(_chat_turn(random, number, now_s, chats))
        elif random.random() < 0.5:
            requests.append(TraceRequest(now_s, random.randint(50, 600), random.randint(20, 300)))
        else:
            document = (f"document {random.randint(0, 5)}", 1500)
            length = 1500 + random.randint(20, 200)
            answer = random.randint(50, 400)
            requests.append(TraceRequest(now_s, length, answer, shared=(document,), priority=Priority.LOW))
    return requests


def check_synthetic(num_requests: int, rate: float) -> None:
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise InvalidRequest(f"requests = {num_requests} is not from 1 to {MAX_REQUESTS}")
    if not 1e-6 <= rate <= 1e6:
        raise InvalidRequest(f"{rate = } is not from 1e-6 to 1e6 requests per second")


def _chat_turn(random: Random, number: int, now_s: float, chats: list[tuple[tuple[str, int], ...]]) -> TraceRequest:
    """A new chat or the next turn of one: the history, a question, and an answer for the next turn."""
    history: tuple[tuple[str, int], ...] = (("system prompt", 400),)
    if chats and random.random() < 0.7:
        history = chats.pop(random.randrange(len(chats)))
    question = (f"question {number}", random.randint(10, 120))
    answer = (f"answer {number}", random.randint(20, 250))
    prompt = (*history, question)
    length = sum(count for _, count in prompt)
    if length < 6_000:
        chats.append((*prompt, answer))
    return TraceRequest(now_s, length, answer[1], shared=prompt, output=answer[0], priority=Priority.HIGH)
