"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import soak, tenant_attacks, tenants
from tests.gauntlet.figures import Row

ROWS: tuple[Row, ...] = tuple(
    sorted(
        (
            *soak.ROWS,
            *tenant_attacks.ROWS,
            *tenants.ROWS,
        ),
        key=lambda row: int(row.number[1:]),
    )
)
