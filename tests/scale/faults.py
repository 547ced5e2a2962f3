"""Replicas that die and are replaced under load. The suite runs a few; this runs any number:

python -m tests.scale.faults --kills 20
python -m tests.scale.faults --restarts 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time

from tests.gauntlet.flood import Flood, chat_body
from tests.scale.rig import Cluster, deployed
from tests.server.corpus import CHAT
from tests.server.rig import Reply, Server, ask_async
from tests.waiting import HANG_S, eventually, paused, repeating


def ask(server: Server, text: str, num_tokens: int) -> Reply:
    """Send a streamed chat, and wait for its end."""
    return asyncio.run(asyncio.wait_for(ask_async(server, CHAT, chat_body(text, num_tokens)), HANG_S))


def kill_in_mid_stream(cluster: Cluster, number: int, num_tokens: int) -> tuple[int, int, float]:
    """Kill a replica while every replica answers. Returns the streams that failed and that ended, and the seconds
    until all replicas were back."""
    cluster.wait_replicas(2)
    texts = [f"Round {number}, story {one}: tell me about the number {one}." for one in range(6)]
    flood = Flood(cluster, [chat_body(text, num_tokens) for text in texts])
    flood.wait_flowing()
    with paused(*cluster.worker_pids()):  # otherwise the streams may end first on a busy machine
        before = {one["name"] for one in cluster.replicas()}
        assert all(one["num_requests"] for one in cluster.replicas()), cluster.replicas()
        # Half of the time Ray's process, half of the time the worker below it.
        victim = random.Random(number).choice(cluster.replica_pids() if number % 2 else cluster.worker_pids())
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
    endings = [reply.ending for reply in flood.wait()]
    assert "error" in endings, "no stream noticed"
    assert set(endings) <= {"done", "error"}

    def is_back() -> bool:
        found = cluster.replicas()
        return len(found) == 2 and {one["name"] for one in found} != before

    eventually(is_back, "the replica is replaced")
    took_s = time.monotonic() - killed_s
    cluster.wait_free()
    return endings.count("error"), endings.count("done"), took_s


def restart_under_load(cluster: Cluster, num_clients: int = 4) -> list[Reply]:
    """Deploy again while clients send one request after the other. Returns all replies."""
    replies: list[Reply] = []
    with repeating(lambda: replies.append(ask(cluster, f"Question {len(replies)}?", 24)), num_threads=num_clients):
        before = {one["name"] for one in cluster.replicas()}
        said = cluster.order(f"deploy {cluster.folder / 'deploy.yaml'}")
        assert said == {"url": cluster.url}, said  # the front has stayed
        eventually(lambda: not before & {one["name"] for one in cluster.replicas()}, "all replicas are new")
    return replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    options = parser.parse_args()
    with deployed({"num_blocks": 400}) as cluster:
        for number in range(options.kills):
            failed, ended, took_s = kill_in_mid_stream(cluster, number, 200)
            print(f"kill {number + 1}: {failed} streams failed, {ended} did not; back in {took_s:.1f} s", flush=True)
        for number in range(options.restarts):
            replies = restart_under_load(cluster)
            lost = [reply for reply in replies if reply.ending != "done"]
            print(f"restart {number + 1}: {len(replies)} requests, {len(lost)} lost {lost[:3]}", flush=True)
        print(f"blocks held at the end: {cluster.wait_free()['num_in_use']}")


if __name__ == "__main__":
    main()
