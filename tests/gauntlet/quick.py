"""A row of the shortened gauntlet as a test: with small counts, and without judging figures of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gauntlet.__main__ import measure
from tests.gauntlet.figures import Gauntlet
from tests.gauntlet.rows import MODULES, row

# In `make test`: others have the same kind of test in the suite, or measure what depends on time.
IN_MAKE_TEST = frozenset(f"R{number}" for number in (3, 4, 8, 12, 33))
NUMBERS = tuple(MODULES)
CASES = [number if number in IN_MAKE_TEST else pytest.param(number, marks=pytest.mark.nightly) for number in NUMBERS]


def check_row(number: str, folder: Path) -> None:
    promise = row(number)
    if not promise.is_quick:
        pytest.skip("only `make gauntlet` runs this row")
    result = measure(promise, Gauntlet(folder, is_quick=True, soak_s=5.0))
    assert not result.problem, result.problem
    missed = [figure for figure in result.figures if not figure.is_held(is_quick=True)]
    assert not missed, missed
