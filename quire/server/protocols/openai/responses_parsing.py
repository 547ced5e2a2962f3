"""Parses a body of /v1/responses into an `InferenceRequest`. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from quire.engine.params import MAX_LOGPROBS
from quire.errors import InvalidRequest
from quire.server.inference_request import Breakpoint, InferenceRequest
from quire.server.protocols.openai.parsing import (
    NAMES,
    cache_ttl_s,
    has_no_budget,
    make_grammar,
    make_request,
    params_of,
    protocol_field_names,
    thinking_fields,
    ttl_s,
    unknown_format,
)
from quire.server.protocols.openai.parsing import shape_field as body_shape_field
from quire.server.protocols.openai.responses_tools import INPUT, parse_tools, qualified_name
from quire.server.protocols.openai.responses_types import (
    ITEMS,
    LOGPROBS,
    UNSUPPORTED,
    InputItem,
    InputPart,
    ResponsesRequest,
)
from quire.server.protocols.openai.types import UNSUPPORTED as OPENAI_UNSUPPORTED
from quire.server.protocols.support import refuse_unsupported, unsupported, with_unenforced
from quire.text.grammar import Grammar, json_object_grammar, json_schema_grammar
from quire.text.messages import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    ChatRequest,
    Message,
    Part,
    Role,
    ToolCall,
    check_call,
    check_parts,
)
from quire.text.tokenizer import check_text

_NAMES = NAMES | {
    "logprobs": "top_logprobs",
    "prompt": "input",
    "messages": "input",
    "stream_options": "stream_options",
}
_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_OTHER_PARTS = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def parse_responses(body: ResponsesRequest) -> InferenceRequest:
    """Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, UNSUPPORTED)
    refuse_unsupported(body, OPENAI_UNSUPPORTED)
    with protocol_field_names(names_of(body)):
        conversation = _Conversation(cache_ttl_s(body))
        conversation.add_all(body)
        tools, choice, ignored, unenforced = parse_tools(body)
        effort = None if body.reasoning is None else body.reasoning.effort
        chat = ChatRequest(
            conversation.messages(),
            template_args=body.chat_template_kwargs or {},
            tools=tools,
            tool_choice=choice,
            wants_thought=False if effort == "none" or has_no_budget(body) else body.enable_thinking,
            reasoning_effort=effort,
        )
        max_tokens = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
        plain = msgspec.structs.replace(body, n=1)
        params = params_of(plain, max_tokens=max_tokens, logprobs=_logprobs(body))
        if (shape := _text_shape(body)) is not None:
            if (other := body_shape_field(body)) is not None:
                raise InvalidRequest(f"{other} and text.format exclude each other")
            params = replace(params, grammar=make_grammar(*shape))
        request = make_request(body, (chat,), params, tuple(conversation.breakpoints))
        ignored = (*request.ignored, *ignored)
        thinking = thinking_fields(body, "reasoning.effort", effort)
        request = replace(request, ignored=ignored, unenforced=unenforced, thinking_fields=thinking)
        return with_unenforced(request, shape_field(body))


def names_of(body: ResponsesRequest) -> dict[str, str]:
    return _NAMES if body.max_output_tokens is None else _NAMES | {"max_tokens": "max_output_tokens"}


def _logprobs(body: ResponsesRequest) -> int | None:
    count = body.top_logprobs
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs = {count} is not a whole number from 0 to {MAX_LOGPROBS}")
    return count or 0 if LOGPROBS in (body.include or ()) else None


# The conversation


@dataclass(slots=True)
class _Turn:
    """A message under construction."""

    role: Role
    parts: list[Part] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None


