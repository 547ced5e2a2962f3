"""Tests of code rules that no linter checks: imports of the core, circles, budgets, unsafe calls, choice of tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.costs import slow_files
from tests.request_path import distinct, files_entered
from tests.selection import mostly_nightly

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "quire").rglob("*.py"))
CORE = [*sorted((ROOT / "quire/core").rglob("*.py")), ROOT / "quire/errors.py"]

# Standard library modules that the core may not use: the same calls must produce the same plans.
NOT_FOR_CORE = {"asyncio", "datetime", "logging", "multiprocessing", "os", "random", "secrets", "threading", "time"}

# Modules and calls that execute their input. Data of a request, trace or checkpoint must never reach them.
UNSAFE_MODULES = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}
# Called on a module or an object. yaml.load may create any object; recv_pyobj is a pickle on a socket of ZeroMQ.
UNSAFE_ATTRIBUTES = {
    *(
        "torch.load",
        "numpy.load",
        "np.load",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
    ),
    *("recv_pyobj", "send_pyobj", "ProcessPoolExecutor", "jinja2.Environment", "jinja2.Template"),
}
# Arguments that allow code of a file, or a shell.
UNSAFE_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}


# At most so many statements and files. A package that needs more raises its numbers in the same commit, which says why.
# Decision 0048 allows 41,000 statements in 320 files of quire, and 44,000 statements of tests.
BUDGETS = {
    "quire/backends": (10_630, 75), "quire/batch": (390, 2), "quire/bench": (610, 3), "quire/cli": (3_440, 16),
    "quire/core": (4_220, 15), "quire/engine": (5_420, 23), "quire/scale": (1_410, 9), "quire/server": (6_910, 26),
    "quire/sim": (580, 4), "quire/text": (3_740, 15), "quire/weights": (3_480, 20),
    "benchmarks": (2_790, 25), "tests": (43_920, 377),
}  # fmt: skip
MAX_FILES_ENTERED = 35  # by a chat request, its end and its line of the log included


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path.name)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_is_standard_library_only(path: Path) -> None:
    for name in imported(path):
        top = name.split(".")[0]
        if top == "quire":
            assert name.startswith(("quire.core", "quire.errors")), f"{path.name} imports {name}"
        else:
            assert top in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert top not in NOT_FOR_CORE, f"{path.name} imports {name}"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def targets(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of quire that a file imports, anywhere in it. A name of a package may be a module or not."""
    found = set(imported(path))
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & {*modules}
            if submodules:
                found = found - {node.module or ""} | submodules
    return found & {*modules}


def test_imports_have_no_circle() -> None:
    """Not for types and not within functions either: a circle means that two files are one idea."""
    modules = {module_of(path): path for path in SOURCES}
    graph = {name: targets(path, modules) - {name} for name, path in modules.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def num_statements(path: Path) -> int:
    """Statements are what a reader must understand: not blank lines, comments, docstrings and line breaks."""
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        for node in ast.walk(parse(path))
    )


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_budget(package: str) -> None:
    max_statements, max_files = BUDGETS[package]
    paths = list((ROOT / package).rglob("*.py"))
    assert len(paths) <= max_files
    assert sum(map(num_statements, paths)) <= max_statements


@pytest.mark.nightly
@pytest.mark.usefixtures("default_model")
def test_a_chat_request_enters_few_files() -> None:
    files = distinct(files_entered())
    assert len(files) <= MAX_FILES_ENTERED, sorted(files)


def test_every_package_has_a_budget() -> None:
    packages = {
        f"quire/{path.relative_to(ROOT / 'quire').parts[0]}" for path in SOURCES if path.parent != ROOT / "quire"
    }
    assert packages == {name for name in BUDGETS if name.startswith("quire/")}


def test_functions_stay_under_70_lines() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 >= 70:
                    long.append(f"{path.name}:{node.lineno} {node.name}")
    assert not long


def dotted(node: ast.expr) -> str:
    """The name that is called; of what has no name, its attributes."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case _:
            return ""


def unsafe_uses(path: Path) -> list[str]:
    """Return the imports and calls of a file that could execute their input."""
    found = [f"imports {name}" for name in imported(path) if name.split(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in UNSAFE_CALLS or {name, name.rpartition(".")[2]} & UNSAFE_ATTRIBUTES:
            found.append(f"line {node.lineno} calls {name}")
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in UNSAFE_ARGUMENTS and not is_off:
                found.append(f"line {node.lineno} sets {keyword.arg}")
    return found


def test_no_code_executes_its_input() -> None:
    assert {path.name: uses for path in SOURCES if (uses := unsafe_uses(path))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval(x)",
        "torch.load(f)",
        "socket.recv_pyobj()",
        "run(x, shell=True)",
    ],
)
def test_unsafe_code_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert len(unsafe_uses(tmp_path / "x.py")) == 1


def unbounded_caches(path: Path) -> list[str]:
    """Functions that keep every text or body that they were called with."""
    found = []
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if not decorators & {"cache", "functools.cache"}:
            continue
        kinds = {ast.unparse(one.annotation) for one in node.args.args if one.annotation is not None}
        if kinds & {"str", "bytes", "Any", "object"}:
            found.append(node.name)
    return found


def test_no_unbounded_cache_keeps_texts_of_requests() -> None:
    assert [name for path in SOURCES for name in unbounded_caches(path)] == []


def test_no_test_measures_time() -> None:
    """Tests must not fail on a busy machine. `tests/waiting.py` waits for events; CPU time may be limited."""
    clocks = ("monotonic", "monotonic_ns", "perf_counter")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not any(f"time.{clock}" in path.read_text() for clock in clocks):
            continue  # parsing all of them takes seconds
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert node.attr not in clocks, f"{path.name}:{node.lineno}"


def test_the_slow_files_exist() -> None:
    assert [name for name in slow_files() if not (ROOT / "tests" / name).is_file()] == []


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['quire', '--help']\n"
        "from quire.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'starlette', 'mlx', 'ray', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "sim" in outcome.stdout


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
