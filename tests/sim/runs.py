"""Runs worlds, one after the other or in several processes, and adds up what happened in them."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.sim.world import World

EVENTS_PER_WORLD = 400

FOUND = 3  # exit code: a world failed, as opposed to the program


@dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    event: int
    story: str

    def __str__(self) -> str:
        return f"{self.story}\nworld {self.seed} failed at event {self.event}; replay: make sim SEEDS=@{self.seed}"


def run_world(seed: int, num_events: int = EVENTS_PER_WORLD) -> Counter[str] | Failure:
    world = World(seed)
    try:
        return world.run(num_events)
    except Exception:
        return Failure(seed, world.num_events, f"{world.setup}\n{traceback.format_exc()}")


def run_worlds(seeds: range, jobs: int) -> Iterator[Counter[str] | Failure]:
    if jobs == 1:
        yield from map(run_world, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_world, seeds, chunksize=8)


def report(counts: Counter[str]) -> str:
    width = max(map(len, counts), default=0)
    return "\n".join(f"  {name:{width}} {count:>12,}" for name, count in sorted(counts.items()))
