"""The arithmetic of shares, without a scheduler: who is owed, who goes first, who is left out."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from quire.core.ledger import UNITS, FairLedger, OpenLedger, StepCost, TierWork, Turn
from quire.core.request import Priority, Request
from quire.errors import InvalidRequest

HIGH, NORMAL, LOW = Priority
IDLE = TierWork(0, 0, 0)
BUSY = TierWork(0, 0, 5)
MAX_STEP = 100


def step(
    ledger: FairLedger, served: dict[Priority, int], *, short: Collection[Priority] = (), work: TierWork = BUSY
) -> None:
    """One step in which tiers get these tokens; tiers in `served` or `short` have work."""
    ledger.begin_step([work if tier in served or tier in short else IDLE for tier in Priority])
    for _ in ledger.turns():
        pass
    for tier, num_tokens in served.items():
        ledger.charge(Request(1, [1], priority=tier), num_tokens)
    ledger.end_step(short, MAX_STEP)


def tokens(ledger: FairLedger, tier: Priority) -> float:
    return ledger.credits[tier] / UNITS


def test_a_tier_that_gets_nothing_is_owed_its_share_of_what_others_get() -> None:
    ledger = FairLedger()
    step(ledger, {HIGH: 16}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == 2
    assert ledger.is_owed(LOW)
    assert not ledger.is_owed(NORMAL)  # it wants nothing
    step(ledger, {HIGH: 12, LOW: 4}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == 0
    assert not ledger.is_owed(LOW)


def test_the_tier_that_is_owed_most_for_its_share_has_the_first_turn() -> None:
    ledger = FairLedger()
    step(ledger, {HIGH: 16}, short=(NORMAL, LOW))
    step(ledger, {HIGH: 14, NORMAL: 2}, short=(NORMAL, LOW))
    assert (tokens(ledger, NORMAL), tokens(ledger, LOW)) == (6, 4)
    ledger.begin_step([BUSY] * 3)
    turns = list(ledger.turns())
    assert turns[:2] == [Turn((LOW,), 4, None, True), Turn((NORMAL,), 6, None, True)]
    assert turns[2:] == [Turn((HIGH,)), Turn((NORMAL,)), Turn((LOW,))]


def test_spare_capacity_is_free_and_a_burst_alone_makes_no_debt() -> None:
    ledger = FairLedger()
    for _ in range(50):
        step(ledger, {LOW: 60}, short=(LOW,))  # alone
    assert tokens(ledger, LOW) == 0
    for _ in range(50):
        step(ledger, {HIGH: 1, LOW: 60}, short=(LOW,))  # HIGH has all it wants
    assert tokens(ledger, LOW) == 0
    step(ledger, {HIGH: 1, LOW: 60}, short=(HIGH, LOW))  # now it has not
    assert tokens(ledger, LOW) == pytest.approx(61 / 8 - 60)


def test_debts_and_credits_are_at_most_one_step() -> None:
    ledger = FairLedger()
    for _ in range(100):
        step(ledger, {HIGH: 90}, short=(LOW,))
    assert tokens(ledger, LOW) == MAX_STEP
    for _ in range(100):
        step(ledger, {LOW: 90}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == -MAX_STEP
    for _ in range(20):
        step(ledger, {LOW: 90})  # nobody else is there: the debt is forgotten, at the rate of the share
    assert tokens(ledger, LOW) == 0


def test_nothing_is_owed_to_a_tier_that_has_all_it_wants() -> None:
    ledger = FairLedger()
    step(ledger, {HIGH: 64, LOW: 1}, short=(HIGH,))
    assert tokens(ledger, LOW) == 0


def test_where_rows_are_free_nobody_is_rationed() -> None:
    ledger = FairLedger()
    ledger.begin_step([TierWork(3, 1, 2)] * 3)
    assert not ledger.rationed
    assert [(turn.max_tokens, turn.max_ns) for turn in ledger.turns()] == [(None, None)] * 3


def rationed(cost: StepCost, high: TierWork, normal: TierWork, low: TierWork) -> FairLedger:
    ledger = FairLedger()
    ledger.cost = cost
    ledger.begin_step([high, normal, low])
    return ledger


def test_lower_tiers_lengthen_a_step_by_a_third_of_what_the_highest_needs() -> None:
    decodes = TierWork(16, 0, 0)
    ledger = rationed(StepCost(base_ns=50, token_ns=10), TierWork(1, 0, 0), decodes, decodes)
    assert ledger.rationed == {NORMAL, LOW}
    assert [turn.max_ns for turn in ledger.turns()] == [None, 20, 20]  # a third of 50 + 10, for all
    normal = Request(1, [1], priority=NORMAL)
    assert ledger.affordable(normal, 20) == 2
    ledger.charge(normal, 2)
    assert [turn.max_ns for turn in ledger.turns()] == [None, 0, 0]


def test_a_row_with_a_long_context_costs_more() -> None:
    decodes = TierWork(1, 0, 0, num_context=100)
    ledger = rationed(StepCost(base_ns=500, token_ns=100, context_ns=1), decodes, IDLE, TierWork(16, 0, 0))
    *_, low = ledger.turns()
    assert low.max_ns == (500 + 100 + 100) // 3
    request = Request(1, [1], priority=LOW)
    assert ledger.affordable(request, low.max_ns) == 2
    request.num_planned = 300
    assert ledger.affordable(request, low.max_ns) == 0
    ledger.end_step((LOW,), MAX_STEP)
    ledger.begin_step([decodes, IDLE, TierWork(16, 0, 0)])
    *_, low = ledger.turns()
    assert low.max_ns is not None
    assert ledger.affordable(request, low.max_ns) == 1  # what the first step left was kept for it


def test_the_first_row_beside_a_single_one_costs_what_that_one_saves() -> None:
    """A step of one token takes 550, of two 950: HIGH keeps three quarters of its speed if LOW has every other step."""
    ledger, taken = FairLedger(), []
    ledger.cost = StepCost(base_ns=500, token_ns=225, single_ns=175)
    low = Request(1, [1], priority=LOW)
    for _ in range(40):
        ledger.begin_step([TierWork(1, 0, 0), IDLE, TierWork(16, 0, 0)])
        *_, turn = ledger.turns()
        assert turn.max_ns is not None
        num_tokens = ledger.affordable(low, turn.max_ns)
        if num_tokens:
            ledger.charge(low, num_tokens)
        ledger.charge_decodes(HIGH, "", 1)
        ledger.end_step((LOW,), MAX_STEP)
        taken.append(500 + 225 * (1 + num_tokens) - (0 if num_tokens else 175))
    assert 40 * 550 / sum(taken) == pytest.approx(0.75, abs=0.02)


def test_a_tier_that_is_owed_is_rationed_too_and_has_one_token_at_least() -> None:
    ledger = FairLedger()
    for _ in range(50):
        step(ledger, {HIGH: 15}, short=(LOW,))
    ledger.cost = StepCost(base_ns=0, token_ns=10)
    ledger.begin_step([TierWork(15, 0, 0), IDLE, BUSY])
    first = next(ledger.turns())
    assert (first.tiers, first.is_owed, first.max_ns) == ((LOW,), True, 50)
    assert first.max_tokens is not None
    assert first.max_tokens > 50


def test_nobody_is_rationed_while_a_request_waits_for_memory_of_one_that_is_spared() -> None:
    ledger = FairLedger()
    ledger.cost = StepCost(50, 10)
    ledger.begin_step([TierWork(1, 0, 0), IDLE, BUSY], is_stalled=True)
    assert not ledger.rationed
    assert [turn.max_ns for turn in ledger.turns()] == [None, None, None]


def test_parts_of_a_token_add_up() -> None:
    """HIGH decodes alone, and a token costs as much as the step: LOW has one every third step."""
    ledger, given = FairLedger(), []
    ledger.cost = StepCost(base_ns=0, token_ns=10)
    for _ in range(12):
        ledger.begin_step([TierWork(1, 0, 0), IDLE, TierWork(16, 0, 0)])
        *_, low = ledger.turns()
        assert low.max_ns is not None
        request = Request(1, [1], priority=LOW)
        num_tokens = ledger.affordable(request, low.max_ns)
        ledger.charge(request, num_tokens)
        ledger.charge_decodes(HIGH, "", 1)
        ledger.end_step((LOW,), MAX_STEP)
        given.append(num_tokens)
    assert sum(given) in (3, 4)
    assert max(given) == 1


def test_a_step_of_low_alone_is_kept_short() -> None:
    low = TierWork(64, 0, 0)
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_ns == 45_000_000  # and 5 ms make 50
    ledger = rationed(StepCost(300_000_000, 50_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_ns == 900_000_000  # four bases: the weights of a large model are read for several rows
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, TierWork(64, 0, 0), IDLE)
    assert ledger.rationed == {LOW}
    assert [turn.max_ns for turn in ledger.turns()][1] is None


def test_a_tier_above_that_only_waits_limits_nobody_until_it_runs() -> None:
    ledger = rationed(StepCost(50, 10), TierWork(0, 0, 3), TierWork(8, 0, 0), IDLE)
    assert NORMAL in ledger.rationed
    turns = ledger.turns()
    assert next(turns).max_ns is None
    assert next(turns).max_ns is None  # HIGH could not be admitted
    ledger = rationed(StepCost(50, 10), TierWork(0, 0, 3), TierWork(8, 0, 0), IDLE)
    turns = ledger.turns()
    next(turns)
    ledger.charge(Request(1, [1], priority=HIGH), 7)  # it was admitted with a prompt of 7
    assert next(turns).max_ns == 40


def test_the_bound_is_a_function_one_can_call() -> None:
    ledger = FairLedger()
    assert ledger.service_bound(LOW, 100, 0, 50) == 8 * 200
    assert ledger.service_bound(NORMAL, 100, 7, 50) == 4 * 200 + 7
    assert ledger.service_bound(HIGH, 100, 7, 50) == 200 * 8 // 5 + 7


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.0, 0.1), "normal_share = 0.0"),
        ((0.2, 1.0), "low_share = 1.0"),
        ((0.5, 0.5), "together are more than 0.9"),
        (("x", 0.1), "normal_share = 'x'"),
        ((float("nan"), 0.1), "normal_share = nan"),
    ],
)
def test_shares_that_cannot_be_held_are_refused(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FairLedger(*shares)


def test_an_open_ledger_counts_nothing() -> None:
    ledger = OpenLedger()
    ledger.cost = StepCost(1, 1)
    assert not ledger.rationed
    assert [turn.tiers for turn in ledger.turns()] == [tuple(Priority)]
