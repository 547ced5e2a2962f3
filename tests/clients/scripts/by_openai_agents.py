"""OpenAI's Agents SDK, with /v1/responses (its default) and with chat completions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import checks
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import Field
from shapes import Capital

CLIENT = openai.AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
KINDS: dict[str, Any] = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
LOOP = asyncio.new_event_loop()
set_tracing_disabled(True)


def agent(kind: str, name: str = checks.MODEL, *, choice: str | None = None, **more: Any) -> Agent[Any]:
    settings = ModelSettings(temperature=0, max_tokens=64, tool_choice=choice, include_usage=True)
    if choice is not None:
        settings.parallel_tool_calls = False
    model = KINDS[kind](model=name, openai_client=CLIENT)
    return Agent(name="helper", model=model, model_settings=settings, **more)


def ask(one: Agent[Any], content: str, **more: Any) -> Any:
    return LOOP.run_until_complete(Runner.run(one, content, **more))


def chat() -> object:
    texts = {ask(agent(kind), checks.QUESTION).final_output for kind in KINDS}
    checks.expect(len(texts) == 1 and checks.ANSWER in "".join(texts), texts)
    return f"{''.join(texts)}; the same by {', '.join(KINDS)}"


def stream() -> object:
    async def deltas(kind: str) -> list[str]:
        found = Runner.run_streamed(agent(kind), checks.QUESTION)
        events = [event async for event in found.stream_events() if event.type == "raw_response_event"]
        return [event.data.delta for event in events if event.data.type == "response.output_text.delta"]

    streams = {kind: LOOP.run_until_complete(deltas(kind)) for kind in KINDS}
    for pieces in streams.values():
        checks.expect(len(pieces) > 3 and checks.ANSWER in "".join(pieces), streams)
    return ", ".join(f"{len(pieces)} chunks by {kind}" for kind, pieces in streams.items())


def tool() -> object:
    """A whole turn: the first answer must be a call, and the client sends a second request with its result."""
    asked: list[str] = []

    def get_weather(city: Annotated[str, Field(max_length=24)]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"sunny in {city}"

    for kind in KINDS:
        one = agent(kind, tools=[function_tool(get_weather)], choice="required")
        found = ask(one, checks.WEATHER, max_turns=3)
        outputs = [item.output for item in found.new_items if item.type == "tool_call_output_item"]
        checks.expect(outputs == [f"sunny in {asked[-1]}"] and found.final_output, found.new_items)
    return f"get_weather({asked[-1]}), run and answered by {', '.join(KINDS)}"


def schema() -> object:
    found = [ask(agent(kind, output_type=Capital), checks.QUESTION).final_output.model_dump() for kind in KINDS]
    return ", ".join(f"{checks.expect_capital(one)} by {kind}" for kind, one in zip(KINDS, found, strict=True))


def error() -> object:
    return checks.expect_refusal(
        openai.NotFoundError, lambda: ask(agent("responses", checks.NO_MODEL), checks.QUESTION)
    )


def usage() -> object:
    """With a schema, since this client treats a truncated answer as an error."""
    one = agent("responses", output_type=Capital)
    return checks.expect_cached(lambda: ask(one, checks.LONG).context_wrapper.usage.input_tokens_details.cached_tokens)
