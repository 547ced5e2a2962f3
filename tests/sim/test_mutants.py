"""Tests that every mutant (a bug inserted on purpose) is found by the worlds or by the test file it names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.mutants import FIRST_HYBRID, MUTANTS, WORLDS, Mutant
from tests.sim.runs import FOUND

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1  # pytest's exit code


def copy_of_quire(folder: Path, mutant: Mutant | None) -> Path:
    """Copy the package and its tests, with the edits of a mutant. Unedited files are symbolic links."""
    for name in ("quire", "tests"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for edit in mutant.edits if mutant else ():
        path = folder / "quire" / edit.file
        source = path.read_text()
        assert source.count(edit.old) == 1, (
            f"{edit.old!r} does not occur exactly once in {edit.file}: the mutant is stale"
        )
        path.unlink()
        path.write_text(source.replace(edit.old, edit.new))
        compile(path.read_text(), path, "exec")
    return folder


class ForkServer:
    """Runs modules like `python -m` in a given folder (`fork_server.py`)."""

    def __init__(self) -> None:
        # Importing the other pytest plugins takes longer than most of these tests take to fail.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
        environment["QUIRE_TEST_PROFILE"] = "first failure"  # of hypothesis: examples are not shrunk
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """Run a module. Returns its exit code and output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps((str(folder), arguments)), file=self.process.stdin, flush=True)
        code, output = json.loads(self.process.stdout.readline())
        return code, output


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.process.communicate("")


def test_an_unchanged_copy_passes(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, None)
    code, output = fork_server.run(folder, "tests.sim", "--seeds", "8", "--jobs", "1")
    assert code == 0, output
    (folder / "where.py").write_text("import quire\nprint(quire.__file__)\n")
    assert fork_server.run(folder, "where")[1].startswith(str(folder)), "the copy is not the package under test"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(fork_server: ForkServer, mutant: Mutant, tmp_path: Path) -> None:
    folder = copy_of_quire(tmp_path, mutant)
    if mutant.found_by == WORLDS:
        last = mutant.first_world // FIRST_HYBRID * FIRST_HYBRID + 300
        code, output = fork_server.run(folder, "tests.sim", "--seeds", f"{mutant.first_world}:{last}", "--jobs", "1")
        assert code == FOUND, f"{mutant.name} survived all worlds up to {last}\n{output}"
    else:
        code, output = fork_server.run(folder, "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.found_by)
        assert code == TESTS_FAILED, f"{mutant.name} passed {mutant.found_by}\n{output}"


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 18
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
