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
    ledger.begin_step({tier: work if tier in served or tier in short else IDLE for tier in Priority})
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
    ledger.begin_step(dict.fromkeys(Priority, BUSY))
    turns = list(ledger.turns())
    assert turns[:2] == [Turn((LOW,), 4), Turn((NORMAL,), 6)]
    assert turns[2:] == [Turn((HIGH,), None), Turn((NORMAL,), None), Turn((LOW,), None)]


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
    ledger.begin_step(dict.fromkeys(Priority, TierWork(3, 1, 2)))
    assert not any(ledger.is_rationed(tier) for tier in Priority)
    assert [turn.max_tokens for turn in ledger.turns()] == [None, None, None]


def rationed(cost: StepCost, high: TierWork, normal: TierWork, low: TierWork) -> FairLedger:
    ledger = FairLedger()
    ledger.cost = cost
    ledger.begin_step({HIGH: high, NORMAL: normal, LOW: low})
    return ledger


def test_lower_tiers_lengthen_a_step_by_a_third_of_what_the_highest_needs() -> None:
    decodes = TierWork(16, 0, 0)
    ledger = rationed(StepCost(base_ns=50, token_ns=10), TierWork(1, 0, 0), decodes, decodes)
    assert [ledger.is_rationed(tier) for tier in Priority] == [False, True, True]
    assert [turn.max_tokens for turn in ledger.turns()] == [None, 2, 2]  # a third of 50 + 10 is 2 tokens, for all
    ledger.charge(Request(1, [1], priority=NORMAL), 2)
    assert [turn.max_tokens for turn in ledger.turns()] == [None, 0, 0]


def test_parts_of_a_token_add_up() -> None:
    """HIGH decodes alone, and a token costs as much as the step: LOW has one every third step."""
    ledger, given = FairLedger(), []
    ledger.cost = StepCost(base_ns=0, token_ns=10)
    for _ in range(12):
        ledger.begin_step({HIGH: TierWork(1, 0, 0), NORMAL: IDLE, LOW: TierWork(16, 0, 0)})
        *_, low = ledger.turns()
        assert low.max_tokens is not None
        if low.max_tokens:
            ledger.charge(Request(1, [1], priority=LOW), low.max_tokens)
        ledger.charge_decode(Request(2, [1], priority=HIGH))
        ledger.end_step((LOW,), MAX_STEP)
        given.append(low.max_tokens)
    assert sum(given) in (3, 4)
    assert max(given) == 1


def test_a_step_of_low_alone_is_kept_short() -> None:
    low = TierWork(64, 0, 0)
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_tokens == 22  # 50 ms
    ledger = rationed(StepCost(300_000_000, 50_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_tokens == 18  # four times the base: the weights of a large model are read for several rows
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, TierWork(64, 0, 0), IDLE)
    assert not ledger.is_rationed(NORMAL)
    assert [turn.max_tokens for turn in ledger.turns()][1] is None


def test_a_tier_above_that_only_waits_limits_nobody_until_it_runs() -> None:
    ledger = rationed(StepCost(50, 10), TierWork(0, 0, 3), TierWork(8, 0, 0), IDLE)
    assert ledger.is_rationed(NORMAL)
    turns = ledger.turns()
    assert next(turns).max_tokens is None
    assert next(turns).max_tokens is None  # HIGH could not be admitted
    ledger = rationed(StepCost(50, 10), TierWork(0, 0, 3), TierWork(8, 0, 0), IDLE)
    turns = ledger.turns()
    next(turns)
    ledger.charge(Request(1, [1], priority=HIGH), 7)  # it was admitted with a prompt of 7
    assert next(turns).max_tokens == 4


def test_the_bound_is_a_function_one_can_call() -> None:
    ledger = FairLedger()
    assert ledger.service_bound(LOW, 100, 0, 50) == 8 * 200
    assert ledger.service_bound(NORMAL, 100, 7, 50) == 4 * 200 + 7
    assert ledger.service_bound(HIGH, 100, 7, 50) == 107


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
    assert not ledger.is_rationed(LOW)
    assert [turn.tiers for turn in ledger.turns()] == [tuple(Priority)]
