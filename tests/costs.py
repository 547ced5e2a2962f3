"""What tests cost, and on what they spend it: a pytest plugin that writes a report, and a command that reads it.

`pytest --costs=FILE` writes the report. `python -m tests.costs FILE` prints the most expensive files; with `--write` it
also generates `tests/slow_files.json`, which orders the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer

FOLDER = Path(__file__).parent
SLOW_FILES = FOLDER / "slow_files.json"
SERVER_STARTS = "server starts"
LISTED_S = 1.0  # files that take less are not in the table


@functools.cache
def slow_files() -> dict[str, float]:
    """Return seconds of each file that is not fast, on the machine and in the run that are named in the table."""
    found: dict[str, float] = json.loads(SLOW_FILES.read_text())["seconds"]
    return found


@functools.cache
def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


class Costs:
    """Seconds of the running test, by what they are spent on. Nested spans count once, for the inner one.

    Spans within a start of a server count for it: it waits for other processes.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._open: list[float] = []  # for each open span: seconds of the spans within it
        self._is_starting = False

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        if self._is_starting:
            yield
            return
        self._is_starting = what == SERVER_STARTS
        began = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            self._is_starting = False
            took = time.perf_counter() - began
            self._spent[what] += took - self._open.pop()
            if self._open:
                self._open[-1] += took

    def take(self) -> dict[str, float]:
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent

    def watch(self, owner: object, name: str, what: str) -> None:
        """Count the time of all calls of a function or method."""
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.span(what):
                return call(*args, **kwargs)

        setattr(owner, name, measured)


class Recorder:
    """Measures the tests of one process."""

    def __init__(self) -> None:
        import subprocess

        from tests import waiting

        self._costs = Costs()
        self._main: int | None = None
        # Watched before test modules are imported, because these import the functions by name.
        self._costs.watch(waiting, "eventually", "waiting")
        self._costs.watch(time, "sleep", "waiting")
        self._costs.watch(ForkServer, "run", "other processes")
        self._costs.watch(subprocess.Popen, "communicate", "other processes")
        self._costs.watch(subprocess.Popen, "wait", "other processes")
        from tests.server import rig

        self._costs.watch(rig, "wait_ready", SERVER_STARTS)

    def pytest_collection_finish(self) -> None:
        from quire.engine import composition

        self._costs.watch(composition, "make_runner", "model loads")
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is not None:
            self._costs.watch(interpreter.GridExecutor, "__call__", "Triton's interpreter")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._cpu_s = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        report.user_properties = [("cpu_s", cpu_s() - self._cpu_s), ("spent", self._costs.take())]
        self._cpu_s = cpu_s()
        return report


class Collector:
    """Collects the measurements of all processes, and writes the report at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties)
        test = self._tests.setdefault(report.nodeid, {"cpu": 0.0, "failed": False, "spent": defaultdict(float)})
        test["failed"] |= report.failed
        test[report.when] = round(report.duration, 3)
        test["cpu"] += float(found.get("cpu_s", 0.0))  # type: ignore[arg-type]
        for what, seconds in found.get("spent", {}).items():  # type: ignore[attr-defined]
            test["spent"][what] += seconds

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for test in self._tests.values():
            test["cpu"] = round(test["cpu"], 3)
            test["spent"] = {what: round(s, 3) for what, s in test["spent"].items() if s >= 0.01}
        self._path.write_text(json.dumps(self._tests, indent=0) + "\n")


def cpu_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of forks of those that run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ForkServer.cpu_s


def by_file(tests: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each file: number of tests, seconds, CPU seconds, seconds of set-up, and seconds of each span."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for nodeid, test in tests.items():
        file = files[nodeid.partition("::")[0].removeprefix("tests/")]
        file["tests"] += 1
        file["total"] += sum(test.get(phase, 0.0) for phase in ("setup", "call", "teardown"))
        file["set-up"] += test.get("setup", 0.0) + test.get("teardown", 0.0)
        file["cpu"] += test["cpu"]
        for what, seconds in test["spent"].items():
            file[what] += seconds
    return files


COLUMNS = (SERVER_STARTS, "model loads", "Triton's interpreter", "other processes", "waiting")


def table(files: dict[str, dict[str, float]], top: int) -> str:
    lines = [f"{'tests':>6}{'total s':>9}{'cpu s':>8}{'set-up':>8}" + "".join(f"{c:>22}" for c in COLUMNS) + "  file"]
    rows = sorted(files.items(), key=lambda row: -row[1]["total"])
    groups: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, file in rows:
        for what, amount in file.items():
            groups[name.rpartition("/")[0] or "."][what] += amount
            groups["all"][what] += amount
    by_group = sorted(groups.items(), key=lambda row: -row[1]["total"])
    for name, file in [*rows[:top], *by_group]:
        figures = "".join(f"{file.get(column, 0.0):>22.1f}" for column in COLUMNS)
        lines.append(
            f"{file['tests']:>6.0f}{file['total']:>9.1f}{file['cpu']:>8.1f}{file['set-up']:>8.1f}{figures}  {name}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--top", type=int, default=50)
    parser.add_argument("--write", metavar="MACHINE", help="generate slow_files.json; names the machine of the run")
    options = parser.parse_args()
    files = by_file(json.loads(options.report.read_text()))
    print(table(files, options.top))
    if options.write:
        seconds = {name: round(file["total"], 1) for name, file in files.items() if file["total"] >= LISTED_S}
        ordered = dict(sorted(seconds.items(), key=lambda row: -row[1]))
        SLOW_FILES.write_text(json.dumps({"measured on": options.write, "seconds": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
