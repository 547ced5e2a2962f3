"""Traces: which requests arrive when. Recorded ones are read from JSON lines, synthetic ones are drawn from a seed.

A line of a trace is an object with these fields:

    arrival_s        when it arrives, in seconds from the start
    prompt_tokens    how long its prompt is
    output_tokens    how long its answer is
    shared           optional: [[name, tokens], ...], what the prompt begins with; equal names are equal text
    output           optional: a name for the answer, so that a later prompt can contain it
    prompt           optional, in place of prompt_tokens and shared: the token ids themselves
    priority         optional: HIGH, NORMAL (default) or LOW
    salt             optional: requests with different salts share nothing
    cancel_after_s   optional: the client goes away this long after arriving

The lines of the public Mooncake traces (timestamp in ms, input_length, output_length, hash_ids of 512 tokens each) are
understood as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from quire.core.request import MAX_TOKEN_ID, Priority
from quire.errors import InvalidRequest, TraceError

VOCAB_SIZE = 32_000
MOONCAKE_BLOCK = 512
MAX_TOKENS = 10_000_000  # of one prompt or answer: beyond any context, and small enough to hold


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

    def prompt_ids(self, number: int) -> list[int]:
        """The prompt of request `number` of a trace: its shared parts, then text nobody else has."""
        if self.prompt:
            return list(self.prompt)
        ids: list[int] = []
        for name, count in self.shared:
            ids += text(name, count)
        return ids + text(f"own prompt {number}", self.prompt_tokens - len(ids))

    def output_ids(self, number: int) -> list[int]:
        return text(self.output or f"own output {number}", self.output_tokens)

    def as_line(self) -> str:
        """One line of a trace file, with the fields that differ from their defaults."""
        fields = {name: value for name, value in asdict(self).items() if value not in ((), "", None)}
        fields["priority"] = self.priority.name
        return json.dumps(fields)


def text(name: str, count: int) -> list[int]:
    """The first tokens of the text of that name: the same in every process, on every machine."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
    return Random(seed).choices(range(VOCAB_SIZE), k=count)


# Recorded traces


