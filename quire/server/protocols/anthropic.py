"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol.

Anthropic's API leaves two cases open. Here, an answer without text has one empty text block, and max_tokens = 0 fills
the cache and returns no block. `context_management` clears old tool results and reasoning from a conversation before it
is answered. Two kinds of edits are supported; others are ignored and named in a response header. Errors have the format
of Anthropic's API, as its SDK maps them to exceptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.core.values import MAX_TOKEN_ID, MIN_PENALTY, FinishReason
from quire.engine.generation import Delta, GenerationParams, check_temperature
from quire.errors import InvalidRequest, RequestFailed
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.models import ActiveRequest, Breakpoint, InferenceRequest, Prompt, ThinkingField, priority_of
from quire.server.protocols.support import (
    SHAPE_FIELDS,
    AnswerEncoder,
    CacheView,
    Event,
    Item,
    Sample,
    Turn,
    Turns,
    Unsupported,
    decoded_arguments,
    described,
    encode_json,
    encoded_arguments,
    given,
    made_grammar,
    merged,
    message_with_field,
    one_of,
    protocol_field_names,
    refuse_unsupported,
    respond,
    unsupported_value,
    with_fields,
    with_unenforced,
)
from quire.server.request_context import IGNORED, RequestContext
from quire.text.grammar import Grammar, json_schema_grammar
from quire.text.messages import (
    MAX_MESSAGES,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Piece,
    Role,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Words,
    check_call,
    check_messages,
    check_parts,
)
from quire.text.tokenizer import MAX_STOPS

_CONVERSATIONS = "conversations are used unchanged"
_SHAPE = "use output_config.format, which takes a JSON schema"
_ONE_MODEL = "a request uses one model"

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
    **{name: Unsupported(_SHAPE, harmless) for name, harmless in SHAPE_FIELDS.items()},
}


def check_fields(body: CountTokensRequest) -> None:
    refuse_unsupported(body, UNSUPPORTED, shown=(str, int, float))


ANTHROPIC_MODELS = "claude-"  # prefix of the names of Anthropic's own models
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ROLES = ("user", "assistant", "system")
MAX_TEMPERATURE = 1  # as in Anthropic's API
TOOL_NAME = f"^[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$"


# Requests


