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
TIMEOUT_S = 3600  # a first prompt of 8,000 to 12,000 tokens takes minutes on a CPU, more on a busy one
# A schema bounds the answer: a small model may not stop, and Claude Code retries a truncated answer.
SHORT = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}
WORD = "heron-1729"  # only the tool can find it


def claude(url: str, prompt: str, *options: str, model: str = checks.MODEL) -> dict[str, Any]:
    """Run Claude Code and return its result."""
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_EXTRA_BODY": json.dumps({"output_config": {"format": {"type": "json_schema", "schema": SHORT}}}),
        "API_TIMEOUT_MS": str(TIMEOUT_S * 1000),
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
        timeout=TIMEOUT_S,
        check=False,
    )
    checks.expect(done.stdout.startswith("{"), (done.returncode, done.stdout[-300:], done.stderr[-300:]))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def answer_of(found: dict[str, Any]) -> str:
    checks.expect(found["subtype"] == "success" and not found["is_error"], found)
    return str(json.loads(found["result"])["answer"])


def chat() -> object:
    with forcing.proxy(checks.URL, None) as (url, passed):
        text = answer_of(claude(url, checks.QUESTION))
    checks.expect([one.status for one in passed] == [200], passed)
    return f"{text}; ignored: {passed[0].ignored}"


def tool() -> object:
    """A turn with the Bash tool: the model calls it, Claude Code runs it and sends its result back."""
    (checks.FOLDER / "word.txt").write_text(WORD)
    forced = forcing.Forced("Bash", {"command": "cat word.txt", "description": "Read the word"})
    with forcing.proxy(checks.URL, forced) as (url, passed):
        found = claude(url, "Read the word in word.txt.", "--allowedTools", "Bash(cat:*)")
    text = answer_of(found)
    checks.expect(found["num_turns"] == 2, found)
    checks.expect([one.status for one in passed] == [200, 200], passed)
    checks.expect([one.is_forced for one in passed] == [True, False], passed)
    (result,) = [block for block in passed[1].body["messages"][-1]["content"] if block["type"] == "tool_result"]
    checks.expect(result["content"] == WORD and not result["is_error"], result)
    return f"called, run and answered: {text}"


def error() -> object:
    found = claude(checks.URL, checks.QUESTION, model=checks.NO_MODEL)
    checks.expect(found["is_error"] and checks.NO_MODEL in found["result"], found)
    return found["result"]


if __name__ == "__main__":
    checks.run("Claude Code", {check.__name__: check for check in (chat, tool, error)})
