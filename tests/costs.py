"""What tests cost: a pytest plugin that writes a report, and a command that reads it.

`pytest --costs=FILE` writes the report. `python -m tests.costs FILE` prints the most expensive files; with `--write` it
also generates `tests/slow_files.json`, which orders the run.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer

FOLDER = Path(__file__).parent
SLOW_FILES = FOLDER / "slow_files.json"
LISTED_S = 1.0  # files that take less are not in the table
COLUMNS = ("tests", "total", "cpu", "set-up")


@functools.cache
def slow_files() -> dict[str, float]:
    """Return seconds of each file that is not fast, on the machine and in the run that are named in the table."""
    found: dict[str, float] = json.loads(SLOW_FILES.read_text())["seconds"]
    return found


@functools.cache
def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


class Recorder:
    """Measures the CPU time of the tests of one process."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._cpu_s = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        report.user_properties = [("cpu_s", cpu_s() - self._cpu_s)]
        self._cpu_s = cpu_s()
        return report


class Collector:
    """Collects the measurements of all processes, and writes the report at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"cpu": 0.0, "failed": False})
        test["failed"] |= report.failed
        test[report.when] = round(report.duration, 3)
        test["cpu"] = round(test["cpu"] + float(dict(report.user_properties).get("cpu_s", 0.0)), 3)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._tests, indent=0) + "\n")


def cpu_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of forks of those that run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ForkServer.cpu_s


def by_file(tests: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each file, each folder and all: number of tests, seconds, CPU seconds, and seconds of set-up."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))
    for nodeid, test in tests.items():
        set_up = test.get("setup", 0.0) + test.get("teardown", 0.0)
        amounts = (1, set_up + test.get("call", 0.0), test["cpu"], set_up)
        name = nodeid.partition("::")[0].removeprefix("tests/")
        for group in (name, f"{name.rpartition('/')[0]}/", "all"):
            for column, amount in zip(COLUMNS, amounts, strict=True):
                files[group][column] += amount
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--top", type=int, default=50)
    parser.add_argument("--write", metavar="MACHINE", help="generate slow_files.json; names the machine of the run")
    options = parser.parse_args()
    rows = sorted(by_file(json.loads(options.report.read_text())).items(), key=lambda row: -row[1]["total"])
    print("".join(f"{column:>9}" for column in COLUMNS), " file or folder")
    for name, row in rows[: options.top]:
        print("".join(f"{row[column]:>9.1f}" for column in COLUMNS), f" {name}")
    if options.write:
        seconds = {name: round(row["total"], 1) for name, row in rows if name.endswith(".py")}
        listed = {name: total for name, total in seconds.items() if total >= LISTED_S}
        SLOW_FILES.write_text(json.dumps({"measured on": options.write, "seconds": listed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
