"""Tests that every mutant (a bug inserted on purpose) is found by the worlds or by the test file it names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.search import ROOT, MutantServer, copy_of_quire, edited, found_at, sources_of


@pytest.fixture(scope="module")
def fork_server() -> Iterator[MutantServer]:
    with MutantServer() as server:
        yield server


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_quire(tmp_path_factory.mktemp("copy"))


def test_an_unchanged_copy_passes(fork_server: MutantServer, copy: Path) -> None:
    code, output = fork_server.output_of(copy, "tests.sim", "--seeds", "8", "--jobs", "1")
    assert code == 0, output
    (copy / "where.py").write_text("import quire\nprint(quire.__file__)\n")
    assert fork_server.output_of(copy, "where")[1].startswith(str(copy)), "the copy is not the package under test"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(fork_server: MutantServer, mutant: Mutant, copy: Path) -> None:
    with edited(copy, sources_of(mutant)):
        found, output = fork_server.find(copy, mutant, found_at().get(mutant.name))
    assert found is not None, f"{mutant.name} survived {mutant.found_by}\n{output}"


def test_edits_are_put_back(copy: Path) -> None:
    files = {edit.file for mutant in MUTANTS for edit in mutant.edits}
    assert all((copy / "quire" / file).readlink() == ROOT / "quire" / file for file in files)


def test_mutants_have_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_mutants_use_no_undefined_names(tmp_path: Path) -> None:
    """A mutant that raises NameError would be found by every test that executes its line."""
    sources = [sources_of(mutant) for mutant in MUTANTS]
    for number, files in enumerate(sources):
        for name, source in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    report = subprocess.run([*ruff, str(tmp_path)], check=False, capture_output=True, text=True)
    assert report.returncode == 0, report.stdout