def read_trace(path: Path) -> list[TraceRequest]:
    """In order of arrival. Raises `TraceError` with line and field at the first thing that is wrong."""
    try:
        with path.open(encoding="utf-8") as lines:
            requests = list(_parse_lines(path.name, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path.name}: {error}") from None
    if not requests:
        raise TraceError(f"{path.name}: no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse_lines(name: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise TraceError(f"{where}: not an object but {type(fields).__name__}")
        yield _mooncake(where, fields) if "hash_ids" in fields else _parse(where, fields)


def _parse(where: str, fields: Mapping[str, Any]) -> TraceRequest:
    known = TraceRequest.__dataclass_fields__
    for field in fields:
        if field not in known:
            raise TraceError(f"{where}: field {field!r} is not known; known are {', '.join(known)}")
    if "prompt" in fields and (clash := [name for name in ("prompt_tokens", "shared") if name in fields]):
        raise TraceError(f"{where}: field 'prompt' says all there is to say; leave out {' and '.join(clash)}")
    prompt = _tokens(where, fields["prompt"]) if "prompt" in fields else ()
    shared = _shared(where, fields.get("shared", []))
    prompt_tokens = len(prompt) or _integer(where, fields, "prompt_tokens", 1)
    if sum(count for _, count in shared) > prompt_tokens:
        raise TraceError(f"{where}: field 'shared' has more tokens than prompt_tokens = {prompt_tokens}")
    cancel = _number(where, fields, "cancel_after_s") if fields.get("cancel_after_s") is not None else None
    return TraceRequest(
        arrival_s=_number(where, fields, "arrival_s"),
        prompt_tokens=prompt_tokens,
        output_tokens=_integer(where, fields, "output_tokens", 1),
        shared=shared,
        output=_string(where, fields, "output"),
        prompt=prompt,
        priority=_priority(where, fields.get("priority", "NORMAL")),
        salt=_string(where, fields, "salt"),
        cancel_after_s=cancel,
    )


def _mooncake(where: str, fields: Mapping[str, Any]) -> TraceRequest:
    prompt_tokens = _integer(where, fields, "input_length", 1)
    hashes = fields["hash_ids"]
    if not isinstance(hashes, list) or not all(isinstance(one, int) for one in hashes):
        raise TraceError(f"{where}: field 'hash_ids' is not a list of numbers")
    shared = tuple((f"hash {one}", MOONCAKE_BLOCK) for one in hashes[: prompt_tokens // MOONCAKE_BLOCK])
    return TraceRequest(
        arrival_s=_number(where, fields, "timestamp") / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, _integer(where, fields, "output_length", 0)),
        shared=shared,
    )


def _number(where: str, fields: Mapping[str, Any], field: str) -> float:
    value = _present(where, fields, field)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise TraceError(f"{where}: field {field!r} = {value!r} is not a number from 0 up")
    return float(value)


def _integer(where: str, fields: Mapping[str, Any], field: str, least: int) -> int:
    value = _present(where, fields, field)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise TraceError(f"{where}: field {field!r} = {value!r} is not a whole number from {least} to {MAX_TOKENS}")
    return value


def _string(where: str, fields: Mapping[str, Any], field: str) -> str:
    value = fields.get(field, "")
    if not isinstance(value, str):
        raise TraceError(f"{where}: field {field!r} = {value!r} is not a string")
    return value


def _present(where: str, fields: Mapping[str, Any], field: str) -> Any:
    if field not in fields:
        raise TraceError(f"{where}: field {field!r} is missing")
    return fields[field]


def _priority(where: str, value: Any) -> Priority:
    if not isinstance(value, str) or value.upper() not in Priority.__members__:
        raise TraceError(f"{where}: field 'priority' = {value!r} is not one of {', '.join(Priority.__members__)}")
    return Priority[value.upper()]


def _tokens(where: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: field 'prompt' is not a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise TraceError(f"{where}: field 'prompt'[{position}] = {token!r} is not a token id")
    return tuple(value)


def _shared(where: str, value: Any) -> tuple[tuple[str, int], ...]:
    match value:
        case list() if all(_is_part(part) for part in value):
            return tuple((name, count) for name, count in value)
    raise TraceError(f"{where}: field 'shared' = {value!r} is not a list of [name, tokens]")


def _is_part(part: Any) -> bool:
    match part:
        case [str(), int(count)] if type(count) is int and 1 <= count <= MAX_TOKENS:
            return True
    return False


# Synthetic traces


def synthesize(num_requests: int, rate: float, *, seed: int = 0, chat_share: float = 0.6) -> list[TraceRequest]:
    """A small team's day: chats that come back turn after turn, one-off questions, and batch jobs over documents.

    Arrivals are Poisson with bursts. Chats are HIGH and share a system prompt, one-offs NORMAL, batch jobs LOW and
    long. `rate` is requests per second.
    """
    if num_requests < 1:
        raise InvalidRequest(f"{num_requests = } is less than 1")
    if not rate > 0:
        raise InvalidRequest(f"{rate = } is not above 0")
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


def _chat_turn(random: Random, number: int, now_s: float, chats: list[tuple[tuple[str, int], ...]]) -> TraceRequest:
    """A new chat, or the next turn of one: its whole history, a new question, and an answer the next turn contains."""
    history: tuple[tuple[str, int], ...] = (("system prompt", 400),)
    if chats and random.random() < 0.7:
        history = chats.pop(random.randrange(len(chats)))
    question = (f"question {number}", random.randint(10, 120))
    answer = (f"answer {number}", random.randint(20, 250))
    prompt = (*history, question)
    length = sum(count for _, count in prompt)
    if length < 6_000:
        chats.append((*prompt, answer))
    return TraceRequest(now_s, length, answer[1], shared=prompt, output=answer[0], priority=Priority.HIGH, salt="")
