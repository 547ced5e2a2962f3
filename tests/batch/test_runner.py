"""The runner: bounds and retries, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from quire.batch.runner import (
    READ_AHEAD_LINES,
    BatchLine,
    BatchRequest,
    BatchRunner,
    ConnectionLost,
    GaveUp,
    InvalidLine,
    Reply,
    Result,
    RetryPolicy,
)
from tests.waiting import VirtualLoop

GOOD = Reply(200, "req", b"{}")
BUSY = Reply(429, "req", b"{}", retry_after_s=30.0, may_retry=True)


def run(main: Coroutine[Any, Any, None]) -> float:
    """Returns the seconds it took on the virtual clock."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main)
        return loop.now_s
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def requests(count: int) -> Iterator[BatchLine]:
    return (BatchRequest(number, f"id-{number}", "/v1/completions", b"{}") for number in range(1, count + 1))


class Script:
    """A server that answers each line by a list of replies, the last of them again and again."""

    def __init__(
        self, replies: dict[int, list[Reply | Exception]] | None = None, waits_s: dict[int, float] | None = None
    ):
        self.replies = replies or {}
        self.waits_s = waits_s or {}
        self.sent: list[int] = []
        self.num_open = self.most_open = 0

    async def send(self, request: BatchRequest) -> Reply:
        self.sent.append(request.number)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.waits_s.get(request.number, 0.01))
        finally:
            self.num_open -= 1
        planned = self.replies.get(request.number, [GOOD])
        reply = planned.pop(0) if len(planned) > 1 else planned[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


def test_every_line_has_one_result_and_few_are_in_flight() -> None:
    server, results = Script(), list[Result]()
    run(BatchRunner(requests(500), server.send, results.append, max_in_flight=7).run())
    assert sorted(one.line.number for one in results) == list(range(1, 501))
    assert server.most_open == 7


def test_lines_are_read_as_they_are_needed() -> None:
    """A file of a million lines is never in memory."""
    num_read = num_done = most_ahead = 0

    def counted() -> Iterator[BatchLine]:
        nonlocal num_read, most_ahead
        for line in requests(2000):
            num_read += 1
            most_ahead = max(most_ahead, num_read - num_done)
            yield line

    def take(_result: Result) -> None:
        nonlocal num_done
        num_done += 1

    run(BatchRunner(counted(), Script().send, take, max_in_flight=4).run())
    assert num_done == 2000
    assert most_ahead <= READ_AHEAD_LINES + 4


def test_invalid_lines_are_not_sent() -> None:
    server, results = Script(), list[Result]()
    lines: list[BatchLine] = [InvalidLine(1, None, "line 1: not JSON"), *requests(0), BatchRequest(2, "b", "/", b"{}")]
    run(BatchRunner(iter(lines), server.send, results.append, max_in_flight=2).run())
    assert server.sent == [2]
    assert {one.line.number: one.is_good for one in results} == {1: False, 2: True}


def test_refusals_are_retried_after_the_time_they_name() -> None:
    server, results = Script({1: [BUSY, BUSY, GOOD]}), list[Result]()
    elapsed_s = run(BatchRunner(requests(1), server.send, results.append, max_in_flight=1).run())
    assert [one.is_good for one in results] == [True]
    assert server.sent == [1, 1, 1]
    assert 60.0 <= elapsed_s <= 76.0


def test_lost_connections_are_retried_with_growing_waits() -> None:
    lost = ConnectionLost("reset")
    server, results = Script({1: [lost, lost, lost, GOOD]}), list[Result]()
    elapsed_s = run(BatchRunner(requests(1), server.send, results.append, max_in_flight=1).run())
    assert [one.is_good for one in results] == [True]
    assert 0.5 + 1 + 2 <= elapsed_s <= 1.25 * 3.5 + 1


def test_an_error_of_the_request_is_a_result_and_not_retried() -> None:
    server, results = Script({2: [Reply(400, "r", b"{}")], 3: [Reply(500, "r", b"{}")]}), list[Result]()
    run(BatchRunner(requests(3), server.send, results.append, max_in_flight=1).run())
    assert [one.is_good for one in results] == [True, False, False]
    assert server.sent == [1, 2, 3]


def test_a_server_that_stays_away_ends_the_run_without_a_result() -> None:
    server, results = Script({2: [ConnectionLost("refused")]}), list[Result]()
    runner = BatchRunner(requests(3), server.send, results.append, max_in_flight=1, retry=RetryPolicy(max_tries=3))
    with pytest.raises(GaveUp, match="line 2 was sent 3 times without an answer: refused"):
        run(runner.run())
    assert [one.line.number for one in results] == [1]


def test_nothing_goes_on_after_a_run_is_cancelled() -> None:
    server = Script(waits_s=dict.fromkeys(range(1, 100), 1e9))

    async def cancel() -> None:
        task = asyncio.create_task(BatchRunner(requests(50), server.send, lambda _one: None, max_in_flight=5).run())
        while server.num_open < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.num_open == 0

    run(cancel())
