"""Placement: the positions of a prompt from which later requests are expected to continue.

States are stored there, and window blocks before them are kept longer than others.

    end of the prompt     the same prompt again, other samples of it
    message boundaries    other conversations with the same system text; the next turn, if the template omits reasoning
    branch points         where a second request differs from the first
    end of the answer     the next turn of a conversation (stored when a request ends, not placed here)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import StrEnum


class Place(StrEnum):
    PROMPT = "prompt"
    ANSWER = "answer"
    MESSAGE = "message"
    BRANCH = "branch"


ALL_PLACES = frozenset(Place)


def place_points(
    num_tokens: int,
    start: int,
    num_kv_tokens: int,
    boundaries: Sequence[int],
    places: Collection[Place],
    spacing: int,
) -> list[int]:
    """Positions within (start, num_tokens) to store states at, in order, at least `spacing` tokens apart.

    `num_kv_tokens`: cached prefix of the prompt; if it ends after `start`, the prompt differs there from a cached one,
    and no state is stored there yet. The last token of a prompt is always computed, so a state after all tokens would
    never be used.
    """
    last = num_tokens - 1
    wanted: set[int] = set()
    if Place.MESSAGE in places:
        wanted.update(boundaries)
    if Place.BRANCH in places:
        wanted.add(num_kv_tokens)
    if Place.PROMPT in places:
        wanted.add(last)
    points: list[int] = []
    for point in sorted(wanted):
        before = points[-1] if points else start
        if start < point <= last and (before == 0 or point - before >= spacing):
            points.append(point)
    return points


def choose_boundaries(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Of all positions where messages start: the end of the system text, the last message, and the answer."""
    return (*boundaries[:1], *boundaries[1:][-2:])


def add_point(points: list[int], point: int) -> None:
    """Insert a branch point that was found while the prompt is computed."""
    at = bisect_left(points, point)
    if at == len(points) or points[at] != point:
        points.insert(at, point)
