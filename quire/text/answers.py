"""An answer's text taken apart as it grows: thoughts, words, calls of tools."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Thought(NamedTuple):
    text: str


class Words(NamedTuple):
    text: str


class CallStart(NamedTuple):
    number: int  # of the call in this answer, from 0
    call_id: str
    name: str


class CallArguments(NamedTuple):
    number: int
    text: str  # the next part of the arguments, which are JSON


Piece = Thought | Words | CallStart | CallArguments


class AnswerParser(Protocol):
    """One for each sample. What it gives is final; what may still become a marker is held back."""

    @property
    def is_over(self) -> bool:
        """The turn has ended, whatever the model goes on to write: nothing more is given out."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The answer is over. What cannot be read as a call comes back as words, never as an error.

        `is_cut`: its length limit ended it. The beginning of a call is then left out: it is not text of the answer.
        """


class PlainAnswer:
    """Of a model that neither thinks aloud nor was given tools."""

    is_over = False

    def push(self, text: str) -> list[Piece]:
        return [Words(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        del is_cut
        return []
