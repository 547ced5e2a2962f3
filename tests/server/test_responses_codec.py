"""Codec of /v1/responses without a socket, checked with the SDK's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import FinishReason, Priority, SamplingParams
from quire.engine.generation import Delta, GenerationParams, TokenLogprob
from quire.errors import InvalidRequest, RequestFailed
from quire.server.errors import ApiError, Kind, api_error, from_quire
from quire.server.models import ActiveRequest, Breakpoint, InferenceRequest
from quire.server.protocols.responses import (
    RESPONSES,
    Reply,
    ResponsesRequest,
    parse_responses,
    qualified_name,
)
from quire.text.grammar import GrammarKind, json_object_grammar, regex_grammar
from quire.text.messages import (
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Piece,
    Role,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Words,
)
from tests.server.streams import FakeActiveRequest, events_of

FIELDS = frozenset(ResponsesRequest.__struct_fields__)
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body_of(**fields: Any) -> ResponsesRequest:
    return msgspec.json.decode(json.dumps({"input": "Hi", **fields}), type=ResponsesRequest)


def ask_for(**fields: Any) -> InferenceRequest:
    return parse_responses(body_of(**fields))


def conversation(**fields: Any) -> ChatRequest:
    (chat,) = ask_for(**fields).prompts
    assert isinstance(chat, ChatRequest)
    return chat


def refusal(error: pytest.ExceptionInfo[Exception]) -> tuple[str, str | None]:
    value = error.value
    found = value if isinstance(value, ApiError) else from_quire(cast("InvalidRequest", value), FIELDS)
    assert found.kind in (Kind.INVALID, Kind.TOO_LONG)
    return found.message, found.param


# Bodies


def test_every_field_of_the_sdk_is_known() -> None:
    assert (set(ResponseCreateParamsBase.__annotations__) | {"stream"}) - FIELDS == set()


def test_request_fields() -> None:
    ask = ask_for(
        model="m",
        stream=True,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        service_tier="flex",
        prompt_cache_key="doc",
        prompt_cache_retention="24h",
        cache_salt="team",
        cache=True,
        seed=3,
        stop="END",
    )
    assert (ask.model, ask.is_streaming, ask.priority, ask.wants_cache) == ("m", True, Priority.LOW, True)
    assert (ask.cache_key, ask.cache_ttl_s, ask.cache_salt) == ("doc", 86_400.0, "team")
    assert ask.params == GenerationParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop="END")
    assert ask_for(max_tokens=9, priority="high").params.max_tokens == 9
    assert ask_for(service_tier="flex", priority="high").priority is Priority.HIGH


def test_logprobs_are_requested_by_include() -> None:
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert ask_for(include=include).params.logprobs == 0
    assert ask_for(include=include, top_logprobs=5).params.logprobs == 5
    assert ask_for(include=["reasoning.encrypted_content"], top_logprobs=5).params.logprobs is None


def test_items_become_messages() -> None:
    """As the SDK serialises earlier answers. Consecutive reasoning, text and calls of an assistant are one message."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "x",
            "status": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "dry"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": ""},
    ]
    assert list(conversation(instructions="Help.", input=items).messages) == [
        Message(Role.SYSTEM, (Part("Help."),)),
        Message(Role.SYSTEM, (Part("Be brief."),)),
        Message(Role.USER, (Part("Weather?"),)),
        Message(
            Role.ASSISTANT,
            (Part("Let me see."),),
            thought="Hm.",
            tool_calls=(ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x":1}')),
        ),
        Message(Role.TOOL, (Part("sunny"),), tool_call_id="a"),
        Message(Role.TOOL, (Part("dry"),), tool_call_id="b"),
        Message(Role.ASSISTANT, (Part("Sunny."),), thought="Short."),
        Message(Role.ASSISTANT, (Part("No."),)),
        Message(Role.USER, (Part(""),)),
    ]


def test_reasoning_effort() -> None:
    assert conversation(reasoning={"effort": "none"}).wants_thought is False
    chat = conversation(reasoning={"effort": "high", "summary": "auto"})
    assert (chat.wants_thought, chat.reasoning_effort) == (None, "high")


def test_breakpoints_count_in_messages() -> None:
    part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "y"}, part]}]
    assert ask_for(instructions="Help.", input=items).breakpoints == (Breakpoint(1, 1, 43_200.0),)


