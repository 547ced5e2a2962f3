"""Replicas that die and are replaced under load. The suite runs a few; this runs any number:

python -m tests.scale.faults --kills 20
python -m tests.scale.faults --restarts 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from tests.scale.rig import Cluster, deployed
from tests.server.rig import Server
from tests.waiting import HANG_S, eventually, paused


@dataclass
class Outcome:
    """How one stream ended."""

    num_tokens: int = 0
    finish: str | None = None
    error: str | None = None  # of the protocol
    problem: str | None = None  # anything that a client should not see
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


def stream(server: Server, text: str, max_tokens: int) -> Outcome:
    """Start a streamed chat request in a thread."""
    outcome = Outcome()
    threading.Thread(target=_read, args=(server, text, max_tokens, outcome), daemon=True).start()
    return outcome


def _read(server: Server, text: str, max_tokens: int, outcome: Outcome) -> None:
    connection = HTTPConnection(*server.address, timeout=HANG_S)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True}
    try:
        payload = json.dumps({**body, "temperature": 0, "ignore_eos": True})
        connection.request("POST", "/v1/chat/completions", payload, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            outcome.error = str(json.loads(response.read())["error"]["message"])
            return
        is_done = False
        while line := response.readline():
            data = line.decode().strip().removeprefix("data: ")
            if not data or data.startswith(":"):
                continue
            if data == "[DONE]":
                is_done = True
                continue
            _take(json.loads(data), outcome)
        if not is_done and outcome.error is None:
            outcome.problem = "the stream ended without [DONE] or an error"
    except Exception as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        outcome.began.set()
        outcome.ended.set()


def _take(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        outcome.error = str(event["error"]["message"])
        return
    for choice in event["choices"]:
        if choice["delta"].get("content"):
            outcome.num_tokens += 1
            outcome.began.set()
        outcome.finish = choice["finish_reason"] or outcome.finish


def kill_in_mid_stream(cluster: Cluster, number: int, num_tokens: int) -> tuple[int, int, float]:
    """Kill a replica while every replica answers. Returns the streams that failed and that ended, and the seconds
    until all replicas were back."""
    cluster.wait_replicas(2)
    outcomes = [
        stream(cluster, f"Round {number}, story {one}: tell me about the number {one}.", num_tokens) for one in range(6)
    ]
    for outcome in outcomes:
        assert outcome.began.wait(HANG_S)
    with paused(*cluster.worker_pids()):  # otherwise the streams may end first on a busy machine
        before = {one["name"] for one in cluster.replicas()}
        assert all(one["num_requests"] for one in cluster.replicas()), cluster.replicas()
        # Half of the time Ray's process, half of the time the worker below it.
        victim = random.Random(number).choice(cluster.replica_pids() if number % 2 else cluster.worker_pids())
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
    for outcome in outcomes:
        assert outcome.ended.wait(HANG_S)
    assert not [one.problem for one in outcomes if one.problem], outcomes
    failed = [one for one in outcomes if one.error is not None]
    ended = [one for one in outcomes if one.error is None]
    assert failed, "no stream noticed"
    assert all(one.finish == "length" and one.num_tokens > 0 for one in ended), ended

    def is_back() -> bool:
        found = cluster.replicas()
        return len(found) == 2 and {one["name"] for one in found} != before

    eventually(is_back, "the replica is replaced")
    took_s = time.monotonic() - killed_s
    cluster.wait_free()
    return len(failed), len(ended), took_s


def restart_under_load(cluster: Cluster, num_clients: int = 4) -> list[Outcome]:
    """Deploy again while clients send one request after the other. Returns what became of all requests."""
    outcomes: list[Outcome] = []
    is_over = threading.Event()

    def send(client: int) -> None:
        for number in range(10_000):
            if is_over.is_set():
                return
            outcome = stream(cluster, f"Client {client}, question {number}?", 24)
            outcomes.append(outcome)
            outcome.ended.wait(HANG_S)

    clients = [threading.Thread(target=send, args=(client,)) for client in range(num_clients)]
    for client in clients:
        client.start()
    before = {one["name"] for one in cluster.replicas()}
    said = cluster.order(f"deploy {cluster.folder / 'deploy.yaml'}")
    assert said == {"url": cluster.url}, said  # the front has stayed
    eventually(lambda: not before & {one["name"] for one in cluster.replicas()}, "all replicas are new")
    is_over.set()
    for client in clients:
        client.join()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    options = parser.parse_args()
    with deployed({"num_blocks": 400}) as cluster:
        num_failed, num_ended = 0, 0
        waits_s: list[float] = []
        for number in range(options.kills):
            failed, ended, took_s = kill_in_mid_stream(cluster, number, 200)
            num_failed, num_ended, waits_s = num_failed + failed, num_ended + ended, [*waits_s, took_s]
            print(f"kill {number + 1}: {failed} streams failed, {ended} did not; back in {took_s:.1f} s", flush=True)
        if waits_s:
            print(f"{options.kills} kills: {num_failed} failed, {num_ended} did not; all in {max(waits_s):.1f} s")
        for number in range(options.restarts):
            outcomes = restart_under_load(cluster)
            lost = [one for one in outcomes if one.problem or one.error]
            print(f"restart {number + 1}: {len(outcomes)} requests, {len(lost)} lost {lost[:3]}", flush=True)
        print(f"blocks held at the end: {cluster.wait_free()['num_in_use']}")


if __name__ == "__main__":
    main()
