"""Parses the fields that all OpenAI bodies share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from quire.core.values import Priority
from quire.engine.params import GenerationParams
from quire.errors import InvalidRequest
from quire.server.model_service import MAX_BREAKPOINTS, Breakpoint, InferenceRequest, Prompt, ThinkingField, priority_of
from quire.server.protocols.openai import other_servers
from quire.server.protocols.openai.types import (
    RETENTIONS_S,
    SERVICE_TIERS,
    TTLS_S,
    ChatCompletionRequest,
    GenerationBody,
    MessageToolCall,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    ToolDefinition,
)
from quire.server.protocols.support import refuse_unsupported, shape_error, unsupported
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
from quire.text.messages import MAX_CALL_ID_CHARS, MAX_TOOLS, Tool, ToolCall, ToolChoice, ToolMode, check_call

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


T = TypeVar("T")

DEFAULT_TTL_S = 300.0
_SYNONYMS = (
    ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
)
NO_LIMIT = -1  # max_tokens of llama.cpp
_MAX_KEY_DIGITS = 10  # of a token id

# quire's field -> OpenAI's field, in errors that begin with a field.
NAMES = {
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
    "template_args": "chat_template_kwargs",
    "continue_last": "continue_final_message",
}


@contextmanager
def protocol_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field at the beginning of an InvalidRequest to the protocol's name."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        found = re.match(r"[a-z_]+", text)
        if found is None or found[0] not in names:
            raise
        raise type(error)(names[found[0]] + text[found.end() :]) from None


def params_of(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    may_be_empty: bool = False,
) -> GenerationParams:
    """Parse the generation parameters.

    `max_tokens`: the value of the newest field that sets it, except n_predict. `may_be_empty`: it may be 0.
    """
    refuse_unsupported(body, other_servers.REFUSED)
    _refuse_contradictions(body)
    names: dict[str, str] = {}
    if body.repeat_last_n is not None and body.repeat_last_n < -1:
        raise InvalidRequest(f"repeat_last_n = {body.repeat_last_n} is less than -1")
    is_penalized = body.repeat_last_n != 0
    penalty = body.repetition_penalty
    if max_tokens is None and body.n_predict is not None:
        max_tokens, names["max_tokens"] = body.n_predict, "n_predict"
    if penalty is None and body.repeat_penalty is not None:
        penalty, names["repetition_penalty"] = body.repeat_penalty, "repeat_penalty"
    with protocol_field_names(names):
        if max_tokens is not None and max_tokens < 1 and max_tokens != NO_LIMIT and (max_tokens or not may_be_empty):
            more = "; only completions accept 0" if max_tokens == 0 else ""
            raise InvalidRequest(f"max_tokens = {max_tokens} is not at least 1 or -1 (no limit){more}")
        return GenerationParams(
            temperature=body.temperature,
            top_k=0 if body.top_k == -1 else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=penalty if is_penalized else 1.0,
            presence_penalty=_or(body.presence_penalty, 0.0) if is_penalized else 0.0,
            frequency_penalty=_or(body.frequency_penalty, 0.0) if is_penalized else 0.0,
            logit_bias=_biases(body.logit_bias or {}),
            seed=None if body.seed == -1 else body.seed,  # -1: no seed, as in vLLM and llama.cpp
            n=_or(body.n, 1),
            max_tokens=None if max_tokens == NO_LIMIT else max_tokens,
            min_tokens=_or(body.min_tokens, 0),
            stop=_or(body.stop, ()),
            stop_token_ids=_or(body.stop_token_ids, ()),
            include_stop=_or(body.include_stop_str_in_output, False) or _or(body.no_stop_trim, False),
            ignore_eos=_or(body.ignore_eos, False),
            skip_special=_or(body.skip_special_tokens, True),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=parse_shape(body),
        )


def make_request(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    params: GenerationParams,
    breakpoints: tuple[Breakpoint, ...] = (),
) -> InferenceRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream = true")
    options = body.prompt_cache_options
    mode = None if options is None else options.mode
    _choose("prompt_cache_options.mode", mode, {"implicit": None, "explicit": None}, None)
    return InferenceRequest(
        model=body.model,
        prompts=prompts,
        params=params,
        is_unbounded=params.max_tokens is None and NO_LIMIT in _limits(body).values(),
        is_streaming=_or(body.stream, False),
        priority=_priority(body),
        cache_salt=body.cache_salt or "",
        cache_key=None if mode == "explicit" else body.prompt_cache_key,
        cache_ttl_s=cache_ttl_s(body),
        breakpoints=breakpoints[-MAX_BREAKPOINTS:],  # a conversation keeps its old breakpoints; the last ones count
        wants_cache=_or(body.cache, False),
        ignored=tuple(_ignored(body)),
    )


def _ignored(body: GenerationBody) -> Iterator[str]:
    if body.repeat_last_n is not None and body.repeat_last_n > 0:
        yield "repeat_last_n"  # penalties always apply to the whole prompt and answer, as with -1
    for name in other_servers.BUDGETS:
        if getattr(body, name) not in (None, 0, -1):
            yield name
    for name in other_servers.ACCEPTED:
        if getattr(body, name) is not None:
            yield name


class _ThinkingBody(Protocol):
    @property
    def enable_thinking(self) -> bool | None: ...


def thinking_fields(body: _ThinkingBody, effort_field: str, effort: str | None) -> tuple[ThinkingField, ...]:
    """The fields of the body that set whether, or how much, to think."""
    found = [] if effort is None else [ThinkingField(effort_field, False if effort == "none" else None)]
    if body.enable_thinking is not None:
        found.append(ThinkingField("enable_thinking", body.enable_thinking))
    found += [ThinkingField(name, False) for name in other_servers.BUDGETS if getattr(body, name) == 0]
    return tuple(found)


def has_no_budget(body: GenerationBody) -> bool:
    """Whether thinking is switched off by a budget of 0 tokens."""
    return any(getattr(body, name) == 0 for name in other_servers.BUDGETS)


def _refuse_contradictions(body: GenerationBody) -> None:
    """Refuse different values for fields that mean the same on different servers."""
    for names in _SYNONYMS:
        given = [(name, value) for name in names if (value := getattr(body, name, None)) is not None]
        for name, value in given[1:]:
            first, other = given[0]
            if value != other:
                raise InvalidRequest(f"{first} = {other} and {name} = {value} contradict each other: send one of them")


def _limits(body: GenerationBody) -> dict[str, int]:
    """The fields of the body that limit the answer, most recent protocol first."""
    found = {name: getattr(body, name, None) for name in _SYNONYMS[0]}
    return {name: value for name, value in found.items() if value is not None}


def cache_ttl_s(body: GenerationBody) -> float:
    """The lifetime of a pin. prompt_cache_options.ttl, the newer field, overrides prompt_cache_retention."""
    retention_s = _choose("prompt_cache_retention", body.prompt_cache_retention, RETENTIONS_S, DEFAULT_TTL_S)
    if body.prompt_cache_options is None:
        return retention_s
    return ttl_s("prompt_cache_options.ttl", body.prompt_cache_options.ttl, retention_s)


def ttl_s(field: str, value: str | None, default_s: float) -> float:
    return _choose(field, value, TTLS_S, default_s)


def has_continuous_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and _or(body.stream_options.continuous_usage_stats, False)


def includes_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and _or(body.stream_options.include_usage, False)


def _priority(body: GenerationBody) -> Priority | None:
    by_tier = _choose("service_tier", body.service_tier, SERVICE_TIERS, None)
    return by_tier if body.priority is None else priority_of(body.priority)


def _choose(field: str, value: str | None, table: Mapping[str, T], default: T) -> T:
    if value is None:
        return default
    if value not in table:
        raise InvalidRequest(f"{field} = {value!r:.80} is not one of {', '.join(table)}")
    return table[value]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Convert the keys to token ids: JSON has no number keys."""
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_KEY_DIGITS):
            raise InvalidRequest(f"logit_bias[{key[:40]!r}] is not a token id")
    return {int(key): value for key, value in given.items()}


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
