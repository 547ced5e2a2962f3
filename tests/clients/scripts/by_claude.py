"""Claude Code in print mode, with its own home and folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import checks
import forcing

CLAUDE = Path(os.environ["QUIRE_ENVIRONMENT"]) / "node_modules" / ".bin" / "claude"


def claude(url: str, prompt: str, *options: str, model: str = checks.MODEL) -> dict[str, Any]:
    """Run Claude Code and return its result."""
    form = {"type": "json_schema", "schema": forcing.SHORT}
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_EXTRA_BODY": json.dumps({"output_config": {"format": form}}),
        "API_TIMEOUT_MS": str(forcing.TIMEOUT_S * 1000),
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "HOME": str(checks.FOLDER),
    }
    command = [str(CLAUDE), "-p", prompt, "--model", model, "--output-format", "json", *options]
    done = subprocess.run(
        command,
        cwd=checks.FOLDER,
        env={"PATH": os.environ["PATH"], **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=forcing.TIMEOUT_S,
        check=False,
    )
    checks.expect(done.stdout.startswith("{"), (done.returncode, done.stdout[-300:], done.stderr[-300:]))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def answered(url: str, prompt: str, *options: str) -> str:
    found = claude(url, prompt, *options)
    checks.expect(found["subtype"] == "success" and not found["is_error"], found)
    return str(json.loads(found["result"])["answer"])


def chat() -> object:
    return forcing.chat(lambda url: answered(url, checks.QUESTION))


def tool() -> object:
    """A turn with the Bash tool: the model calls it, Claude Code runs it and sends its result back."""
    forced = forcing.Forced("Bash", {"command": "cat word.txt", "description": "Read the word"})
    text, body = forcing.tool(forced, lambda url, prompt: answered(url, prompt, "--allowedTools", "Bash(cat:*)"))
    (result,) = [block for block in body["messages"][-1]["content"] if block["type"] == "tool_result"]
    checks.expect(result["content"] == forcing.WORD and not result["is_error"], result)
    return text


def error() -> object:
    found = claude(checks.URL, checks.QUESTION, model=checks.NO_MODEL)
    checks.expect(found["is_error"] and checks.NO_MODEL in found["result"], found)
    return found["result"]
