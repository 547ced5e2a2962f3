"""Request and response bodies of `/v1/messages` and `/v1/messages/count_tokens`, and stream events.

Every optional field may be null. Values are checked when the body is converted to an `InferenceRequest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.values import MAX_TOKEN_ID, MIN_PENALTY
from quire.server.protocols.support import (
    SHAPE_FIELDS,
    CacheView,
    Unsupported,
    check_supported,
    describe_refused,
    with_shape_fields,
)
from quire.text.messages import MAX_MESSAGES, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from quire.text.stream import MAX_STOPS

_CONVERSATIONS = "conversations are used unchanged"
_SHAPE = "use output_config.format, which takes a JSON schema"
_ONE_MODEL = "a request uses one model"
_EMPTY: tuple[object, ...] = (None, "", [], {})  # values that request nothing in any field

UNSUPPORTED = {
    "mcp_servers": Unsupported("tools are run by the client"),
    "container": Unsupported("this server runs no code"),
    "compaction": Unsupported(_CONVERSATIONS),
    "thread": Unsupported(_CONVERSATIONS),
    "diagnostics": Unsupported('send "cache": true for an explanation of the cache hit'),
    "fallbacks": Unsupported(_ONE_MODEL),
    "fallback_credit_token": Unsupported(_ONE_MODEL),
    "inference_geo": Unsupported("the location of this server cannot be chosen", ("global",)),
    "speed": Unsupported("this server has a single speed", ("standard",)),
    "format": Unsupported(_SHAPE),
    **{name: Unsupported(_SHAPE, ("text",) if name == "response_format" else ()) for name in SHAPE_FIELDS},
}


def refused(field: str) -> Meta:
    return describe_refused(UNSUPPORTED[field])


def refuse_unsupported(body: object) -> None:
    """Raise ApiError for the first field that requests an unsupported feature. Names the member of an object."""
    for field, row in UNSUPPORTED.items():
        path, value = _requested(field, getattr(body, field))
        is_whole = path in (field, f"{field}.type")  # harmless values are those of the field or of its `type`
        check_supported(path, value, row if is_whole else Unsupported(row.why), shown=(str, int, float))


def _requested(field: str, value: Any) -> tuple[str, Any]:
    """The path and the value of the part that requests something: of an object, its `type` or its first member."""
    parts = {field: value}
    if isinstance(value, dict):
        parts = {f"{field}.{key:.80}": value[key] for key in sorted(value, key=lambda key: key != "type")}
    return next(((path, part) for path, part in parts.items() if part not in _EMPTY), (field, None))


ANTHROPIC_MODELS = "claude-"  # prefix of the names of Anthropic's own models
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ROLES = ("user", "assistant", "system")
MAX_TEMPERATURE = 1  # as in Anthropic's API
TOOL_NAME = f"^[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$"


def _bounds(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _described(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema)


# Requests


class CacheControl(Struct, frozen=True):
    """Keep the cache of the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ResultPart(Struct, frozen=True):
    type: Annotated[
        str, _described("text, or tool_reference: a tool that a search found.", enum=["text", "tool_reference"])
    ]
    text: str | None = None
    tool_name: Annotated[str | None, _described("Of a tool_reference: the deferred tool.")] = None


class Block(Struct, frozen=True):
    """A content block of any type. Not a union, so that an unsupported type is refused by name."""

    type: Annotated[
        str, _described("text; also thinking and tool_use of an assistant, tool_result of a user.", enum=BLOCKS)
    ]
    text: str | None = None
    cache_control: CacheControl | None = None
    thinking: str | None = None
    signature: Annotated[Any, _described("Accepted, without effect: quire signs nothing.")] = None
    data: Annotated[Any, _described("Of redacted_thinking. Accepted, without effect.")] = None
    id: Annotated[str | None, _described("Of a tool_use.")] = None
    name: Annotated[str | None, _described("The name of the called tool.")] = None
    input: Annotated[dict[str, Any] | None, _described("The arguments of the call.")] = None
    tool_use_id: Annotated[str | None, _described("The call that a tool_result answers.")] = None
    content: Annotated[str | list[ResultPart] | None, _described("Of a tool_result.")] = None
    is_error: Annotated[bool | None, _described("The tool failed; the content is its error.")] = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["json_schema"])]
    schema: dict[str, Any] | None = None
    strict: Annotated[
        bool | None,
        _described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str | None, _described("A hint for templates that support it.")] = None
    format: Annotated[OutputFormat | None, _described("The format of the answer.")] = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, _described("If the last message is an assistant's, the answer continues it.", enum=ROLES)]
    content: str | list[Block]
    output_config: Annotated[OutputConfig | None, _described("Applies from here on; only effort has an effect.")] = None


class ToolParam(Struct, frozen=True, kw_only=True):
    type: Annotated[
        str | None,
        _described("Tools of other types are left out and named in a header.", enum=["custom", None]),
    ] = None
    name: Annotated[str | None, _bounds(pattern=TOOL_NAME)] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, _described("A JSON schema of an object.")] = None
    strict: Annotated[
        bool | None,
        _described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None
    cache_control: CacheControl | None = None
    defer_loading: Annotated[bool | None, _described("Not shown to the model until a tool_reference names it.")] = None


class ToolChoiceParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["auto", "any", "tool", "none"])]
    name: Annotated[str | None, _described("With type tool: its name.")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["enabled", "adaptive", "disabled"])]
    budget_tokens: Annotated[int | None, _described("Accepted, without effect.")] = None
    display: Annotated[str | None, _described("omitted: leave the reasoning out of the response.")] = None


