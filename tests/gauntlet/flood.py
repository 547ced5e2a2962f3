"""Streams that run in the background while a row attacks their server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.gauntlet.watch import Base, idle_base
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
    """Start threads, and the child that tries grammars. Returns the base of the idle server."""
    assert server.chat(response_format=SHAPE, ignore_eos=False, max_tokens=60).status == 200
    assert all(reply.ending == "done" for reply in Flood(server, [chat_body(f"{i}", 4) for i in range(16)]).wait())
    return idle_base(server)


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
