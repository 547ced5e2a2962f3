"""Tests of the documentation: names exist, links are valid, commands run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.main import COMMANDS, FILES, app
from quire.cli.serve import QUESTION
from tests import families_page, options_page
from tests.server.rig import serving

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_NAMES = {"name", "n > 1", "key -> children", "transformers"}
# Additional options that make an example small enough for a test, by command.
SMALLER = {
    "sim": ["--requests", "60"],
    "bench": ["--rounds", "1", "--clients", "2", "--prompt-tokens", "8", "--output-tokens", "2", "--only", "speedup"],
}


@cache
def defined_names(path: Path) -> frozenset[str]:
    """All classes, functions, arguments, attributes, fields and constants of a file, and `Class.member` for members."""
    names: set[str] = set()
    add_names(ast.parse(path.read_text()), (), names)
    return frozenset(names)


def add_names(parent: ast.AST, classes: tuple[str, ...], names: set[str]) -> None:
    """Add what is defined below a node, within these classes."""
    for node in ast.iter_child_nodes(parent):
        inside = classes
        match node:
            case ast.ClassDef(name=name):
                names.add(name)
                inside = (*classes, name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.update((name, *(f"{one}.{name}" for one in classes)))
                names.update(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.update((name, *(f"{one}.{name}" for one in classes)))
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                names.update(f"{one}.{name}" for one in classes)
            case _:
                pass
        add_names(node, inside, names)


def defines(name: str) -> bool:
    """Whether a file of the package or of the tests defines a name. Only files that contain it are parsed."""
    word = name.rpartition(".")[2]
    return any(name in defined_names(path) for path, words in sources() if word in words)


@cache
def sources() -> list[tuple[Path, frozenset[str]]]:
    """All files with their words."""
    paths = [*(ROOT / "quire").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [(path, frozenset(re.findall(r"\w+", path.read_text()))) for path in paths]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def quoted(path: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


def exists(name: str) -> bool:
    if "/" in name:
        return (ROOT / name).exists()
    if name.startswith("quire "):
        return name.split()[1] in COMMANDS
    if name.startswith("make "):
        return name.split()[1] in make_targets()
    if re.fullmatch(r"quire(\.\w+)+", name):
        return importlib.import_module(name) is not None
    return name in NOT_NAMES or defines(name) or defines(name.removesuffix("s"))


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "internals.md", "source-terms.md"])
def test_every_name_in_the_architecture_exists(page: str) -> None:
    missing = sorted(name for name in quoted(ROOT / "docs" / page) if not exists(name))
    assert not missing


def test_the_check_itself_can_fail() -> None:
    for name in ("Scheduler.explode", "explode.schedule", "quire/core/nothing.py", "make coffee", "FooBar"):
        assert not exists(name)
    assert exists("Scheduler.schedule")


def test_every_module_is_in_the_internals() -> None:
    page = (ROOT / "docs/internals.md").read_text()
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "quire").rglob("[a-z]*.py")]
    listed_by_name = {"quire/errors.py", "quire/sizes.py", "quire/version.py"}  # in the list of layers
    assert not [name for name in modules if name not in page and name not in listed_by_name]


def test_the_reference_of_options_is_current() -> None:
    assert options_page.PAGE.read_text(encoding="utf-8") == options_page.page(), "run `make docs`"


def test_the_table_of_families_is_current() -> None:
    assert families_page.PAGE.read_text(encoding="utf-8") == families_page.page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_are_valid(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of a page in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def commands(page: Path) -> list[list[str]]:
    """The commands in the code blocks of a page, without comments."""
    found = []
    for block in blocks(page.read_text(), ""):
        for line in block.splitlines():
            command = re.split(r"\s{2,}|\s#", line)[0].strip()
            if command.split("/")[-1].split(" ")[0] in ("make", "quire"):
                found.append(shlex.split(command))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/simulator.md"], ids=lambda page: page.name)
@pytest.mark.nightly
def test_commands_run_as_written(page: Path, tmp_path: Path, default_model: Path) -> None:
    del default_model  # is here now
    todo = commands(page)
    assert len(todo) >= 5
    for words in todo:
        if words[0] == "make":
            assert words[1] in make_targets(), words
            continue
        small = SMALLER.get(words[1], [])
        if any(word.endswith(".jsonl") and "--save-trace" not in words for word in words):
            small = []  # the number of requests is given by the trace
        command = [sys.executable, "-m", "quire", *words[1:], *small]
        outcome = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, input="Hi\n/exit\n"
        )
        assert outcome.returncode == 0, f"{words}: {outcome.stderr}"
        assert outcome.stdout


@pytest.fixture(scope="module")
def address(default_model: Path) -> Iterator[str]:
    """URL of a server as started in the README, except for the port."""
    del default_model  # is here now
    with serving("--kv-memory", "512M") as server:
        yield server.url


def at(address: str, text: str) -> str:
    """Replace the default server address of the pages by that of the test server."""
    return text.replace("http://127.0.0.1:8000", address)


_SERVED = ("serving", "batch", "keys", "page", "caching", "metrics", "tools", "structured", "clients")
SERVED = [ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in _SERVED)]


@pytest.mark.parametrize("page", [*SERVED, ROOT / "docs/generating.md"], ids=lambda page: page.name)
@pytest.mark.kept("README")
def test_python_runs_as_written(page: Path, address: str) -> None:
    examples = blocks(at(address, page.read_text()), "python")
    assert examples or page in SERVED
    for example in examples:
        command = [sys.executable, "-W", "error", "-c", example]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, f"{example}: {outcome.stderr}"
        assert outcome.stdout
        if QUESTION in example:
            assert "The capital city of Japan is Tokyo." in outcome.stdout


@pytest.mark.parametrize("page", SERVED, ids=lambda page: page.name)
def test_curl_runs_as_written(page: Path, address: str) -> None:
    for block in blocks(at(address, page.read_text()), ""):
        for command in re.findall(r"^curl (?:.*\\\n)*.*$", block, re.MULTILINE):
            words = ["bash", "-c", command.replace("curl ", "curl --fail-with-body ", 1)]
            outcome = subprocess.run(words, capture_output=True, text=True, check=False)
            assert outcome.returncode == 0, f"{command}: {outcome.stdout} {outcome.stderr}"
            assert outcome.stdout
            assert '"error":{' not in outcome.stdout


def test_every_command_exists_and_has_help() -> None:
    for name in COMMANDS:
        command = getattr(importlib.import_module(f"quire.cli.{FILES.get(name, name)}"), name)
        assert command.__doc__
        outcome = CliRunner().invoke(app, [name, "-h"])
        assert outcome.stdout.startswith(f"Usage: root {name} [OPTIONS]"), outcome.output


def test_make_serve_starts_a_server_and_prints_an_answer(default_model: Path) -> None:
    """Uses the venv of the tests, which is the one that `make serve` would create."""
    del default_model  # is here now
    if not (ROOT / ".venv/bin/quire").exists():
        pytest.skip("the tests run in another venv")
    command = ["make", "serve", "PORT=0", "ARGS=--kv-memory 256M"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  cache: ") and "  once more:\n" in lines:
                break
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
    text = "".join(lines)
    assert "quire serves smollm2-135m-instruct at http://127.0.0.1:" in text
    assert f"  > {QUESTION}\n  The capital city of Japan is Tokyo.\n" in text
    for claim in re.findall(r"^      cache: .*$", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert claim.strip() in text  # the README shows the same line
    assert "export OPENAI_BASE_URL=http://127.0.0.1:" in text
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:" in text


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    for path in (ROOT / "docs/decisions").glob("0*.md"):
        assert f"({path.name})" in index
        title = path.read_text().splitlines()[0].removeprefix(f"# {path.name[:4]} ")
        assert title in index


def test_no_page_contains_machine_paths() -> None:
    for page in [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]:
        assert not re.search(r"/(work|root|home)/", page.read_text()), page.name
