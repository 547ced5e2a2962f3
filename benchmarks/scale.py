"""Measures replicas behind one front, with the default model, on a Ray cluster of its own on this machine.

PYTHONPATH=. python benchmarks/scale.py                      # all of it: some minutes
PYTHONPATH=. python benchmarks/scale.py --only overhead

tree       cached tokens of a tree of conversations on 2 and 4 replicas, against one server with their summed memory
           and against as many servers with round robin; how even the load is
overhead   throughput and time to the first token of one replica behind Ray, against `quire serve`, in turns
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tests.scale.rig import deployed
from tests.server.rig import Server, serving

NUM_BLOCKS = 160  # of one replica: a part of the tree
PERSONAS, USERS, TURNS = 8, 3, 3
NUM_CLIENTS = 8
ROUNDS = 5
SYSTEM = "You are an assistant of a library. " + " ".join(
    f"Rule {number}: answer question {number} in plain words and name the shelf." for number in range(24)
)


class Reply(NamedTuple):
    text: str
    ttft_s: float
    num_tokens: int
    num_prompt: int
    num_cached: int


def ask(server: Server, messages: list[dict[str, str]], max_tokens: int) -> Reply:
    """Send one streamed request."""
    connection = http.client.HTTPConnection(*server.address, timeout=600)
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    began_s = time.monotonic()
    payload = json.dumps({**body, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/chat/completions", payload, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    text, ttft_s = "", 0.0
    usage: dict[str, Any] = {}
    while line := response.readline():
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                ttft_s = ttft_s or time.monotonic() - began_s
                text += content
    connection.close()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(text, ttft_s, usage["completion_tokens"], usage["prompt_tokens"], cached)


class TreeRun(NamedTuple):
    num_prompt: int
    num_cached: int


def tree(servers: Sequence[Server]) -> TreeRun:
    """Run the tree: a few conversations at a time, turn by turn. Several servers: round robin."""
    chats = {
        (persona, user): [
            {"role": "system", "content": f"{SYSTEM} Persona {persona}: you like {'words ' * (8 + persona)}."},
            {"role": "user", "content": f"I am user {user} of group {persona}. Which shelf has number {user}?"},
        ]
        for user in range(USERS)
        for persona in range(PERSONAS)
    }
    lock, counter = threading.Lock(), iter(range(10_000))
    totals = [0, 0]

    def run(places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            with lock:
                server = servers[next(counter) % len(servers)]
            reply = ask(server, chats[place], 16)
            chats[place] += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "And then?"}]
            with lock:
                totals[0] += reply.num_prompt
                totals[1] += reply.num_cached

    for _ in range(TURNS):
        places = list(chats)
        threads = [threading.Thread(target=run, args=(places[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return TreeRun(totals[0], totals[1])


def measure_tree() -> None:
    for num_replicas in (2, 4):
        with serving("--num-blocks", str(num_replicas * NUM_BLOCKS)) as one:
            whole = tree([one])
        with deployed({"num_blocks": NUM_BLOCKS}, replicas=num_replicas) as cluster:
            cluster.wait_replicas(num_replicas)
            routed = tree([cluster])
            found = cluster.replicas()
        work = [one["num_queried_tokens"] - one["num_hit_tokens"] + 16 * one["num_routed"] for one in found]
        with ExitStack() as stack:
            servers = [stack.enter_context(serving("--num-blocks", str(NUM_BLOCKS))) for _ in range(num_replicas)]
            turns = tree(servers)
        print(
            f"tree, {num_replicas} replicas: {routed.num_cached:,} of {routed.num_prompt:,} prompt tokens cached,"
            f" {routed.num_cached / whole.num_cached:.1%} of one server with the summed memory ({whole.num_cached:,});"
            f" round robin {turns.num_cached / whole.num_cached:.1%};"
            f" imbalance {max(work) / statistics.mean(work):.2f}, requests {[one['num_routed'] for one in found]}",
            flush=True,
        )


def load(server: Server, number: int) -> tuple[float, list[float]]:
    """Eight clients, each with two requests. Returns output tokens per second, and the times to the first token."""
    replies: list[Reply] = []

    def client(one: int) -> None:
        for turn in range(2):
            text = f"Round {number}, client {one}, turn {turn}: tell me about the number {number * 100 + one}."
            replies.append(ask(server, [{"role": "user", "content": text}], 64))

    threads = [threading.Thread(target=client, args=(one,)) for one in range(NUM_CLIENTS)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began_s
    return sum(reply.num_tokens for reply in replies) / took_s, [reply.ttft_s for reply in replies]


def alone_ms(server: Server, number: int) -> float:
    """The time to the first token of single requests."""
    times = [
        ask(server, [{"role": "user", "content": f"{number}.{one}: what is a fox?"}], 2).ttft_s for one in range(8)
    ]
    return 1000 * statistics.median(times)


def measure_overhead() -> None:
    # `serving` has one thread; so does a replica with one CPU.
    with serving("--num-blocks", "400") as plain, deployed({"num_blocks": 400}, replicas=1) as cluster:
        servers: dict[str, Server] = {"quire serve": plain, "behind Ray": cluster}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        busy: dict[str, list[float]] = {name: [] for name in servers}
        alone: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(ROUNDS + 1):
            for name, server in servers.items() if number % 2 else reversed(servers.items()):
                rate, ttfts = load(server, number)
                single = alone_ms(server, number)
                if number:  # the first round warms up
                    rates[name].append(rate)
                    busy[name].append(1000 * statistics.median(ttfts))
                    alone[name].append(single)
        for name in servers:
            print(
                f"{name}: {statistics.median(rates[name]):.1f} tok/s with {NUM_CLIENTS} clients"
                f" {[round(rate, 1) for rate in rates[name]]}, TTFT {statistics.median(busy[name]):.0f} ms;"
                f" one request alone {statistics.median(alone[name]):.1f} ms",
                flush=True,
            )
        ratio = statistics.median(ray / own for ray, own in zip(rates["behind Ray"], rates["quire serve"], strict=True))
        extra = {
            what: statistics.median(times["behind Ray"]) - statistics.median(times["quire serve"])
            for what, times in (("with 8 clients", busy), ("alone", alone))
        }
        print(
            f"overhead: throughput {1 - ratio:+.1%} lost (bar 5 %); TTFT"
            f" {', '.join(f'{more:+.1f} ms {what}' for what, more in extra.items())} (bar 10 ms)"
        )


def main() -> None:
    parts: dict[str, Callable[[], Any]] = {"tree": measure_tree, "overhead": measure_overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts))
    for name in parser.parse_args().only.split(","):
        parts[name]()


if __name__ == "__main__":
    main()
