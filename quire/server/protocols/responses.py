"""POST /v1/responses: OpenAI's Responses API. Nothing is stored: a request has the conversation.

The tools of a body are functions, custom tools and namespaces. The model calls every tool as a function with a JSON
object. A tool in a namespace has one name made of both names. A custom tool takes a text, which is the argument
`input`. The client sees its own names and forms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from quire.engine.generation import MAX_LOGPROBS, Delta
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.http import EventEncoder
from quire.server.models import ActiveRequest, Breakpoint, InferenceRequest
from quire.server.protocols.openai import (
    NAMES,
    OPENAI,
    TIERS,
    cache_ttl_s,
    cache_view,
    chat_logprob,
    error_body,
    finish_reason,
    forced_tool,
    has_no_budget,
    make_grammar,
    make_request,
    params_of,
    thinking_fields,
    ttl_s,
    unknown_format,
)
from quire.server.protocols.openai import shape_field as body_shape_field
from quire.server.protocols.openai_types import (
    Alternatives,
    ChatTokenLogprob,
    ErrorBody,
    GenerationBody,
    JsonSchemaFormat,
    PromptCacheBreakpoint,
    TokenCount,
)
from quire.server.protocols.support import (
    CacheView,
    Turn,
    Unsupported,
    answer_in_shape,
    protocol_field_names,
    refuse_unsupported,
    unsupported,
    with_fields,
    with_unenforced,
)
from quire.server.request_context import RequestContext
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
from quire.text.stream import CallArguments, CallStart, Piece, PlainAnswer, Thought, Words
from quire.text.tokenizer import check_text

_STORES = "responses are not stored: send the whole conversation as input"

UNSUPPORTED = {
    "previous_response_id": Unsupported(_STORES),
    "conversation": Unsupported(_STORES),
    "prompt": Unsupported("there are no stored prompts: send instructions and input"),
    "background": Unsupported("a response is generated while the client waits", (False,)),
    "context_management": Unsupported("a conversation is never shortened", ([],)),
    "moderation": Unsupported("this server has no moderation model"),
    "n": Unsupported("a response has one answer", (1,)),
    "response_format": Unsupported("use text.format", ({"type": "text"},)),
}
ACCEPTED = {
    "access_programs": "quire has none",
    "client_metadata": "requests are not stored",
    "image": "images are not supported",
    "max_tool_calls": "it limits calls that the server runs, and quire runs none",
    "truncation": "a conversation that is too long is refused",
}
LOGPROBS = "message.output_text.logprobs"  # in `include`; other values are for tools and stores that quire lacks


def _within(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


# Requests


class InputPart(Struct, kw_only=True):
    type: Annotated[str, _within(enum=["input_text", "output_text", "refusal", "reasoning_text", "summary_text"])]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None
    annotations: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    logprobs: Annotated[Any, Meta(description="Accepted, without effect.")] = None


ITEMS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip


class InputItem(Struct, kw_only=True):
    """A message, reasoning, a tool call or its output. Items of earlier responses are accepted unchanged."""

    type: Annotated[str, _within(enum=list(ITEMS))] | None = None
    role: Annotated[str, _within(enum=["user", "assistant", "system", "developer"])] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: Annotated[str | None, Meta(description="Of a function call: the namespace of the function.")] = None
    arguments: str | None = None
    input: Annotated[str | None, Meta(description="Of a custom_tool_call: the text.")] = None
    output: str | list[InputPart] | None = None
    id: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    status: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    phase: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    encrypted_content: Annotated[Any, Meta(description="Accepted, without effect: quire encrypts nothing.")] = None


class FunctionTool(Struct, kw_only=True):
    """A function, or a custom tool that takes a text. The client runs both."""

    type: Annotated[str, _within(enum=["function", "custom"])] = "function"
    name: str | None = None
    namespace: Annotated[str | None, Meta(description="In tool_choice: the namespace of the function.")] = None
    format: Annotated[Any, Meta(description="Of a custom tool. Accepted, but not enforced.")] = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="JSON schema of the arguments.")] = None
    strict: Annotated[
        bool | None,
        Meta(description="Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class ToolParam(FunctionTool, kw_only=True):
    """A tool, or a namespace of tools. Tools that OpenAI's server would run are left out and named in a header."""

    type: Annotated[str, _within(enum=["function", "custom", "namespace"])] = "function"
    tools: Annotated[list[FunctionTool] | None, Meta(description="Of a namespace: its tools.")] = None


