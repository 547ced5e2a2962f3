"""Pydantic AI: agents over chat completions, responses and messages."""

from __future__ import annotations

import asyncio
from typing import Any

import checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"temperature": 0, "max_tokens": 128, "parallel_tool_calls": False}
OPENAI = OpenAIProvider(base_url=f"{checks.URL}/v1", api_key="none")
CHAT = OpenAIChatModel(checks.MODEL, provider=OPENAI)
MODELS = {
    "chat": CHAT,
    "responses": OpenAIResponsesModel(checks.MODEL, provider=OPENAI),
    "messages": AnthropicModel(checks.MODEL, provider=AnthropicProvider(base_url=checks.URL, api_key="none")),
}


class Capital(BaseModel):
    capital: str = Field(max_length=24)
    population: int = Field(ge=0, le=99999999)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=24)


def chat() -> object:
    for name, model in MODELS.items():
        text = Agent(model, model_settings=SETTINGS).run_sync(checks.QUESTION).output
        checks.expect(checks.ANSWER in text, (name, text))
    return f"{text}; the same by {', '.join(MODELS)}"


def stream() -> object:
    async def pieces(model: Any) -> list[str]:
        async with Agent(model, model_settings=SETTINGS).run_stream(checks.QUESTION) as found:
            return [piece async for piece in found.stream_text(delta=True, debounce_by=None)]

    for name, model in MODELS.items():
        found = asyncio.run(pieces(model))
        checks.expect(len(found) > 3 and checks.ANSWER in "".join(found), (name, found))
    return f"{len(found)} chunks; by {', '.join(MODELS)}"


def tool() -> object:
    """An output tool, which the client requires."""
    for name, model in MODELS.items():
        agent = Agent(model, output_type=ToolOutput(Weather, name="get_weather"), model_settings=SETTINGS)
        told = checks.expect_city(agent.run_sync(checks.WEATHER).output.model_dump())
    return f"{told}; by {', '.join(MODELS)}; last {name}"


def schema() -> object:
    for model in (CHAT, MODELS["responses"]):
        agent = Agent(model, output_type=NativeOutput(Capital), model_settings=SETTINGS)
        told = checks.expect_capital(agent.run_sync(checks.QUESTION).output.model_dump())
    return f"{told}; by chat and responses"


def error() -> object:
    model = OpenAIChatModel(checks.NO_MODEL, provider=OPENAI)
    try:
        Agent(model, model_settings=SETTINGS).run_sync(checks.QUESTION)
    except ModelHTTPError as problem:
        checks.expect(problem.status_code == 404, problem)
        return checks.expect_no_model(str(problem))
    raise AssertionError("no error")


def usage() -> object:
    agent = Agent(CHAT, model_settings=SETTINGS)
    counts = [agent.run_sync(checks.LONG).usage.cache_read_tokens for _ in range(2)]
    return checks.expect_cached(*counts)


if __name__ == "__main__":
    checks.run("pydantic-ai", {check.__name__: check for check in (chat, stream, tool, schema, error, usage)})
