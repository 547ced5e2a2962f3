"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol.

Anthropic's API leaves two cases open. Here, an answer without text has one empty text block, and max_tokens = 0 fills
the cache and returns no block. `context_management` clears old tool results and reasoning from a conversation before it
is answered. Two kinds of edits are supported; others are ignored and named in a response header. Errors have the format
of Anthropic's API, as its SDK maps them to exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from quire.core.values import MAX_TOKEN_ID, MIN_PENALTY, FinishReason
from quire.engine.generation import Delta, GenerationParams, check_temperature
from quire.errors import InvalidRequest, RequestFailed
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.http import EventEncoder
from quire.server.models import (
    ActiveRequest,
    Breakpoint,
    InferenceRequest,
    ModelService,
    Prompt,
    ThinkingField,
    priority_of,
)
from quire.server.protocols.support import (
    SHAPE_FIELDS,
    CacheView,
    Turn,
    Unsupported,
    answer_in_shape,
    check_supported,
    protocol_field_names,
    shape_error,
    unsupported,
    view,
    with_fields,
    with_unenforced,
)
from quire.server.request_context import IGNORED, RequestContext
from quire.text.grammar import Grammar, json_schema_grammar
from quire.text.messages import (
    MAX_MESSAGES,
    MAX_TOOL_NAME_CHARS,
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
    check_messages,
    check_parts,
)
from quire.text.stream import MAX_STOPS, CallArguments, CallStart, Piece, PlainAnswer, Thought, Words

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


def refuse_unsupported(body: object) -> None:
    """Raise ApiError for the first field that requests an unsupported feature. Names the member of an object."""
    for name, row in UNSUPPORTED.items():
        path, value = _requested(name, getattr(body, name))
        is_whole = path in (name, f"{name}.type")  # harmless values are those of the field or of its `type`
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

    class _RefusedFields(Struct, frozen=True): ...
else:
    _RefusedFields = with_fields("_RefusedFields", UNSUPPORTED, frozen=True)


