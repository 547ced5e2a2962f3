"""Tests of aging as a virtual deadline, and of its starvation bound in a real scheduler."""

from __future__ import annotations

import pytest

from quire.core.policy import Aging, Policy
from quire.core.request import Request, RequestState
from quire.core.values import Priority
from quire.errors import InvalidRequest
from tests.core.helpers import NS, Rig, make_request


def waiting(priority: Priority, enqueued_s: float, waited_s: float = 0.0) -> Request:
    request = make_request(1, 1)
    request.priority = priority
    request.arrived_ns = request.enqueued_ns = round(enqueued_s * NS)
    request.waited_ns = request.earlier_waits_ns = round(waited_s * NS)
    request.state = RequestState.WAITING
    return request


def test_a_tier_is_worth_one_patience_of_waiting() -> None:
    policy = Aging(patience=10)
    low = policy.key(waiting(Priority.LOW, 0))
    assert policy.key(waiting(Priority.HIGH, 19.999)) < low
    assert policy.key(waiting(Priority.HIGH, 20.001)) > low
    assert policy.key(waiting(Priority.NORMAL, 9.999)) < low
    assert policy.key(waiting(Priority.NORMAL, 10.001)) > low


def test_earlier_waits_count_and_time_spent_running_does_not() -> None:
    policy = Aging(patience=10)
    fresh = policy.key(waiting(Priority.LOW, 100))
    requeued = policy.key(waiting(Priority.LOW, 100, waited_s=7))
    assert fresh - requeued == 7 * NS


def test_urgency_rises_by_a_tier_for_each_patience_waited_and_is_constant_while_running() -> None:
    policy = Aging(patience=10)
    low = waiting(Priority.LOW, 0)
    assert [policy.urgency(low, now_s * NS) for now_s in (0, 9, 10, 19, 20, 35)] == [2, 2, 1, 1, 0, -1]
    low.waited_ns = 12 * NS
    low.state = RequestState.RUNNING
    assert [policy.urgency(low, now_s * NS) for now_s in (12, 50, 5000)] == [1, 1, 1]


def test_only_a_request_of_a_higher_tier_and_urgency_may_preempt() -> None:
    policy = Aging(patience=10)
    running = waiting(Priority.LOW, 0)
    for waited_tiers, may in ((0, True), (1, True), (2, False)):
        running.urgency = Priority.LOW - waited_tiers
        assert policy.may_preempt(waiting(Priority.HIGH, 100), running, 100 * NS) == may
    running.urgency = 2
    assert not policy.may_preempt(waiting(Priority.LOW, 0), running, 100 * NS)  # aged, but of the same tier
    assert Aging(patience=0).urgency(waiting(Priority.LOW, 0), NS) == 0


def test_fcfs_orders_by_arrival() -> None:
    policy = Policy()
    assert policy.key(waiting(Priority.LOW, 1)) < policy.key(waiting(Priority.HIGH, 2))
    assert not policy.may_preempt(waiting(Priority.HIGH, 1), waiting(Priority.LOW, 2), NS)


@pytest.mark.parametrize("patience_s", [-1.0, float("nan"), 1e9])
def test_an_invalid_patience_is_refused(patience_s: float) -> None:
    with pytest.raises(InvalidRequest, match="patience = "):
        Aging(patience_s)


def test_a_long_prompt_is_not_starved_by_later_ones_of_its_tier() -> None:
    """Prompts share the budget in order of their keys, and a running request keeps its key."""
    rig = Rig(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=128, max_chunk_tokens=64)
    long = rig.add(0, range(2_000), max_tokens=1)
    steps = 0
    while long.finish_reason is None:
        steps += 1
        rig.now_ns += NS // 10
        rig.add(steps, [steps] * 100, max_tokens=1)  # more new work per step than a step can compute
        rig.step()
    assert steps == -(-2_000 // 64)
