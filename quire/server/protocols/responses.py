"""POST /v1/responses: OpenAI's Responses API. Nothing is stored: a request has the conversation.

The tools of a body are functions, custom tools and namespaces. The model calls every tool as a function with a JSON
object. A tool in a namespace has one name made of both names. A custom tool takes a text, which is the argument
`input`. The client sees its own names and forms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.engine.generation import Delta
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.models import ActiveRequest, InferenceRequest
from quire.server.protocols.openai import (
    NAMES,
    OPENAI,
    RUNS_NO_TOOLS,
    TIERS,
    ChatTokenLogprob,
    ContentPart,
    ConversationBody,
    JsonSchemaFormat,
    PartTurns,
    Shape,
    TokenCount,
    cache_ttl_s,
    call_id_of,
    chat_logprob,
    checked_alternatives,
    error_body,
    make_request,
    names_of,
    shape_of,
    thinking_fields,
    unknown_format,
    wants_thought,
)
from quire.server.protocols.support import (
    AnswerEncoder,
    CacheView,
    Event,
    Item,
    Sample,
    Turn,
    Unsupported,
    decoded_arguments,
    described,
    event_bytes,
    finish_reason,
    given,
    one_of,
    protocol_field_names,
    refuse_unsupported,
    respond,
    unsupported_value,
    with_fields,
)
from quire.server.request_context import RequestContext
from quire.text.grammar import json_object_grammar, json_schema_grammar
from quire.text.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallStart,
    ChatRequest,
    Part,
    Role,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Words,
    check_call,
    check_parts,
)
from quire.text.tokenizer import check_text

_STORES = "responses are not stored: send the whole conversation as input"

UNSUPPORTED = {
    "previous_response_id": Unsupported(_STORES),
    "conversation": Unsupported(_STORES),
    "prompt": Unsupported("there are no stored prompts: send instructions and input"),
    "background": Unsupported("a response is generated while the client waits", (False,)),
    "context_management": Unsupported("a conversation is never shortened"),
    "moderation": Unsupported("this server has no moderation model", empty=()),
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
LABELS = {  # of items
    "id": "items are not stored",
    "status": "items are not stored",
    "phase": "items are not stored",
    "encrypted_content": "quire encrypts nothing",
}
LOGPROBS = "message.output_text.logprobs"  # in `include`; other values are for tools and stores that quire lacks


# Requests


@with_fields({}, {"annotations": "an answer sent back has them", "logprobs": "an answer sent back has them"})
class InputPart(ContentPart, kw_only=True):
    type: Annotated[str, described(enum=["input_text", "output_text", "refusal", "reasoning_text", "summary_text"])]


ITEMS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip


@with_fields({}, LABELS)
class InputItem(Struct, kw_only=True):
    """A message, reasoning, a tool call or its output. Items of earlier responses are accepted unchanged."""

    type: Annotated[str, described(enum=list(ITEMS))] | None = None
    role: Annotated[str, described(enum=["user", "assistant", "system", "developer"])] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: Annotated[str | None, described("Of a function call: the namespace of the function.")] = None
    arguments: str | None = None
    input: Annotated[str | None, described("Of a custom_tool_call: the text.")] = None
    output: str | list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    """A function, or a custom tool that takes a text. The client runs both."""

    type: Annotated[str, described(enum=["function", "custom"])] = "function"
    name: str | None = None
    namespace: Annotated[str | None, described("In tool_choice: the namespace of the function.")] = None
    format: Annotated[Any, described("Of a custom tool. Accepted, but not enforced.")] = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("JSON schema of the arguments.")] = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class ToolParam(FunctionTool, kw_only=True):
    """A tool, or a namespace of tools. Tools that OpenAI's server would run are left out and named in a header."""

    type: Annotated[str, described(enum=["function", "custom", "namespace"])] = "function"
    tools: Annotated[list[FunctionTool] | None, described("Of a namespace: its tools.")] = None


class ToolChoiceBody(Struct, kw_only=True):
    type: Annotated[str, described(enum=["function", "custom", "allowed_tools"])]
    name: str | None = None
    namespace: str | None = None
    mode: Annotated[str, described(enum=["auto", "required"])] | None = None
    tools: list[FunctionTool] | None = None


class TextFormat(JsonSchemaFormat, kw_only=True):
    type: Annotated[str, described(enum=["text", "json_object", "json_schema"])]


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Annotated[Any, described("Accepted, without effect: a hint.")] = None


