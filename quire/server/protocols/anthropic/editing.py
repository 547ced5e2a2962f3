"""`context_management`: clears old tool results and reasoning from a conversation before it is answered. Pure.

Two kinds of edits are supported; others are ignored and named in a response header. `apply` takes a function that
counts tokens: an edit may depend on the length of the conversation, and the response reports how many were cleared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from quire.server.errors import ApiError, Kind
from quire.server.protocols.anthropic.types import (
    AppliedEdit,
    ClearedThinking,
    ClearedToolUses,
    ContextEdit,
    ContextManagement,
    CountTokensRequest,
)
from quire.text.messages import ChatRequest, Message, Part, Role

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
