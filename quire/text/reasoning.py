"""Separates a model's reasoning from its answer. Works on text, not tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from quire.text.stream import AnswerParser, Piece, Thought

# Template variables that switch reasoning on or off, in search order.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str
    label: str = ""  # text directly after the opening that belongs to the marker
    has_channels: bool = False  # answers are messages with channels: see quire/text/harmony.py


# A model supports reasoning if its template contains the closing marker, or with channels the opening. To support
# another format, add a row.
REASONING_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("gemma4", "<|channel>", "<channel|>", label="thought\n"),
    ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", has_channels=True),
)


class Opening(Enum):
    """Whether the prompt has opened or closed the reasoning block."""

    FREE = auto()  # neither: the answer may begin with a reasoning block
    OPEN = auto()  # opened: the answer begins inside the block
    CLOSED = auto()  # closed an empty one: the answer has no reasoning


def find_reasoning(source: str | None) -> ReasoningFormat | None:
    """The reasoning format of a template; None: the model does not reason."""
    return next((row for row in REASONING_FORMATS if source is not None and _is_in(row, source)), None)


def _is_in(format: ReasoningFormat, source: str) -> bool:
    return (format.opening if format.has_channels else format.closing) in source


def find_opening(format: ReasoningFormat, tail: str) -> Opening:
    """Determine the opening from the end of the prompt."""
    end = tail.rstrip()
    if end.endswith((format.opening + format.label).rstrip()):
        return Opening.OPEN
    return Opening.CLOSED if end.endswith(format.closing) else Opening.FREE


class ThoughtParser:
    """Splits off the reasoning, stripped of surrounding white space. `answer` parses the rest."""

    def __init__(self, format: ReasoningFormat, opening: Opening, answer: AnswerParser) -> None:
        self._opening = format.opening + format.label
        self._closing = format.closing
        self._answer = answer
        self._is_open = opening is Opening.OPEN
        self._is_over = opening is Opening.CLOSED
        self._has_begun = False  # reasoning text was returned
        self._has_answered = False  # the answer has text other than white space
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """Whether reasoning is in progress or may still start (the opening marker is incomplete)."""
        return not self._is_over

    @property
    def is_over(self) -> bool:
        return self._answer.is_over

    def push(self, text: str) -> list[Piece]:
        if self._is_over:
            return self._after(text)
        self._held += text
        if not self._is_open:
            start = self._held.lstrip()
            if start.startswith(self._opening):
                self._is_open = True
                self._held = start[len(self._opening) :]
            elif self._opening.startswith(start):
                return []
            else:
                self._is_over = self._has_answered = True
                held, self._held = self._held, ""
                return self._answer.push(held)
        return self._grow()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        held, self._held = self._held, ""
        if self._is_over:
            return self._answer.finish(is_cut=is_cut)
        self._is_over = True
        if self._is_open:  # cut off during reasoning
            return [*self._thought(held.rstrip()), *self._answer.finish(is_cut=is_cut)]
        return [*self._answer.push(held), *self._answer.finish(is_cut=is_cut)]

    def _grow(self) -> list[Piece]:
        at = self._held.find(self._closing)
        if at >= 0:
            thought, rest = self._held[:at], self._held[at + len(self._closing) :]
            self._held, self._is_over = "", True
            return [*self._thought(thought.rstrip()), *self._after(rest)]
        final = self._held[: len(self._held) - num_held(self._held, self._closing)].rstrip()
        self._held = self._held[len(final) :]
        return self._thought(final)

    def _thought(self, text: str) -> list[Piece]:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return [Thought(text)] if text else []

    def _after(self, text: str) -> list[Piece]:
        if not self._has_answered:
            text = text.lstrip()
            self._has_answered = bool(text)
        return self._answer.push(text)


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the start of a marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
