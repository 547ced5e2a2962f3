"""Codec of /v1/messages without a socket: parsing, edits of the context, events and errors, by Anthropic's SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import FinishReason, Priority
from quire.engine.generation import Completion, Delta, GenerationParams
from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.server import cache
from quire.server.errors import ApiError, Kind
from quire.server.models import ActiveRequest, Breakpoint, InferenceRequest
from quire.server.protocols.anthropic import (
    ANTHROPIC,
    CLEARED,
    CountTokensRequest,
    Edited,
    MessagesRequest,
    Reply,
    apply,
    check_fields,
    conversation,
    ignored_edits,
    to_inference_request,
)
from quire.text.grammar import json_schema_grammar
from quire.text.messages import ChatRequest, Message, Part, Role, Tool, ToolCall, ToolChoice, ToolMode
from tests.server.rig import Server
from tests.server.streams import FakeActiveRequest, chat_of, events_of, whole_of

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def parse(**body: Any) -> InferenceRequest:
    data = json.dumps({"model": "m", "max_tokens": 8, "messages": HELLO} | body)
    return to_inference_request(msgspec.json.decode(data, type=MessagesRequest))


def texts(ask: InferenceRequest) -> list[tuple[str, list[str]]]:
    return [(message.role.value, [part.text for part in message.parts]) for message in chat_of(ask).messages]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


# Parsing


def test_every_field_is_parsed() -> None:
    ask = parse(
        model="smollm2", max_tokens=7, system="Be brief.", stop_sequences=["\n\n", "END"], stream=True,
        temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=-3, ignore_eos=True,
        priority="low", cache_salt="team-a", cache=True, metadata={"user_id": "u"}, service_tier="standard_only",
    )  # fmt: skip
    assert ask == InferenceRequest(
        model="smollm2",
        prompts=(ChatRequest((Message(Role.SYSTEM, (Part("Be brief."),)), Message(Role.USER, (Part("Hello"),)))),),
        params=GenerationParams(
            temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=-3, max_tokens=7,
            stop=("\n\n", "END"), ignore_eos=True,
        ),
        is_streaming=True,
        priority=Priority.LOW,
        cache_salt="team-a",
        wants_cache=True,
    )  # fmt: skip


@pytest.mark.parametrize("missing", ["model", "messages", "max_tokens"])
def test_required_fields(missing: str) -> None:
    body = {"model": "m", "max_tokens": 8, "messages": HELLO}
    del body[missing]
    with pytest.raises(msgspec.ValidationError, match=missing):
        msgspec.json.decode(json.dumps(body), type=MessagesRequest)


def test_content_is_a_string_or_blocks_of_text() -> None:
    blocks = [text("a"), text("b", citations=None)]
    ask = parse(messages=[{"role": "user", "content": blocks}], system=[text("s1"), text("s2")])
    assert texts(ask) == [("system", ["s1", "s2"]), ("user", ["a", "b"])]
    assert texts(parse(system="")) == texts(parse(system=[])) == [("user", ["Hello"])]


def test_turns_of_one_role_are_one_turn() -> None:
    ask = parse(
        system="S",
        messages=[
            {"role": "system", "content": "T"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": [text("b", cache_control=EPHEMERAL)]},
            {"role": "user", "content": []},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": [text("e", cache_control=HOUR)]},
        ],
    )
    assert texts(ask) == [
        ("system", ["S", "\n\n", "T"]),
        ("user", ["a", "\n\n", "b"]),
        ("assistant", ["c", "d"]),  # the second text continues the first
        ("user", ["e"]),
    ]
    assert ask.breakpoints == (Breakpoint(1, 2, 300.0), Breakpoint(3, 0, 3600.0))


def test_an_assistant_at_the_end_is_continued() -> None:
    assert chat_of(parse()).add_generation_prompt
    assert not chat_of(parse()).continue_last
    chat = chat_of(parse(messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}]))
    assert chat.continue_last
    assert not chat.add_generation_prompt
    assert chat.messages[-1].text == "The answer is ("


def test_reasoning_of_earlier_turns_is_kept_apart_from_text() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]
    marked = text("a", cache_control=EPHEMERAL)
    ask = parse(messages=[*HELLO, {"role": "assistant", "content": [*thoughts, marked]}, *HELLO])
    assert texts(ask)[1] == ("assistant", ["a"])
    assert chat_of(ask).messages[1].thought == "hm"
    assert ask.breakpoints == (Breakpoint(1, 0, 300.0),)
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0\.type = 'thinking'"):
        parse(messages=[{"role": "user", "content": thoughts}])


def test_an_answer_can_be_sent_back() -> None:
    """The SDK's form of our response is a valid message of a request."""
    found = SdkMessage.model_validate(answer(reply(), "Hi", FinishReason.STOP))
    ask = parse(messages=[*HELLO, json.loads(json.dumps(found.to_param(), default=lambda block: block.to_dict()))])
    assert texts(ask)[1] == ("assistant", ["Hi"])


