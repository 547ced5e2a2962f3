"""Draws small bugs over all packages with a seed, and counts those that the tests find: `python -m tests.mutations`.

    python -m tests.mutations --count 200 --seed 1 --covered build/covered --out build/mutations.json

`MUTANTS` (tests/sim/mutants.py) are bugs that somebody thought of; these are drawn.

Each mutant runs tests of `make test` that execute its line, the nearest and cheapest first, until one fails or they
took `LIMIT_CPU_S`. A test that fails must pass without the mutant. The rest runs tests that are left to `make nightly`,
in the same way, from the files with a test that executes the line.

`--covered` is a folder that names the lines that each test executes, and what the test takes. It is made from a run of
`make test` under coverage.py, which also prints the coverage:

    python -m tests.mutations --collect build/covered -- -n 2 --dist loadfile

A mutant that ends in a hang counts as found. `--out` is read again: mutants that were found do not run again.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.sim.search import ROOT, MutantServer, copy_of_quire, edited

LIMIT_S = 1800.0  # of one file of tests: only a hang takes longer
TEST_LIMIT_S = "400"  # of one test; some wait for 300 s until they fail
LIMIT_CPU_S = 300.0  # of the tests that a mutant runs
TEST_S = 0.05  # at least, of each test
UNKNOWN_S = 1.0  # of a test that was not measured
COMMANDS = ("make test", "make nightly")
NO_TESTS = 5  # pytest's exit code
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
REWRITE_WARNING = "pytest.PytestAssertRewriteWarning"
# What test files import, and what takes long.
IMPORTED = ("hypothesis", "numpy", "pytest", "torch", "transformers", "triton", "starlette", "openai", "anthropic")
SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


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


@functools.cache
def all_mutations() -> dict[str, list[Mutation]]:
    """All edits of the package, by kind."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for one in mutations_of(path):
            kinds[one.kind].append(one)
    return kinds


