"""Reads a tool call in Qwen's XML format, one character at a time, and writes its arguments as JSON.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

Values are not escaped. A value ends at the first closing tag that is not inside a JSON string of a list or object. The
tool's schema decides what a value is: text, or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from quire.text.messages import Tool
from quire.text.schemas import KINDS, kind_of, kinds_of

FUNCTION = "<function="
PARAMETER = "<parameter="
END_OF_VALUE = "</parameter>"
_ENDS = ("</function>", "</tool_call>")  # the first may be missing
_BLANK = " \t\r\n"
_ALL_KINDS = frozenset(KINDS)
_TEXT_ONLY = frozenset(("string",))
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # templates write values of earlier calls like this
# The first characters of JSON values, by kind.
_STARTS = {"null": "nN", "boolean": "tTfF", "number": "-0123456789", "array": "[", "object": "{"}
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)


class _At(Enum):
    NAME = auto()  # in the tag with the tool's name
    TAG = auto()  # before or in another tag
    VALUE = auto()
    END = auto()


class XmlCall:
    """Parses one call. See `CallReader` in `quire/text/tool_formats.py`."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.name: str | None = None
        self._at = _At.NAME
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
        return self._at is _At.END

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        match self._at:
            case _At.VALUE:
                self._read_value(char)
                return True
            case _At.END:
                return False
            case _At.TAG if not self._held and char in _BLANK:
                return True
        self._held += char
        known = (FUNCTION,) if self._at is _At.NAME else (PARAMETER, *_ENDS)
        if not any(one.startswith(self._held) or self._held.startswith(one) for one in known):
            if self.name is not None:
                self._arguments.append("}")  # the arguments so far are complete
            return False
        if char != ">":
            return True
        tag, self._held = self._held, ""
        if self._at is _At.NAME:
            return self._open(tag[len(FUNCTION) : -1].strip())
        if tag in _ENDS:
            self._at = _At.END
            self._arguments.append("}")
            return True
        return self._begin(tag[len(PARAMETER) : -1].strip())

    def _open(self, name: str) -> bool:
        if name not in self._tools:
            return False
        self.name, self._at = name, _At.TAG
        self._arguments.append("{")
        return True

    def _begin(self, key: str) -> bool:
        assert self.name is not None
        self._at = _At.VALUE
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
            self._held, self._at = "", _At.TAG
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
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" not in kinds or (kind_of(value) in kinds and not isinstance(value, str)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