F, G = {"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "function", "name": "g"}
TOOL_F, TOOL_G = Tool("f", "", {"type": "object"}, False), Tool("g", is_strict=False)


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, (TOOL_F, TOOL_G), ToolChoice()),
        ("none", (TOOL_F, TOOL_G), ToolChoice(ToolMode.NONE)),
        ("auto", (TOOL_F, TOOL_G), ToolChoice(ToolMode.AUTO)),
        ("required", (TOOL_F, TOOL_G), ToolChoice(ToolMode.REQUIRED)),
        ({"type": "function", "name": "g"}, (TOOL_F, TOOL_G), ToolChoice(ToolMode.REQUIRED, "g")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
            (TOOL_F, TOOL_G),
            ToolChoice(ToolMode.REQUIRED, allowed=("g",)),
        ),
    ],
    ids=str,
)
def test_tools(choice: Any, tools: tuple[Tool, ...], expected: ToolChoice) -> None:
    chat = conversation(tools=[F, G], tool_choice=choice)
    assert (chat.tools, chat.tool_choice) == (tools, expected)
    strict = conversation(tools=[{**F, "description": "Does f.", "strict": True}, G], parallel_tool_calls=False)
    assert strict.tools == (Tool("f", "Does f.", {"type": "object"}, True), TOOL_G)
    assert strict.tool_choice == ToolChoice(is_parallel=False)


GROUP = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [F, {**G, "description": "g!"}],
}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}


def test_tools_in_a_namespace() -> None:
    found = conversation(tools=[F, GROUP], tool_choice={"type": "function", "namespace": "agents", "name": "g"})
    assert [tool.name for tool in found.tools] == ["f", "agents__f", "agents__g"]
    assert [tool.description for tool in found.tools] == ["", "Other agents.", "g!"]
    assert found.tools[2].schema_path == "tools[1].tools[1].parameters"
    assert found.tool_choice == ToolChoice(ToolMode.REQUIRED, "agents__g")
    assert qualified_name("mcp__mail__", "send") == "mcp__mail__send"
    calls: list[Piece] = [CallStart(0, "c0", "agents__g"), CallArguments(0, "{}")]
    calls += [CallStart(1, "c1", "f"), CallArguments(1, "{}")]
    first, second = whole([delta("<calls>", FinishReason.STOP)], {"<calls>": calls}, tools=[F, GROUP])["output"]
    assert (first["name"], first["namespace"], first["call_id"]) == ("g", "agents", "c0")
    assert second["name"] == "f"
    assert "namespace" not in second
    # Sent back, it becomes the name that the model used.
    items_back = [
        {"role": "user", "content": "?"},
        first,
        {"type": "function_call_output", "call_id": "c0", "output": "x"},
    ]
    _, called, _ = conversation(input=items_back).messages
    assert called.tool_calls[0].name == "agents__g"


def test_a_custom_tool_is_called_with_a_text() -> None:
    assert ask_for(tools=[PATCH]).unenforced == ("tools[0].format",)
    assert conversation(tools=[PATCH]).tools[0].parameters["required"] == ["input"]
    call: list[Piece] = [CallStart(0, "c0", "patch"), CallArguments(0, '{"input": "a\\n'), CallArguments(0, 'b"}')]
    events = stream([delta("<call>"), delta("", FinishReason.STOP)], {"<call>": call}, tools=[PATCH])
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "a\nb")
    assert [event["type"] for event in events[2:-1]] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    call = [CallStart(0, "c0", "patch"), CallArguments(0, '{"inp')]
    assert whole([delta("<call>", FinishReason.LENGTH)], {"<call>": call}, tools=[PATCH])["output"][0]["input"] == ""


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_tools_that_a_server_runs_are_left_out_and_named(choice: str | None) -> None:
    found = ask_for(tools=[{"type": "web_search", "external_web_access": False}, F], tool_choice=choice)
    assert found.ignored == ("tools[0].web_search",)
    chat = found.prompts[0]
    assert isinstance(chat, ChatRequest)
    assert [tool.name for tool in chat.tools] == ["f"]


