"""Tests of the scheduler when memory is short: waits of higher tiers, accounts, guesses and pins. Exact plans."""

from __future__ import annotations

import pytest

from quire.core.admission import StepBuilder
from quire.core.events import Preempted
from quire.core.policy import UNITS, Fair, Ledger, StepCost
from quire.core.request import Request, RequestState
from quire.core.step import StepPlan
from quire.core.values import Priority
from tests.core.helpers import Rig, pin_tokens, service_bound, wait_bound

HIGH, NORMAL, LOW = Priority


def ids(plan: StepPlan) -> list[int]:
    return [piece.request_id for piece in plan.slices]


def resumed_low(rig: Rig, num_tokens: int) -> Request:
    """Start a LOW request, let a HIGH one preempt it, evict its cache, and let it resume for one step."""
    low = rig.add(1, range(num_tokens), priority=LOW, max_tokens=100)
    while low.num_output_tokens < 3:
        rig.step()
    high = rig.add(2, range(10_000, 10_000 + num_tokens), priority=HIGH, max_tokens=2)
    rig.step()
    assert low.num_preemptions == 1
    while high.finish_reason is None:
        rig.step()
    rig.cache.evict_unused()
    while low not in rig.scheduler.running.requests:
        rig.step()
    return low


# Progress by credit


@pytest.mark.parametrize("cost", [None, StepCost(5_000_000, 2_000_000)])
def test_a_resumed_request_that_is_owed_nothing_gives_way_at_once(cost: StepCost | None) -> None:
    fair = Fair()
    fair.ledger.cost = cost
    rig = Rig(num_blocks=64, block_size=32, max_num_seqs=4, max_chunk_tokens=20, policy=fair)
    low = resumed_low(rig, 1010)  # two of them do not fit
    assert low.is_catching_up
    assert not low.is_spared
    high = rig.add(3, range(20_000, 21_200), priority=HIGH, max_tokens=1)
    assert 3 in ids(rig.step()), "HIGH waits for a resumed LOW request"
    assert low.state is RequestState.WAITING
    while high.finish_reason is None:
        rig.step()
    rig.run(3000)
    assert low.finish_reason is not None


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_resumed_request_is_spared_if_credit_covers_a_block_of_new_tokens(num_missing: int) -> None:
    fair = Fair()
    rig = Rig(num_blocks=33, max_num_seqs=1, max_chunk_tokens=8, policy=fair)
    low = preempted_low(rig, 24, 4)
    fair.ledger.credits[LOW] = (25 + 4) * UNITS - num_missing  # all it has computed, and a block of new tokens
    rig.add(3, range(200, 204), priority=HIGH, max_tokens=1)
    assert ids(rig.step()) == ([3] if num_missing else [1])
    assert low.num_preemptions == 1
    if num_missing:
        return
    assert low.is_spared
    assert (fair.ledger.credits[LOW], fair.ledger.prepaid[LOW]) == (UNITS, 25 + 4 - 8)
    num_steps = 1
    while 3 not in ids(rig.step()):
        num_steps += 1
    assert low.num_preempted_at == 25 + 4  # a block of new tokens
    assert num_steps <= wait_bound(rig.scheduler.planner, 25 + 4)
    assert fair.ledger.prepaid[LOW] == 0


def test_tiers_below_a_request_that_waits_for_a_spared_one_admit_nobody() -> None:
    fair = Fair()
    rig = Rig(num_blocks=33, max_num_seqs=4, max_chunk_tokens=4, policy=fair)
    low = preempted_low(rig, 60, 70)
    fair.ledger.credits[LOW] = 100 * UNITS
    high = rig.add(3, range(2000, 2070), priority=HIGH, max_tokens=1)
    rig.step()
    assert low.is_spared
    rig.add(4, range(3000, 3004), priority=LOW, max_tokens=1)
    fair.ledger.credits[LOW] = 100 * UNITS
    while low.num_computed + 4 < low.num_caught_up_at:
        assert ids(rig.step()) == [1], "a request of the tier below was admitted"
    fair.ledger.credits[LOW] = 0
    for _ in range(wait_bound(rig.scheduler.planner, 4)):
        rig.step()
    assert high.finish_reason is not None or high in rig.scheduler.running.requests


def test_running_requests_take_memory_strictly_by_tier() -> None:
    """Credit protects from waiting requests, not from a running one that needs its next block."""
    fair = Fair()
    rig = Rig(num_blocks=13, max_num_seqs=2, max_chunk_tokens=1, policy=fair)  # 12 blocks of 4 tokens
    high = rig.add(1, range(3), priority=HIGH, max_tokens=25)
    low = rig.add(2, range(100, 132), priority=LOW, max_tokens=20)  # it takes blocks for its prompt at once
    rig.step()
    low.num_caught_up_at, low.is_covered = 10_000, True  # as if it could never catch up
    while high.finish_reason is None:
        fair.ledger.credits[LOW] = 100 * UNITS
        assert 1 in ids(rig.step()), "HIGH waits for memory of LOW"
    assert low.num_preemptions == 1


