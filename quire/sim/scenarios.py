"""Synthetic traces, each of which tests one property of a policy. Generated from a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from quire.core.values import Priority
from quire.sim.agents import agents
from quire.sim.traces import TraceRequest, check_synthetic, synthesize

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
