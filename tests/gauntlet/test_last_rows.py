"""The last rows of the shortened gauntlet. The rows are divided into two files, which run in parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gauntlet.quick import CASES, check_row


@pytest.mark.parametrize("number", CASES[16:])
def test_a_row_holds(number: str, tmp_path: Path) -> None:
    check_row(number, tmp_path)
