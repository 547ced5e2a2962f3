"""Parses a body of `/api/chat` or `/api/generate` into an `InferenceRequest`. Pure, except `unmet`.

An error is one string and a status.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.core.values import check_tokens
from quire.engine.params import GenerationParams
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.model_service import InferenceRequest, Prompt, priority_of
from quire.server.protocols.ollama.types import (
    IGNORED_OPTIONS,
    THINK_LEVELS,
    UNSUPPORTED,
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
    OllamaToolCall,
)
from quire.server.protocols.openai.parsing import protocol_field_names
from quire.server.protocols.support import refuse_unsupported, shape_error, with_unenforced
from quire.text.grammar import Grammar, json_object_grammar, json_schema_grammar
from quire.text.messages import MAX_TOOLS, ChatRequest, Message, Part, Role, Tool, ToolCall, check_call, check_messages

if TYPE_CHECKING:
    from quire.server.model_service import ModelService
    from quire.server.models import Model, Models


DEFAULT_TAG = ":latest"
NO_BOUND = (0, -1, -2)  # values of num_predict without a limit, as in Ollama's runner
# quire's field -> Ollama's field, in errors that begin with a field.
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "logprobs": "top_logprobs",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    },
}
_EFFORTS = {level: level for level in THINK_LEVELS} | {"max": "high"}  # templates have three levels
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"-?(?:{_PART.pattern})+", re.ASCII)
_MAX_DURATION_CHARS = 32


def find_model(models: Models, name: str) -> Model:
    """Find a model by its name, with or without Ollama's default tag. Ollama's clients look for "not found"."""
    if not name:
        return models.default
    for known in (name, name.removesuffix(DEFAULT_TAG)):
        if known in models.names:
            return models.find(known)
    text = f"model {name!r:.200} not found; this server has {', '.join(models.names)}"
    raise ApiError(Kind.NO_MODEL, text, param="model")


def parse_chat(body: OllamaChatRequest) -> InferenceRequest:
    """Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    _refuse_unsupported(body)
    messages = parse_messages(body.messages or ())
    is_prefill = messages[-1].role is Role.ASSISTANT
    if is_prefill and messages[-1].tool_calls:
        last = len(messages) - 1
        raise InvalidRequest(f"messages[{last}].tool_calls has no result: a tool's message must follow")
    chat = ChatRequest(
        messages,
        add_generation_prompt=not is_prefill,
        continue_last=is_prefill,
        tools=_tools(body.tools or ()),
        wants_thought=_wants_thought(body),
        reasoning_effort=_effort(body),
    )
    return _inference_request(body, chat)


def parse_generate(body: OllamaGenerateRequest) -> InferenceRequest:
    """Parse the body without `context`: the handler adds it after it has tokenised the prompt."""
    _refuse_unsupported(body)
    prompt = body.prompt or ""
    if body.raw:
        if body.system or body.context:
            other = "system" if body.system else "context"
            raise InvalidRequest(f"raw and {other} exclude each other: a raw prompt is used unchanged")
        return _inference_request(body, prompt)
    check_tokens("context", body.context or ())
    messages = [Message(Role.USER, (Part(prompt),))]
    if body.system:
        messages.insert(0, Message(Role.SYSTEM, (Part(body.system),)))
    return _inference_request(
        body, ChatRequest(messages, wants_thought=_wants_thought(body), reasoning_effort=_effort(body))
    )


def shape_field(body: OllamaBody) -> str | None:
    """The field that constrains the answer's format."""
    return "format" if body.format else None


def unmet(body: OllamaBody, service: ModelService, *, is_raw: bool = False) -> list[str]:
    """Fields that this model cannot satisfy, for the header. Clients send them to every model."""
    found: list[str] = []
    if body.think and (is_raw or service.text.template.reasoning is None):
        found.append("think")
    if body.options is not None and (body.options.num_ctx or 0) > service.max_model_len:
        found.append("options.num_ctx")
    return found


