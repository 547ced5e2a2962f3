"""The checks with the `llm` command, which has its own environment and folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import checks

FUNCTION = """
def get_weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"
"""
COMMON = {"api_base": f"{checks.URL}/v1", "supports_schema": True, "supports_tools": True}
ROWS = (
    {"model_id": "quire", "model_name": checks.MODEL, **COMMON},
    {"model_id": "quire-responses", "model_name": checks.MODEL, "responses": True, **COMMON},
    {"model_id": "nothing", "model_name": checks.NO_MODEL, **COMMON},
)
(checks.FOLDER / "extra-openai-models.yaml").write_text(json.dumps(ROWS))  # JSON is valid YAML


def llm(*options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("llm")), *options]
    done = subprocess.run(
        command,
        env={**os.environ, "LLM_USER_PATH": str(checks.FOLDER)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    checks.expect(done.returncode == status, (done.returncode, done.stdout[-300:], done.stderr[-300:]))
    return done


def ask(content: str, *options: str, model: str = "quire", status: int = 0) -> subprocess.CompletedProcess[str]:
    return llm("-m", model, "-o", "temperature", "0", "-o", "max_tokens", "64", *options, content, status=status)


def models() -> object:
    """It lists the configured models and does not read the server's list."""
    text = llm("models", "list").stdout
    checks.expect("quire" in text, text)
    return "as configured"


def chat() -> object:
    return checks.expect_answer(ask(checks.QUESTION, "--no-stream").stdout)


def stream() -> object:
    whole, text = ask(checks.QUESTION, "--no-stream").stdout, ask(checks.QUESTION).stdout
    checks.expect(text.strip() == whole.strip(), text)
    newer = llm("-m", "quire-responses", "-o", "temperature", "0", checks.QUESTION).stdout
    checks.expect(newer.strip() == whole.strip(), newer)
    return "the same; and by /v1/responses"


def tool() -> object:
    """It cannot require a call, so an answer without one is accepted too."""
    done = ask(checks.WEATHER, "--functions", FUNCTION, "--td", "--chain-limit", "2")
    is_called = "get_weather" in done.stderr
    return "called" if is_called else "not called: this client cannot require it"


def schema() -> object:
    return checks.expect_capital(ask(checks.QUESTION, "--schema", json.dumps(checks.CAPITAL_SCHEMA)).stdout)


def error() -> object:
    return checks.expect_no_model(ask(checks.QUESTION, model="nothing", status=1).stderr)


def usage() -> object:
    def num_cached() -> int:
        found = re.search(r'"cached_tokens": (\d+)', ask(checks.LONG, "--no-stream", "-u").stderr)
        return int(found[1]) if found else 0

    return checks.expect_cached(num_cached)
