"""Measures replicas behind one front, with the default model, on a Ray cluster of its own on this machine.

    PYTHONPATH=. python benchmarks/scale.py                      # all of it: some minutes
    PYTHONPATH=. python benchmarks/scale.py --only overhead

tree       cached tokens of a tree of conversations on 2 and 4 replicas, against one server with their summed memory
           and against as many servers with round robin; how even the load is
overhead   throughput and time to the first token of one replica behind Ray, against `quire serve`, in turns
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import harness
from harness import Seen, ask, run_load, say

from tests.scale.rig import deployed
from tests.server.rig import Server, serving

NUM_BLOCKS = 160  # of one replica: a part of the tree
PERSONAS, USERS, TURNS = 8, 3, 3
NUM_AT_A_TIME = 4  # conversations
NUM_CLIENTS = 8
ROUNDS = 5
SYSTEM = "You are an assistant of a library. " + " ".join(
    f"Rule {number}: answer question {number} in plain words and name the shelf." for number in range(24)
)


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def tree(servers: Sequence[Server]) -> list[Seen]:
    """Run the tree: a few conversations at a time, turn by turn. Several servers: round robin."""
    prompts = [
        f"{SYSTEM} Persona {persona}: you like {'words ' * (8 + persona)}.\n\n"
        f"I am user {user} of group {persona}. Which shelf has number {user}?\n"
        for user in range(USERS)
        for persona in range(PERSONAS)
    ]
    numbers, found = count(), []

    def send(prompt: str) -> Seen:
        return ask(servers[next(numbers) % len(servers)].url, body(prompt, 16))

    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        for _ in range(TURNS):
            replies = list(pool.map(send, prompts))
            prompts = [f"{prompt}{one.text}\nAnd then?\n" for prompt, one in zip(prompts, replies, strict=True)]
            found += replies
    return found


def num_cached(replies: Sequence[Seen]) -> int:
    return sum(one.usage["prompt_tokens_details"]["cached_tokens"] for one in replies)


def measure_tree() -> None:
    for num_replicas in (2, 4):
        with serving("--num-blocks", str(num_replicas * NUM_BLOCKS)) as one:
            whole = num_cached(tree([one]))
        with deployed({"num_blocks": NUM_BLOCKS}, replicas=num_replicas) as cluster:
            cluster.wait_replicas(num_replicas)
            replies = tree([cluster])
            routed, replicas = num_cached(replies), cluster.replicas()
        work = [one["num_queried_tokens"] - one["num_hit_tokens"] + 16 * one["num_routed"] for one in replicas]
        with ExitStack() as stack:
            servers = [stack.enter_context(serving("--num-blocks", str(NUM_BLOCKS))) for _ in range(num_replicas)]
            turns = num_cached(tree(servers))
        say(
            f"tree, {num_replicas} replicas: {routed:,} of {sum(one.usage['prompt_tokens'] for one in replies):,}"
            f" prompt tokens cached, {routed / whole:.1%} of one server with the summed memory ({whole:,}); round robin"
            f" {turns / whole:.1%}; imbalance {max(work) / statistics.mean(work):.2f},"
            f" requests {[one['num_routed'] for one in replicas]}"
        )


def load(server: Server, number: int) -> tuple[float, float, float]:
    """Return tokens per second of eight clients, and milliseconds to the first token of these and of one alone."""
    prompts = [f"Round {number}, request {one}: tell me about {100 * number + one}." for one in range(2 * NUM_CLIENTS)]
    found = run_load(server.url, [body(prompt, 64) for prompt in prompts], clients=NUM_CLIENTS)
    alone = [ask(server.url, body(f"{number}.{one}: what is a fox?", 2)) for one in range(8)]
    busy_ms, alone_ms = (1e3 * statistics.median(one.ttft_s for one in seen) for seen in (found.seen, alone))
    return found.tokens_per_s, busy_ms, alone_ms


def measure_overhead() -> None:
    # `serving` has one thread; so does a replica with one CPU.
    with serving("--num-blocks", "400") as plain, deployed({"num_blocks": 400}, replicas=1) as cluster:
        sides = {"quire serve": partial(load, plain), "behind Ray": partial(load, cluster)}
        found = harness.alternate(sides, ROUNDS, num_warm_ups=1)
    rates, busy_ms, alone_ms = (
        {name: [figures[place] for figures in rounds] for name, rounds in found.items()} for place in range(3)
    )
    for name in sides:
        rate, busy, alone = (statistics.median(values[name]) for values in (rates, busy_ms, alone_ms))
        say(f"{name}: {rate:.1f} tok/s with {NUM_CLIENTS} clients, TTFT {busy:.0f} ms; alone {alone:.1f} ms")
    lost = 1 - harness.median_ratio(rates["behind Ray"], rates["quire serve"])
    more = [statistics.median(one["behind Ray"]) - statistics.median(one["quire serve"]) for one in (busy_ms, alone_ms)]
    print(
        f"overhead: throughput {lost:+.1%} lost (bar 5 %); TTFT {more[0]:+.1f} ms with {NUM_CLIENTS} clients,"
        f" {more[1]:+.1f} ms alone (bar 10 ms)"
    )


def main() -> None:
    parts: dict[str, Callable[[], None]] = {"tree": measure_tree, "overhead": measure_overhead}
    parser = harness.options(__doc__)
    parser.add_argument("--only", type=harness.names(parts), default=tuple(parts))
    for name in parser.parse_args().only:
        parts[name]()


if __name__ == "__main__":
    main()
