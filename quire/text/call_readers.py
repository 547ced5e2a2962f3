"""Readers of one tool call, one character at a time. They write its arguments as JSON. See `CallReader`.

- JSON: an object with a name and arguments.
- Literals: Gemma 4 writes `call:NAME{key:<|"|>text<|"|>,other:[1,true]}`, with unescaped text between its quote tokens.
  LFM2 writes Python calls: `NAME(key="text", other=[1, True])`.
- Qwen's XML, with values that are not escaped. A value ends at the first closing tag that is not inside a JSON string
  of a list or object. The tool's schema decides what a value is: text, or JSON.

      <function=NAME>
      <parameter=KEY>
      VALUE
      </parameter>
      </function>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from quire.text.grammar import refuse_constant
from quire.text.messages import Tool
from quire.text.schemas import KINDS, kind_of, kinds_of

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


class JsonCall:
    """Parses the JSON object of one call: its keys in any order. The text of the arguments is passed on unchanged."""

    def __init__(self, arguments_name: str, names: Collection[str]) -> None:
        self._arguments_name = arguments_name
        self._names = names
        self.name: str | None = None
        self.is_over = False
        self._text = ""  # of the current key or value
        self._key: str | None = None  # of the current value; None: a key or the end follows
        self._due: list[str] = []  # expected closing brackets
        self._is_string = False
        self._is_escaped = False
        self._is_closed = False  # the current key or value has ended: a delimiter follows
        self._arguments: list[str] | None = None  # read and not taken yet

    @property
    def is_ready(self) -> bool:
        return self.name is not None and self._arguments is not None

    def take(self) -> str:
        text = "".join(self._arguments or ())
        self._arguments = []
        return text

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif not self._due:
            self._due = ["}"]
            return char == "{"
        elif len(self._due) == 1 and char in f":,}}{_BLANK}":
            return char in _BLANK or (self._begin_value() if char == ":" else self._end_value(char))
        elif self._is_closed or (self._key is None and char != '"') or (char in "}]" and self._due.pop() != char):
            return False
        elif char in "{[":
            self._due.append("}" if char == "{" else "]")
        else:
            self._is_string = char == '"'
        self._is_closed = not self._is_string and len(self._due) == 1 and char in '"}]'
        return self._keep(char)

    def _keep(self, char: str) -> bool:
        if self._key != self._arguments_name:
            self._text += char
        elif self._arguments is not None:
            self._arguments.append(char)
        elif char == "{" and not self._text:
            self._arguments = [char]
        else:
            self._text += char
            return self._text[0] in '"n'  # an object in a string, or null
        return True

    def _begin_value(self) -> bool:
        key, self._text = decoded_json(self._text), ""
        is_key = self._key is None and isinstance(key, str)
        self._key, self._is_closed = key if isinstance(key, str) else "", False
        return is_key and (key != self._arguments_name or self._arguments is None)

    def _end_value(self, char: str) -> bool:
        """Read what follows a value: a comma, or the end of the object."""
        key, text, has_value = self._key, self._text, self._is_closed or bool(self._text)
        self._key, self._text, self._is_closed = None, "", False
        if key == "name":
            name = decoded_json(text)
            self.name = name if isinstance(name, str) and name in self._names else None
        elif key == self._arguments_name and self._arguments is None:
            value = decoded_json(text)
            self._arguments = [value if isinstance(value, str) and value else "{}"]
        self.is_over = char == "}"
        if self.is_over and self._arguments is None:
            self._arguments = ["{}"]
        return key is not None and has_value and (self.name is not None or not (self.is_over or key == "name"))


def decoded_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


FUNCTION = "<function="
PARAMETER = "<parameter="
END_OF_VALUE = "</parameter>"
_ENDS = ("</function>", "</tool_call>")  # the first may be missing
_ALL_KINDS = frozenset(KINDS)
_TEXT_ONLY = frozenset(("string",))
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # templates write values of earlier calls like this
# The first characters of JSON values, by kind.
_STARTS = {"null": "nN", "boolean": "tTfF", "number": "-0123456789", "array": "[", "object": "{"}
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)


class _InXml(Enum):
    NAME = auto()  # in the tag with the tool's name
    TAG = auto()  # before or in another tag
    VALUE = auto()
    END = auto()


class XmlCall:
    """Parses one call. See `CallReader` in `quire/text/tool_formats.py`."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.name: str | None = None
        self._at = _InXml.NAME
        self._held = ""  # the current tag, or text that may be the end of a value
        self._value: list[str] = []  # of a parameter whose type is not known yet, or that is not text
        self._kinds = _ALL_KINDS  # that the current parameter may have
        self._is_text: bool | None = None  # whether the value is written as a string; None: not known yet
        self._has_begun = False  # the value has a character
        self._num_parameters = 0
        self._arguments: list[str] = []

    @property
    def is_ready(self) -> bool:
        return self.name is not None

    @property
    def is_over(self) -> bool:
        return self._at is _InXml.END

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        match self._at:
            case _InXml.VALUE:
                self._read_value(char)
                return True
            case _InXml.END:
                return False
            case _InXml.TAG if not self._held and char in _BLANK:
                return True
        self._held += char
        known = (FUNCTION,) if self._at is _InXml.NAME else (PARAMETER, *_ENDS)
        if not any(one.startswith(self._held) or self._held.startswith(one) for one in known):
            if self.name is not None:
                self._arguments.append("}")  # the arguments so far are complete
            return False
        if char != ">":
            return True
        tag, self._held = self._held, ""
        if self._at is _InXml.NAME:
            return self._open(tag[len(FUNCTION) : -1].strip())
        if tag in _ENDS:
            self._at = _InXml.END
            self._arguments.append("}")
            return True
        return self._begin(tag[len(PARAMETER) : -1].strip())

    def _open(self, name: str) -> bool:
        if name not in self._tools:
            return False
        self.name, self._at = name, _InXml.TAG
        self._arguments.append("{")
        return True

    def _begin(self, key: str) -> bool:
        assert self.name is not None
        self._at = _InXml.VALUE
        self._kinds = parameter_kinds(self._tools[self.name].parameters, key)
        self._value, self._has_begun, self._is_text = [], False, None
        self._arguments.append(f"{', ' if self._num_parameters else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        if self._kinds == _TEXT_ONLY:
            self._write_text()
        return True

    def _read_value(self, char: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            if char == "\n":
                return
        self._held += char
        if self._held.removeprefix("\n") == END_OF_VALUE and not self._is_inside_json():
            self._held, self._at = "", _InXml.TAG
            self._end_value()
            return
        while self._held and not _may_end(self._held):
            self._keep(self._held[0])
            self._held = self._held[1:]

    def _is_inside_json(self) -> bool:
        """Whether the value is a list or object so far, and its last string is not closed."""
        text = "".join(self._value).lstrip()
        if self._is_text or text[:1] not in ("[", "{"):
            return False
        return any(not one[1] for one in _JSON_TEXT.finditer(text))

    def _keep(self, char: str) -> None:
        if self._is_text:
            self._arguments.append(_escaped(char))
            return
        self._value.append(char)
        if self._is_text is None and char not in _BLANK:
            may_be_json = any(char in _STARTS.get(kind, "") for kind in self._kinds)
            self._is_text = False
            if "string" in self._kinds and not may_be_json:
                self._write_text()

    def _write_text(self) -> None:
        self._is_text = True
        self._arguments.append('"' + _escaped("".join(self._value)))
        self._value = []

    def _end_value(self) -> None:
        if self._is_text:
            self._arguments.append('"')
        else:
            self._arguments.append(as_json("".join(self._value), self._kinds))


def _may_end(text: str) -> bool:
    return END_OF_VALUE.startswith(text) or f"\n{END_OF_VALUE}".startswith(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON of one of these kinds. Text that is none of them becomes a string."""
    stripped = PYTHON_NAMES.get(text.strip(), text.strip())
    try:
        value = json.loads(stripped, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" not in kinds or (kind_of(value) in kinds and not isinstance(value, str)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def parameter_kinds(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The kinds of values of one property of a tool's arguments. A property that the schema does not list is text."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return _TEXT_ONLY
    return value_kinds(properties[key], schema)


Known = dict[str, frozenset[str]]  # the kinds of the targets of references


def value_kinds(schema: object, root: Mapping[str, Any], known: Known | None = None) -> frozenset[str]:
    """The kinds of values that a schema may allow. `root`: the whole schema, for references.

    `known` is filled: each reference is followed once.
    """
    if not isinstance(schema, Mapping):
        return _ALL_KINDS
    known = {} if known is None else known
    kinds = kinds_of(schema)
    if "type" not in schema and ("properties" in schema or "items" in schema):
        kinds = frozenset(("object",) if "properties" in schema else ("array",))
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = _ALL_KINDS  # for references to itself
            known[reference] = value_kinds(_target(reference, root), root, known)
        kinds &= known[reference]
    if isinstance(values := schema.get("enum"), list):
        kinds &= frozenset(map(kind_of, values))
    if "const" in schema:
        kinds &= {kind_of(schema["const"])}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            kinds &= frozenset().union(*(value_kinds(option, root, known) for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            kinds &= value_kinds(part, root, known)
    return kinds | {"null"} if schema.get("nullable") is True else kinds


def _target(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference within the schema; None: not found."""
    if not reference.startswith("#"):
        return None
    found: object = root
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
