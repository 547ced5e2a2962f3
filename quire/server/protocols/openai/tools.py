"""Parses tools, tool choices and answer formats of OpenAI bodies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.server.protocols.openai.types import (
    ChatCompletionRequest,
    GenerationBody,
    MessageToolCall,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    ToolDefinition,
)
from quire.server.protocols.structured_output import shape_error
from quire.server.protocols.support import unsupported
from quire.text.gbnf import gbnf_to_lark, written_grammar
from quire.text.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    token_grammar,
)
from quire.text.tools import MAX_CALL_ID_CHARS, MAX_TOOLS, Tool, ToolCall, ToolChoice, ToolMode, check_call

_FORMATS = ("text", "json_object", "json_schema")


def parse_tools(body: ChatCompletionRequest) -> tuple[tuple[Tool, ...], ToolChoice, tuple[str, ...]]:
    """Return the functions, the tool choice, and the names of left-out tools, which OpenAI's server would run."""
    given = body.tools or ()
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(given)} entries, more than {MAX_TOOLS}")
    for i, tool in enumerate(given):
        if tool.type == "custom":
            text = f"tools[{i}].type = 'custom' is not supported in chat completions: /v1/responses takes custom tools"
            raise unsupported(f"tools[{i}].type", text, is_value=True)
    functions = [(tool, f"tools[{i}]") for i, tool in enumerate(given) if tool.type == "function"]
    ignored = tuple(f"tools[{i}].{tool.type}" for i, tool in enumerate(given) if tool.type != "function")
    return tuple(_tool(tool, path) for tool, path in functions), _choice(body), ignored


def parse_calls(given: Iterable[MessageToolCall], path: str) -> tuple[ToolCall, ...]:
    return tuple(_call(call, f"{path}[{i}]") for i, call in enumerate(given))


def _tool(tool: ToolDefinition, path: str) -> Tool:
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is missing")
    function = tool.function
    return Tool(
        function.name,
        function.description or "",
        function.parameters or {},
        bool(function.strict),
        path,
        f"{path}.function.parameters",
    )


def forced_tool(kind: str) -> str:
    return f"tool_choice.type = {kind!r:.80} is not supported: this server runs no tools. Use function or allowed_tools"


