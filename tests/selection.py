"""Which tests run, and in which order: `make check`, `make test` and `make nightly`.

- `make check` leaves out the files that take `QUICK_S` seconds or more.
- `make test` leaves out tests marked with `nightly`, and of a test marked with `@pytest.mark.kept("tiny", "real")` all
  cases but those in whose names one of these words occurs. Of the combinations of a test's parameters, also those of
  its fixtures, it runs the fewest in which each value of each parameter occurs. With `@pytest.mark.sweep("class")` or
  `("file")`, the tests of a class or file share the combinations: each test runs and each value occurs, but not each
  test with each value. With `("none")` all combinations run.
- `make nightly` runs all tests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.costs import name_of, slow_files

QUICK_S = 3.0
MARKERS = (
    "nightly: runs in `make nightly` only; `make test` has a case of the same kind",
    "kept(words): cases that `make test` runs, by words in their names; the others run in `make nightly` only",
    "sweep(scope): what shares combinations of parameters in `make test`: class, file or none (tests/selection.py)",
)


def mostly_nightly(cases: Iterable[Any], num_kept: int) -> list[ParameterSet]:
    """Return the cases of a test, such as seeds, of which `make test` runs only the first.

    A tuple has the values of several parameters.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if number < num_kept else (pytest.mark.nightly,) for number in range(len(cases))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


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
        if item.get_closest_marker("nightly") or not is_kept(item):
            left_out.add(item)
        else:
            sweeps[group_of(item)].append(item)
    for group in sweeps.values():
        left_out.update(set(group) - set(covering(group)))
    return [item for item in ordered if item not in left_out], [item for item in ordered if item in left_out]


def is_kept(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("kept")
    name = item.nodeid.partition("[")[2].removesuffix("]")
    return marker is None or any(word in name for word in marker.args)


def group_of(item: pytest.Item) -> Hashable:
    """What an item shares its combinations with."""
    marker = item.get_closest_marker("sweep")
    scope = marker.args[0] if marker is not None else "test"
    if scope == "none":
        return item.nodeid
    parts = item.nodeid.partition("[")[0].split("::")
    return tuple(parts[: {"file": 1, "class": 2, "test": 3}[scope]])


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose items, greedily, until each value that occurs in any of them occurs in a chosen one.

    Of items with as many missing values, the one whose values were chosen least is taken, so that tests that share the
    values of a parameter run with different ones.
    """
    if len(items) == 1:
        return list(items)
    values = {item: values_of(item) for item in items}
    missing = set().union(*values.values())
    if max(map(len, values.values())) <= 2 and len({item.nodeid.partition("[")[0] for item in items}) == 1:
        return list(items)  # one test with one parameter
    uses: Counter[tuple[Hashable, str]] = Counter()
    chosen = []
    while missing:
        best = max(items, key=lambda item: (len(values[item] & missing), -sum(uses[value] for value in values[item])))
        chosen.append(best)
        missing -= values[best]
        uses.update(values[best])
    return chosen


def values_of(item: pytest.Item) -> set[tuple[Hashable, str]]:
    """Return the name of an item's test, and the values of its parameters, as the command line shows them.

    Parameters that are given together, as tuples, are one.
    """
    spec = getattr(item, "callspec", None)
    values = enumerate(spec._idlist if spec is not None else ())
    return {("test", item.nodeid.partition("[")[0]), *values}
