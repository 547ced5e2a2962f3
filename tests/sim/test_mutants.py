"""Every bug put in on purpose is found, by the worlds or by the test that is there for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, WORLDS, Mutant
from tests.sim.runs import FOUND

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1  # pytest's exit code


def copy_of_quire(folder: Path, mutant: Mutant | None) -> Path:
    """The package and its tests, with the edits of a mutant. Folders are its own, other files are links."""
    for name in ("quire", "tests"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for edit in mutant.edits if mutant else ():
        path = folder / "quire" / edit.file
        source = path.read_text()
        assert source.count(edit.old) == 1, f"{edit.old!r} is not in {edit.file} once: the mutant is stale"
        path.unlink()
        path.write_text(source.replace(edit.old, edit.new))
        compile(path.read_text(), path, "exec")
    return folder


class Nursery:
    """Runs what `python -m` would run, in a folder."""

    def __init__(self) -> None:
        # pytest's other plugins take longer to import than most of these tests to fail.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """Its exit code, and what it said."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps((str(folder), arguments)), file=self.process.stdin, flush=True)
        code, output = json.loads(self.process.stdout.readline())
        return code, output


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.process.communicate("")


def test_the_copy_itself_passes(nursery: Nursery, tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, None)
    code, output = nursery.run(folder, "tests.sim", "--seeds", "8", "--jobs", "1")
    assert code == 0, output
    (folder / "where.py").write_text("import quire\nprint(quire.__file__)\n")
    assert nursery.run(folder, "where")[1].startswith(str(folder)), "the mutants would not be tested at all"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(nursery: Nursery, mutant: Mutant, tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, mutant)
    if mutant.found_by == WORLDS:
        code, output = nursery.run(folder, "tests.sim", "--seeds", f"{mutant.first_world}:300", "--jobs", "1")
        assert code == FOUND, f"{mutant.name} survived all worlds up to 300\n{output}"
    else:
        code, output = nursery.run(folder, "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.found_by)
        assert code == TESTS_FAILED, f"{mutant.name} passed {mutant.found_by}\n{output}"


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 18
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
