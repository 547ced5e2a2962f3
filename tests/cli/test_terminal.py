"""Text of files, templates and servers cannot control the terminal, whichever command prints it. Keys are hidden."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import terminal
from quire.engine.process import ShortFormatter
from tests.cli.runs import Terminal, quire
from tests.cli.scripted import Reply, ScriptedServer, document, refusal
from tests.tiny import write_tiny_model

# The title of the window, a bell, a colour, a cleared screen by a one-byte CSI, a backspace and a reversed line.
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\x08\u202e"
HARMFUL = ("\x1b]0", "\x07", "\x1b[31m", "\x9b", "\x08", "\u202e")
REFUSES = "{{ raise_exception(" + json.dumps(HOSTILE + " is refused") + ") }}"
SHORT = ("--kv-memory", "1M", "--max-tokens", "2")


def at_a_terminal(*arguments: str, typed: str = "", env: dict[str, str] | None = None) -> str:
    """What a terminal receives. `typed` is typed at the prompt."""
    with Terminal(*arguments, env=env) as process:
        if typed:
            at = process.wait_for("> ")
            process.type(typed)
            process.wait_for("> ", after=at)
            process.type("\x04")
        process.exit_code()
        return process.screen


def check(screen: str, word: str = "owned") -> None:
    """The text was printed, and nothing in it controls the terminal."""
    assert word in screen
    assert [one for one in HARMFUL if one in screen] == [], screen


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template refuses every conversation."""
    return write_tiny_model(tmp_path_factory.mktemp("refusing") / "tiny", template=REFUSES)


def with_config(folder: Path, **fields: Any) -> Path:
    write_tiny_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize("command", ["generate", "run"])
@pytest.mark.kept("run")
def test_a_templates_refusal_is_escaped(refusing: Path, command: str) -> None:
    named = ("--model", str(refusing), "Hi") if command == "generate" else (str(refusing), "Hi")
    check(at_a_terminal(command, *named, *SHORT))
    outcome = quire(command, *named, *SHORT)  # and in a pipe
    check(outcome.stdout + outcome.stderr)
    assert "\\u001b]0;owned\\u0007" in outcome.stderr


def test_a_templates_refusal_is_escaped_in_a_chat(refusing: Path) -> None:
    check(at_a_terminal("chat", "--model", str(refusing), *SHORT, typed="Hi\n"))


def test_a_template_is_printed_harmlessly_at_a_terminal_and_unchanged_in_a_pipe(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", template="{# " + HOSTILE[:-1] + " #}")
    check(at_a_terminal("show", str(folder), "--template"))
    assert quire("show", str(folder), "--template").stdout == "{# " + HOSTILE[:-1] + " #}\n"


FIELDS = (
    {"architectures": [HOSTILE]},
    {"model_type": HOSTILE, "architectures": None},
    {"torch_dtype": HOSTILE},
    {"rope_scaling": {"rope_type": HOSTILE, "factor": 2.0}},
    {"hidden_act": HOSTILE},
    {"quantization_config": {"quant_method": HOSTILE}},
)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
@pytest.mark.kept("architectures", "rope_scaling")
def test_fields_of_a_config_are_escaped(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = with_config(tmp_path / "tiny", **fields)
    for command in (("show", str(folder)), ("doctor", str(folder)), ("generate", "Hi", "--model", str(folder), *SHORT)):
        screen = at_a_terminal(*command)
        assert [one for one in HARMFUL if one in screen] == [], (command, screen)


@pytest.mark.parametrize("command", [("models",), ("models", "--json"), ("doctor",)])
@pytest.mark.kept("command0")
def test_names_of_files_in_the_cache_are_escaped(tmp_path: Path, command: Sequence[str]) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"broken{HOSTILE}.gguf").write_bytes(b"GGUF")
    check(at_a_terminal(*command, env={"QUIRE_CACHE": str(tmp_path)}))


def test_questions_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda text: not asked.append(text))  # type: ignore[func-returns-value]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    terminal.confirm_deletion("it", f"Delete {HOSTILE}?", is_confirmed=False)
    check(asked[0])


@pytest.mark.parametrize("reply", [refusal(400, HOSTILE), refusal(500, HOSTILE), Reply(502, [HOSTILE.encode()], {})])
@pytest.mark.parametrize("command", [("generate", "Hi"), ("ps",), ("top", "--once"), ("load", "m"), ("cancel", "m")])
def test_errors_of_servers_are_escaped(command: Sequence[str], reply: Reply) -> None:
    with ScriptedServer() as server:
        server.answers(*[reply] * 8)
        screen = at_a_terminal(*command, "--server", server.url)
    assert [one for one in HARMFUL if one in screen] == [], screen


def test_names_of_a_server_are_escaped() -> None:
    found = {"data": [{"id": HOSTILE, "max_model_len": 60}], "models": [], "requests": [], "state": HOSTILE}
    for command in (("generate", "Hi"), ("ps",), ("models",), ("load", "m")):
        with ScriptedServer() as server:
            server.answers(*[document(found)] * 8)
            screen = at_a_terminal(*command, env={"QUIRE_SERVER": server.url})
        assert [one for one in HARMFUL if one in screen] == [], screen


def test_lines_of_a_trace_are_escaped(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0.0, "prompt_tokens": 64, "output_tokens": 4, "tenant": HOSTILE},
        {"arrival_s": 0.5, "prompt_tokens": 64, "output_tokens": 4, "tenant": "other"},
    ]
    path = tmp_path / f"trace{HOSTILE.replace('/', '')}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check(at_a_terminal("sim", str(path)), r"\u001b]0;ow")  # the rest of the name is on the next line
    path.write_text(json.dumps({**lines[0], HOSTILE: HOSTILE}))
    screen = at_a_terminal("sim", str(path))
    assert [one for one in HARMFUL if one in screen] == [], screen


