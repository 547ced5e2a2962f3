"""Tests of the gauntlet itself: the list of rows, bars, and rows that raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gauntlet.__main__ import measure
from tests.gauntlet.figures import MODULES, Figure, Gauntlet, Result, Row, exactly, row

# In `make test`: others have the same kind of test in the suite, or measure what depends on time.
IN_MAKE_TEST = ("R12", "R33")

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    "number", [one if one in IN_MAKE_TEST else pytest.param(one, marks=pytest.mark.nightly) for one in MODULES]
)
def test_a_row_holds(number: str, tmp_path: Path) -> None:
    """Small counts; figures of time are not judged."""
    result = measure(row(number), Gauntlet(tmp_path, is_quick=True, soak_s=5.0))
    assert not result.problem, result.problem
    missed = [figure for figure in result.figures if not figure.is_held(is_quick=True)]
    assert not missed, missed


def test_the_table_has_all_rows() -> None:
    assert [row(number).number for number in MODULES] == list(MODULES)
    assert {file.stem for file in FOLDER.glob("*.py") if "\nROWS" in file.read_text()} == set(MODULES.values())


def test_a_figure_is_judged_by_its_bar() -> None:
    assert exactly("blocks", 0).is_held(is_quick=True)
    assert not exactly("blocks", 1).is_held(is_quick=True)
    late = Figure("wait", 3.0, "s", at_most=2.0, is_timed=True)
    assert late.is_held(is_quick=True)
    assert not late.is_held(is_quick=False)
    assert not Figure("goodput", 80, "%", at_least=90).is_held(is_quick=False)
    assert not Figure("nothing measured", float("nan"), at_most=1).is_held(is_quick=False)


def test_a_row_that_raises_or_has_no_figures_is_not_held(tmp_path: Path) -> None:
    def broken(_: Gauntlet) -> Iterator[Figure]:
        yield exactly("blocks", 0)
        raise ValueError("no server")

    result = measure(Row("X1", "broken", broken, 1), Gauntlet(tmp_path))
    assert result == Result("X1", "broken", (exactly("blocks", 0),), result.seconds, "ValueError: no server")
    empty = measure(Row("X2", "empty", lambda _: (), 1), Gauntlet(tmp_path))
    assert not any(one.is_held(is_quick=False) for one in (result, empty))
