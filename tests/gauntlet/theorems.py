"""R2, R3, R4, R8 and a part of R1: the core and the engine without a server."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from quire.core.check import check_scheduler
from quire.core.values import Priority
from quire.engine.model_text import ModelText
from quire.weights.hub import resolve
from tests.backends.torch.rig import Rig
from tests.engine.machine import run_machine
from tests.equality import CONDITIONS, Outcome, answer_alone, compare, compare_on_hits, make_prompts
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.sim.cancels import run_storm
from tests.sim.contest import Contest, Load
from tests.sim.runs import Failure, run_world
from tests.sim.world import FIRST_DRAFTING, FIRST_HYBRID, FIRST_TIERED, World

J = TypeVar("J")
R = TypeVar("R")
HIGH, NORMAL, LOW = Priority
MAX_STEPS = 5_000  # of a contest in which no low-priority request starts


def in_parallel(gauntlet: Gauntlet, run: Callable[[J], R], jobs: Sequence[J], what: str) -> Iterator[R]:
    """Run jobs on all cores; the quick run, which shares the machine with other tests, in this process."""
    if gauntlet.is_quick:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=get_context("spawn")) as pool:
        for number, result in enumerate(pool.map(run, jobs), 1):
            if number % max(1, len(jobs) // 5) == 0:
                gauntlet.say(f"{what}: {number:,} of {len(jobs):,}")
            yield result


# R1, the part in the simulator


def cancel_figures(gauntlet: Gauntlet) -> list[Figure]:
    """Cancel requests in every state, in pools of all kinds."""
    each = gauntlet.size(2_000, 500)
    num_storms = gauntlet.size(500, 4)
    seeds = [number if number % 4 else FIRST_HYBRID + number for number in range(num_storms)]
    counts: Counter[str] = Counter()
    failures = []
    for outcome in in_parallel(gauntlet, run_storm, [(seed, each) for seed in seeds], "storms of cancels"):
        if isinstance(outcome, str):
            gauntlet.say(outcome)
            failures.append(outcome)
        else:
            counts.update(outcome)
    places = ("in the queue", "in the prompt", "in the answer", "with a step in flight", "after the end")
    return [
        Figure("simulated cancels", counts["cancels"], at_least=num_storms * each),
        *(Figure(f"simulated cancels {place}", counts[place], at_least=1) for place in places),
        exactly("simulated cancels: blocks, window blocks and states leaked", counts["leaked"]),
        exactly("simulated cancels: runs that failed", len(failures)),
    ]


# R2


def worlds(gauntlet: Gauntlet) -> list[Figure]:
    """Run worlds of all kinds, with every invariant checked after every event."""
    kinds = ((0, 2_150, 8), (FIRST_DRAFTING, 220, 2), (FIRST_TIERED, 60, 2), (FIRST_HYBRID, 16, 1))
    seeds = [first + number for first, full, quick in kinds for number in range(gauntlet.size(full, quick))]
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    for outcome in in_parallel(gauntlet, run_world, seeds, "worlds"):
        if isinstance(outcome, Failure):
            gauntlet.say(str(outcome))
            failures.append(outcome)
        else:
            counts.update(outcome)
    return [
        Figure(
            "simulated events, with all invariants checked after each",
            counts["events"],
            at_least=gauntlet.size(2_000_000, 5_000),
        ),
        Figure("requests in the simulation", counts["requests"]),
        Figure("preemptions in the simulation", counts["preemptions"], at_least=1),
        exactly("simulated worlds that failed", len(failures)),
        exactly("injected failures that their seed does not replay", num_unfaithful(gauntlet.size(20, 3))),
    ]


def num_unfaithful(count: int) -> int:
    """Break the check of worlds at an event, and count the seeds whose failure is not the same when run again."""
    whole = World._check_memory

    def broken(self: World) -> None:
        if len(self.seen[""]) > 20:  # a state, not a number of events: the second run must reach it too
            raise AssertionError(f"{self.num_events} {sorted(self.seen[''])} {self.books}")
        whole(self)

    World._check_memory = broken  # type: ignore[method-assign]
    try:
        found = [(run_world(seed), run_world(seed)) for seed in range(count)]
    finally:
        World._check_memory = whole  # type: ignore[method-assign]
    failed = [(one, again) for one, again in found if isinstance(one, Failure)]
    assert failed, "the broken check was not reached"
    return sum(
        not isinstance(again, Failure) or (again.seed, again.event) != (one.seed, one.event)
        or again.details.splitlines()[-1] != one.details.splitlines()[-1]
        for one, again in failed
    )  # fmt: skip


# R3


def state_machine(gauntlet: Gauntlet) -> list[Figure]:
    """Call the engine in any order, with faults of its backend, as hypothesis chooses."""
    jobs = [(gauntlet.seed * 1_000 + number, gauntlet.size(500, 15), 100) for number in range(gauntlet.size(10, 1))]
    num_examples = num_rules = 0
    failures = []
    for examples, rules, failure in in_parallel(gauntlet, _run_machine, jobs, "parts of the state machine"):
        num_examples, num_rules = num_examples + examples, num_rules + rules
        if failure:
            gauntlet.say(failure)
            failures.append(failure)
    return [
        Figure("examples, each of up to 100 engine calls", num_examples, at_least=sum(job[1] for job in jobs)),
        Figure("engine calls, with all invariants checked after each", num_rules, at_least=num_examples),
        exactly("examples of engine calls that failed", len(failures)),
    ]


# R4


def equality(gauntlet: Gauntlet) -> list[Figure]:
    """Answer prompts alone without a cache, then again under every condition, and compare the tokens."""
    each = gauntlet.size(250, 20)
    jobs = [(gauntlet.tiny, gauntlet.seed + number, each, 8) for number in range(gauntlet.size(40, 1))]
    outcomes: list[Outcome] = []
    for part in in_parallel(gauntlet, equal_answers, jobs, "prompts of the tiny model, in parts"):
        outcomes += part
    num_prompts = len(jobs) * each
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        real = real_answers(resolve(gauntlet.model), 16, 12)
        outcomes += real
        num_prompts += real[0].num_prompts
    for difference in [difference for outcome in outcomes for difference in outcome.differences][:5]:
        gauntlet.say(difference)
    return [
        Figure("prompts, each answered alone and in 7 other ways", num_prompts, at_least=gauntlet.size(10_000, 20)),
        Figure("tokens compared", sum(outcome.num_tokens for outcome in outcomes)),
        Figure("prompt tokens found in the cache", sum(outcome.num_cached_tokens for outcome in outcomes), at_least=1),
        Figure("preemptions during these answers", sum(outcome.num_preemptions for outcome in outcomes), at_least=1),
        Figure("draft tokens accepted", sum(outcome.num_accepted for outcome in outcomes), at_least=1),
        exactly("answers with a differing token", sum(len(one.differences) + len(one.near_ties) for one in outcomes)),
    ]


def equal_answers(job: tuple[Path, int, int, int]) -> list[Outcome]:
    """Compare answers to prompts that share prefixes. Runs in its own process."""
    path, seed, count, num_tokens = job
    chance = random.Random(seed)
    rig = Rig(path, backend="native", num_blocks=700, max_num_seqs=16, max_waiting=10_000, threads=1)
    try:
        words = range(3, rig.vocab_size)
        heads = [chance.choices(words, k=90) for _ in range(12)]
        prompts = [
            (*chance.choice(heads)[: chance.choice((0, 32, chance.randint(1, 90)))], *chance.choices(words, k=length))
            for length in (chance.randint(1, 24) for _ in range(count))
        ]
        return _all_ways(rig, prompts, num_tokens)
    finally:
        rig.engine.close()


def real_answers(path: Path, count: int, num_tokens: int) -> list[Outcome]:
    text = ModelText.open(path)
    rig = Rig(path, backend="native", num_blocks=400, max_num_seqs=16, max_waiting=10_000, threads=None)
    try:
        return _all_ways(rig, make_prompts(text, count), num_tokens)
    finally:
        rig.engine.close()
        text.close()


def _all_ways(rig: Rig, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[Outcome]:
    alone = answer_alone(rig, prompts, lambda _: None, num_tokens)
    return [*(compare(rig, alone, name, lambda _: None) for name in CONDITIONS), compare_on_hits(rig, alone)]


# R8


def aging(gauntlet: Gauntlet) -> list[Figure]:
    """Load the scheduler with endless requests of high priority, and compare every wait with its stated bound."""
    num_runs = gauntlet.size(200, 6)
    jobs = [(kind, seed) for seed in range(num_runs // 2) for kind in ("fair", "aging")]
    results = list(in_parallel(gauntlet, wait_low, jobs, "contests of priorities"))
    return [
        Figure("runs with endless high-priority requests", len(results), at_least=num_runs),
        Figure("low-priority requests in these runs", sum(result[0] for result in results), at_least=num_runs),
        exactly(
            "runs in which a low-priority request waited longer than its bound",
            sum(result[1] > 0 for result in results),
        ),
        exactly("runs in which no low-priority request started", sum(result[2] == 0 for result in results)),
        Figure(
            "longest wait of a low-priority request",
            100 * max(result[3] for result in results),
            "% of its bound",
            at_most=100,
        ),
    ]


def wait_low(job: tuple[str, int]) -> tuple[int, int, int, float]:
    """Run a contest. Returns the number of low-priority requests, of late and of started ones, and the longest wait.

    The wait is a ratio to its bound. fair: the bound is a number of tokens computed for all tiers. aging: a
    high-priority request that starts before a low-priority one arrived at most `overtake_window_s` after it.
    """
    policy, seed = job
    chance = random.Random(seed)
    loads = [Load(HIGH, num_waiting=40), Load(LOW, num_waiting=chance.choice((1, 3)))]
    loads += [Load(NORMAL, num_waiting=chance.choice((3, 40)))] if chance.random() < 0.5 else []
    contest = Contest(seed, loads, patience_s=chance.choice((0.02, 0.1)) if policy == "aging" else None)
    while contest.num_steps < 300 or (
        contest.num_steps < MAX_STEPS and not any(one.request.priority is LOW for one in contest.started)
    ):
        contest.step()
    check_scheduler(contest.scheduler)
    ratios = contest.overtaken_ratios(LOW) if policy == "aging" else contest.wait_ratios(LOW)
    num_started = sum(one.request.priority is LOW for one in contest.started)
    return len(ratios), sum(ratio > 1 for ratio in ratios), num_started, max(ratios)


def _run_machine(job: tuple[int, int, int]) -> tuple[int, int, str]:
    """Run the state machine without the log of the faults that it injects, in this process or in one of the pool."""
    logging.disable(logging.CRITICAL)
    try:
        return run_machine(job)
    finally:
        logging.disable(logging.NOTSET)


ROWS = (
    Row("R2", "Every invariant holds after every event of the simulator", worlds, 1_200),
    Row("R3", "Every invariant holds after any order of engine calls and backend faults", state_machine, 900),
    Row("R4", "The cache, chunks, preemption, batches and drafts change no token of an answer", equality, 900),
    Row("R8", "Under endless high-priority load, a low-priority request waits no longer than its bound", aging, 300),
)