class _Conversation:
    """Converts items to messages. Consecutive reasoning, text and calls of an assistant become one message."""

    def __init__(self, default_ttl_s: float) -> None:
        self._turns: list[_Turn] = []
        self._default_ttl_s = default_ttl_s
        self.breakpoints: list[Breakpoint] = []

    def messages(self) -> tuple[Message, ...]:
        return tuple(
            Message(
                turn.role,
                tuple(turn.parts),
                thought="".join(turn.thoughts),
                tool_calls=tuple(turn.calls),
                tool_call_id=turn.call_id,
            )
            for turn in self._turns
        )

    def add_all(self, body: ResponsesRequest) -> None:
        if body.instructions is not None:
            self._turns.append(_Turn(Role.SYSTEM, [Part(_checked(body.instructions, "instructions"))]))
        if isinstance(body.input, str):
            self._turns.append(_Turn(Role.USER, [Part(_checked(body.input, "input"))]))
            return
        if not 1 <= len(body.input) <= MAX_MESSAGES:
            raise InvalidRequest(f"input has {len(body.input)} entries, not 1 to {MAX_MESSAGES}")
        for i, item in enumerate(body.input):
            self._add(item, f"input[{i}]")

    def _add(self, item: InputItem, path: str) -> None:
        match item.type or "message":
            case "message":
                self._add_message(item, path)
            case "reasoning":
                turn = self._assistant()
                turn.thoughts.append(_thought(item, path))
            case "function_call" | "custom_tool_call":
                turn = self._assistant(is_later=True)
                turn.calls.append(_call(item, path))
            case "function_call_output" | "custom_tool_call_output":
                turn = _Turn(Role.TOOL, call_id=_call_id(item, path))
                self._turns.append(turn)
                self._fill(turn, item.output, f"{path}.output")
            case "item_reference":
                text = f"{path}.type = 'item_reference' is not supported: items are not stored: send the item itself"
                raise unsupported(f"{path}.type", text, is_value=True)
            case other:
                text = f"{path}.type = {other!r:.80} is not supported: items are {', '.join(ITEMS)}"
                raise unsupported(f"{path}.type", text, is_value=True)

    def _add_message(self, item: InputItem, path: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequest(f"{path}.role = {item.role!r:.80} is not one of {', '.join(_ROLES)}")
        if item.role == "assistant":
            turn = self._assistant()
        else:
            turn = _Turn(_ROLES[item.role])
            self._turns.append(turn)
        self._fill(turn, item.content, f"{path}.content")

    def _assistant(self, *, is_later: bool = False) -> _Turn:
        """Return the assistant turn to add to. `is_later`: the addition may follow text and calls of the same turn."""
        last = self._turns[-1] if self._turns else None
        if last is None or last.role is not Role.ASSISTANT or ((last.parts or last.calls) and not is_later):
            last = _Turn(Role.ASSISTANT)
            self._turns.append(last)
        return last

    def _fill(self, turn: _Turn, content: str | list[InputPart] | None, path: str) -> None:
        if isinstance(content, str):
            turn.parts.append(Part(_checked(content, path)))
            return
        if not content and turn.role is not Role.ASSISTANT:
            raise InvalidRequest(f"{path} is null or has no parts; only an assistant's may")
        check_parts(content or (), path)
        for i, part in enumerate(content or ()):
            turn.parts.append(_part(part, f"{path}[{i}]"))
            self._mark(part, f"{path}[{i}]", len(turn.parts) - 1)

    def _mark(self, part: InputPart, path: str, number: int) -> None:
        if (mark := part.prompt_cache_breakpoint) is not None:
            if mark.mode not in (None, "explicit"):
                raise InvalidRequest(f"{path}.prompt_cache_breakpoint.mode = {mark.mode!r:.80} is not explicit")
            kept_s = ttl_s(f"{path}.prompt_cache_breakpoint.ttl", mark.ttl, self._default_ttl_s)
            self.breakpoints.append(Breakpoint(len(self._turns) - 1, number, kept_s))


def _part(part: InputPart, path: str) -> Part:
    if part.type == "refusal":
        return Part(_checked(_given(part.refusal, f"{path}.refusal"), f"{path}.refusal"))
    if part.type in _TEXT_PARTS:
        return Part(_checked(_given(part.text, f"{path}.text"), f"{path}.text"))
    shown = f"{path}.type = {part.type!r:.80}"
    if part.type not in _OTHER_PARTS:
        raise InvalidRequest(f"{shown} is not one of input_text, output_text, refusal")
    what = _OTHER_PARTS[part.type]
    raise unsupported(f"{path}.type", f"{shown} is not supported: {what} cannot be read", is_value=True)


def _thought(item: InputItem, path: str) -> str:
    """The reasoning text, or its summary if there is no text."""
    name = "content" if item.content else "summary"
    parts = item.content or item.summary or ()
    if isinstance(parts, str):
        return _checked(parts, f"{path}.content")
    check_parts(parts, f"{path}.{name}")
    return "".join(_checked(part.text or "", f"{path}.{name}[{i}].text") for i, part in enumerate(parts))


def _call(item: InputItem, path: str) -> ToolCall:
    name = _given(item.name, f"{path}.name")
    if item.type == "custom_tool_call":
        arguments = json.dumps({INPUT: _checked(_given(item.input, f"{path}.input"), f"{path}.input")})
    else:
        arguments = _given(item.arguments, f"{path}.arguments")
    call = ToolCall(_call_id(item, path), qualified_name(item.namespace, name), arguments or "{}")
    check_call(call, path)
    return call


def _call_id(item: InputItem, path: str) -> str:
    call_id = _given(item.call_id, f"{path}.call_id")
    if not 1 <= len(call_id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(f"{path}.call_id has {len(call_id)} characters, not 1 to {MAX_CALL_ID_CHARS}")
    return _checked(call_id, f"{path}.call_id")


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is missing")
    return value


def _checked(text: str, path: str) -> str:
    check_text(text, name=path)
    return text


# Answer formats


def shape_field(body: ResponsesRequest) -> str | None:
    """The field that constrains the answer's format."""
    shape = _text_shape(body)
    return body_shape_field(body) if shape is None else shape[0]


def _text_shape(body: ResponsesRequest) -> tuple[str, Callable[[], Grammar]] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return "text.format", json_object_grammar
    if form.type != "json_schema":
        raise unknown_format("text.format.type", form.type)
    if form.schema is None:
        raise InvalidRequest("text.format.schema is missing")
    return "text.format.schema", partial(json_schema_grammar, form.schema, strict=bool(form.strict))
