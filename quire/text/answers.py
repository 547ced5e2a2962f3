"""The parts of an answer as it is generated: reasoning, text and tool calls."""

from __future__ import annotations

from typing import NamedTuple, Protocol


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
