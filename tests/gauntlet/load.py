"""Rows about clients of a real server: disconnects, overload, and many streams at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.theorems import cancel_figures
from tests.gauntlet.watch import Base, family, idle_base, left_over, percentile, sum_of
from tests.server.corpus import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.server.rig import FAKE, Reply, Server, ask_async, serving
from tests.server.test_chaos import ENDLESS, Leaver, body_for, num_aborted, text_of, whole_text
from tests.waiting import HANG_S, eventually, paused

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
REAL = ("--served-model-name", "tiny")  # the name that the requests of all rows have
REFUSED = {CHAT: 429, COMPLETIONS: 429, RESPONSES: 429, MESSAGES: 529}
SLACK_S = 0.05  # of R11, besides one step
MB = 1 << 20


def warm_base(server: Server) -> Base:
    """The base of an idle server after some load: its pools keep the threads that they have started."""

    async def load() -> None:
        asked = [ask_async(server, path, body_for(path, "Hi", 4)) for path in PATHS * 8]
        assert all(reply.ending == "done" for reply in await asyncio.gather(*asked))

    asyncio.run(load())
    return idle_base(server)


# R1


def disconnects(gauntlet: Gauntlet) -> list[Figure]:
    """Cancel in the simulator, then over HTTP: clients that disconnect at a random time in a random way."""
    figures = cancel_figures(gauntlet)
    # Few running requests, so that a queue forms, and small prefill chunks.
    few = ("--max-num-seqs", "6", "--max-chunk-tokens", "64", "--max-num-batched-tokens", "128", "--max-queue", "2000")
    with serving(str(gauntlet.tiny), *FAKE, "--device", "5ms", *few) as server:
        figures += _leave(gauntlet, server, gauntlet.size(20_000, 200), "")
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        with serving(gauntlet.model, *REAL, "--num-blocks", "400", *few) as server:
            figures += _leave(gauntlet, server, 400, "real model: ")
    return figures


def _leave(gauntlet: Gauntlet, server: Server, count: int, prefix: str) -> list[Figure]:
    base = warm_base(server)
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
    """The outcomes of requests that were sent at a rate, or one after the other by several clients."""

    seconds: float = 0.0
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


class Crowd:
    """Clients that each ask for a short answer."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        self.server = server
        self.num_tokens = num_tokens
        self.offer = Offer()
        self._begin_s = 0.0

    async def saturate(self, num_clients: int, seconds: float) -> Offer:
        """Send one request after the other from each client. If they fill the batch and the queue, this is the peak."""
        self.offer, self._begin_s = Offer(seconds), time.monotonic()

        async def client() -> None:
            while time.monotonic() - self._begin_s < seconds:
                self.offer.num_sent += 1
                await self._ask(self.offer.num_sent)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return self.offer

    async def overload(self, rate: float, seconds: float) -> Offer:
        """Send at a fixed rate, without waiting for answers. Watches the queue and the memory of the server."""
        self.offer, self._begin_s = Offer(seconds), time.monotonic()
        watching = asyncio.create_task(self._watch(seconds))
        asked: set[asyncio.Task[None]] = set()
        while (now_s := time.monotonic() - self._begin_s) < seconds:
            while self.offer.num_sent < rate * now_s:
                self.offer.num_sent += 1
                task = asyncio.create_task(self._ask(self.offer.num_sent))
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.sleep(0.005)
        await asyncio.gather(*asked)
        await watching
        return self.offer

    async def _ask(self, number: int) -> None:
        path = PATHS[number % len(PATHS)]
        body = body_for(path, f"Question {number}?", self.num_tokens, stream=number % 8 < 4)
        begin_s = time.monotonic()
        reply = await ask_async(self.server, path, body)
        if reply.status == 200 and reply.ending == "done":
            self.offer.done_s.append(time.monotonic() - self._begin_s)
        elif reply.status == REFUSED[path] and reply.is_whole and int(reply.headers.get("retry-after", "0")) >= 1:
            self.offer.refused_s.append(time.monotonic() - begin_s)
        else:
            self.offer.wrong.append(f"{path}: {reply.status} {reply.ending} {reply.body[-200:]!r}")

    async def _watch(self, seconds: float) -> None:
        processes = await asyncio.to_thread(family, self.server)
        while time.monotonic() - self._begin_s < seconds:
            stats = (await ask_async(self.server, "/v1/cache/stats", None, method="GET")).json
            self.offer.num_waiting.append(stats["num_waiting"])
            self.offer.memory.append(sum(process.memory_info().rss for process in processes))
            await asyncio.sleep(0.2)


