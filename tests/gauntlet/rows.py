"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import crashes, faults, signals, storage
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = (
    *crashes.ROWS,
    *faults.ROWS,
    *signals.ROWS,
    *storage.ROWS,
)
