"""Parses a body of /v1/responses into an `InferenceRequest`. Pure.

The tools of a body are functions, custom tools and namespaces. The model calls every tool as a function with a JSON
object. A tool in a namespace has one name made of both names. A custom tool takes a text, which is the argument
`input`. The client sees its own names and forms.

`AnswerItems` builds the output items of a response and their events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from quire.engine.params import MAX_LOGPROBS
from quire.errors import InvalidRequest
from quire.server.model_service import Breakpoint, InferenceRequest
from quire.server.protocols.openai.parsing import (
    NAMES,
    cache_ttl_s,
    forced_tool,
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
from quire.server.protocols.openai.responses_types import (
    ITEMS,
    LOGPROBS,
    UNSUPPORTED,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    CustomToolCallItem,
    Event,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    FunctionTool,
    InputItem,
    InputPart,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponsesRequest,
    ToolChoiceBody,
    ToolParam,
)
from quire.server.protocols.openai.types import UNSUPPORTED as OPENAI_UNSUPPORTED
from quire.server.protocols.openai.types import ChatTokenLogprob
from quire.server.protocols.support import refuse_unsupported, unsupported, with_unenforced
from quire.text.grammar import Grammar, json_object_grammar, json_schema_grammar
from quire.text.messages import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Message,
    Part,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    check_call,
    check_parts,
)
from quire.text.stream import CallArguments, CallStart, Piece, Thought, Words
from quire.text.tokenizer import check_text

INPUT = "input"  # the argument that holds a custom tool's text
CUSTOM: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole text."}},
    "required": [INPUT],
}
_RUN_BY_CLIENT = ("function", "custom")


class ClientTool(NamedTuple):
    """A tool under the client's names."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseTools(NamedTuple):
    tools: tuple[Tool, ...]
    choice: ToolChoice
    ignored: tuple[str, ...]  # tools that OpenAI's server would run
    unenforced: tuple[str, ...]  # formats of custom tools


def qualified_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def parse_tools(body: ResponsesRequest) -> ResponseTools:
    rows = list(_rows(body.tools or ()))
    if len(rows) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(rows)} entries, more than {MAX_TOOLS}")
    tools = tuple(_tool(row) for row in rows if row.tool.type in _RUN_BY_CLIENT)
    ignored = tuple(f"{row.path}.{row.tool.type}" for row in rows if row.tool.type not in _RUN_BY_CLIENT)
    unenforced = tuple(f"{row.path}.format" for row in rows if row.tool.type == "custom" and _is_grammar(row.tool))
    return ResponseTools(tools, _choice(body), ignored, unenforced)


def client_tools(body: ResponsesRequest) -> dict[str, ClientTool]:
    """The client's tools by the name that the model uses."""
    return {
        qualified_name(row.namespace, row.tool.name): ClientTool(
            row.tool.name, row.namespace, row.tool.type == "custom"
        )
        for row in _rows(body.tools or ())
        if row.tool.name is not None
    }


class _Row(NamedTuple):
    tool: FunctionTool
    path: str
    namespace: str | None = None
    about: str = ""  # the namespace's description, added to its first tool


def _rows(given: Iterable[ToolParam]) -> Iterator[_Row]:
    """Yield every tool, including those in namespaces."""
    for i, tool in enumerate(given):
        if tool.type != "namespace":
            yield _Row(tool, f"tools[{i}]")
            continue
        namespace = _given(tool.name, f"tools[{i}].name")
        for j, inner in enumerate(tool.tools or ()):
            about = tool.description or "" if j == 0 else ""
            yield _Row(inner, f"tools[{i}].tools[{j}]", namespace, about)


def _tool(row: _Row) -> Tool:
    tool, path = row.tool, row.path
    name = qualified_name(row.namespace, _given(tool.name, f"{path}.name"))
    description = "\n".join(text for text in (row.about, tool.description) if text)
    parameters = CUSTOM if tool.type == "custom" else tool.parameters or {}
    return Tool(name, description, parameters, bool(tool.strict), path, f"{path}.parameters")