class CacheControl(Struct, frozen=True):
    """Keep the cache of the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ResultPart(Struct, frozen=True):
    type: Annotated[
        str, described("text, or tool_reference: a tool that a search found.", enum=["text", "tool_reference"])
    ]
    text: str | None = None
    tool_name: Annotated[str | None, described("Of a tool_reference: the deferred tool.")] = None


@with_fields({}, {"signature": "quire signs nothing", "data": "of redacted_thinking, which has no readable text"})
class Block(Struct, frozen=True):
    """A content block of any type. Not a union, so that an unsupported type is refused by name."""

    type: Annotated[
        str, described("text; also thinking and tool_use of an assistant, tool_result of a user.", enum=BLOCKS)
    ]
    text: str | None = None
    cache_control: CacheControl | None = None
    thinking: str | None = None
    id: Annotated[str | None, described("Of a tool_use.")] = None
    name: Annotated[str | None, described("The name of the called tool.")] = None
    input: Annotated[dict[str, Any] | None, described("The arguments of the call.")] = None
    tool_use_id: Annotated[str | None, described("The call that a tool_result answers.")] = None
    content: Annotated[str | list[ResultPart] | None, described("Of a tool_result.")] = None
    is_error: Annotated[bool | None, described("The tool failed; the content is its error.")] = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    type: Annotated[str, described(enum=["json_schema"])]
    schema: dict[str, Any] | None = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str | None, described("A hint for templates that support it.")] = None
    format: Annotated[OutputFormat | None, described("The format of the answer.")] = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, described("If the last message is an assistant's, the answer continues it.", enum=ROLES)]
    content: str | list[Block]
    output_config: Annotated[OutputConfig | None, described("Applies from here on; only effort has an effect.")] = None


class ToolParam(Struct, frozen=True, kw_only=True):
    type: Annotated[
        str | None,
        described("Tools of other types are left out and named in a header.", enum=["custom", None]),
    ] = None
    name: Annotated[str | None, described(pattern=TOOL_NAME)] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, described("A JSON schema of an object.")] = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None
    cache_control: CacheControl | None = None
    defer_loading: Annotated[bool | None, described("Not shown to the model until a tool_reference names it.")] = None


class ToolChoiceParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, described(enum=["auto", "any", "tool", "none"])]
    name: Annotated[str | None, described("With type tool: its name.")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Struct, frozen=True, kw_only=True):
    type: Annotated[str, described(enum=["enabled", "adaptive", "disabled"])]
    budget_tokens: Annotated[int | None, described("Accepted, without effect.")] = None
    display: Annotated[str | None, described("omitted: leave the reasoning out of the response.")] = None


class Amount(Struct, frozen=True, kw_only=True):
    type: Annotated[str, described(enum=["input_tokens", "tool_uses", "thinking_turns"])]
    value: Annotated[int, described(minimum=0)]


class ContextEdit(Struct, frozen=True, kw_only=True):
    """clear_thinking_20251015 or clear_tool_uses_20250919; others are ignored and named in a header."""

    type: str
    keep: Annotated[Amount | str | None, described('How many of the last ones are kept. "all": all reasoning.')] = None
    trigger: Annotated[Amount | None, described("Clear tool uses above this amount. Default: 100,000 tokens.")] = None
    clear_at_least: Annotated[Amount | None, described("Clear nothing if less than this would be cleared.")] = None
    exclude_tools: Annotated[list[str] | None, described("Tools whose results are kept.")] = None
    clear_tool_inputs: Annotated[bool | list[str] | None, described("Clear the arguments of the calls too.")] = None


class ContextManagement(Struct, frozen=True, kw_only=True):
    edits: list[ContextEdit] | None = None


@with_fields(UNSUPPORTED)
class CountTokensRequest(Struct, frozen=True, kw_only=True):
    """A conversation."""

    model: str
    messages: Annotated[list[MessageParam], described("The conversation.", minItems=1, maxItems=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: Annotated[CacheControl | None, described("Like cache_control at the last block.")] = None
    context_management: Annotated[ContextManagement | None, described("Edits of the conversation.")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, described("The older form of output_config.format.")] = None
    thinking: ThinkingParam | None = None
    tool_choice: ToolChoiceParam | None = None
    tools: Annotated[list[ToolParam], described(maxItems=MAX_TOOLS)] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer."""

    max_tokens: Annotated[int, described("The longest answer, in tokens. 0: only fill the cache.", minimum=0)]
    metadata: Annotated[dict[str, Any] | None, described("Accepted, without effect.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, described("Accepted, without effect: see `priority`.")
    ] = None
    stop_sequences: Annotated[list[str] | None, described("Strings that end the answer.", maxItems=MAX_STOPS)] = None
    stream: bool | None = None
    temperature: Annotated[float, described(minimum=0, maximum=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, described(minimum=0, maximum=MAX_TOKEN_ID)] | None = None
    top_p: Annotated[float, described(exclusiveMinimum=0, maximum=1)] | None = None
    # quire's own
    cache: bool | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    min_p: Annotated[float, described(minimum=0, maximum=1)] | None = None
    priority: str | int | None = None
    repetition_penalty: Annotated[float, described(minimum=MIN_PENALTY, maximum=100)] | None = None
    seed: Annotated[int, described(minimum=-(2**63), maximum=2**64 - 1)] | None = None


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


class MessageUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int  # the three kinds of input tokens add up to the prompt
    cache_creation_input_tokens: int  # kept by cache_control and not cached before
    cache_read_input_tokens: int
    output_tokens: int
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


CLEAR_THINKING = "clear_thinking_20251015"
CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEARED = "[Old tool result content cleared]"
DEFAULT_KEPT_THOUGHTS = 1
DEFAULT_KEPT_TOOL_USES = 3
DEFAULT_TRIGGER_TOKENS = 100_000

T = TypeVar("T")
CountTokens = Callable[[ChatRequest], Awaitable[int]]
Clear = Callable[[Sequence[Message], ContextEdit], tuple[list[Message], int]]


@dataclass(frozen=True, slots=True)
class Edited:
    chat: ChatRequest
    applied: tuple[AppliedEdit, ...] = ()
    num_original_tokens: int | None = None  # None: no edit had to count


def ignored_edits(body: CountTokensRequest) -> tuple[str, ...]:
    edits = _edits(body.context_management)
    return tuple(f"{path}.{edit.type}" for path, edit in edits if edit.type not in EDITS)


async def apply(management: ContextManagement | None, chat: ChatRequest, count: CountTokens) -> Edited:
    """Check all edits, then apply them. Returns the edited conversation and the applied edits."""
    edits: dict[str, ContextEdit] = {}
    for path, edit in _edits(management):
        if edit.type in EDITS:
            _check(edit, path)
        if edit.type in edits:  # each edit tokenises the whole conversation
            raise _wrong(f"{path}.type", edit.type, "used twice")
        edits[edit.type] = edit
    done = Edited(chat)
    for edit in edits.values():
        done = await _apply(edit, done, count)
    return done


async def _apply(edit: ContextEdit, done: Edited, count: CountTokens) -> Edited:
    if edit.type not in EDITS:
        return done
    chat = done.chat
    clear, kind = EDITS[edit.type]
    messages, num_cleared = clear(chat.messages, edit)
    if not num_cleared:
        return done
    num_before = await count(chat)
    if edit.type == CLEAR_TOOL_USES and not _is_triggered(edit, chat.messages, num_before):
        return done
    cleared = replace(chat, messages=messages)
    num_tokens = max(0, num_before - await count(cleared))
    if edit.clear_at_least is not None and num_tokens < edit.clear_at_least.value:
        return done
    original = num_before if done.num_original_tokens is None else done.num_original_tokens
    return Edited(cleared, (*done.applied, kind(num_cleared, num_tokens)), original)


def clear_thinking(messages: Sequence[Message], edit: ContextEdit) -> tuple[list[Message], int]:
    """Clear the reasoning of all turns that have some, except the last ones."""
    thinking = [i for i, message in enumerate(messages) if message.thought]
    cleared: set[int] = set()
    if not isinstance(edit.keep, str):
        cleared = _all_but_last(thinking, edit.keep, DEFAULT_KEPT_THOUGHTS)
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
    assert not isinstance(edit.keep, str), "checked"
    cleared = _all_but_last(calls, edit.keep, DEFAULT_KEPT_TOOL_USES)
    inputs = edit.clear_tool_inputs

    def without_input(call: ToolCall) -> ToolCall:
        is_named = call.name in inputs if isinstance(inputs, list) else bool(inputs)
        return replace(call, arguments="{}") if is_named and call.call_id in cleared else call

    found: list[Message] = []
    for message in messages:
        if message.role is Role.TOOL and message.tool_call_id in cleared:
            message = replace(message, parts=(Part(CLEARED),))
        if inputs and message.tool_calls:
            message = replace(message, tool_calls=tuple(map(without_input, message.tool_calls)))
        found.append(message)
    return found, len(cleared)


# Type of an edit -> what makes it, and how it is reported.
EDITS: dict[str, tuple[Clear, Callable[[int, int], AppliedEdit]]] = {
    CLEAR_THINKING: (clear_thinking, ClearedThinking),
    CLEAR_TOOL_USES: (clear_tool_uses, ClearedToolUses),
}


def _all_but_last(found: Sequence[T], keep: Amount | None, default: int) -> set[T]:
    num_kept = default if keep is None else keep.value
    return set(found[: max(0, len(found) - num_kept)])


def _is_triggered(edit: ContextEdit, messages: Sequence[Message], num_tokens: int) -> bool:
    if edit.trigger is None:
        return num_tokens > DEFAULT_TRIGGER_TOKENS
    if edit.trigger.type == "tool_uses":
        return sum(len(message.tool_calls) for message in messages) > edit.trigger.value
    return num_tokens > edit.trigger.value


def _check(edit: ContextEdit, path: str) -> None:
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
        one_of(f"{path}.{name}.type", amount.type, known)
        least = 1 if is_thinking or name == "trigger" else 0
        if amount.value < least:
            raise _wrong(f"{path}.{name}.value", amount.value, f"less than {least}")


def _wrong(path: str, value: object, why: str) -> ApiError:
    return ApiError(Kind.INVALID, f"{path} = {value!r:.80} is {why}", param=path)


def _edits(management: ContextManagement | None) -> list[tuple[str, ContextEdit]]:
    """The edits with their paths."""
    edits = () if management is None else management.edits or ()
    return [(f"context_management.edits[{i}]", edit) for i, edit in enumerate(edits)]


BILLING = "x-anthropic-billing-header:"
TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}
_THINKING = {"enabled": True, "adaptive": None, "disabled": False}

# Consecutive turns of one role are merged into one, as in Anthropic's API, because many templates require alternating
# roles. User texts are separated; an assistant's text continues the previous one.
_BETWEEN = {Role.SYSTEM: "\n\n", Role.USER: "\n\n", Role.ASSISTANT: ""}


def to_inference_request(body: MessagesRequest) -> InferenceRequest:
    check_fields(body)
    chat, breakpoints, ignored = conversation(body)
    has_budget = body.thinking is not None and body.thinking.budget_tokens is not None
    return with_unenforced(
        InferenceRequest(
            model=body.model,
            prompts=(chat,),
            params=_params(body),
            is_streaming=bool(body.stream),
            priority=priority_of(body.priority),
            cache_salt=body.cache_salt or "",
            breakpoints=breakpoints,
            wants_cache=bool(body.cache),
            ignored=(*ignored, "thinking.budget_tokens") if has_budget else ignored,
            thinking_fields=_thinking_fields(body, chat),
            format_field=_format(body)[0],
        )
    )


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
        turns.fill(Role.SYSTEM, system, "system")
    for control in [tool.cache_control for tool in body.tools or () if tool.cache_control is not None][-1:]:
        turns.keep_tools(control)
    for i, message in enumerate(body.messages):
        turns.fill(Role(one_of(f"messages.{i}.role", message.role, ROLES)), message.content, f"messages.{i}.content")
    if body.cache_control is not None:
        turns.mark(body.cache_control)
    messages = turns.messages()
    is_prefill = messages[-1].role is Role.ASSISTANT
    if is_prefill and messages[-1].tool_calls:
        last = len(body.messages) - 1
        raise InvalidRequest(f"messages.{last}: tool_use has no result: its tool_result must follow")
    configs = [body.output_config, *(message.output_config for message in body.messages)]
    effort = next((config.effort for config in reversed(configs) if config is not None and config.effort), None)
    tools, choice, ignored = _tools(body, turns.references)
    thinking = body.thinking
    chat = ChatRequest(
        messages,
        add_generation_prompt=not is_prefill,
        continue_last=is_prefill,
        tools=tools,
        tool_choice=choice,
        wants_thought=None if thinking is None else _THINKING[one_of("thinking.type", thinking.type, _THINKING)],
        reasoning_effort=effort,
    )
    return Conversation(chat, tuple(turns.breakpoints), (*ignored, *ignored_edits(body)))


def _without_billing(system: str | list[Block] | None) -> str | list[Block] | None:
    """Drop Claude Code's billing block: it is not meant for the model and differs in every conversation, which would
    defeat the prefix cache."""
    if not isinstance(system, list):
        return system
    return [block for block in system if not (block.text or "").startswith(BILLING)]


def _tools(
    body: CountTokensRequest, references: Container[str]
) -> tuple[tuple[Tool, ...], ToolChoice, tuple[str, ...]]:
    """Return the tools that the model sees, the tool choice, and the names of tools that Anthropic's server would run.

    `references`: names of deferred tools that tool results have referenced.
    """
    choice = _choice(body)
    tools: list[Tool] = []
    ignored: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        is_forced = tool.name is not None and tool.name == choice.name
        if tool.type not in (None, "custom"):
            if is_forced:
                raise unsupported_value("tool_choice.name", tool.name, "this server runs no tools", is_value=False)
            ignored.append(f"tools[{i}].{tool.type}")
        elif not tool.defer_loading or is_forced or tool.name in references:
            path, schema = f"tools.{i}", tool.input_schema or {}
            name, about = given(tool.name, f"{path}.name"), tool.description or ""
            tools.append(Tool(name, about, schema, bool(tool.strict), path, f"{path}.input_schema"))
    return tuple(tools), choice, tuple(ignored)


def _choice(body: CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    mode = _MODES[one_of("tool_choice.type", choice.type, _MODES)]
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(f"tool_choice.name {'is missing' if choice.name is None else 'is only for type tool'}")
    return ToolChoice(mode, choice.name, is_parallel=not choice.disable_parallel_tool_use)


class _Turns(Turns):
    def __init__(self) -> None:
        super().__init__()
        self.references: set[str] = set()  # deferred tools that results reference

    def fill(self, role: Role, content: str | list[Block], path: str) -> None:
        """Add a message. It continues the last turn if that has the same role."""
        blocks = [Block("text", content)] if isinstance(content, str) else content
        check_parts(blocks, path)
        if not blocks:
            self._begin(role, has_text=False)
        turn: Turn | None = None  # of the blocks since the last result
        for i, block in enumerate(blocks):
            if role is Role.USER and block.type == "tool_result":
                self._add_result(block, f"{path}.{i}")
                turn = None
            else:
                turn = turn or self._begin(role, has_text=bool(content))
                _fill(turn, block, f"{path}.{i}")
            if block.cache_control is not None:
                self.mark(block.cache_control)

    def _begin(self, role: Role, *, has_text: bool) -> Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self or self[-1].role is not role:
            return self.add(Turn(role))
        if self[-1].parts and has_text and _BETWEEN[role]:
            self[-1].parts.append(Part(_BETWEEN[role]))
        return self[-1]

    def _add_result(self, block: Block, path: str) -> None:
        call_id = given(block.tool_use_id, f"{path}.tool_use_id")
        parts = [ResultPart("text", block.content)] if not isinstance(block.content, list) else block.content
        check_parts(parts, f"{path}.content")
        text = "\n".join(_result_text(part, f"{path}.content.{i}") for i, part in enumerate(parts))
        self.add(Turn(Role.TOOL, [Part(f"Error: {text}" if block.is_error else text)], call_id=call_id))
        self.references |= {part.tool_name for part in parts if part.type == "tool_reference" and part.tool_name}

    def mark(self, control: CacheControl) -> None:
        """Add a breakpoint after the last part. An existing one at this place is not changed."""
        at = len(self) - 1, len(self[-1].parts) - 1
        has_content = at[1] >= 0 or bool(self[-1].calls)
        if has_content and at not in ((mark.message, mark.part) for mark in self.breakpoints):
            self.keep(TTL_S[control.ttl])

    def keep_tools(self, control: CacheControl) -> None:
        """Add a breakpoint for the tools. Templates put them into the system turn, so the whole turn is kept."""
        if self:
            self.mark(control)
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
            arguments = encoded_arguments(block.input, f"{path}.input")
            call = ToolCall(given(block.id, f"{path}.id"), given(block.name, f"{path}.name"), arguments)
            check_call(call, path, "input")
            turn.calls.append(call)
        case "text":
            turn.parts.append(Part(given(block.text, f"{path}.text")))
        case other:
            raise unsupported_value(f"{path}.type", other, "only text is", is_value=False)


def _result_text(part: ResultPart, path: str) -> str:
    if part.type == "tool_reference":
        return f"Tool found: {given(part.tool_name, f'{path}.tool_name')}"
    if part.type != "text":
        raise unsupported_value(f"{path}.type", part.type, "only text is", is_value=False)
    return part.text or ""


def _format(body: CountTokensRequest) -> tuple[str | None, OutputFormat | None]:
    """The field of the schema that constrains the answer, and the format with it."""
    if body.output_config is not None and body.output_config.format is not None:
        return "output_config.format.schema", body.output_config.format
    return None if body.output_format is None else "output_format.schema", body.output_format


def grammar_of(body: CountTokensRequest) -> Grammar | None:
    path, form = _format(body)
    if path is None or form is None:
        return None
    if form.type != "json_schema":
        raise unsupported_value(path.replace(".schema", ".type"), form.type, "only json_schema is", is_value=False)
    schema = given(form.schema, path)
    return made_grammar(path, lambda: json_schema_grammar(schema, strict=bool(form.strict)))


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


_TYPES = {
    Kind.INVALID: "invalid_request_error",
    Kind.TOO_LONG: "invalid_request_error",
    Kind.AUTHENTICATION: "authentication_error",
    Kind.PERMISSION: "permission_error",
    Kind.NOT_FOUND: "not_found_error",
    Kind.NO_MODEL: "not_found_error",
    Kind.METHOD: "invalid_request_error",
    Kind.TIMEOUT: "timeout_error",
    Kind.TOO_LARGE: "request_too_large",
    Kind.RATE_LIMITED: "rate_limit_error",
    Kind.OVERLOADED: "overloaded_error",
    Kind.UNAVAILABLE: "overloaded_error",
    Kind.FAILED: "api_error",
    Kind.DIED: "api_error",
    Kind.CANCELLED: "api_error",
}


def _body(error: ApiError, request_id: str) -> bytes:
    text = message_with_field(error)  # Anthropic's errors have no other member for the field
    if error.kind is Kind.TOO_LONG:
        text = f"prompt is too long: {text}"  # clients look for this text and shorten the conversation
    detail = {"type": _TYPES[error.kind], "message": text}
    return encode_json({"type": "error", "error": detail, "request_id": request_id})


def _event(error: ApiError, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(error, request_id) + b"\n\n"


ANTHROPIC = Dialect("anthropic", _body, _event, overloaded=529, lost=500)


async def messages(context: RequestContext) -> Response:
    body = await context.body(MessagesRequest)
    request = await context.parse(to_inference_request, body)
    edited = await _edited(context, body, request.prompts[0])
    request = replace(request, model=_served_name(context, body.model), prompts=(edited.chat,))
    return await respond(context, request, partial(Reply, body=body, edited=edited), {})


async def count_tokens(context: RequestContext) -> Response:
    """Count the input tokens that `messages` would report for the same conversation: the sum of the three kinds."""
    body = await context.body(CountTokensRequest)
    check_fields(body)
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


class Reply(AnswerEncoder):
    """The response to one request. Events come in the SDK's order; the first has the prompt's cache hit.

    An answer without pieces has one empty text block.
    """

    waits_for_start = True

    def __init__(self, active: ActiveRequest, body: MessagesRequest, edited: Edited) -> None:
        super().__init__(active)
        self._max_tokens = body.max_tokens
        thinking = body.thinking  # the response includes the reasoning only if it was requested
        self._shows_thoughts = thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        self._edits: AppliedEdits | UnsetType = (
            UNSET if body.context_management is None else AppliedEdits(edited.applied)
        )
        self.num_hour_tokens = 0  # tokens of the prompt that are kept for an hour, the others for five minutes

    async def prepare(self, context: RequestContext) -> None:
        request = self.active.requests[0]
        if pins := tuple(pin for pin in request.pins if pin.ttl_s > TTL_S["5m"]):
            self.num_hour_tokens = context.service.pinned_tokens(replace(request, pins=pins))

    def whole(self) -> MessageResponse:
        for _ in self.read():
            self._end()
        end = self._stop()
        return self._message([_block(item) for item in self.sample().items], **end, cache=self.cache)

    def begin(self) -> bytes:
        return self.write([{"type": "message_start", "message": self._message([])}])

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return super().feed(merged(batch))

    def finish(self) -> bytes:
        events, usage = self._end(), self.usage()
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
        end = {
            "type": "message_delta",
            "delta": self._stop(),
            "usage": {name: getattr(usage, name) for name in names},
            "context_management": self._edits,
            "cache": self.cache,
        }
        return self.write([*events, end, {"type": "message_stop"}])

    def take(self, sample: Sample, pieces: Iterable[Piece]) -> list[Event]:
        if not self._max_tokens:
            return []
        return super().take(sample, [piece for piece in pieces if self._shows_thoughts or type(piece) is not Thought])

    def start(self, item: Item) -> list[Event]:
        return [{"type": "content_block_start", "index": item.number, "content_block": _block(item)}]

    def grow(self, item: Item, text: str) -> list[Event]:
        event = {"type": "content_block_delta", "index": item.number}
        match item.first:
            case Words():
                return [event | {"delta": {"type": "text_delta", "text": text}}]
            case Thought():
                return [event | {"delta": {"type": "thinking_delta", "thinking": text}}]
            case CallStart():
                return [event | {"delta": {"type": "input_json_delta", "partial_json": text}}]

    def end(self, item: Item) -> list[Event]:
        return [{"type": "content_block_stop", "index": item.number}]

    def _end(self) -> list[Event]:
        sample = self.sample()
        opened = [] if sample.items or not self._max_tokens else self.open(sample, Words(""))
        return opened + self.close(sample)

    def usage(self) -> MessageUsage:
        usage = self.active.usage
        read = usage.cached_tokens
        created = max(0, self.active.pinned_tokens - read)
        created_1h = min(created, max(0, self.num_hour_tokens - read))
        return MessageUsage(
            input_tokens=usage.prompt_tokens - read - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(created - created_1h, created_1h),
            output_tokens=usage.completion_tokens if self._max_tokens else 0,
        )

    def _message(
        self,
        content: list[AnswerBlock],
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
        cache: CacheView | UnsetType = UNSET,
    ) -> MessageResponse:
        return MessageResponse(
            id=f"msg_{self.active.request_id}",
            model=self.active.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self.usage(),
            context_management=UNSET if stop_reason is None else self._edits,
            cache=cache,
        )

    def _stop(self) -> dict[str, Any]:
        last = self.sample().last
        sequence: str | None = None
        if not self._max_tokens:
            reason = "max_tokens"
        elif last is not None and last.finish_reason is FinishReason.LENGTH:
            is_all = self.active.usage.completion_tokens >= self._max_tokens
            reason = "max_tokens" if is_all else "model_context_window_exceeded"
        elif last is None or last.finish_reason is not FinishReason.STOP:
            raise RequestFailed("the answer was cut off before its end")
        elif last.stop is not None:
            reason, sequence = "stop_sequence", last.stop
        else:
            reason = "tool_use" if self.sample().calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block(item: Item) -> AnswerBlock:
    match item.first:
        case Words():
            return TextBlock(item.text)
        case Thought():
            return ThinkingBlock(item.text)
        case CallStart(_, call_id, name):
            return ToolUseBlock(f"toolu_{call_id.removeprefix('call_')}", name, decoded_arguments(item.text) or {})