def test_answer_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = ask_for(text={"format": form, "verbosity": "low"}).params.grammar
    assert found is not None
    closed = {**schema, "additionalProperties": False}
    assert (found.kind, json.loads(found.source)) == (GrammarKind.JSON_SCHEMA, closed)
    odd = {**schema, "properties": {"a": {"type": "string", "format": "color"}}}
    loose = ask_for(text={"format": {**form, "schema": odd, "strict": None}})
    assert loose.unenforced == ("text.format.schema.properties.a.format",)
    with pytest.raises(ApiError, match=r"^text\.format\.schema\.properties\.a\.format cannot be enforced"):
        ask_for(text={"format": {**form, "schema": odd}})
    assert ask_for(text={"format": {"type": "json_object"}}).params.grammar == json_object_grammar()
    assert ask_for(guided_regex="a+").params.grammar == regex_grammar("a+")
    assert ask_for(text={"format": {"type": "text"}}).params.grammar is None


# Refusals


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}, {"role": "user", **fields}]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input has 0 entries", "input"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input has 2049 entries", "input"),
    ({"input": message(role="bot", content="x")}, "input[1].role = 'bot' is not one of", "input[1].role"),
    ({"input": message(role=None, content="x")}, "input[1].role = None is not one of", "input[1].role"),
    ({"input": message()}, "input[1].content is null", "input[1].content"),
    (
        {"input": message(content=[{"type": "input_image", "image_url": "x"}])},
        "input[1].content[0].type = 'input_image' is not supported: images",
        "input[1].content[0].type",
    ),
    (
        {"input": message(content=[{"type": "video"}])},
        "input[1].content[0].type = 'video' is not one of",
        "input[1].content[0].type",
    ),
    (
        {"input": message(content=[{"type": "input_text"}])},
        "input[1].content[0].text is missing",
        "input[1].content[0].text",
    ),
    ({"input": message(content="\ud800")}, "input[1].content has a lone surrogate", "input[1].content"),
    ({"instructions": "\ud800"}, "instructions has a lone surrogate", "instructions"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0].type = 'item_reference' is not supported: items are not stored",
        "input[0].type",
    ),
    ({"input": [{"type": "computer_call"}]}, "input[0].type = 'computer_call' is not supported", "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name is missing", "input[0].name"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}]},
        "input[0].arguments is not a JSON object",
        "input[0].arguments",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]},
        "input[0].call_id has 0 characters",
        "input[0].call_id",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id is missing", "input[0].call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens = 0 is not", "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs = 21 is not", "top_logprobs"),
    ({"temperature": -1}, "temperature = -1.0 is not", "temperature"),
    (
        {"max_output_tokens": 7, "max_tokens": 9},
        "max_output_tokens = 7 and max_tokens = 9 contradict each other",
        "max_output_tokens",
    ),
    ({"temperature": 3}, "temperature = 3.0 is not from 0 to 2", "temperature"),
    (
        {"tools": [{**GROUP, "tools": [F, F]}]},
        "tools[0].tools[1].name = 'agents__f' is another",
        "tools[0].tools[1].name",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice asks for a call, and", "tool_choice"),
    ({"tools": [F, F]}, "tools[1].name = 'f' is another tool's name", "tools[1].name"),
    ({"tools": [{**F, "name": "a b"}]}, "tools[0].name = 'a b' is not", "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice asks for a call, and tools has no", "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "function", "name": "h"}}, "tool_choice names 'h', which", "tool_choice"),
    (
        {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
        "guided_regex and text.format",
        "guided_regex",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type = 'xml' is not one of", "text.format.type"),
    ({"text": {"format": {"type": "regex"}}}, "text.format.type = 'regex' is not one of", "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing", "text.format.schema"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs['x'] is a list", "chat_template_kwargs['x']"),
    ({"service_tier": "gold"}, "service_tier = 'gold' is not", "service_tier"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice.type = 'web_search' is not supported: this server runs no tools. Use function or allowed_tools",
        "tool_choice.type",
    ),
    ({"tools": [{"type": "namespace"}]}, "tools[0].name is missing", "tools[0].name"),
    ({"tools": [{**GROUP, "tools": [{}]}]}, "tools[0].tools[0].name is missing", "tools[0].tools[0].name"),
    ({"tools": [{"type": "function"}]}, "tools[0].name is missing", "tools[0].name"),
    ({"tool_choice": "maybe"}, "tool_choice = 'maybe' is not one of", "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing", "tool_choice.name"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type = 'mcp' is not supported", "tool_choice.type"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
        "tool_choice.mode = 'x' is not one of",
        "tool_choice.mode",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools is missing or has no tool",
        "tool_choice.tools",
    ),
    ({"tools": [F] * 129}, "tools has 129 entries, more than 128", "tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
        "tool_choice.tools[0].name is missing",
        "tool_choice.tools[0].name",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_body_is_refused_and_the_field_named(fields: dict[str, Any], text: str, param: str) -> None:
    body = msgspec.convert({"input": "Hi", **fields}, ResponsesRequest)  # lone surrogates are not JSON
    with pytest.raises((ApiError, InvalidRequest)) as error:
        parse_responses(body)
    message, found = refusal(error)
    assert message.startswith(text)
    assert found == param


# Answers


class Script:
    """A parser with a fixed result for each text."""

    is_over = False

    def __init__(self, meanings: dict[str, list[Piece]]) -> None:
        self._meanings = meanings

    def push(self, text: str) -> list[Piece]:
        return self._meanings.get(text, [Words(text)] if text else [])

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        del is_cut
        return self._meanings.get("end", [])


def delta(
    text: str = "", finish: FinishReason | None = None, *, num_tokens: int = 1, logprobs: tuple[TokenLogprob, ...] = ()
) -> Delta:
    error = "it broke" if finish is FinishReason.ERROR else None
    return Delta(0, text, (1,) * num_tokens, logprobs, finish, None, error)


def made_up(
    deltas: Sequence[Delta | Exception], meanings: dict[str, list[Piece]] | None, body: ResponsesRequest
) -> ActiveRequest:
    ask = parse_responses(msgspec.structs.replace(body, tools=None, tool_choice=None))
    active = FakeActiveRequest(
        ask,
        [[one] for one in deltas if isinstance(one, Delta)],
        num_prompt=10,
        num_cached=8,
        pinned_tokens=10,
        cache=CacheExplanation(8, 0, 8, StopReason.DIVERGED),
        error=next((one for one in deltas if isinstance(one, Exception)), None),
        request_id="r1",
        model="m",
        num_thought_tokens=3,
        prompt=(1,) * 10,
        requests=(SimpleNamespace(sampling=SamplingParams(temperature=0.25, top_p=0.5)),),
        parser=Script(meanings or {}),
    )
    return cast("ActiveRequest", active)


def stream(
    deltas: Sequence[Delta | Exception], meanings: dict[str, list[Piece]] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """Parse events like a client. Validates each with the SDK's types, and the numbering."""

    async def collect() -> bytes:
        body = body_of(**fields)
        work = made_up(deltas, meanings, body)
        reply = Reply(work, body)
        written = b""
        try:
            async for data in events_of(work, reply):
                written += data
        except Exception as error:
            written += reply.fail(api_error(error, work.request_id)) or b""
        return written

    found: list[dict[str, Any]] = []
    for frame in asyncio.run(collect()).decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        SDK_EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def whole(deltas: Sequence[Delta | Exception], meanings: dict[str, list[Piece]] | None = None, **fields: Any) -> Any:
    body = body_of(**fields)
    reply = Reply(made_up(deltas, meanings, body), body)
    asyncio.run(reply.collect())
    found = json.loads(msgspec.json.encode(reply.whole()))
    SdkResponse.model_validate(found)
    return found


def summary_of(event: dict[str, Any]) -> tuple[str, Any]:
    """Return an event's name without `response.`, and its new content."""
    name = event["type"].removeprefix("response.")
    for key in ("delta", "text", "arguments"):
        if key in event:
            return name, event[key]
    if "part" in event:
        return name, event["part"]["text"]
    if "item" in event:
        return name, (event["item"]["type"], event["item"]["status"])
    return name, event["response"]["status"]


def message_item(text: str, status: str = "completed", index: int = 0) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "logprobs": [], "annotations": []}
    return {"type": "message", "id": f"msg_r1_{index}", "status": status, "role": "assistant", "content": [part]}


def test_a_stream_of_text() -> None:
    found = stream([delta(), delta("Hé"), delta("llo"), delta("", FinishReason.STOP)])
    assert [summary_of(event) for event in found] == [
        ("created", "in_progress"),
        ("in_progress", "in_progress"),
        ("output_item.added", ("message", "in_progress")),
        ("content_part.added", ""),
        ("output_text.delta", "Hé"),
        ("output_text.delta", "llo"),
        ("output_text.done", "Héllo"),
        ("content_part.done", "Héllo"),
        ("output_item.done", ("message", "completed")),
        ("completed", "completed"),
    ]
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["usage"] is None
    final = found[-1]["response"]
    assert final["output"] == [message_item("Héllo")]
    assert final["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }
    assert {event["item_id"] for event in found if "item_id" in event} == {"msg_r1_0"}


MEANINGS: dict[str, list[Piece]] = {
    "<think>": [],
    "hm": [Thought("hm")],
    "so": [Thought("so"), Words("I will ")],
    "<call f>": [CallStart(0, "call_1", "f"), CallArguments(0, '{"a"')],
    "<1>": [CallArguments(0, ":1}")],
    "<call g>": [CallStart(1, "call_2", "g")],
    "end": [CallArguments(1, "{}")],
}
DELTAS = [delta(text) for text in ("<think>", "hm", "so", "call.", "<call f>", "<1>", "<call g>")]


def test_a_stream_of_reasoning_text_and_calls() -> None:
    found = stream([*DELTAS, delta("", FinishReason.STOP)], MEANINGS)
    assert [summary_of(event) for event in found[2:]] == [
        ("output_item.added", ("reasoning", "in_progress")),
        ("content_part.added", ""),
        ("reasoning_text.delta", "hm"),
        ("reasoning_text.delta", "so"),
        ("reasoning_text.done", "hmso"),
        ("content_part.done", "hmso"),
        ("output_item.done", ("reasoning", "completed")),
        ("output_item.added", ("message", "in_progress")),
        ("content_part.added", ""),
        ("output_text.delta", "I will "),
        ("output_text.delta", "call."),
        ("output_text.done", "I will call."),
        ("content_part.done", "I will call."),
        ("output_item.done", ("message", "completed")),
        ("output_item.added", ("function_call", "in_progress")),
        ("function_call_arguments.delta", '{"a"'),
        ("function_call_arguments.delta", ":1}"),
        ("function_call_arguments.done", '{"a":1}'),
        ("output_item.done", ("function_call", "completed")),
        ("output_item.added", ("function_call", "in_progress")),
        ("function_call_arguments.delta", "{}"),
        ("function_call_arguments.done", "{}"),
        ("output_item.done", ("function_call", "completed")),
        ("completed", "completed"),
    ]
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    output = found[-1]["response"]["output"]
    done = {"type": "function_call", "status": "completed"}
    assert output == [
        {
            "type": "reasoning",
            "id": "rs_r1_0",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hmso"}],
        },
        message_item("I will call.", index=1),
        {**done, "id": "fc_r1_2", "call_id": "call_1", "name": "f", "arguments": '{"a":1}'},
        {**done, "id": "fc_r1_3", "call_id": "call_2", "name": "g", "arguments": "{}"},
    ]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output
    # The same without a stream.
    assert whole([*DELTAS, delta("", FinishReason.STOP)], MEANINGS)["output"] == output


def test_an_answer_can_be_sent_back_unchanged() -> None:
    output = whole([*DELTAS, delta("", FinishReason.STOP)], MEANINGS)["output"]
    *_, last = conversation(input=[{"role": "user", "content": "x"}, *output]).messages
    calls = (ToolCall("call_1", "f", '{"a":1}'), ToolCall("call_2", "g", "{}"))
    assert last == Message(Role.ASSISTANT, (Part("I will call."),), thought="hmso", tool_calls=calls)


def test_an_answer_cut_at_its_length() -> None:
    found = stream([delta("Hi"), delta(" th", FinishReason.LENGTH)])
    assert [summary_of(event) for event in found[-2:]] == [
        ("output_item.done", ("message", "incomplete")),
        ("incomplete", "incomplete"),
    ]
    final = found[-1]["response"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["completed_at"] is None
    assert final["output"] == [message_item("Hi th", "incomplete")]
    cut = whole([delta("<call f>", FinishReason.LENGTH)], {**MEANINGS, "end": []})
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["output"][0]["arguments"] == '{"a"'


def test_an_empty_answer_has_an_empty_message() -> None:
    assert whole([delta("", FinishReason.STOP)])["output"] == [message_item("")]
    names = [summary_of(event)[0] for event in stream([delta("", FinishReason.STOP)])]
    assert names[2:4] == ["output_item.added", "content_part.added"]
    assert "output_text.delta" not in names


def test_logprobs_belong_to_the_text() -> None:
    hi = TokenLogprob(5, "Hi", b"Hi", -0.5, 0, (TokenLogprob(5, "Hi", b"Hi", -0.5, 0),))
    half = TokenLogprob(6, "\ufffd", b"\xf0", float("-inf"), 1)
    end = TokenLogprob(7, "", b"", -1.0, 0)
    deltas = [
        delta("", logprobs=(half,)),
        delta("Hi", logprobs=(hi,)),
        delta("", FinishReason.STOP, logprobs=(end,)),
    ]
    found = stream(deltas, include=["message.output_text.logprobs"], top_logprobs=1)
    first, last = (event for event in found if event["type"] == "response.output_text.delta")
    assert [one["token"] for one in first["logprobs"]] == ["bytes:\\xf0", "Hi"]
    assert first["logprobs"][0]["logprob"] == -9999.0
    assert first["logprobs"][1]["top_logprobs"] == [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}]
    assert (last["delta"], len(last["logprobs"])) == ("", 1)
    part = found[-1]["response"]["output"][0]["content"][0]
    assert (part["text"], len(part["logprobs"])) == ("Hi", 3)


def test_the_response_repeats_request_fields() -> None:
    found = whole(
        [delta("Hi", FinishReason.STOP)],
        instructions="Help.",
        max_output_tokens=7,
        metadata={"a": "b"},
        tools=[F],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        reasoning={"effort": "low"},
        prompt_cache_key="doc",
        user="me",
        store=True,
        cache=True,
    )
    assert found["id"] == "resp_r1"
    assert (found["instructions"], found["max_output_tokens"], found["metadata"]) == ("Help.", 7, {"a": "b"})
    assert (found["tools"], found["tool_choice"]) == ([F], {"type": "function", "name": "f"})
    assert (found["text"], found["reasoning"]) == (
        {"format": {"type": "json_object"}, "verbosity": "low"},
        {"effort": "low"},
    )
    assert (found["temperature"], found["top_p"]) == (0.25, 0.5)  # defaults filled in
    assert (found["parallel_tool_calls"], found["prompt_cache_key"], found["user"]) == (False, "doc", "me")
    assert found["store"] is False  # nothing is stored
    assert found["cache"]["reason"] == "diverged"
    assert "cache" not in whole([delta("Hi", FinishReason.STOP)])


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (RequestFailed("the answer could not be read: ..."), "server_error", "the answer could not be read"),
        (ApiError(Kind.RATE_LIMITED, "too much"), "rate_limit_exceeded", "too much"),
        (ValueError("a path"), "server_error", "the server could not process this request; see r1 in the server log"),
        (delta("", FinishReason.ERROR), "server_error", "it broke"),
    ],
    ids=str,
)
def test_a_failure_in_mid_stream(failure: Delta | Exception, code: str, text: str) -> None:
    *_, last = stream([delta("Hi"), failure])
    assert summary_of(last) == ("failed", "failed")
    assert last["response"]["error"] == {"code": code, "message": text}


def test_a_failure_of_a_whole_answer_is_an_error() -> None:
    with pytest.raises(ApiError, match="it broke"):
        whole([delta("Hi"), delta("", FinishReason.ERROR)])


def test_a_failure_before_the_response_is_an_error_event() -> None:
    error = ApiError(Kind.OVERLOADED, "too many", param="input")
    name, data = RESPONSES.event(error, "r1").decode().removesuffix("\n\n").split("\ndata: ")
    event = SDK_EVENT.validate_json(data)
    assert (name, event.type, event.sequence_number) == ("event: error", "error", 0)
    assert (event.code, event.message, event.param) == ("server_overloaded", "too many", "input")
    assert json.loads(data)["error"] == json.loads(RESPONSES.body(error, "r1"))["error"]  # the client reads this
