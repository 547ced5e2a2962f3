"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import tenants
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = (*tenants.ROWS,)
