"""Formats of tool calls, and an incremental parser for them.

If a model's template does not support tools, or writes calls in a format that is not in TOOL_FORMATS, the tools are
described in the system prompt (`quire/text/chat_template.py`) and the model writes calls in the `PROMPTED` format.

`CallParser` finds calls in an answer, and a `CallReader` reads one: a generator that gets its characters and writes the
arguments as JSON.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from quire.errors import InvalidRequest
from quire.text.grammar import refuse_constant
from quire.text.messages import CallArguments, CallStart, Piece, Tool, Words, new_call_id, num_held
from quire.text.schemas import KINDS, Place, References, kind_of, kinds_of

MAX_HEAD_CHARS = 4096  # of a call, up to its name and the start of its arguments
MAX_DEPTH = 64
GEMMA_QUOTE = '<|"|>'
FUNCTION = "<function="
PARAMETER = "<parameter="
END_OF_VALUE = "</parameter>"
_ENDS = ("</function>", "</tool_call>")  # of a call in XML; the first may be missing
_BLANK = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
_ALL_KINDS = frozenset(KINDS)
_TEXT_ONLY = frozenset(("string",))
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # templates write values of earlier calls like this
# The first characters of JSON values, by kind.
_STARTS = {"null": "nN", "boolean": "tTfF", "number": "-0123456789", "array": "[", "object": "{"}
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)


class Syntax(Enum):
    """How one call is written, between the markers."""

    JSON = auto()  # an object with a name and arguments
    XML = auto()  # Qwen3.5 and Qwen3-Coder
    GEMMA = auto()  # Gemma 4
    PYTHON = auto()  # LFM2
    HARMONY = auto()  # gpt-oss: a message to the tool, see quire/text/reasoning.py


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
    rows = {row.name: row for row in TOOL_FORMATS}
    if name not in rows:
        raise InvalidRequest(f"tool_format = {name!r:.80} is not one of {', '.join(rows)}")
    return rows[name]


# Readers


class _NotACall(Exception):
    """The text is not a call, or not a valid one any more."""


Reading = Generator[None, str, None]  # gets one character at a time, and ends with the last one
Part = Generator[None, str, str]


class CallReader:
    """Reads one call, one character at a time."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.name: str | None = None  # the tool's; None: not known yet
        self.is_over = False
        self._arguments: list[str] = []  # JSON that was not taken yet
        self._reading = self._read()
        next(self._reading)

    def read(self, char: str) -> bool:
        """Read a character. False: this is not a call, or not valid any more."""
        try:
            self._reading.send(char)
        except StopIteration:
            self.is_over = True
        except _NotACall:
            return False
        return True

    def take(self) -> str:
        """The next part of the arguments' JSON."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _read(self) -> Reading:
        raise NotImplementedError

    def _write(self, *texts: str) -> None:
        self._arguments += texts

    def _begin(self, name: str) -> None:
        if name not in self._tools:
            raise _NotACall
        self.name = name


class JsonReader(CallReader):
    """Reads the JSON object of one call: the name, the arguments, which are passed on unchanged, and other keys.

    The grammar of an answer allows calls in this order only.
    """

    def __init__(self, key: str, tools: Mapping[str, Tool]) -> None:
        """`key`: of the arguments."""
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"{key}"\s*:\s*')
        super().__init__(tools)

    def _read(self) -> Reading:
        head = ""
        while (char := (yield)) != "{" or not (found := self._head.fullmatch(head)):
            if char == "}":
                raise _NotACall
            head += char
        self._begin(found[1])
        self._write(char)
        depth, is_inside = 1, True  # open brackets within the call; inside of the arguments
        is_string = is_escaped = False
        while depth >= 0:
            char = yield
            if is_string:
                is_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            else:
                is_string = char == '"'
                depth += (char in "{[") - (char in "}]")
            if is_inside:
                self._write(char)
                is_inside = depth > 0


@dataclass(frozen=True, slots=True)
class Dialect:
    head: str  # before the name
    opening: str  # of the arguments
    closing: str
    equals: str  # between a name and its value, in the arguments themselves
    quotes: tuple[str, ...]


GEMMA = Dialect("call:", "{", "}", ":", (GEMMA_QUOTE, '"'))
PYTHON = Dialect("", "(", ")", "=", ('"', "'"))


class LiteralReader(CallReader):
    def __init__(self, dialect: Dialect, tools: Mapping[str, Tool]) -> None:
        self._dialect = dialect
        super().__init__(tools)

    def _read(self) -> Reading:
        dialect, head = self._dialect, ""
        while (char := (yield)) != dialect.opening:
            head += char
            if not (dialect.head.startswith(head) or head.startswith(dialect.head)):
                raise _NotACall
        self._begin(head.removeprefix(dialect.head).strip())
        yield from self._object(dialect.closing, dialect.equals, 1)

    def _object(self, closing: str, equals: str, depth: int) -> Reading:
        self._write("{")
        separator, end = "", ""
        while end != closing and (held := (yield from self._start(closing))):
            self._write(separator)
            separator = ", "
            if held in self._dialect.quotes:
                yield from self._text(held)
                char = yield from self._nonblank()
                self._write(": ")
                if char != equals:
                    raise _NotACall
            else:
                yield from self._bare_name(held, equals)
            end = yield from self._value((yield from self._start("")), closing, "", depth)
        self._write("}")

    def _list(self, depth: int) -> Reading:
        self._write("[")
        separator, end = "", ""
        while end != "]" and (held := (yield from self._start("]"))):
            end = yield from self._value(held, "]", separator, depth)
            separator = ", "
        self._write("]")

    def _nonblank(self) -> Part:
        while (char := (yield)) in _BLANK:
            pass
        return char

    def _start(self, closing: str) -> Part:
        """Read a quote, or the first character of a name or value. Empty: the closing bracket."""
        held = yield from self._nonblank()
        if held == closing:
            return ""
        quotes = self._dialect.quotes
        while held not in quotes and any(quote.startswith(held) for quote in quotes):
            held += yield
        return held

    def _bare_name(self, held: str, equals: str) -> Reading:
        """Read a name without quotes, up to its value. `held`: its beginning."""
        name = ""
        while not held.endswith(equals):
            name += held
            if any(char in ",{}[]()\n" for char in held):
                raise _NotACall
            held = yield
        name += held[: -len(equals)]
        self._write(json.dumps(name.strip(), ensure_ascii=False) + ": ")

    def _value(self, held: str, closing: str, separator: str, depth: int) -> Part:
        """Read a value and the comma or the bracket after it, which is returned. `held`: its beginning."""
        dialect = self._dialect
        if held in dialect.quotes:
            self._write(separator)
            yield from self._text(held)
        elif held in ("{", "["):
            if depth >= MAX_DEPTH:
                raise _NotACall
            self._write(separator)
            if held == "{":
                yield from self._object("}", ":", depth + 1)
            else:
                yield from self._list(depth + 1)
        else:
            return (yield from self._word(held, closing, separator))
        end = yield from self._nonblank()
        if end not in (closing, ","):
            raise _NotACall
        return end

    def _word(self, held: str, closing: str, separator: str) -> Part:
        """Read a number, a constant, or text without quotes."""
        word = ""
        while held[-1] not in (closing, ","):
            word += held
            if any(char in "{}[]" for char in held):
                raise _NotACall
            held = yield
        word = (word + held[:-1]).strip()
        word = PYTHON_NAMES.get(word, word)
        is_json = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
        self._write(separator, word if is_json else json.dumps(word, ensure_ascii=False))
        return held[-1]

    def _text(self, quote: str) -> Reading:
        self._write('"')
        held = ""
        while held != quote:
            char = yield
            if char == "\\" and len(quote) == 1:
                yield from self._escape()
                continue
            held += char
            while not quote.startswith(held):
                self._write(_escaped(held[0]))
                held = held[1:]
        self._write('"')

    def _escape(self) -> Reading:
        kind, digits = (yield), ""
        while kind == "u" and len(digits) < 4:
            digits += yield
        self._write("\\u" + digits if digits else _ESCAPES.get(kind, json.dumps("\\" + kind)[1:-1]))


class XmlReader(CallReader):
    def _read(self) -> Reading:
        self._begin((yield from self._tag(FUNCTION))[len(FUNCTION) : -1].strip())
        assert self.name is not None
        schema, separator = self._tools[self.name].parameters, ""
        self._write("{")
        while (tag := (yield from self._tag(PARAMETER, *_ENDS))) not in _ENDS:
            key = tag[len(PARAMETER) : -1].strip()
            self._write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(parameter_kinds(schema, key))
        self._write("}")

    def _tag(self, *known: str) -> Part:
        """Read a tag. Its beginning is one of those that are known."""
        tag = ""
        while not tag.endswith(">"):
            char = yield
            if not tag and char in _BLANK and self.name is not None:
                continue
            tag += char
            if not any(one.startswith(tag) or tag.startswith(one) for one in known):
                if self.name is not None:
                    self._write("}")  # the arguments so far are complete
                raise _NotACall
        return tag

    def _value(self, kinds: frozenset[str]) -> Reading:
        is_text: bool | None = True if kinds == _TEXT_ONLY else None  # written as a string; None: not known yet
        value = held = ""  # what may be JSON; what may be the end
        self._write('"' if is_text else "")
        if (char := (yield)) != "\n":
            held = char
        while held.removeprefix("\n") != END_OF_VALUE or (not is_text and _is_inside_json(value)):
            while not (END_OF_VALUE.startswith(held) or f"\n{END_OF_VALUE}".startswith(held)):
                char, held = held[0], held[1:]
                if is_text:
                    self._write(_escaped(char))
                    continue
                value += char
                if is_text is None and char not in _BLANK:
                    may_be_json = any(char in _STARTS.get(kind, "") for kind in kinds)
                    is_text = "string" in kinds and not may_be_json
                    self._write('"' + _escaped(value) if is_text else "")
            held += yield
        self._write('"' if is_text else as_json(value, kinds))


def _is_inside_json(text: str) -> bool:
    """Whether a value is a list or object so far, and its last string is not closed."""
    text = text.lstrip()
    return text[:1] in ("[", "{") and any(not one[1] for one in _JSON_TEXT.finditer(text))


def decoded_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
            target = References(root).find(Place(schema, ""))
            known[reference] = value_kinds(None if target is None else target.schema, root, known)
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


# Answers with calls

_READERS: Mapping[Syntax, Callable[[ToolFormat, Mapping[str, Tool]], CallReader]] = {
    Syntax.JSON: lambda format, tools: JsonReader(format.arguments, tools),
    Syntax.XML: lambda _, tools: XmlReader(tools),
    Syntax.GEMMA: lambda _, tools: LiteralReader(GEMMA, tools),
    Syntax.PYTHON: lambda _, tools: LiteralReader(PYTHON, tools),
}
_CALL_STARTS = {**dict.fromkeys(Syntax, r"[\w-]"), Syntax.JSON: r"\{", Syntax.XML: "<"}


class _Ended(Exception):
    """The answer ended inside a call."""


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
        self._new_reader = partial(_READERS[format.syntax], format, {tool.name: tool for tool in tools})
        self._markers = [marker for marker in (format.opening, format.bare) if marker]
        self._pieces: list[Piece] = []  # new ones
        self._rest = ""  # unread text
        self._raw: list[str] = []  # text that may become a call
        self._blank = ""  # white space after text
        self._is_at_start = True  # only white space so far
        self._is_after_call = False
        self._num_calls = 0
        self._arguments = ""  # of this call, so far
        self._last: tuple[str, str] | None = None  # name and arguments of the call directly before this one
        self._is_held = False  # held back, because it may repeat the previous call
        self._is_ended = self._is_cut = False
        self.is_over = False
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        return self._continue()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        self._is_ended, self._is_cut = True, is_cut
        return self._continue()

    def _continue(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Iterator[None]:
        """Read the answer. Yields where it needs more text."""
        while not self.is_over and (yield from self._read_text()):
            try:
                yield from self._read_calls()
            except _NotACall:
                self._give_up()
            except _Ended:
                if self._takes_cut() and self._raw[:1] == [self._format.opening]:
                    self._raw, self._rest = [], ""
                elif self._raw and not self._num_calls:
                    self._give_up()
                else:
                    return

    def _takes_cut(self) -> bool:
        """Whether a length limit ended the answer here: a marker, or its beginning, is dropped with what follows it.

        A call without a marker is kept: it may be JSON that the client requested.
        """
        is_cut, self._is_cut = self._is_cut, False
        return is_cut

    def _read_text(self) -> Generator[None, None, bool]:
        """Read text up to what may be a call. False: the answer has ended."""
        opening = self._format.opening
        while True:
            start = self._rest.lstrip(_BLANK)
            may_be_bare = self._is_at_start and self._format.may_be_bare
            if may_be_bare and start.startswith("{"):
                self._raw, self._rest = [self._rest[: len(self._rest) - len(start)]], start
                return True
            if start or not may_be_bare:
                if found := [(at, marker) for marker in self._markers if (at := self._rest.find(marker)) >= 0]:
                    at, marker = min(found)
                    self._emit_text(self._rest[:at])
                    self._raw = [opening if marker == opening else ""]
                    self._rest = self._rest[at + len(self._raw[0]) :]
                    return True
                final = len(self._rest) - max(num_held(self._rest, marker) for marker in self._markers)
                text, self._rest = self._rest[:final], self._rest[final:]
                self._emit_text(text)
            if self._is_ended:
                break
            yield
        text, self._rest = self._rest, ""
        if self._takes_cut():
            text = text[: len(text) - num_held(text, opening)]
        if self._is_after_call and opening.startswith(text.strip(_BLANK)):
            text = ""  # the next call, cut off within its opening marker
        self._emit_text(text)
        if self._blank and not self._is_after_call:
            self._add_words(self._blank)
        return False

    def _wait(self) -> Iterator[None]:
        if self._is_ended:
            raise _Ended
        yield

    def _skip_blank(self) -> Generator[None, None, str]:
        """Wait for a character that is not white space. Returns what was before it."""
        while not (start := self._rest.lstrip(_BLANK)):
            yield from self._wait()
        blank, self._rest = self._rest[: len(self._rest) - len(start)], start
        return blank

    def _read_calls(self) -> Iterator[None]:
        """Read a call or a list of calls, and the marker after it."""
        is_list, closing = self._format.is_list, self._format.closing
        if is_list:
            self._raw.append((yield from self._skip_blank()))
            if self._rest[0] != "[":
                raise _NotACall
            self._raw.append("[")
            self._rest = self._rest[1:]
        while True:
            self._raw.append((yield from self._skip_blank()))
            if not re.match(_CALL_STARTS[self._format.syntax], self._rest):
                raise _NotACall
            if not (yield from self._read_call()):
                return
            if not is_list:
                break
            yield from self._skip_blank()
            if self._rest[0] not in ",]":
                return
            self._raw, self._rest = [self._rest[0]], self._rest[1:]
            if self._raw == ["]"]:
                break
        while len(start := self._rest.lstrip(_BLANK)) < len(closing) and closing.startswith(start):
            yield from self._wait()
        self._rest = start.removeprefix(closing)

    def _read_call(self) -> Generator[None, None, bool]:
        """Read one call. False: the rest of the answer is text, or the turn is over."""
        call = self._new_reader()
        while True:
            for at, char in enumerate(self._rest):
                was_ready = call.name is not None
                if not call.read(char) or (call.name is None and len(self._raw) > MAX_HEAD_CHARS):
                    self._rest = self._rest[at:]
                    if not was_ready:
                        raise _NotACall
                    self._end_call(call)  # it was returned already
                    return False
                if call.name is None:
                    self._raw.append(char)
                elif not was_ready:
                    self._start_call(call)
                if call.is_over:
                    self._rest = self._rest[at + 1 :]
                    self._end_call(call)
                    return not self.is_over
            self._rest = ""
            self._grow_call(call)
            yield from self._wait()

    def _start_call(self, call: CallReader) -> None:
        self._raw, self._blank, self._is_at_start = [], "", False
        self._arguments = ""
        self._is_held = self._last is not None and self._last[0] == call.name
        if not self._is_held:
            self._emit_start(call)

    def _emit_start(self, call: CallReader) -> None:
        assert call.name is not None
        self._is_held = False
        self._pieces.append(CallStart(self._num_calls, new_call_id(), call.name))

    def _grow_call(self, call: CallReader) -> None:
        if call.name is None or not (text := call.take()):
            return
        self._arguments += text
        if self._is_held:
            assert self._last is not None
            if self._last[1].startswith(self._arguments):
                return
            self._emit_start(call)
            text = self._arguments
        self._pieces.append(CallArguments(self._num_calls, text))

    def _end_call(self, call: CallReader) -> None:
        self._grow_call(call)
        this = call.name or "", self._arguments
        if self._is_held and this == self._last:
            self.is_over = True
            return
        if self._is_held:  # its JSON is cut off, so it does not repeat the previous call
            self._emit_start(call)
            self._pieces.append(CallArguments(self._num_calls, self._arguments))
        self._last = this
        self._num_calls += 1
        self._is_after_call = True

    def _give_up(self) -> None:
        """Treat the text as no call: return its opening or first bracket as text, and parse the rest again."""
        (first, *others), self._raw = self._raw, []
        self._rest = "".join(others) + self._rest
        if not first.strip(_BLANK):
            first, self._rest = first + self._rest[:1], self._rest[1:]
        self._emit_text(first)

    def _emit_text(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip(_BLANK)
        stripped = text.rstrip(_BLANK)
        if not stripped:
            self._blank += text
            return
        self._add_words(self._blank + stripped)
        self._last = None
        self._blank = text[len(stripped) :]
        self._is_at_start = self._is_after_call = False

    def _add_words(self, text: str) -> None:
        """Add text to the new pieces: to the last one, if that is text."""
        if self._pieces and isinstance(last := self._pieces[-1], Words):
            self._pieces[-1] = Words(last.text + text)
        else:
            self._pieces.append(Words(text))
