"""Run seeded worlds: `python -m tests.sim --seeds 2000`, or `--seeds @77` to replay one."""

from __future__ import annotations

import argparse
import sys
import time
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


def parse_seeds(text: str) -> range:
    """`2000` is that many worlds, `@77` is world 77, `100:200` a range."""
    if text.startswith("@"):
        return range(int(text[1:]), int(text[1:]) + 1)
    if ":" in text:
        first, end = text.split(":")
        return range(int(first), int(end))
    return range(int(text))


def report(counts: Counter[str]) -> str:
    width = max(map(len, counts), default=0)
    return "\n".join(f"  {name:{width}} {count:>12,}" for name, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=parse_seeds, default=range(200), help=parse_seeds.__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    begin = shown = time.monotonic()
    for number, outcome in enumerate(run_worlds(options.seeds, min(options.jobs, len(options.seeds))), 1):
        if isinstance(outcome, Failure):
            print(outcome, file=sys.stderr)
            return FOUND
        counts.update(outcome)
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"{number} of {len(options.seeds)} worlds, {counts['events']:,} events", flush=True)
    seconds = time.monotonic() - begin
    print(f"{len(options.seeds)} worlds, {counts['events']:,} events in {seconds:.0f} s, no failure\n{report(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