@with_fields(
    {},
    {
        "summary": "the reasoning itself is returned",
        "generate_summary": "the reasoning itself is returned",
        "context": "the template decides which reasoning it keeps",
        "mode": "there is only one",
    },
)
class ReasoningConfig(Struct, kw_only=True):
    effort: Annotated[
        str | None,
        described("none: no reasoning, if the template supports it. Others: a hint to the template."),
    ] = None


@with_fields(UNSUPPORTED, ACCEPTED)
class ResponsesRequest(ConversationBody, kw_only=True):
    input: str | Annotated[list[InputItem], described(minItems=1, maxItems=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None  # overrides max_tokens
    tools: Annotated[list[ToolParam], described(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, described(enum=["none", "auto", "required"])] | ToolChoiceBody | None = None
    text: TextConfig | None = None
    include: Annotated[
        list[str] | None, described(f"`{LOGPROBS}` adds log probabilities; other values have no effect.")
    ] = None
    metadata: Annotated[dict[str, str] | None, described("Returned in the response.")] = None
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


class OutputItem(Struct, frozen=True, kw_only=True):
    id: str
    status: ItemStatus


class OutputMessage(OutputItem, frozen=True, kw_only=True, tag="message"):
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class ReasoningItem(OutputItem, frozen=True, kw_only=True, tag="reasoning"):
    summary: tuple[()] = ()  # there is no summary: content is the reasoning itself
    content: tuple[ReasoningText, ...] = ()


class FunctionCallItem(OutputItem, frozen=True, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET  # if the client defined the tool in a namespace


class CustomToolCallItem(OutputItem, frozen=True, kw_only=True, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


AnyItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


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
    created_at: Annotated[int, described("Unix time in seconds.")]
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
    output: tuple[AnyItem, ...] = ()
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


INPUT = "input"  # the argument that holds a custom tool's text
CUSTOM: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole text."}},
    "required": [INPUT],
}


def qualified_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class ClientTool(NamedTuple):
    """A tool as the client defined it."""

    tool: FunctionTool
    path: str
    namespace: str | None = None
    about: str = ""  # the namespace's description, added to its first tool

    @property
    def is_run(self) -> bool:
        """Whether the client runs it, not OpenAI's server."""
        return self.tool.type in ("function", "custom")


def _rows(tools: Iterable[ToolParam]) -> Iterator[ClientTool]:
    """Yield every tool, including those in namespaces."""
    for i, tool in enumerate(tools):
        if tool.type != "namespace":
            yield ClientTool(tool, f"tools[{i}]")
            continue
        namespace = given(tool.name, f"tools[{i}].name")
        for j, inner in enumerate(tool.tools or ()):
            about = tool.description or "" if j == 0 else ""
            yield ClientTool(inner, f"tools[{i}].tools[{j}]", namespace, about)


def _tool(row: ClientTool) -> Tool:
    tool, path = row.tool, row.path
    name = qualified_name(row.namespace, given(tool.name, f"{path}.name"))
    description = "\n".join(text for text in (row.about, tool.description) if text)
    parameters = CUSTOM if tool.type == "custom" else tool.parameters or {}
    return Tool(name, description, parameters, bool(tool.strict), path, f"{path}.parameters")


def _is_grammar(tool: FunctionTool) -> bool:
    return tool.type == "custom" and isinstance(tool.format, dict) and tool.format.get("type") != "text"


def _choice(body: ResponsesRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            return ToolChoice(ToolMode(one_of("tool_choice", mode, ToolMode)), is_parallel=is_parallel)
        case ToolChoiceBody(type="function" | "custom", name=name, namespace=namespace):
            name = qualified_name(namespace, given(name, "tool_choice.name"))
            return ToolChoice(ToolMode.REQUIRED, name, is_parallel=is_parallel)
        case ToolChoiceBody(type="allowed_tools") as choice:
            mode = one_of("tool_choice.mode", choice.mode, ("auto", "required"))
            allowed = [ClientTool(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(choice.tools or ())]
            if not any(row.is_run for row in allowed):
                raise InvalidRequest("tool_choice.tools is missing or has no tool that the client runs")
            names = tuple(
                qualified_name(row.tool.namespace, given(row.tool.name, f"{row.path}.name"))
                for row in allowed
                if row.is_run
            )
            return ToolChoice(ToolMode(mode), allowed=names, is_parallel=is_parallel)
        case ToolChoiceBody(type=kind):
            raise unsupported_value("tool_choice.type", kind, RUNS_NO_TOOLS)


_NAMES = NAMES | {
    "logprobs": "top_logprobs",
    "prompt": "input",
    "messages": "input",
}
_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def parse_responses(body: ResponsesRequest) -> InferenceRequest:
    """Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, UNSUPPORTED)
    with protocol_field_names(names_of(body, _NAMES)):
        conversation = _Conversation(cache_ttl_s(body))
        conversation.add_all(body)
        tools = list(_rows(body.tools or ()))
        effort = None if body.reasoning is None else body.reasoning.effort
        chat = ChatRequest(
            conversation.messages(),
            template_args=body.chat_template_kwargs or {},
            tools=tuple(_tool(row) for row in tools if row.is_run),
            tool_choice=_choice(body),
            wants_thought=wants_thought(body, effort),
            reasoning_effort=effort,
        )
        shape, other = _text_shape(body), shape_of(body)
        if shape is not None and other is not None:
            raise InvalidRequest(f"{other[0]} and text.format exclude each other")
        return make_request(
            body,
            (chat,),
            shape or other,
            breakpoints=conversation.breakpoints,
            ignored=[f"{row.path}.{row.tool.type}" for row in tools if not row.is_run],
            unenforced=tuple(f"{row.path}.format" for row in tools if _is_grammar(row.tool)),
            thinking=thinking_fields(body, "reasoning.effort", effort),
            logprobs=_logprobs(body),
        )


def _logprobs(body: ResponsesRequest) -> int | None:
    count = checked_alternatives(body.top_logprobs)
    return count or 0 if LOGPROBS in (body.include or ()) else None


# The conversation


class _Conversation(PartTurns):
    """Converts items to messages. Consecutive reasoning, text and calls of an assistant become one message."""

    text_types = ("input_text", "output_text", "text")
    known_types = "input_text, output_text, refusal"
    other_types = MappingProxyType({"input_image": "images", "input_file": "files", "input_audio": "audio"})

    def part(self, text: str, path: str) -> Part:
        return Part(_checked(text, path))

    def add_all(self, body: ResponsesRequest) -> None:
        if body.instructions is not None:
            self.add(Turn(Role.SYSTEM, [self.part(body.instructions, "instructions")]))
        if isinstance(body.input, str):
            self.add(Turn(Role.USER, [self.part(body.input, "input")]))
            return
        if not 1 <= len(body.input) <= MAX_MESSAGES:
            raise InvalidRequest(f"input has {len(body.input)} entries, not 1 to {MAX_MESSAGES}")
        for i, item in enumerate(body.input):
            self._add_item(item, f"input[{i}]")

    def _add_item(self, item: InputItem, path: str) -> None:
        match item.type or "message":
            case "message":
                role = _ROLES[one_of(f"{path}.role", item.role, _ROLES)]
                if role is Role.ASSISTANT:
                    self._assistant()
                else:
                    self.add(Turn(role))
                self.fill(item.content, f"{path}.content")
            case "reasoning":
                self._assistant().thoughts.append(_thought(item, path))
            case "function_call" | "custom_tool_call":
                self._assistant(is_later=True).calls.append(_call(item, path))
            case "function_call_output" | "custom_tool_call_output":
                self.add(Turn(Role.TOOL, call_id=_call_id(item, path)))
                self.fill(item.output, f"{path}.output")
            case "item_reference" as kind:
                raise unsupported_value(f"{path}.type", kind, "items are not stored: send the item itself")
            case other:
                raise unsupported_value(f"{path}.type", other, f"items are {', '.join(ITEMS)}")

    def _assistant(self, *, is_later: bool = False) -> Turn:
        """Return the assistant turn to add to. `is_later`: the addition may follow text and calls of the same turn."""
        if not self or self[-1].role is not Role.ASSISTANT or ((self[-1].parts or self[-1].calls) and not is_later):
            self.add(Turn(Role.ASSISTANT))
        return self[-1]


def _thought(item: InputItem, path: str) -> str:
    """The reasoning text, or its summary if there is no text."""
    name = "content" if item.content else "summary"
    parts = item.content or item.summary or ()
    if isinstance(parts, str):
        return _checked(parts, f"{path}.content")
    check_parts(parts, f"{path}.{name}")
    return "".join(_checked(part.text or "", f"{path}.{name}[{i}].text") for i, part in enumerate(parts))


def _call(item: InputItem, path: str) -> ToolCall:
    name = given(item.name, f"{path}.name")
    if item.type == "custom_tool_call":
        arguments = json.dumps({INPUT: _checked(given(item.input, f"{path}.input"), f"{path}.input")})
    else:
        arguments = given(item.arguments, f"{path}.arguments")
    call = ToolCall(_call_id(item, path), qualified_name(item.namespace, name), arguments or "{}")
    check_call(call, path)
    return call


def _call_id(item: InputItem, path: str) -> str:
    path = f"{path}.call_id"
    return _checked(call_id_of(given(item.call_id, path), path), path)


def _checked(text: str, path: str) -> str:
    check_text(text, name=path)
    return text


# Answer formats


def _text_shape(body: ResponsesRequest) -> Shape | None:
    match None if body.text is None else body.text.format:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return "text.format", json_object_grammar
        case TextFormat(type="json_schema", schema=schema, strict=strict):
            path = "text.format.schema"
            return path, partial(json_schema_grammar, given(schema, path), strict=bool(strict))
        case TextFormat(type=other):
            raise unknown_format("text.format.type", other)


_NUMBER = 1 << 62  # placeholder for the number of an event; no real event reaches it
_NUMBER_BYTES = b"%d" % _NUMBER
_CODES: dict[Kind, ErrorCode] = {Kind.RATE_LIMITED: "rate_limit_exceeded", Kind.OVERLOADED: "rate_limit_exceeded"}


async def responses(context: RequestContext) -> Response:
    body = await context.body(ResponsesRequest)
    request = await context.parse(parse_responses, body)
    return await respond(context, request, partial(Reply, body=body), names_of(body, _NAMES))


class Reply(AnswerEncoder):
    """The response to one request. An answer without items gets one empty message."""

    waits_for_start = True
    is_stamped = True

    def __init__(self, active: ActiveRequest, body: ResponsesRequest) -> None:
        super().__init__(active)
        self._echoed = _echoed_fields(active, body)
        rows = _rows(body.tools or ())  # by the name that the model uses
        self._tools = {qualified_name(row.namespace, row.tool.name): row for row in rows if row.tool.name is not None}
        self._done: list[AnyItem] = []
        self._status: Literal["completed", "incomplete"] = "completed"
        self._num_events = 0
        self._held: tuple[ChatTokenLogprob, ...] = ()  # of tokens whose text has not arrived yet

    async def collect(self) -> None:
        """Read delta by delta: the log probabilities of reasoning are left out."""
        async with self.active:
            async for batch in self.active.batches():
                for _, delta in batch:
                    self.take_delta(self.sample(), delta)

    def whole(self) -> ResponseObject:
        is_whole = self._status == "completed"
        return self._object(
            self._status,
            incomplete_details=None if is_whole else IncompleteDetails(),
            completed_at=int(time.time()) if is_whole else None,
            usage=self._usage(),
            cache=self.cache,
        )

    def begin(self) -> bytes:
        begun = self._object("in_progress")
        return self.write([_event("created", response=begun), _event("in_progress", response=begun)])

    def finish(self) -> bytes:
        return self.write([_event(self._status, response=self.whole())])

    def fail(self, error: ApiError) -> bytes | None:
        problem = ResponseError(_CODES.get(error.kind, "server_error"), error.message)
        return self.write([_event("failed", response=self._object("failed", error=problem, usage=self._usage()))])

    def stamp(self, data: bytes) -> bytes:
        self._num_events += 1
        return data.replace(_NUMBER_BYTES, b"%d" % (self._num_events - 1), 1)

    def take_delta(self, sample: Sample, delta: Delta) -> list[Event]:
        reason = finish_reason(delta)
        self._held += tuple(map(chat_logprob, delta.logprobs))
        events = super().take_delta(sample, delta)
        if delta.finish_reason is None:
            return events
        if not sample.items:
            events += self.open(sample, Words(""))
        if self._held and sample.open is not None and isinstance(sample.open.first, Words):
            events += self.grow(sample.open, "")  # every token has logprobs, also one without text
        self._status = "incomplete" if reason == "length" else "completed"
        return events + self.close(sample)

    def start(self, item: Item) -> list[Event]:
        added = _event("output_item.added", output_index=item.number, item=self._item(item, "in_progress"))
        if isinstance(item.first, CallStart):
            return [added]
        return [added, self._of_part("content_part.added", item, part=_part(item))]

    def grow(self, item: Item, text: str) -> list[Event]:
        logprobs, self._held = self._held, ()
        match item.first:
            case Words():
                item.logprobs += logprobs
                return [self._of_part("output_text.delta", item, delta=text, logprobs=logprobs)]
            case Thought():  # the protocol has no field for logprobs here
                return [self._of_part("reasoning_text.delta", item, delta=text)]
            case CallStart() if self._is_custom(item):
                return []  # the model writes the text as JSON, so it is sent as a whole when the JSON is complete
            case CallStart():
                return [self._of_item("function_call_arguments.delta", item, delta=text)]

    def end(self, item: Item) -> list[Event]:
        done = self._item(item, self._status)
        self._done.append(done)
        if isinstance(done, FunctionCallItem):
            fields = {"name": done.name, "arguments": done.arguments}
            events = [self._of_item("function_call_arguments.done", item, **fields)]
        elif isinstance(done, CustomToolCallItem):
            delta = self._of_item("custom_tool_call_input.delta", item, delta=done.input)
            events = [delta, self._of_item("custom_tool_call_input.done", item, input=done.input)]
        else:
            part, name = _part(item), "output_text" if isinstance(done, OutputMessage) else "reasoning_text"
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            text = self._of_part(f"{name}.done", item, text=part.text, **more)
            events = [text, self._of_part("content_part.done", item, part=part)]
        return [*events, _event("output_item.done", output_index=item.number, item=done)]

    def _of_item(self, event: str, item: Item, /, **fields: Any) -> Event:
        return _event(event, item_id=self._id(item), output_index=item.number, **fields)

    def _of_part(self, event: str, item: Item, /, **fields: Any) -> Event:
        return self._of_item(event, item, content_index=0, **fields)

    def _id(self, item: Item) -> str:
        if isinstance(item.first, CallStart):
            prefix = "ctc" if self._is_custom(item) else "fc"
        else:
            prefix = "msg" if isinstance(item.first, Words) else "rs"
        return f"{prefix}_{self.active.request_id}_{item.number}"

    def _is_custom(self, item: Item) -> bool:
        return isinstance(item.first, CallStart) and self._client_tool(item.first).tool.type == "custom"

    def _client_tool(self, call: CallStart) -> ClientTool:
        return self._tools.get(call.name) or ClientTool(FunctionTool(name=call.name), "")

    def _item(self, item: Item, status: ItemStatus) -> AnyItem:
        fields: dict[str, Any] = {"id": self._id(item), "status": status}
        if not isinstance(item.first, CallStart):
            fields["content"] = () if status == "in_progress" else (_part(item),)
            return OutputMessage(**fields) if isinstance(item.first, Words) else ReasoningItem(**fields)
        client = self._client_tool(item.first)
        fields |= {"call_id": item.first.call_id, "name": client.tool.name}
        fields["namespace"] = UNSET if client.namespace is None else client.namespace
        if not self._is_custom(item):
            return FunctionCallItem(**fields, arguments=item.text)
        found = (decoded_arguments(item.text) or {}).get(INPUT)
        return CustomToolCallItem(**fields, input=found if isinstance(found, str) else "")

    def _object(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        return ResponseObject(**self._echoed, status=status, output=tuple(self._done), **more)

    def _usage(self) -> ResponseUsage:
        usage = self.active.usage
        written = max(0, self.active.pinned_tokens - usage.cached_tokens)
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, written),
            usage.completion_tokens,
            OutputTokensDetails(self.active.num_thought_tokens),
            usage.total_tokens,
        )


def _part(item: Item) -> OutputText | ReasoningText:
    is_message = isinstance(item.first, Words)
    return OutputText(item.text, tuple(item.logprobs)) if is_message else ReasoningText(item.text)


def _event(name: str, /, **fields: Any) -> Event:
    return {"type": f"response.{name}", "sequence_number": _NUMBER, **fields}


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
    """The error event before the response's first event; a later error is sent as response.failed.

    OpenAI documents it without `error`, but its client reads only `error`.
    """
    body = error_body(error)
    fields = {name: body[name] for name in ("code", "message", "param")}
    return event_bytes({"type": "error", "sequence_number": 0, **fields, "error": body})


RESPONSES = replace(OPENAI, event=_error_event)