@pytest.mark.parametrize("kind", ["image", "document", "tool_use", "search_result", "container_upload", "nonsense", ""])
def test_blocks_that_are_not_text_are_refused_by_name(kind: str) -> None:
    image = {"type": kind, "source": {"type": "url", "url": "https://example.com"}, "id": "x", "content": []}
    with pytest.raises(ApiError) as refused:
        parse(messages=[*HELLO, {"role": "user", "content": [text("a"), image]}])
    assert refused.value.kind is Kind.INVALID
    assert refused.value.param == "messages.1.content.1.type"
    assert f"messages.1.content.1.type = {kind!r}" in refused.value.message
    with pytest.raises(ApiError, match=r"system\.0\.type"):
        parse(system=[image])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages has 0 entries"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, r"messages\.1\.role = 'tool' is not one of user,"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\.0\.content\.0\.text is missing"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"max_tokens": 10**30}, "max_tokens = 1000"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": 1.5}, "temperature = 1.5 is not from 0 to 1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 2}, "min_p = 2"),
        ({"seed": 2**65}, "seed = "),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] has 0 characters"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 strings"),
        ({"priority": "soon"}, "priority = 'soon'"),
        (
            {"messages": [{"role": "user", "content": [text("a", cache_control=EPHEMERAL)] * 5}]},
            "cache_control appears 5 times",
        ),
        ({"cache_salt": "a b"}, "cache_salt = 'a b'"),
    ],
)
def test_invalid_values_are_refused_with_field_and_value(body: dict[str, Any], words: str) -> None:
    with pytest.raises((ApiError, InvalidRequest), match=words):
        parse(**body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "Hello"},
        {"messages": [None]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": None, "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [text("x", cache_control={"type": "eternal"})]}]},
        {"messages": [{"role": "user", "content": [text("x", cache_control={**EPHEMERAL, "ttl": "1d"})]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"max_tokens": "8"},
        {"max_tokens": 8.5},
        {"max_tokens": True},
        {"max_tokens": None},
        {"system": 5},
        {"stop_sequences": "END"},
        {"stop_sequences": [5]},
        {"stream": "yes"},
        {"service_tier": "batch"},
        {"cache_control": "ephemeral"},
        {"seed": 1.5},
        {"cache": 1},
        {"metadata": "u"},
    ],
)
def test_wrong_types_are_validation_errors(body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        parse(**body)


def test_counting_refuses_the_same_fields() -> None:
    body = msgspec.convert({"model": "m", "messages": HELLO, "speed": "fast"}, CountTokensRequest)
    with pytest.raises(ApiError, match=r"^speed = 'fast' is not supported: this server has a single speed"):
        check_fields(body)


def test_harmless_and_hostile_values_of_unsupported_fields() -> None:
    bodies: list[dict[str, Any]] = [
        {"tools": [], "tool_choice": {"type": "auto"}, "thinking": None, "output_format": None},
        {"output_config": {"format": None, "effort": None}},
        {"diagnostics": {"previous_message_id": None}},
    ]
    for body in bodies:
        assert parse(**body) == parse()
    deep = nested(400)
    for value in (deep, [deep], {"type": ["disabled"]}, {"x": "disabled"}, False, 0, 1e300, {"k" * 5000: 1}):
        with pytest.raises(ApiError) as refused:
            parse(compaction=value)
        assert len(refused.value.message) < 300


MARKED = {"role": "user", "content": [text("a"), text("b", cache_control=EPHEMERAL), text("c")]}
LAST_MARKED = {"role": "user", "content": [text("a"), text("b", cache_control=EPHEMERAL)]}
FOUR_MARKED = {"role": "user", "content": [text("a", cache_control=EPHEMERAL)] * 4}
BREAKPOINTS: list[tuple[dict[str, Any], tuple[Breakpoint, ...]]] = [
    (
        {
            "system": [text("s", cache_control=HOUR)],
            "messages": [
                MARKED,
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": [text("e", cache_control={**EPHEMERAL, "ttl": "5m"})]},
            ],
        },
        (Breakpoint(0, 0, 3600.0), Breakpoint(1, 1, 300.0), Breakpoint(3, 0, 300.0)),
    ),
    ({"messages": [MARKED]}, (Breakpoint(0, 1, 300.0),)),
    ({"messages": [FOUR_MARKED]}, tuple(Breakpoint(0, i, 300.0) for i in range(4))),
    # Of the whole request: at its last block, unless that has its own.
    ({"cache_control": HOUR, "system": "s"}, (Breakpoint(1, 0, 3600.0),)),
    ({"cache_control": HOUR, "messages": [LAST_MARKED]}, (Breakpoint(0, 1, 300.0),)),
    ({"cache_control": HOUR, "messages": [{"role": "user", "content": []}]}, ()),
    # Of tools: they are kept with the system text.
    ({"tools": [{"name": "a"}, {"name": "b", "cache_control": HOUR}], "system": "S"}, (Breakpoint(0, 0, 3600.0),)),
    ({"tools": [{"name": "b", "cache_control": HOUR}]}, (Breakpoint(0, -1, 3600.0),)),
]


@pytest.mark.parametrize(("body", "breakpoints"), BREAKPOINTS)
def test_cache_control_sets_breakpoints(body: dict[str, Any], breakpoints: tuple[Breakpoint, ...]) -> None:
    assert parse(**body).breakpoints == breakpoints


def test_counting_takes_the_same_conversation() -> None:
    data = json.dumps({"model": "m", "messages": HELLO, "system": [text("s")]})
    found = conversation(msgspec.json.decode(data, type=CountTokensRequest))
    assert found.chat == chat_of(parse(system=[text("s")]))


# Tools, reasoning, answer formats

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Of a city", "input_schema": SCHEMA}
SEARCH = {"name": "web", "type": "web_search_20250305"}


def test_tools_that_a_server_runs_are_left_out_and_named() -> None:
    ask = parse(tools=[SEARCH, WEATHER])
    assert [tool.name for tool in chat_of(ask).tools] == ["get_weather"]
    assert chat_of(ask).tools[0].schema_path == "tools.1.input_schema"
    assert ask.ignored == ("tools[0].web_search_20250305",)


def test_a_server_s_tool_needs_no_name() -> None:
    assert parse(tools=[{"type": "mcp_toolset", "mcp_server_name": "x"}]).ignored == ("tools[0].mcp_toolset",)
    with pytest.raises(ApiError, match=r"tools\.0\.name is missing"):
        parse(tools=[{"description": "x"}])


def test_a_deferred_tool_is_shown_after_a_reference() -> None:
    tools = [WEATHER, {"name": "now", "defer_loading": True}]
    assert [tool.name for tool in chat_of(parse(tools=tools)).tools] == ["get_weather"]
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "now"}]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather"}]}
    chat = chat_of(parse(tools=tools, messages=[*HELLO, called, {"role": "user", "content": [found]}]))
    assert [tool.name for tool in chat.tools] == ["get_weather", "now"]
    assert chat.messages[-1].text == "Tool found: now"
    forced = chat_of(parse(tools=tools, tool_choice={"type": "tool", "name": "now"}))
    assert [tool.name for tool in forced.callable_tools] == ["now"]


