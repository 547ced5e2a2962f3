"""smolagents: `OpenAIModel`, and a `ToolCallingAgent`, which requires a call in every step."""

from __future__ import annotations

from typing import Any

import checks
import openai
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool, ToolCallingAgent


class GetWeather(Tool):  # type: ignore[misc]
    name = "get_weather"
    description = "The weather of a city."
    inputs = {"city": {"type": "string", "description": "Its name."}}  # noqa: RUF012 - required by its base class
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


def model(name: str = checks.MODEL, **more: Any) -> Any:
    return OpenAIModel(name, api_base=f"{checks.URL}/v1", api_key="none", temperature=0, max_tokens=64, **more)


def asked(content: str) -> list[Any]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": content}])]


def chat() -> object:
    return checks.expect_answer(model()(asked(checks.QUESTION)).content)


def stream() -> object:
    return checks.expect_stream([piece.content or "" for piece in model().generate_stream(asked(checks.QUESTION))])


def tool() -> object:
    """A tool call of the model, and one step of an agent, which runs a tool or answers, both with a call."""
    one = model(parallel_tool_calls=False)
    (call,) = one(asked(checks.WEATHER), tools_to_call_from=[GetWeather()]).tool_calls
    checks.expect(call.function.name == "get_weather", call)
    told = checks.expect_city(call.function.arguments)
    agent = ToolCallingAgent(tools=[GetWeather()], model=one, max_steps=1, verbosity_level=0)
    agent.run(checks.WEATHER)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    checks.expect(steps, agent.memory.steps)
    return f"{told}; an agent's step: {steps[0].tool_calls[0].name}"


def schema() -> object:
    shape = {"name": "capital", "schema": checks.CAPITAL_SCHEMA, "strict": True}
    answer = model()(asked(checks.QUESTION), response_format={"type": "json_schema", "json_schema": shape})
    return checks.expect_capital(answer.content)


def error() -> object:
    return checks.expect_refusal(openai.NotFoundError, lambda: model(checks.NO_MODEL)(asked(checks.QUESTION)))


def usage() -> object:
    return checks.expect_cached(lambda: model()(asked(checks.LONG)).raw.usage.prompt_tokens_details.cached_tokens)