class CountTokensRequest(_RefusedFields, frozen=True, kw_only=True):
    """A conversation."""

    model: str
    messages: Annotated[list[MessageParam], _described("The conversation.", minItems=1, maxItems=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: Annotated[CacheControl | None, Meta(description="Like cache_control at the last block.")] = None
    context_management: Annotated[ContextManagement | None, _described("Edits of the conversation.")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, _described("The older form of output_config.format.")] = None
    thinking: ThinkingParam | None = None
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


CLEAR_THINKING = "clear_thinking_20251015"
CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEARED = "[Old tool result content cleared]"
DEFAULT_KEPT_THOUGHTS = 1
DEFAULT_KEPT_TOOL_USES = 3
DEFAULT_TRIGGER_TOKENS = 100_000

CountTokens = Callable[[ChatRequest], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Edited:
    chat: ChatRequest
    applied: tuple[AppliedEdit, ...] = ()
    num_original_tokens: int | None = None  # None: no edit had to count


def ignored_edits(body: CountTokensRequest) -> tuple[str, ...]:
    return tuple(
        f"context_management.edits[{i}].{edit.type}"
        for i, edit in enumerate(_edits(body.context_management))
        if edit.type not in (CLEAR_THINKING, CLEAR_TOOL_USES)
    )


async def apply(management: ContextManagement | None, chat: ChatRequest, count: CountTokens) -> Edited:
    """Check all edits, then apply them. Returns the edited conversation and the applied edits."""
    edits = _edits(management)
    seen: set[str] = set()
    for i, edit in enumerate(edits):
        path = f"context_management.edits[{i}]"
        _check(edit, path)
        if edit.type in seen:  # each edit tokenises the whole conversation
            raise _wrong(f"{path}.type", edit.type, "used twice")
        seen.add(edit.type)
    done = Edited(chat)
    for edit in edits:
        done = await _apply(edit, done, count)
    return done


async def _apply(edit: ContextEdit, done: Edited, count: CountTokens) -> Edited:
    chat = done.chat
    if edit.type == CLEAR_THINKING:
        messages, num_cleared = clear_thinking(chat.messages, _kept_thoughts(edit))
    elif edit.type == CLEAR_TOOL_USES:
        messages, num_cleared = clear_tool_uses(chat.messages, edit)
    else:
        return done
    if not num_cleared:
        return done
    num_before = await count(chat)
    if edit.type == CLEAR_TOOL_USES and not _is_triggered(edit, chat.messages, num_before):
        return done
    cleared = replace(chat, messages=messages)
    num_tokens = max(0, num_before - await count(cleared))
    if edit.clear_at_least is not None and num_tokens < edit.clear_at_least.value:
        return done
    kind = ClearedThinking if edit.type == CLEAR_THINKING else ClearedToolUses
    original = num_before if done.num_original_tokens is None else done.num_original_tokens
    return Edited(cleared, (*done.applied, kind(num_cleared, num_tokens)), original)


def clear_thinking(messages: Sequence[Message], num_kept: int | None) -> tuple[list[Message], int]:
    """Clear the reasoning of all turns that have some, except the last `num_kept`. None: keep all."""
    with_thoughts = [i for i, message in enumerate(messages) if message.thought]
    cleared = set() if num_kept is None else set(with_thoughts[: max(0, len(with_thoughts) - num_kept)])
    found = [replace(message, thought="") if i in cleared else message for i, message in enumerate(messages)]
    return found, len(cleared)


def clear_tool_uses(messages: Sequence[Message], edit: ContextEdit) -> tuple[list[Message], int]:
    """Replace the results of all calls except the last ones with a placeholder."""
    excluded = set(edit.exclude_tools or ())
    results = {message.tool_call_id for message in messages if message.role is Role.TOOL and message.text != CLEARED}
    calls = [
        call.call_id
        for message in messages
        for call in message.tool_calls
        if call.call_id in results and call.name not in excluded
    ]
    num_kept = DEFAULT_KEPT_TOOL_USES if edit.keep is None or isinstance(edit.keep, str) else edit.keep.value
    cleared = set(calls[: max(0, len(calls) - num_kept)])
    inputs = edit.clear_tool_inputs
    found: list[Message] = []
    for message in messages:
        if message.role is Role.TOOL and message.tool_call_id in cleared:
            message = replace(message, parts=(Part(CLEARED),))
        if inputs and any(call.call_id in cleared for call in message.tool_calls):
            message = replace(
                message,
                tool_calls=tuple(
                    replace(call, arguments="{}")
                    if call.call_id in cleared and (inputs is True or call.name in inputs)
                    else call
                    for call in message.tool_calls
                ),
            )
        found.append(message)
    return found, len(cleared)


def _is_triggered(edit: ContextEdit, messages: Sequence[Message], num_tokens: int) -> bool:
    if edit.trigger is None:
        return num_tokens > DEFAULT_TRIGGER_TOKENS
    if edit.trigger.type == "tool_uses":
        return sum(len(message.tool_calls) for message in messages) > edit.trigger.value
    return num_tokens > edit.trigger.value


def _kept_thoughts(edit: ContextEdit) -> int | None:
    """Number of turns whose reasoning is kept. None: all."""
    if isinstance(edit.keep, str):
        return None
    return DEFAULT_KEPT_THOUGHTS if edit.keep is None else edit.keep.value


def _check(edit: ContextEdit, path: str) -> None:
    if edit.type not in (CLEAR_THINKING, CLEAR_TOOL_USES):
        return
    is_thinking = edit.type == CLEAR_THINKING
    if isinstance(edit.keep, str) and not (is_thinking and edit.keep == "all"):
        raise _wrong(f"{path}.keep", edit.keep, "neither a count" + (' nor "all"' if is_thinking else ""))
    kinds = {
        "keep": ("thinking_turns",) if is_thinking else ("tool_uses",),
        "trigger": ("input_tokens", "tool_uses"),
        "clear_at_least": ("input_tokens",),
    }
    for name, known in kinds.items():
        amount = getattr(edit, name)
        if amount is None or isinstance(amount, str):
            continue
        if amount.type not in known:
            raise _wrong(f"{path}.{name}.type", amount.type, f"not one of {', '.join(known)}")
        least = 1 if is_thinking or name == "trigger" else 0
        if amount.value < least:
            raise _wrong(f"{path}.{name}.value", amount.value, f"less than {least}")


def _wrong(path: str, value: object, why: str) -> ApiError:
    return ApiError(Kind.INVALID, f"{path} = {value!r:.80} is {why}", param=path)


def _edits(management: ContextManagement | None) -> Sequence[ContextEdit]:
    return () if management is None else management.edits or ()


T = TypeVar("T")

BILLING = "x-anthropic-billing-header:"
TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}
_THINKING = {"enabled": True, "adaptive": None, "disabled": False}
_PART = re.compile(r"\[(\d+)\]")

# Consecutive turns of one role are merged into one, as in Anthropic's API, because many templates require alternating
# roles. User texts are separated; an assistant's text continues the previous one.
_BETWEEN = {Role.SYSTEM: "\n\n", Role.USER: "\n\n", Role.ASSISTANT: ""}


def to_inference_request(body: MessagesRequest) -> InferenceRequest:
    refuse_unsupported(body)
    chat, breakpoints, ignored = conversation(body)
    request = InferenceRequest(
        model=body.model,
        prompts=(chat,),
        params=_params(body),
        is_streaming=bool(body.stream),
        priority=priority_of(body.priority),
        cache_salt=body.cache_salt or "",
        breakpoints=breakpoints,
        wants_cache=bool(body.cache),
        ignored=(*ignored, *_ignored(body)),
        thinking_fields=_thinking_fields(body, chat),
    )
    return with_unenforced(request, shape_field(body))


def _ignored(body: MessagesRequest) -> tuple[str, ...]:
    has_budget = body.thinking is not None and body.thinking.budget_tokens is not None
    return ("thinking.budget_tokens",) if has_budget else ()


def _thinking_fields(body: MessagesRequest, chat: ChatRequest) -> tuple[ThinkingField, ...]:
    found = [] if chat.reasoning_effort is None else [ThinkingField("output_config.effort", None)]
    if body.thinking is not None:
        found.insert(0, ThinkingField("thinking", _THINKING[body.thinking.type] is not False))
    return tuple(found)


class Conversation(NamedTuple):
    chat: ChatRequest  # one part per block
    breakpoints: tuple[Breakpoint, ...]  # parts after which the cache is kept
    ignored: tuple[str, ...]  # tools and edits without effect


def conversation(body: CountTokensRequest) -> Conversation:
    check_messages(body.messages)
    turns = _Turns()
    if system := _without_billing(body.system):
        turns.add(Role.SYSTEM, system, "system")
    for control in [tool.cache_control for tool in body.tools or () if tool.cache_control is not None][-1:]:
        turns.keep_tools(control)
    for i, message in enumerate(body.messages):
        if message.role not in ROLES:
            text = f"messages.{i}.role = {message.role!r:.80} is not one of {', '.join(ROLES)}"
            raise ApiError(Kind.INVALID, text, param=f"messages.{i}.role")
        turns.add(Role(message.role), message.content, f"messages.{i}.content")
    if body.cache_control is not None:
        turns.keep(body.cache_control)
    messages = tuple(turn.message() for turn in turns.turns)
    is_prefill = messages[-1].role is Role.ASSISTANT
    if is_prefill and messages[-1].tool_calls:
        last = len(body.messages) - 1
        raise InvalidRequest(f"messages.{last}: tool_use has no result: its tool_result must follow")
    configs = [body.output_config, *(message.output_config for message in body.messages)]
    effort = next((config.effort for config in reversed(configs) if config is not None and config.effort), None)
    with _anthropic_paths():
        tools, choice, ignored = _tools(body, turns.references)
        chat = ChatRequest(
            messages,
            add_generation_prompt=not is_prefill,
            continue_last=is_prefill,
            tools=tools,
            tool_choice=choice,
            wants_thought=_wants_thought(body),
            reasoning_effort=effort,
        )
    return Conversation(chat, tuple(turns.breakpoints), (*ignored, *ignored_edits(body)))


def _without_billing(system: str | list[Block] | None) -> str | list[Block] | None:
    """Drop Claude Code's billing block: it is not meant for the model and differs in every conversation, which would
    defeat the prefix cache."""
    if not isinstance(system, list):
        return system
    return [block for block in system if not (block.text or "").startswith(BILLING)]


def shape_field(body: CountTokensRequest) -> str | None:
    """The field that constrains the answer's format."""
    if body.output_config is not None and body.output_config.format is not None:
        return "output_config.format.schema"
    return None if body.output_format is None else "output_format.schema"


def shows_thoughts(body: CountTokensRequest) -> bool:
    """Whether the response includes the reasoning: only if it was requested."""
    return body.thinking is not None and body.thinking.type != "disabled" and body.thinking.display != "omitted"


@contextmanager
def _anthropic_paths() -> Iterator[None]:
    """Rewrite paths in errors about tools, which protocol-independent code raises, to Anthropic's form."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        if not text.startswith("tools["):
            raise
        path, space, rest = text.partition(" ")
        path = _PART.sub(r".\1", path).replace(".parameters", ".input_schema")
        raise InvalidRequest(path + space + rest) from None


def _wants_thought(body: CountTokensRequest) -> bool | None:
    if body.thinking is None:
        return None
    if body.thinking.type not in _THINKING:
        text = f"thinking.type = {body.thinking.type!r:.80} is not one of {', '.join(_THINKING)}"
        raise unsupported("thinking.type", text)
    return _THINKING[body.thinking.type]


def _tools(body: CountTokensRequest, references: Container[str]) -> _Tools:
    """Parse the tools. `references`: names of deferred tools that tool results have referenced."""
    given = body.tools or ()
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(given)} entries, more than {MAX_TOOLS}")
    choice = _choice(body)
    tools: list[Tool] = []
    ignored: list[str] = []
    for i, tool in enumerate(given):
        is_forced = tool.name is not None and tool.name == choice.name
        if tool.type not in (None, "custom"):
            if is_forced:
                text = f"tool_choice.name = {tool.name!r:.80} is not supported: this server runs no tools"
                raise unsupported("tool_choice.name", text)
            ignored.append(f"tools[{i}].{tool.type}")
        elif not tool.defer_loading or is_forced or tool.name in references:
            tools.append(_tool(tool, f"tools.{i}"))
    return _Tools(tuple(tools), choice, tuple(ignored))


class _Tools(NamedTuple):
    tools: tuple[Tool, ...]  # shown to the model
    choice: ToolChoice
    ignored: tuple[str, ...]  # tools that Anthropic's server would run


def _choice(body: CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    if choice.type not in _MODES:
        raise InvalidRequest(f"tool_choice.type = {choice.type!r:.80} is not one of {', '.join(_MODES)}")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(f"tool_choice.name {'is missing' if choice.name is None else 'is only for type tool'}")
    return ToolChoice(_MODES[choice.type], choice.name, is_parallel=not choice.disable_parallel_tool_use)


def _tool(tool: ToolParam, path: str) -> Tool:
    return Tool(
        _given(tool.name, f"{path}.name"),
        tool.description or "",
        tool.input_schema or {},
        bool(tool.strict),
        path,
        f"{path}.input_schema",
    )


class _Turns:
    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.breakpoints: list[Breakpoint] = []
        self.references: set[str] = set()  # deferred tools that results reference

    def add(self, role: Role, content: str | list[Block], path: str) -> None:
        if isinstance(content, str):
            self._begin(role, has_text=bool(content)).parts.append(Part(content))
            return
        check_parts(content, path)
        is_begun = False
        for i, block in enumerate(content):
            if role is Role.USER and block.type == "tool_result":
                self.turns.append(_result(block, f"{path}.{i}"))
                self._note_references(block)
                is_begun = False
            else:
                turn = self.turns[-1] if is_begun else self._begin(role, has_text=bool(content))
                is_begun = True
                _fill(turn, block, f"{path}.{i}")
            if block.cache_control is not None:
                self.keep(block.cache_control)
        if not content:
            self._begin(role, has_text=False)

    def _note_references(self, block: Block) -> None:
        parts = block.content if isinstance(block.content, list) else ()
        self.references |= {part.tool_name for part in parts if part.type == "tool_reference" and part.tool_name}

    def _begin(self, role: Role, *, has_text: bool) -> Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self.turns or self.turns[-1].role is not role:
            self.turns.append(Turn(role))
        elif self.turns[-1].parts and has_text and _BETWEEN[role]:
            self.turns[-1].parts.append(Part(_BETWEEN[role]))
        return self.turns[-1]

    def keep(self, control: CacheControl) -> None:
        """Add a breakpoint after the last part. An existing one at this place is not changed."""
        last = len(self.turns) - 1
        at = (last, len(self.turns[last].parts) - 1)
        has_content = at[1] >= 0 or bool(self.turns[last].calls)
        if has_content and at not in ((mark.message, mark.part) for mark in self.breakpoints):
            self.breakpoints.append(Breakpoint(*at, TTL_S[control.ttl]))

    def keep_tools(self, control: CacheControl) -> None:
        """Add a breakpoint for the tools. Templates put them into the system turn, so the whole turn is kept."""
        if self.turns:
            self.keep(control)
        else:
            self.breakpoints.append(Breakpoint(0, -1, TTL_S[control.ttl]))


def _fill(turn: Turn, block: Block, path: str) -> None:
    is_assistant = turn.role is Role.ASSISTANT
    match block.type:
        case "thinking" if is_assistant:
            turn.thoughts.append(block.thinking or "")
        case "redacted_thinking" if is_assistant:
            pass  # it has no readable text
        case "tool_use" if is_assistant:
            turn.calls.append(_call(block, path))
        case _:
            turn.parts.append(Part(_text(block, path)))


def _call(block: Block, path: str) -> ToolCall:
    try:
        arguments = msgspec.json.encode(block.input or {}).decode()
    except RecursionError:
        raise ApiError(Kind.INVALID, f"{path}.input is nested too deeply", param=f"{path}.input") from None
    call = ToolCall(_given(block.id, f"{path}.id"), _given(block.name, f"{path}.name"), arguments)
    check_call(call, path, "input")
    return call


def _result(block: Block, path: str) -> Turn:
    call_id = _given(block.tool_use_id, f"{path}.tool_use_id")
    content = block.content or ""
    if isinstance(content, list):
        check_parts(content, f"{path}.content")
        content = "\n".join(_result_text(part, f"{path}.content.{i}") for i, part in enumerate(content))
    if block.is_error:
        content = f"Error: {content}"
    return Turn(Role.TOOL, [Part(content)], call_id=call_id)


def _result_text(part: ResultPart, path: str) -> str:
    if part.type == "tool_reference":
        return f"Tool found: {_given(part.tool_name, f'{path}.tool_name')}"
    if part.type != "text":
        raise unsupported(f"{path}.type", f"{path}.type = {part.type!r:.80} is not supported: only text is")
    return part.text or ""


def _given(value: T | None, path: str) -> T:
    if value is None:
        raise ApiError(Kind.INVALID, f"{path} is missing", param=path)
    return value


def _text(block: Block, path: str) -> str:
    if block.type != "text":
        message = f"{path}.type = {block.type!r:.80} is not supported: only text is"
        raise unsupported(f"{path}.type", message)
    return _given(block.text, f"{path}.text")


def grammar_of(body: CountTokensRequest) -> Grammar | None:
    config = body.output_config
    given = body.output_format if config is None or config.format is None else config.format
    path = shape_field(body)
    if given is None or path is None:
        return None
    return _schema_grammar(given, path)


def _schema_grammar(given: OutputFormat, path: str) -> Grammar:
    if given.type != "json_schema":
        where = path.replace(".schema", ".type")
        raise unsupported(where, f"{where} = {given.type!r:.80} is not supported: only json_schema is")
    try:
        return json_schema_grammar(_given(given.schema, path), strict=bool(given.strict))
    except InvalidRequest as error:
        raise shape_error(path, error) from None


def _params(body: MessagesRequest) -> GenerationParams:
    check_temperature(body.temperature, MAX_TEMPERATURE)
    with protocol_field_names({"stop": "stop_sequences"}):
        return GenerationParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            max_tokens=body.max_tokens or 1,  # at least one token is computed; with 0 it is not returned
            stop=tuple(body.stop_sequences or ()),
            ignore_eos=bool(body.ignore_eos),
            grammar=grammar_of(body),
        )


class BlockWriter:
    """Makes the events of a stream. One block is open at a time, and a piece of another kind ends it.

    An answer without pieces has one empty text block.
    """

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self.blocks: list[AnswerBlock] = []  # complete up to the open one
        self._texts: list[str] = []  # of the open block, except what was written without `take`
        self._kind: type[Thought] | type[Words] | type[CallStart] | None = None  # of the open block
        self.has_calls = False

    def take(self, pieces: Iterable[Piece]) -> list[Event]:
        return [event for piece in pieces for event in self._take(piece)]

    def continues(self, piece: Piece) -> TypeGuard[Words | Thought]:
        """Whether the piece is text of the open block: its only event is then a delta."""
        return isinstance(piece, Words | Thought) and type(piece) is self._kind

    def end(self) -> list[Event]:
        opened = [] if self.blocks else [self._start(TextBlock(""))]
        return [*opened, *self._close()]

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Thought(text):
                if not self._shows_thoughts:
                    return []
                opened = self._open(Thought, ThinkingBlock(""))
                return [*opened, self._grow(text, ThinkingDelta(text))]
            case Words(text):
                opened = self._open(Words, TextBlock(""))
                return [*opened, self._grow(text, TextDelta(text))]
            case CallStart(_, call_id, name):
                self.has_calls = True
                self._kind, before = CallStart, self._close()
                return [*before, self._start(ToolUseBlock(use_id(call_id), name, {}))]
            case CallArguments(_, text):
                return [self._grow(text, InputJsonDelta(text))]

    def _open(self, kind: type[Thought] | type[Words], block: AnswerBlock) -> list[Event]:
        if self._kind is kind:
            return []
        before = self._close()
        self._kind = kind
        return [*before, self._start(block)]

    def _start(self, block: AnswerBlock) -> BlockStart:
        self.blocks.append(block)
        return BlockStart(len(self.blocks) - 1, block)

    def _grow(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> BlockDelta:
        self._texts.append(text)
        return BlockDelta(len(self.blocks) - 1, delta)

    def _close(self) -> list[Event]:
        if not self.blocks:
            return []
        text, self._texts = "".join(self._texts), []
        match self.blocks[-1]:
            case TextBlock():
                self.blocks[-1] = TextBlock(text)
            case ThinkingBlock():
                self.blocks[-1] = ThinkingBlock(text)
            case ToolUseBlock() as block:
                self.blocks[-1] = msgspec.structs.replace(block, input=_input(text))
        return [BlockStop(len(self.blocks) - 1)]


def use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def _input(arguments: str) -> dict[str, object]:
    """Parse a call's arguments. A call that was cut off has none; a stream has sent the incomplete JSON."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}


# 503 for a server that starts or stops: the SDK retries 503 and 529, and proxies know only 503.
_TYPES: dict[Kind, tuple[int, str]] = {
    Kind.INVALID: (400, "invalid_request_error"),
    Kind.TOO_LONG: (400, "invalid_request_error"),
    Kind.AUTHENTICATION: (401, "authentication_error"),
    Kind.PERMISSION: (403, "permission_error"),
    Kind.NOT_FOUND: (404, "not_found_error"),
    Kind.NO_MODEL: (404, "not_found_error"),
    Kind.METHOD: (405, "invalid_request_error"),
    Kind.TIMEOUT: (408, "timeout_error"),
    Kind.TOO_LARGE: (413, "request_too_large"),
    Kind.RATE_LIMITED: (429, "rate_limit_error"),
    Kind.OVERLOADED: (529, "overloaded_error"),
    Kind.UNAVAILABLE: (503, "overloaded_error"),
    Kind.FAILED: (500, "api_error"),
    Kind.DIED: (500, "api_error"),
    Kind.CANCELLED: (499, "api_error"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail
    request_id: str


def _status(error: ApiError) -> int:
    return _TYPES[error.kind][0]


def _body(error: ApiError, request_id: str) -> bytes:
    detail = ErrorDetail(_TYPES[error.kind][1], _message(error))
    return msgspec.json.encode(ErrorAnswer(detail, request_id))


def _event(error: ApiError, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(error, request_id) + b"\n\n"


def _message(error: ApiError) -> str:
    """The message, with the field: Anthropic's errors have no other member for it."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    if error.kind is Kind.TOO_LONG:
        text = f"prompt is too long: {text}"  # clients look for this text and shorten the conversation
    return text.encode(errors="replace").decode()  # an error must never fail


ANTHROPIC = Dialect("anthropic", _status, _body, _event)


_MARK = "<text>"
_encoder = msgspec.json.Encoder()


async def messages(context: RequestContext) -> Response:
    body = await context.body(MessagesRequest)
    request = await context.parse(to_inference_request, body)
    edited = await _edited(context, body, request.prompts[0])
    request = replace(request, model=_served_name(context, body.model), prompts=(edited.chat,))
    return await answer_in_shape(request, shape_field(body), partial(_respond, context, body, edited))


async def _respond(
    context: RequestContext, body: MessagesRequest, edited: Edited, request: InferenceRequest
) -> Response:
    active = await context.open(request)
    num_hour_tokens = hour_tokens(context.service, active)
    edits = UNSET if body.context_management is None else AppliedEdits(edited.applied)
    reply = Reply(active, body.max_tokens, num_hour_tokens, shows_thoughts=shows_thoughts(body), edits=edits)
    if request.is_streaming:
        return await context.stream(active, reply)
    one = (await context.result(active))[0].completions[0]
    return await context.json_of(partial(reply.answer, one.text, one.finish_reason, one.stop), active.num_values)


async def count_tokens(context: RequestContext) -> Response:
    """Count the input tokens that `messages` would report for the same conversation: the sum of the three kinds."""
    body = await context.body(CountTokensRequest)
    refuse_unsupported(body)
    await context.parse(grammar_of, body)  # raises for a body that `messages` would refuse
    found = await context.parse(conversation, body)
    context.note_ignored(found.ignored)
    edited = await _edited(context, body, found.chat)
    service = await context.use(_served_name(context, body.model))
    num_tokens = len(await service.encode(edited.chat, context.key.name))
    if body.context_management is None:
        return context.json(TokenCount(num_tokens))
    original = num_tokens if edited.num_original_tokens is None else edited.num_original_tokens
    return context.json(TokenCount(num_tokens, OriginalTokens(original)))


def _served_name(context: RequestContext, name: str) -> str | None:
    """Use the default model for the names of Anthropic's models, which agents send. The header names the field."""
    if name in context.models.names or not name.startswith(ANTHROPIC_MODELS):
        return name
    context.note(IGNORED, ("model",))
    return None


async def _edited(context: RequestContext, body: CountTokensRequest, chat: Prompt) -> Edited:
    """Apply `context_management`. Counts tokens only if an edit could clear something."""
    assert isinstance(chat, ChatRequest)

    async def count(chat: ChatRequest) -> int:
        return len(await (await context.use(_served_name(context, body.model))).encode(chat, context.key.name))

    return await apply(body.context_management, chat, count)


def hour_tokens(service: ModelService, active: ActiveRequest) -> int:
    """Number of prompt tokens pinned for an hour; the others of `pinned_tokens` are pinned for five minutes."""
    request = active.requests[0]
    pins = tuple(pin for pin in request.pins if pin.ttl_s > TTL_S["5m"])
    return service.pinned_tokens(replace(request, pins=pins)) if pins else 0


class Reply(EventEncoder):
    """Encodes the response to one request, as a whole or as a stream.

    Events come in the SDK's order; the first has the prompt's cache hit.
    """

    waits_for_start = True

    def __init__(
        self,
        active: ActiveRequest,
        max_tokens: int,
        num_hour_tokens: int = 0,
        *,
        shows_thoughts: bool = False,
        edits: AppliedEdits | UnsetType = UNSET,
    ) -> None:
        self._active = active
        self._edits = edits
        self._max_tokens = max_tokens
        self._num_hour_tokens = num_hour_tokens
        self._shows_thoughts = shows_thoughts
        self._parser = active.new_parser()
        self._blocks = BlockWriter(shows_thoughts=shows_thoughts)
        self._finish: FinishReason | None = None
        self._stop_text: str | None = None
        self._frames: dict[tuple[type[Piece], int], tuple[bytes, bytes]] = {}  # by kind and number of the block

    def answer(self, text: str, finish: FinishReason, stop: str | None) -> MessageResponse:
        parser = self._active.new_parser()
        pieces = [*parser.push(text), *parser.finish(is_cut=finish is FinishReason.LENGTH)]
        blocks = BlockWriter(shows_thoughts=self._shows_thoughts)
        blocks.take(pieces)
        blocks.end()
        end = self._stop(finish, stop, has_calls=blocks.has_calls)
        return self._message(blocks.blocks if self._max_tokens else [], end, self._cache())

    def begin(self) -> bytes:
        return event(MessageStart(self._message([])))

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        pieces = self._parser.push("".join(delta.text for _, delta in batch))
        last = batch[-1][1]
        if last.finish_reason is not None:
            self._finish, self._stop_text = last.finish_reason, last.stop
            pieces += self._parser.finish(is_cut=self._finish is FinishReason.LENGTH)
        return self._events(pieces)

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """Text that continues the open block is put between bytes that were encoded before."""
        del prompt, index  # there is one
        pieces = self._parser.push(text)
        if len(pieces) != 1 or not self._blocks.continues(piece := pieces[0]):
            return self._events(pieces)
        before, after = self._frame(type(piece))
        return before + _encoder.encode(piece.text) + after

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        del prompt, index
        is_constant = isinstance(self._parser, PlainAnswer) and self._blocks.continues(Words(""))
        return self._frame(Words) if is_constant else None

    def _frame(self, kind: type[Words] | type[Thought]) -> tuple[bytes, bytes]:
        """The bytes around the text of the open block, which is of this kind."""
        place = kind, len(self._blocks.blocks)
        if (frame := self._frames.get(place)) is None:
            (delta,) = self._blocks.take([kind(_MARK)])
            before, after = event(delta).rsplit(_encoder.encode(_MARK), 1)
            frame = self._frames[place] = before, after
        return frame

    def finish(self) -> bytes:
        blocks = self._blocks.end() if self._max_tokens else []
        delta = self._stop(self._finish, self._stop_text, has_calls=self._blocks.has_calls)
        end = MessageDelta(delta, self._delta_usage(), self._edits, self._cache())
        return b"".join(map(event, [*blocks, end, MessageStop()]))

    def _events(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(event, self._blocks.take(pieces))) if self._max_tokens else b""

    def usage(self) -> MessageUsage:
        usage = self._active.usage
        read = usage.cached_tokens
        created = max(0, self._active.pinned_tokens - read)
        created_1h = min(created, max(0, self._num_hour_tokens - read))
        return MessageUsage(
            input_tokens=usage.prompt_tokens - read - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(created - created_1h, created_1h),
            output_tokens=usage.completion_tokens if self._max_tokens else 0,
        )

    def _delta_usage(self) -> DeltaUsage:
        usage = self.usage()
        return DeltaUsage(
            input_tokens=usage.input_tokens,
            cache_creation_input_tokens=usage.cache_creation_input_tokens,
            cache_read_input_tokens=usage.cache_read_input_tokens,
            output_tokens=usage.output_tokens,
        )

    def _message(
        self, content: list[AnswerBlock], end: StopDelta | None = None, cache: CacheView | UnsetType = UNSET
    ) -> MessageResponse:
        return MessageResponse(
            id=f"msg_{self._active.request_id}",
            model=self._active.model,
            content=content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=self.usage(),
            context_management=UNSET if end is None else self._edits,
            cache=cache,
        )

    def _stop(self, finish: FinishReason | None, stop: str | None, *, has_calls: bool) -> StopDelta:
        if not self._max_tokens:
            return StopDelta("max_tokens", None)
        if finish is FinishReason.LENGTH:
            is_all = self._active.usage.completion_tokens >= self._max_tokens
            return StopDelta("max_tokens" if is_all else "model_context_window_exceeded", None)
        if finish is not FinishReason.STOP:
            raise RequestFailed("the answer was cut off before its end")
        if stop is not None:
            return StopDelta("stop_sequence", stop)
        return StopDelta("tool_use" if has_calls else "end_turn", None)

    def _cache(self) -> CacheView | UnsetType:
        explanation = self._active.cache
        if not self._active.request.wants_cache or explanation is None:
            return UNSET
        return view(explanation, self._active.usage.prompt_tokens, self._active.cache_text)


def event(value: Event) -> bytes:
    name = value.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"
