"""Every bug put in on purpose is found, by the worlds or by the test that is there for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, WORLDS, Mutant
from tests.sim.runs import FOUND

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1  # pytest's exit code


def copy_of_quire(folder: Path, mutant: Mutant | None) -> Path:
    """The package and its tests, with the edits of a mutant, and what of them is compiled: it knows its source by age."""
    for name in ("quire", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for edit in mutant.edits if mutant else ():
        path = folder / "quire" / edit.file
        source = path.read_text()
        assert source.count(edit.old) == 1, f"{edit.old!r} is not in {edit.file} once: the mutant is stale"
        path.write_text(source.replace(edit.old, edit.new))
        compile(path.read_text(), path, "exec")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    # pytest's other plugins take longer to import than most of these tests to fail.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_copy_itself_passes(tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, None)
    where = run(folder, "tests.sim", "--seeds", "20", "--jobs", "1")
    assert where.returncode == 0, where.stderr
    imported = subprocess.run(
        [sys.executable, "-c", "import quire; print(quire.__file__)"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout.startswith(str(folder)), "the mutants would not be tested at all"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, mutant)
    if mutant.found_by == WORLDS:
        outcome = run(folder, "tests.sim", "--seeds", "300", "--jobs", "1")
        assert outcome.returncode == FOUND, f"{mutant.name} survived 300 worlds\n{outcome.stdout}{outcome.stderr}"
    else:
        outcome = run(folder, "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.found_by)
        assert outcome.returncode == TESTS_FAILED, f"{mutant.name} passed {mutant.found_by}\n{outcome.stdout}"


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 18
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
