"""R6: a soak with mixed traffic. R32: 100,000 requests. Memory, open files and threads must not grow."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.traffic import PLAIN, WRONG, Client, Tally
from tests.gauntlet.watch import Base, base_of, idle_base, left_over, sum_of
from tests.server.rig import Server, serving
from tests.tiny import write_tiny_model

KEY = "sk-soak-00000001"
HOUR_S = 3600.0
MB = 1e6
JUDGED_S = 1800.0  # a shorter soak cannot resolve 1 MB per hour: one page of the allocator every 15 s exceeds it
NUM_SAMPLES = 60
NUM_CLIENTS = 16
BYTES_PER_REQUEST = 10.0


@dataclass(frozen=True)
class Sample:
    at: float  # seconds, or requests
    base: Base


def slope(samples: Sequence[Sample]) -> float:
    """Growth of the resident memory, by least squares, in bytes per unit of `at`."""
    if len(samples) < 3:
        return 0.0
    return statistics.linear_regression(
        [one.at for one in samples], [float(one.base.memory_bytes) for one in samples]
    ).slope


def drift(samples: Sequence[Sample], count: Callable[[Base], int]) -> float:
    """Difference of the medians of a count in the first and the last third."""
    third = max(1, len(samples) // 3)
    first, last = (statistics.median(count(one.base) for one in part) for part in (samples[:third], samples[-third:]))
    return float(last - first)


@contextmanager
def soaked(gauntlet: Gauntlet, *options: str, model: str | Path | None = None) -> Iterator[Server]:
    env = {"MALLOC_ARENA_MAX": "2"}  # each thread's arena grows to its own plateau, which would take hours to reach
    options = (*options, "--api-key", KEY, "--log-level", "warning")
    with serving(str(model or gauntlet.tiny), *options, key=KEY, env=env) as server:
        yield server


# R6


async def peak_rate(server: Server, chosen: random.Random, seconds: float) -> float:
    """Requests per second that the server answers to clients without pauses."""
    tally, deadline_s = Tally(), time.monotonic() + seconds

    async def ask(client: Client) -> None:
        while time.monotonic() < deadline_s:
            await client.send(chosen.choice(PLAIN))
        client.close()

    await asyncio.gather(*(ask(Client(server, chosen, tally)) for _ in range(NUM_CLIENTS)))
    return tally.num_ended / seconds


async def soak(server: Server, rate: float, seconds: float, chosen: random.Random, tally: Tally) -> list[Sample]:
    """Send requests at this rate, at random moments. Returns samples of memory, files and threads under load."""
    idle: list[Client] = []
    open_tasks: set[asyncio.Task[None]] = set()
    samples: list[Sample] = []
    began_s = time.monotonic()

    async def ask() -> None:
        client = idle.pop() if idle else Client(server, chosen, tally)
        await client.send(chosen.choice((*PLAIN, *WRONG) if chosen.random() < 0.1 else PLAIN))
        idle.append(client)

    due_s = began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        if now_s - began_s >= len(samples) * seconds / NUM_SAMPLES:
            samples.append(Sample(now_s - began_s, await asyncio.to_thread(base_of, server)))
        if due_s > now_s:
            await asyncio.sleep(min(due_s - now_s, 0.05))
            continue
        # After a stall of this process, it does not send all the missed requests in a burst.
        due_s = max(due_s + chosen.expovariate(rate), now_s - 1.0)
        task = asyncio.create_task(ask())
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)
    while open_tasks:
        await asyncio.wait(open_tasks)
    for client in idle:
        client.close()
    return samples


def run_soak(gauntlet: Gauntlet) -> Sequence[Figure]:
    chosen, tally = gauntlet.random, Tally()
    seconds = gauntlet.soak_s
    is_real = not gauntlet.is_quick
    # Few blocks, all of which are used before the soak: pages of the KV cache become resident at their first use.
    options = ("--num-blocks", "400") if is_real else ("--backend", "fake", "--num-blocks", "400")
    with soaked(gauntlet, *options, model=gauntlet.model if is_real else None) as server:
        peak = asyncio.run(peak_rate(server, chosen, gauntlet.size(20, 1)))
        base = idle_base(server)
        gauntlet.say(f"peak {peak:.1f} requests/s; {seconds:.0f} s at 80 %")
        samples = asyncio.run(soak(server, 0.8 * peak, seconds, chosen, tally))
        restarts = sum_of(server, "quire:worker_restarts_total")
        left = left_over(server, base, spare_files=8)
    warm = [one for one in samples if one.at > seconds / 4]
    hourly = slope(warm) * HOUR_S / MB
    is_long = seconds >= JUDGED_S
    # In a short soak, a change of the heap by a few pages is a large growth per hour: the bar is higher.
    growth = Figure(
        "growth of resident memory after warm-up" + ("" if is_long else f", in a soak of {seconds:.0f} s (higher bar)"),
        hourly, "MB/h", at_most=1.0 if is_long else 60.0, is_timed=True,
    )  # fmt: skip
    for what, count in tally.wrong.items():
        gauntlet.say(f"unexpected: {what}, {count} times")
    return [
        growth,
        Figure("requests of the soak", tally.num_ended),
        Figure("rate of requests, 80 % of the peak", 0.8 * peak, "requests/s"),
        exactly("answers with 5xx", tally.num_failed),
        exactly("answers lost or incomplete", tally.num_lost + tally.num_sent - tally.num_ended),
        exactly("answers with an unexpected status", sum(tally.wrong.values())),
        Figure("requests refused with 429", tally.num_refused),
        exactly("restarts of the worker", restarts),
        # Connections are open files: if the machine slows down, more of them are open at the same time.
        Figure(
            "increase of open files from the first to the last third of the soak",
            drift(warm, lambda base: base.num_files),
            at_most=8,
            is_timed=True,
        ),
        Figure(
            "increase of threads from the first to the last third of the soak",
            drift(warm, lambda base: base.num_threads),
            at_most=1,
            is_timed=True,
        ),
        *left,
    ]


# R32


def send_many(server: Server, count: int, seed: int) -> Tally:
    """Send requests from one process, on several connections."""
    tally, chosen = Tally(), random.Random(seed)
    kinds = (*PLAIN[:8], *WRONG)

    async def ask(client: Client, num: int) -> None:
        for _ in range(num):
            await client.send(chosen.choice(kinds))
        client.close()

    async def work() -> None:
        await asyncio.gather(*(ask(Client(server, chosen, tally), count // 8) for _ in range(8)))

    asyncio.run(work())
    return tally


@dataclass(frozen=True)
class Address:
    """The part of `Server` that a client in another process needs."""

    address: tuple[str, int]
    key: str


def memory_of(server: Server) -> dict[str, int]:
    """Resident bytes of the server process and of its worker."""
    process = psutil.Process(server.process.pid)
    worker = psutil.Process(server.worker_pid)
    return {"server": process.memory_info().rss, "worker": worker.memory_info().rss}


def mass(gauntlet: Gauntlet, server: Server, count: int) -> tuple[Tally, list[tuple[int, dict[str, int]]]]:
    """Send `count` requests in rounds, from two processes. Returns the memory after each round."""
    num_rounds, num_processes = 25, 2
    each = max(8, count // num_rounds // num_processes // 8 * 8)
    all_tally = Tally()
    rounds: list[tuple[int, dict[str, int]]] = []
    if gauntlet.is_quick:  # starting processes would take longer than the requests
        for number in range(4):
            merge(all_tally, send_many(server, count // 4, number))
            rounds.append((all_tally.num_ended, memory_of(server)))
        return all_tally, rounds
    address: object = Address(server.address, KEY)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        number = 0
        while all_tally.num_ended < count:
            jobs = [pool.submit(send_many, address, each, number * 8 + part) for part in range(num_processes)]  # type: ignore[arg-type]
            for job in jobs:
                merge(all_tally, job.result())
            number += 1
            rounds.append((all_tally.num_ended, memory_of(server)))
            if number % 5 == 0:
                gauntlet.say(f"{all_tally.num_ended:,} requests, {rounds[-1][1]}")
    return all_tally, rounds


def merge(into: Tally, other: Tally) -> None:
    for name in ("num_sent", "num_ended", "num_failed", "num_refused", "num_lost"):
        setattr(into, name, getattr(into, name) + getattr(other, name))
    into.wrong += other.wrong


def bytes_per_request(rounds: Sequence[tuple[int, dict[str, int]]], process: str) -> float:
    """Growth over the second half, by least squares. The first half fills the bounded caches and the heap."""
    half = rounds[len(rounds) // 2 :]
    if len(half) < 3:
        return 0.0
    return statistics.linear_regression([float(at) for at, _ in half], [float(one[process]) for _, one in half]).slope


def swaps(gauntlet: Gauntlet, count: int) -> list[Figure]:
    """Load and unload two models in turn: the server's memory must not grow."""
    other = write_tiny_model(gauntlet.folder / "other", seed=1)
    sizes: list[int] = []
    with soaked(
        gauntlet, str(other), "--num-blocks", "64", "--memory", "1G", "--admin-api-key", f"{KEY}-admin"
    ) as server:
        admin = replace(server, key=f"{KEY}-admin")
        for _ in range(count):
            for name in ("tiny", "other"):
                assert admin.post("/v1/models/load", {"model": name}).status == 200
                assert server.chat(model=name).status == 200
                assert admin.post("/v1/models/unload", {"model": name}).status == 200
            sizes.append(psutil.Process(server.process.pid).memory_info().rss)
        assert admin.post("/v1/models/load", {"model": "tiny"}).status == 200
    half = sizes[len(sizes) // 2 :]
    growth = statistics.linear_regression(range(len(half)), half).slope / 2 if len(half) > 2 else 0.0
    return [
        Figure(
            f"growth of the server's memory for each of {2 * count} loads and unloads of a model",
            growth / 1000,
            "kB",
            at_most=100,
            is_timed=True,
        )
    ]


def no_leak(gauntlet: Gauntlet) -> Sequence[Figure]:
    count = gauntlet.size(100_000, 320)
    with soaked(gauntlet, "--backend", "fake", "--num-blocks", "400", "--max-queue", "4096") as server:
        send_many(server, gauntlet.size(25_000, 80), 1)
        base = idle_base(server)
        tally, rounds = mass(gauntlet, server, count)
        figures = left_over(server, base, spare_files=8)
    for what, number in tally.wrong.items():
        gauntlet.say(f"unexpected: {what}, {number} times")
    leaks = [
        Figure(f"growth of the {process}'s memory", bytes_per_request(rounds, process), "bytes/request",
               at_most=BYTES_PER_REQUEST, is_timed=True)
        for process in ("server", "worker")
    ]  # fmt: skip
    gauntlet.say("model swaps")
    return [
        Figure("requests sent", tally.num_ended, at_least=count),
        *leaks,
        exactly("answers with 5xx", tally.num_failed),
        exactly("answers lost or incomplete", tally.num_lost + tally.num_sent - tally.num_ended),
        exactly("answers with an unexpected status", sum(tally.wrong.values())),
        *figures,
        *swaps(gauntlet, gauntlet.size(30, 1)),
    ]


ROWS = (
    Row("R6", "At 80 % of the peak load, memory, open files and threads do not grow", run_soak, 300),
    Row("R32", "100,000 requests leak no memory", no_leak, 600),
)
