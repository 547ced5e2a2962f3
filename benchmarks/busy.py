"""Measures the native backend on a busy machine: beside CPU-bound processes, and without them.

    python benchmarks/busy.py                      # two processes beside it, five rounds, four minutes
    python benchmarks/busy.py --processes 6        # four runnable threads per core on a machine with two cores
    python benchmarks/busy.py --before OLD.so      # also measure another build of the C library, alternating

Each measurement is a fresh process with the default model: prompts of 100 tokens, then 64 steps in which all clients
decode. Measurements alternate, and the tables have medians over the rounds. Under a fair scheduler, T threads beside N
CPU-bound processes on T cores get T / (T + N) of the machine if their work is well divided. Batching pays if 8 clients
together get more tokens per second than 1 client under the same load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cpu import OURS, QUIET, Contender, Others, say

from quire.backends.machine import usable_cores
from quire.weights.hub import resolve

CLIENTS = (1, 8)
LIBRARY = "QUIRE_NATIVE_LIBRARY"  # the environment variable that names another build
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 64


@contextmanager
def cpu_bound_processes(count: int) -> Iterator[None]:
    """Run processes that compute without a pause. They are reaped at the end, so `Others` does not count them."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Case:
    build: str
    is_busy: bool
    num_clients: int


@dataclass(slots=True)
class Bench:
    contender: Contender
    args: argparse.Namespace
    found: dict[Case, list[float]] = field(default_factory=dict)  # tok/s of each round
    others: list[float] = field(default_factory=list)  # share of the machine that unrelated processes used

    def run(self) -> None:
        for number in range(self.args.rounds):
            for num_clients in CLIENTS:
                cases = [Case(build, is_busy, num_clients) for is_busy in (False, True) for build in self.args.builds]
                turn = number % len(cases)
                for case in [*cases[turn:], *cases[:turn]]:
                    self.found.setdefault(case, []).append(self._measure(case))
            last = ", ".join(f"{_name(case)} {values[-1]:.0f}" for case, values in self.found.items())
            say(f"round {number + 1}: {last}")

    def _measure(self, case: Case) -> float:
        if path := self.args.builds[case.build]:
            os.environ[LIBRARY] = str(path)
        else:
            os.environ.pop(LIBRARY, None)
        task = {
            "kind": "decode",
            "num_clients": case.num_clients,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        }
        others = Others()
        with cpu_bound_processes(self.args.processes if case.is_busy else 0):
            found = self.contender.run(task, self.args.threads)
        self.others.append(others.share())
        return float(found["value"])

    def median(self, case: Case) -> float:
        return statistics.median(self.found[case])

    def ratio(self, one: Case, two: Case) -> float:
        """Return the median over the rounds of a quotient of two measurements of the same round."""
        return statistics.median(a / b for a, b in zip(self.found[one], self.found[two], strict=True))


def _name(case: Case) -> str:
    build = "" if case.build == OURS else f"{case.build}, "
    return f"{build}{'busy' if case.is_busy else 'quiet'}, {case.num_clients}:"


def table(bench: Bench) -> str:
    lines = [["", *(f"{count} client{'s' * (count > 1)}" for count in CLIENTS), f"{CLIENTS[-1]} / 1"]]
    lines.append(["---"] * len(lines[0]))
    for build in bench.args.builds:
        for is_busy in (False, True):
            cases = [Case(build, is_busy, count) for count in CLIENTS]
            title = f"{build}, {bench.args.processes} processes beside it" if is_busy else f"{build}, quiet"
            cells = [f"{bench.median(case):.0f} tok/s" for case in cases]
            lines.append([title, *cells, f"{bench.ratio(cases[-1], cases[0]):.2f}"])
        ratios = [bench.ratio(Case(build, True, count), Case(build, False, count)) for count in CLIENTS]
        lines.append([f"{build}, busy / quiet", *(f"{ratio:.2f}" for ratio in ratios), ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--model", help="default: quire's default model")
    parser.add_argument("--processes", type=int, default=2, help="CPU-bound processes beside it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--before", type=Path, metavar="LIBRARY", help="another build of the C library")
    args = parser.parse_args()
    args.builds = {OURS: None} if args.before is None else {OURS: None, "before": args.before}
    script = Path(__file__).with_name("cpu_ours.py")
    bench = Bench(Contender(OURS, Path(sys.executable), script, resolve(args.model), {"backend": args.backend}), args)
    bench.run()
    say(f"\n{args.threads} threads, {os.cpu_count()} cores, medians of {args.rounds} rounds\n\n{table(bench)}")
    others = statistics.median(bench.others)
    hint = ": measure again when it is idle" if others > QUIET else ""
    say(f"\nUnrelated processes used {others:.0%} of the machine in the median measurement{hint}.")


if __name__ == "__main__":
    main()
