"""Inspect AI: its models over both protocols, and an evaluation with a tool turn."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import checks
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction
from inspect_ai.tool import tool as as_tool
from inspect_ai.util import JSONSchema

CONFIG: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "max_retries": 0}


# The values are listed, because its schemas have no bounds and a small model may write endless numbers.
CAPITAL = JSONSchema(
    type="object",
    properties={
        "capital": JSONSchema(type="string", enum=["Paris", "Berlin"]),
        "population": JSONSchema(type="integer", enum=[2000000, 3000000]),
    },
    required=["capital", "population"],
    additionalProperties=False,
)


def model(name: str = checks.MODEL, provider: str = "openai-api/quire", url: str = f"{checks.URL}/v1") -> Any:
    config = GenerateConfig(**CONFIG)
    return get_model(f"{provider}/{name}", base_url=url, api_key="none", config=config, memoize=False)


def ask(one: Any, content: str, **more: Any) -> Any:
    async def answer() -> Any:
        return await one.generate([ChatMessageUser(content=content)], **more)

    return asyncio.run(answer())


def get_weather() -> Any:
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"sunny in {city}"

    return execute


WEATHER = as_tool(get_weather)


def chat() -> object:
    """A whole evaluation of one question, with chat completions and with messages."""
    task = Task(dataset=[Sample(input=checks.QUESTION, target=checks.ANSWER)], solver=generate(), scorer=includes())
    models = [model(), model(provider="anthropic", url=checks.URL)]
    with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
        logs = eval(task, model=models, log_dir=folder, display="none", max_retries=0)
    checks.expect([log.status for log in logs] == ["success", "success"], [log.error for log in logs])
    scores = [log.results.scores[0].metrics["accuracy"].value for log in logs]
    checks.expect(scores[0] == 1.0, scores)  # the other provider sends no temperature
    return f"an evaluation: accuracy {scores[0]} by chat completions, {scores[1]} by messages"


def tool() -> object:
    one = model()
    choice = ToolFunction("get_weather")
    config = GenerateConfig(**CONFIG, parallel_tool_calls=False)
    (call,) = ask(one, checks.WEATHER, tools=[WEATHER()], tool_choice=choice, config=config).message.tool_calls
    checks.expect(call.function == "get_weather", call)
    task = Task(dataset=[Sample(input=checks.WEATHER, target="")], solver=[use_tools(WEATHER()), generate()])
    with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
        (log,) = eval(task, model=one, log_dir=folder, display="none", message_limit=6)
    checks.expect(log.status == "success", log.error)
    return checks.expect_city(call.arguments)


def schema() -> object:
    shape = ResponseSchema(name="capital", json_schema=CAPITAL, strict=True)
    config = GenerateConfig(**CONFIG, response_schema=shape)
    return checks.expect_capital(ask(model(), checks.QUESTION, config=config).completion)


def error() -> object:
    return checks.expect_refusal(Exception, lambda: ask(model(checks.NO_MODEL), checks.QUESTION))


def usage() -> object:
    return checks.expect_cached(lambda: ask(model(), checks.LONG).usage.input_tokens_cache_read or 0)