def keep_alive_s(value: str | float | None) -> float | None:
    """Parse seconds or a Go duration such as "5m" or "1h30m". Negative: no limit."""
    if value is None or isinstance(value, int | float):
        return math.inf if value is not None and value < 0 else value
    if value.removeprefix("-").isdecimal() and len(value) <= _MAX_DURATION_CHARS:
        value += "s"  # a number as a string
    if len(value) > _MAX_DURATION_CHARS or not _DURATION.fullmatch(value):
        raise InvalidRequest(f"keep_alive = {value!r:.80} is neither seconds nor a duration like 5m or 1h30m")
    if value.startswith("-"):
        return math.inf
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))


def _inference_request(body: OllamaBody, prompt: Prompt) -> InferenceRequest:
    options = body.options or OllamaOptions()
    _refuse_unsupported(options, "options.")
    keep_alive_s(body.keep_alive)  # checked, though only an empty prompt uses it
    with protocol_field_names(NAMES):
        request = InferenceRequest(
            model=body.model,
            prompts=(prompt,),
            params=_params(body, options),
            is_unbounded=options.num_predict in NO_BOUND,
            is_streaming=body.stream is not False,
            priority=priority_of(body.priority),
            cache_salt=body.cache_salt or "",
            wants_cache=bool(body.cache),
            ignored=tuple(_ignored(body, options)),
        )
        return with_unenforced(request, shape_field(body))


def _refuse_unsupported(part: object, prefix: str = "") -> None:
    refuse_unsupported(part, UNSUPPORTED, prefix, shown=(int, float))


def _ignored(body: OllamaBody, options: OllamaOptions) -> list[str]:
    found = [f"options.{name}" for name in IGNORED_OPTIONS if getattr(options, name) is not None]
    if _has_penalties(options) and (options.repeat_last_n or 0) > 0:
        found.append("options.repeat_last_n")
    if body.keep_alive is not None:
        found.append("keep_alive")
    found += [name for name in ("truncate", "shift") if getattr(body, name)]
    if body.top_logprobs and not body.logprobs:
        found.append("top_logprobs")
    return found


def _has_penalties(options: OllamaOptions) -> bool:
    return options.repeat_penalty not in (None, 1) or bool(options.presence_penalty or options.frequency_penalty)


def _params(body: OllamaBody, options: OllamaOptions) -> GenerationParams:
    if (options.num_predict or 0) < min(NO_BOUND):
        raise InvalidRequest(f"max_tokens = {options.num_predict} is neither at least 1 nor one of {NO_BOUND}")
    if options.repeat_last_n is not None and options.repeat_last_n < -1:
        raise InvalidRequest(f"options.repeat_last_n = {options.repeat_last_n} is less than -1")
    is_penalised = options.repeat_last_n != 0
    return GenerationParams(
        temperature=options.temperature,
        top_k=None if options.top_k is None else max(options.top_k, 0),
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty if is_penalised else 1.0,
        presence_penalty=(options.presence_penalty or 0.0) if is_penalised else 0.0,
        frequency_penalty=(options.frequency_penalty or 0.0) if is_penalised else 0.0,
        seed=None if options.seed == -1 else options.seed,
        max_tokens=None if options.num_predict in NO_BOUND else options.num_predict,
        stop=options.stop or (),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body),
    )


def _grammar(body: OllamaBody) -> Grammar | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return json_object_grammar()
        case str():
            raise InvalidRequest(f"format = {body.format!r:.80} is neither json nor a JSON schema")
        case schema:
            try:
                return json_schema_grammar(schema, strict=False)
            except InvalidRequest as error:
                raise shape_error("format", error) from None


def _wants_thought(body: OllamaBody) -> bool | None:
    if isinstance(body.think, str) and body.think not in _EFFORTS:
        raise InvalidRequest(f"think = {body.think!r:.80} is not true, false or one of {', '.join(THINK_LEVELS)}")
    return None if body.think is None else bool(body.think)


def _effort(body: OllamaBody) -> str | None:
    return _EFFORTS[body.think] if isinstance(body.think, str) else None


