"""Runs worlds sequentially or in several processes, and sums up their counters."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context

from quire.core.request import Request
from quire.core.step import StepPlan
from tests.sim.world import World

EVENTS_PER_WORLD = 400

FOUND = 3  # exit code if a world failed, as opposed to an error of the program


@dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    event: int
    details: str

    def __str__(self) -> str:
        return f"{self.details}\nworld {self.seed} failed at event {self.event}; replay: make sim SEEDS=@{self.seed}"


def run_world(seed: int, num_events: int = EVENTS_PER_WORLD, *, check_every: int = 1) -> Counter[str] | Failure:
    world = World(seed, check_every)
    try:
        return world.run(num_events)
    except Exception:
        return Failure(seed, world.num_events, f"{world.setup}\n{traceback.format_exc()}")


def run_world_quickly(seed: int) -> Counter[str] | Failure:
    """Check invariants after every event in one world of four, and after every eighth event in the others."""
    return run_world(seed, check_every=1 if seed % 4 == 0 else 8)


class RecordedWorld(World):
    """A world that computes a digest of its plans."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, check_every=EVENTS_PER_WORLD)
        self.digest = blake2b(digest_size=8)

    def _check_plan(self, plan: StepPlan, busy: list[Request]) -> None:
        self.digest.update(repr(plan).encode())
        super()._check_plan(plan, busy)


def digest_plans(seed: int) -> str:
    world = RecordedWorld(seed)
    world.run(EVENTS_PER_WORLD)
    return world.digest.hexdigest()


def run_worlds(seeds: range, jobs: int, *, is_quick: bool = False) -> Iterator[Counter[str] | Failure]:
    run = run_world_quickly if is_quick else run_world
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, seeds, chunksize=8)


def report(counts: Counter[str]) -> str:
    width = max(map(len, counts), default=0)
    return "\n".join(f"  {name:{width}} {count:>12,}" for name, count in sorted(counts.items()))