def draw(seed: int, count: int) -> list[Mutation]:
    """Draw as many of each kind. Numbers alone would be half of all."""
    kinds = all_mutations()
    rng = Random(seed)
    return [
        one
        for number, found in enumerate(kinds.values())
        for one in rng.sample(found, -(-(count - number) // len(kinds)))
    ]


def copy_of_project(folder: Path) -> Path:
    """Copy the project as symbolic links."""
    copy_of_quire(folder)
    for name in ("benchmarks", "docs", "deploy", "requirements", ".github", ".ci"):
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def mutated(mutation: Mutation) -> dict[str, str]:
    """The file that a mutant changes, with its new contents."""
    source = (ROOT / mutation.file).read_bytes()
    return {mutation.file: (source[: mutation.start] + mutation.new.encode() + source[mutation.end :]).decode()}


class Covered:
    """The lines that each test executes, and what it takes."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()
        self._costs: dict[str, dict[str, Any]] = json.loads((folder / "costs.json").read_text())
        self._left_out = defaultdict(list)  # tests by file
        for test in (folder / "left_out.txt").read_text().splitlines():
            self._left_out[test.partition("::")[0]].append(test)

    def tests_for(self, mutation: Mutation, command: str) -> list[str]:
        """The tests of a command for the line of a mutant, the nearest and cheapest first, within the limit.

        Those of `make test` execute the line; those of `make nightly` are the others of their files. Lines of a module
        belong to all its users.
        """
        contexts = self._data.contexts_by_lineno(str(ROOT / mutation.file))
        found = set(contexts.get(mutation.line, ())) - {""}
        if not mutation.is_in_function or not found:  # Triton's interpreter executes copies of the lines
            found = set().union(*contexts.values()) - {""}
        package, _, stem = mutation.file.removeprefix("quire/").removesuffix(".py").rpartition("/")

        def distance(test: str) -> tuple[bool, bool, float]:
            file = test.partition("::")[0]
            return stem not in file, not file.startswith(f"tests/{package}"), self._cost_of(test)

        tests = sorted(found, key=distance)
        if command != "make test":
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            tests = [test for file in files for test in self._left_out[file]]
        chosen, left_s = [], LIMIT_CPU_S
        for test in tests:
            if self._cost_of(test) <= left_s:
                left_s -= self._cost_of(test)
                chosen.append(test)
        return chosen

    def _cost_of(self, test: str) -> float:
        return max(TEST_S, self._costs[test]["cpu"]) if test in self._costs else UNKNOWN_S


class Finder:
    """Runs tests in a copy of the project. Each thread has its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = copy_of_project(folder)
        # Child processes import the copy too.
        self._environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        self._server = MutantServer(*IMPORTED, environment=self._environment, limit_s=LIMIT_S)

    def __enter__(self) -> Finder:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def find(self, mutation: Mutation, tests: Sequence[str], command: str) -> dict[str, str] | None:
        """Run tests of a command. Returns what is noted of a mutant that makes one fail."""
        tests = list(tests)
        while tests:
            with edited(self._folder, mutated(mutation)):
                if not (output := self._failure([*tests, "--nightly"])):
                    return None
            failed = _FAILED.search(output)
            test = failed[1] if failed and failed[1] in tests else ""
            # Without a name, no test ran: the mutant ends the import of a module, or hangs.
            if not self._failure([*([test] if test else tests), "--nightly"]):
                return {"found_by": test or tests[0], "found_in": command, "output": output[-500:]}
            print(f"fails without a mutant: {test or tests}", flush=True)
            tests = [one for one in tests if one != test] if test else []
        return None

    def _failure(self, arguments: Sequence[str]) -> str:
        """Run tests here, up to the first that fails. Returns the output, empty if all pass."""
        # Plugins were imported before pytest could rewrite their assertions.
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", TEST_LIMIT_S, "-W", f"ignore::{REWRITE_WARNING}"]
        code, output = self._server.output_of(self._folder, "pytest", *options, *arguments)
        return "" if code in (0, NO_TESTS) else output


class TestContexts:
    """Tells coverage.py which test runs, here and in child processes."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        import coverage

        os.environ["COVERED_TEST"] = nodeid
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(nodeid)


COVERAGE = """[run]
branch = True
parallel = True
source = quire
data_file = {folder}/coverage
patch = subprocess
context = ${{COVERED_TEST-}}
"""


def collect(folder: Path, options: Sequence[str]) -> None:
    """Run the tests under coverage.py, and write the lines that each executes, in child processes too."""
    import coverage

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "coveragerc"
    config.write_text(COVERAGE.format(folder=folder.absolute()))
    tests = [sys.executable, "-m", "pytest"]
    left_out = [*tests, "-q", "--collect-only", "--left-out"]
    listed = subprocess.run(left_out, cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / "left_out.txt").write_text("".join(line + "\n" for line in listed.stdout.splitlines() if "::" in line))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", *tests[1:]]
    command += [f"--costs={folder / 'costs.json'}", *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"COVERED_TESTS": "1"}, check=False)
    whole = coverage.Coverage(config_file=str(config))
    whole.combine()
    whole.save()
    print(f"{whole.report(show_missing=False):.1f} % of lines and branches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--covered", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("build/mutations.json"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect.absolute(), options.pytest)
        return
    covered = Covered(options.covered)
    results: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {json.dumps(one["mutation"]) for one in results}
    left = [one for one in draw(options.seed, options.count) if json.dumps(asdict(one)) not in known]

    def note(mutation: Mutation, found: dict[str, str]) -> None:
        left.remove(mutation)
        results.append({"mutation": asdict(mutation), **found})
        print(f"{mutation.file}:{mutation.line} {mutation.kind}: {found['found_in']} {found['found_by']}", flush=True)
        options.out.write_text(json.dumps(results, indent=1))

    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor() as pool:
        for command in COMMANDS:
            queue = deque(left)

            def work(folder: Path, command: str = command, queue: deque[Mutation] = queue) -> None:
                with Finder(folder) as finder:
                    while queue:
                        mutation = queue.popleft()
                        tests = covered.tests_for(mutation, command)
                        print(f"{mutation.file}:{mutation.line} {mutation.kind}: {len(tests)} tests", flush=True)
                        if (found := finder.find(mutation, tests, command)) is not None:
                            note(mutation, found)

            folders = [Path(name) / f"{command} {number}" for number in range(options.jobs)]
            for future in [pool.submit(work, folder) for folder in folders]:
                future.result()
    for mutation in left:
        print(f"{mutation.file}:{mutation.line} {mutation.kind}: survived")
    counts = Counter(one["found_in"] for one in results)
    print(f"of {options.count}: {counts['make test']} by make test, {counts['make nightly']} only by make nightly")


if __name__ == "__main__":
    main()
