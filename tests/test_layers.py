"""Tests of code rules that no linter checks: imports of the core, length limits, unsafe calls, no timing in tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import SLOW_FILES_S

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "quire").rglob("*.py"))
CORE = [*sorted((ROOT / "quire/core").glob("*.py")), ROOT / "quire/errors.py"]

# Standard library modules that the core may not use: the same calls must produce the same plans.
NOT_FOR_CORE = {"asyncio", "datetime", "logging", "multiprocessing", "os", "random", "secrets", "threading", "time"}

# Modules and calls that execute their input. Data of a request, trace or checkpoint must never reach them.
UNSAFE_MODULES = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}


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


def test_core_files_stay_under_400_lines() -> None:
    long = {path.name: count for path in CORE if (count := len(path.read_text().splitlines())) >= 400}
    assert not long


def test_functions_stay_under_70_lines() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 >= 70:
                    long.append(f"{path.name}:{node.lineno} {node.name}")
    assert not long


def test_no_code_executes_its_input() -> None:
    for path in SOURCES:
        assert not UNSAFE_MODULES & {name.split(".")[0] for name in imported(path)}, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in UNSAFE_CALLS, f"{path.name}:{node.lineno}"


def test_no_test_measures_time() -> None:
    """Tests must not fail on a busy machine. `tests/waiting.py` waits for events; CPU time may be limited."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert node.attr not in ("monotonic", "monotonic_ns", "perf_counter"), f"{path.name}:{node.lineno}"


def test_the_slow_files_exist() -> None:
    assert [name for name in SLOW_FILES_S if not (ROOT / "tests" / name).is_file()] == []


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
