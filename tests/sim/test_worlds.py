"""Runs half a million events in seeded worlds, and checks that rare situations occurred in them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.selection import mostly_nightly
from tests.sim.runs import Failure, report, run_world, run_worlds
from tests.sim.world import FIRST_DRAFTING, FIRST_HYBRID, FIRST_PRESSED, FIRST_TIERED, World

NUM_EVENTS = 500_000
NUM_WORLDS = 640  # enough for that many events

# Minimum number of occurrences of each rare situation: about half of the actual counts from seed 0 on, so that a change
# which makes a situation disappear from the worlds is detected.
MINIMA = {
    "preemptions": 5_000,
    "preemptions by waiting": 2_500,
    "twins": 3_500,
    "adoptions": 600,
    "forks": 6_500,
    "hits beside a parent": 130,
    "left out": 500,
    "HIGH waits": 15_000,
    "partial hits": 4_000,
    "stale results": 7_500,
    "prefix waits": 4_500,
    "pins dropped": 250,
    "collisions": 500,
    "explained off": 100,
    "refused, too long": 200,
    "refused, queue full": 8_000,
    "resumed": 5_000,
    "evictions": 80_000,
    "cancels of running": 800,
    "explained diverged": 180,
    "explained evicted": 100,
    "explained in_flight": 20,
    "explained too_short": 800,
    "explained not_found": 900,
    "explained complete": 60,
}


NUM_HYBRID_WORLDS = 200
HYBRID_MINIMA = {
    "hits without a state or window": 1_000,
    "window evictions": 500,
    "state evictions": 4_000,
    "explained no_state": 80,
    "explained no_window": 10,
    "preemptions": 1_500,
    "resumed": 1_500,
    "hits beside a parent": 15,
    "adoptions": 200,
    "partial hits": 1_500,
    "prefix waits": 1_000,
    "pins dropped": 70,
    "collisions": 200,
}


# The share of the worlds that run, of those and as many events that are named here.
shares = pytest.mark.parametrize("share", mostly_nightly([0.05, 1.0], 1))


def check_worlds(
    capsys: pytest.CaptureFixture[str], first: int, num_worlds: int, title: str, minima: dict[str, int], share: float
) -> Counter[str]:
    """Run worlds, and check that each thing happened at least as often as stated. Returns the counts."""
    counts: Counter[str] = Counter()
    seeds = range(first, first + round(share * num_worlds))
    for outcome in run_worlds(seeds, jobs=min(2, os.cpu_count() or 1), is_quick=True):
        if isinstance(outcome, Failure):
            pytest.fail(str(outcome), pytrace=False)
        counts.update(outcome)
    with capsys.disabled():
        print(f"\n{len(seeds)} {title}, no failure\n{report(counts)}")
    # In a few worlds, what is not rare occurs at all.
    expected = (
        minima if share == 1 else dict.fromkeys((name for name, least in minima.items() if share * least >= 40), 1)
    )
    rare = {name: (counts[name], least) for name, least in expected.items() if counts[name] < least}
    assert not rare, f"(count, minimum) {rare}"
    return counts


@pytest.mark.timeout(1800)
@shares
def test_worlds_with_windows_and_states(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    check_worlds(capsys, FIRST_HYBRID, NUM_HYBRID_WORLDS, "worlds with windows and states", HYBRID_MINIMA, share)


NUM_TIERED_WORLDS = 150
TIERED_MINIMA = {
    "loads from host": 300,
    "loads from disk": 150,
    "loaded windows": 110,
    "loaded states": 25,
    "loaded tails": 140,
    "loads with several waiters": 300,
    "steps with two loads in flight": 150,
    "loads started early": 12,
    "pieces copied early": 10,
    "saves from host to disk": 10,
    "failed loads": 20,
    "late loads": 18,
    "loads without waiters": 7,
    "cancels of load waiters": 10,
    "clears during reads": 5,
    "reads that hung": 50,
    "reads that ended late": 10,
    "steps with queued reads": 150,
    "worlds that end with a hung read": 12,
    "clears during saves": 36,
    "restarts": 50,
    "saves to host": 8_000,
    "saves to disk": 3_500,
    "failed saves to host": 450,
    "failed saves to disk": 200,
    "evictions from host": 6_000,
    "evictions from disk": 1_700,
    "pieces that were not saved": 9_000,
    "starts from loaded tokens": 380,
    "starts with load_failed": 40,
    "starts with not_loaded": 340,
    "explained loads": 34,
    "explained not_loaded": 8,
    "preemptions": 950,
    "resumed": 800,
    "stale results": 1_400,
}


@pytest.mark.timeout(1800)
@shares
def test_worlds_with_tiers(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    check_worlds(capsys, FIRST_TIERED, NUM_TIERED_WORLDS, "worlds with tiers", TIERED_MINIMA, share)


NUM_DRAFTING_WORLDS = 120
DRAFTING_MINIMA = {
    "slices with drafts": 3_500,
    "accepted drafts": 4_000,
    "states rolled back": 300,
    "preemptions": 600,
    "resumed": 500,
    "stale results": 700,
    "window evictions": 600,
    "loads from disk": 40,
    "adoptions": 60,
    "partial hits": 600,
}


@pytest.mark.timeout(1800)
@shares
def test_worlds_with_drafts(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    check_worlds(capsys, FIRST_DRAFTING, NUM_DRAFTING_WORLDS, "worlds with drafts", DRAFTING_MINIMA, share)


NUM_PRESSED_WORLDS = 50
PRESSED_MINIMA = {
    "HIGH waits for memory of others": 800,
    "HIGH waits for a spared request": 800,
    "preemptions while catching up": 20,
    "blocks for guesses": 450,
    "pins dropped": 15,
    "preemptions by waiting": 500,
    "resumed": 650,
    "reads that hung": 9,
}


@pytest.mark.timeout(1800)
@shares
def test_worlds_under_pressure(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    check_worlds(capsys, FIRST_PRESSED, NUM_PRESSED_WORLDS, "worlds short of memory", PRESSED_MINIMA, share)


@pytest.mark.timeout(1800)
@shares
def test_half_a_million_events(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    counts = check_worlds(capsys, 0, NUM_WORLDS, "worlds", MINIMA, share)
    assert share < 1 or counts["events"] >= NUM_EVENTS


def test_plans_are_the_same_in_every_process_and_order_of_worlds() -> None:
    """The order of a set of strings differs between processes. In some of these worlds, one such set changed plans."""
    seeds = (48, FIRST_HYBRID + 11, FIRST_TIERED + 3, FIRST_DRAFTING + 3, FIRST_PRESSED + 7)
    script = "import sys; from tests.sim.runs import digest_plans; print([digest_plans(int(a)) for a in sys.argv[1:]])"
    digests = []
    for hash_seed, step in (("0", 1), ("1", -1)):
        command = [sys.executable, "-c", script, *map(str, seeds[::step])]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        digests.append(ast.literal_eval(printed)[::step])
    assert dict(zip(seeds, digests[0], strict=True)) == dict(zip(seeds, digests[1], strict=True))
    assert len({*digests[0]}) == len(seeds)


def test_a_failure_names_the_seed_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: World) -> None:
        if self.num_events == 17:
            raise AssertionError("broken on purpose")

    monkeypatch.setattr(World, "_check_memory", broken)
    outcome = run_world(3)
    assert isinstance(outcome, Failure)
    assert (outcome.seed, outcome.event) == (3, 17)
    assert "replay: make sim SEEDS=@3" in str(outcome)
    assert "broken on purpose" in str(outcome)
