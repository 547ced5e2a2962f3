"""Schema keywords that are not enforced: named in a header by every protocol, and refused with `strict`."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.server.limits import FairSlots
from quire.server.protocols.openai import ChatCompletionRequest
from quire.server.request_context import MAX_PLAIN_BYTES, MAX_QUICK_BYTES, RequestContext, _field_names, is_slow
from tests.server.rig import Server

HEADER = "x-quire-unenforced"
SAY: Any = [{"role": "user", "content": "Hi"}]
SHORT = {"type": "string", "maxLength": 4}
GOOD = {"type": "object", "properties": {"a": SHORT}, "required": ["a"]}
ODD = {
    "type": "object",
    "properties": {
        "mail": {"type": "string", "maxLength": 4, "pattern": "^(?!x)"},
        "tags": {"type": "array", "maxItems": 2, "items": SHORT, "uniqueItems": True},
        "kind": {"type": "string", "format": "color"},
        "far": {"$ref": "https://example.com/schema"},
    },
    "required": ["mail"],
}
NAMED = ["properties.mail.pattern", "properties.tags.uniqueItems", "properties.kind.format", "properties.far.$ref"]
# Enforceable, but refused by the compiler: no string satisfies both lengths.
BROKEN = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(plain_server: Server) -> Server:
    return plain_server


def chat_tool(name: str, schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": SAY, "max_tokens": 4, **fields}


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "Hi", "max_tokens": 4, **fields}


def response(**fields: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": "Hi", "max_output_tokens": 4, **fields}


def message(**fields: Any) -> tuple[str, Any]:
    return "/v1/messages", {"model": "tiny", "messages": SAY, "max_tokens": 4, **fields}


def form(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def wide(num_texts: int) -> Any:
    """A schema whose rewritten form grows by some 9,000 characters with each text."""
    text = {"type": "string", "pattern": r"\s" * 90}
    return {"type": "object", "properties": {f"p{i}": text for i in range(num_texts)}}


ASKS: list[tuple[str, tuple[str, Any]]] = [
    ("response_format.json_schema.schema", chat(response_format=form(ODD))),
    ("response_format.json_schema.schema", completion(response_format=form(ODD))),
    ("structured_outputs.json", chat(structured_outputs={"json": ODD})),
    ("guided_json", completion(guided_json=ODD)),
    ("tools[1].function.parameters", chat(tools=[chat_tool("good", GOOD), chat_tool("odd", ODD)])),
    ("text.format.schema", response(text={"format": {"type": "json_schema", "name": "x", "schema": ODD}})),
    ("tools[0].parameters", response(tools=[{"type": "function", "name": "odd", "parameters": ODD}])),
    ("output_config.format.schema", message(output_config={"format": {"type": "json_schema", "schema": ODD}})),
    ("tools[0].input_schema", message(tools=[{"name": "odd", "input_schema": ODD}])),
]


TOOL_GOOD = chat_tool("good", GOOD, strict=True)
WIDE = [chat_tool("a", wide(2)), chat_tool("b", wide(3)), chat_tool("c", {**wide(3), "required": ["p0"]})]
UNENFORCED: list[tuple[tuple[str, Any], list[str]]] = [
    *((ask, [f"{field}.{name}" for name in NAMED]) for field, ask in ASKS),
    (chat(response_format=form(GOOD, strict=True), tools=[TOOL_GOOD]), []),
    (chat(tools=[chat_tool("odd", ODD, strict=True)], tool_choice="none"), []),
    # Tools that do not compile accept any arguments; many are freed together.
    (chat(tools=[TOOL_GOOD, chat_tool("broken", BROKEN)]), ["tools[1].function.parameters"]),
    (
        message(tools=[{"name": f"broken_{i}", "input_schema": BROKEN} for i in range(5)]),
        [f"tools[{i}].input_schema" for i in range(5)],
    ),
    (chat(tools=WIDE), ["tools[2].function.parameters"]),  # all are too large together: the largest is freed
]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("ask", "names"), UNENFORCED)
def test_the_header_names_what_is_not_enforced(
    server: Server, ask: tuple[str, Any], names: list[str], is_streaming: bool
) -> None:
    path, body = ask
    answer = server.post(path, {**body, "stream": is_streaming})
    assert answer.status == 200, answer.body
    found = answer.headers.get(HEADER)
    assert ([] if found is None else sorted(found.split(", "))) == sorted(names)


STRICT: list[tuple[str, tuple[str, Any]]] = [
    ("response_format.json_schema.schema", chat(response_format=form(ODD, strict=True))),
    ("tools[1].function.parameters", chat(tools=[chat_tool("good", GOOD), chat_tool("odd", ODD, strict=True)])),
    ("tools[0].parameters", response(tools=[{"type": "function", "name": "o", "parameters": ODD, "strict": True}])),
    ("tools.0.input_schema", message(tools=[{"name": "odd", "input_schema": ODD, "strict": True}])),
    ("structured_outputs.json", completion(structured_outputs={"json": ODD, "strict": True})),
    (
        "output_config.format.schema",
        message(output_config={"format": {"type": "json_schema", "schema": ODD, "strict": True}}),
    ),
]


WRONG = {"type": "object", "properties": {"mail": {"type": "text"}}}
LOST = {"type": "object", "properties": {"mail": {"$ref": "#/$defs/mail"}}}
MISTAKES = [
    (WRONG, 'type = "text" is not one of null, boolean, integer, number, string, array, object'),
    (LOST, '$ref = "#/$defs/mail" is not in this schema'),
]


def ollama(**fields: Any) -> tuple[str, Any]:
    return "/api/chat", {"model": "tiny", "messages": SAY, "stream": False, **fields}


def doors(schema: Any) -> list[tuple[str, tuple[str, Any]]]:
    """Every field that takes a schema, none of them strict."""
    return [
        ("response_format.json_schema.schema", chat(response_format=form(schema))),
        ("response_format.json_schema.schema", completion(response_format=form(schema))),
        ("response_format.schema", chat(response_format={"type": "json_object", "schema": schema})),
        ("structured_outputs.json", chat(structured_outputs={"json": schema})),
        ("guided_json", completion(guided_json=schema)),
        ("json_schema", completion(json_schema=schema)),
        ("tools[0].function.parameters", chat(tools=[chat_tool("odd", schema)])),
        ("text.format.schema", response(text={"format": {"type": "json_schema", "name": "x", "schema": schema}})),
        ("tools[0].parameters", response(tools=[{"type": "function", "name": "odd", "parameters": schema}])),
        ("output_config.format.schema", message(output_config={"format": {"type": "json_schema", "schema": schema}})),
        ("tools.0.input_schema", message(tools=[{"name": "odd", "input_schema": schema}])),
        ("format", ollama(format=schema)),
        ("tools[0].function.parameters", ollama(tools=[chat_tool("odd", schema)])),
    ]


REFUSED: list[tuple[tuple[str, Any], str]] = [
    *(
        (ask, f"{field}.properties.mail.pattern cannot be enforced: a look-around is not supported")
        for field, ask in STRICT
    ),
    *((ask, f"{field}.properties.mail.{rule}") for schema, rule in MISTAKES for field, ask in doors(schema)),
    (chat(tools=[chat_tool("broken", BROKEN, strict=True), chat_tool("good", GOOD)]), "tools[0].function.parameters"),
    (chat(tools=[chat_tool("good", GOOD)], response_format=form(BROKEN)), "response_format.json_schema.schema"),
    (
        chat(tools=[chat_tool(name, wide(3), strict=True) for name in "abc"]),
        "tools: their schemas are too large in total: ",
    ),
    (
        chat(response_format=form({"enum": ["x" * 70_000]})),
        "response_format.json_schema.schema: it has 70014 characters, more than 65536",
    ),
    (chat(guided_json="{"), "guided_json: this is neither a schema nor the JSON text of one"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=lambda value: value[:80] if isinstance(value, str) else "")
def test_a_schema_is_refused_by_field_and_rule(server: Server, ask: tuple[str, Any], message: str) -> None:
    answer = server.post(*ask)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(message)


def test_a_long_list_of_names_ends_with_dots(server: Server) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"format": "x"} for i in range(30)}}
    names = server.post(*chat(response_format=form(schema))).headers[HEADER].split(", ")
    assert names[0] == "response_format.json_schema.schema.properties.p0.format"
    assert (len(names), names[-1]) == (17, "...")


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_grammar_that_fails_during_the_answer_is_the_requests_fault(server: Server, is_streaming: bool) -> None:
    """It compiles, and its parser gives up at a later token: not a failure of the server, which clients would retry."""
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(60)]
    grammar = "\n".join(["start: a0", *rules, 'a60: "x"'])
    answer = server.post(*chat(structured_outputs={"grammar": grammar}, max_tokens=16, stream=is_streaming))
    assert answer.status == 400, answer.body
    assert "Too many items" in answer.json["error"]["message"]
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_a_slow_body_is_parsed_beside_the_event_loop() -> None:
    """Rewriting its schemas takes a fifth of a second, in which no stream would continue."""
    context: Any = object.__new__(RequestContext)
    context.models = SimpleNamespace(parsing=FairSlots(1))
    context.key = SimpleNamespace(name="some key")

    def thread_of(body: bytes) -> str:
        context._is_slow = is_slow(body)
        name: str = asyncio.run(context.parse(lambda _: threading.current_thread().name, msgspec.Struct()))
        return name

    schema = b'{"tools": '
    for quick in (b"x" * MAX_PLAIN_BYTES, schema + b"x" * (MAX_QUICK_BYTES - len(schema))):
        assert thread_of(quick) == threading.current_thread().name
    for slow in (b"x" * (MAX_PLAIN_BYTES + 1), schema + b"x" * MAX_QUICK_BYTES):
        assert thread_of(slow).startswith("quire-parse")


def test_field_names_are_read_once_and_bodies_are_not_kept() -> None:
    assert _field_names(ChatCompletionRequest) is _field_names(ChatCompletionRequest)
    assert not hasattr(is_slow, "cache_info")
