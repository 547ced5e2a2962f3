"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import faults
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = (*faults.ROWS,)
