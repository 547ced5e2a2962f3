"""R1, R7, R11: clients that disconnect, and overload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import family, left_over, percentile, sum_of, warm_up
from tests.server.corpus import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.server.rig import Server, ask_async, serving
from tests.server.test_chaos import ENDLESS, Leaver, body_for, num_aborted
from tests.waiting import HANG_S, eventually

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
REFUSED = {CHAT: 429, COMPLETIONS: 429, RESPONSES: 429, MESSAGES: 529}
MAX_QUEUE = 32  # of R7
SLACK_S = 0.05  # of R11, besides one step
MB = 1 << 20


# R1


def disconnects(gauntlet: Gauntlet) -> Iterator[Figure]:
    """Clients that disconnect at a random time in a random way."""
    # Few running requests, so that a queue forms, and small prefill chunks.
    few = (
        *("--num-blocks", "400", "--max-num-seqs", "6", "--max-queue", "2000"),
        *("--max-chunk-tokens", "64", "--max-num-batched-tokens", "128"),
    )
    for prefix, options in gauntlet.models("--device", "5ms", *few, real=few):
        with serving(*options) as server:
            yield from _leave(gauntlet, server, 400 if prefix else gauntlet.size(20_000, 200), prefix)


def _leave(gauntlet: Gauntlet, server: Server, count: int, prefix: str) -> list[Figure]:
    base = warm_up(server)
    before = num_aborted(server)
    leavers = [Leaver(server, gauntlet.seed + number) for number in range(1, 11)]
    with ThreadPoolExecutor(len(leavers)) as pool:
        for done in [pool.submit(leaver.leave_often, count // len(leavers)) for leaver in leavers]:
            done.result()
    server.wait_free()
    num_interrupted = sum(leaver.num_interrupted for leaver in leavers)
    stats = server.stats()
    return [
        Figure(f"{prefix}disconnects", count // len(leavers) * len(leavers), at_least=count),
        Figure(f"{prefix}disconnects in the middle of an answer", num_interrupted, at_least=1),
        Figure(
            f"{prefix}requests aborted because of a disconnect", num_aborted(server) - before, at_least=num_interrupted
        ),
        exactly(
            f"{prefix}blocks leaked by disconnects",
            stats["num_blocks"] - stats["num_free"] - stats.get("num_pinned", 0),
        ),
        *left_over(server, base, prefix=prefix),
    ]


# R7


@dataclass
class Offer:
    """Short requests at a rate, or one after the other from several clients, and their outcomes."""

    server: Server
    seconds: float
    begin_s: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    done_s: list[float] = field(default_factory=list)  # end of each complete answer, since the beginning
    refused_s: list[float] = field(default_factory=list)  # latency of each refusal
    wrong: list[str] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Complete answers per second."""
        return sum(at <= self.seconds for at in self.done_s) / self.seconds

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    async def saturate(self, num_clients: int) -> None:
        """Send one request after the other from each client. If they fill the batch and the queue, this is the peak."""

        async def client() -> None:
            while self.now_s < self.seconds:
                self.num_sent += 1
                await self._ask(self.num_sent)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def overload(self, rate: float) -> None:
        """Send at a fixed rate, without waiting for answers. Watches the queue and the memory of the server."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            while self.now_s < self.seconds:
                while self.num_sent < rate * self.now_s:
                    self.num_sent += 1
                    group.create_task(self._ask(self.num_sent))
                await asyncio.sleep(0.005)

    async def _ask(self, number: int) -> None:
        path = PATHS[number % len(PATHS)]
        body = body_for(path, f"Question {number}?", 32, stream=number % 8 < 4)
        asked_s = self.now_s
        reply = await ask_async(self.server, path, body)
        if reply.status == 200 and reply.ending == "done":
            self.done_s.append(self.now_s)
        elif reply.status == REFUSED[path] and reply.is_whole and int(reply.headers.get("retry-after", "0")) >= 1:
            self.refused_s.append(self.now_s - asked_s)
        else:
            self.wrong.append(f"{path}: {reply.status} {reply.ending} {reply.body[-200:]!r}")

    async def _watch(self) -> None:
        processes = await asyncio.to_thread(family, self.server)
        while self.now_s < self.seconds:
            stats = (await ask_async(self.server, "/v1/cache/stats", None, method="GET")).json
            self.num_waiting.append(stats["num_waiting"])
            self.memory.append(sum(process.memory_info().rss for process in processes))
            await asyncio.sleep(0.2)


def overload(gauntlet: Gauntlet) -> Iterator[Figure]:
    """Measure the peak, then send ten times as many requests for two minutes."""
    options = ("--num-blocks", "400", "--max-num-seqs", "16", "--max-queue", str(MAX_QUEUE))
    for prefix, model in gauntlet.models("--device", "20ms", *options, real=options):
        peak_s, flood_s = (20, 30) if prefix else (gauntlet.size(12, 2), gauntlet.size(120, 3))
        with serving(*model) as server:
            yield from _flood(gauntlet, server, prefix, peak_s=peak_s, flood_s=flood_s)


def _flood(gauntlet: Gauntlet, server: Server, prefix: str, *, peak_s: float, flood_s: float) -> list[Figure]:
    base = warm_up(server)
    peak = Offer(server, peak_s)
    asyncio.run(peak.saturate(32))
    rate = 10 * max(peak.goodput, 5.0)  # the quick run of a busy machine may complete nothing
    gauntlet.say(f"{prefix}peak {peak.goodput:.3g} answers/s; {rate:.0f} requests/s for {flood_s} s")
    flood = Offer(server, flood_s)
    asyncio.run(flood.overload(rate))
    for line in (peak.wrong + flood.wrong)[:5]:
        gauntlet.say(line)
    early = flood.memory[: max(1, len(flood.memory) // 4)]
    answered = len(flood.done_s) + len(flood.refused_s)
    return [
        Figure(f"{prefix}duration of the overload", flood_s, "s"),
        Figure(f"{prefix}requests sent in the overload", flood.num_sent, at_least=10),
        Figure(f"{prefix}answers at the peak load", peak.goodput, "per s"),
        Figure(
            f"{prefix}complete answers in the overload", 100 * flood.goodput / max(peak.goodput, 1e-9), "% of the peak",
            at_least=90, is_timed=True,
        ),
        Figure(f"{prefix}requests refused with 429 or 529 and Retry-After", len(flood.refused_s), at_least=1),
        Figure(
            f"{prefix}time to a refusal, p99", 1000 * percentile(flood.refused_s, 99), "ms", at_most=100, is_timed=True
        ),
        exactly(f"{prefix}requests with another answer or without one", flood.num_sent - answered + len(peak.wrong)),
        Figure(f"{prefix}largest number of waiting requests", max(flood.num_waiting), at_most=MAX_QUEUE),
        Figure(
            f"{prefix}growth of memory during the overload", (max(flood.memory) - max(early)) / MB, "MB",
            at_most=32, is_timed=True,
        ),
        *left_over(server, base, prefix=prefix),
    ]  # fmt: skip


# R11


def freed_blocks(gauntlet: Gauntlet) -> Iterator[Figure]:
    """Measure the time from a disconnect until the request's blocks are free."""
    options = ("--num-blocks", "400", "--max-num-seqs", "16")
    for prefix, model in gauntlet.models("--device", "5ms", *options, real=options):
        with serving(*model) as server:
            yield from _time_disconnects(gauntlet, server, 200 if prefix else gauntlet.size(5_000, 60), prefix)