def test_the_bound_of_a_wait_is_a_function_of_the_settings() -> None:
    rig = Rig(num_blocks=65, block_size=32, max_num_seqs=16, max_num_batched_tokens=256, max_chunk_tokens=64)
    assert wait_bound(rig.scheduler.planner, 0) == 3
    assert wait_bound(rig.scheduler.planner, 65) == 2 + 2 * 32 + 3
    assert wait_bound(rig.scheduler.planner) == -(-2 * (256 + 2 * (64 * 32 + 32)) // 64) + 2 * 32 + 3
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=8)
    assert wait_bound(rig.scheduler.planner, 5) == 5 + 2 * 4 + 3  # one token of a step


SQUEEZES = [
    # blocks of 4 tokens, rows, tokens of a step, of a chunk, beside answers; tokens of LOW, HIGH and answers of HIGH
    (17, 4, 4, 4, None, 44, 4, 16),  # one HIGH request and LOW do not fit once HIGH has grown
    (17, 2, 4, 256, None, 44, 4, 16),
    (17, 4, 4, 4, None, 44, 4, 8),
    (17, 4, 5, 2, 1, 40, 4, 60),
    (25, 8, 16, 4, None, 60, 30, 2),
]


@pytest.mark.parametrize("tiers", [(HIGH,), (HIGH, NORMAL)], ids=str)
@pytest.mark.parametrize("cost", [None, StepCost(5_000_000, 2_000_000)], ids=["free rows", "costly rows"])
@pytest.mark.parametrize("squeeze", SQUEEZES, ids=str)
def test_a_spared_request_is_not_preempted_in_a_pool_that_a_few_requests_fill(
    squeeze: tuple[int, int, int, int, int | None, int, int, int], cost: StepCost | None, tiers: tuple[Priority, ...]
) -> None:
    """LOW computes a block of new tokens each time its credit covers its context and that block."""
    num_blocks, num_seqs, batched, chunk, mixed, num_low, num_high, num_answer = squeeze
    fair = Fair()
    fair.ledger.cost = cost
    rig = Rig(
        num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=batched, max_chunk_tokens=chunk,
        max_mixed_tokens=mixed, policy=fair,
    )  # fmt: skip
    low = rig.add(1, range(num_low), priority=LOW, max_tokens=10)
    number, num_tokens, num_blocks_done = 2, 0, 0
    bound = 0
    while low.finish_reason is None:
        for tier in tiers:
            while sum(one.priority is tier for one in rig.scheduler.waiting) < 3:
                prompt = range(number * 1000, number * 1000 + num_high)
                rig.add(number, prompt, priority=tier, max_tokens=num_answer)
                number += 1
        num_tokens += rig.step().num_tokens
        done = max(low.num_preempted_at, low.num_computed) // 4
        if done > num_blocks_done or not bound:
            drain = num_seqs * (num_high + num_answer)  # until there is room for it beside the others
            bound = num_tokens + service_bound(fair.ledger, LOW, 4 * (done + 2), drain, batched)
            num_blocks_done = done
        assert num_tokens <= bound, f"{low!r} makes no progress"
    lost = [event for event in rig.happened(Preempted) if event.request_id == 1]
    assert len(lost) > 2, "nobody needed its memory"


@pytest.mark.parametrize(("num_blocks", "lengths"), [(88, [2] * 30), (84, [2] * 20 + [4] * 10)])
def test_a_spared_request_computes_faster_before_the_room_of_others_is_used_up(
    num_blocks: int, lengths: list[int]
) -> None:
    """Beside a prompt it has twice the share of its tier, while there is room for the answer of a third request."""
    fair = Fair()
    rig = Rig(num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=6, max_chunk_tokens=6, policy=fair)
    low = preempted_low(rig, 80, 4 * (num_blocks - 8))
    rig.add(3, range(2000, 2004), priority=HIGH, max_tokens=70)
    rig.add(4, range(3000, 3200), priority=HIGH, max_tokens=1)
    rig.step()
    fair.ledger.credits[LOW] = 85 * UNITS
    found = [sum(piece.length for piece in rig.step().slices if piece.request_id == 1) for _ in lengths]
    assert found == lengths
    assert low.is_spared


def preempted_low(rig: Rig, num_tokens: int, num_high: int) -> Request:
    """A waiting LOW request that a HIGH one has preempted, which has ended. Nothing is cached."""
    low = rig.add(1, range(num_tokens), priority=LOW, max_tokens=20)
    while low.num_output_tokens < 2:
        rig.step()
    rig.add(2, range(1000, 1000 + num_high), priority=HIGH, max_tokens=1)
    while rig.scheduler.requests.get(2) is not None:
        rig.step()
    assert low.num_preemptions == 1
    assert low.state is RequestState.WAITING
    rig.cache.evict_unused()
    return low


def test_a_spared_request_starts_only_if_running_requests_have_room_to_grow() -> None:
    """It takes 12 of 15 free blocks. The HIGH request needs more than the rest while it catches up."""
    fair = Fair()
    rig = Rig(num_blocks=17, max_num_seqs=4, max_num_batched_tokens=4, policy=fair)
    low = preempted_low(rig, 44, 60)
    high = rig.add(3, range(2000, 2004), priority=HIGH, max_tokens=20)
    fair.ledger.credits[LOW] = 0
    assert 3 in ids(rig.step())
    assert low.state is RequestState.WAITING
    while rig.scheduler.requests.get(3) is not None:
        fair.ledger.credits[LOW] = 50 * UNITS
        assert ids(rig.step()) == [3]
    assert high.num_preemptions == 0
    rig.step()
    assert low.is_spared


def test_a_request_that_started_in_this_step_is_no_victim() -> None:
    """Its slice is in the plan. Admissions leave a block for each running request, so this seldom matters."""
    rig = Rig(num_blocks=40, max_num_seqs=2)
    first, second = rig.add(1, range(8), priority=HIGH), rig.add(2, range(100, 108), priority=LOW)
    rig.step()
    planner = rig.scheduler.planner
    step = StepBuilder(0, 10, has_in_flight=False)
    assert planner._find_victim(step, first) is second
    step.admitted.add(2)
    assert planner._find_victim(step, first) is None
    assert planner._find_victim(step, second) is None


def test_a_step_is_not_empty_because_its_rows_are_rationed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever turns the ledger gives: if no other request computes anything, rationed rows are in the step."""
    fair = Fair()
    fair.ledger.cost = StepCost(5_000_000, 2_000_000)
    rig = Rig(num_blocks=40, max_num_seqs=2, policy=fair)
    rig.add(1, range(8), priority=LOW, max_tokens=20)
    rig.step()
    assert ids(rig.step()) == [1]
    assert LOW in fair.ledger.rationed
    monkeypatch.setattr(Ledger, "turns", lambda _: iter(()))
    assert ids(rig.step()) == [1]


# Reserve, seal, refund


def test_a_refund_lets_a_tenant_go_first_again() -> None:
    fair = Fair()
    clock, lane = fair.ledger.clocks[LOW], fair.make_lane(LOW)
    one, two = Request(1, [1], tenant="one", priority=LOW), Request(2, [2], tenant="two", priority=LOW)
    for request in (one, two):
        clock.arrive(request.tenant)
    clock.charge("two", 5)
    clock.charge("one", 10)
    lane.push(one)
    lane.push(two)
    assert lane.first()[1] is two
    clock.refund("one", 7)
    assert lane.first() == ((3, 0), one)
    clock.charge("one", 4)
    assert lane.first()[1] is two
    lane.remove(two)
    assert lane.first()[1] is one


# Guesses


def test_guesses_use_free_blocks_of_their_request_when_no_other_is_free() -> None:
    rig = Rig(num_blocks=6, max_num_seqs=4)  # 5 blocks of 4 tokens
    one = rig.add(1, range(5), max_tokens=12)
    rig.add(2, range(100, 105), max_tokens=12)
    rig.step()
    one.draft = [900] * 8
    plan = rig.step()
    assert [piece.num_drafts for piece in plan.slices] == [2, 0]  # to the end of its second block


# A refused admission changes nothing


def test_a_refused_admission_keeps_pins() -> None:
    """A HIGH request needs the memory of a pin, but the prompt of another one takes all tokens of the step."""
    rig = Rig(num_blocks=33, max_num_seqs=4, max_num_batched_tokens=8, max_chunk_tokens=8)
    rig.add(1, range(48), max_tokens=1)
    rig.run()
    assert pin_tokens(rig.cache, "system", list(range(48)), "", expires_ns=10**18) == 48
    rig.add(2, range(100, 103), priority=LOW, max_tokens=60)
    rig.add(3, range(200, 260), priority=HIGH, max_tokens=1)
    rig.step()
    high = rig.add(4, range(300, 320), priority=HIGH, max_tokens=1)
    num_steps = 0
    while high in rig.scheduler.waiting:
        assert len(rig.cache.pins) == 1, "a pin was dropped for a request that waits"
        rig.step()
        num_steps += 1
    assert num_steps > 4
    assert not rig.cache.pins
