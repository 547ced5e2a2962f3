"""Adapts conversations to the order of turns that a template accepts.

Some templates require one leading system turn or none, and alternating user and assistant turns. `find_rules` finds out
once what a template accepts, by rendering short trial conversations. `merge_turns` merges turns that the template would
refuse or omit with their neighbours. A template that accepts everything gets conversations unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.text.messages import Message, Part, Role
from quire.text.rendering import TemplateFailure

_BETWEEN = {"user": "\n\n", "system": "\n\n", "assistant": ""}  # an assistant's text is continued without a break

Entry = dict[str, Any]  # a message as a template variable
Render = Callable[[Sequence[Entry]], str]  # raises TemplateFailure


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The turns a template accepts and writes into the prompt."""

    takes_system: bool = True  # a system turn at the start
    keeps_system: bool = True  # that turn, if the conversation ends with a tool's result
    takes_late_system: bool = True  # a system turn that is not at the start, or a second one
    takes_neighbours: bool = True  # two turns of one role in a row
    takes_user_after_tool: bool = True  # a user turn directly after a tool's result


STRICTEST = TurnRules(False, False, False, False, False)


def find_rules(render: Render) -> TurnRules:
    """Find the rules by trials. Rules about turns that the template never renders, such as tool results, stay True.

    Raises TemplateError if a trial is inconclusive because the rendering process ended or took too long.
    """

    def takes(*turns: Entry) -> bool:
        try:
            rendered = render(turns)
        except TemplateFailure:
            return False
        return all(turn["content"] in rendered for turn in turns)

    def turn(role: str, number: str, **more: Any) -> Entry:
        return {"role": role, "content": f"trial{number}", **more}

    first, answer, last = turn("user", "one"), turn("assistant", "two"), turn("user", "three")
    system, late = turn("system", "four"), turn("system", "five")
    call = {"id": "trialcall", "type": "function", "function": {"name": "trial", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = turn("tool", "six", tool_call_id="trialcall", name="trial")
    if not takes(first):
        return TurnRules()  # trials are inconclusive
    takes_system = takes(system, first)
    return TurnRules(
        takes_system,
        not takes(first, called, result) or takes(system, first, called, result),
        takes_system and takes(system, late, first) and takes(first, late, answer, last) and takes(first, late),
        takes(first, last) and takes(first, answer, turn("assistant", "seven"), last),
        not takes(first, called, result) or takes(first, called, result, last),
    )


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether user and assistant alternate, which every template accepts."""
    roles = [message.role.value for message in messages]
    return all(role == ("assistant" if i % 2 else "user") for i, role in enumerate(roles))


def merge_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """The same conversation in turns that the rules allow. No text is omitted."""
    turns, has_moved = _without_systems(messages, rules)
    if not rules.takes_user_after_tool:
        turns = _joined(turns, lambda last, turn: last.role == "tool" and turn.role == "user")
    if has_moved or not rules.takes_neighbours:
        turns = _joined(turns, lambda last, turn: last.role == turn.role != "tool" and not last.tool_calls)
    return turns


def _without_systems(messages: Sequence[Message], rules: TurnRules) -> tuple[list[Message], bool]:
    """Merge system turns that are not allowed into the first one, or make them user turns.

    Also returns whether any of them became a user turn.
    """
    num_leading = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    turns = list(messages[:num_leading])
    if num_leading > 1 and not rules.takes_late_system:
        turns = _joined(turns, lambda last, turn: last.role == turn.role)
    has_moved = False
    has_results = any(message.role == "tool" for message in messages)
    if turns and not (rules.takes_system and (rules.keeps_system or not has_results)):
        turns, has_moved = [replace(turn, role=Role.USER) for turn in turns], True
    for message in messages[num_leading:]:
        if message.role == "system" and not rules.takes_late_system:
            message, has_moved = replace(message, role=Role.USER), True
        turns.append(message)
    return turns, has_moved


def _joined(turns: Sequence[Message], belong: Callable[[Message, Message], bool]) -> list[Message]:
    """The turns, each merged into the previous one if it belongs to it."""
    joined: list[Message] = []
    for turn in turns:
        if not joined or not belong(joined[-1], turn):
            joined.append(turn)
            continue
        last = joined[-1]
        between = _BETWEEN[turn.role] if last.text and turn.text else ""
        joined[-1] = replace(
            last,
            parts=(*last.parts, *((Part(between),) if between else ()), *turn.parts),
            thought=last.thought + turn.thought,
            tool_calls=(*last.tool_calls, *turn.tool_calls),
        )
    return joined
