"""Reads a tool call that is a JSON object with a name and arguments, one character at a time."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

_BLANK = " \t\r\n"


class _At(Enum):
    BEGIN = auto()
    KEY = auto()  # before a key or the end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    MORE = auto()  # after a value: a comma or the end
    END = auto()


class JsonCall:
    """Parses the JSON object of one call. See `CallReader` in `quire/text/tool_formats.py`."""

    def __init__(self, arguments_name: str, names: Collection[str]) -> None:
        self._arguments_name = arguments_name
        self._names = names
        self.name: str | None = None
        self._at = _At.BEGIN
        self._text: list[str] = []  # of the current key or value
        self._key = ""
        self._due: list[str] = []  # expected closing brackets
        self._is_string = False
        self._is_escaped = False
        self._arguments: list[str] | None = None  # read and not taken yet

    @property
    def is_over(self) -> bool:
        return self._at is _At.END

    @property
    def is_ready(self) -> bool:
        return self.name is not None and self._arguments is not None

    def take(self) -> str:
        text = "".join(self._arguments or ())
        self._arguments = []
        return text

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        match self._at:
            case _At.IN_KEY:
                return self._read_key(char)
            case _At.IN_VALUE:
                return self._read_value(char)
            case _ if char in _BLANK:
                return True
            case _At.BEGIN:
                self._at = _At.KEY
                return char == "{"
            case _At.KEY:
                self._at, self._text = _At.IN_KEY, [char]
                return char == '"'
            case _At.COLON:
                self._at = _At.VALUE
                return char == ":"
            case _At.VALUE:
                return self._begin_value(char)
            case _At.MORE:
                return self._read_more(char)
            case _:
                return False

    def _read_key(self, char: str) -> bool:
        self._text.append(char)
        if not self._ends_string(char):
            return True
        key = _decoded("".join(self._text))
        self._key, self._at = key if isinstance(key, str) else "", _At.COLON
        return isinstance(key, str)

    def _begin_value(self, char: str) -> bool:
        self._at, self._text = _At.IN_VALUE, []
        self._is_string = self._is_escaped = False
        self._due = []
        if self._key == self._arguments_name:
            if self._arguments is not None or char not in '{"n':
                return False  # a duplicate, or neither an object, an object in a string, nor null
            if char == "{":
                self._arguments = []
        return self._read_value(char)

    def _read_value(self, char: str) -> bool:
        if self._is_string:
            self._keep(char)
            if self._ends_string(char):
                self._is_string = False
                return bool(self._due) or self._end_value()
            return True
        if not self._due and self._text and char in ",}]" + _BLANK:  # a number or literal ends at the next delimiter
            return self._end_value() and (char in _BLANK or self._read_more(char))
        if char in "}]" and (not self._due or self._due.pop() != char):
            return False
        self._keep(char)
        if char == '"':
            self._is_string = True
        elif char in "{[":
            self._due.append("}" if char == "{" else "]")
        elif char in "}]":
            return bool(self._due) or self._end_value()
        return True

    def _keep(self, char: str) -> None:
        if self._key == self._arguments_name and self._arguments is not None:
            self._arguments.append(char)
        else:
            self._text.append(char)

    def _end_value(self) -> bool:
        self._at = _At.MORE
        if self._key == "name":
            name = _decoded("".join(self._text))
            self.name = name if isinstance(name, str) and name in self._names else None
            return self.name is not None
        if self._key == self._arguments_name and self._arguments is None:
            value = _decoded("".join(self._text))
            self._arguments = [value if isinstance(value, str) and value else "{}"]
        return True

    def _read_more(self, char: str) -> bool:
        if char == "}":
            self._at = _At.END
            if self._arguments is None:
                self._arguments = ["{}"]
            return self.name is not None
        self._at = _At.KEY
        return char == ","

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
            return False
        self._is_escaped = char == "\\"
        return char == '"'


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
