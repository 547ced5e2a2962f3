"""The checks with LangChain's client of Anthropic's protocol."""

from __future__ import annotations

from typing import Any

import anthropic
import checks
from langchain_anthropic import ChatAnthropic

TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": checks.CITY_SCHEMA}


def model(name: str = checks.MODEL, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(
        model=name, base_url=checks.URL, api_key="none", temperature=0, max_tokens=64, max_retries=0, **more
    )


def models() -> object:
    found = [one.id for one in anthropic.Anthropic(base_url=checks.URL, api_key="none").models.list()]
    checks.expect(checks.MODEL in found, found)
    return ", ".join(found)


def chat() -> object:
    text = model().invoke(checks.QUESTION).text
    checks.expect(checks.ANSWER in text, text)
    return str(text)


def stream() -> object:
    pieces = [chunk.text for chunk in model().stream(checks.QUESTION)]
    checks.expect(len(pieces) > 3 and checks.ANSWER in "".join(pieces), pieces)
    return f"{len(pieces)} chunks"


def tool() -> object:
    bound = model().bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(checks.WEATHER).tool_calls
    checks.expect(call["name"] == "get_weather", call)
    return checks.expect_city(call["args"])


def schema() -> object:
    """It implements structured output as a required tool call."""
    shaped = model().with_structured_output(
        {"title": "capital", "description": "Tell of a capital.", **checks.CAPITAL_SCHEMA}, method="function_calling"
    )
    return checks.expect_capital(shaped.invoke(checks.QUESTION))


def error() -> object:
    try:
        model(checks.NO_MODEL).invoke(checks.QUESTION)
    except anthropic.NotFoundError as problem:
        return checks.expect_no_model(problem.message)
    raise AssertionError("no error")


def usage() -> object:
    """Cached tokens are reported for marked text only, so the text is marked."""
    marked = {"type": "text", "text": checks.LONG, "cache_control": {"type": "ephemeral"}}
    counts = [
        model().invoke([("user", [marked])]).usage_metadata["input_token_details"]["cache_read"] for _ in range(2)
    ]
    return checks.expect_cached(*counts)


if __name__ == "__main__":
    all_checks = (models, chat, stream, tool, schema, error, usage)
    checks.run("langchain-anthropic", {check.__name__: check for check in all_checks})
