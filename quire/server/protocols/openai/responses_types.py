"""Request and response bodies and events of POST /v1/responses. Nothing is stored: a request has the conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.server.protocols.openai.types import (
    Alternatives,
    ChatTokenLogprob,
    ErrorBody,
    GenerationBody,
    JsonSchemaFormat,
    PromptCacheBreakpoint,
    TokenCount,
)
from quire.server.protocols.support import CacheView, Unsupported, describe_accepted, describe_refused
from quire.text.messages import MAX_MESSAGES, MAX_TOOLS

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


def _refused(field: str) -> Meta:
    return describe_refused(UNSUPPORTED[field])


def _accepted(field: str) -> Meta:
    return describe_accepted(ACCEPTED[field])


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


class ResponsesRequest(GenerationBody, kw_only=True):
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

    truncation: Annotated[Any, _accepted("truncation")] = None
    max_tool_calls: Annotated[Any, _accepted("max_tool_calls")] = None
    access_programs: Annotated[Any, _accepted("access_programs")] = None
    client_metadata: Annotated[Any, _accepted("client_metadata")] = None
    image: Annotated[Any, _accepted("image")] = None
    previous_response_id: Annotated[Any, _refused("previous_response_id")] = None
    conversation: Annotated[Any, _refused("conversation")] = None
    prompt: Annotated[Any, _refused("prompt")] = None
    background: Annotated[Any, _refused("background")] = None
    context_management: Annotated[Any, _refused("context_management")] = None
    moderation: Annotated[Any, _refused("moderation")] = None
    n: Annotated[Any, _refused("n")] = None
    response_format: Annotated[Any, _refused("response_format")] = None


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
