"""All rows of the gauntlet, in the order of the table."""

from __future__ import annotations

import importlib
from functools import cache

from tests.gauntlet.figures import Row

# The module of each row, so that the process of a row imports only that one.
MODULES = {
    "R1": "load",
    "R5": "tenants",
    "R6": "soak",
    "R7": "load",
    "R10": "connections",
    "R11": "load",
    "R12": "bodies",
    "R13": "grammars",
    "R14": "files",
    "R15": "faults",
    "R16": "faults",
    "R18": "faults",
    "R19": "signals",
    "R20": "secrets",
    "R21": "secrets",
    "R24": "storage",
    "R25": "storage",
    "R27": "faults",
    "R28": "names",
    "R29": "tenants",
    "R30": "tenant_attacks",
    "R31": "connections",
    "R32": "soak",
    "R33": "pairs",
    "R34": "tokenizers",
    "R35": "turns",
}


@cache
def row(number: str) -> Row:
    rows: tuple[Row, ...] = importlib.import_module(f"tests.gauntlet.{MODULES[number]}").ROWS
    return next(one for one in rows if one.number == number)


def all_rows() -> list[Row]:
    return [row(number) for number in MODULES]
