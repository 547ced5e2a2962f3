"""Traces: requests with arrival times, read from JSON lines or generated from a seed (`SCENARIOS`).

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
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from quire.core.values import MAX_SALT, MAX_TOKEN_ID, Priority, check_salt
from quire.errors import InvalidRequest, TraceError

VOCAB_SIZE = 32_000
MAX_TOKENS = 10_000_000  # per prompt or answer: more than any context, and small enough for memory
MAX_SECONDS = 1e9
MAX_REQUESTS = 1_000_000  # per synthetic trace


Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Name = Annotated[str, Meta(max_length=MAX_SALT)]


class TraceRequest(Struct, frozen=True, forbid_unknown_fields=True):
    arrival_s: Seconds
    prompt_tokens: Count
    output_tokens: Count
    shared: tuple[tuple[Name, Count], ...] = ()
    output: Name = ""
    prompt: tuple[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)], ...] = ()
    priority: Priority = Priority.NORMAL
    salt: Name = ""
    cancel_after_s: Seconds | None = None
    tenant: Name = ""
    session: Name = ""

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
        fields = {name: value for name, value in structs.asdict(self).items() if value not in ((), "", None)}
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
        try:
            yield _parse(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, InvalidRequest, RecursionError) as error:
            raise TraceError(f"{name} line {number}: {error}") from None


def _parse(line: dict[str, Any]) -> TraceRequest:
    fields = {name: value for name, value in line.items() if value is not None}  # null is the same as a missing field
    try:
        request = msgspec.convert({**fields, **_converted(fields)}, TraceRequest)
    except msgspec.ValidationError as error:
        named = re.search(r"\$\.(\w+)", str(error))
        value = f"field {named[1]!r} = {fields.get(named[1])!r:.60}: " if named is not None else ""
        raise InvalidRequest(f"{value}{error}") from None
    check_salt(request.salt)
    if (num_shared := sum(count for _, count in request.shared)) > request.prompt_tokens:
        raise InvalidRequest(f"shared has {num_shared} tokens, more than prompt_tokens = {request.prompt_tokens}")
    return request


def _converted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not given as a `TraceRequest` has them."""
    converted: dict[str, Any] = {}
    if "priority" in fields:
        name = str(fields["priority"]).upper()
        if name not in Priority.__members__:
            raise InvalidRequest(f"priority = {fields['priority']!r} is not one of {', '.join(Priority.__members__)}")
        converted["priority"] = Priority[name]
    if isinstance(prompt := fields.get("prompt"), list):
        if clash := fields.keys() & {"prompt_tokens", "shared"}:
            raise InvalidRequest(f"prompt cannot be combined with {' and '.join(sorted(clash))}")
        converted["prompt_tokens"] = len(prompt)
    return converted


# Synthetic traces


CHAT_SHARE = 0.6  # of the requests of `mixed`


