"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet.figures import Row
from tests.gauntlet.soak import ROWS as SOAK
from tests.gauntlet.tenant_attacks import ROWS as TENANT_ATTACKS
from tests.gauntlet.tenants import ROWS as TENANTS

ROWS: tuple[Row, ...] = (
    *TENANTS,
    *SOAK,
    *TENANT_ATTACKS,
)
