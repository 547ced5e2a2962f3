"""Runs the worlds or tests that should find a mutant.

`found_at.json` has the world or test that found each mutant; `python -m tests.sim.search` writes it. It is tried first,
because most mutants are then found within a second. It may be stale: if it does not find the mutant, everything that
may find it runs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fork_server import LIMIT_S, ForkServer
from tests.sim.mutants import FIRST_HYBRID, MUTANTS, WORLDS, Mutant
from tests.sim.runs import FOUND

ROOT = Path(__file__).parents[2]
FOUND_AT = Path(__file__).with_name("found_at.json")
TESTS_FAILED = 1  # pytest's exit code
NO_SUCH_TEST = 4
_FAILED_WORLD = re.compile(r"^world (\d+) failed at event", re.MULTILINE)
_FAILED_TEST = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


@functools.cache
def found_at() -> dict[str, str]:
    found: dict[str, str] = json.loads(FOUND_AT.read_text())
    return found


class MutantServer(ForkServer):
    """Runs worlds and tests in copies of the project."""

    def __init__(self, *modules: str, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S) -> None:
        if environment is None:
            # Importing the other pytest plugins takes longer than most of these tests take to fail.
            environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
        # Examples of hypothesis are not shrunk.
        environment = {**os.environ, "QUIRE_TEST_PROFILE": "first failure", **environment}
        super().__init__(*(modules or ("hypothesis", "numpy", "pytest")), environment=environment, limit_s=limit_s)

    def output_of(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """Run a module. Returns its exit code, negative if it was killed, and its output."""
        ended = self.run(folder, *arguments)
        return ended.code, ended.stdout + ended.stderr

    def find(self, folder: Path, mutant: Mutant, tried_first: str | None) -> tuple[str | None, str]:
        """Run what may find a mutant until something does. Returns the world or test, or None, and the output."""
        output = ""
        if mutant.found_by == WORLDS:
            last = mutant.first_world // FIRST_HYBRID * FIRST_HYBRID + 300
            everything = f"{mutant.first_world}:{last}"
            for seeds in (everything,) if tried_first is None else (f"@{tried_first}", everything):
                code, output = self.output_of(folder, "tests.sim", "--seeds", seeds, "--jobs", "1")
                assert code in (0, FOUND), output
                if found := _FAILED_WORLD.search(output):
                    return found[1], output
        else:
            for tests in (mutant.found_by,) if tried_first is None else (tried_first, mutant.found_by):
                code, output = self.output_of(
                    folder, "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", tests
                )
                assert code in (0, TESTS_FAILED, NO_SUCH_TEST), output
                if code == TESTS_FAILED:
                    found = _FAILED_TEST.search(output)
                    return found[1] if found else tests, output
        return None, output


def copy_of_quire(folder: Path) -> Path:
    """Copy the package and its tests. All files are symbolic links; `edited` replaces some, and puts them back."""
    for name in ("quire", "tests"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def sources_of(mutant: Mutant) -> dict[str, str]:
    """The files that a mutant changes, with their new contents."""
    sources: dict[str, str] = {}
    for edit in mutant.edits:
        name = f"quire/{edit.file}"
        source = sources.get(name) or (ROOT / name).read_text()
        assert source.count(edit.old) == 1, (
            f"{edit.old!r} does not occur exactly once in {edit.file}: the mutant is stale"
        )
        sources[name] = source.replace(edit.old, edit.new)
    return sources


@contextmanager
def edited(folder: Path, sources: dict[str, str]) -> Iterator[None]:
    """Replace files of a copy, and put the links back."""
    links = {folder / name: (folder / name).readlink() for name in sources}
    try:
        for name, source in sources.items():
            compile(source, name, "exec")
            (folder / name).unlink()
            (folder / name).write_text(source)
        yield
    finally:
        for path, target in links.items():
            path.unlink(missing_ok=True)
            path.symlink_to(target)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name, MutantServer() as server:
        folder = copy_of_quire(Path(name))
        for mutant in MUTANTS:
            with edited(folder, sources_of(mutant)):
                at, _ = server.find(folder, mutant, None)
            print(f"{mutant.name}: {at or 'not found'}", flush=True)
            if at is not None:
                found[mutant.name] = at
    FOUND_AT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    sys.exit(len(found) < len(MUTANTS))


if __name__ == "__main__":
    main()
