"""Splits an answer in the harmony format of gpt-oss into reasoning, text and tool calls.

An answer is a list of messages, each with a header:

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends with `<|start|>assistant`. The recipient may also be before the channel. The channel `analysis` is
reasoning; `final`, and `commentary` without a recipient, are text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from quire.text.reasoning import num_held
from quire.text.stream import CallArguments, CallStart, Piece, Thought, Words
from quire.text.tool_formats import new_call_id

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
STOPS = (RETURN, CALL)  # tokens that end an answer
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
