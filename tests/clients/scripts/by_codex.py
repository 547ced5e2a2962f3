"""`codex exec` with its own home, in which only the provider and the model are configured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import checks
import forcing

CODEX = Path(os.environ["QUIRE_ENVIRONMENT"]) / "node_modules" / ".bin" / "codex"
CONFIG = """
model = "{model}"
model_provider = "quire"

[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {timeout_ms}
"""


def codex(url: str, prompt: str, *options: str, model: str = checks.MODEL) -> subprocess.CompletedProcess[str]:
    home = checks.FOLDER / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(url=url, model=model, timeout_ms=forcing.TIMEOUT_S * 1000))
    return subprocess.run(
        [str(CODEX), "exec", "--skip-git-repo-check", *options, prompt],
        cwd=checks.FOLDER,
        env={"PATH": os.environ["PATH"], "HOME": str(checks.FOLDER), "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=forcing.TIMEOUT_S,
        check=False,
    )


def answered(url: str, prompt: str) -> str:
    path = checks.FOLDER / "schema.json"
    path.write_text(json.dumps(forcing.SHORT))
    done = codex(url, prompt, "--output-schema", str(path))
    checks.expect(done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-600:]))
    found = json.loads(done.stdout)
    checks.expect(isinstance(found["answer"], str), found)
    return str(found["answer"])


def chat() -> object:
    return forcing.chat(lambda url: answered(url, checks.QUESTION))


def tool() -> object:
    """A turn with the shell tool: the model calls it, Codex runs it and sends its output back."""
    text, body = forcing.tool(forcing.Forced("exec_command", {"cmd": "cat word.txt"}), answered)
    result = body["input"][-1]
    checks.expect(result["type"] == "function_call_output" and forcing.WORD in result["output"], result)
    return text


def error() -> object:
    done = codex(checks.URL, checks.QUESTION, model=checks.NO_MODEL)
    output = done.stdout + done.stderr
    checks.expect(done.returncode != 0, output[-300:])
    return checks.expect_no_model(output)[-150:]
