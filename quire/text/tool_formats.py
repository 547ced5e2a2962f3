"""Formats of tool calls, and an incremental parser for them.

If a model's template does not support tools, or writes calls in a format that is not in TOOL_FORMATS, the tools are
described in the system prompt (`quire/text/tool_prompts.py`) and the model writes calls in the `PROMPTED` format.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from quire.errors import InvalidRequest
from quire.text.call_readers import FUNCTION, GEMMA, GEMMA_QUOTE, PYTHON, JsonCall, LiteralCall, XmlCall
from quire.text.messages import Tool
from quire.text.reasoning import num_held
from quire.text.stream import CallArguments, CallStart, Piece, Words

MAX_HEAD_CHARS = 4096  # of a call, up to its name and the start of its arguments
_BLANK = " \t\r\n"


class Syntax(Enum):
    """How one call is written, between the markers."""

    JSON = auto()  # an object with a name and arguments
    XML = auto()  # Qwen3.5 and Qwen3-Coder: see quire/text/call_readers.py
    GEMMA = auto()  # Gemma 4: see quire/text/call_readers.py
    PYTHON = auto()  # LFM2: see quire/text/call_readers.py
    HARMONY = auto()  # gpt-oss: a message to the tool, see quire/text/harmony.py


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls, and the markers around them."""

    name: str
    opening: str  # of one call, or of the list of calls
    closing: str
    before: str = ""  # between the opening and the JSON
    after: str = ""
    arguments: str = "arguments"  # name of the key
    is_list: bool = False
    may_be_bare: bool = False  # the opening may be missing at the start of an answer
    is_single: bool = False  # one call per answer: the template refuses several
    id_chars: int | None = None  # the exact length of call ids that the template requires
    is_in_template: bool = True  # the model's own template renders tools, calls and results
    syntax: Syntax = Syntax.JSON
    bare: str = ""  # the start of a call whose opening is missing; empty: such calls are text
    other_markers: tuple[str, ...] = ()  # further special tokens that the parser needs
    signs: tuple[str, ...] = ()  # one of these is in the source of a template that does not write earlier calls


PROMPTED = ToolFormat("words", "<tool_call>", "</tool_call>", before="\n", after="\n", is_in_template=False)

