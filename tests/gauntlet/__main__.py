"""Runs the gauntlet and prints its table: `python -m tests.gauntlet`, `--rows R1,R9`, `--quick`, `--soak 24h`.

Each row runs in its own process with a limit of time, so that a row that hangs fails and the others still run.
Exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.gauntlet.figures import (
    MODULES,
    Figure,
    Gauntlet,
    Result,
    Row,
    machine,
    row,
    table,
    total,
)

ROOT = Path(__file__).parents[2]
DEFAULT_REPORT = ROOT / "build" / "gauntlet.md"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Parse `600`, `90s`, `30m` or `24h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration like 600, 90s, 30m or 24h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def choose(text: str) -> list[Row]:
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(MODULES):
        raise SystemExit(f"--rows {text!r}: the rows are {', '.join(MODULES)}")
    return [row(name) for name in names]


def measure(promise: Row, gauntlet: Gauntlet) -> Result:
    """Run a row in this process."""
    begin = time.monotonic()
    figures: list[Figure] = []
    problem = ""
    try:
        figures.extend(promise.run(gauntlet))
        assert figures, "measured nothing"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"[:2000]
    return Result(promise.number, promise.title, tuple(figures), time.monotonic() - begin, problem)


def run_apart(promise: Row, options: argparse.Namespace) -> Result:
    """Run a row in a process group of its own, and end all of it after the row's limit."""
    limit_s = promise.limit_s + options.soak
    with tempfile.TemporaryDirectory(prefix="gauntlet-", ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.gauntlet", "--inside", promise.number, "--report", str(report)]
        command += ["--soak", f"{options.soak}s", "--model", options.model, *(["--quick"] if options.quick else [])]
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, env={**os.environ, "TMPDIR": folder})
        try:
            process.wait(limit_s)
            problem = f"its process ended with status {process.returncode} and left no result"
        except subprocess.TimeoutExpired:
            problem = f"not done after its limit of {limit_s:.0f} s"
        finally:
            _end_group(process)
        if report.exists():
            return msgspec.json.decode(report.read_bytes(), type=Result)
        return Result(promise.number, promise.title, (), time.monotonic() - begin, problem)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def run_all(rows: Sequence[Row], options: argparse.Namespace) -> int:
    results: list[Result] = []
    report = ""
    options.report.parent.mkdir(parents=True, exist_ok=True)
    for promise in rows:
        print(f"{promise.number} ({len(results) + 1} of {len(rows)}): {promise.title}", flush=True)
        result = run_apart(promise, options)
        results.append(result)
        held = "held" if result.is_held(is_quick=options.quick) else "NOT HELD"
        print(f"  {held} in {result.seconds:.0f} s {result.problem}".rstrip(), flush=True)
        # A run that is interrupted leaves what it measured.
        report = f"{machine()}\n\n{table(results, is_quick=options.quick)}\n"
        options.report.write_text(report)
    print(f"\n{report}")
    print(f"{total(results, is_quick=options.quick)}; written to {options.report}")
    return 0 if all(result.is_held(is_quick=options.quick) for result in results) else 1


def run_inside(promise: Row, options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix=f"{promise.number}-"))

    def say(text: str) -> None:
        print(f"  {text}", flush=True)

    gauntlet = Gauntlet(folder, is_quick=options.quick, soak_s=options.soak, model=options.model, say=say)
    try:
        result = measure(promise, gauntlet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.report.write_bytes(msgspec.json.encode(result))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gauntlet", description=__doc__)
    parser.add_argument("--rows", default=",".join(MODULES), help="only these, like R1,R9")
    parser.add_argument("--quick", action="store_true", help="small counts; figures of time are not judged")
    parser.add_argument("--soak", type=parse_seconds, default=None, help="duration of the soak, like 30m or 24h")
    parser.add_argument("--model", default=Gauntlet.model, help="the real model")
    parser.add_argument("--report", type=Path, default=DEFAULT_REPORT, help="the Markdown file to write")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the row that this process runs
    options = parser.parse_args()
    if options.soak is None:
        options.soak = 10.0 if options.quick else Gauntlet.soak_s
    if options.inside:
        return run_inside(choose(options.inside)[0], options)
    return run_all(choose(options.rows), options)


def _raise_exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _raise_exit)  # the process group of the present row is ended too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
