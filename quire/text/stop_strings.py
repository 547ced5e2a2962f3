"""Finds stop strings in text that comes in pieces, and never lets out a piece of one too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import InvalidRequest
from quire.text.tokenizer import check_text

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopMatch(NamedTuple):
    text: str  # released by this push: no part of a stop string, and final
    stop: str | None  # the stop string that ended the text, if one did


class StopStrings:
    """One text against its stop strings.

    The stop string that ends first wins, and of those that end at the same character the longest: exactly what one
    sees who reads the text a character at a time, so the result does not depend on how the text is cut into pieces.
    A push costs time for its own text and for the length of the stop strings, however long the text has grown.
    """

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        _check(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        # Every proper prefix: text that ends with one of them may be the beginning of a stop string.
        self._prefixes = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""
        self._stopped = False

    @property
    def held(self) -> str:
        """Text that came in and was not let out yet."""
        return self._held

    def push(self, text: str) -> StopMatch:
        """Text that can be shown now. After a match everything further is dropped."""
        if self._stopped:
            return StopMatch("", None)
        if not self._stops:
            return StopMatch(text, None)
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held, self._stopped = "", True
            return StopMatch(text[: end if self._include_stop else start], stop)
        keep = self._num_waiting(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The text is over: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_waiting(self, text: str) -> int:
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0


def _check(stops: Sequence[str]) -> None:
    if isinstance(stops, str):
        raise InvalidRequest(f"stop = {stops[:80]!r} is a string, not a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, more than {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequest(f"stop[{i}] is a {type(stop).__name__}, not a string")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{i}] has {len(stop)} characters, not 1 to {MAX_STOP_CHARS}")
        check_text(stop, name=f"stop[{i}]")