# In search order. To support another format, add a row, and a transcript in tests/text/test_tool_formats.py.
TOOL_FORMATS = (
    ToolFormat("qwen_xml", "<tool_call>", "</tool_call>", before="\n", after="\n", syntax=Syntax.XML, bare=FUNCTION),
    ToolFormat("gemma4", "<|tool_call>", "<tool_call|>", syntax=Syntax.GEMMA, other_markers=(GEMMA_QUOTE,)),
    ToolFormat("harmony", "", "", is_single=True, syntax=Syntax.HARMONY),
    ToolFormat(
        "lfm2",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        is_list=True,
        syntax=Syntax.PYTHON,
        signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    ToolFormat("hermes", "<tool_call>", "</tool_call>", before="\n", after="\n"),
    ToolFormat("mistral", "[TOOL_CALLS]", "", is_list=True, id_chars=9),
    ToolFormat("llama3", "<|python_tag|>", "", arguments="parameters", may_be_bare=True, is_single=True),
    PROMPTED,
)


def named_tool_format(name: str) -> ToolFormat:
    for row in TOOL_FORMATS:
        if row.name == name:
            return row
    raise InvalidRequest(f"tool_format = {name!r:.80} is not one of {', '.join(row.name for row in TOOL_FORMATS)}")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallReader(Protocol):
    """Reads one call, one character at a time."""

    name: str | None  # the tool's; None: not known yet

    @property
    def is_ready(self) -> bool:
        """Whether this is certainly a call: its name is known, and the start of its arguments."""

    @property
    def is_over(self) -> bool: ...

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""

    def take(self) -> str:
        """The next part of the arguments' JSON."""


_READERS: Mapping[Syntax, Callable[[ToolFormat, Mapping[str, Tool]], CallReader]] = {
    Syntax.JSON: lambda format, tools: JsonCall(format.arguments, tools),
    Syntax.XML: lambda _, tools: XmlCall(tools),
    Syntax.GEMMA: lambda _, tools: LiteralCall(GEMMA, tools),
    Syntax.PYTHON: lambda _, tools: LiteralCall(PYTHON, tools),
    Syntax.HARMONY: lambda format, tools: JsonCall(format.arguments, tools),
}
# What a call may start with.
_STARTS = {**dict.fromkeys(Syntax, re.compile(r"[\w-]")), Syntax.JSON: re.compile(r"\{"), Syntax.XML: re.compile("<")}


class _State(Enum):
    TEXT = auto()
    OPENED = auto()  # after the opening: a call must follow
    CALL = auto()  # inside a call
    NEXT = auto()  # after a call of a list
    CLOSING = auto()


class CallParser:
    """Splits an answer into text and tool calls. White space around calls is dropped.

    Text that starts like a call and is not one (JSON of another shape, an unknown tool name) is returned as text. Once
    the name of a call was returned it stays a call, even if its arguments are invalid. A call that is cut off before
    its name is returned as text. It is dropped instead if it follows another call, or if a length limit cut it off
    after its marker.

    A call that repeats the previous one, name and arguments, ends the turn: small models repeat calls endlessly.
    Therefore a second call of the same tool is held back until its arguments differ from those of the first. If the
    answer is cut off before that, the call is dropped.
    """

    def __init__(self, format: ToolFormat, tools: Iterable[Tool]) -> None:
        self._format = format
        self._tools = {tool.name: tool for tool in tools}
        self._state = _State.TEXT
        self._rest = ""  # unread text
        self._raw: list[str] = []  # text that may become a call
        self._blank = ""  # white space after text
        self._is_at_start = True  # only white space so far
        self._is_after_call = False
        self._is_in_list = False
        self._call = _READERS[format.syntax](format, self._tools)
        self._num_calls = 0
        self._arguments = ""  # of this call, so far
        self._last: tuple[str, str] | None = None  # name and arguments of the call directly before this one
        self._is_held = False  # held back, because it may repeat the previous call
        self.is_over = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._rest += text
        while not self.is_over and self._step(pieces):
            pass
        return _joined(pieces)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        if self.is_over:
            return pieces
        if is_cut:
            self._drop_beginning()
        while self._state in (_State.OPENED, _State.CALL) and self._raw and not self._num_calls:
            self._give_up(pieces)
            while self._step(pieces):
                pass
        if self._state is _State.TEXT:
            text, self._rest = self._rest, ""
            if self._is_after_call and self._format.opening.startswith(text.strip(_BLANK)):
                text = ""  # the next call, cut off within its opening marker
            self._emit_text(text, pieces)
            if self._blank and not self._is_after_call:
                pieces.append(Words(self._blank))
        return _joined(pieces)

    def _drop_beginning(self) -> None:
        """Drop a call that was cut off before its name: part of its marker, or the marker and the text after it.

        A call without a marker is kept: it may be JSON that the client requested.
        """
        opening = self._format.opening
        if self._state is _State.TEXT:
            self._rest = self._rest[: len(self._rest) - num_held(self._rest, opening)]
        elif self._raw and self._raw[0] == opening:
            self._raw, self._rest, self._state = [], "", _State.TEXT

    def _step(self, pieces: list[Piece]) -> bool:
        """Read the next part. False: more text is needed."""
        match self._state:
            case _State.TEXT:
                return self._read_text(pieces)
            case _State.OPENED:
                return self._read_opening(pieces)
            case _State.CALL:
                return self._read_call(pieces)
            case _State.NEXT:
                return self._read_next()
            case _State.CLOSING:
                return self._read_closing()

    def _read_text(self, pieces: list[Piece]) -> bool:
        opening = self._format.opening
        if self._is_at_start and self._format.may_be_bare:
            start = self._rest.lstrip(_BLANK)
            if not start:
                return False
            if start[0] == "{":
                self._raw, self._rest = [self._rest[: len(self._rest) - len(start)]], start
                self._open()
                return True
        at, bare_at = self._rest.find(opening), self._rest.find(self._format.bare) if self._format.bare else -1
        if at < 0 and bare_at < 0:
            size = max(num_held(self._rest, marker) for marker in (opening, self._format.bare))
            final = len(self._rest) - size
            text, self._rest = self._rest[:final], self._rest[final:]
            self._emit_text(text, pieces)
            return False
        if bare_at >= 0 and (at < 0 or bare_at < at):
            return self._open_bare(bare_at, pieces)
        self._emit_text(self._rest[:at], pieces)
        self._raw, self._rest = [opening], self._rest[at + len(opening) :]
        self._is_in_list = False
        self._open()
        return True

    def _open_bare(self, at: int, pieces: list[Piece]) -> bool:
        """Begin a call without an opening. If it is no call, its first character is text."""
        self._emit_text(self._rest[:at], pieces)
        self._open()
        self._call.read(self._rest[at])
        self._raw, self._rest = [self._rest[at]], self._rest[at + 1 :]
        self._state = _State.CALL
        return True

    def _open(self) -> None:
        self._state = _State.OPENED
        self._call = _READERS[self._format.syntax](self._format, self._tools)

    def _read_opening(self, pieces: list[Piece]) -> bool:
        """Read white space and the bracket of a list, up to the call."""
        start = self._rest.lstrip(_BLANK)
        if not start:
            return False
        self._raw.append(self._rest[: len(self._rest) - len(start)])
        self._rest = start
        if self._format.is_list and not self._is_in_list and start[0] == "[":
            self._is_in_list = True
            self._raw.append("[")
            self._rest = start[1:]
        elif _STARTS[self._format.syntax].match(start) and self._is_in_list == self._format.is_list:
            self._state = _State.CALL
        else:
            self._give_up(pieces)
        return True

    def _read_call(self, pieces: list[Piece]) -> bool:
        call = self._call
        for at, char in enumerate(self._rest):
            is_known = call.is_ready
            if not call.read(char) or (not call.is_ready and len(self._raw) > MAX_HEAD_CHARS):
                self._rest = self._rest[at:]
                if is_known:  # the call was returned already; the rest is text
                    self._end_call(pieces)
                    self._state = _State.TEXT
                else:
                    self._give_up(pieces)
                return True
            if not call.is_ready:
                self._raw.append(char)
            elif not is_known:
                self._start_call(pieces)
            if call.is_over:
                self._rest = self._rest[at + 1 :]
                self._end_call(pieces)
                self._state = _State.NEXT if self._format.is_list else _State.CLOSING
                return True
        self._rest = ""
        self._grow_call(pieces)
        return False

    def _start_call(self, pieces: list[Piece]) -> None:
        self._raw, self._blank, self._is_at_start = [], "", False
        self._arguments = ""
        self._is_held = self._last is not None and self._last[0] == self._call.name
        if not self._is_held:
            self._emit_call_start(pieces)

    def _emit_call_start(self, pieces: list[Piece]) -> None:
        assert self._call.name is not None
        pieces.append(CallStart(self._num_calls, new_call_id(), self._call.name))

    def _grow_call(self, pieces: list[Piece]) -> None:
        if not self._call.is_ready or not (text := self._call.take()):
            return
        self._arguments += text
        if self._is_held:
            assert self._last is not None
            if self._last[1].startswith(self._arguments):
                return
            self._is_held, text = False, self._arguments
            self._emit_call_start(pieces)
        pieces.append(CallArguments(self._num_calls, text))

    def _end_call(self, pieces: list[Piece]) -> None:
        self._grow_call(pieces)
        this = self._call.name or "", self._arguments
        if self._is_held and this == self._last:
            self.is_over = True
            return
        if self._is_held:  # its JSON is cut off, so it does not repeat the previous call
            self._emit_call_start(pieces)
            pieces.append(CallArguments(self._num_calls, self._arguments))
        self._last, self._is_held = this, False
        self._num_calls += 1
        self._is_after_call = True

    def _read_next(self) -> bool:
        for at, char in enumerate(self._rest):
            if char in _BLANK:
                continue
            self._rest = self._rest[at + 1 :] if char in ",]" else self._rest[at:]
            if char == ",":
                self._raw = [char]
                self._open()
            else:
                self._state = _State.CLOSING if char == "]" else _State.TEXT
            return True
        return False

    def _read_closing(self) -> bool:
        start = self._rest.lstrip(_BLANK)
        closing = self._format.closing
        if len(start) < len(closing) and closing.startswith(start):
            return False
        self._rest = start.removeprefix(closing)
        self._state = _State.TEXT
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """Treat the text as no call: return its opening or first bracket as text, and parse the rest again."""
        first, *others = self._raw
        self._state, self._raw = _State.TEXT, []
        self._rest = "".join(others) + self._rest
        if not first.strip(_BLANK):
            first, self._rest = first + self._rest[:1], self._rest[1:]
        self._emit_text(first, pieces)

    def _emit_text(self, text: str, pieces: list[Piece]) -> None:
        if self._is_after_call:
            text = text.lstrip(_BLANK)
        stripped = text.rstrip(_BLANK)
        if not stripped:
            self._blank += text
            return
        pieces.append(Words(self._blank + stripped))
        self._last = None
        self._blank = text[len(stripped) :]
        self._is_at_start = self._is_after_call = False


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces, with adjacent texts merged."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Words) and isinstance(last, Words):
            joined[-1] = Words(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
