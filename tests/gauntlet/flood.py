"""Streams that run in the background while a row attacks their server, and what it must release afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, exactly
from tests.server.corpus import CHAT
from tests.server.rig import Reply, Server, ask_async
from tests.waiting import HANG_S, eventually, repeating


def chat_body(text: str, max_tokens: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A chat that generates all of its tokens."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return body | {"stream": stream, "ignore_eos": True, "temperature": 0, **more}


def text_of(reply: Reply) -> str:
    """The text of a chat, streamed or not."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return str(reply.json["choices"][0]["message"]["content"])
    choices = [choice for _, data in reply.events if data != "[DONE]" for choice in data.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_changed(replies: Sequence[Reply], texts: Sequence[str]) -> int:
    """Number of complete answers that differ from those without a fault."""
    return sum(reply.ending == "done" and text_of(reply) != text for reply, text in zip(replies, texts, strict=True))


class Flood:
    """Chats on connections of their own. `wait` returns their replies."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]]) -> None:
        self._server = server
        self._bodies = bodies
        self.flowing: set[int] = set()  # indices of those with a first piece of the answer
        self.ended_s: dict[int, float] = {}  # monotonic time of the end, by index
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(lambda: asyncio.run(asyncio.wait_for(self._run(), HANG_S)))

    @property
    def is_running(self) -> bool:
        """Whether no chat has ended."""
        return not self.ended_s

    def wait_flowing(self, count: int | None = None) -> None:
        wanted = len(self._bodies) if count is None else count
        eventually(lambda: len(self.flowing) >= wanted or self._done.done(), f"{wanted} streams flow")

    def wait(self) -> list[Reply]:
        try:
            return self._done.result(HANG_S)
        finally:
            self._pool.shutdown(wait=False)

    async def _run(self) -> list[Reply]:
        return await asyncio.gather(*(self._ask(index, body) for index, body in enumerate(self._bodies)))

    async def _ask(self, index: int, body: dict[str, Any]) -> Reply:
        try:
            return await ask_async(self._server, CHAT, body, on_data=lambda _: self.flowing.add(index))
        finally:
            self.ended_s[index] = time.monotonic()


SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "[a-z]{20,40}"}}}


def warm_up(server: Server) -> Base:
    """Start the threads of all pools, and the child that tries grammars. Returns the base of the idle server."""
    assert server.chat(response_format=SHAPE, ignore_eos=False, max_tokens=60).status == 200
    bodies = [chat_body(f"{i}", 4, user=f"{i}" * 5000) for i in range(16)]
    bodies += [chat_body(f"{i}", 2, regex=f"{i}[ab]{{9}}", ignore_eos=False) for i in range(16)]
    num_threads = 0
    while (base := idle_base(server)).num_threads != num_threads:
        num_threads = base.num_threads
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(server.get, ["/openapi.json"] * 32))
        assert all(reply.ending == "done" for reply in Flood(server, bodies).wait())
    return base


@dataclass
class HealthLog:
    """Changes of /health: (monotonic time, status)."""

    changes: list[tuple[float, int]] = field(default_factory=list)

    def first_s(self, status: int, since_s: float) -> float | None:
        return next((at_s for at_s, found in self.changes if found == status and at_s >= since_s), None)


@contextlib.contextmanager
def health_watched(server: Server) -> Iterator[HealthLog]:
    """Poll /health in the background. Status 0: no answer."""
    log = HealthLog()

    def look() -> None:
        begin_s, status = time.monotonic(), 0
        with contextlib.suppress(OSError):
            status = server.get("/health", timeout_s=60.0).status
        if not log.changes or log.changes[-1][1] != status:
            # A failure counts from the end of the request that found it, a recovery from the beginning of one.
            log.changes.append((begin_s if status == 200 else time.monotonic(), status))

    with repeating(look, pause_s=0.02):
        yield log


class Streams:
    """Streams one after the other in each of several threads, and the times between the tokens of a stream."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._gaps_s: list[float] = []
        self.problems: list[str] = []

    def read(self) -> None:
        times_s: list[float] = []

        def note(_: bytes) -> None:
            times_s.append(time.perf_counter())
            self._gaps_s += [times_s[-1] - one_s for one_s in times_s[-2:-1]]

        body = chat_body("Tell me about the number seven.", 200)
        reply = asyncio.run(ask_async(self._server, CHAT, body, on_data=note))
        if reply.ending != "done":
            self.problems.append(f"{reply.status} {reply.body[-300:]!r}")

    def wait(self, count: int) -> None:
        """Wait for `count` more tokens."""
        wanted = len(self._gaps_s) + count
        eventually(lambda: len(self._gaps_s) >= wanted or self.problems, "the streams go on")

    def take(self) -> list[float]:
        """The times between tokens since the last call."""
        found, self._gaps_s = self._gaps_s, []
        return found


@contextlib.contextmanager
def streaming(server: Server, count: int) -> Iterator[Streams]:
    streams = Streams(server)
    with repeating(streams.read, num_threads=count):
        yield streams


# Pools start threads when jobs first overlap. The pools for tokenising, parsing, grammars and files have 2 to 6 each.
SPARE_THREADS = 8


@dataclass(frozen=True)
class Base:
    """Resources of a server and its children while it is idle."""

    num_files: int
    num_threads: int
    num_processes: int
    memory_bytes: int


def family(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def base_of(server: Server) -> Base:
    num_files = num_threads = memory = 0
    processes = family(server)
    for process in processes:
        with process.oneshot():
            num_files += process.num_fds()
            num_threads += process.num_threads()
            memory += process.memory_info().rss
    return Base(num_files, num_threads, len(processes), memory)


def idle_base(server: Server) -> Base:
    """The base of a server that holds no request."""
    server.wait_free()
    return base_of(server)


def wait_for_a_place(server: Server) -> None:
    """Wait until the server closes a connection that waits to accept a new one: it does so after `GRACE_S`."""

    def is_served() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return server.get("/health").status == 200
        return False

    eventually(is_served, "a connection gives way")


def num_violations(server: Server) -> float:
    """Number of broken invariants that the workers of all models have reported."""
    return sum_of(server, "quire:invariant_violations_total")


def sum_of(server: Server, metric: str) -> float:
    text = server.get("/metrics").body.decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def left_over(server: Server, base: Base, *, prefix: str = "", spare_files: int = 2) -> list[Figure]:
    """Wait until the server is idle, and measure the resources that it holds beyond `base`.

    Take the base after some load, which starts most of the threads of pools.
    """
    stats = server.wait_free()

    def is_back() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # one ended while it was examined
            now = base_of(server)
            is_files_back = now.num_files <= base.num_files + spare_files
            is_threads_back = now.num_threads <= base.num_threads + SPARE_THREADS
            return is_files_back and is_threads_back and now.num_processes <= base.num_processes
        return False

    # The trial of a grammar whose client has left goes on for at most 2 s of CPU time, at a low priority: on a busy
    # machine that may take a minute.
    with contextlib.suppress(AssertionError):  # the figures show the rest
        eventually(is_back, "files, threads and processes are back")
    now = base_of(server)
    figures = [
        exactly(f"{prefix}KV blocks held afterwards", stats["num_in_use"]),
        Figure(
            f"{prefix}open files afterwards, more than before",
            max(0, now.num_files - base.num_files),
            at_most=spare_files,
        ),
        Figure(
            f"{prefix}threads afterwards, more than before",
            max(0, now.num_threads - base.num_threads),
            at_most=SPARE_THREADS,
        ),
        exactly(f"{prefix}processes afterwards, more than before", max(0, now.num_processes - base.num_processes)),
        exactly(f"{prefix}broken invariants reported by workers", num_violations(server)),
    ]
    return [replace(figure, is_left_over=True) for figure in figures]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below this percentage of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan
