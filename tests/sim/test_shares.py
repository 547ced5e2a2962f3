"""Tests of the guarantees of the fair policy under permanent overload, with many seeds (`tests/sim/contest.py`)."""

from __future__ import annotations

import pytest

from quire.core.values import Priority
from tests.selection import mostly_nightly
from tests.sim.contest import Contest, Load

HIGH, NORMAL, LOW = Priority
SEEDS = mostly_nightly([range(6), range(6, 24)], 1)
ENDLESS = 40  # waiting requests of a load at any time


@pytest.mark.parametrize("others", [(HIGH,), (HIGH, NORMAL), (NORMAL,)], ids=str)
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_tier_gets_its_share_under_constant_load_of_higher_tiers(others: tuple[Priority, ...], seeds: range) -> None:
    for seed in seeds:
        contest = Contest(seed, [Load(tier, num_waiting=ENDLESS) for tier in (*others, LOW)])
        bound = 2 * contest.max_num_batched_tokens + contest.drain_tokens
        for _ in range(300):
            contest.step()
            for tier in {NORMAL, LOW} & {*others, LOW} - {min(others)}:
                assert contest.lag(tier) <= bound, f"seed {seed}: {tier.name} is {contest.lag(tier)} tokens behind"
        assert contest.served[LOW] > 0


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_request_starts_within_the_service_bound(seeds: range) -> None:
    for seed in seeds:
        loads = [Load(HIGH, num_waiting=ENDLESS), Load(NORMAL, num_waiting=3), Load(LOW, num_waiting=3)]
        contest = Contest(seed, loads)
        for _ in range(300):
            contest.step()
        assert {one.request.priority for one in contest.started} == {HIGH, NORMAL, LOW}
        assert max(ratio for tier in Priority for ratio in contest.wait_ratios(tier)) <= 1, f"seed {seed}"


@pytest.mark.parametrize("patience_s", [None, 0.02, 0.1])  # None: the fair policy
@pytest.mark.parametrize("seeds", SEEDS)
def test_low_waits_no_longer_than_its_bound(seeds: range, patience_s: float | None) -> None:
    """Under endless load of HIGH. Requests that still wait count too."""
    for seed in seeds:
        contest = Contest(seed, [Load(HIGH, num_waiting=ENDLESS), Load(LOW, num_waiting=3)], patience_s=patience_s)
        while contest.num_steps < 300 or not any(one.request.priority is LOW for one in contest.started):
            contest.step()
        ratios = contest.wait_ratios(LOW) if patience_s is None else contest.overtaken_ratios(LOW)
        assert max(ratios) <= 1, f"seed {seed}"


@pytest.mark.parametrize("others", [(LOW,), (NORMAL, LOW)], ids=str)
@pytest.mark.parametrize("seeds", SEEDS)
def test_high_starts_within_two_steps_next_to_saturated_lower_tiers(others: tuple[Priority, ...], seeds: range) -> None:
    for seed in seeds:
        contest = Contest(seed, [Load(tier, num_waiting=ENDLESS) for tier in others])
        if contest.max_num_seqs < len(others):
            continue  # LOW may hold the only batch row as long as it is owed
        for number in range(600):
            if number % 31 == 30:
                contest.add(Load(HIGH))
            contest.step()
        highs = [one for one in contest.started if one.request.priority is HIGH]
        assert len(highs) >= 18
        assert max(one.num_steps for one in highs) <= 2, f"seed {seed}"


@pytest.mark.parametrize("seeds", SEEDS)
def test_high_gets_all_tokens_above_the_guaranteed_shares(seeds: range) -> None:
    """With three saturated tiers, the lower ones take no more than their shares from HIGH."""
    for seed in seeds:
        contest = Contest(seed, [Load(tier, num_waiting=ENDLESS) for tier in Priority])
        for _ in range(300):
            contest.step()
        total = sum(contest.served.values())
        # With a step cost, lower tiers may use a third of a step, which may be more than their 3/8 of all tokens.
        slack = 2 * contest.max_num_batched_tokens + contest.drain_tokens
        if contest.fair.ledger.cost is None:
            assert contest.served[HIGH] >= 5 / 8 * total - slack, f"seed {seed}: {contest.served}"


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_tier_alone_gets_everything(seeds: range) -> None:
    for seed in seeds:
        contest = Contest(seed, [Load(LOW, num_waiting=ENDLESS)])
        contest.fair.ledger.cost = None
        for _ in range(200):
            plan = contest.step()
            is_full = len(plan.slices) == contest.max_num_seqs or plan.num_tokens == contest.max_num_batched_tokens
            # A head that does not fit waits for memory: at most the longest request and a block per running request.
            assert is_full or contest.scheduler.cache.pool.num_free < 13 + contest.max_num_seqs, f"seed {seed}"
        assert contest.num_preemptions == 0


@pytest.mark.parametrize("seeds", SEEDS)
def test_tenants_of_a_tier_share_it_equally(seeds: range) -> None:
    for seed in seeds:
        loads = [Load(NORMAL, "batch", ENDLESS), Load(NORMAL, "person", 2 * 16)]
        contest = Contest(seed, loads)
        bound = 2 * (contest.max_num_batched_tokens + contest.drain_tokens)
        for _ in range(300):
            contest.step()
            one, other = (contest.served_tenants[NORMAL, load.tenant] for load in loads)
            assert abs(one - other) <= bound, f"seed {seed}: {one} and {other}"


def test_a_thousand_requests_of_one_tenant_do_not_delay_the_first_of_another() -> None:
    for seed in range(12):
        contest = Contest(seed, [Load(NORMAL, "batch", 1_000)])
        for number in range(200):
            if number == 100:
                contest.add(Load(NORMAL, "person"))
            contest.step()
        (person,) = [one for one in contest.started if one.request.tenant == "person"]
        assert person.total <= contest.drain_tokens, f"seed {seed}"  # it gets the next free batch row
