"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import files, names, secrets, supply
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = (
    *files.ROWS,
    *secrets.ROWS,
    *supply.ROWS,
    *names.ROWS,
)
