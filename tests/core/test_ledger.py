"""Tests of the ledger without a scheduler: credits, order of turns, rationing."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from quire.core.policy import UNITS, Fair, Ledger, StepCost, TierWork, Turn
from quire.core.request import Request
from quire.core.values import Priority
from quire.errors import InvalidRequest
from tests.core.helpers import service_bound

HIGH, NORMAL, LOW = Priority
IDLE = TierWork(0, 0, 0)
BUSY = TierWork(0, 0, 5)
MAX_STEP = 100


def step(
    ledger: Ledger, served: dict[Priority, int], *, short: Collection[Priority] = (), work: TierWork = BUSY
) -> None:
    """One step in which tiers get these tokens; tiers in `served` or `short` have work."""
    ledger.begin_step([work if tier in served or tier in short else IDLE for tier in Priority])
    for _ in ledger.turns():
        pass
    for tier, num_tokens in served.items():
        ledger.charge(Request(1, [1], priority=tier), num_tokens)
    ledger.end_step(short, MAX_STEP)


def tokens(ledger: Ledger, tier: Priority) -> float:
    return ledger.credits[tier] / UNITS


def test_a_tier_without_service_is_owed_its_share_of_all_tokens() -> None:
    ledger = Fair().ledger
    step(ledger, {HIGH: 16}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == 2
    assert ledger.is_owed(LOW)
    assert not ledger.is_owed(NORMAL)  # it has no work
    step(ledger, {HIGH: 12, LOW: 4}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == 0
    assert not ledger.is_owed(LOW)


def test_the_tier_with_the_largest_credit_relative_to_its_share_has_the_first_turn() -> None:
    ledger = Fair().ledger
    step(ledger, {HIGH: 16}, short=(NORMAL, LOW))
    step(ledger, {HIGH: 14, NORMAL: 2}, short=(NORMAL, LOW))
    assert (tokens(ledger, NORMAL), tokens(ledger, LOW)) == (6, 4)
    ledger.begin_step([BUSY] * 3)
    turns = list(ledger.turns())
    assert turns[:2] == [Turn((LOW,), 4, None, True), Turn((NORMAL,), 6, None, True)]
    assert turns[2:] == [Turn((HIGH,)), Turn((NORMAL,)), Turn((LOW,))]


def test_using_spare_capacity_makes_no_debt() -> None:
    ledger = Fair().ledger
    for _ in range(50):
        step(ledger, {LOW: 60}, short=(LOW,))  # alone
    assert tokens(ledger, LOW) == 0
    for _ in range(50):
        step(ledger, {HIGH: 1, LOW: 60}, short=(LOW,))  # HIGH has all it wants
    assert tokens(ledger, LOW) == 0
    step(ledger, {HIGH: 1, LOW: 60}, short=(HIGH, LOW))  # HIGH is short
    assert tokens(ledger, LOW) == pytest.approx(61 / 8 - 60)


def test_debts_and_credits_are_at_most_one_step() -> None:
    ledger = Fair().ledger
    for _ in range(100):
        step(ledger, {HIGH: 90}, short=(LOW,))
    assert tokens(ledger, LOW) == MAX_STEP
    for _ in range(100):
        step(ledger, {LOW: 90}, short=(HIGH, LOW))
    assert tokens(ledger, LOW) == -MAX_STEP
    for _ in range(20):
        step(ledger, {LOW: 90})  # without other work, the debt is reduced by the share of each step
    assert tokens(ledger, LOW) == 0


def rationed(cost: StepCost, high: TierWork, normal: TierWork, low: TierWork) -> Ledger:
    ledger = Fair().ledger
    ledger.cost = cost
    ledger.begin_step([high, normal, low])
    return ledger


def test_lower_tiers_lengthen_a_step_by_a_third_of_the_time_of_the_highest() -> None:
    decodes = TierWork(16, 0, 0)
    ledger = rationed(StepCost(base_ns=50, token_ns=10), TierWork(1, 0, 0), decodes, decodes)
    assert ledger.rationed == {NORMAL, LOW}
    assert [turn.max_ns for turn in ledger.turns()] == [None, 20, 20]  # a third of 50 + 10, shared by both tiers
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
    assert ledger.affordable(request, low.max_ns) == 1  # with the unused time of the first step


def test_the_second_row_of_a_step_also_costs_the_saving_of_a_single_token() -> None:
    """A step of one token takes 550, of two 950: HIGH keeps 3/4 of its speed if LOW is in every second step."""
    ledger, taken = Fair().ledger, []
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


def test_an_owed_tier_is_rationed_too_and_gets_at_least_one_token() -> None:
    ledger = Fair().ledger
    for _ in range(50):
        step(ledger, {HIGH: 15}, short=(LOW,))
    ledger.cost = StepCost(base_ns=0, token_ns=10)
    ledger.begin_step([TierWork(15, 0, 0), IDLE, BUSY])
    first = next(ledger.turns())
    assert (first.tiers, first.is_owed, first.max_ns) == ((LOW,), True, 50)
    assert first.max_tokens == 2 * MAX_STEP // 8  # of the tokens of a step, it leaves the rest to higher tiers
    assert ledger.credits[LOW] > 50 * UNITS


def test_a_request_with_prepaid_tokens_has_the_first_turn_and_is_not_rationed_while_it_is_awaited() -> None:
    ledger = Fair().ledger
    ledger.cost = StepCost(50, 10)
    ledger.credits[LOW] = 30 * UNITS
    request = Request(1, [1], priority=LOW)
    ledger.set_aside(request, 20)
    assert (request.num_prepaid, ledger.prepaid[LOW], ledger.credits[LOW]) == (20, 20, 10 * UNITS)
    ledger.begin_step([TierWork(1, 0, 0), IDLE, BUSY])
    first, *_ = ledger.turns()
    assert (first.tiers, first.max_tokens, first.is_prepaid) == ((LOW,), 20, True)
    assert first.max_ns is not None
    ledger.begin_step([TierWork(1, 0, 0), IDLE, BUSY], is_awaited=True)
    first, *others = ledger.turns()
    assert first.max_ns is None
    assert others[-1].max_ns is not None  # other requests of its tier are


@pytest.mark.parametrize("cost", [None, StepCost(0, 10)])
def test_a_tier_has_twice_its_share_once_from_both_kinds_of_credit(cost: StepCost | None) -> None:
    ledger = Fair().ledger
    ledger.begin_step([TierWork(MAX_STEP, 0, 0), IDLE, BUSY])
    ledger.end_step((), MAX_STEP)  # from now on it knows the tokens of a step
    ledger.cost = cost
    for _ in range(2):  # from now on it knows the time of a step
        ledger.begin_step([TierWork(MAX_STEP, 0, 0), IDLE, BUSY])
        ledger.charge_decodes(HIGH, "", MAX_STEP)
        ledger.end_step((HIGH, LOW), MAX_STEP)
    ledger.credits[LOW] = 2 * MAX_STEP * UNITS
    request = Request(1, [1], priority=LOW)
    ledger.set_aside(request, MAX_STEP)
    ledger.begin_step([TierWork(MAX_STEP, 0, 0), IDLE, BUSY])
    given = []
    for turn in ledger.turns():
        if turn.is_owed:
            assert turn.max_tokens is not None
            num_tokens = turn.max_tokens if turn.max_ns is None else min(turn.max_tokens, turn.max_ns // 10)
            ledger.charge(request, num_tokens)
            given.append(num_tokens)
    assert sum(given) == given[0] == 2 * MAX_STEP // 8


def test_prepaid_tokens_are_paid_once() -> None:
    ledger = Fair().ledger
    ledger.credits[LOW] = 30 * UNITS
    request = Request(1, [1], priority=LOW)
    ledger.set_aside(request, 20)
    ledger.begin_step([BUSY, IDLE, BUSY])
    ledger.charge(request, 8)
    ledger.use_prepaid(request, 8)
    ledger.charge_decodes(HIGH, "", 8)
    ledger.end_step((HIGH, LOW), MAX_STEP)
    assert ledger.credits[LOW] == 12 * UNITS  # an eighth of 16 tokens more
    ledger.give_back(request)
    assert (request.num_prepaid, ledger.prepaid[LOW], ledger.credits[LOW]) == (0, 0, 24 * UNITS)
    assert not request.is_covered


def test_credit_that_does_not_cover_all_tokens_is_not_set_aside() -> None:
    ledger = Fair().ledger
    ledger.credits[LOW] = 20 * UNITS - 1
    request = Request(1, [1], priority=LOW)
    ledger.set_aside(request, 20)
    assert (request.is_covered, request.num_prepaid, ledger.credits[LOW]) == (False, 0, 20 * UNITS - 1)


def test_a_tier_saves_credit_for_a_preempted_request() -> None:
    """It saves more than the tokens of a step, and keeps it while it has no rivals or wants no more than it gets."""
    needs, saved = {LOW: 3 * MAX_STEP}, 7 * MAX_STEP * UNITS  # a step, and twice the need
    ledger = Fair().ledger
    for short in [(HIGH, LOW)] * 60 + [(), (LOW,)]:
        ledger.begin_step([BUSY, IDLE, BUSY])
        ledger.charge_decodes(HIGH, "", MAX_STEP)
        ledger.end_step(short, MAX_STEP, needs, {LOW})
    assert ledger.credits[LOW] == saved
    ledger.begin_step([IDLE, IDLE, BUSY])
    ledger.charge_decodes(LOW, "", MAX_STEP)
    ledger.end_step((LOW,), MAX_STEP, needs, {LOW})
    assert ledger.credits[LOW] == saved
    ledger.begin_step([IDLE, IDLE, BUSY])
    ledger.end_step((LOW,), MAX_STEP, needs)
    assert ledger.credits[LOW] == 0  # nothing to save for, and no rivals


def test_a_step_of_low_alone_is_kept_short() -> None:
    low = TierWork(64, 0, 0)
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_ns == 45_000_000  # plus the base of 5 ms: 50 ms
    ledger = rationed(StepCost(300_000_000, 50_000_000), IDLE, IDLE, low)
    *_, turn = ledger.turns()
    assert turn.max_ns == 900_000_000  # four times the base, which is reading the weights of a large model
    ledger = rationed(StepCost(5_000_000, 2_000_000), IDLE, TierWork(64, 0, 0), IDLE)
    assert ledger.rationed == {LOW}
    assert [turn.max_ns for turn in ledger.turns()][1] is None


def test_a_higher_tier_limits_lower_ones_only_once_it_runs() -> None:
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


def test_service_bound() -> None:
    ledger = Fair().ledger
    assert service_bound(ledger, LOW, 100, 0, 50) == 8 * 200
    assert service_bound(ledger, NORMAL, 100, 7, 50) == 4 * 200 + 7
    assert service_bound(ledger, HIGH, 100, 7, 50) == 200 * 8 // 5 + 7


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
def test_invalid_shares_are_refused(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Fair(*shares)


def test_an_open_ledger_has_one_turn_for_all_tiers() -> None:
    ledger = Ledger()
    ledger.cost = StepCost(1, 1)
    assert not ledger.rationed
    assert [turn.tiers for turn in ledger.turns()] == [tuple(Priority)]
