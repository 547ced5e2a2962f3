"""Tests of the gauntlet itself: the list of rows, bars, and rows that raise."""

from __future__ import annotations

from pathlib import Path

from tests.gauntlet.__main__ import measure
from tests.gauntlet.figures import Figure, Gauntlet, Result, Row, exactly
from tests.gauntlet.rows import MODULES, all_rows

FOLDER = Path(__file__).parent


def test_the_table_has_all_rows() -> None:
    assert [row.number for row in all_rows()] == [f"R{number}" for number in range(1, 36)]
    assert sorted(file.stem for file in FOLDER.glob("*.py") if "\nROWS" in file.read_text()) == sorted(
        {*MODULES.values()}
    )


def test_a_figure_is_judged_by_its_bar() -> None:
    assert exactly("blocks", 0).is_held(is_quick=True)
    assert not exactly("blocks", 1).is_held(is_quick=True)
    late = Figure("wait", 3.0, "s", at_most=2.0, is_timed=True)
    assert late.is_held(is_quick=True)
    assert not late.is_held(is_quick=False)
    assert not Figure("goodput", 80, "%", at_least=90).is_held(is_quick=False)
    assert not Figure("nothing measured", float("nan"), at_most=1).is_held(is_quick=False)


def test_a_row_that_raises_is_not_held(tmp_path: Path) -> None:
    def broken(_: Gauntlet) -> list[Figure]:
        raise ValueError("no server")

    result = measure(Row("X1", "broken", broken, 1), Gauntlet(tmp_path))
    assert result == Result("X1", "broken", (), result.seconds, "ValueError: no server")
    assert not result.is_held(is_quick=False)


def test_a_row_without_figures_is_not_held(tmp_path: Path) -> None:
    assert not measure(Row("X2", "empty", lambda _: (), 1), Gauntlet(tmp_path)).is_held(is_quick=False)
