"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and what answers them.

Everything a client may leave out it may also send as null. What a field may hold beyond its type is checked when the
body becomes an `Ask`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.request import MAX_TOKEN_ID, MIN_PENALTY
from quire.server.anthropic.support import refused
from quire.server.cache_view import CacheView
from quire.text.chat import MAX_MESSAGES
from quire.text.stop_strings import MAX_STOPS

BLOCKS = ("text", "thinking", "redacted_thinking")
ROLES = ("user", "assistant", "system")


def _bounds(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _says(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema)


# Requests


class CacheControl(Struct, frozen=True):
    """Keep the prompt's cache up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, frozen=True):
    """One block of content, of any type: those that are not text are refused by name, which a union cannot do."""

    type: Annotated[str, _says("text; in an assistant's message also its thoughts, which are left out.", enum=BLOCKS)]
    text: str | None = None
    cache_control: CacheControl | None = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, _says("Who speaks. An assistant's last message is continued.", enum=ROLES)]
    content: str | list[Block]


class CountTokensRequest(Struct, frozen=True, kw_only=True):
    """A conversation."""

    model: str
    messages: Annotated[list[MessageParam], _says("The conversation.", minItems=1, maxItems=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: Annotated[CacheControl | None, Meta(description="As if it stood at the last block.")] = None
    compaction: Annotated[Any, refused("compaction")] = None
    container: Annotated[Any, refused("container")] = None
    context_management: Annotated[Any, refused("context_management")] = None
    diagnostics: Annotated[Any, refused("diagnostics")] = None
    fallback_credit_token: Annotated[Any, refused("fallback_credit_token")] = None
    fallbacks: Annotated[Any, refused("fallbacks")] = None
    inference_geo: Annotated[Any, refused("inference_geo")] = None
    mcp_servers: Annotated[Any, refused("mcp_servers")] = None
    output_config: Annotated[Any, refused("output_config")] = None
    output_format: Annotated[Any, refused("output_format")] = None
    speed: Annotated[Any, refused("speed")] = None
    thinking: Annotated[Any, refused("thinking")] = None
    thread: Annotated[Any, refused("thread")] = None
    tool_choice: Annotated[Any, refused("tool_choice")] = None
    tools: Annotated[Any, refused("tools")] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer."""

    max_tokens: Annotated[int, _says("The longest answer. 0: fill the cache, answer nothing.", minimum=0)]
    metadata: Annotated[dict[str, Any] | None, Meta(description="Accepted, without effect.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="Accepted, without effect: see `priority`.")
    ] = None
    stop_sequences: Annotated[list[str] | None, _says("Strings that end the answer.", maxItems=MAX_STOPS)] = None
    stream: bool | None = None
    temperature: Annotated[float, _bounds(minimum=0, maximum=100)] | None = None
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

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


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


class MessageResponse(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None  # null only in message_start
    stop_sequence: str | None
    usage: MessageUsage
    cache: CacheView | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    input_tokens: int


# Events, in the order in which they come


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageResponse


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: DeltaUsage
    cache: CacheView | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