def overload(gauntlet: Gauntlet) -> list[Figure]:
    """Measure the peak, then send ten times as many requests for two minutes."""
    max_queue = 32
    options = ("--device", "20ms", "--max-num-seqs", "16", "--max-queue", str(max_queue))
    with serving(str(gauntlet.tiny), *FAKE, *options) as server:
        figures = _flood(gauntlet, server, max_queue, "", peak_s=gauntlet.size(12, 2), flood_s=gauntlet.size(120, 3))
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        options = ("--num-blocks", "400", "--max-num-seqs", "16", "--max-queue", str(max_queue))
        with serving(gauntlet.model, *REAL, *options) as server:
            figures += _flood(gauntlet, server, max_queue, "real model: ", peak_s=20, flood_s=30)
    return figures


def _flood(
    gauntlet: Gauntlet, server: Server, max_queue: int, prefix: str, *, peak_s: float, flood_s: float
) -> list[Figure]:
    base = warm_base(server)
    crowd = Crowd(server, 32)

    async def peak_and_flood() -> tuple[Offer, Offer]:
        peak = await crowd.saturate(32, peak_s)
        rate = 10 * max(peak.goodput, 5.0)  # the quick run of a busy machine may complete nothing
        gauntlet.say(f"{prefix}peak {peak.goodput:.3g} answers/s; {rate:.0f} requests/s for {flood_s} s")
        return peak, await crowd.overload(rate, flood_s)

    peak, flood = asyncio.run(peak_and_flood())
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
        Figure(f"{prefix}largest number of waiting requests", max(flood.num_waiting), at_most=max_queue),
        Figure(
            f"{prefix}growth of memory during the overload", (max(flood.memory) - max(early)) / MB, "MB",
            at_most=32, is_timed=True,
        ),
        *left_over(server, base, prefix=prefix),
    ]  # fmt: skip


# R9


def many_streams(gauntlet: Gauntlet) -> list[Figure]:
    """Open streams of all protocols at once, and compare them with complete answers to the same requests."""
    count = gauntlet.size(1_000, 60)
    options = ("--num-blocks", str(8 * count), "--max-num-seqs", str(count), "--max-queue", str(count))
    with serving(str(gauntlet.tiny), "--backend", "fake", *options) as server:
        figures = _stream_all(gauntlet, server, count, (60, 90), "")
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        with serving(gauntlet.model, *REAL, "--num-blocks", "1000", "--max-num-seqs", "100") as server:
            figures += _stream_all(gauntlet, server, 100, (16, 24), "real model: ")
    return figures


def _stream_all(gauntlet: Gauntlet, server: Server, count: int, lengths: tuple[int, int], prefix: str) -> list[Figure]:
    requests = []
    for number in range(count):
        path = PATHS[number % len(PATHS)]
        body = body_for(path, f"Question {number}?", gauntlet.random.randint(*lengths), seed=number, temperature=1.0)
        if path in (CHAT, COMPLETIONS):
            body["logprobs"] = True if path == CHAT else 1
            body["stream_options"] = {"include_usage": True}
        requests.append((path, body))
    base = warm_base(server)
    gate = Gate(count)
    streams = asyncio.run(gate.open_all(server, requests))
    whole = asyncio.run(_ask_plainly(server, requests))
    num_tokens = 0
    problems: dict[str, list[str]] = {"broken": [], "incomplete": [], "usage": [], "text": []}
    for (path, body), stream, answer in zip(requests, streams, whole, strict=True):
        if found := judge(path, body, stream, answer):
            problems[found[0]].append(f"{path}: {found[1]}")
        else:
            num_tokens += num_tokens_of(path, stream)
    for line in [line for lines in problems.values() for line in lines][:5]:
        gauntlet.say(line)
    return [
        Figure(f"{prefix}streams", count),
        Figure(f"{prefix}streams open at the same time", gate.most, at_least=count),
        Figure(f"{prefix}tokens streamed", num_tokens),
        exactly(f"{prefix}streams with a broken frame", len(problems["broken"])),
        exactly(f"{prefix}incomplete streams", len(problems["incomplete"])),
        exactly(f"{prefix}streams whose usage differs from their tokens", len(problems["usage"])),
        exactly(f"{prefix}streams whose text differs from the complete answer", len(problems["text"])),
        *left_over(server, base, prefix=prefix),
    ]


