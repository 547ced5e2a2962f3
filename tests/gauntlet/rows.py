"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import bodies, clients, connections, grammars
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = (
    *connections.ROWS,
    *bodies.ROWS,
    *grammars.ROWS,
    *clients.ROWS,
)
