"""Run seeded worlds: `python -m tests.sim --seeds 2000`, or `--seeds @77` to replay one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.runs import FOUND, Failure, report, run_worlds


def parse_seeds(text: str) -> range:
    """`2000`: that many worlds; `@77`: world 77; `100:200`: a range."""
    try:
        if text.startswith("@"):
            seeds = range(int(text[1:]), int(text[1:]) + 1)
        elif ":" in text:
            first, end = text.split(":")
            seeds = range(int(first), int(end))
        else:
            seeds = range(int(text))
    except ValueError:
        seeds = range(0)
    if not seeds or seeds[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of worlds, @seed or first:end")
    return seeds


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
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
