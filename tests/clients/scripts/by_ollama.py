"""Ollama's Python client, with Ollama's API."""

from __future__ import annotations

from typing import Any

import checks
import ollama

CLIENT = ollama.Client(host=checks.URL)
OPTIONS = {"temperature": 0, "num_predict": 64}


def ask(content: str, *, model: str = checks.MODEL, **more: Any) -> Any:
    return CLIENT.chat(model=model, messages=[{"role": "user", "content": content}], options=OPTIONS, **more)


def models() -> object:
    found = [str(one.model) for one in CLIENT.list().models]
    checks.expect(any(name.partition(":")[0] == checks.MODEL for name in found), found)
    return ", ".join(found)


def chat() -> object:
    answer = ask(checks.QUESTION)
    checks.expect(checks.ANSWER in answer.message.content and answer.done_reason == "stop", answer)
    checks.expect(answer.prompt_eval_count > 0 and answer.eval_count > 0, answer)
    text = CLIENT.generate(model=checks.MODEL, prompt=checks.QUESTION, options=OPTIONS).response
    checks.expect(checks.ANSWER in text, text)
    return f"{answer.message.content}; by generate: {text}"


def stream() -> object:
    pieces = list(ask(checks.QUESTION, stream=True))
    checks.expect(pieces[-1].done, pieces)
    return checks.expect_stream([piece.message.content for piece in pieces])


def tool() -> object:
    """The protocol cannot require a call, so an answer without one is accepted too."""
    calls = ask(checks.WEATHER, tools=[checks.TOOL]).message.tool_calls or []
    for call in calls:
        checks.expect(call.function.name == "get_weather", call)
    return f"{len(calls)} calls: this protocol cannot require one"


def schema() -> object:
    return checks.expect_capital(ask(checks.QUESTION, format=checks.CAPITAL_SCHEMA).message.content)


def error() -> object:
    return checks.expect_refusal(ollama.ResponseError, lambda: ask(checks.QUESTION, model=checks.NO_MODEL))
