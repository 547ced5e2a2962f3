"""Limits on the growth of a JSON schema while it is rewritten. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

MAX_HELD_CHARS = 64 * 1024  # of a rewritten schema: the limit of a grammar
MAX_GROWTH_CHARS = 32_000
MAX_COUNTED_CHARS = 5 * MAX_GROWTH_CHARS  # over all attempts, including parts that did not fit


class Room:
    """Characters that may still be added to a schema."""

    def __init__(self, num_given: int) -> None:
        self.num_left = max(0, min(MAX_GROWTH_CHARS, MAX_HELD_CHARS - num_given))
        self._num_to_count = MAX_COUNTED_CHARS

    @property
    def is_used_up(self) -> bool:
        return self.num_left <= 0 or self._num_to_count <= 0

    def takes(self, added: object, *, num_taken: int = 0) -> bool:
        """Reserve room for the JSON of a value. `num_taken`: characters already reserved for its parts.

        Returns False, and reserves nothing, if it does not fit.
        """
        most = min(self.num_left + num_taken, self._num_to_count)
        size = num_chars(added, most)
        self._num_to_count -= min(size, most)
        if size > most:
            return False
        self.num_left -= max(0, size - num_taken)
        return True


def num_chars(value: object, most: int) -> int:
    """An upper bound of the length of its JSON, or a number above `most`: shared parts may expand to huge sizes."""
    total, rest = 0, [value]
    while rest and total <= most:
        one = rest.pop()
        if isinstance(one, Mapping):
            total += 2 + sum(len(_text(key)) + 4 for key in one)
            rest.extend(one.values())
        elif isinstance(one, list | tuple | frozenset):
            total += 2 + 2 * len(one)
            rest.extend(one)
        else:
            total += len(_text(one))
    return total


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