def _tools(given: Sequence[OllamaTool]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(given)} entries, more than {MAX_TOOLS}")
    for i, tool in enumerate(given):
        if tool.type != "function":
            text = f"tools[{i}].type = {tool.type!r:.80} is not supported: tools are functions that the client calls"
            raise ApiError(Kind.INVALID, text, param=f"tools[{i}].type", reason="unsupported_value")
    return tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            is_strict=False,
            path=f"tools[{i}]",
            schema_path=f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(given)
    )


# Messages


class _OpenCalls:
    """Finds the call that a tool's message answers: by id, else by name, else in order. Many clients send no ids.

    A call without an id gets one from its position in the conversation. It is the same at every turn, or the prefix
    cache would not match.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[ToolCall] = []

    def add(self, given: Sequence[OllamaToolCall], path: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        for i, one in enumerate(given):
            try:
                arguments = msgspec.json.encode(one.function.arguments or {}).decode()
            except RecursionError:
                where = f"{path}[{i}].function.arguments"
                raise ApiError(Kind.INVALID, f"{where} is nested too deeply", param=where) from None
            call = ToolCall(one.id or f"call_{self._num_calls}", one.function.name, arguments)
            check_call(call, f"{path}[{i}].function")
            self._num_calls += 1
            calls.append(call)
        self._open += calls
        return tuple(calls)

    def answer(self, given: OllamaMessage) -> str | None:
        if given.tool_call_id:
            found = [call for call in self._open if call.call_id == given.tool_call_id]
        else:
            found = [call for call in self._open if not given.tool_name or call.name == given.tool_name]
        if not found:
            return given.tool_call_id or None
        self._open.remove(found[0])
        return found[0].call_id


def parse_messages(given: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    check_messages(given)
    calls = _OpenCalls()
    return tuple(_message(one, f"messages[{i}]", calls) for i, one in enumerate(given))


def _message(given: OllamaMessage, path: str, calls: _OpenCalls) -> Message:
    _refuse_unsupported(given, f"{path}.")
    name = given.role.lower()
    if name not in list(Role):
        raise InvalidRequest(f"{path}.role = {given.role!r:.80} is not one of {', '.join(Role)}")
    role = Role(name)
    if role is not Role.ASSISTANT:
        if given.tool_calls:
            raise InvalidRequest(f"{path}.tool_calls is only for an assistant's message")
        call_id = calls.answer(given) if role is Role.TOOL else None
        tool_name = (given.tool_name or None) if role is Role.TOOL else None
        return Message(role, (Part(given.content or ""),), tool_name, tool_call_id=call_id)
    parts = (Part(given.content),) if given.content else ()
    made = calls.add(given.tool_calls or (), f"{path}.tool_calls")
    return Message(role, parts, thought=given.thinking or "", tool_calls=made)


# 503 for a full queue, as in Ollama; 429 for a key that has reached its limit.
_STATUS = {
    Kind.INVALID: 400,
    Kind.TOO_LONG: 400,
    Kind.AUTHENTICATION: 401,
    Kind.PERMISSION: 403,
    Kind.NOT_FOUND: 404,
    Kind.NO_MODEL: 404,
    Kind.METHOD: 405,
    Kind.TIMEOUT: 408,
    Kind.TOO_LARGE: 413,
    Kind.RATE_LIMITED: 429,
    Kind.OVERLOADED: 503,
    Kind.UNAVAILABLE: 503,
    Kind.FAILED: 500,
    Kind.DIED: 500,
    Kind.CANCELLED: 499,
}


class OllamaError(msgspec.Struct, frozen=True):
    error: str


def _status(error: ApiError) -> int:
    if error.kind is Kind.DIED and error.may_retry:
        return 503
    return _STATUS[error.kind]


def _body(error: ApiError, _request_id: str) -> bytes:
    """Encode the error. Only the message can name the field."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    return msgspec.json.encode(OllamaError(text.encode(errors="replace").decode()))  # an error must never fail


def _event(error: ApiError, request_id: str) -> bytes:
    return _body(error, request_id) + b"\n"


# Readers of JSON lines skip a space; most fail on an empty line.
OLLAMA = Dialect("ollama", _status, _body, _event, stream_type="application/x-ndjson", keep_alive=b" ")
