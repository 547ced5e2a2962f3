"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and what answers them.

Everything a client may leave out it may also send as null. What a field may hold beyond its type is checked when the
body becomes an `InferenceRequest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.request import MAX_TOKEN_ID, MIN_PENALTY
from quire.server.protocols.anthropic.support import refused
from quire.server.protocols.cache_explanation import CacheView
from quire.server.protocols.shape_fields import with_shape_fields
from quire.text.messages import MAX_MESSAGES
from quire.text.stop_strings import MAX_STOPS
from quire.text.tools import MAX_TOOL_NAME_CHARS, MAX_TOOLS

ANTHROPIC_MODELS = "claude-"  # what the names of Anthropic's own models begin with
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ROLES = ("user", "assistant", "system")
MAX_TEMPERATURE = 1  # as in Anthropic's API
TOOL_NAME = f"^[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$"


def _bounds(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _says(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema)


# Requests


class CacheControl(Struct, frozen=True):
    """Keep the prompt's cache up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ResultPart(Struct, frozen=True):
    type: Annotated[str, _says("text, or tool_reference: a tool that was found.", enum=["text", "tool_reference"])]
    text: str | None = None
    tool_name: Annotated[str | None, _says("Of a tool_reference: a deferred tool, which is shown from now on.")] = None


class Block(Struct, frozen=True):
    """One block of content, of any type: those that cannot be read are refused by name, which a union cannot do."""

    type: Annotated[str, _says("text; an assistant's may be thinking and tool_use, a user's tool_result.", enum=BLOCKS)]
    text: str | None = None
    cache_control: CacheControl | None = None
    thinking: str | None = None
    signature: Annotated[Any, _says("Accepted, without effect: nothing is signed here.")] = None
    data: Annotated[Any, _says("Of redacted_thinking. Accepted, without effect.")] = None
    id: Annotated[str | None, _says("Of a tool_use.")] = None
    name: Annotated[str | None, _says("Of the tool that was called.")] = None
    input: Annotated[dict[str, Any] | None, _says("What it was called with.")] = None
    tool_use_id: Annotated[str | None, _says("The call that a tool_result answers.")] = None
    content: Annotated[str | list[ResultPart] | None, _says("Of a tool_result.")] = None
    is_error: Annotated[bool | None, _says("The tool failed, and the content says why.")] = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["json_schema"])]
    schema: dict[str, Any] | None = None
    strict: Annotated[
        bool | None,
        _says("Refuse a schema with keywords that cannot be enforced. Else x-quire-unenforced names them."),
    ] = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str | None, _says("A hint, for templates that know it.")] = None
    format: Annotated[OutputFormat | None, _says("What the answer must look like.")] = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, _says("Who speaks. An assistant's last message is continued.", enum=ROLES)]
    content: str | list[Block]
    output_config: Annotated[OutputConfig | None, _says("From here on: only its effort counts.")] = None


class ToolParam(Struct, frozen=True, kw_only=True):
    type: Annotated[
        str | None, _says("Others than the client's own are left out, and named in a header.", enum=["custom", None])
    ] = None
    name: Annotated[str | None, _bounds(pattern=TOOL_NAME)] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, _says("A JSON schema of an object.")] = None
    strict: Annotated[
        bool | None,
        _says("Refuse a schema with keywords that cannot be enforced. Else x-quire-unenforced names them."),
    ] = None
    cache_control: CacheControl | None = None
    defer_loading: Annotated[bool | None, _says("Not shown to the model until a tool_reference names it.")] = None


class ToolChoiceParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["auto", "any", "tool", "none"])]
    name: Annotated[str | None, _says("With tool: which.")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["enabled", "adaptive", "disabled"])]
    budget_tokens: Annotated[int | None, _says("Accepted, without effect.")] = None
    display: Annotated[str | None, _says("omitted: think, and leave it out of the answer.")] = None


class Amount(Struct, frozen=True, kw_only=True):
    type: Annotated[str, _bounds(enum=["input_tokens", "tool_uses", "thinking_turns"])]
    value: Annotated[int, _bounds(minimum=0)]


class ContextEdit(Struct, frozen=True, kw_only=True):
    """clear_thinking_20251015 or clear_tool_uses_20250919; others are ignored, and named in a header."""

    type: str
    keep: Annotated[Amount | str | None, _says('How many of the last ones stay. "all": of thoughts, every one.')] = None
    trigger: Annotated[Amount | None, _says("Clear tool uses when there is more. Unless given: 100,000 tokens.")] = None
    clear_at_least: Annotated[Amount | None, _says("Clear nothing where less would be cleared.")] = None
    exclude_tools: Annotated[list[str] | None, _says("Tools whose results stay.")] = None
    clear_tool_inputs: Annotated[bool | list[str] | None, _says("Clear what they were called with, too.")] = None


class ContextManagement(Struct, frozen=True, kw_only=True):
    edits: list[ContextEdit] | None = None


if TYPE_CHECKING:

    class _ShapeFields(Struct, frozen=True, kw_only=True): ...
else:
    _ShapeFields = with_shape_fields("_ShapeFields", refused, frozen=True)


class CountTokensRequest(_ShapeFields, frozen=True, kw_only=True):
    """A conversation."""

    model: str
    messages: Annotated[list[MessageParam], _says("The conversation.", minItems=1, maxItems=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: Annotated[CacheControl | None, Meta(description="As if it stood at the last block.")] = None
    compaction: Annotated[Any, refused("compaction")] = None
    container: Annotated[Any, refused("container")] = None
    context_management: Annotated[ContextManagement | None, _says("What is cleared before the answer.")] = None
    diagnostics: Annotated[Any, refused("diagnostics")] = None
    fallback_credit_token: Annotated[Any, refused("fallback_credit_token")] = None
    fallbacks: Annotated[Any, refused("fallbacks")] = None
    format: Annotated[Any, refused("format")] = None
    inference_geo: Annotated[Any, refused("inference_geo")] = None
    mcp_servers: Annotated[Any, refused("mcp_servers")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, _says("The older place of output_config.format.")] = None
    speed: Annotated[Any, refused("speed")] = None
    thinking: ThinkingParam | None = None
    thread: Annotated[Any, refused("thread")] = None
    tool_choice: ToolChoiceParam | None = None
    tools: Annotated[list[ToolParam], _bounds(maxItems=MAX_TOOLS)] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer."""

    max_tokens: Annotated[int, _says("The longest answer. 0: fill the cache, answer nothing.", minimum=0)]
    metadata: Annotated[dict[str, Any] | None, Meta(description="Accepted, without effect.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="Accepted, without effect: see `priority`.")
    ] = None
    stop_sequences: Annotated[list[str] | None, _says("Strings that end the answer.", maxItems=MAX_STOPS)] = None
    stream: bool | None = None
    temperature: Annotated[float, _bounds(minimum=0, maximum=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, _bounds(minimum=0, maximum=MAX_TOKEN_ID)] | None = None
    top_p: Annotated[float, _bounds(exclusiveMinimum=0, maximum=1)] | None = None
    # Ours
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
    signature: str = ""  # nothing is signed here


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
    cache_creation_input_tokens: int  # of what cache_control keeps, what was not there yet
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
    context_management: AppliedEdits | UnsetType = UNSET  # where it was asked for
    cache: CacheView | UnsetType = UNSET


class OriginalTokens(Struct, frozen=True):
    original_input_tokens: int  # before edits


class TokenCount(Struct, frozen=True):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


# Events, in the order in which they come


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
