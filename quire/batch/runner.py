"""Runs the lines of a batch: limits requests in flight, retries, and returns results as they arrive or in order."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from quire.batch.lines import BatchLine, BatchRequest
from quire.batch.results import Reply, Result
from quire.errors import QuireError

READ_AHEAD_LINES = 64
READ_AHEAD_BYTES = 4 << 20
WINDOW = 4  # an ordered run holds at most this many lines per request in flight

Send = Callable[[BatchRequest], Awaitable[Reply]]
OnResult = Callable[[Result], None]


class ConnectionLost(QuireError):
    """A request got no answer. It may be sent again."""


class GaveUp(QuireError):
    """A request was refused or lost too often. Its line has no result, so the next run sends it again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to send a request again: after 429, 503 and lost connections."""

    max_tries: int | None = 20  # of one request; None: no limit
    first_wait_s: float = 0.5  # doubled each time, unless the server sends a time
    max_wait_s: float = 60.0

    def wait_s(self, num_tries: int, retry_after_s: float | None) -> float:
        """Time before the next try. Up to a quarter is added at random, so that requests do not return all at once."""
        wait_s = min(self.first_wait_s * 2 ** min(num_tries - 1, 30), self.max_wait_s)
        return (wait_s if retry_after_s is None else retry_after_s) * random.uniform(1.0, 1.25)


class BatchRunner:
    """One pass over the lines of a batch. Belongs to one event loop."""

    def __init__(
        self,
        lines: Iterator[BatchLine],
        send: Send,
        on_result: OnResult,
        *,
        max_in_flight: int,
        is_ordered: bool = False,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._lines = lines
        self._send = send
        self._on_result = on_result
        self._max_in_flight = max_in_flight
        self._is_ordered = is_ordered
        self._retry = retry or RetryPolicy()
        self._ahead: deque[BatchLine] = deque()  # lines that were read and not yet taken
        self._reading = asyncio.Lock()
        self._num_taken = 0
        self._num_written = 0  # of an ordered run: number of results written, in order
        self._held: dict[int, Result] = {}  # results that wait for an earlier line
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Run until every line has a result. Raises GaveUp or the first error of `send`, and cancels the rest."""
        tasks = [asyncio.create_task(self._work()) for _ in range(self._max_in_flight)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while (taken := await self._take()) is not None:
            order, line = taken
            reply = await self._ask(line) if isinstance(line, BatchRequest) else None
            self._finish(order, Result(line, reply))

    async def _take(self) -> tuple[int, BatchLine] | None:
        async with self._reading:
            if not self._ahead:
                self._ahead.extend(await asyncio.to_thread(_read_ahead, self._lines))
            while self._is_ordered and self._num_taken - self._num_written >= WINDOW * self._max_in_flight:
                self._has_room.clear()
                await self._has_room.wait()
            if not self._ahead:
                return None
            order, self._num_taken = self._num_taken, self._num_taken + 1
            return order, self._ahead.popleft()

    def _finish(self, order: int, result: Result) -> None:
        if not self._is_ordered:
            self._on_result(result)
            return
        self._held[order] = result
        while self._num_written in self._held:
            self._on_result(self._held.pop(self._num_written))
            self._num_written += 1
        self._has_room.set()

    async def _ask(self, request: BatchRequest) -> Reply:
        num_tries = 0
        while True:
            num_tries += 1
            retry_after_s: float | None = None
            try:
                reply = await self._send(request)
            except ConnectionLost as error:
                problem = str(error)
            else:
                if not reply.may_retry:
                    return reply
                problem, retry_after_s = f"HTTP {reply.status}", reply.retry_after_s
            if self._retry.max_tries is not None and num_tries >= self._retry.max_tries:
                raise GaveUp(f"line {request.number} was sent {num_tries} times without an answer: {problem}")
            await asyncio.sleep(self._retry.wait_s(num_tries, retry_after_s))


def _read_ahead(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """The next lines, bounded by number and size. Runs in a thread: it reads a file and parses JSON."""
    found: list[BatchLine] = []
    num_bytes = 0
    for line in lines:
        found.append(line)
        num_bytes += len(line.body) if isinstance(line, BatchRequest) else 0
        if len(found) >= READ_AHEAD_LINES or num_bytes >= READ_AHEAD_BYTES:
            break
    return found
