"""Parses a body of `/v1/messages` into an `InferenceRequest`, with its cache breakpoints.

`context_management` clears old tool results and reasoning from a conversation before it is answered. Two kinds of edits
are supported; others are ignored and named in a response header. `apply` takes a function that counts tokens: an edit
may depend on the length of the conversation, and the response reports how many were cleared.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import msgspec

from quire.engine.params import GenerationParams, check_temperature
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.model_service import Breakpoint, InferenceRequest, ThinkingField, priority_of
from quire.server.protocols.anthropic.types import (
    MAX_TEMPERATURE,
    ROLES,
    AppliedEdit,
    Block,
    CacheControl,
    ClearedThinking,
    ClearedToolUses,
    ContextEdit,
    ContextManagement,
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    ResultPart,
    ToolParam,
    refuse_unsupported,
)
from quire.server.protocols.support import shape_error, unsupported, with_unenforced
from quire.text.grammar import Grammar, json_schema_grammar
from quire.text.messages import (
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


@dataclass(slots=True)
class _Turn:
    """A message under construction."""

    role: Role
    parts: list[Part] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> Message:
        return Message(
            self.role,
            tuple(self.parts),
            thought="".join(self.thoughts),
            tool_calls=tuple(self.calls),
            tool_call_id=self.call_id,
        )


class _Turns:
    def __init__(self) -> None:
        self.turns: list[_Turn] = []
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

    def _begin(self, role: Role, *, has_text: bool) -> _Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self.turns or self.turns[-1].role is not role:
            self.turns.append(_Turn(role))
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


def _fill(turn: _Turn, block: Block, path: str) -> None:
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


def _result(block: Block, path: str) -> _Turn:
    call_id = _given(block.tool_use_id, f"{path}.tool_use_id")
    content = block.content or ""
    if isinstance(content, list):
        check_parts(content, f"{path}.content")
        content = "\n".join(_result_text(part, f"{path}.content.{i}") for i, part in enumerate(content))
    if block.is_error:
        content = f"Error: {content}"
    return _Turn(Role.TOOL, [Part(content)], call_id=call_id)


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
    try:
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
    except InvalidRequest as error:
        text = str(error)
        if text.startswith("stop"):
            text = text.replace("stop", "stop_sequences", 1)
        raise InvalidRequest(text) from None