def _is_grammar(tool: FunctionTool) -> bool:
    return isinstance(tool.format, dict) and tool.format.get("type") != "text"


def _choice(body: ResponsesRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            return ToolChoice(_mode("tool_choice", mode, ToolMode), is_parallel=is_parallel)
        case ToolChoiceBody(type="function" | "custom", name=name, namespace=namespace):
            name = _given(name, "tool_choice.name")
            if namespace is None:
                _check_namespace(body, name)
            return ToolChoice(ToolMode.REQUIRED, qualified_name(namespace, name), is_parallel=is_parallel)
        case ToolChoiceBody(type="allowed_tools") as choice:
            mode = _mode("tool_choice.mode", choice.mode, (ToolMode.AUTO, ToolMode.REQUIRED))
            functions = [(i, tool) for i, tool in enumerate(choice.tools or ()) if tool.type in _RUN_BY_CLIENT]
            if not functions:
                raise InvalidRequest("tool_choice.tools is missing or has no tool that the client runs")
            names = tuple(
                qualified_name(tool.namespace, _given(tool.name, f"tool_choice.tools[{i}].name"))
                for i, tool in functions
            )
            return ToolChoice(mode, allowed=names, is_parallel=is_parallel)
        case ToolChoiceBody(type=kind):
            raise unsupported("tool_choice.type", forced_tool(kind), is_value=True)


def _check_namespace(body: ResponsesRequest, name: str) -> None:
    """Raises InvalidRequest if only namespaces have a tool of this name."""
    rows = [row for row in _rows(body.tools or ()) if row.tool.name == name]
    if rows and all(row.namespace is not None for row in rows):
        where = f'"namespace": "{rows[0].namespace}"'
        raise InvalidRequest(f"tool_choice.name = {name!r:.80} is in a namespace: add {where} to tool_choice")


def _mode(path: str, mode: str | None, modes: Iterable[ToolMode]) -> ToolMode:
    if mode not in list(modes):
        raise InvalidRequest(f"{path} = {mode!r:.80} is not one of {', '.join(modes)}")
    return ToolMode(mode)


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is missing")
    return value


Logprobs = tuple[ChatTokenLogprob, ...]


class _Growing(Protocol):
    """An item under construction."""

    def begin(self) -> list[Event]: ...
    def grow(self, text: str, logprobs: Logprobs) -> list[Event]: ...
    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        """Return the events before the item's done event, and the item."""


class _Message:
    def __init__(self, answer_id: str, index: int) -> None:
        self._id, self._index = f"msg_{answer_id}_{index}", index
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[Event]:
        added = OutputItemAdded(output_index=self._index, item=OutputMessage(id=self._id, status="in_progress"))
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=OutputText(""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [OutputTextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        part = OutputText("".join(self._texts), tuple(self._logprobs))
        item = OutputMessage(id=self._id, status=status, content=(part,))
        done = OutputTextDone(item_id=self._id, output_index=self._index, text=part.text, logprobs=part.logprobs)
        return [done, ContentPartDone(item_id=self._id, output_index=self._index, part=part)], item

    def extend(self, text: str) -> None:
        """Add text whose event the caller makes."""
        self._texts.append(text)


class _Reasoning:
    def __init__(self, answer_id: str, index: int) -> None:
        self._id, self._index = f"rs_{answer_id}_{index}", index
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        added = OutputItemAdded(output_index=self._index, item=ReasoningItem(id=self._id, status="in_progress"))
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=ReasoningText(""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs  # the protocol has no field for them here
        self._texts.append(text)
        return [ReasoningTextDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        part = ReasoningText("".join(self._texts))
        item = ReasoningItem(id=self._id, status=status, content=(part,))
        done = ReasoningTextDone(item_id=self._id, output_index=self._index, text=part.text)
        return [done, ContentPartDone(item_id=self._id, output_index=self._index, part=part)], item


class _FunctionCall:
    def __init__(self, answer_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._id, self._index = f"fc_{answer_id}_{index}", index
        self._call_id, self._tool = call_id, tool
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress"))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs
        self._texts.append(text)
        return [FunctionCallArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        item = self._item(status)
        done = FunctionCallArgumentsDone(
            item_id=self._id, output_index=self._index, name=item.name, arguments=item.arguments
        )
        return [done], item

    def _item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._tool.name,
            arguments="".join(self._texts),
            namespace=UNSET if self._tool.namespace is None else self._tool.namespace,
        )


class _CustomCall:
    """A custom tool call. The model writes its text as JSON, so it is sent as a whole when the JSON is complete."""

    def __init__(self, answer_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._id, self._index = f"ctc_{answer_id}_{index}", index
        self._call_id, self._tool = call_id, tool
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress", ""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs
        self._texts.append(text)
        return []

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        text = _input("".join(self._texts))
        delta = CustomToolCallInputDelta(item_id=self._id, output_index=self._index, delta=text)
        done = CustomToolCallInputDone(item_id=self._id, output_index=self._index, input=text)
        return [delta, done], self._item(status, text)

    def _item(self, status: ItemStatus, text: str) -> CustomToolCallItem:
        return CustomToolCallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._tool.name,
            input=text,
            namespace=UNSET if self._tool.namespace is None else self._tool.namespace,
        )


def _input(arguments: str) -> str:
    """Extract the text for a custom tool; empty if the answer was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""


class AnswerItems:
    """The items of one answer. One item is open at a time, and a piece of another kind ends it."""

    def __init__(self, answer_id: str, tools: Mapping[str, ClientTool] | None = None) -> None:
        """`tools`: the client's tools by the name that the model uses."""
        self.done: list[OutputItem] = []
        self._answer_id = answer_id
        self._tools = tools or {}
        self._open: _Growing | None = None
        self._held: Logprobs = ()  # of tokens whose text has not arrived yet

    def take(self, pieces: Sequence[Piece], logprobs: Logprobs = ()) -> list[Event]:
        """Add pieces and return their events. `logprobs`: of the tokens of the pieces; sent with the next text."""
        events: list[Event] = []
        self._held += logprobs
        for piece in pieces:
            match piece:
                case Words(text):
                    if not isinstance(self._open, _Message):
                        events += self._begin(_Message(self._answer_id, self._next_index()))
                    events += self._grow(text)
                case Thought(text):
                    if not isinstance(self._open, _Reasoning):
                        events += self._begin(_Reasoning(self._answer_id, self._next_index()))
                    events += self._grow(text)
                case CallStart():
                    tool = self._tools.get(piece.name, ClientTool(piece.name))
                    kind = _CustomCall if tool.is_custom else _FunctionCall
                    events += self._begin(kind(self._answer_id, self._next_index(), piece.call_id, tool))
                case CallArguments(_, text):
                    assert isinstance(self._open, _FunctionCall | _CustomCall), (
                        "arguments follow the start of their call"
                    )
                    events += self._grow(text)
        return events

    def extend_message(self, text: str) -> bool:
        """Add text to the open message, without an event. False: no message is open, or log probabilities are held."""
        if self._held or not isinstance(self._open, _Message):
            return False
        self._open.extend(text)
        return True

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End the answer. An answer without items gets one empty message."""
        events: list[Event] = []
        if self._open is None:
            events += self._begin(_Message(self._answer_id, 0))
        if self._held and isinstance(self._open, _Message):  # every token has logprobs, also one without text
            events += self._grow("")
        return [*events, *self._end("completed" if is_whole else "incomplete")]

    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)

    def _begin(self, item: _Growing) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return [*events, *item.begin()]

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        held, self._held = self._held, ()
        return self._open.grow(text, held)

    def _end(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.end(status)
        self._open = None
        self.done.append(item)
        return [*events, OutputItemDone(output_index=len(self.done) - 1, item=item)]


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
