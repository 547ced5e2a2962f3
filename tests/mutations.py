"""Draws small bugs over all packages with a seed, and counts those that the tests find: `python -m tests.mutations`.

    python -m tests.mutations --count 200 --seed 1 --lines build/lines.json --out build/mutations.json [--nightly]

`MUTANTS` (tests/sim/mutants.py) are bugs that somebody thought of; these are drawn. Each runs the test files that
execute its line, cheap ones first, until one fails. `--lines` names the lines that each test file executes. It is made
from a run of `make test` (or `make nightly`) under coverage.py, which also prints the coverage:

    python -m tests.mutations --collect build/lines.json -- -n 3 --dist loadfile

A mutant that ends in a hang counts as found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import pytest

from tests.costs import slow_files

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800.0  # of one file of tests: only a hang takes longer
SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
Lines = dict[str, dict[str, list[int]]]  # test file -> source file -> executed lines


@dataclass(frozen=True)
class Mutation:
    """One edit of one file: the text from `start` to `end` is replaced."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    new: str
    is_in_function: bool


def mutations_of(path: Path) -> Iterator[Mutation]:
    """All edits of a file that this script can draw."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        return f"({source[slice(*place(node))].decode()})"

    def edit(node: ast.expr | ast.stmt, kind: str, new: str) -> Mutation:
        name = path.relative_to(ROOT).as_posix()
        return Mutation(name, node.lineno, *place(node), kind, new, node.lineno in in_functions)

    tree = ast.parse(source)
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_functions = {line for one in functions for line in range(one.body[0].lineno, (one.end_lineno or 0) + 1)}
    for node in executed(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
                yield edit(node, "swapped comparison", f"({text(left)} {SWAPPED[type(op)]} {text(right)})")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield edit(node, "off by one", str(value + 1))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
                yield edit(test, "negated condition", f"(not {text(test)})")
            case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield edit(node, "dropped line", "pass")
            case ast.Expr(value=ast.Call(func=func)) if not text(func).startswith(("(log.", "(warnings.", "(super()")):
                yield edit(node, "dropped line", "pass")


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without annotations and the bodies of `if TYPE_CHECKING`."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_unused = (
                isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            )
            if isinstance(child, ast.AST) and not is_unused:
                yield child
                yield from executed(child)


def draw(seed: int, count: int) -> list[Mutation]:
    """Draw as many of each kind. Numbers alone would be half of all."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for one in mutations_of(path):
            kinds[one.kind].append(one)
    rng = Random(seed)
    return [
        one
        for number, found in enumerate(kinds.values())
        for one in rng.sample(found, -(-(count - number) // len(kinds)))
    ]


def copy_with(mutation: Mutation, folder: Path) -> None:
    """Copy the project with one edit. Other files are symbolic links."""
    for name in ("quire", "tests", "benchmarks", "docs", "deploy", "requirements", ".github", ".ci"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    file = folder / mutation.file
    source = file.read_bytes()
    file.unlink()
    file.write_bytes(source[: mutation.start] + mutation.new.encode() + source[mutation.end :])
    compile(file.read_bytes(), file, "exec")


def files_for(mutation: Mutation, lines: Lines) -> list[str]:
    """The test files that execute the line of a mutant, cheap ones first. Lines of a module belong to all its users."""
    users = [test for test, files in lines.items() if mutation.file in files]
    found = [test for test in users if mutation.line in lines[test][mutation.file]]
    if not mutation.is_in_function or not found:  # Triton's interpreter executes copies of the lines
        found = users
    return sorted(found, key=lambda test: slow_files().get(test.removeprefix("tests/"), 0.0))


def find(mutation: Mutation, lines: Lines, options: Sequence[str]) -> str:
    """The test file that finds a mutant; empty if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_with(mutation, folder)
        for test in files_for(mutation, lines):
            environment = os.environ | {"PYTHONPATH": name}  # child processes import the copy too
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, test]
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{test} (hangs)"
            if done.returncode not in (0, 5):  # 5: all tests of the file are left to make nightly
                return test
    return ""


class FileContexts:
    """Tells coverage.py which test file runs, here and in child processes."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        import coverage

        os.environ["QUIRE_TEST_FILE"] = name = nodeid.partition("::")[0]
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(name)


COVERAGE = """[run]
branch = True
parallel = True
source = quire
data_file = {folder}/coverage
patch = subprocess
context = ${{QUIRE_TEST_FILE-none}}
"""


def collect(out: Path, options: Sequence[str]) -> None:
    """Run the tests under coverage.py, and write the lines that each test file executes, in child processes too."""
    import coverage

    folder = out.parent / "coverage"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "coveragerc"
    config.write_text(COVERAGE.format(folder=folder.absolute()))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"QUIRE_TEST_COVERAGE": "1"}, check=False)
    whole = coverage.Coverage(config_file=str(config))
    whole.combine()
    whole.save()
    data = whole.get_data()
    lines: Lines = defaultdict(dict)
    for file in data.measured_files():
        name = Path(file).relative_to(ROOT).as_posix()
        by_test: dict[str, list[int]] = defaultdict(list)
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in {one.rpartition("|")[2] for one in contexts} - {"", "none"}:
                by_test[context].append(line)
        for test, found in by_test.items():
            lines[test][name] = found
    out.write_text(json.dumps(lines))
    print(f"{whole.report(show_missing=False):.1f} % of lines and branches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/mutations.json"))
    parser.add_argument("--nightly", action="store_true")
    parser.add_argument("--collect", type=Path, metavar="FILE")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect.absolute(), options.pytest)
        return
    lines: Lines = json.loads(options.lines.read_text()) if options.lines else {}
    results = []
    for mutation in draw(options.seed, options.count):
        found_by = find(mutation, lines, ["--nightly"] if options.nightly else [])
        results.append({**asdict(mutation), "found_by": found_by})
        print(f"{mutation.file}:{mutation.line} {mutation.kind}: {found_by or 'SURVIVED'}", flush=True)
        options.out.write_text(json.dumps(results, indent=1))
    counts = Counter(bool(one["found_by"]) for one in results)
    print(f"{counts[True]} of {len(results)} found")


if __name__ == "__main__":
    main()