def _time_disconnects(gauntlet: Gauntlet, server: Server, count: int, prefix: str) -> list[Figure]:
    """Groups of up to eight clients disconnect together. The wait of each ends when all blocks are free."""
    base = warm_up(server)
    waits_s: dict[bool, list[float]] = {True: [], False: []}
    aborted, steps_s, num_steps = num_aborted(server), *_steps(server)
    number = 0
    seen_steps, most_steps = num_steps, 0.0
    with contextlib.closing(HTTPConnection(*server.address, timeout=HANG_S)) as watch:
        while number < count:
            size = min(gauntlet.random.randint(1, 8), count - number)
            is_streaming = gauntlet.random.random() < 0.5
            waited_s = _leave_together(server, watch, gauntlet.random, number, size, is_streaming=is_streaming)
            waits_s[is_streaming] += [waited_s] * size
            number += size
            _, total = _steps(server)
            seen_steps, most_steps = total, max(most_steps, total - seen_steps)
    now_s, now_steps = _steps(server)
    step_s = (now_s - steps_s) / max(1, now_steps - num_steps)
    return [
        Figure(f"{prefix}disconnects from streamed answers", len(waits_s[True]), at_least=1),
        Figure(f"{prefix}disconnects from answers that are not streamed", len(waits_s[False]), at_least=1),
        Figure(f"{prefix}mean time of a step", 1000 * step_s, "ms"),
        *(
            Figure(
                f"{prefix}time until blocks are free beyond one step, {name}, p99",
                1000 * (percentile(waits_s[is_streaming], 99) - step_s), "ms", at_most=1000 * SLACK_S, is_timed=True,
            )
            for is_streaming, name in ((True, "streamed answers"), (False, "other answers"))
        ),
        Figure(f"{prefix}largest number of steps until the blocks were free", most_steps),
        exactly(f"{prefix}requests not aborted after a disconnect", count - (num_aborted(server) - aborted)),
        *left_over(server, base, prefix=prefix),
    ]  # fmt: skip


def _leave_together(
    server: Server, watch: HTTPConnection, chance: random.Random, number: int, size: int, *, is_streaming: bool
) -> float:
    path = chance.choice(PATHS)
    socks = []
    for index in range(size):
        body = body_for(path, f"{number + index} is a number.", ENDLESS, stream=is_streaming)
        socks.append(server.send_request(body, path))
    eventually(lambda: _held(watch)["num_running"] == size, "all of them run")
    if is_streaming:
        for sock in socks:
            sock.recv(1)
    is_reset = chance.random() < 0.5
    begin_s = time.monotonic()
    for sock in socks:
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    while _held(watch)["num_in_use"]:
        assert time.monotonic() < begin_s + HANG_S, "blocks are held"
    return time.monotonic() - begin_s


def _held(watch: HTTPConnection) -> dict[str, int]:
    watch.request("GET", "/v1/cache/stats")
    found: dict[str, int] = json.loads(watch.getresponse().read())
    return found


def _steps(server: Server) -> tuple[float, float]:
    """Total time and number of the steps of the worker."""
    return sum_of(server, "quire:step_seconds_sum"), sum_of(server, "quire:step_seconds_count")


ROWS = (
    Row("R1", "Disconnects at random moments leak no KV block", disconnects, 1_200),
    Row("R7", "At ten times the peak load, the server keeps its goodput and refuses the rest at once", overload, 900),
    Row("R11", "A disconnect frees the blocks of its request within one step and 50 ms", freed_blocks, 600),
)