class Amount(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["input_tokens", "tool_uses", "thinking_turns"])]
    value: Annotated[int, _bounds(minimum=0)]


class ContextEdit(Struct, frozen=True, kw_only=True):
    """clear_thinking_20251015 or clear_tool_uses_20250919; others are ignored and named in a header."""

    type: str
    keep: Annotated[Amount | str | None, _described('How many of the last ones are kept. "all": all reasoning.')] = None
    trigger: Annotated[Amount | None, _described("Clear tool uses above this amount. Default: 100,000 tokens.")] = None
    clear_at_least: Annotated[Amount | None, _described("Clear nothing if less than this would be cleared.")] = None
    exclude_tools: Annotated[list[str] | None, _described("Tools whose results are kept.")] = None
    clear_tool_inputs: Annotated[bool | list[str] | None, _described("Clear the arguments of the calls too.")] = None


class ContextManagement(Struct, frozen=True, kw_only=True):
    edits: list[ContextEdit] | None = None


if TYPE_CHECKING:

    class _ShapeFields(Struct, frozen=True, kw_only=True): ...
else:
    _ShapeFields = with_shape_fields("_ShapeFields", refused, frozen=True)


class CountTokensRequest(_ShapeFields, frozen=True, kw_only=True):
    """A conversation."""

    model: str
    messages: Annotated[list[MessageParam], _described("The conversation.", minItems=1, maxItems=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: Annotated[CacheControl | None, Meta(description="Like cache_control at the last block.")] = None
    compaction: Annotated[Any, refused("compaction")] = None
    container: Annotated[Any, refused("container")] = None
    context_management: Annotated[ContextManagement | None, _described("Edits of the conversation.")] = None
    diagnostics: Annotated[Any, refused("diagnostics")] = None
    fallback_credit_token: Annotated[Any, refused("fallback_credit_token")] = None
    fallbacks: Annotated[Any, refused("fallbacks")] = None
    format: Annotated[Any, refused("format")] = None
    inference_geo: Annotated[Any, refused("inference_geo")] = None
    mcp_servers: Annotated[Any, refused("mcp_servers")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, _described("The older form of output_config.format.")] = None
    speed: Annotated[Any, refused("speed")] = None
    thinking: ThinkingParam | None = None
    thread: Annotated[Any, refused("thread")] = None
    tool_choice: ToolChoiceParam | None = None
    tools: Annotated[list[ToolParam], _bounds(maxItems=MAX_TOOLS)] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer."""

    max_tokens: Annotated[int, _described("The longest answer, in tokens. 0: only fill the cache.", minimum=0)]
    metadata: Annotated[dict[str, Any] | None, Meta(description="Accepted, without effect.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="Accepted, without effect: see `priority`.")
    ] = None
    stop_sequences: Annotated[list[str] | None, _described("Strings that end the answer.", maxItems=MAX_STOPS)] = None
    stream: bool | None = None
    temperature: Annotated[float, _bounds(minimum=0, maximum=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, _bounds(minimum=0, maximum=MAX_TOKEN_ID)] | None = None
    top_p: Annotated[float, _bounds(exclusiveMinimum=0, maximum=1)] | None = None
    # quire's own
    cache: bool | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    min_p: Annotated[float, _bounds(minimum=0, maximum=1)] | None = None
    priority: str | int | None = None
    repetition_penalty: Annotated[float, _bounds(minimum=MIN_PENALTY, maximum=100)] | None = None
    seed: Annotated[int, _bounds(minimum=-(2**63), maximum=2**64 - 1)] | None = None


# Answers

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # quire signs nothing


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(Struct, frozen=True):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class DeltaUsage(Struct, frozen=True, kw_only=True):
    """The three kinds of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int  # kept by cache_control and not cached before
    cache_read_input_tokens: int
    output_tokens: int


class MessageUsage(DeltaUsage, frozen=True, kw_only=True):
    cache_creation: CacheCreation
    service_tier: Literal["standard"] = "standard"


class ClearedThinking(Struct, frozen=True, tag_field="type", tag="clear_thinking_20251015"):
    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(Struct, frozen=True, tag_field="type", tag="clear_tool_uses_20250919"):
    cleared_tool_uses: int
    cleared_input_tokens: int


AppliedEdit = ClearedThinking | ClearedToolUses


class AppliedEdits(Struct, frozen=True):
    applied_edits: tuple[AppliedEdit, ...] = ()


class MessageResponse(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None  # null only in message_start
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET  # set if the request has context_management
    cache: CacheView | UnsetType = UNSET


class OriginalTokens(Struct, frozen=True):
    original_input_tokens: int  # before edits


class TokenCount(Struct, frozen=True):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


# Events, in their order in a stream


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageResponse


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: DeltaUsage
    context_management: AppliedEdits | UnsetType = UNSET
    cache: CacheView | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
