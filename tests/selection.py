"""Which tests run, and in which order: `make check`, `make test` and `make nightly`.

- `make check` leaves out the files that take `QUICK_S` seconds or more.
- `make test` leaves out tests marked with `nightly`, and runs a part of those marked with `sweep`.
- `make nightly` runs all tests.

`@pytest.mark.sweep` is for tests of many combinations that seldom fail one by one. Of all combinations of a test's
parameters, also those of its fixtures, `make test` runs the fewest in which each value of each parameter occurs. With
`sweep("file")`, the tests of a file share the combinations: each test runs and each value occurs, but not each test with
each value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.costs import name_of, slow_files

QUICK_S = 4.0
MARKERS = (
    "nightly: runs in `make nightly` only; `make test` has a case of the same kind",
    "sweep(scope='test'): `make test` runs the fewest combinations in which each value of each parameter occurs",
)


def mostly_nightly(cases: Iterable[Any], num_kept: int) -> list[ParameterSet | Any]:
    """Return the cases of a test, such as seeds, of which `make test` runs only the first."""
    cases = list(cases)
    return [*cases[:num_kept], *(pytest.param(case, marks=pytest.mark.nightly) for case in cases[num_kept:])]


def is_slow(path: Path) -> bool:
    return slow_files().get(name_of(path), 0.0) >= QUICK_S


def select(items: list[pytest.Item], is_nightly: bool) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests to run, slow files first, and those left out."""
    # Files run in parallel, and a slow one that starts last would delay the end.
    ordered = sorted(items, key=lambda item: -slow_files().get(name_of(item.path), 0.0))
    if is_nightly:
        return ordered, []
    sweeps: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    left_out: set[pytest.Item] = set()
    for item in ordered:
        sweep = item.get_closest_marker("sweep")
        if item.get_closest_marker("nightly"):
            left_out.add(item)
        elif sweep is not None:
            group = item.path if sweep.args == ("file",) else item.nodeid.partition("[")[0]
            sweeps[group].append(item)
    for group in sweeps.values():
        left_out.update(set(group) - set(covering(group)))
    return [item for item in ordered if item not in left_out], [item for item in ordered if item in left_out]


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose items, greedily, until each value that occurs in any of them occurs in a chosen one."""
    values = {item: values_of(item) for item in items}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(items, key=lambda item: len(values[item] & missing))  # the first of equal ones
        chosen.append(best)
        missing -= values[best]
    return chosen


def values_of(item: pytest.Item) -> set[tuple[Hashable, str]]:
    """Return the name of an item's test, and the values of its parameters, as the command line shows them.

    Parameters that are given together, as tuples, are one.
    """
    spec = getattr(item, "callspec", None)
    values = enumerate(spec._idlist if spec is not None else ())
    return {("test", item.nodeid.partition("[")[0]), *values}