def test_tables_and_texts_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(terminal.table(["name"], [[HOSTILE]], texts=["name"]), f"{HOSTILE}\ttab\nline [bold]")
    printed = capsys.readouterr().out
    check(printed)
    assert "line [bold]\n" in printed


def test_warnings_of_commands_are_escaped() -> None:
    record = logging.LogRecord("quire", logging.WARNING, "", 0, "%s\nline", (HOSTILE,), None)
    check(ShortFormatter("%(message)s").format(record))


def test_a_json_document_keeps_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: "\x7f\x85\ud800" + HOSTILE}
    terminal.echo(json.dumps(value, ensure_ascii=False))
    printed = capsys.readouterr().out
    check(printed)
    assert json.loads(printed) == value


def test_every_module_prints_through_the_escaping_functions() -> None:
    """Answers have a rule of their own there; a bar that only counts has no text of others."""
    for path in Path(terminal.__file__).parent.glob("*.py"):
        if path.name != "terminal.py":
            found = re.findall(
                r"typer\.(?:s?echo|confirm|prompt)\(|(?<![\w.])print\(|sys\.std(?:out|err)\.write\(", path.read_text()
            )
            assert found == [], path.name
            consoles = re.findall(r"\bConsole\((?!stderr=True\))", path.read_text())
            assert consoles == [] or path.name == "model_admin.py", path.name  # `quire top` uses `printable`


SCRIPT = """
import sys
from pathlib import Path
from quire.cli.main import hide_keys
before = list(sys.argv)
hide_keys()
assert sys.argv == before
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").replace(b"\\0", b" ").decode(errors="replace"))
"""
KEY = "sk-secret-00000001"


def shown(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().rpartition("\n")[2]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux has the file")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--api-key", KEY, "--port", "1"), f"serve --api-key {'*' * len(KEY)} --port 1"),
        (("--api-key=" + KEY, "x"), f"--api-key={'*' * len(KEY)} x"),
        (("--admin-api-key", KEY, "--api-key", "sk-2"), f"--admin-api-key {'*' * len(KEY)} --api-key ****"),
        (("--api-key", "ä" * 9), f"--api-key {'*' * 18}"),
        (("chat", KEY), f"chat {KEY}"),
        (("--api-key",), "--api-key"),
        (("--api-key", ""), "--api-key"),
    ],
)
def test_keys_are_hidden(arguments: tuple[str, ...], expected: str) -> None:
    assert shown(*arguments).endswith(expected)
