"""Rows of the gauntlet, the figures that they measure, and their table."""

from __future__ import annotations

import importlib
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import FAKE
from tests.tiny import write_tiny_model


@dataclass(frozen=True)
class Figure:
    """One measured number and its bar. A figure without a bar is only reported."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    is_timed: bool = False  # depends on the speed of the machine: the quick run (`make test`) does not judge it
    is_left_over: bool = False  # a resource that the server held after an attack, compared with before

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # a bool would not be read back from the report

    def is_held(self, *, is_quick: bool) -> bool:
        if is_quick and self.is_timed:
            return True
        is_low = self.at_most is None or self.value <= self.at_most
        return is_low and (self.at_least is None or self.value >= self.at_least)

    @property
    def bar(self) -> str:
        if self.at_most is not None and self.at_most == self.at_least:
            return show(self.at_most, self.unit)
        low = "" if self.at_least is None else f"≥ {show(self.at_least, self.unit)}"
        high = "" if self.at_most is None else f"≤ {show(self.at_most, self.unit)}"
        return " and ".join(part for part in (low, high) if part)


def exactly(name: str, value: float, expected: float = 0, unit: str = "") -> Figure:
    return Figure(name, value, unit, at_most=expected, at_least=expected)


def counted(prefix: str, counts: Mapping[str, float]) -> list[Figure]:
    """Figures of faults, each of which must be 0."""
    return [exactly(f"{prefix}{name}", count) for name, count in counts.items()]


def timed(name: str, value: float, at_most: float, unit: str = "s") -> Figure:
    """A figure that depends on the speed of the machine."""
    return Figure(name, value, unit, at_most=at_most, is_timed=True)


def show(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".strip()


@dataclass
class Gauntlet:
    """The settings of a run, which each row gets: models, a scratch folder, and the size of the run."""

    folder: Path  # scratch, one per row
    is_quick: bool = False
    soak_s: float = 300.0
    model: str = DEFAULT_MODEL
    seed: int = 28
    say: Callable[[str], None] = print  # prints one line of progress
    begin_s: float = field(default_factory=time.monotonic)

    @cached_property
    def tiny(self) -> Path:
        """A model with two layers of random weights, for the fake backend and for quick loads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return write_tiny_model(self.folder / "tiny")

    @cached_property
    def random(self) -> random.Random:
        return random.Random(self.seed)

    def size(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full

    def one_model(self, *fake: str) -> tuple[str, ...]:
        """Options of a server with the real model, in the quick run with the fake backend. Its name is `tiny`."""
        model = (str(self.tiny), *FAKE, *fake) if self.is_quick else (self.model,)
        return *model, "--served-model-name", "tiny"

    def models(self, *fake: str, real: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Options of servers, with prefixes for their figures: the fake backend and, in a full run, the real model."""
        yield "", (str(self.tiny), "--backend", "fake", *fake)
        if not self.is_quick:
            self.say("the real model")
            yield "real model: ", (self.model, "--served-model-name", "tiny", *real)


@dataclass(frozen=True)
class Row:
    """One promise. `run` yields its figures; an exception fails the row."""

    number: str
    title: str
    run: Callable[[Gauntlet], Iterable[Figure]]
    limit_s: float  # after this time, the row is ended and fails


@dataclass(frozen=True)
class Result:
    number: str
    title: str
    figures: tuple[Figure, ...]
    seconds: float
    problem: str = ""  # why the row could not be measured

    def is_held(self, *, is_quick: bool) -> bool:
        return not self.problem and all(figure.is_held(is_quick=is_quick) for figure in self.figures)


# The module of each row, so that the process of a row imports only that one.
MODULES = {
    "R1": "load",
    "R5": "tenants",
    "R6": "soak",
    "R7": "load",
    "R10": "connections",
    "R11": "load",
    "R12": "bodies",
    "R13": "grammars",
    "R14": "files",
    "R15": "faults",
    "R16": "faults",
    "R18": "faults",
    "R19": "signals",
    "R20": "secrets",
    "R21": "secrets",
    "R24": "storage",
    "R25": "storage",
    "R27": "faults",
    "R28": "names",
    "R29": "tenants",
    "R30": "tenants",
    "R31": "connections",
    "R32": "soak",
    "R33": "pairs",
    "R34": "tokenizers",
    "R35": "tenants",
}


@cache
def row(number: str) -> Row:
    rows: tuple[Row, ...] = importlib.import_module(f"tests.gauntlet.{MODULES[number]}").ROWS
    return next(one for one in rows if one.number == number)


def table(results: Sequence[Result], *, is_quick: bool) -> str:
    """Figures that must be 0 and are 0, and resources that were released, take one line for each row."""
    lines = ["| row | promise | figure | bar | measured | held |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        title = result.title
        for cells in _lines(result, is_quick=is_quick):
            lines.append(f"| {result.number} | {title} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def _lines(result: Result, *, is_quick: bool) -> list[tuple[str, str, str, str]]:
    lines = []
    if result.problem:
        lines.append((f"not measured: {_cell(result.problem)}", "", "", "**no**"))
    zeros, released = [], []
    for figure in result.figures:
        is_held = figure.is_held(is_quick=is_quick)
        if is_held and figure.is_left_over:
            released.append(figure)
        elif is_held and figure.at_most == figure.at_least == 0:
            zeros.append(figure.name)
        else:
            held = "" if not figure.bar else ("not judged" if is_quick and figure.is_timed else "yes")
            lines.append((figure.name, figure.bar, show(figure.value, figure.unit), held if is_held else "**no**"))
    if zeros:
        lines.append(("; ".join(zeros), "0 each", "0 each", "yes"))
    if released:
        name = "KV blocks, open files, threads and processes afterwards, and broken invariants"
        lines.append((f"{name}, in {len(released)} figures", "as before", "as before", "yes"))
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:200]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {os.cpu_count()} cores{', ' + names[0] if names else ''}"


def total(results: Sequence[Result], *, is_quick: bool) -> str:
    """The last line: the number of rows, their time, and those that do not hold."""
    failed = [result.number for result in results if not result.is_held(is_quick=is_quick)]
    verdict = f"not held: {', '.join(failed)}" if failed else "all rows hold"
    return f"{len(results)} rows in {sum(result.seconds for result in results) / 60:.0f} minutes, {verdict}"
