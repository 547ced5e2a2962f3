"""Separates a model's reasoning from its answer. Works on text, not tokens.

An answer in the harmony format of gpt-oss is a list of messages, each with a header:

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends with `<|start|>assistant`. The recipient may also be before the channel. The channel `analysis` is
reasoning; `final`, and `commentary` without a recipient, are text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from quire.text.messages import AnswerParser, CallArguments, CallStart, Piece, Thought, Words, new_call_id, num_held

# Template variables that switch reasoning on or off, in search order.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str
    label: str = ""  # text directly after the opening that belongs to the marker
    has_channels: bool = False  # answers are messages with channels: see quire/text/reasoning.py


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
    for row in REASONING_FORMATS:
        sign = row.opening if row.has_channels else row.closing
        if source is not None and sign in source:
            return row
    return None


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


START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
MAX_HEADER_CHARS = 512
_ENDS = (END, CALL, RETURN, START, CHANNEL)  # of a message; the last two start another one
_BETWEEN = "\n\n"  # between two messages of the same kind
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, "assistant", "to=")


class _Kind(Enum):
    HEADER = auto()
    THOUGHT = auto()
    WORDS = auto()
    CALL = auto()


class HarmonyParser:
    """An `AnswerParser`. A message to an unknown recipient is text, or reasoning in the channel `analysis`.

    Text without any header is returned as text.
    """

    is_over = False

    def __init__(self, names: Collection[str], *, is_in_final: bool = False) -> None:
        """`names`: of the tools that may be called. `is_in_final`: the prompt ends inside the text of an answer."""
        self._names = names
        self._kind = _Kind.WORDS if is_in_final else _Kind.HEADER
        self._rest = ""  # unread text
        self._num_calls = 0
        self._has_arguments = False
        self._due = ""  # to be written before the next text of the current message
        self._seen: set[_Kind] = set()  # kinds of text that were returned

    @property
    def is_thinking(self) -> bool:
        """Whether the current message is reasoning."""
        return self._kind is _Kind.THOUGHT

    @property
    def is_in_header(self) -> bool:
        return self._kind is _Kind.HEADER

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        pieces: list[Piece] = []
        while self._read_header(pieces) if self._kind is _Kind.HEADER else self._read_body(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        del is_cut  # a header that is cut off is never text
        pieces: list[Piece] = []
        if self._kind is not _Kind.HEADER:
            rest, self._rest = self._rest, ""
            self._emit(rest, pieces)
            self._end_message(pieces)
        return pieces

    def _read_header(self, pieces: list[Piece]) -> bool:
        """Read up to the text of the next message. False: more text is needed."""
        start = self._rest.lstrip()
        at = start.find(MESSAGE)
        size = len(start) if at < 0 else at + len(MESSAGE) - 1
        may_be = any(one.startswith(start) or start.startswith(one) for one in _HEADER_STARTS)
        if not may_be or size > MAX_HEADER_CHARS:
            self._begin(_Kind.WORDS)  # there is no header
            return True
        if at < 0:
            return False
        header, self._rest = start[:at], start[at + len(MESSAGE) :]
        header = header.rpartition(START)[2]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = None if recipient is None else recipient[1].removeprefix("functions.")
        if name in self._names:
            assert name is not None
            self._kind, self._has_arguments = _Kind.CALL, False
            pieces.append(CallStart(self._num_calls, new_call_id(), name))
        else:
            self._begin(_Kind.THOUGHT if channel is not None and channel[1] == "analysis" else _Kind.WORDS)
        return True

    def _begin(self, kind: _Kind) -> None:
        self._kind = kind
        self._due = _BETWEEN if kind in self._seen else ""

    def _read_body(self, pieces: list[Piece]) -> bool:
        found = [(at, marker) for marker in _ENDS if (at := self._rest.find(marker)) >= 0]
        if not found:
            final = len(self._rest) - max(num_held(self._rest, marker) for marker in _ENDS)
            text, self._rest = self._rest[:final], self._rest[final:]
            self._emit(text, pieces)
            return False
        at, marker = min(found)
        self._emit(self._rest[:at], pieces)
        self._rest = self._rest[at:] if marker in (START, CHANNEL) else self._rest[at + len(marker) :]
        self._end_message(pieces)
        return True

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._kind is _Kind.CALL:
            self._has_arguments = True
            pieces.append(CallArguments(self._num_calls, text))
            return
        text, self._due = self._due + text, ""
        self._seen.add(self._kind)
        pieces.append(Thought(text) if self._kind is _Kind.THOUGHT else Words(text))

    def _end_message(self, pieces: list[Piece]) -> None:
        if self._kind is _Kind.CALL:
            if not self._has_arguments:
                self._emit("{}", pieces)
            self._num_calls += 1
        self._kind = _Kind.HEADER
