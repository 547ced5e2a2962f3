"""R17: a replica is killed while it answers, with the cluster client alone and on a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.engine.outputs import Delta
from quire.engine.worker.client import Generation
from quire.errors import QuireError
from quire.scale.cluster_client import ClusterClient
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.watch import percentile
from tests.scale.rig import Cluster, deployed
from tests.scale.test_replica import CONFIG, Direct, make_replica, request, run
from tests.server.corpus import CHAT
from tests.server.rig import Reply, ask_async
from tests.server.test_chaos import body_for, text_of
from tests.waiting import HANG_S

NUM_REPLICAS = 3
MAX_SEQS = 4  # of a replica; more requests than all of them run at once wait
NUM_REQUESTS = 24
FRONT_CONFIG = replace(CONFIG, device="5ms", max_num_seqs=MAX_SEQS)


@dataclass
class Story:
    """One request, and the tokens or the error that its client received."""

    generation: Generation
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    error: QuireError | None = None
    error_s: float = 0.0

    async def read(self) -> None:
        try:
            async for delta in self.generation.deltas():
                self._take(delta)
        except QuireError as error:
            self.error, self.error_s = error, time.monotonic()

    def _take(self, delta: Delta) -> None:
        self.tokens += delta.token_ids


@dataclass
class Tally:
    num_kills: int = 0
    num_failed: int = 0
    num_moved: int = 0
    num_complete: int = 0
    num_strangers: int = 0  # failed, but were not at the replica that was killed
    num_unbegun: int = 0  # failed, although no token was delivered
    num_wrong: int = 0  # complete with other tokens than expected, or failed after tokens that are no prefix of them
    errors_s: list[float] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        return [
            Figure(f"kills of one replica of {NUM_REPLICAS}", self.num_kills, at_least=1),
            Figure("streams that failed with an error", self.num_failed, at_least=1),
            Figure("waiting requests of that replica that another replica ran", self.num_moved, at_least=1),
            Figure("complete answers", self.num_complete, at_least=1),
            exactly("streams of other replicas that failed", self.num_strangers),
            exactly("waiting requests that failed", self.num_unbegun),
            exactly("answers with missing, wrong or repeated tokens", self.num_wrong),
            Figure(
                "time from the kill to the error of a stream, p99",
                percentile(self.errors_s, 99),
                "s",
                at_most=1,
                is_timed=True,
            ),
        ]


def kills(gauntlet: Gauntlet) -> list[Figure]:
    """Kill -9 the worker of a replica while all of them answer."""
    tally = Tally()

    async def work(direct: Direct, client: ClusterClient) -> None:
        firsts = range(10, 10 + NUM_REQUESTS)
        whole = await asyncio.gather(*(client.generate(request(client, first, 40, 200)) for first in firsts))
        expected = [output.completions[0].token_ids for output in whole]
        num_kills = gauntlet.size(6, 1)
        for number in range(num_kills):
            await kill_one(direct, client, expected, f"r{number}", tally)
            if number == num_kills - 1:
                break
            name = f"r{number + NUM_REPLICAS}"
            direct.replicas[name] = await make_replica(name, gauntlet.tiny, config=FRONT_CONFIG)
            client.set_replicas([f"r{number + one}" for one in range(1, NUM_REPLICAS + 1)])
            while len(client.replicas) < NUM_REPLICAS:
                await asyncio.sleep(0.01)
        while (stats := await client.stats()) is None or stats.cache.num_in_use:  # else the row ends by its limit
            await asyncio.sleep(0.05)

    run(gauntlet.tiny, work, NUM_REPLICAS, FRONT_CONFIG)
    figures = tally.figures()
    if not gauntlet.is_quick:
        figures += on_ray(gauntlet)
    return figures


async def kill_one(
    direct: Direct, client: ClusterClient, expected: Sequence[tuple[int, ...]], victim: str, tally: Tally
) -> None:
    stories = [
        Story(await client.submit(request(client, 10 + number, 40, 200, salt=f"{victim}")), tokens)
        for number, tokens in enumerate(expected)
    ]
    reading = [asyncio.create_task(story.read()) for story in stories]

    def places() -> dict[int, str]:
        found = [direct.places.get(story.generation.request_ids[0]) for story in stories]
        return {number: place for number, place in enumerate(found) if place is not None}

    def is_middle() -> bool:
        """Whether requests of the victim run, and others wait there."""
        there = [stories[number] for number, place in places().items() if place == victim]
        return any(story.tokens for story in there) and any(not story.generation.is_started for story in there)

    while not is_middle():
        assert not all(task.done() for task in reading), "no request waited at the replica"
        await asyncio.sleep(0.005)
    there = {number for number, place in places().items() if place == victim}
    killed_s = time.monotonic()
    os.kill(direct.replicas[victim].process.pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*reading), HANG_S)
    tally.num_kills += 1
    for number, story in enumerate(stories):
        if story.error is not None:
            tally.num_failed += 1
            tally.num_strangers += number not in there
            tally.num_unbegun += not story.generation.is_started
            tally.num_wrong += tuple(story.tokens) != story.expected[: len(story.tokens)]
            tally.errors_s.append(story.error_s - killed_s)
        else:
            tally.num_complete += 1
            tally.num_moved += story.generation.num_moves > 0
            tally.num_wrong += tuple(story.tokens) != story.expected


# On Ray


def on_ray(gauntlet: Gauntlet) -> list[Figure]:
    """Kill Ray's process of a replica, or the worker below it, while the real model answers over HTTP."""
    gauntlet.say("three replicas of the real model on Ray")
    settings = {"model": gauntlet.model, "served_model_name": ["tiny"], "num_blocks": 200, "max_num_seqs": MAX_SEQS}
    figures: list[Figure] = []
    with deployed(settings, replicas=NUM_REPLICAS) as cluster:
        cluster.wait_replicas(NUM_REPLICAS)
        num_failed = num_complete = num_wrong = num_broken = num_extra = 0
        num_kills = 2
        for number in range(num_kills):
            cluster.wait_replicas(NUM_REPLICAS)
            replies = asyncio.run(_kill_on_ray(cluster, number))
            again = asyncio.run(_ask_all(cluster, number))
            failed = [reply for reply in replies if reply.ending == "error"]
            num_failed += len(failed)
            num_extra += max(0, len(failed) - MAX_SEQS)
            num_broken += sum(reply.ending == "broken" for reply in replies)
            for reply, whole in zip(replies, again, strict=True):
                if reply.ending == "done":
                    num_complete += 1
                    num_wrong += text_of(CHAT, reply)[0] != text_of(CHAT, whole)[0]
                elif reply.status == 200:
                    num_wrong += not text_of_part(whole).startswith(text_of_part(reply))
        held = cluster.wait_free()["num_in_use"]
    figures += [
        Figure("on Ray: kills of one replica of 3", num_kills, at_least=1),
        Figure("on Ray: streams that failed with an error", num_failed, at_least=1),
        Figure("on Ray: complete answers", num_complete, at_least=1),
        exactly("on Ray: failed streams, more than the replica can run at once", num_extra),
        exactly("on Ray: streams that ended without an error", num_broken),
        exactly("on Ray: answers with missing, wrong or repeated text", num_wrong),
        exactly("on Ray: KV blocks held afterwards", held),
    ]
    return figures


