"""Reads a tool call whose arguments are literals, one character at a time, and writes its arguments as JSON.

Gemma 4 writes `call:NAME{key:<|"|>text<|"|>,other:[1,true]}`, with unescaped text between its quote tokens. LFM2 writes
Python calls: `NAME(key="text", other=[1, True])`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from quire.text.xml_calls import PYTHON_NAMES

GEMMA_QUOTE = '<|"|>'
_BLANK = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Dialect:
    head: str  # before the name
    opening: str  # of the arguments
    closing: str
    equals: str  # between a name and its value, in the arguments themselves
    quotes: tuple[str, ...]


GEMMA = Dialect("call:", "{", "}", ":", (GEMMA_QUOTE, '"'))
PYTHON = Dialect("", "(", ")", "=", ('"', "'"))


class _At(Enum):
    HEAD = auto()
    KEY = auto()  # before a name, or the end of an object
    IN_KEY = auto()
    VALUE = auto()  # before a value, or the end of a list
    IN_TEXT = auto()
    IN_WORD = auto()  # a number, a constant, or text without quotes
    NEXT = auto()  # after a value
    END = auto()


class LiteralCall:
    """Parses one call. See `CallReader` in `quire/text/tool_formats.py`."""

    def __init__(self, dialect: Dialect, names: Collection[str]) -> None:
        self._dialect = dialect
        self._names = names
        self.name: str | None = None
        self._at = _At.HEAD
        self._held = ""  # the current name or word, or the beginning of a quote
        self._escape = ""  # the current escape sequence
        self._quote = ""  # of the current text
        self._is_key = False  # the current text is a name
        self._due: list[str] = []  # expected closing brackets
        self._is_first = True  # nothing was written into the current bracket
        self._arguments: list[str] = []

    @property
    def is_ready(self) -> bool:
        return self.name is not None

    @property
    def is_over(self) -> bool:
        return self._at is _At.END

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        match self._at:
            case _At.HEAD:
                return self._read_head(char)
            case _At.IN_TEXT:
                return self._read_text(char)
            case _At.IN_KEY:
                return self._read_key(char)
            case _At.IN_WORD:
                return self._read_word(char)
            case _ if char in _BLANK and not self._held:
                return True
            case _At.KEY | _At.VALUE:
                return self._begin(char)
            case _At.NEXT:
                return self._read_next(char)
        return False

    def _read_head(self, char: str) -> bool:
        head = self._dialect.head
        if char != self._dialect.opening:
            self._held += char
            return head.startswith(self._held) or self._held.startswith(head)
        name, self._held = self._held.removeprefix(head).strip(), ""
        if name not in self._names:
            return False
        self.name = name
        self._open("{", self._dialect.closing)
        return True

    def _open(self, bracket: str, closing: str) -> None:
        self._arguments.append(bracket)
        self._due.append(closing)
        self._is_first = True
        self._at = _At.VALUE if bracket == "[" else _At.KEY

    def _is_list(self) -> bool:
        """Whether the current bracket is a list. The first one is that of the arguments."""
        return len(self._due) > 1 and self._due[-1] != "}"

    def _begin(self, char: str) -> bool:
        """Read the first character of a name or a value, or the closing bracket."""
        if not self._held and char == self._due[-1] and (self._at is _At.KEY or self._is_list()):
            return self._close()
        self._held += char
        if any(quote == self._held for quote in self._dialect.quotes):
            self._quote, self._held = self._held, ""
            return self._begin_text()
        if any(quote.startswith(self._held) for quote in self._dialect.quotes):
            return True  # the beginning of a longer quote
        held, self._held = self._held, ""
        if self._at is _At.KEY:
            self._separate()
            self._at = _At.IN_KEY
            return all(self._read_key(one) for one in held)
        if held in ("{", "[") or (held == "(" and self._dialect is PYTHON):
            if len(self._due) >= MAX_DEPTH:
                return False
            self._separate_item()
            self._open("{" if held == "{" else "[", {"{": "}", "[": "]", "(": ")"}[held])
            return True
        self._at = _At.IN_WORD
        return all(self._read_word(one) for one in held)

    def _begin_text(self) -> bool:
        self._is_key = self._at is _At.KEY
        if self._is_key:
            self._separate()
        else:
            self._separate_item()
        self._at = _At.IN_TEXT
        self._arguments.append('"')
        return True

    def _separate(self) -> None:
        if not self._is_first:
            self._arguments.append(", ")
        self._is_first = False

    def _separate_item(self) -> None:
        if self._is_list():
            self._separate()

    def _read_key(self, char: str) -> bool:
        """Read a name without quotes, up to its value."""
        equals = self._dialect.equals if len(self._due) == 1 else ":"
        if char != equals:
            self._held += char
            return char not in ",{}[]()\n"
        self._arguments.append(json.dumps(self._held.strip(), ensure_ascii=False) + ": ")
        self._held, self._at = "", _At.VALUE
        return True

    def _read_text(self, char: str) -> bool:
        if self._escape or (char == "\\" and len(self._quote) == 1):
            return self._read_escape(char)
        self._held += char
        if self._held == self._quote:
            self._held = ""
            self._arguments.append('"')
            self._at = _At.NEXT
            return True
        while self._held and not self._quote.startswith(self._held):
            self._arguments.append(json.dumps(self._held[0], ensure_ascii=False)[1:-1])
            self._held = self._held[1:]
        return True

    def _read_escape(self, char: str) -> bool:
        self._escape += char
        if len(self._escape) == 1:
            return True
        kind, digits = self._escape[1], self._escape[2:]
        size = _HEX_DIGITS.get(kind, 0)
        if size and digits and char not in "0123456789abcdefABCDEF":
            return False
        if len(digits) < size:
            return True
        self._escape = ""
        if not size:
            self._arguments.append(_ESCAPES.get(kind, "" if kind == "\n" else json.dumps("\\" + kind)[1:-1]))
        elif kind == "U":
            code = int(digits, 16)
            if code > 0x10FFFF:
                return False
            self._arguments.append(json.dumps(chr(code))[1:-1])
        else:
            self._arguments.append("\\u" + digits.rjust(4, "0"))
        return True

    def _read_word(self, char: str) -> bool:
        if char != "," and char != self._due[-1]:
            self._held += char
            return char not in "{}[]"
        word, self._held = self._held.strip(), ""
        word = PYTHON_NAMES.get(word, word)
        self._separate_item()
        is_json = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
        self._arguments.append(word if is_json else json.dumps(word, ensure_ascii=False))
        return self._read_next(char)

    def _read_next(self, char: str) -> bool:
        """Read what follows a value or a quoted name."""
        if self._is_key:
            self._is_key = False
            self._arguments.append(": ")
            self._at = _At.VALUE
            return char == (self._dialect.equals if len(self._due) == 1 else ":")
        if char == self._due[-1]:
            return self._close()
        self._at = _At.VALUE if self._is_list() else _At.KEY
        return char == ","

    def _close(self) -> bool:
        self._arguments.append("]" if self._is_list() else "}")
        self._due.pop()
        self._is_first = False
        self._at = _At.NEXT if self._due else _At.END
        return True
