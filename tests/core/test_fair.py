"""Tests of the fair policy in a scheduler, with exact plans. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from quire.core.events import Preempted
from quire.core.policy import UNITS, Aging, Fair, Policy, StepCost, make_policy
from quire.core.values import Priority
from quire.errors import InvalidRequest
from tests.core.helpers import Rig

HIGH, NORMAL, LOW = Priority


def costly(base_ns: int, token_ns: int) -> Fair:
    fair = Fair()
    fair.ledger.cost = StepCost(base_ns, token_ns)
    return fair


def rows(rig: Rig) -> list[int]:
    return [piece.request_id for piece in rig.step().slices]


# Tiers


def test_a_tier_that_is_owed_is_admitted_first_and_not_preempted() -> None:
    fair = Fair()
    rig = Rig(max_num_seqs=1, policy=fair)
    rig.add(1, [1] * 3, priority=HIGH, max_tokens=20)
    rig.step()
    rig.add(2, [2] * 3, priority=LOW, max_tokens=20)
    rig.add(3, [3] * 3, priority=HIGH, max_tokens=20)
    for _ in range(19):
        rig.step()
    assert fair.ledger.credits[LOW] == 19 * UNITS // 8
    assert rows(rig) == [2]  # LOW is owed 2.4 tokens, and its prompt has three
    assert rows(rig) == [3]  # LOW has used its credit
    assert [event.request_id for event in rig.happened(Preempted)] == [2]
    while fair.ledger.credits[LOW] <= 0:
        assert rows(rig) == [3]
    assert rows(rig) == [3]  # LOW is owed, but LOW never preempts


# Batch rows that cost time


def test_low_rows_are_rationed_while_high_decodes() -> None:
    rig = Rig(max_num_seqs=17, num_blocks=400, policy=costly(50, 10))
    for request_id in range(16):
        rig.add(request_id, [request_id] * 3, priority=LOW, max_tokens=60)
    rig.step()
    high = rig.add(99, [99] * 3, priority=HIGH, max_tokens=20)
    rig.step()
    turns = []
    while high.finish_reason is None:
        plan = rig.step()
        assert plan.slices[0].request_id == 99
        turns += [piece.request_id for piece in plan.slices[1:]]
        assert len(plan.slices) <= 1 + 2  # a third of 50 + 10 is two tokens
    assert len(turns) >= 19 * 2 - 2
    assert max(map(turns.count, range(16))) - min(map(turns.count, range(16))) <= 1, "rows do not alternate"
    assert len(rig.step().slices) == 16  # all rows run after HIGH has ended


def test_rows_are_not_rationed_where_they_cost_almost_nothing() -> None:
    for policy in (Fair(), costly(10**9, 1)):
        rig = Rig(max_num_seqs=17, num_blocks=400, policy=policy)
        for request_id in range(16):
            rig.add(request_id, [request_id] * 3, priority=LOW, max_tokens=60)
        rig.add(99, [99] * 3, priority=HIGH, max_tokens=20)
        for _ in range(5):
            assert len(rig.step().slices) == 17


# Tenants


# Prefixes in flight


def test_each_prefix_waiter_is_processed_once() -> None:
    """Each is parked with the request that computes its prefix. Later steps do not process it."""
    rig = Rig(max_num_seqs=4, num_blocks=4000, max_chunk_tokens=32, max_num_batched_tokens=64, max_waiting=2000)
    rig.add(0, range(2000), max_tokens=4)
    for request_id in range(1, 1000):
        rig.add(request_id, range(2000), max_tokens=1)
    rig.step()
    waiters = rig.scheduler.waiting.prefix_waiters
    assert len(waiters) == 999

    def touched(_request: object) -> bool:
        raise AssertionError("a waiter was processed again")

    park, waiters.park = waiters.park, touched  # type: ignore[method-assign, assignment]
    for _ in range(50):
        rig.step()
    waiters.park = park  # type: ignore[method-assign]
    rig.scheduler.cancel(500)
    assert len(waiters) == 998
    assert len(rig.scheduler.waiting) == 998
    rig.run(5000)


def test_each_waiter_is_released_when_its_common_prefix_is_computed() -> None:
    rig = Rig(max_num_seqs=4, num_blocks=400, max_chunk_tokens=8)
    rig.add(0, range(40), max_tokens=1)
    short = rig.add(1, [*range(16), 900, 901], max_tokens=1)
    long = rig.add(2, [*range(32), 900, 901], max_tokens=1)
    starts: dict[int, int] = {}
    for number in range(10):
        for piece in rig.step().slices:
            starts.setdefault(piece.request_id, number)
    assert starts == {0: 0, 1: 2, 2: 4}
    assert (short.num_cached_tokens, long.num_cached_tokens) == (16, 32)


# make_policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lifo",), "policy = 'lifo' is not one of fair, aging, fcfs"),
        (("fair", 3.0), "patience = 3.0 applies only to the policy aging"),
        (("fcfs", None, 0.2), "normal_share = 0.2 applies only to the policy fair"),
        (("aging", None, None, 0.2), "low_share = 0.2 applies only to the policy fair"),
        (("fair", None, 2.0), "normal_share = 2.0 is not a number above 0 and below 1"),
    ],
)
def test_settings_of_another_policy_are_refused(arguments: tuple[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_policy(*arguments)


def test_make_policy_passes_the_settings() -> None:
    assert type(make_policy("fcfs")) is Policy
    aging = make_policy("aging", 3.0)
    assert isinstance(aging, Aging)
    assert aging.patience_s == 3.0
    fair = make_policy("fair", None, 0.5)
    assert isinstance(fair, Fair)
    assert fair.ledger.shares == {NORMAL: UNITS // 2, LOW: UNITS // 8}
