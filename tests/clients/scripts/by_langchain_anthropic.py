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
    return checks.expect_model(
        [one.id for one in anthropic.Anthropic(base_url=checks.URL, api_key="none").models.list()]
    )


def chat() -> object:
    return checks.expect_answer(model().invoke(checks.QUESTION).text)


def stream() -> object:
    return checks.expect_stream([chunk.text for chunk in model().stream(checks.QUESTION)])


def tool() -> object:
    bound = model().bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(checks.WEATHER).tool_calls
    return checks.expect_call(call["name"], call["args"])


def schema() -> object:
    """It implements structured output as a required tool call."""
    shaped = model().with_structured_output(
        {"title": "capital", "description": "Tell of a capital.", **checks.CAPITAL_SCHEMA}, method="function_calling"
    )
    return checks.expect_capital(shaped.invoke(checks.QUESTION))


def error() -> object:
    return checks.expect_refusal(anthropic.NotFoundError, lambda: model(checks.NO_MODEL).invoke(checks.QUESTION))


def usage() -> object:
    """Cached tokens are reported for marked text only, so the text is marked."""
    marked = {"type": "text", "text": checks.LONG, "cache_control": {"type": "ephemeral"}}
    return checks.expect_cached(
        lambda: model().invoke([("user", [marked])]).usage_metadata["input_token_details"]["cache_read"]
    )
