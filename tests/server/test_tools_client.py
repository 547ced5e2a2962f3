"""Tools and answer formats with the official clients and the default model, whose template does not support tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema_rs
import pytest
from anthropic import Anthropic
from anthropic.types import ToolUseBlock
from openai import OpenAI
from pydantic import BaseModel

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server
from tests.waiting import HANG_S

QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}
ADD = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add_one", "description": "Adds 1", "parameters": ADD, "strict": True}},
]
SCHEMAS = {"get_weather": WEATHER, "add_one": ADD}


@pytest.fixture(scope="module")
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


def ask(client: OpenAI, **options: Any) -> Any:
    given = {"model": DEFAULT_MODEL, "messages": [QUESTION], "tools": TOOLS, "temperature": 0, "max_tokens": 250}
    return client.chat.completions.create(**{**given, **options})


def check(name: str, arguments: str) -> dict[str, Any]:
    value = json.loads(arguments)
    jsonschema_rs.validate(SCHEMAS[name], value)
    assert isinstance(value, dict)
    return value


def test_a_required_call_and_its_result(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert check("get_weather", call.function.arguments)["city"] == "Paris"
    messages = [QUESTION, answer.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    final = ask(client, messages=messages, tool_choice="none", max_tokens=32).choices[0]
    assert final.message.tool_calls is None
    assert final.message.content


def test_streamed_parallel_calls_equal_those_of_the_whole_answer(client: OpenAI) -> None:
    """This model does not stop calling by itself; only `max_tokens` stops it."""
    whole = ask(client, tool_choice="required", seed=1).choices[0]
    assert len(whole.message.tool_calls) > 4
    names: dict[int, str] = {}
    ids: set[str] = set()
    arguments: dict[int, list[str]] = {}
    reasons = []
    for chunk in ask(client, tool_choice="required", seed=1, stream=True):
        (choice,) = chunk.choices
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                ids.add(part.id)
                names[part.index] = part.function.name
            arguments.setdefault(part.index, []).append(part.function.arguments)
        reasons.append(choice.finish_reason)
    assert reasons[-1] == whole.finish_reason == "length"
    assert len(ids) == len(names) == len(whole.message.tool_calls)
    *most, last = whole.message.tool_calls
    for index, call in enumerate(most):
        assert len(arguments[index]) > 3  # streamed in parts
        assert names[index] == call.function.name
        assert "".join(arguments[index]) == call.function.arguments
        check(names[index], call.function.arguments)
    assert "".join(arguments[len(most)]) == last.function.arguments


def test_an_immediately_repeated_call_ends_the_turn_in_all_protocols(client: OpenAI, claude: Anthropic) -> None:
    """This model would repeat the call up to `max_tokens`; the generation ends with the first repetition."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "Of a city", "parameters": schema}
    options: Any = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    answer = ask(client, **options)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert 25 < answer.usage.completion_tokens < 100  # two calls, of which one is returned
    starts, reasons = [], []
    for chunk in ask(client, **options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            starts += [part.function.name for part in choice.delta.tool_calls or () if part.id]
            reasons.append(choice.finish_reason)
    assert (starts, reasons[-1]) == (["get_weather"], "tool_calls")
    assert chunk.usage.completion_tokens == answer.usage.completion_tokens

    response = client.responses.create(
        model=DEFAULT_MODEL,
        input=QUESTION["content"],
        tools=[{"type": "function", "strict": False, **tool}],
        tool_choice="required",
        temperature=0,
        max_output_tokens=250,
    )
    assert [item.type for item in response.output] == ["function_call"]
    assert response.status == "completed"
    message = claude.messages.create(
        model=DEFAULT_MODEL,
        max_tokens=250,
        messages=[QUESTION],
        tools=[{"name": "get_weather", "description": "Of a city", "input_schema": schema}],
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    )
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens < 100


class Capital(BaseModel):
    city: str
    continent: Literal["Africa", "Asia", "Europe"]


def test_an_answer_by_schema(client: OpenAI) -> None:
    example = 'Answer like {"city": "Rome", "continent": "Europe"}. What is the capital of France?'
    parsed = client.chat.completions.parse(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": example}],
        response_format=Capital,
        temperature=0,
        max_tokens=100,
    )
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].message.parsed.continent == "Europe"


CLAUDE_TOOLS: Any = [
    {"name": "get_weather", "description": "Of a city", "input_schema": WEATHER},
    {"name": "add_one", "description": "Adds 1", "input_schema": ADD},
]


def test_a_round_trip_with_anthropics_client(claude: Anthropic) -> None:
    given: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "max_tokens": 250,
        "tools": CLAUDE_TOOLS,
        "extra_body": {"temperature": 0},
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = claude.messages.create(messages=[QUESTION], tool_choice=choice, **given)
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert isinstance(use, ToolUseBlock)
    assert use.id.startswith("toolu_")
    jsonschema_rs.validate(SCHEMAS[use.name], use.input)
    with claude.messages.stream(messages=[QUESTION], tool_choice=choice, **given) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert isinstance(streamed, ToolUseBlock)
    assert (streamed.name, streamed.input) == (use.name, use.input)
    assert json.loads("".join(parts)) == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny, 21 degrees"}
    messages: Any = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    final = claude.messages.create(messages=messages, tool_choice={"type": "none"}, **{**given, "max_tokens": 24})
    assert final.content[0].type == "text"
    assert final.content[0].text
