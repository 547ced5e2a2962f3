"""Tests of drawn mutants: each edit compiles, and a mutant of a tested line is found in a copy of the project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutations import Covered, Finder, Mutation, mutated, mutations_of
from tests.sim.search import ROOT

SIZES = "quire/sizes.py"


def test_every_edit_compiles_and_changes_its_file() -> None:
    kinds = set()
    for name in (SIZES, "quire/core/scheduler.py", "quire/server/limits.py"):
        found = list(mutations_of(ROOT / name))
        assert len(found) > 10
        for mutation in found:
            text = mutated(mutation)[name]
            assert text != (ROOT / name).read_text()
            compile(text, name, "exec")
            kinds.add(mutation.kind)
    assert kinds == {"swapped comparison", "off by one", "negated condition", "dropped line"}


def covered(folder: Path, tests: dict[str, tuple[list[int], float]], left_out: list[str]) -> Covered:
    """Lines of `SIZES` that each test executes, and CPU seconds that it takes."""
    data = CoverageData(str(folder / "coverage"))
    for test, (lines, _) in tests.items():
        data.set_context(test)
        data.add_lines({str(ROOT / SIZES): lines})
    data.write()
    (folder / "costs.json").write_text(json.dumps({test: {"cpu": cost} for test, (_, cost) in tests.items()}))
    (folder / "left_out.txt").write_text("\n".join(left_out) + "\n")
    return Covered(folder)


def test_tests_that_execute_the_line_run_the_nearest_and_cheapest_first(tmp_path: Path) -> None:
    far, near, cheap = (
        "tests/sim/test_worlds.py::test_world",
        "tests/test_sizes.py::test_a",
        "tests/test_sizes.py::test_b",
    )
    dear, nightly = "tests/test_sizes.py::test_dear", "tests/test_sizes.py::test_nightly"
    tests = {far: ([5], 0.1), near: ([5, 9], 2.0), cheap: ([5], 1.0), dear: ([5], 1000.0)}
    lines = covered(tmp_path, tests, [nightly, "tests/test_other.py::test_nightly"])
    inside = Mutation(SIZES, 5, 0, 1, "off by one", "2", is_in_function=True)
    assert lines.tests_for(inside, "make test") == [cheap, near, far]
    assert lines.tests_for(inside, "make nightly") == [nightly]
    assert lines.tests_for(Mutation(SIZES, 9, 0, 1, "", "2", is_in_function=True), "make test") == [near]
    of_module = Mutation(SIZES, 1, 0, 1, "", "2", is_in_function=False)
    assert lines.tests_for(of_module, "make test") == [cheap, near, far]


@pytest.mark.nightly
def test_a_mutant_of_a_tested_line_is_found(tmp_path: Path) -> None:
    swapped = [one for one in mutations_of(Path(ROOT / SIZES)) if one.kind == "negated condition"]
    with Finder(tmp_path) as finder:
        found = finder.find(swapped[0], ["tests/test_sizes.py"], "make test")
        assert found is not None
        assert (found["found_by"], found["found_in"]) == ("tests/test_sizes.py", "make test"), found
        nothing = Mutation(SIZES, 1, 0, 0, "", "", is_in_function=False)
        assert finder.find(nothing, ["tests/test_sizes.py"], "make test") is None
        failing = tmp_path / "test_failing.py"  # also without a mutant
        failing.write_text("def test_fails() -> None:\n    raise AssertionError\n")
        assert finder.find(swapped[0], [str(failing)], "make test") is None
