"""DSPy: a prediction, a stream, a tool call and a typed answer with a schema. `Model` declares the features."""

from __future__ import annotations

import asyncio
from typing import Any

import checks
import dspy
from shapes import Capital


class Question(dspy.Signature):  # type: ignore[misc]
    """Answer the question."""

    question: str = dspy.InputField()
    answer: Capital = dspy.OutputField()


class Forecast(dspy.Signature):  # type: ignore[misc]
    """Call the tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Model(dspy.LM):  # type: ignore[misc]
    """DSPy derives features from a model's name, and assumes none for an unknown name."""

    supports_function_calling = True
    supports_response_schema = True
    supported_params = frozenset({"response_format", "tools", "tool_choice", "temperature", "max_tokens"})


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(name: str = checks.MODEL, **more: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 128, "cache": False, "num_retries": 0, **more}
    return Model(f"openai/{name}", api_base=f"{checks.URL}/v1", api_key="none", **given)


def chat() -> object:
    (text,) = model()(checks.QUESTION)
    found = text["text"] if isinstance(text, dict) else text
    checks.expect(checks.ANSWER in found, found)
    return found


def stream() -> object:
    async def pieces() -> list[Any]:
        with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
            asked = dspy.streamify(dspy.Predict(Question), async_streaming=True)
            return [piece async for piece in asked(question=checks.QUESTION)]

    found = asyncio.run(pieces())
    checks.expect(len(found) > 3 and isinstance(found[-1], dspy.Prediction), found)
    return f"{len(found)} chunks"


def tool() -> object:
    """The adapter's default calls are text. This uses calls of the protocol, and requires one."""
    extra: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model(**extra), adapter=adapter):
        found = dspy.Predict(Forecast)(question=checks.WEATHER, tools=[dspy.Tool(get_weather)])
    (call,) = found.calls.tool_calls
    return checks.expect_call(call.name, call.args)


def schema() -> object:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        return checks.expect_capital(dspy.Predict(Question)(question=checks.QUESTION).answer.model_dump())


def error() -> object:
    return checks.expect_refusal(Exception, lambda: model(checks.NO_MODEL)(checks.QUESTION))


def usage() -> object:
    def num_cached() -> int:
        one = model()
        one(checks.LONG)
        return dict(one.history[-1]["usage"]["prompt_tokens_details"])["cached_tokens"] or 0

    return checks.expect_cached(num_cached)