def mixed(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """The mixed load of a small team.

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
        if random.random() < CHAT_SHARE:
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


NUM_AGENTS = 4  # kinds of agents, each with its own system prompt
WEIGHTS = (8, 4, 2, 1)  # how often each kind is used
HEADER = ("assistant header", 4)  # the tokens with which a template starts an answer
REQUESTS_PER_SESSION = 32  # mean, with the requests of sub-agents
RETRY_SHARE = 0.04  # of the loops: the next request goes back to an earlier message
AGAIN_SHARE = 0.02  # of the loops: the same prompt is sent again
SUB_AGENT_SHARE = 0.03  # of the loops: the call starts sub-agents


@dataclass(slots=True)
class _Message:
    """One message of a history. An answer may have reasoning, which later turns omit."""

    name: str
    num_tokens: int
    num_reasoning: int = 0
    is_answer: bool = False

    def parts(self, *, is_old: bool) -> list[tuple[str, int]]:
        if not self.is_answer:
            return [(self.name, self.num_tokens)]
        if is_old and self.num_reasoning:
            return [HEADER, (f"{self.name} without reasoning", self.num_tokens - self.num_reasoning)]
        return [HEADER, (self.name, self.num_tokens)]


@dataclass(slots=True)
class _Session:
    """One agent: its history, its clock, and the requests that it sends."""

    name: str
    random: Random
    now_s: float
    num_loops: int
    system: tuple[str, int]
    num_turns: int = 1
    is_sub_agent: bool = False
    history: list[_Message] = field(default_factory=list)
    turn_start: int = 0  # index of the first message of the current turn of the user
    num_messages: int = 0

    def run(self) -> Iterator[TraceRequest]:
        """Requests in order of time."""
        self._say("task", 100, 1500)
        ends = sorted(self.random.sample(range(1, self.num_loops), min(self.num_turns, self.num_loops) - 1))
        for loop in range(self.num_loops):
            if loop in ends:
                yield self._ask(num_call=self.random.randint(100, 500))  # the answer to the user
                self.now_s += self.random.uniform(10, 120)
                self.turn_start = len(self.history)
                self._say("task", 20, 400)
            yield from self._loop()
        yield self._ask(num_call=self.random.randint(100, 500))

    def _loop(self) -> Iterator[TraceRequest]:
        """One call of a tool, and sometimes a retry before it."""
        random = self.random
        if random.random() < AGAIN_SHARE:
            yield self._ask(random.randint(50, 300))
            self.history.pop()
        if random.random() < RETRY_SHARE and len(self.history) - self.turn_start > 4:
            # Back to a prompt of this turn: the task, or a tool result.
            num_kept = random.randrange(self.turn_start + 1, len(self.history) - 1, 2)
            del self.history[num_kept:]
        yield self._ask(random.randint(50, 300))
        if not self.is_sub_agent and random.random() < SUB_AGENT_SHARE:
            yield from self._sub_agents(random.randint(1, 4))
            self._say("report", 200, 1000)
        else:
            self.now_s += min(random.lognormvariate(0.7, 1.0), 60)  # the tool: a median of 2 s
            self._say("tool result", 100, 4000)

    def _sub_agents(self, count: int) -> Iterator[TraceRequest]:
        """Run sub-agents at the same time, and wait for the last of them."""
        children = [
            _Session(
                f"{self.name}.{self.num_messages}.{number}",
                self.random,
                self.now_s,
                self.random.randint(2, 8),
                self.system,
                is_sub_agent=True,
            )
            for number in range(count)
        ]
        requests = [one for child in children for one in child.run()]
        self.now_s = max(child.now_s for child in children)
        yield from sorted(requests, key=lambda one: one.arrival_s)

    def _say(self, kind: str, low: int, high: int) -> None:
        """Append a message of the client. Lengths are spread evenly over the orders of magnitude."""
        num_tokens = round(low * (high / low) ** self.random.random())
        self.history.append(_Message(f"{kind} {self.name}.{self._number()}", num_tokens))

    def _ask(self, num_call: int) -> TraceRequest:
        """Send the whole history, and append the answer to it."""
        num_reasoning = self.random.randint(20, 400) if self.random.random() < 0.6 else 0
        answer = _Message(f"answer {self.name}.{self._number()}", num_call + num_reasoning, num_reasoning, True)
        parts = [self.system]
        for index, message in enumerate(self.history):
            parts += message.parts(is_old=index < self.turn_start)
        parts.append(HEADER)
        request = TraceRequest(
            round(self.now_s, 6),
            prompt_tokens=sum(count for _, count in parts),
            output_tokens=answer.num_tokens,
            shared=tuple(parts),
            output=answer.name,
        )
        self.history.append(answer)
        self.now_s += 1 + 0.02 * answer.num_tokens  # assumed time of the answer
        return request

    def _number(self) -> int:
        self.num_messages += 1
        return self.num_messages


def agents(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Sessions of coding agents.

    `rate` is in requests per second over all sessions. The clients do not wait for the simulated answers: each answer
    is assumed to take 1 s and 20 ms per token.
    """
    check_synthetic(num_requests, rate)
    random = Random(seed)
    systems = [(f"system prompt {number}", random.randint(3000, 8000)) for number in range(NUM_AGENTS)]
    waiting: list[tuple[float, int, TraceRequest]] = []  # requests of started sessions, earliest first
    requests: list[TraceRequest] = []
    now_s, number = 0.0, 0
    while len(requests) < num_requests:
        now_s += random.expovariate(rate / REQUESTS_PER_SESSION)
        while waiting and waiting[0][0] <= now_s:
            requests.append(heappop(waiting)[2])
        system = random.choices(systems, WEIGHTS)[0]
        own = Random(random.getrandbits(64))
        session = _Session(str(number), own, now_s, own.randint(5, 40), system, num_turns=own.randint(1, 4))
        for index, one in enumerate(session.run()):
            heappush(waiting, (one.arrival_s, number * 10_000 + index, one))
        number += 1
    return requests[:num_requests]


TURNS = 3  # of a conversation of `tree`
BACKLOG_PART = 4  # backlog requests for each request whose wait is measured


def tree(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """A system prompt, 8 personas after it, users of each persona with conversations of three turns.

    Tests what a router makes of prefixes that are shared at several depths.
    """
    check_synthetic(num_requests, rate)
    random = Random(seed)
    requests: list[TraceRequest] = []
    now_s = 0.0
    for user in range(-(-num_requests // TURNS)):
        now_s += random.expovariate(rate / TURNS)
        arrival_s = now_s
        shared: tuple[tuple[str, int], ...] = (("system", 640), (f"persona {random.randrange(8)}", 900))
        for turn in range(TURNS):
            question, answer = random.randint(40, 200), random.randint(40, 160)
            prompt_tokens = sum(count for _, count in shared) + question
            parts = (*shared, (f"question {user} {turn}", question))
            name = f"answer {user} {turn}"
            requests.append(TraceRequest(arrival_s, prompt_tokens, answer, parts, output=name, session=f"user {user}"))
            shared = (*parts, (name, answer))
            arrival_s += random.uniform(10, 40)  # until the person has read the answer
    return sorted(requests[:num_requests], key=lambda one: one.arrival_s)


def _beside(
    many: Priority, few: Priority, names: tuple[str, str], num_requests: int, rate: float, seed: int
) -> list[TraceRequest]:
    """A batch from the start, and single requests at a tenth of the rate."""
    check_synthetic(num_requests, rate)
    random = Random(seed)
    requests: list[TraceRequest] = []
    now_s = 0.0
    for number in range(num_requests):
        is_many = number % (BACKLOG_PART + 1) < BACKLOG_PART
        if not is_many:
            now_s += random.expovariate(rate / 10)
        requests.append(
            TraceRequest(
                0.0 if is_many else now_s,
                prompt_tokens=random.randint(100, 400) if is_many else random.randint(50, 150),
                output_tokens=random.randint(50, 250) if is_many else random.randint(20, 60),
                priority=many if is_many else few,
                tenant=names[0] if is_many else names[1],
            )
        )
    return sorted(requests, key=lambda one: one.arrival_s)


SCENARIOS: dict[str, Callable[[int, float, int], list[TraceRequest]]] = {
    "mixed": mixed,
    # How long HIGH requests wait beside a LOW batch; the share that LOW requests get beside HIGH load above capacity;
    # and two tenants of one tier, of which one sends a batch.
    "backlog": partial(_beside, Priority.LOW, Priority.HIGH, ("", "")),
    "saturated": partial(_beside, Priority.HIGH, Priority.LOW, ("", "")),
    "tenants": partial(_beside, Priority.NORMAL, Priority.NORMAL, ("batch", "person")),
    "agents": agents,
    "tree": tree,
}
