"""Rows of the gauntlet and the figures that they measure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from quire.weights.hub import DEFAULT_MODEL
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

    def models(self, *fake: str, real: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Options of servers, with prefixes for their figures: the fake backend and, in a full run, the real model."""
        yield "", (str(self.tiny), "--backend", "fake", *fake)
        if not self.is_quick:
            self.say("the real model")
            yield "real model: ", (self.model, "--served-model-name", "tiny", *real)


@dataclass(frozen=True)
class Row:
    """One promise. `run` measures its figures; an exception fails the row."""

    number: str
    title: str
    run: Callable[[Gauntlet], Sequence[Figure]]
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