def test_thinking_and_effort() -> None:
    for thinking, expected in (
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
    ):
        assert chat_of(parse(thinking=thinking)).wants_thought is expected
    later = [*HELLO, {"role": "system", "content": "s", "output_config": {"effort": "low"}}]
    assert chat_of(parse(output_config={"effort": "high"})).reasoning_effort == "high"
    assert chat_of(parse(messages=later, output_config={"effort": "high"})).reasoning_effort == "low"


def test_claude_codes_billing_block_is_dropped() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2; cch=1f3;"), text("Be kind.")]
    assert chat_of(parse(system=blocks)).messages == chat_of(parse(system=[text("Be kind.")])).messages


def test_tools_and_choices() -> None:
    chat = chat_of(parse(tools=[WEATHER, {"name": "now", "strict": True}]))
    assert chat.tools == (Tool("get_weather", "Of a city", SCHEMA, is_strict=False), Tool("now"))
    assert chat.tool_choice == ToolChoice()
    for given, expected in (
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(ToolMode.REQUIRED, is_parallel=False)),
        ({"type": "tool", "name": "get_weather"}, ToolChoice(ToolMode.REQUIRED, "get_weather")),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
    ):
        assert chat_of(parse(tools=[WEATHER], tool_choice=given)).tool_choice == expected


def test_calls_and_results_in_a_conversation() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    parts = [text("4"), text("5")]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts, "cache_control": EPHEMERAL}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": True}
    ask = parse(
        tools=[WEATHER],
        messages=[
            *HELLO,
            {"role": "assistant", "content": [text("Let me see."), use, {**use, "id": "toolu_2"}]},
            {"role": "user", "content": [result, failed, text("And now?")]},
        ],
    )
    _, call, first, second, question = chat_of(ask).messages
    assert call.text == "Let me see."
    assert call.tool_calls[0] == ToolCall("toolu_1", "get_weather", '{"city":"Oslo"}')
    assert [one.call_id for one in call.tool_calls] == ["toolu_1", "toolu_2"]
    assert (first.role, first.text, first.tool_call_id) == (Role.TOOL, "4\n5", "toolu_1")
    assert (second.role, second.text, second.tool_call_id) == (Role.TOOL, "Error: gone", "toolu_2")
    assert (question.role, question.text) == (Role.USER, "And now?")
    assert ask.breakpoints == (Breakpoint(2, 0, 300.0),)


