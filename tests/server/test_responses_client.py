"""Tests of /v1/responses with the official `openai` client and the real model, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server
from tests.waiting import HANG_S

QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
BASICS: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 64}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


def ask(client: OpenAI, content: Any = QUESTION, **options: Any) -> Response:
    return cast(Response, client.responses.create(input=content, **{**BASICS, **options}))


def events_of(client: OpenAI, content: Any = QUESTION, **options: Any) -> list[ResponseStreamEvent]:
    with client.responses.create(input=content, stream=True, **{**BASICS, **options}) as stream:
        return list(stream)


def call_of(response: Response) -> ResponseFunctionToolCall:
    (item,) = response.output
    assert isinstance(item, ResponseFunctionToolCall)
    return item


def test_an_answer(client: OpenAI) -> None:
    answer = ask(client, metadata={"for": "a test"}, instructions="You are a helpful assistant.")
    assert answer.output_text == ANSWER
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.instructions) == ({"for": "a test"}, "You are a helpful assistant.")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = ask(client, instructions="You are a helpful assistant.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1  # all that can be cached
    assert again._request_id


def test_a_stream_has_the_same_text(client: OpenAI) -> None:
    events = events_of(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == ANSWER
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert last.response.usage is not None


class Capital(BaseModel):
    capital: str
    country: str


def test_an_answer_by_schema(client: OpenAI) -> None:
    answer = client.responses.parse(input=QUESTION, text_format=Capital, **BASICS)
    assert answer.output_parsed is not None
    assert answer.output_parsed.capital
    whole = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=200)
    if whole.status == "completed":
        assert isinstance(json.loads(whole.output_text), dict)


def test_a_call_its_result_and_the_answer(client: OpenAI) -> None:
    """The complete exchange of an agent."""
    conversation: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = {"tools": [WEATHER], "parallel_tool_calls": False}
    first = ask(client, conversation, tool_choice="required", **tools)
    call = call_of(first)
    assert (call.name, call.status) == ("get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    second = ask(client, [*conversation, *first.output, result], tool_choice="none", **tools)
    assert "22 degrees" in second.output_text


# The rules of each field are tested in test_responses_codec.py.
@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"input": "word " * 9000}, "input", "context_length_exceeded"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)  # fmt: skip
@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_a_bad_request_names_the_field(
    client: OpenAI, options: dict[str, Any], param: str, code: str | None, is_streaming: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(**{"input": QUESTION, **BASICS, **options, "stream": is_streaming})
    assert (info.value.param, info.value.code) == (param, code)
