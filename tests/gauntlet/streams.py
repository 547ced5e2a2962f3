"""Ordinary streams that run during an attack, and the times between their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from tests.gauntlet.flood import chat_body
from tests.server.corpus import CHAT
from tests.server.rig import Server, ask_async
from tests.waiting import eventually, repeating


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