USE = {"type": "tool_use", "id": "x", "name": "f"}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"name": "a b"}]}, r"^tools\.0\.name = 'a b' is not 1 to 128 of"),
        ({"tools": [WEATHER, WEATHER]}, r"^tools\.1\.name = 'get_weather' is another tool's"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, r"^tools\.0\.input_schema\.type = 'array'"),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web"}},
            r"^tool_choice\.name = 'web' is not supported: this server runs no tools",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "^tool_choice asks for a call, and tools has no"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, r"^tool_choice\.name is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "^tool_choice names 'x', which is not"),
        ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, r"^tool_choice\.type = 'all' is not one of auto, any"),
        ({"tool_choice": {"type": "any"}}, "^tool_choice asks for a call, and tools has no function"),
        ({"thinking": {"type": "maybe"}}, r"^thinking\.type = 'maybe' is not one of"),
        ({"output_format": {"type": "xml"}}, r"^output_format\.type = 'xml' is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, r"^output_config\.format\.schema is missing"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]}]},
            r"^messages\.1: tool_use has no result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            r"^messages\.0\.content\.0\.tool_use_id is missing",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, *HELLO]},
            r"^messages\.0\.content\.0\.name is missing",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": nested(65)}]}, *HELLO]},
            r"^messages\.0\.content\.0\.input is nested more than 64 deep",
        ),
    ],
)
def test_invalid_tools_are_refused_by_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises((ApiError, InvalidRequest), match=words):
        parse(**body)


def test_the_format_of_an_answer() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    expected = json_schema_grammar(SCHEMA, strict=False)
    assert parse(output_config={"format": form}).params.grammar == expected
    assert parse(output_format=form).params.grammar == expected
    assert parse().params.grammar is None


# Encoding


def delta(words: str, *, finish: FinishReason | None = None, stop: str | None = None) -> Delta:
    return Delta(0, words, (1,), (), finish, stop)


def reply(
    *steps: Sequence[Delta], max_tokens: int = 8, hour_tokens: int = 0, shows_thoughts: bool = False, **more: Any
) -> Reply:
    wants_cache = bool(more.pop("wants_cache", False))
    body = {"model": "m", "max_tokens": max_tokens, "messages": HELLO, "cache": wants_cache}
    body |= {"tools": more.pop("tools", None), "thinking": {"type": "adaptive"} if shows_thoughts else None}
    asked = msgspec.convert(body, MessagesRequest)
    ask = to_inference_request(asked)
    made = Reply(cast(ActiveRequest, FakeActiveRequest(ask, steps, **more)), asked, Edited(chat_of(ask)))
    made.num_hour_tokens = hour_tokens
    return made


def answer(made: Reply, words: str, finish: FinishReason, stop: str | None = None) -> Any:
    return whole_of(made, Completion(0, words, (1,), finish, stop))


def stream(made: Reply) -> bytes:
    async def collect() -> bytes:
        active = made.active
        assert made.waits_for_start  # the first event has the cache hit
        return b"".join([chunk async for chunk in events_of(active, made)])

    return asyncio.run(collect())


def events_in(data: bytes) -> list[dict[str, Any]]:
    """Return the events, each validated strictly by the SDK's types, and its name against its type."""
    found: list[dict[str, Any]] = []
    for chunk in data.decode().split("\n\n")[:-1]:
        name, _, payload = chunk.partition("\n")
        parsed = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        TypeAdapter(RawMessageStreamEvent).validate_python(parsed)
        found.append(parsed)
    return found


