"""The text of one answer as it is generated: stop strings, and its parts (`Piece`)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.errors import InvalidRequest
from quire.text.tokenizer import check_text

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopMatch(NamedTuple):
    text: str  # released by this push: final, and not part of a stop string
    stop: str | None  # the stop string that ended the text, if one did


class StopStrings:
    """Matches one text against its stop strings.

    The stop string that ends first wins; of those that end at the same character, the longest. This is the result of
    reading the text one character at a time, so it does not depend on how the text is split into pieces. The cost of
    a push depends on its text and the lengths of the stop strings, not on the length of the text so far.
    """

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        _check(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        # Every proper prefix: text that ends with one of them may be the start of a stop string.
        self._prefixes = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopMatch:
        """Push text and return what can be released. After a match all further text is dropped."""
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
        """Release the held text at the end: it is not a stop string."""
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


class Thought(NamedTuple):
    """The next part of the reasoning."""

    text: str


class Words(NamedTuple):
    """The next part of the answer's text, outside of reasoning and tool calls."""

    text: str


class CallStart(NamedTuple):
    number: int  # index of the call in this answer
    call_id: str
    name: str


class CallArguments(NamedTuple):
    number: int
    text: str  # the next part of the arguments' JSON


Piece = Thought | Words | CallStart | CallArguments


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the start of a marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class AnswerParser(Protocol):
    """Splits the text of one sample into pieces.

    Returned pieces are final. Text that may be the start of a marker is held back.
    """

    @property
    def is_over(self) -> bool:
        """Whether the turn has ended. Further text is ignored."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Flush at the end of the answer. Text that is not a valid call is returned as Words; this never fails.

        `is_cut`: a length limit ended the answer. The beginning of a call is then dropped: it is not text.
        """


class PlainAnswer:
    """Parser for answers without reasoning or tool calls."""

    is_over = False

    def push(self, text: str) -> list[Piece]:
        return [Words(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        del is_cut
        return []
