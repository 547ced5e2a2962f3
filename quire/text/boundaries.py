"""Finds where messages start in the tokens of a rendered conversation.

Recurrent states are stored there, because the next request of a conversation often has the same tokens up to one of
these positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

MAX_BOUNDARIES = 64
_TEXTS = ("trialone", "trialtwo", "trialthree")
NUM_FIRST = 4  # of the kept boundaries: the end of the system text is among them

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, add_generation_prompt -> text


def find_boundaries(tokens: Sequence[int], starters: Collection[int]) -> tuple[int, ...]:
    """The positions of tokens that start a message, ascending. At most MAX_BOUNDARIES: the first 4 and the last 60.

    The start of the first message is left out: nothing is before it, or only one token such as BOS.
    """
    found: list[int] = []
    for starter in starters:
        at = 1
        try:
            while True:
                at = tokens.index(starter, at + 1)
                found.append(at)
        except ValueError:  # no further one
            pass
    found.sort()
    if len(found) > MAX_BOUNDARIES:
        found = [*found[:NUM_FIRST], *found[NUM_FIRST - MAX_BOUNDARIES :]]
    return tuple(found)


def find_starters(render: Render, control: Mapping[str, int]) -> tuple[int, ...]:
    """The control tokens that start a message, found by rendering a short trial conversation. Empty: there are none.

    `control`: the control strings and their ids. After a message's text comes the control token that ends it, if there
    is one; the next one starts the following message. Raises TemplateError.
    """
    user, answer = {"role": "user", "content": _TEXTS[0]}, {"role": "assistant", "content": _TEXTS[1]}
    strings = re.compile("|".join(re.escape(one) for one in sorted(control, key=len, reverse=True)) or "(?!)")
    endings: set[str] = set()
    for messages in ([user], [user, answer]):
        tail = render(messages, False).rpartition(messages[-1]["content"])[2]
        endings |= set(strings.findall(tail)[:1])
    rest = render([user, answer, {"role": "user", "content": _TEXTS[2]}], True)
    starters: dict[str, None] = {}
    for i, text in enumerate(_TEXTS):
        before, found, rest = rest.partition(text)
        if not found:
            return ()
        if i > 0:
            starters |= dict.fromkeys(_first(strings.findall(before), endings))
    starters |= dict.fromkeys(_first(strings.findall(rest), endings))  # the start of the answer
    return tuple(control[one] for one in starters)


def _first(found: list[str], endings: Collection[str]) -> list[str]:
    return [one for one in found if one not in endings][:1]