class ToolChoiceBody(Struct, kw_only=True):
    type: Annotated[str, _within(enum=["function", "custom", "allowed_tools"])]
    name: str | None = None
    namespace: str | None = None
    mode: Annotated[str, _within(enum=["auto", "required"])] | None = None
    tools: list[FunctionTool] | None = None


class TextFormat(JsonSchemaFormat, kw_only=True):
    type: Annotated[str, _within(enum=["text", "json_object", "json_schema"])]


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Meta(description="Accepted, without effect: a hint.")] = None


class ReasoningConfig(Struct, kw_only=True):
    effort: Annotated[
        str | None,
        Meta(description="none: no reasoning, if the template supports it. Others: a hint to the template."),
    ] = None
    summary: Annotated[Any, Meta(description="Accepted, without effect: the reasoning itself is returned.")] = None
    generate_summary: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    context: Annotated[Any, Meta(description="Accepted, without effect.")] = None
    mode: Annotated[Any, Meta(description="Accepted, without effect.")] = None


if TYPE_CHECKING:
    _ResponsesFields = GenerationBody
else:
    _ResponsesFields = with_fields("_ResponsesFields", UNSUPPORTED, ACCEPTED, GenerationBody)


class ResponsesRequest(_ResponsesFields, kw_only=True):
    input: str | Annotated[list[InputItem], _within(minItems=1, maxItems=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None  # overrides max_tokens
    tools: Annotated[list[ToolParam], _within(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, _within(enum=["none", "auto", "required"])] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[
        list[str] | None, Meta(description=f"`{LOGPROBS}` adds log probabilities; other values have no effect.")
    ] = None
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Arguments of the chat template: strings, numbers, true, false.")
    ] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="Whether to reason before the answer, if the template supports the choice.")
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Returned in the response.")] = None
    reasoning: ReasoningConfig | None = None


# Answers

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ErrorCode = Literal["server_error", "rate_limit_exceeded"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    logprobs: tuple[ChatTokenLogprob, ...] = ()
    annotations: tuple[()] = ()


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: tuple[()] = ()  # there is no summary: content is the reasoning itself
    content: tuple[ReasoningText, ...] = ()


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET  # if the client defined the tool in a namespace


class CustomToolCallItem(Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int  # kept by prompt_cache_key or breakpoints and not cached before


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: ErrorCode
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The response, with fields of its request. In events, the response so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: Annotated[int, Meta(description="Unix time in seconds.")]
    completed_at: int | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    cache: CacheView | UnsetType = UNSET


# Events, in their order in a stream


class Event(Struct, kw_only=True):
    sequence_number: int = 0  # set when it is sent


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class ResponseCreated(ResponseEvent, tag="response.created"):
    pass


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    pass


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    pass


class ResponseFailed(ResponseEvent, tag="response.failed"):
    pass


class ErrorEvent(Event, kw_only=True, tag="error"):
    """Sent instead of a response. OpenAI documents it without `error`, but its client reads only `error`."""

    code: str | None
    message: str
    param: str | None
    error: ErrorBody


class OutputItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(Event, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(ItemEvent, kw_only=True):
    content_index: int = 0


class ContentPartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[ChatTokenLogprob, ...] = ()


class OutputTextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[ChatTokenLogprob, ...] = ()


class ReasoningTextDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class FunctionCallArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomToolCallInputDelta(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomToolCallInputDone(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


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


class _TextItem:
    """A message or reasoning under construction."""

    def __init__(self, answer_id: str, index: int, *, is_message: bool) -> None:
        self._id, self._index = f"{'msg' if is_message else 'rs'}_{answer_id}_{index}", index
        self.is_message = is_message
        self.texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[Event]:
        item, part = self._item("in_progress"), self._part()
        added = OutputItemAdded(output_index=self._index, item=item)
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=part)]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.texts.append(text)
        if not self.is_message:  # the protocol has no field for logprobs here
            return [ReasoningTextDelta(item_id=self._id, output_index=self._index, delta=text)]
        self._logprobs += logprobs
        return [OutputTextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        """Return the events before the item's done event, and the item."""
        place: dict[str, Any] = {"item_id": self._id, "output_index": self._index}
        part, done = self._part(), ContentPartDone(**place, part=self._part())
        if isinstance(part, OutputText):
            return [OutputTextDone(**place, text=part.text, logprobs=part.logprobs), done], self._item(status, part)
        return [ReasoningTextDone(**place, text=part.text), done], self._item(status, part)

    def _part(self) -> OutputText | ReasoningText:
        text = "".join(self.texts)
        return OutputText(text, tuple(self._logprobs)) if self.is_message else ReasoningText(text)

    def _item(self, status: ItemStatus, *content: OutputText | ReasoningText) -> OutputItem:
        kind: type[Any] = OutputMessage if self.is_message else ReasoningItem
        item: OutputItem = kind(id=self._id, status=status, content=content)
        return item


class _CallItem:
    """A call under construction.

    The model writes the text of a custom tool as JSON, so it is sent as a whole when the JSON is complete.
    """

    def __init__(self, answer_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._id, self._index = f"{'ctc' if tool.is_custom else 'fc'}_{answer_id}_{index}", index
        self._call_id, self._tool = call_id, tool
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress", ""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs
        self._texts.append(text)
        if self._tool.is_custom:
            return []
        return [FunctionCallArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        text = "".join(self._texts)
        place: dict[str, Any] = {"item_id": self._id, "output_index": self._index}
        if not self._tool.is_custom:
            done = FunctionCallArgumentsDone(**place, name=self._tool.name, arguments=text)
            return [done], self._item(status, text)
        text = _input(text)
        delta, ended = CustomToolCallInputDelta(**place, delta=text), CustomToolCallInputDone(**place, input=text)
        return [delta, ended], self._item(status, text)

    def _item(self, status: ItemStatus, text: str) -> OutputItem:
        kind: type[Any] = CustomToolCallItem if self._tool.is_custom else FunctionCallItem
        item: OutputItem = kind(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._tool.name,
            namespace=UNSET if self._tool.namespace is None else self._tool.namespace,
            **{"input" if self._tool.is_custom else "arguments": text},
        )
        return item


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
        self._open: _TextItem | _CallItem | None = None
        self._held: Logprobs = ()  # of tokens whose text has not arrived yet

    def take(self, pieces: Sequence[Piece], logprobs: Logprobs = ()) -> list[Event]:
        """Add pieces and return their events. `logprobs`: of the tokens of the pieces; sent with the next text."""
        events: list[Event] = []
        self._held += logprobs
        for piece in pieces:
            match piece:
                case Words(text) | Thought(text):
                    is_message = isinstance(piece, Words)
                    if not isinstance(self._open, _TextItem) or self._open.is_message is not is_message:
                        events += self._begin(_TextItem(self._answer_id, self._next_index(), is_message=is_message))
                    events += self._grow(text)
                case CallStart():
                    tool = self._tools.get(piece.name, ClientTool(piece.name))
                    events += self._begin(_CallItem(self._answer_id, self._next_index(), piece.call_id, tool))
                case CallArguments(_, text):
                    assert isinstance(self._open, _CallItem), "arguments follow the start of their call"
                    events += self._grow(text)
        return events

    def extend_message(self, text: str) -> bool:
        """Add text to the open message, without an event. False: no message is open, or log probabilities are held."""
        if self._held or (message := self._message) is None:
            return False
        message.texts.append(text)
        return True

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End the answer. An answer without items gets one empty message."""
        events: list[Event] = []
        if self._open is None:
            events += self._begin(_TextItem(self._answer_id, 0, is_message=True))
        if self._held and self._message is not None:  # every token has logprobs, also one without text
            events += self._grow("")
        return [*events, *self._end("completed" if is_whole else "incomplete")]

    @property
    def _message(self) -> _TextItem | None:
        """The open message."""
        return self._open if isinstance(self._open, _TextItem) and self._open.is_message else None

    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)

    def _begin(self, item: _TextItem | _CallItem) -> list[Event]:
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
        thinking = thinking_fields(body, body.enable_thinking, "reasoning.effort", effort)
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


class _Conversation:
    """Converts items to messages. Consecutive reasoning, text and calls of an assistant become one message."""

    def __init__(self, default_ttl_s: float) -> None:
        self._turns: list[Turn] = []
        self._default_ttl_s = default_ttl_s
        self.breakpoints: list[Breakpoint] = []

    def messages(self) -> tuple[Message, ...]:
        return tuple(turn.message() for turn in self._turns)

    def add_all(self, body: ResponsesRequest) -> None:
        if body.instructions is not None:
            self._turns.append(Turn(Role.SYSTEM, [Part(_checked(body.instructions, "instructions"))]))
        if isinstance(body.input, str):
            self._turns.append(Turn(Role.USER, [Part(_checked(body.input, "input"))]))
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
                turn = Turn(Role.TOOL, call_id=_call_id(item, path))
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
            turn = Turn(_ROLES[item.role])
            self._turns.append(turn)
        self._fill(turn, item.content, f"{path}.content")

    def _assistant(self, *, is_later: bool = False) -> Turn:
        """Return the assistant turn to add to. `is_later`: the addition may follow text and calls of the same turn."""
        last = self._turns[-1] if self._turns else None
        if last is None or last.role is not Role.ASSISTANT or ((last.parts or last.calls) and not is_later):
            last = Turn(Role.ASSISTANT)
            self._turns.append(last)
        return last

    def _fill(self, turn: Turn, content: str | list[InputPart] | None, path: str) -> None:
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


_MARK = "<text>"
_NUMBER = 1 << 62  # placeholder for the event number; no real event reaches it
_encode = msgspec.json.Encoder().encode
_CODES: dict[Kind, ErrorCode] = {Kind.RATE_LIMITED: "rate_limit_exceeded", Kind.OVERLOADED: "rate_limit_exceeded"}


async def responses(context: RequestContext) -> Response:
    body = await context.body(ResponsesRequest)
    request = await context.parse(parse_responses, body)
    with protocol_field_names(names_of(body)):
        return await answer_in_shape(request, shape_field(body), partial(_respond, context, body))


async def _respond(context: RequestContext, body: ResponsesRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    reply = Reply(active, body)
    if request.is_streaming:
        return await context.stream(active, reply)
    await reply.collect()
    return await context.json_of(reply.finished, active.num_values)


class Reply(EventEncoder):
    """Encodes the response to one request, as a whole or as a stream."""

    waits_for_start = True

    def __init__(self, active: ActiveRequest, body: ResponsesRequest) -> None:
        self._active = active
        self._echoed = _echoed_fields(active, body)
        self._items = AnswerItems(active.request_id, client_tools(body))
        self._parser = active.new_parser()
        self._is_whole = True
        self._num_events = 0
        # The bytes around number and text in the events of plain text, once the only message of the answer is open.
        self._frame: tuple[bytes, bytes, bytes] | None = None
        self._is_plain = isinstance(self._parser, PlainAnswer)

    async def collect(self) -> None:
        """Wait for the whole answer, which `finished` then returns."""
        async with self._active:
            async for batch in self._active.batches():
                self._take(batch)

    def begin(self) -> bytes:
        begun = self._object("in_progress")
        return self._frames([ResponseCreated(response=begun), ResponseInProgress(response=begun)])

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return self._frames(self._take(batch))

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        del prompt, index  # there is one
        if self._frame is not None and self._items.extend_message(text):
            before, middle, after = self._frame
            self._num_events += 1
            return b"".join((before, b"%d" % (self._num_events - 1), middle, _encode(text), after))
        events = self._items.take(self._parser.push(text))
        if self._is_plain and isinstance(events[-1], OutputTextDelta):
            self._frame = _split(events[-1])
        return self._frames(events)

    def finish(self) -> bytes:
        final = self.finished()
        return self._frames([(ResponseCompleted if self._is_whole else ResponseIncomplete)(response=final)])

    def fail(self, error: ApiError) -> bytes | None:
        return self._frames([ResponseFailed(response=self._failed(error))])

    def _take(self, batch: Iterable[tuple[int, Delta]]) -> list[Event]:
        events: list[Event] = []
        for _, delta in batch:
            events += self._items.take(self._parser.push(delta.text), tuple(map(chat_logprob, delta.logprobs)))
            if delta.finish_reason is not None:
                self._is_whole = finish_reason(delta.finish_reason, delta.error) != "length"
                events += self._items.take(self._parser.finish(is_cut=not self._is_whole))
                events += self._items.finish(is_whole=self._is_whole)
        return events

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            frames.append(_event(event))
        return b"".join(frames)

    def finished(self) -> ResponseObject:
        cache = cache_view(self._active)
        return self._object(
            "completed" if self._is_whole else "incomplete",
            incomplete_details=None if self._is_whole else IncompleteDetails(),
            completed_at=int(time.time()) if self._is_whole else None,
            usage=self._usage(),
            cache=UNSET if cache is None else cache,
        )

    def _failed(self, error: ApiError) -> ResponseObject:
        code = _CODES.get(error.kind, "server_error")
        return self._object("failed", error=ResponseError(code, error.message), usage=self._usage())

    def _object(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        return ResponseObject(**self._echoed, status=status, output=tuple(self._items.done), **more)

    def _usage(self) -> ResponseUsage:
        usage = self._active.usage
        written = max(0, self._active.pinned_tokens - usage.cached_tokens)
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, written),
            usage.completion_tokens,
            OutputTokensDetails(self._active.num_thought_tokens),
            usage.total_tokens,
        )


def _split(event: OutputTextDelta) -> tuple[bytes, bytes, bytes]:
    """The bytes of an event of text before its number, between number and text, and after the text."""
    marked = msgspec.structs.replace(event, sequence_number=_NUMBER, delta=_MARK)
    head, after = _event(marked).rsplit(_encode(_MARK), 1)
    before, middle = head.split(b"%d" % _NUMBER, 1)
    return before, middle, after


def _event(event: Event) -> bytes:
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _echoed_fields(active: ActiveRequest, body: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request that the response repeats, with defaults filled in."""
    sampling = active.requests[0].sampling
    choice, text = body.tool_choice, body.text
    form = {"type": "text"} if text is None or text.format is None else _plain(text.format)
    verbosity = None if text is None else text.verbosity
    return {
        "id": f"resp_{active.request_id}",
        "created_at": active.created,
        "instructions": body.instructions,
        "max_output_tokens": active.request.params.max_tokens,
        "metadata": body.metadata or {},
        "model": active.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {} if body.reasoning is None else _plain(body.reasoning),
        "service_tier": TIERS[active.priority],
        "temperature": sampling.temperature,
        "text": {"format": form} | ({} if verbosity is None else {"verbosity": verbosity}),
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else _plain(choice),
        "tools": [_plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "user": body.user if isinstance(body.user, str) else None,
    }


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    """Convert to a dict without null fields."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return {name: entry for name, entry in found.items() if entry is not None}


def _error_event(error: ApiError, _request_id: str) -> bytes:
    """The error event before the response's first event; a later error is sent as response.failed."""
    body = error_body(error)
    return _event(ErrorEvent(code=body.code, message=body.message, param=body.param, error=body))


RESPONSES = replace(OPENAI, event=_error_event)
