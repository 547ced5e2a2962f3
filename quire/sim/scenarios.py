"""Synthetic traces: of coding agents, and others that each test one property of a policy. Generated from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from quire.core.values import Priority
from quire.sim.traces import TraceRequest, check_synthetic, synthesize

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
        yield from sorted(requests, key=_arrival)

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
    """Sessions of coding agents, as described at the top of this module.

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


def _arrival(request: TraceRequest) -> float:
    return request.arrival_s


TURNS = 3  # of a conversation of `tree`
BACKLOG_PART = 4  # backlog requests for each request whose wait is measured


def mixed(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Mixed load of a small team: see `synthesize`."""
    return synthesize(num_requests, rate, seed=seed)


def backlog(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """A LOW batch from the start, and HIGH requests at a tenth of the rate.

    Tests how long HIGH requests wait.
    """
    return _beside(num_requests, rate, seed, Priority.LOW, Priority.HIGH)


def saturated(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """HIGH load above capacity, and LOW requests at a tenth of the rate.

    Tests the share that LOW requests get.
    """
    return _beside(num_requests, rate, seed, Priority.HIGH, Priority.LOW)


def tenants(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """One tenant sends a batch at once, another sends single requests, in the same tier."""
    return _beside(num_requests, rate, seed, Priority.NORMAL, Priority.NORMAL, ("batch", "person"))


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
    num_requests: int, rate: float, seed: int, many: Priority, few: Priority, names: tuple[str, str] = ("", "")
) -> list[TraceRequest]:
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
    "backlog": backlog,
    "saturated": saturated,
    "tenants": tenants,
    "agents": agents,
    "tree": tree,
}
