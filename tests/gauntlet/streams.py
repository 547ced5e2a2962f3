"""Ordinary streams that run during an attack, and the times between their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.server.rig import Server, ask_async
from tests.waiting import HANG_S, eventually

BODY: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}


class Streams(threading.Thread):
    """Keeps `count` streams open, starts a new one after each, and measures the times between their tokens."""

    def __init__(self, server: Server, count: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._count = count
        self._is_over = threading.Event()
        self._gaps_s: list[float] = []
        self.num_whole = 0
        self.problems: list[str] = []

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._stream(number))

    async def _stream(self, number: int) -> None:
        body = {**BODY, "messages": [{"role": "user", "content": f"Tell me about the number {number}."}]}
        while not self._is_over.is_set():
            last_s: list[float] = []

            def note(_: bytes, last_s: list[float] = last_s) -> None:
                now_s = time.perf_counter()
                if last_s:
                    self._gaps_s.append(now_s - last_s.pop())
                last_s.append(now_s)

            reply = await ask_async(self._server, "/v1/chat/completions", body, on_data=note)
            if reply.ending == "done":
                self.num_whole += 1
            else:
                self.problems.append(f"{reply.status} {reply.body[-300:]!r}")
                return

    def wait(self, count: int) -> None:
        """Wait for `count` more tokens."""
        wanted = len(self._gaps_s) + count
        eventually(lambda: len(self._gaps_s) >= wanted or self.problems, "the streams go on")

    def take(self) -> list[float]:
        """The times between tokens since the last call."""
        found, self._gaps_s = self._gaps_s, []
        return found

    def finish(self) -> None:
        self._is_over.set()
        self.join(HANG_S)


@contextlib.contextmanager
def streaming(server: Server, count: int) -> Iterator[Streams]:
    streams = Streams(server, count)
    streams.start()
    try:
        yield streams
    finally:
        streams.finish()
