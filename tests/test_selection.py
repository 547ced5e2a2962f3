"""Tests of the choice of tests: every value of every parameter is left in `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import mostly_nightly
from tests.sim.search import ROOT

FAMILIES = ("llama", "qwen3", "gemma3")
EXAMPLE = """
import pytest

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xy")
def test_products(a, b): pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", "xy")
def test_squares(a, b): pass

@pytest.mark.nightly
def test_long(): pass

@pytest.mark.parametrize("seed", {seeds})
def test_seeds(seed): pass

@pytest.mark.sweep("none")
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", "xy")
def test_every_combination(a, b): pass

@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def family(request): return request.param

@pytest.mark.kept("tiny", "huge")
@pytest.mark.parametrize("size", ["tiny", "small", "huge model"])
def test_sizes(size): pass

@pytest.mark.sweep("class")
class TestContract:
    def test_alone(self, family): pass
    @pytest.mark.parametrize("chunk", [1, 7])
    def test_chunks(self, family, chunk): pass
    @pytest.mark.sweep("test")
    def test_batch(self, family): pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    file = folder / "test_example.py"
    seeds = "[0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))]"
    file.write_text(EXAMPLE.format(seeds=seeds))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "-q", f"--rootdir={folder}"]
    outcome = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options, str(file)],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.partition("::")[2] for line in outcome.stdout.splitlines() if "::" in line]


def test_each_value_occurs(tmp_path: Path) -> None:
    found = collected(tmp_path)
    of = {
        name: [one for one in found if name in one]
        for name in ("products", "squares", "every", "seeds", "Contract", "batch")
    }
    assert of["products"] == ["test_products[x-1]", "test_products[x-3]", "test_products[y-2]"]
    assert of["squares"] == ["test_squares[x-1]", "test_squares[y-2]"]
    assert len(of["every"]) == 4
    assert of["seeds"] == ["test_seeds[0]"]
    assert of["batch"] == [f"TestContract::test_batch[{family}]" for family in FAMILIES]
    shared = set(of["Contract"]) - set(of["batch"])
    assert len(shared) == 3  # test_alone with one family, test_chunks with the others
    assert {family for family in FAMILIES for one in shared if family in one} == set(FAMILIES)
    assert sorted("alone" if "alone" in one else one[-2] for one in shared) == ["1", "7", "alone"]
    assert "test_long" not in found
    assert [one for one in found if "sizes" in one] == ["test_sizes[tiny]", "test_sizes[huge model]"]


def test_all_tests_run_nightly(tmp_path: Path) -> None:
    found = collected(tmp_path, "--nightly")
    assert len(found) == 6 + 4 + 1 + 3 + 4 + 3 + 3 + 6 + 3


def test_first_cases_are_kept() -> None:
    first, second, third = mostly_nightly([5, (6, 7), 8], 1)
    assert [one.values for one in (first, second, third)] == [(5,), (6, 7), (8,)]
    assert [list(one.marks) for one in (first, second, third)] == [[], *[[pytest.mark.nightly]] * 2]


def test_the_report_of_an_earlier_run_is_not_taken_for_tests(tmp_path: Path) -> None:
    earlier = tmp_path / "costs.json"
    earlier.write_text("{}")
    printed = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in printed.splitlines() if "--costs" in line]
    options = line.replace("build/test-costs.json", str(earlier)).partition("-m ")[2].split()
    command = [sys.executable, "-m", *options, "--markers"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "@pytest.mark.nightly" in outcome.stdout, outcome.stderr