def text_of_part(reply: Reply) -> str:
    """The text of a chat stream, which may have ended with an error."""
    choices = [choice for _, data in reply.events if data != "[DONE]" for choice in data.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def _kill_on_ray(cluster: Cluster, number: int) -> list[Reply]:
    begun: set[int] = set()
    asked = [asyncio.create_task(_ask(cluster, number, one, begun)) for one in range(NUM_REQUESTS)]
    while len(begun) < 2 * MAX_SEQS + 1 and not any(task.done() for task in asked):  # of all replicas
        await asyncio.sleep(0.01)
    pids = cluster.replica_pids() if number % 2 else cluster.worker_pids()
    os.kill(random.Random(number).choice(pids), signal.SIGKILL)
    return list(await asyncio.wait_for(asyncio.gather(*asked), HANG_S))


async def _ask_all(cluster: Cluster, number: int) -> list[Reply]:
    return list(await asyncio.gather(*(_ask(cluster, number, one, set()) for one in range(NUM_REQUESTS))))


async def _ask(cluster: Cluster, number: int, one: int, begun: set[int]) -> Reply:
    body = body_for(CHAT, f"Round {number}: tell me about the number {one}.", 48, temperature=0)
    return await ask_async(cluster, CHAT, body, on_data=lambda _: begun.add(one))


ROWS = (Row("R17", "A replica that is killed fails only the streams that it was answering", kills, 600),)
