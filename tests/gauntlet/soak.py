"""R6: a soak with mixed traffic. R32: 100,000 requests. Memory, open files and threads must not grow."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, exactly, timed
from tests.gauntlet.flood import Base, base_of, idle_base, left_over, sum_of
from tests.server.rig import Reply, Server, read_reply, request_bytes, serving
from tests.tiny import write_tiny_model

KEY = "sk-soak-00000001"
HOUR_S = 3600.0
MB = 1e6
JUDGED_S = 1800.0  # a shorter soak cannot resolve 1 MB per hour: one page of the allocator every 15 s exceeds it
NUM_SAMPLES = 60
NUM_CLIENTS = 16
NUM_ROUNDS = 25
BYTES_PER_REQUEST = 10.0


def slope(at: Sequence[float], num_bytes: Sequence[float]) -> float:
    """Growth by least squares."""
    return statistics.linear_regression(at, num_bytes).slope if len(at) > 2 else 0.0


def drift(samples: Sequence[Base], count: Callable[[Base], int]) -> float:
    """Difference of the medians of a count in the first and the last third."""
    third = max(1, len(samples) // 3)
    first, last = (statistics.median(map(count, part)) for part in (samples[:third], samples[-third:]))
    return float(last - first)


@contextmanager
def soaked(gauntlet: Gauntlet, *options: str, model: str | Path | None = None) -> Iterator[Server]:
    env = {"MALLOC_ARENA_MAX": "2"}  # each thread's arena grows to its own plateau, which would take hours to reach
    options = (*options, "--api-key", KEY, "--log-level", "warning")
    with serving(str(model or gauntlet.tiny), *options, key=KEY, env=env) as server:
        yield server


# R6


async def soak(
    server: Server, rate: float, seconds: float, chosen: random.Random, tally: Tally
) -> list[tuple[float, Base]]:
    """Send requests at this rate, at random moments. Returns samples of memory, files and threads under load."""
    samples: list[tuple[float, Base]] = []
    began_s = time.monotonic()

    async def ask(client: Client) -> None:
        due_s = began_s
        while (now_s := time.monotonic()) < began_s + seconds:
            # After a stall of this process, it does not send all the missed requests in a burst.
            due_s = max(due_s + chosen.expovariate(rate / NUM_CLIENTS), now_s - 1.0)
            await asyncio.sleep(due_s - now_s)
            await client.send(chosen.choice((*PLAIN, *WRONG) if chosen.random() < 0.1 else PLAIN))
        client.close()

    async def look() -> None:
        while (now_s := time.monotonic()) < began_s + seconds:
            samples.append((now_s - began_s, await asyncio.to_thread(base_of, server)))
            await asyncio.sleep(seconds / NUM_SAMPLES)

    await asyncio.gather(look(), *(ask(Client(server.address, chosen, tally)) for _ in range(NUM_CLIENTS)))
    return samples


def run_soak(gauntlet: Gauntlet) -> Sequence[Figure]:
    chosen, tally, seconds = gauntlet.random, Tally(), gauntlet.soak_s
    # Few blocks, all of which are used before the soak: pages of the KV cache become resident at their first use.
    options = ("--backend", "fake", "--num-blocks", "400") if gauntlet.is_quick else ("--num-blocks", "400")
    with soaked(gauntlet, *options, model=None if gauntlet.is_quick else gauntlet.model) as server:
        first, peak_s = Tally(), gauntlet.size(20, 1)
        asyncio.run(soak(server, math.inf, peak_s, chosen, first))  # without pauses
        peak = first["ended"] / peak_s
        base = idle_base(server)
        gauntlet.say(f"peak {peak:.1f} requests/s; {seconds:.0f} s at 80 %")
        samples = asyncio.run(soak(server, 0.8 * peak, seconds, chosen, tally))
        restarts = sum_of(server, "quire:worker_restarts_total")
        left = left_over(server, base, spare_files=8)
    gauntlet.say(f"{dict(tally)}")
    warm = [one for at_s, one in samples if at_s > seconds / 4]
    hourly = slope([at_s for at_s, _ in samples][-len(warm) :], [one.memory_bytes for one in warm]) * HOUR_S / MB
    # In a short soak, a change of the heap by a few pages is a large growth per hour: the bar is higher.
    bar, note = (1.0, "") if seconds >= JUDGED_S else (60.0, f", in a soak of {seconds:.0f} s (higher bar)")
    where = "from the first to the last third of the soak"
    return [
        timed(f"growth of resident memory after warm-up{note}", hourly, bar, "MB/h"),
        Figure("requests of the soak", tally["ended"]),
        Figure("rate of requests, 80 % of the peak", 0.8 * peak, "requests/s"),
        *counted("", tally.faults()),
        Figure("requests refused with 429", tally["refused"]),
        exactly("restarts of the worker", restarts),
        # Connections are open files: if the machine slows down, more of them are open at the same time.
        timed(f"increase of open files {where}", drift(warm, lambda one: one.num_files), 8, ""),
        timed(f"increase of threads {where}", drift(warm, lambda one: one.num_threads), 1, ""),
        *left,
    ]


# R32


def send_many(address: tuple[str, int], count: int, seed: int) -> Tally:
    """Send requests from one process, on several connections."""
    tally, chosen = Tally(), random.Random(seed)
    kinds = (*PLAIN[:8], *WRONG)

    async def ask(client: Client) -> None:
        for _ in range(count // 8):
            await client.send(chosen.choice(kinds))
        client.close()

    async def work() -> None:
        await asyncio.gather(*(ask(Client(address, chosen, tally)) for _ in range(8)))

    asyncio.run(work())
    return tally


def senders(gauntlet: Gauntlet) -> Executor:
    """Two processes. The quick run has no time to start them."""
    if gauntlet.is_quick:
        return ThreadPoolExecutor(2)
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))


def mass(pool: Executor, server: Server, count: int) -> tuple[Tally, list[tuple[int, int, int]]]:
    """Send `count` requests in rounds. Returns their number and the memory of server and worker after each round."""
    each = max(8, count // NUM_ROUNDS // 2 // 8 * 8)
    tally = Tally()
    rounds: list[tuple[int, int, int]] = []
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.worker_pid)]
    while tally["ended"] < count:
        for job in [pool.submit(send_many, server.address, each, 2 * len(rounds) + part) for part in range(2)]:
            tally.update(job.result())
        server_bytes, worker_bytes = (process.memory_info().rss for process in processes)
        rounds.append((tally["ended"], server_bytes, worker_bytes))
    return tally, rounds


def swaps(gauntlet: Gauntlet, count: int) -> Figure:
    """Load and unload two models in turn: the server's memory must not grow."""
    other = write_tiny_model(gauntlet.folder / "other", seed=1)
    sizes: list[int] = []
    options = ("--num-blocks", "64", "--memory", "1G", "--admin-api-key", f"{KEY}-admin")
    with soaked(gauntlet, str(other), *options) as server:
        admin = replace(server, key=f"{KEY}-admin")
        for _ in range(count):
            for name in ("tiny", "other"):
                assert admin.post("/v1/models/load", {"model": name}).status == 200
                assert server.chat(model=name).status == 200
                assert admin.post("/v1/models/unload", {"model": name}).status == 200
            sizes.append(psutil.Process(server.process.pid).memory_info().rss)
    half = sizes[len(sizes) // 2 :]
    growth = slope(range(len(half)), half) / 2
    return timed(f"growth of the server's memory for each of {2 * count} loads of a model", growth / 1000, 100, "kB")


def no_leak(gauntlet: Gauntlet) -> Sequence[Figure]:
    count = gauntlet.size(100_000, 320)
    options = ("--backend", "fake", "--num-blocks", "400", "--max-queue", "4096")
    with soaked(gauntlet, *options) as server, senders(gauntlet) as pool:
        mass(pool, server, gauntlet.size(25_000, 80))
        base = idle_base(server)
        tally, rounds = mass(pool, server, count)
        left = left_over(server, base, spare_files=8)
    gauntlet.say(f"{dict(tally)}")
    # The first half fills the bounded caches and the heap.
    at, *sizes = zip(*rounds[len(rounds) // 2 :], strict=True)
    return [
        Figure("requests sent", tally["ended"], at_least=count),
        *(
            timed(f"growth of the {name}'s memory", slope(at, one), BYTES_PER_REQUEST, "bytes/request")
            for name, one in zip(("server", "worker"), sizes, strict=True)
        ),
        *counted("", tally.faults()),
        *left,
        swaps(gauntlet, gauntlet.size(30, 1)),
    ]


ROWS = (
    Row("R6", "At 80 % of the peak load, memory, open files and threads do not grow", run_soak, 300),
    Row("R32", "100,000 requests leak no memory", no_leak, 600),
)


CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


@dataclass(frozen=True)
class Kind:
    """One kind of request: the expected statuses, and whether the client disconnects before the end."""

    name: str
    make: Callable[[str], tuple[str, dict[str, Any]]]
    statuses: tuple[int, ...] = (200,)
    is_cancelled: bool = False
    has_key: bool = True
    method: str = "POST"


def messages(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def schema(text: str) -> dict[str, Any]:
    name = f"name_{len(text) % 8}"  # eight schemas
    wanted = {"type": "object", "properties": {name: {"type": "boolean"}}, "additionalProperties": False}
    return messages(text, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": wanted}})


PLAIN = (
    Kind("chat", lambda text: (CHAT, messages(text))),
    Kind("completion", lambda text: (COMPLETIONS, {"prompt": text, "max_tokens": 4})),
    Kind("stream", lambda text: (CHAT, messages(text, stream=True))),
    Kind("cancelled", lambda text: (CHAT, messages(text, stream=True, max_tokens=500)), is_cancelled=True),
    Kind("structured", lambda text: (CHAT, schema(text))),
    Kind("tools", lambda text: (CHAT, messages(text, tools=[TOOL]))),
    Kind("messages", lambda text: (MESSAGES, messages(text, model="claude-x", stream=True))),
    Kind("responses", lambda text: (RESPONSES, {"input": text, "max_output_tokens": 4, "stream": True})),
    Kind("embeddings", lambda text: ("/v1/embeddings", {"input": text}), (200, 404)),
)
WRONG = (
    Kind("image", lambda text: (CHAT, {"messages": [{"role": "user", "content": [*IMAGE]}], "user": text}), (400,)),
    Kind("400", lambda text: (CHAT, messages(text, temperature=-1)), (400,)),
    Kind("401", lambda text: (CHAT, messages(text)), (401,), has_key=False),
    Kind("404", lambda text: (f"/v1/{text[:8].replace(' ', '-')}", {}), (404,)),
    Kind("no model", lambda text: (CHAT, messages(text, model=f"none-{text[:8]}")), (404,)),
    Kind("unknown field", lambda text: (CHAT, messages("Hi", max_tokens=1, **{f"f{hash(text) % 10**6}": 1}))),
)


class Tally(Counter[str]):
    """The outcomes of all requests, by name."""

    def take(self, kind: Kind, reply: Reply) -> None:
        self["ended"] += 1
        if reply.status >= 500:
            self["answers with 5xx"] += 1
        elif reply.status == 429:
            self["refused"] += 1
        elif not kind.is_cancelled and (not reply.is_whole or reply.ending == "broken"):
            self["answers lost or incomplete"] += 1
        elif reply.status not in kind.statuses:
            self[f"unexpected: {kind.name} {reply.status}"] += 1

    def faults(self) -> dict[str, float]:
        return {
            "answers with 5xx": self["answers with 5xx"],
            "answers lost or incomplete": self["answers lost or incomplete"] + self["sent"] - self["ended"],
            "answers with an unexpected status": sum(self[name] for name in self if name.startswith("unexpected")),
        }


def sentence(chosen: random.Random) -> str:
    return " ".join(chosen.choices(WORDS, k=chosen.randrange(4, 24)))


class Client:
    """One client with a keep-alive connection, which is opened again after a cancelled or refused request."""

    def __init__(self, address: tuple[str, int], chosen: random.Random, tally: Tally) -> None:
        self._address = address
        self._random = chosen
        self._tally = tally
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, kind: Kind) -> Reply:
        path, body = kind.make(sentence(self._random))
        self._tally["sent"] += 1
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server has closed a connection that was idle for long
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 22)
        reader, writer = self._streams
        writer.write(request_bytes(path, body, key=KEY if kind.has_key else None, method=kind.method))
        if kind.is_cancelled:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(self._random.randrange(1, 400))
            self.close()
            reply = Reply(200, {}, b"", False)
        else:
            reply = await read_reply(reader)
        if not reply.is_whole or reply.headers.get("connection") == "close":
            self.close()
        self._tally.take(kind, reply)
        return reply

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
