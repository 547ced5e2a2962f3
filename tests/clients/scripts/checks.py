"""The checks that every client runs. Standard library only, because it runs in the clients' environments.

A client script defines functions named as in `CHECKS`, or as in its row in tests/clients/table.py. `run` calls them and
prints one line of JSON per check for the runner.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_KEPT = tempfile.TemporaryDirectory(prefix="client-")  # of this script; removed at exit
FOLDER = Path(_KEPT.name)
URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("QUIRE_MODEL", "")
NO_MODEL = "no-such-model"
CHECKS = ("models", "chat", "stream", "tool", "schema", "error", "usage")

QUESTION = "What is the capital of Japan?"
ANSWER = "Tokyo"
# Long enough to fill cache blocks, which have 32 tokens each.
LONG = os.environ.get("QUIRE_LONG") or f"Here are numbers: {', '.join(map(str, range(60)))}. Say one of them."
WEATHER = "What is the weather in Paris?"
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY_SCHEMA},
}
CAPITAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["capital", "population"],
    "additionalProperties": False,
}


def expect(is_true: object, what: object) -> None:
    if not is_true:
        raise AssertionError(f"not as expected: {what!r:.300}")


def expect_city(arguments: str | Mapping[str, Any]) -> str:
    """Check the arguments of a get_weather call."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(found) == {"city"} and isinstance(found["city"], str), found)
    return f"get_weather({found['city']})"


def expect_capital(text: str | Mapping[str, Any]) -> str:
    found = json.loads(text) if isinstance(text, str) else text
    expect(set(found) == {"capital", "population"}, found)
    expect(isinstance(found["capital"], str) and isinstance(found["population"], int), found)
    return json.dumps(dict(found))


def expect_call(name: str, arguments: str | Mapping[str, Any]) -> str:
    expect(name == "get_weather", name)
    return expect_city(arguments)


def expect_answer(text: str) -> str:
    expect(ANSWER in text, text)
    return text


def expect_stream(pieces: Sequence[str]) -> str:
    expect(len(pieces) > 3 and ANSWER in "".join(pieces), pieces)
    return f"{len(pieces)} chunks"


def expect_model(names: Sequence[str]) -> str:
    expect(MODEL in names, names)
    return ", ".join(names)


def expect_refusal(error: type[Exception], ask: Callable[[], object]) -> str:
    """Check that a request for an unknown model raises this exception."""
    try:
        ask()
    except error as problem:
        return expect_no_model(str(problem))
    raise AssertionError("no error")


def expect_no_model(message: str) -> str:
    """Check that the error names the requested and the available model."""
    expect(NO_MODEL in message and MODEL in message, message)
    return message


def expect_cached(ask: Callable[[], int]) -> str:
    """Ask twice for the number of cached tokens of the same prompt."""
    num_first, num_second = ask(), ask()
    expect(num_second >= 32 and num_second > num_first, (num_first, num_second))
    return f"{num_first}, then {num_second} tokens cached"


def run(script: str) -> None:
    """Run the checks of a script in order: functions of these names. A failure does not skip the others."""
    module = importlib.import_module(script)
    for name in os.environ.get("QUIRE_CHECKS", "").split() or CHECKS:
        try:
            detail, is_well = str(getattr(module, name)()), True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            detail, is_well = f"{type(error).__name__}: {error}", False
        print(json.dumps({"check": name, "ok": is_well, "detail": " ".join(detail.split())[:200]}), flush=True)
