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
    keeps_system: bool = True  # that turn, if the conversation ends with a tool's result or an answer
    takes_late_system: bool = True  # a system turn that is not at the start, or a second one
    takes_neighbours: bool = True  # two turns of one role in a row
    takes_user_after_tool: bool = True  # a user turn directly after a tool's result
    puts_system_last: bool = False  # the system text becomes part of the last user turn


STRICTEST = TurnRules(False, False, False, False, False)


def find_rules(render: Render) -> TurnRules:
    """Find the rules by trials. Rules about turns that the template never renders, such as tool results, stay True.

    Raises TemplateError if a trial is inconclusive because the rendering process ended or took too long.
    """

    def rendered(*turns: Entry) -> str:
        try:
            return render(turns)
        except TemplateFailure:
            return ""

    def takes(*turns: Entry) -> bool:
        text = rendered(*turns)
        return all(turn["content"] in text for turn in turns)

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
    talk = rendered(system, first, called, result, answer, last) or rendered(system, first, answer, last)
    ends = [turns for turns in ((first, called, result), (first, answer)) if takes(*turns)]
    return TurnRules(
        takes_system,
        not takes_system or all(takes(system, *end) for end in ends),
        takes_system and takes(system, late, first) and takes(first, late, answer, last) and takes(first, late),
        takes(first, last) and takes(first, answer, turn("assistant", "seven"), last),
        (first, called, result) not in ends or takes(first, called, result, last),
        system["content"] in talk.partition(answer["content"])[2],
    )


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether user and assistant alternate, which every template accepts."""
    roles = [message.role.value for message in messages]
    return all(role == ("assistant" if i % 2 else "user") for i, role in enumerate(roles))


def merge_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """The same conversation in turns that the rules allow. No text is omitted."""
    turns, has_moved = _without_late_systems(messages, rules)
    if not rules.takes_user_after_tool:
        turns = _joined(turns, lambda last, turn: last.role == "tool" and turn.role == "user")
    num_leading = _num_leading_systems(turns)
    if num_leading and not _keeps_system(turns, rules):
        systems = [replace(turn, role=Role.USER) for turn in turns[:num_leading]]
        at = num_leading
        if rules.puts_system_last:
            at = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=at)
        turns, has_moved = [*turns[num_leading:at], *systems, *turns[at:]], True
    if has_moved or not rules.takes_neighbours:
        turns = _joined(turns, lambda last, turn: last.role == turn.role != "tool" and not last.tool_calls)
    return turns


def _without_late_systems(messages: Sequence[Message], rules: TurnRules) -> tuple[list[Message], bool]:
    """Merge system turns that are not allowed into the first one, or make them user turns.

    Also returns whether any of them became a user turn.
    """
    num_leading = _num_leading_systems(messages)
    turns = list(messages[:num_leading])
    if num_leading > 1 and not rules.takes_late_system:
        turns = _joined(turns, lambda last, turn: last.role == turn.role)
    has_moved = False
    for message in messages[num_leading:]:
        if message.role == "system" and not rules.takes_late_system:
            message, has_moved = replace(message, role=Role.USER), True
        turns.append(message)
    return turns, has_moved


def _num_leading_systems(turns: Sequence[Message]) -> int:
    return next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))


def _keeps_system(turns: Sequence[Message], rules: TurnRules) -> bool:
    """Whether the template writes a system turn at the start of these turns."""
    if not rules.takes_system or rules.keeps_system:
        return rules.takes_system
    has_results = any(turn.role == "tool" for turn in turns)
    return turns[-1].role == "user" and (rules.puts_system_last or not has_results)


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