def _choice(body: ChatCompletionRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            if mode not in list(ToolMode):
                raise InvalidRequest(f"tool_choice = {mode!r:.80} is not one of {', '.join(ToolMode)}, or an object")
            return ToolChoice(ToolMode(mode), is_parallel=is_parallel)
        case NamedToolChoice(type="function", function=function):
            if function is None:
                raise InvalidRequest("tool_choice.function is missing")
            return ToolChoice(ToolMode.REQUIRED, function.name, is_parallel=is_parallel)
        case NamedToolChoice(type="allowed_tools", allowed_tools=allowed):
            if allowed is None or not allowed.tools:
                raise InvalidRequest("tool_choice.allowed_tools is missing or names none")
            if allowed.mode not in ("auto", "required"):
                text = f"tool_choice.allowed_tools.mode = {allowed.mode!r:.80} is not one of auto, required"
                raise InvalidRequest(text)
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(ToolMode(allowed.mode), allowed=names, is_parallel=is_parallel)
        case NamedToolChoice(type=kind):
            raise unsupported("tool_choice.type", forced_tool(kind), is_value=True)


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type != "function":
        text = f"{path}.type = {call.type!r:.80} is not supported: tools are functions that the client runs"
        raise unsupported(f"{path}.type", text, is_value=True)
    if call.function is None:
        raise InvalidRequest(f"{path}.function is missing")
    if not 1 <= len(call.id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(f"{path}.id has {len(call.id)} characters, not 1 to {MAX_CALL_ID_CHARS}")
    made = ToolCall(call.id, call.function.name, call.function.arguments or "{}")
    check_call(made, f"{path}.function")
    return made


# Answer formats

_Make = tuple[str, Callable[[], Grammar]]  # the field that constrains the answer, and its grammar


def parse_shape(body: GenerationBody) -> Grammar | None:
    """Return the grammar of the one field that constrains the answer. None: no such field."""
    found = _asked(body)
    return None if found is None else make_grammar(*found)


def shape_field(body: GenerationBody) -> str | None:
    found = _asked(body)
    return None if found is None else found[0]


def make_grammar(field: str, make: Callable[[], Grammar]) -> Grammar:
    """Make the grammar. Raises ApiError that names the field."""
    try:
        return make()
    except InvalidRequest as error:
        raise shape_error(field, error) from None


def _asked(body: GenerationBody) -> _Make | None:
    found = list(_shapes(body))
    if len(found) > 1:
        raise InvalidRequest(f"{found[1][0]} and {found[0][0]} exclude each other")
    return found[0] if found else None


def _shapes(body: GenerationBody) -> Iterable[_Make]:
    if isinstance(body.response_format, ResponseFormat):
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured("structured_outputs.", body.structured_outputs)
    yield from _structured("guided_", _guided(body))
    yield from _other_fields(body)


def _guided(body: GenerationBody) -> StructuredOutputs:
    """vLLM's older fields, without those that repeat `structured_outputs`: some clients send both."""
    newer = body.structured_outputs or StructuredOutputs()
    return StructuredOutputs(
        json=None if body.guided_json == newer.json else body.guided_json,
        regex=None if body.guided_regex == newer.regex else body.guided_regex,
        choice=None if body.guided_choice == newer.choice else body.guided_choice,
        grammar=None if body.guided_grammar == newer.grammar else body.guided_grammar,
    )


def _other_fields(body: GenerationBody) -> Iterable[_Make]:
    """Top-level fields of SGLang, llama.cpp and vLLM."""
    if (schema := body.json_schema) is not None:
        yield "json_schema", lambda: json_schema_grammar(_schema(schema), strict=False)
    if (pattern := body.regex) is not None:
        yield "regex", lambda: regex_grammar(pattern)
    if source := body.grammar:  # clients of llama.cpp send an empty string for no grammar
        yield "grammar", lambda: written_grammar(source)
    if (rules := body.ebnf) is not None:
        yield "ebnf", lambda: lark_grammar(gbnf_to_lark(rules))
    if (token_ids := body.allowed_token_ids) is not None:
        yield "allowed_token_ids", lambda: token_grammar(token_ids)


def _response_format(given: ResponseFormat) -> Iterable[_Make]:
    match given.type:
        case "text":
            return
        case "json_object" if given.schema is None:
            yield "response_format", json_object_grammar
        case "json_object":
            yield "response_format.schema", lambda: json_schema_grammar(given.schema or {}, strict=False)
        case "json_schema":
            form = given.json_schema
            if form is None and given.schema is not None:
                yield "response_format.schema", lambda: json_schema_grammar(given.schema or {}, strict=False)
                return
            if form is None or form.schema is None:
                missing = "json_schema" if form is None else "json_schema.schema"
                raise InvalidRequest(f"response_format.{missing} is missing")
            schema, strict = form.schema, bool(form.strict)
            yield "response_format.json_schema.schema", lambda: json_schema_grammar(schema, strict=strict)
        case other:
            raise unknown_format("response_format.type", other)


def unknown_format(field: str, given: str) -> InvalidRequest:
    """The error names vLLM's field for formats that have one."""
    where = f"; structured_outputs.{given} takes one" if given in ("regex", "choice", "grammar", "json") else ""
    return InvalidRequest(f"{field} = {given!r:.80} is not one of {', '.join(_FORMATS)}{where}")


def _structured(prefix: str, given: StructuredOutputs) -> Iterable[_Make]:
    if (schema := given.json) is not None:
        yield f"{prefix}json", lambda: json_schema_grammar(_schema(schema), strict=bool(given.strict))
    if (pattern := given.regex) is not None:
        yield f"{prefix}regex", lambda: regex_grammar(pattern)
    if (choices := given.choice) is not None:
        yield f"{prefix}choice", lambda: choice_grammar(choices)
    if (source := given.grammar) is not None:
        yield f"{prefix}grammar", lambda: written_grammar(source)
    if given.json_object:
        yield f"{prefix}json_object", json_object_grammar


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar: this is neither a schema nor the JSON text of one")
    return schema
