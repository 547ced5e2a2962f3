"""Runs the worlds or tests that should find a mutant: `python -m tests.sim.search` searches all and writes where each fails.

`found_at.json` has the world or test that found each mutant. It is tried first, because most mutants are then found within
a second. It may be stale: if it does not find the mutant, everything that may find it runs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

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

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.communicate("")

    def run(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """Run a module. Returns its exit code and output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps((str(folder), arguments)), file=self.process.stdin, flush=True)
        code, output = json.loads(self.process.stdout.readline())
        return code, output

    def find(self, folder: Path, mutant: Mutant, tried_first: str | None) -> tuple[str | None, str]:
        """Run what may find a mutant until something does. Returns the world or test, or None, and the output."""
        if mutant.found_by == WORLDS:
            last = mutant.first_world // FIRST_HYBRID * FIRST_HYBRID + 300
            everything = f"{mutant.first_world}:{last}"
            for seeds in (everything,) if tried_first is None else (f"@{tried_first}", everything):
                code, output = self.run(folder, "tests.sim", "--seeds", seeds, "--jobs", "1")
                assert code in (0, FOUND), output
                if found := _FAILED_WORLD.search(output):
                    return found[1], output
        else:
            for tests in (mutant.found_by,) if tried_first is None else (tried_first, mutant.found_by):
                code, output = self.run(folder, "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", tests)
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


@contextmanager
def edited(folder: Path, mutant: Mutant) -> Iterator[None]:
    links: dict[Path, Path] = {}
    try:
        for edit in mutant.edits:
            path = folder / "quire" / edit.file
            source = path.read_text()
            assert source.count(edit.old) == 1, (
                f"{edit.old!r} does not occur exactly once in {edit.file}: the mutant is stale"
            )
            if path not in links:
                links[path] = path.readlink()
            path.unlink()
            path.write_text(source.replace(edit.old, edit.new))
            compile(path.read_text(), path, "exec")
        yield
    finally:
        for path, target in links.items():
            path.unlink(missing_ok=True)
            path.symlink_to(target)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name, ForkServer() as server:
        folder = copy_of_quire(Path(name))
        for mutant in MUTANTS:
            with edited(folder, mutant):
                at, _ = server.find(folder, mutant, None)
            print(f"{mutant.name}: {at or 'not found'}", flush=True)
            if at is not None:
                found[mutant.name] = at
    FOUND_AT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    sys.exit(len(found) < len(MUTANTS))


if __name__ == "__main__":
    main()