def sdk(status: int, data: bytes, kind: str = "application/json") -> anthropic.Anthropic:
    """The official client, which receives these bytes as the response."""
    seen: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(status, content=data, headers={"content-type": kind, "request-id": "req_1"})

    transport = httpx2.MockTransport(answer)
    return anthropic.Anthropic(
        api_key="k", base_url="http://127.0.0.1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def read_by_sdk(data: bytes) -> SdkMessage:
    with (
        sdk(200, data, "text/event-stream") as client,
        client.messages.stream(model="tiny", max_tokens=8, messages=[{"role": "user", "content": "x"}]) as events,
    ):
        return events.get_final_message()


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ORDER = ["message_start", "content_block_start", "content_block_delta", "content_block_stop"]


def test_events_come_in_the_order_the_sdk_enforces() -> None:
    made = reply([delta("Hel"), delta("lo")], [delta("")], [delta(" you", finish=STOP)])
    data = stream(made)
    kinds = [parsed["type"] for parsed in events_in(data)]
    assert kinds == [*ORDER[:3], *ORDER[2:], "message_delta", "message_stop"]  # no event for a step without text
    message = read_by_sdk(data)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello you"}]
    assert (message.id, message.model, message.role, message.type) == ("msg_req_1", "tiny", "assistant", "message")
    assert (message.stop_reason, message.stop_sequence, message.usage.output_tokens) == ("end_turn", None, 4)


def test_message_start_has_the_cache_and_message_delta_repeats_the_usage() -> None:
    steps = [delta("x")], [delta("y", finish=STOP)]
    (start, *_, end, _) = events_in(stream(reply(*steps, num_cached=64, pinned_tokens=96)))
    start = start["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 32,
        "cache_read_input_tokens": 64,
        "cache_creation": {"ephemeral_5m_input_tokens": 32, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 0,
        "service_tier": "standard",
    }
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert end["usage"] == {name: start["usage"][name] for name in names} | {"output_tokens": 2}
    assert "cache" not in end


@pytest.mark.parametrize(
    ("finish", "stop", "count", "expected"),
    [
        (STOP, None, 2, ("end_turn", None)),
        (STOP, "END", 2, ("stop_sequence", "END")),
        (LENGTH, None, 8, ("max_tokens", None)),
        (LENGTH, None, 7, ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(finish: FinishReason, stop: str | None, count: int, expected: tuple[str, str | None]) -> None:
    steps = [*([delta("x")] for _ in range(count - 1)), [delta("x", finish=finish, stop=stop)]]
    streamed = read_by_sdk(stream(reply(*steps)))
    assert (streamed.stop_reason, streamed.stop_sequence) == expected
    whole = reply(*steps)
    stream(whole)  # counts the tokens
    found = SdkMessage.model_validate(answer(whole, "x" * count, finish, stop))
    assert (found.stop_reason, found.stop_sequence) == expected
    assert found.model_dump(exclude_none=True) == streamed.model_dump(exclude_none=True)


CALLING = [
    [delta("<think>\nhm"), delta(" so</think>\n\nI look.\n<tool_")],
    [delta('call>\n{"name": "get_weather", "arg')],
    [delta('uments": {"city":')],
    [delta(' "Oslo"}}\n</tool_call>', finish=FinishReason.STOP)],
]


@pytest.mark.parametrize("shows_thoughts", [True, False])
def test_reasoning_text_and_calls_are_blocks(shows_thoughts: bool) -> None:
    data = stream(reply(*CALLING, tools=[WEATHER], shows_thoughts=shows_thoughts))
    events_in(data)  # validates each event
    streamed = read_by_sdk(data)
    thought, words, use = [None, *streamed.content][-3:]
    assert len(streamed.content) == 2 + shows_thoughts
    if shows_thoughts:
        assert thought is not None
        assert thought.to_dict() == {"type": "thinking", "thinking": "hm so", "signature": ""}
    assert words is not None
    assert words.to_dict() == text("I look.")
    assert isinstance(use, anthropic.types.ToolUseBlock)
    assert (use.name, use.input) == ("get_weather", {"city": "Oslo"})
    assert use.id.startswith("toolu_")
    assert streamed.stop_reason == "tool_use"
    made = reply(*CALLING, tools=[WEATHER], shows_thoughts=shows_thoughts)
    whole = answer(made, "".join(one.text for step in CALLING for one in step), STOP)
    blocks = [block.to_dict() for block in SdkMessage.model_validate(whole).content]
    assert [block | {"id": ""} for block in blocks] == [block.to_dict() | {"id": ""} for block in streamed.content]
    assert whole["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_off_has_no_input_and_a_stop_reason() -> None:
    steps = [[delta('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os', finish=LENGTH)]]
    data = stream(reply(*steps, tools=[WEATHER], max_tokens=1))
    deltas = [parsed["delta"] for parsed in events_in(data) if parsed["type"] == "content_block_delta"]
    assert "".join(one["partial_json"] for one in deltas) == '{"city": "Os'
    made = reply(*steps, tools=[WEATHER], max_tokens=1)
    stream(made)  # counts the tokens
    whole = answer(made, steps[0][0].text, LENGTH)
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {}


def test_an_answer_without_text_has_an_empty_block() -> None:
    data = stream(reply([delta("", finish=STOP)]))
    assert [parsed["type"] for parsed in events_in(data)] == [*ORDER[:2], ORDER[3], "message_delta", "message_stop"]
    assert [block.to_dict() for block in read_by_sdk(data).content] == [text("")]
    whole = answer(reply(), "", STOP)
    assert whole["content"] == [text("")]


def test_max_tokens_0_fills_the_cache_and_returns_no_block() -> None:
    assert parse(max_tokens=0).params.max_tokens == 1
    made = reply([delta("x", finish=LENGTH)], max_tokens=0, pinned_tokens=96)
    data = stream(made)
    assert [parsed["type"] for parsed in events_in(data)] == ["message_start", "message_delta", "message_stop"]
    message = read_by_sdk(data)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert message.usage.cache_creation_input_tokens == 96
    whole = SdkMessage.model_validate(answer(made, "x", LENGTH))
    assert whole.model_dump(exclude_none=True) == message.model_dump(exclude_none=True)


def test_the_three_kinds_of_input_tokens_add_up_to_the_prompt() -> None:
    for cached in range(0, 100, 9):
        for pinned in range(0, 101, 10):
            for hour in range(0, pinned + 1, 10):
                usage = reply(num_cached=cached, pinned_tokens=pinned, hour_tokens=hour).usage()
                created = usage.cache_creation_input_tokens
                assert usage.input_tokens + created + usage.cache_read_input_tokens == 100
                assert usage.cache_read_input_tokens == cached
                assert created == max(0, pinned - cached)
                split = usage.cache_creation
                assert split.ephemeral_1h_input_tokens == max(0, hour - cached)
                assert split.ephemeral_5m_input_tokens + split.ephemeral_1h_input_tokens == created
                assert min(usage.input_tokens, split.ephemeral_5m_input_tokens) >= 0


def test_the_cache_explanation_is_returned_on_request() -> None:
    found = CacheExplanation(40, 1, 40, StopReason.DIVERGED)
    made = reply([delta("x", finish=STOP)], wants_cache=True, cache=found, num_cached=40)
    data = stream(made)
    assert (
        events_in(data)[-2]["cache"].items() >= {"matched_tokens": 40, "stopped_at": 40, "reason": "diverged"}.items()
    )
    assert read_by_sdk(data).stop_reason == "end_turn"
    whole = answer(made, "x", STOP)
    assert whole["cache"] == events_in(data)[-2]["cache"]
    assert whole["cache"]["prompt_tokens"] == 2
    silent = answer(reply(cache=found), "x", STOP)
    assert "cache" not in silent


def test_line_breaks_in_text_do_not_break_a_frame() -> None:
    words = 'a\n\nevent: error\ndata: {}\n\n\r\u2028\x85\x00"\\ \U0001f600'
    message = read_by_sdk(stream(reply([delta(words, finish=STOP)])))
    assert [block.to_dict() for block in message.content] == [text(words)]


def test_a_failure_in_mid_stream_is_raised_by_the_events() -> None:
    with pytest.raises(RequestFailed, match="boom"):
        stream(reply([delta("x")], error=RequestFailed("boom")))
    with pytest.raises(QuireError, match="cut off"):
        stream(reply([delta("x")]))  # ends without a finish reason


# Errors

EXPECTED: dict[Kind, tuple[int, str, type[anthropic.APIStatusError]]] = {
    Kind.INVALID: (400, "invalid_request_error", anthropic.BadRequestError),
    Kind.TOO_LONG: (400, "invalid_request_error", anthropic.BadRequestError),
    Kind.AUTHENTICATION: (401, "authentication_error", anthropic.AuthenticationError),
    Kind.PERMISSION: (403, "permission_error", anthropic.PermissionDeniedError),
    Kind.NOT_FOUND: (404, "not_found_error", anthropic.NotFoundError),
    Kind.NO_MODEL: (404, "not_found_error", anthropic.NotFoundError),
    Kind.METHOD: (405, "invalid_request_error", anthropic.APIStatusError),
    Kind.TIMEOUT: (408, "timeout_error", anthropic.APIStatusError),
    Kind.TOO_LARGE: (413, "request_too_large", anthropic.APIStatusError),
    Kind.RATE_LIMITED: (429, "rate_limit_error", anthropic.RateLimitError),
    Kind.OVERLOADED: (529, "overloaded_error", anthropic.InternalServerError),
    Kind.UNAVAILABLE: (503, "overloaded_error", anthropic.InternalServerError),
    Kind.FAILED: (500, "api_error", anthropic.InternalServerError),
    Kind.DIED: (500, "api_error", anthropic.InternalServerError),
    Kind.CANCELLED: (499, "api_error", anthropic.APIStatusError),
}


@pytest.mark.parametrize("kind", Kind)
def test_the_sdk_raises_the_right_error(kind: Kind) -> None:
    status, name, raised = EXPECTED[kind]
    error = ApiError(kind, "it is so")
    body = ANTHROPIC.body(error, "req_1")
    assert ANTHROPIC.status(error) == status
    with sdk(status, body) as client, pytest.raises(raised) as caught:
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert (caught.value.type, caught.value.request_id) == (name, "req_1")
    assert json.loads(body)["type"] == "error"
    assert json.loads(body)["request_id"] == "req_1"
    assert "it is so" in json.loads(body)["error"]["message"]


def test_an_error_event_raises_in_the_sdk() -> None:
    started = stream(reply([delta("x", finish=STOP)])).partition(b"event: content_block_stop")[0]
    data = started + ANTHROPIC.event(ApiError(Kind.DIED, "the worker\n\ndied"), "req_1")
    with pytest.raises(anthropic.APIStatusError) as caught:
        read_by_sdk(data)
    assert (caught.value.type, caught.value.api_message) == ("api_error", "the worker\n\ndied")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ApiError(Kind.INVALID, "Expected `int`", param="max_tokens"), "max_tokens: Expected `int`"),
        (ApiError(Kind.INVALID, "max_tokens = -1 is wrong", param="max_tokens"), "max_tokens = -1 is wrong"),
        (ApiError(Kind.INVALID, "no body"), "no body"),
        (ApiError(Kind.TOO_LONG, "9 tokens are more than 8"), "prompt is too long: 9 tokens are more than 8"),
        (ApiError(Kind.INVALID, "a lone \ud800 surrogate"), "a lone ? surrogate"),
    ],
)
def test_the_message_names_the_field(error: ApiError, message: str) -> None:
    assert json.loads(ANTHROPIC.body(error, "r"))["error"]["message"] == message


# The cache endpoints


def cache_ask(body: dict[str, Any]) -> InferenceRequest:
    return cache.to_inference_request(msgspec.json.decode(json.dumps(body), type=cache.ExplainRequest))


def test_a_prompt_to_explain_is_a_conversation_text_or_tokens() -> None:
    assert texts(cache_ask({"messages": HELLO})) == [("user", ["Hello"])]
    assert cache_ask({"prompt": "Hello"}).prompts == ("Hello",)
    asked = cache_ask({"prompt": [1, 2], "cache_salt": "s", "model": "m"})
    assert (asked.prompts, asked.cache_salt, asked.model) == (((1, 2),), "s", "m")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt is missing"),
        ({"prompt": None, "messages": None}, "prompt is missing"),
        ({"prompt": "x", "messages": HELLO}, "exclude each other"),
        ({"messages": []}, "messages has 0 entries"),
        ({"prompt": "x", "cache_salt": "\n"}, "cache_salt = "),
    ],
)
def test_invalid_prompts_are_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidRequest, ApiError), match=words):
        cache_ask(body)


