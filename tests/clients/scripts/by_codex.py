"""`codex exec` with its own home, in which only the provider and the model are configured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import checks
import forcing

CODEX = Path(os.environ["QUIRE_ENVIRONMENT"]) / "node_modules" / ".bin" / "codex"
TIMEOUT_S = 3600  # a first prompt of 8,000 to 12,000 tokens takes minutes on a CPU, more on a busy one
WORD = "heron-1729"  # only the tool can find it
CONFIG = """
model = "{model}"
model_provider = "quire"

[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {timeout_ms}
"""
# A schema bounds the answer: a small model may not stop.
SHORT = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}


def codex(url: str, prompt: str, *options: str, model: str = checks.MODEL) -> subprocess.CompletedProcess[str]:
    home = checks.FOLDER / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(url=url, model=model, timeout_ms=TIMEOUT_S * 1000))
    return subprocess.run(
        [str(CODEX), "exec", "--skip-git-repo-check", *options, prompt],
        cwd=checks.FOLDER,
        env={"PATH": os.environ["PATH"], "HOME": str(checks.FOLDER), "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def answer_of(done: subprocess.CompletedProcess[str]) -> str:
    checks.expect(done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-600:]))
    found = json.loads(done.stdout)
    checks.expect(isinstance(found["answer"], str), found)
    return str(found["answer"])


def shaped() -> tuple[str, str]:
    path = checks.FOLDER / "schema.json"
    path.write_text(json.dumps(SHORT))
    return "--output-schema", str(path)


def chat() -> object:
    with forcing.proxy(checks.URL, None) as (url, passed):
        text = answer_of(codex(url, checks.QUESTION, *shaped()))
    checks.expect([one.status for one in passed] == [200], passed)
    return f"{text}; ignored: {passed[0].ignored}"


def tool() -> object:
    """A turn with the shell tool: the model calls it, Codex runs it and sends its output back."""
    (checks.FOLDER / "word.txt").write_text(WORD)
    with forcing.proxy(checks.URL, forcing.Forced("exec_command", {"cmd": "cat word.txt"})) as (url, passed):
        text = answer_of(codex(url, "Read the word in word.txt.", *shaped()))
    checks.expect([one.status for one in passed] == [200, 200], passed)
    checks.expect([one.is_forced for one in passed] == [True, False], passed)
    result = passed[1].body["input"][-1]
    checks.expect(result["type"] == "function_call_output" and WORD in result["output"], result)
    return f"called, run and answered: {text}"


def error() -> object:
    done = codex(checks.URL, checks.QUESTION, model=checks.NO_MODEL)
    output = done.stdout + done.stderr
    checks.expect(done.returncode != 0, output[-300:])
    return checks.expect_no_model(output)[-150:]


if __name__ == "__main__":
    checks.run("Codex", {check.__name__: check for check in (chat, tool, error)})
