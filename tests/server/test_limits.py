"""Limits of the queues and of keys, with a fake clock."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from quire.core.values import Priority
from quire.errors import Draining
from quire.server.errors import ApiError, Kind
from quire.server.limits import (
    MAX_RETRY_AFTER_S,
    SMALL_BODY_BYTES,
    BodyBytes,
    FairSlots,
    IntakeRate,
    Key,
    Limits,
    QueueTicket,
    Quota,
    TierQueues,
)
from tests.waiting import HANG_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def enter(
    queues: TierQueues, num_requests: int, priority: Priority = Priority.NORMAL, tenant: str = "a"
) -> QueueTicket:
    return queues.enter(num_requests, priority, tenant)


def waiting(queues: TierQueues) -> tuple[int, int]:
    every = queues.queues.values()
    return sum(one.num_requests for one in every), sum(one.num_tokens for one in every)


def test_the_queues_limit_requests_and_tokens() -> None:
    queues = TierQueues(4, 100, Clock())
    first = enter(queues, 3)
    first.grow(50)
    with pytest.raises(ApiError, match="3 requests are already waiting, and 2 more exceed the limit of 4") as refused:
        enter(queues, 2)
    assert (refused.value.kind, refused.value.reason, refused.value.may_retry) == (Kind.OVERLOADED, "queue_full", True)
    second = enter(queues, 1)
    with pytest.raises(ApiError, match="50 tokens are already waiting; 51 more exceed the limit of 100") as refused:
        second.grow(51)
    assert refused.value.reason == "queue_tokens"
    second.leave()
    assert waiting(queues) == (3, 50)  # a refusal counts nothing
    first.start()
    first.start()
    first.leave()
    assert waiting(queues) == (0, 0)


def test_an_empty_queue_accepts_a_request_larger_than_its_limit() -> None:
    queues, key = TierQueues(4, 100, Clock()), Key("a", Priority.LOW, Priority.LOW)
    big = enter(queues, 32, Priority.LOW)
    big.grow(5000)
    with pytest.raises(ApiError):
        queues.check(key)
    big.leave()
    queues.check(key)


def test_a_full_queue_of_one_tier_does_not_refuse_other_tiers() -> None:
    queues = TierQueues(4, 100, Clock())
    enter(queues, 4, Priority.LOW).grow(100)
    with pytest.raises(ApiError, match="4 requests are already waiting, which is the limit"):
        enter(queues, 1, Priority.LOW)
    enter(queues, 4, Priority.HIGH).grow(100)
    queues.check(Key("a", Priority.HIGH, Priority.HIGH))  # NORMAL still has room
    enter(queues, 4, Priority.NORMAL)
    with pytest.raises(ApiError):
        queues.check(Key("a", Priority.HIGH, Priority.HIGH))


def test_a_tenant_that_fills_the_queue_does_not_shut_out_the_others() -> None:
    queues = TierQueues(4, 100, Clock())
    enter(queues, 4, tenant="batch").grow(100)
    with pytest.raises(ApiError):
        enter(queues, 1, tenant="batch")
    person = [enter(queues, 1, tenant="person") for _ in range(2)]  # an equal part of four for each of two tenants
    with pytest.raises(ApiError):
        enter(queues, 1, tenant="person")
    person[0].grow(50)
    with pytest.raises(ApiError, match="tokens are already waiting"):
        person[1].grow(1)
    enter(queues, 1, tenant="third")
    for number in range(4 * 4 - 7):
        enter(queues, 1, tenant=f"tenant {number}")  # each holds nothing yet
    with pytest.raises(ApiError, match="16 requests are already waiting"):
        enter(queues, 1, tenant="one too many")  # four times the limit is the hard limit


def test_retry_after_follows_the_start_rate() -> None:
    clock = Clock()
    queues = TierQueues(1000, 10**9, clock)
    assert queues.retry_after_s() == 30.0  # nothing is known yet
    for _ in range(10):  # two per second
        clock.now_s += 0.5
        enter(queues, 1).start()
    waiting = [enter(queues, 1) for _ in range(40)]
    assert queues.retry_after_s() == 9  # half of 40 at 10 in 4.5 s
    assert queues.retry_after_s(Priority.LOW) == 30.0  # nothing is known of this tier
    for ticket in waiting:
        ticket.leave()
    assert queues.retry_after_s() == 1.0
    for _ in range(900):
        enter(queues, 1)
    assert queues.retry_after_s() == MAX_RETRY_AFTER_S


def test_retry_after_starts_from_the_measured_intake_rate() -> None:
    clock = Clock()
    queues = TierQueues(1000, 10**9, clock)
    queues.expect(IntakeRate(step_s=0.5, num_tokens=100, num_requests=8))
    assert queues.retry_after_s() == 1.0
    tickets = [enter(queues, 1) for _ in range(64)]
    assert queues.retry_after_s() == 2  # half of 64 start in four steps
    for ticket in tickets:
        ticket.grow(50)
    assert queues.retry_after_s() == 8  # half of 3,200 tokens in sixteen
    clock.now_s += 12.0
    assert queues.retry_after_s() == 12  # none has started in that time: the machine is not idle
    tickets[0].start()
    clock.now_s += 1.0
    assert queues.retry_after_s() == 32  # now by the observed rate: half of 63 at one per second
    clock.now_s += 600.0
    assert queues.retry_after_s() == MAX_RETRY_AFTER_S
    for ticket in tickets:
        ticket.leave()
    enter(queues, 1)
    assert queues.retry_after_s() == 1.0  # after an idle time as at the beginning
    queues.expect(None)
    assert queues.retry_after_s() == 30.0  # it was unloaded: nothing is known


def test_bodies_share_a_budget_and_return_it() -> None:
    body_bytes = BodyBytes()
    with body_bytes(100_000) as one, body_bytes(100_000) as other:
        one.take(60_000)
        with pytest.raises(ApiError, match="60000 bytes of request bodies are already being read") as refused:
            other.take(40_001)
        assert (refused.value.kind, refused.value.reason) == (Kind.OVERLOADED, "body_bytes")
        other.take(40_000)
    assert body_bytes.num_bytes == 0


def test_large_bodies_do_not_keep_out_small_ones() -> None:
    body_bytes = BodyBytes()
    with body_bytes(100_000) as large, body_bytes(100_000) as small:
        large.take(100_000)
        small.take(SMALL_BODY_BYTES - 1)
        small.take(1)
        with pytest.raises(ApiError):
            small.take(1)  # no longer small


def test_a_tenant_that_fills_the_bodies_does_not_shut_out_the_others() -> None:
    body_bytes, limit, size = BodyBytes(), 100 * SMALL_BODY_BYTES, SMALL_BODY_BYTES
    with body_bytes(limit, "greedy") as one, body_bytes(limit, "person") as other, body_bytes(limit, "third") as third:
        one.take(limit)
        other.take(50 * size)  # an equal part for each of two
        for budget, num_bytes in ((one, 1), (other, 1), (third, 34 * size)):
            with pytest.raises(ApiError):
                budget.take(num_bytes)
        third.take(33 * size)
    assert body_bytes.num_bytes == 0


def test_tenants_take_turns() -> None:
    order: list[str] = []

    async def work() -> None:
        slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(4), threading.Event()
        first = asyncio.create_task(slots.run("a", pool, partial(is_open.wait, HANG_S)))
        await asyncio.sleep(0)
        names = ("a", "a", "a", "b", "c", "b")
        jobs = [asyncio.create_task(slots.run(name, pool, partial(order.append, name))) for name in names]
        await asyncio.sleep(0)
        jobs[1].cancel()
        is_open.set()
        await asyncio.gather(first, *jobs, return_exceptions=True)
        await asyncio.wait_for(slots.run("last", pool, partial(order.append, "last")), HANG_S)  # no slot is lost
        pool.shutdown()
        with pytest.raises(Draining):
            await slots.run("late", pool, partial(order.append, "late"))

    asyncio.run(work())
    assert order == ["a", "b", "c", "a", "b", "last"]


def test_a_turn_without_a_thread_is_given_to_the_next_tenant() -> None:
    order: list[str] = []

    async def work() -> None:
        slots = FairSlots(1)

        async def take(name: str) -> None:
            async with slots.turn(name):
                order.append(name)
                await asyncio.sleep(0)
                if name == "b":
                    raise ValueError

        jobs = [asyncio.create_task(take(name)) for name in ("a", "a", "a", "a", "b", "c")]
        await asyncio.sleep(0)
        jobs[1].cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.wait_for(take("last"), HANG_S)  # no slot is lost

    asyncio.run(work())
    assert order == ["a", "a", "b", "c", "a", "last"]


def test_a_job_that_is_cancelled_when_its_turn_has_come_gives_it_up() -> None:
    async def work() -> None:
        slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(2), threading.Event()
        first = asyncio.create_task(slots.run("a", pool, partial(is_open.wait, HANG_S)))
        second = asyncio.create_task(slots.run("b", pool, int))
        await asyncio.sleep(0)
        is_open.set()
        await first
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert await asyncio.wait_for(slots.run("c", pool, int), HANG_S) == 0

    asyncio.run(work())


def test_a_slot_is_used_until_its_thread_ends() -> None:
    """A client that disconnects does not stop the thread that works for it."""
    order: list[str] = []

    async def work() -> None:
        slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(2), threading.Event()

        has_begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def long() -> None:
            loop.call_soon_threadsafe(has_begun.set)
            is_open.wait(HANG_S)
            order.append("long")

        first = asyncio.create_task(slots.run("a", pool, long))
        await asyncio.wait_for(has_begun.wait(), HANG_S)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(slots.run("b", pool, partial(order.append, "next")))
        await asyncio.sleep(0.05)
        is_open.set()
        await asyncio.wait_for(second, HANG_S)

    asyncio.run(work())
    assert order == ["long", "next"]


def test_requests_per_minute() -> None:
    clock = Clock()
    quota = Quota(Limits(requests_per_minute=2), clock)
    quota.enter(5)
    quota.enter(5)
    with pytest.raises(ApiError, match="requests_per_minute = 2") as refused:
        quota.enter(5)
    assert (refused.value.kind, refused.value.retry_after_s) == (Kind.RATE_LIMITED, 30)
    clock.now_s += 30
    quota.enter(5)


def test_tokens_per_minute_include_answers_and_may_be_overdrawn_once() -> None:
    clock = Clock()
    quota = Quota(Limits(tokens_per_minute=600), clock)
    quota.enter(100)
    quota.use(1100)  # the answer was long
    with pytest.raises(ApiError, match="tokens_per_minute = 600") as refused:
        quota.enter(1)
    assert refused.value.retry_after_s == 61  # 600 overdrawn, and one more, at ten per second
    clock.now_s += 61
    quota.enter(1)
    clock.now_s += 1000
    quota.enter(6000)  # above the capacity: passes when the bucket is full


def test_open_requests_at_once() -> None:
    quota = Quota(Limits(max_requests=1), Clock())
    quota.enter(1)
    with pytest.raises(ApiError, match="max_requests = 1"):
        quota.enter(1)
    quota.leave()
    quota.enter(1)


@pytest.mark.parametrize(
    ("tier", "wish", "expected"),
    [
        (Priority.NORMAL, None, Priority.NORMAL),
        (Priority.NORMAL, Priority.HIGH, Priority.NORMAL),  # may only be lowered
        (Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.HIGH, Priority.HIGH, Priority.HIGH),
        (Priority.LOW, Priority.HIGH, Priority.LOW),
    ],
)
def test_a_request_may_only_lower_the_tier_of_its_key(
    tier: Priority, wish: Priority | None, expected: Priority
) -> None:
    assert Key("k", tier, tier).priority(wish) is expected
