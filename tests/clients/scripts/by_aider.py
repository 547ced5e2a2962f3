"""aider's command line, in its own folder. The text of the edit is forced: a small model cannot write one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checks

LINE = "print('hello from quire')"
EDIT = f"hello.py\n```\n{LINE}\n```\n"
PLAIN = ("--no-git", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-show-model-warnings")
QUIET = ("--yes-always", "--no-pretty", "--no-fancy-input", "--map-tokens", "0", "--no-suggest-shell-commands")


def aider(prompt: str, *options: str, model: str = checks.MODEL, more: dict[str, Any] | None = None) -> str:
    """Run aider and return its output."""
    settings = {
        "name": f"openai/{model}",
        "edit_format": "whole",
        "use_temperature": 0,
        "extra_params": {"max_tokens": 64, **(more or {})},
    }
    path = checks.FOLDER / "settings.yml"
    path.write_text(json.dumps([settings]))  # JSON is valid YAML
    aider = str(Path(sys.executable).with_name("aider"))
    command = [aider, "--model", f"openai/{model}", "--model-settings-file", str(path), *PLAIN, *QUIET]
    given = {"OPENAI_API_BASE": f"{checks.URL}/v1", "OPENAI_API_KEY": "none", "HOME": str(checks.FOLDER)}
    done = subprocess.run(
        [*command, *options, "--message", prompt],
        cwd=checks.FOLDER,
        env={**os.environ, **given},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.stdout + done.stderr


def chat() -> object:
    output = aider(checks.QUESTION, "--chat-mode", "ask")
    answer, is_counted, _ = output.rpartition("Repo-map: disabled")[2].partition("Tokens:")
    checks.expect(is_counted and answer.strip() and "litellm." not in answer, output[-400:])
    return answer.strip()


def edit() -> object:
    """A whole file, streamed, forced by quire's `structured_outputs`."""
    more = {"extra_body": {"structured_outputs": {"choice": [EDIT]}}}
    output = aider("Write hello.py.", "hello.py", more=more)
    text = (checks.FOLDER / "hello.py").read_text()
    checks.expect(text.strip() == LINE, (text, output[-300:]))
    return f"hello.py: {text}"


def error() -> object:
    return checks.expect_no_model(aider(checks.QUESTION, "--chat-mode", "ask", model=checks.NO_MODEL))[-200:]