class Gate:
    """Lets no stream begin before all requests are sent, and counts the streams that are open at the same time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.most = 0
        self._open: set[int] = set()

    async def open_all(self, server: Server, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Reply]:
        with paused(server.worker_pid) as resume:
            asked = [asyncio.create_task(self._read(server, *one, number)) for number, one in enumerate(requests)]
            while await self._num_active(server) < self.count:
                await asyncio.sleep(0.1)
            resume()
            return await asyncio.wait_for(asyncio.gather(*asked), HANG_S)

    @staticmethod
    async def _num_active(server: Server) -> int:
        reply = await ask_async(server, "/v1/watch?once=true", None, method="GET")
        engine = reply.json["models"][0]["engine"]
        return int(engine["num_waiting"] + engine["num_running"])

    async def _read(self, server: Server, path: str, body: dict[str, Any], number: int) -> Reply:
        def note(_: bytes) -> None:
            self._open.add(number)
            self.most = max(self.most, len(self._open))

        try:
            return await ask_async(server, path, body, on_data=note)
        finally:
            self._open.discard(number)


async def _ask_plainly(server: Server, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Reply]:
    bodies = [(path, {**body, "stream": False}) for path, body in requests]
    for _, body in bodies:
        body.pop("stream_options", None)
    return list(await asyncio.gather(*(ask_async(server, path, body) for path, body in bodies)))


def judge(path: str, body: dict[str, Any], stream: Reply, answer: Reply) -> tuple[str, str] | None:
    """Return the problem of a stream: its kind, and a description. None: the stream is right."""
    try:
        if (stream.status, stream.ending, answer.status) != (200, "done", 200):
            return "incomplete", f"{stream.status} {stream.ending} {answer.status} {stream.body[-200:]!r}"
        text, ids = text_of(path, _without_usage(path, stream))
        if len(ids) != 1:
            return "broken", f"ids {ids}"
    except (AssertionError, KeyError, ValueError) as error:
        return "broken", f"{error!r}"
    asked = body["max_output_tokens" if path == RESPONSES else "max_tokens"]
    said = usage_of(path, stream)
    if not said == num_tokens_of(path, stream) == asked:
        return "usage", f"usage {said}, {num_tokens_of(path, stream)} tokens, {asked} were asked for"
    if (text, asked) != whole_text(path, answer.json):
        return "text", f"{text!r} for {whole_text(path, answer.json)!r}"
    return None


def _without_usage(path: str, stream: Reply) -> Reply:
    """The stream without its chunk of usage, which has no choices."""
    if path not in (CHAT, COMPLETIONS):
        return stream
    frames = [frame for frame in stream.body.split(b"\n\n") if b'"choices":[]' not in frame]
    return Reply(stream.status, stream.headers, b"\n\n".join(frames), stream.is_whole)


def usage_of(path: str, stream: Reply) -> int:
    """The number of tokens of the answer according to the last event with a usage."""
    events = [data for _, data in stream.events if data != "[DONE]"]
    usages = [data.get("usage") or data.get("response", {}).get("usage") for data in events]
    last = [usage for usage in usages if usage][-1]
    return int(last["completion_tokens" if path in (CHAT, COMPLETIONS) else "output_tokens"])


def num_tokens_of(path: str, stream: Reply) -> int:
    """The number of tokens in a stream: those with logprobs; in protocols without them, those of the usage."""
    if path not in (CHAT, COMPLETIONS):
        return usage_of(path, stream)
    choices = [choice for _, data in stream.events if data != "[DONE]" for choice in data["choices"]]
    found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return sum(len(one["content"] if path == CHAT else one["tokens"]) for one in found)


# R11


def freed_blocks(gauntlet: Gauntlet) -> list[Figure]:
    """Measure the time from a disconnect until the request's blocks are free."""
    count = gauntlet.size(5_000, 60)
    with serving(str(gauntlet.tiny), *FAKE, "--device", "5ms", "--max-num-seqs", "16") as server:
        figures = _time_disconnects(gauntlet, server, count, "")
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        with serving(gauntlet.model, *REAL, "--num-blocks", "400", "--max-num-seqs", "16") as server:
            figures += _time_disconnects(gauntlet, server, 200, "real model: ")
    return figures


def _time_disconnects(gauntlet: Gauntlet, server: Server, count: int, prefix: str) -> list[Figure]:
    """Groups of up to eight clients disconnect together. The wait of each ends when all blocks are free."""
    base = warm_base(server)
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
    Row("R1", "Cancels and disconnects at random moments leak no KV block", disconnects, 1_200),
    Row("R7", "At ten times the peak load, the server keeps its goodput and refuses the rest at once", overload, 900),
    Row("R9", "Many streams at the same time are complete and have no broken frame", many_streams, 600),
    Row("R11", "A disconnect frees the blocks of its request within one step and 50 ms", freed_blocks, 600),
)
