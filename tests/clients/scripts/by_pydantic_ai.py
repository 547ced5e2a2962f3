"""Pydantic AI: agents over chat completions, responses and messages."""

from __future__ import annotations

import asyncio
from typing import Any

import checks
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from shapes import Capital, Weather

SETTINGS: Any = {"temperature": 0, "max_tokens": 128, "parallel_tool_calls": False}
OPENAI = OpenAIProvider(base_url=f"{checks.URL}/v1", api_key="none")
CHAT = OpenAIChatModel(checks.MODEL, provider=OPENAI)
MODELS = {
    "chat": CHAT,
    "responses": OpenAIResponsesModel(checks.MODEL, provider=OPENAI),
    "messages": AnthropicModel(checks.MODEL, provider=AnthropicProvider(base_url=checks.URL, api_key="none")),
}


def chat() -> object:
    texts = {Agent(model, model_settings=SETTINGS).run_sync(checks.QUESTION).output for model in MODELS.values()}
    checks.expect(len(texts) == 1 and checks.ANSWER in "".join(texts), texts)
    return f"{''.join(texts)}; the same by {', '.join(MODELS)}"


def stream() -> object:
    async def pieces(model: Any) -> list[str]:
        async with Agent(model, model_settings=SETTINGS).run_stream(checks.QUESTION) as found:
            return [piece async for piece in found.stream_text(delta=True, debounce_by=None)]

    streams = {name: asyncio.run(pieces(model)) for name, model in MODELS.items()}
    for found in streams.values():
        checks.expect(len(found) > 3 and checks.ANSWER in "".join(found), streams)
    return ", ".join(f"{len(found)} chunks by {name}" for name, found in streams.items())


def tool() -> object:
    """Structured output by a required tool call."""
    output = ToolOutput(Weather, name="get_weather")
    agents = {name: Agent(model, output_type=output, model_settings=SETTINGS) for name, model in MODELS.items()}
    found = {name: agent.run_sync(checks.WEATHER).output.model_dump() for name, agent in agents.items()}
    return ", ".join(f"{checks.expect_city(one)} by {name}" for name, one in found.items())


def schema() -> object:
    models = (CHAT, MODELS["responses"])
    agents = [Agent(model, output_type=NativeOutput(Capital), model_settings=SETTINGS) for model in models]
    found = [checks.expect_capital(agent.run_sync(checks.QUESTION).output.model_dump()) for agent in agents]
    return f"{found[0]} by chat, {found[1]} by responses"


def error() -> object:
    agent = Agent(OpenAIChatModel(checks.NO_MODEL, provider=OPENAI), model_settings=SETTINGS)
    return checks.expect_refusal(ModelHTTPError, lambda: agent.run_sync(checks.QUESTION))


def usage() -> object:
    agent = Agent(CHAT, model_settings=SETTINGS)
    return checks.expect_cached(lambda: agent.run_sync(checks.LONG).usage.cache_read_tokens)
