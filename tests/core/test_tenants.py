"""Tests of the virtual time of tenants, and of the queue ordered by it."""

from __future__ import annotations

from random import Random

from quire.core.policy import MIN_SWEEP, TenantClock, TenantLane
from quire.core.request import Request


def request(number: int, tenant: str) -> Request:
    made = Request(number, [1], tenant=tenant)
    made.sequence = number
    return made


def test_an_idle_tenant_starts_at_the_floor_and_gets_no_credit_for_the_past() -> None:
    clock = TenantClock()
    clock.arrive("a")
    for _ in range(10):
        clock.charge("a", 10)
        clock.end_step()
    clock.arrive("b")
    assert (clock.time("a"), clock.time("b")) == (100, 90)
    clock.charge("b", 130)
    clock.end_step()
    clock.charge("b", 10)
    clock.end_step()
    clock.arrive("a")  # it had requests all the time, so it keeps its lower time
    assert (clock.time("a"), clock.time("b")) == (100, 230)
    clock.leave("a")
    clock.leave("a")
    clock.arrive("a")  # it was idle, so it starts at the floor
    assert (clock.time("a"), clock.time("b")) == (220, 230)


def test_a_step_in_which_the_tier_is_not_short_makes_all_tenants_equal() -> None:
    clock = TenantClock()
    for _ in range(1_000):  # ten streams and two streams, with free capacity
        clock.charge("many", 10)
        clock.charge("one", 2)
        clock.end_step(is_short=False)
    assert clock.time("many") == clock.time("one")
    clock.charge("many", 10)
    clock.charge("one", 2)
    clock.end_step()
    assert clock.time("many") - clock.time("one") == 8


def test_the_floor_is_the_lowest_time_served() -> None:
    clock = TenantClock()
    clock.charge("a", 100)
    clock.end_step()
    clock.charge("a", 10)
    clock.charge("b", 1)
    clock.end_step()
    clock.arrive("c")
    assert (clock.time("b"), clock.time("c")) == (1, 0)


def test_idle_tenants_are_removed() -> None:
    clock = TenantClock()
    for number in range(100 * MIN_SWEEP):
        clock.arrive(f"tenant {number}")
        clock.charge(f"tenant {number}", 5)
        clock.end_step()
        clock.leave(f"tenant {number}")
        clock.charge("constant", 5)
        clock.end_step()
    assert len(clock._times) <= 2 * MIN_SWEEP


def test_the_least_served_tenant_is_first_after_any_order_of_calls() -> None:
    random = Random(3)
    clock = TenantClock()
    lane = TenantLane(clock)
    waiting: list[Request] = []
    for number in range(2_000):
        if waiting and random.random() < 0.5:
            gone = random.choice(waiting)
            waiting.remove(gone)
            lane.remove(gone)
            if random.random() < 0.1:  # preempted and queued again
                waiting.append(gone)
                lane.push(gone)
        else:
            waiting.append(request(number, random.choice("abcdef")))
            clock.arrive(waiting[-1].tenant)
            lane.push(waiting[-1])
        clock.charge(random.choice("abcdef"), random.randint(1, 20))
        clock.end_step()
        assert len(lane) == len(waiting)
        assert {one.request_id for one in lane} == {one.request_id for one in waiting}
        if waiting:
            (time, _), first = lane.first()
            assert time == min(clock.time(one.tenant) for one in waiting)
            assert first.sequence == min(one.sequence for one in waiting if one.tenant == first.tenant)


def test_tenants_with_equal_times_are_served_in_the_order_of_their_refunds() -> None:
    clock, names = TenantClock(), [f"tenant {number}" for number in range(8)]
    lane = TenantLane(clock)
    for number, name in enumerate(names):
        clock.arrive(name)
        lane.push(request(number, name))
        clock.charge(name, 5)
    for name in reversed(names):
        clock.refund(name, 2)
    served = []
    while len(lane):
        served.append(lane.first()[1])
        lane.remove(served[-1])
    assert [one.tenant for one in served] == [*reversed(names)]