@pytest.mark.parametrize(
    "body", [{"prompt": 5}, {"prompt": ["x"]}, {"prompt": [1.5]}, {"messages": "x"}, {"prompt": {}}]
)
def test_wrong_types_of_prompt(body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        cache_ask(body)


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
THOUGHTS = "clear_thinking_20251015"
TOOLS = "clear_tool_uses_20250919"


def talk(num_calls: int = 5) -> list[dict[str, Any]]:
    """A conversation with reasoning before every call and ten words of result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for i in range(num_calls):
        thinking = {"type": "thinking", "thinking": f"thought {i}", "signature": ""}
        use = {"type": "tool_use", "id": f"t{i}", "name": "read" if i else "look", "input": {"path": str(i)}}
        messages.append({"role": "assistant", "content": [thinking, use]})
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"result {i} " * 10}
        messages.append({"role": "user", "content": [result]})
    return messages


def body_of(*edits: Any, messages: list[dict[str, Any]] | None = None) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 4, "messages": messages or talk(), "context_management": {"edits": edits}}
    return msgspec.json.decode(json.dumps(body), type=MessagesRequest)


def edit(*edits: Any, messages: list[dict[str, Any]] | None = None) -> Edited:
    body = body_of(*edits, messages=messages)

    async def count(chat: ChatRequest) -> int:
        return sum(len((message.text + message.thought).split()) for message in chat.messages)

    return asyncio.run(apply(body.context_management, conversation(body).chat, count))


def results(done: Edited) -> list[str]:
    return [message.text for message in done.chat.messages if message.role == "tool"]


def thoughts(done: Edited) -> list[str]:
    return [message.thought for message in done.chat.messages if message.thought]


def test_keeping_all_changes_nothing() -> None:
    done = edit(KEEP_ALL)
    assert done == Edited(conversation(body_of()).chat)


def test_old_reasoning_is_cleared() -> None:
    done = edit({"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 2}})
    assert thoughts(done) == ["thought 3", "thought 4"]
    assert msgspec.to_builtins(done.applied) == (
        {"type": THOUGHTS, "cleared_thinking_turns": 3, "cleared_input_tokens": 6},
    )
    assert thoughts(edit({"type": THOUGHTS})) == ["thought 4"]  # default: keep the last


def test_old_tool_results_are_cleared_when_there_are_many() -> None:
    few = {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 4}}
    done = edit(few)
    assert results(done)[:2] == [CLEARED, CLEARED]
    assert [text.startswith("result") for text in results(done)[2:]] == [True] * 3
    assert done.num_original_tokens == 1 + 5 * 22
    (applied,) = msgspec.to_builtins(done.applied)
    assert (applied["cleared_tool_uses"], applied["cleared_input_tokens"]) == (2, 2 * (20 - len(CLEARED.split())))
    assert json.loads(done.chat.messages[1].tool_calls[0].arguments) == {"path": "0"}
    inputs = edit({**few, "clear_tool_inputs": True}).chat.messages
    assert [json.loads(inputs[i].tool_calls[0].arguments) for i in (1, 5)] == [{}, {"path": "2"}]
    some = edit({**few, "clear_tool_inputs": ["read"]}).chat.messages
    assert [json.loads(some[i].tool_calls[0].arguments) for i in (1, 3)] == [{"path": "0"}, {}]
    assert results(edit({**few, "exclude_tools": ["look"]}))[0].startswith("result 0")
    assert results(edit({**few, "keep": {"type": "tool_uses", "value": 0}})) == [CLEARED] * 5


@pytest.mark.parametrize(
    "unmet",
    [
        {},  # 100,000 tokens
        {"trigger": {"type": "tool_uses", "value": 5}},
        {"trigger": {"type": "input_tokens", "value": 111}},
        {"trigger": {"type": "tool_uses", "value": 1}, "clear_at_least": {"type": "input_tokens", "value": 1000}},
    ],
    ids=str,
)
def test_tool_results_are_kept_below_the_trigger(unmet: dict[str, Any]) -> None:
    done = edit({"type": TOOLS, **unmet})
    assert (done.applied, CLEARED in results(done)) == ((), False)
    assert CLEARED in results(edit({"type": TOOLS, "trigger": {"type": "input_tokens", "value": 110}}))


def test_both_edits_in_one_request_are_stable() -> None:
    both = ({"type": THOUGHTS}, {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 1}})
    done = edit(*both)
    assert (len(thoughts(done)), results(done).count(CLEARED), len(done.applied)) == (1, 2, 2)
    messages = talk()
    messages[2]["content"][0]["content"] = CLEARED  # by the client, earlier
    assert results(edit(both[1], messages=messages)).count(CLEARED) == 2


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"type": THOUGHTS, "keep": "some"}, "keep"),
        ({"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 0}}, "keep.value"),
        ({"type": THOUGHTS, "keep": {"type": "tool_uses", "value": 1}}, "keep.type"),
        ({"type": TOOLS, "keep": "all"}, "keep"),
        ({"type": TOOLS, "trigger": {"type": "days", "value": 1}}, "trigger.type"),
        ({"type": TOOLS, "keep": {"type": "tool_uses", "value": -1}}, "keep.value"),
        (KEEP_ALL, "type"),  # each edit tokenises the conversation, so only one of a type is allowed
    ],
    ids=str,
)
def test_a_wrong_edit_is_refused_by_name(wrong: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as refused:
        edit(KEEP_ALL, wrong)
    assert refused.value.param == f"context_management.edits[1].{path}"


def test_an_unknown_edit_is_ignored_and_named() -> None:
    body = body_of({"type": "compact_20260112"}, KEEP_ALL)
    assert ignored_edits(body) == ("context_management.edits[0].compact_20260112",)
    assert edit({"type": "compact_20260112"}).applied == ()


def test_over_http(plain_server: Server) -> None:
    edits = [{"type": "compact_20260112"}, {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 4}}]
    body = {"model": "claude-some", "max_tokens": 4, "messages": talk(), "context_management": {"edits": edits}}
    whole = plain_server.post("/v1/messages", body)
    assert whole.status == 200, whole
    (applied,) = whole.json["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 2
    assert "compact_20260112" in whole.headers["x-quire-ignored-fields"]
    assert whole.json["model"] != "claude-some"  # the default model answered and is named
    assert whole.headers["x-quire-ignored-fields"].startswith("model, ")
    events = [
        json.loads(line[6:])
        for line in plain_server.post("/v1/messages", {**body, "stream": True}).body.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-2]["context_management"]["applied_edits"] == [applied]
    counted = plain_server.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"}).json
    assert counted["context_management"]["original_input_tokens"] == (
        counted["input_tokens"] + applied["cleared_input_tokens"]
    )
    plain = plain_server.post("/v1/messages", {**body, "context_management": None})
    assert "context_management" not in plain.json
    assert plain_server.post("/v1/messages", {**body, "model": "gpt-5"}).status == 404
