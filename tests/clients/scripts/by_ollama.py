"""Ollama's Python client, with Ollama's API."""

from __future__ import annotations

from typing import Any

import checks
import ollama

CLIENT = ollama.Client(host=checks.URL)
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": checks.CITY_SCHEMA},
}
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
    text = "".join(piece.message.content for piece in pieces)
    checks.expect(len(pieces) > 3 and checks.ANSWER in text and pieces[-1].done, pieces)
    return f"{len(pieces)} chunks"


def tool() -> object:
    """The protocol cannot require a call, so an answer without one is accepted too."""
    calls = ask(checks.WEATHER, tools=[TOOL]).message.tool_calls or []
    for call in calls:
        checks.expect(call.function.name == "get_weather", call)
    return f"{len(calls)} calls: this protocol cannot require one"


def schema() -> object:
    return checks.expect_capital(ask(checks.QUESTION, format=checks.CAPITAL_SCHEMA).message.content)


def error() -> object:
    try:
        ask(checks.QUESTION, model=checks.NO_MODEL)
    except ollama.ResponseError as problem:
        checks.expect(problem.status_code == 404, problem.status_code)
        checks.expect(checks.NO_MODEL in problem.error, problem.error)
        return problem.error
    raise AssertionError("no error")


if __name__ == "__main__":
    checks.run("ollama", {check.__name__: check for check in (models, chat, stream, tool, schema, error)})
