"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import load, replicas, theorems
from tests.gauntlet.figures import Row


def _place(row: Row) -> int:
    return int(row.number[1:])


ROWS: tuple[Row, ...] = tuple(
    sorted(
        (
            *load.ROWS,
            *replicas.ROWS,
            *theorems.ROWS,
        ),
        key=_place,
    )
)
