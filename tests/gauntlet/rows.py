"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

from tests.gauntlet import (
    bodies,
    clients,
    connections,
    crashes,
    faults,
    files,
    grammars,
    load,
    names,
    replicas,
    secrets,
    signals,
    soak,
    storage,
    supply,
    tenant_attacks,
    tenants,
    theorems,
)
from tests.gauntlet.figures import Row

_MODULES = (
    bodies,
    clients,
    connections,
    crashes,
    faults,
    files,
    grammars,
    load,
    names,
    replicas,
    secrets,
    signals,
    soak,
    storage,
    supply,
    tenant_attacks,
    tenants,
    theorems,
)


def _place(row: Row) -> int:
    return int(row.number[1:])


ROWS: tuple[Row, ...] = tuple(sorted((row for module in _MODULES for row in module.ROWS), key=_place))
