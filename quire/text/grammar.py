"""Constraints on an answer: JSON object, JSON schema, regular expression, grammar or token list.

`Grammar` is a plain value, validated at construction and sent to the worker, which computes the masks. Errors that only
a compiler can find, such as a regular expression that does not parse, are reported there before generation starts.

Grammars in GBNF, llama.cpp's format, are translated into llguidance's dialect of Lark. XGrammar's EBNF is nearly the
same. GBNF describes characters; Lark describes lexemes, and the longest match wins. A rule-by-rule translation would
forbid answers that the grammar allows. Therefore a grammar without recursion becomes a single lexeme, which is a
regular expression; in a recursive grammar every lexeme is a single character. Both allow exactly what it allows.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, NamedTuple

from quire.core.values import check_tokens
from quire.errors import InvalidRequest
from quire.text.schemas import MAX_HELD_CHARS, check_mistakes, hold_schema

MAX_SOURCE_CHARS = MAX_HELD_CHARS
MAX_DEPTH = 32  # of a schema, braces and brackets
MAX_CHOICES = 4096
MAX_LISTED_TOKENS = 4096

# Generated JSON uses the separators of Python's json module. This excludes no value. Templates write earlier calls the
# same way (decisions/0026), and no tokens are spent on white space.
JSON_STYLE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/\"-]")


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # the source is a schema, as JSON; {"type": "object"} is OpenAI's json_object
    REGEX = "regex"  # the whole answer matches
    LARK = "lark"  # llguidance's dialect of Lark; may contain JSON schemas and special tokens
    TOKENS = "tokens"  # a JSON list of the token ids that the answer may contain


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    source: str
    unenforced: tuple[str, ...] = field(default=(), compare=False)  # paths of schema keywords that are not enforced
    given: str = field(default="", compare=False)  # the schema before it was rewritten; empty: the source

    def __post_init__(self) -> None:
        if self.kind not in list(GrammarKind):
            raise InvalidRequest(f"grammar: its kind {self.kind!r} is not one of {', '.join(GrammarKind)}")
        if not isinstance(self.source, str):
            raise InvalidRequest(f"grammar: source = {self.source!r:.80} is not text")
        _check_source(self.source, "after it was rewritten" if self.given else "")
        if self.kind == GrammarKind.JSON_SCHEMA:
            _check_schema(self.source)
        if self.kind == GrammarKind.REGEX and (len(self.source) - len(self.source.rstrip("\\"))) % 2:
            # The compiler would drop the backslash and enforce a different expression.
            raise InvalidRequest("grammar: the regular expression ends with a backslash that escapes nothing")


def json_schema_grammar(schema: Mapping[str, Any], *, strict: bool = True) -> Grammar:
    """JSON that matches the schema, without properties that it does not list.

    Keywords that cannot be enforced raise SchemaNotHeld if strict; otherwise they are listed in `unenforced`.
    """
    check_schema(schema)
    held = hold_schema(schema, strict=strict)
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(held.schema), held.unenforced, given=schema_text(schema))


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def regex_grammar(pattern: str) -> Grammar:
    """An answer that matches the expression from its first to its last character."""
    return Grammar(GrammarKind.REGEX, pattern)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """An answer that is exactly one of these strings."""
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(f"grammar: choices = {choices!r:.80} is not a list of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"grammar: {len(choices)} choices are more than {MAX_CHOICES}")
    return Grammar(GrammarKind.REGEX, "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices))


def lark_grammar(source: str) -> Grammar:
    return Grammar(GrammarKind.LARK, source)


def token_grammar(token_ids: Sequence[int]) -> Grammar:
    """An answer of these tokens only. It ends at a stop token among them or at max_tokens."""
    if not 1 <= len(token_ids) <= MAX_LISTED_TOKENS:
        raise InvalidRequest(f"grammar: {len(token_ids)} tokens are not 1 to {MAX_LISTED_TOKENS}")
    check_tokens("grammar", token_ids)
    return Grammar(GrammarKind.TOKENS, json.dumps(sorted(set(token_ids))))


def lark_json(schema: Mapping[str, Any]) -> str:
    """A rewritten schema as a term of a Lark grammar."""
    return f"%json {schema_text({**schema, 'x-guidance': json_style(schema)})}"


def json_style(schema: object) -> dict[str, Any]:
    """The compiler's options for JSON of this rewritten schema.

    If an object has named properties and may have others, \\uXXXX escapes are disabled. Otherwise the compiler would
    accept an escaped spelling of a listed name with the schema of unlisted ones.
    """
    return {**JSON_STYLE, "json_allowed_escapes": 'nrbtf\\"'} if _has_open_names(schema) else dict(JSON_STYLE)


def check_schema(schema: object) -> None:
    """Raise InvalidRequest if the schema is not a JSON object, too large, nested too deeply or has a mistake."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"grammar: schema = {schema!r:.80} is not a JSON object")
    source = schema_text(schema)
    _check_source(source)
    _check_given(source)


@functools.lru_cache(maxsize=128)  # agents send the same tools with every request
def _check_given(source: str) -> None:
    schema = json.loads(source)
    if (depth := depth_of(schema)) > MAX_DEPTH:
        raise InvalidRequest(f"grammar: the schema is nested {depth} deep, more than {MAX_DEPTH}")
    check_mistakes(schema)


def lark_text(text: str) -> str:
    """A text as a term of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(regex: str) -> str:
    """A regular expression as a term of a Lark grammar."""
    pieces: list[str] = []
    is_escaped = False
    for char in regex:
        pieces.append("\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(pieces)}/"


def schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"grammar: the schema cannot be written as JSON: {error}") from None


def _check_source(source: str, when: str = "") -> None:
    if len(source) > MAX_SOURCE_CHARS:
        text = f"it has {len(source)} characters{when and f' {when}'}, more than {MAX_SOURCE_CHARS}"
        raise InvalidRequest(f"grammar: {text}")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        code = ord(source[error.start])
        raise InvalidRequest(f"grammar: there is a lone surrogate U+{code:04X} at character {error.start}") from None


def _has_open_names(schema: object) -> bool:
    if isinstance(schema, list):
        return any(_has_open_names(item) for item in schema)
    if not isinstance(schema, Mapping):
        return False
    has_names = bool(schema.get("properties") or schema.get("patternProperties"))
    if has_names and schema.get("additionalProperties") is not False:
        return True
    return any(_has_open_names(value) for key, value in schema.items() if key not in ("enum", "const"))


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"grammar: the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"grammar: schema = {source:.80} is not a JSON object")
    if (depth := depth_of(schema)) > 4 * MAX_DEPTH:  # rewriting may have increased the depth
        raise InvalidRequest(f"grammar: the schema is nested {depth} deep, more than {4 * MAX_DEPTH}")


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def depth_of(value: object) -> int:
    """Nesting depth, computed level by level so that it needs no stack."""
    depth, level = 0, [value]
    while level:
        children = [child for one in level if isinstance(one, dict) for child in one.values()]
        children += [child for one in level if isinstance(one, list) for child in one]
        depth += any(isinstance(one, dict | list) for one in level)
        level = children
    return depth


EXAMPLE = 'root ::= "yes" | "no"'
LARK_EXAMPLE = 'start: "yes" | "no"'
MAX_NESTED = 32  # parentheses
MAX_OPERATORS = 3  # after one item
MAX_REPEATED = 10_000
_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*\??start\b[^:=\n]*:", re.MULTILINE)
# Each alternative matches in exactly one way: ambiguity would cause exponential or polynomial backtracking.
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<chars>(?:[^\]\\\n]|\\.)*)\]
    | (?P<token><\[\d{1,10}\]>|<[^<>\[\]\s"\\]+>)
    | \{\s*(?:(?P<low>\d{1,9})\s*)?(?:(?P<comma>,)\s*)?(?:(?P<high>\d{1,9})\s*)?\}
    | (?P<sign>::=|[|()*+?.])
    | (?P<name>[A-Za-z_][\w-]*)""",
    re.VERBOSE,
)
_EXPECTED = {  # by the character where no token starts
    '"': "the string has no closing quote",
    "[": "the class has no closing bracket",
    "{": "expected a repetition count, as in {3}, {2,} or {2,5}",
    "<": "expected a token, as in <[17]> or <think>",
    "=": "expected ::= after the name of a rule; a look-ahead (= ...) is not supported",
    ":": "expected ::= after the name of a rule",
    "!": "! before a token is not supported: describe the characters that are allowed",
}
_CHAR = r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\?."
_CHARS = re.compile(_CHAR)
_RANGES = re.compile(rf"({_CHAR})(?:-({_CHAR}))?")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_PLAIN = frozenset("\\\"'[]-^/|.*+?(){}<>#$ ")  # characters that stand for themselves after a backslash
_LAST_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def is_gbnf(source: str) -> bool:
    """Whether a grammar is written in GBNF, by its `::=`."""
    return _RULE.search(source) is not None


def is_lark(source: str) -> bool:
    return _LARK_START.search(source) is not None


def written_grammar(source: str) -> Grammar:
    """Parses a grammar in GBNF (`name ::= ...`) or in Lark (`name: ...`)."""
    if is_gbnf(source):
        return lark_grammar(gbnf_to_lark(source))
    if not is_lark(source):
        raise InvalidRequest(f"grammar: neither Lark, as in {LARK_EXAMPLE}, nor GBNF, as in {EXAMPLE}")
    return lark_grammar(source)


def gbnf_to_lark(source: str) -> str:
    """Translate a grammar. Raises InvalidRequest with the line number and what was expected there."""
    if len(source) > MAX_SOURCE_CHARS:
        raise InvalidRequest(f"grammar: {len(source)} characters are more than {MAX_SOURCE_CHARS}")
    rules = _GbnfReader(source).rules()
    needs = {name: _references(body) for name, body in rules.items()}
    used, todo = {"root": None}, ["root"]  # the rules that can be reached, in the order in which they are found
    while todo:
        new = needs[todo.pop()]
        todo += [name for name in new if name not in used]
        used |= new
    is_lexeme = not any(isinstance(piece, str) and piece.startswith("<") for name in used for piece in rules[name])
    try:
        TopologicalSorter({name: needs[name] for name in used}).prepare()
    except CycleError:
        is_lexeme = False
    # Rules have upper case names as lexemes, else lower case ones, without dashes.
    names = {}
    for i, rule in enumerate(used):
        slug = re.sub(r"\W", "_", rule, flags=re.ASCII)
        names[rule] = f"T{i}_{slug.upper()}" if is_lexeme else f"r{i}_{slug.lower()}"
    lines = [f"{names[name]}: {_expression(rules[name], names, is_lexeme=is_lexeme)}" for name in used]
    return "\n".join(("%llguidance {}", f"start: {names['root']}", *lines))


class Literal(NamedTuple):
    text: str


class Reference(NamedTuple):
    name: str
    at: int  # its position


# The body of a rule is a list of pieces. Those that are texts are as in Lark: operators, brackets, classes, tokens.
Piece = str | Literal | Reference
Body = list[Piece]
ANY = "/(?s:.)/"


def _references(body: Body) -> dict[str, None]:
    return {piece.name: None for piece in body if isinstance(piece, Reference)}


def _expression(body: Body, names: Mapping[str, str], *, is_lexeme: bool) -> str:
    pieces: list[str] = []
    for piece in body:
        if isinstance(piece, Literal):
            parts = [piece.text] if is_lexeme or not piece.text else list(piece.text)
            terms = " ".join(json.dumps(part, ensure_ascii=False) for part in parts)
            pieces.append(terms if len(parts) == 1 else f"( {terms} )")
        else:
            pieces.append(names[piece.name] if isinstance(piece, Reference) else piece)
    return " ".join(pieces)


class _GbnfReader:
    """Translates token by token. A rule ends where the next one starts, so line breaks are allowed anywhere in it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[re.Match[str]] = []

    def rules(self) -> dict[str, Body]:
        """The body of each rule."""
        self._read_tokens()
        signs = [token["sign"] for token in self._tokens]
        starts = [i - 1 for i, sign in enumerate(signs) if sign == "::="]
        if starts[:1] != [0]:
            raise self._wrong(0, "expected a rule")
        rules: dict[str, Body] = {}
        for start, end in pairwise((*starts, len(self._tokens))):
            name = self._tokens[start]
            if not name["name"]:
                raise self._wrong(name.start(), "expected the name of a rule before ::=")
            if name[0] in rules:
                raise self._wrong(name.start(), f"rule {name[0]} is defined twice")
            rules[name[0]] = self._body(self._tokens[start + 2 : end])
        if "root" not in rules:
            raise InvalidRequest(f"grammar: there is no rule root, the start of a GBNF grammar, as in {EXAMPLE}")
        for piece in (piece for body in rules.values() for piece in body):
            if isinstance(piece, Reference) and piece.name not in rules:
                raise self._wrong(piece.at, f"there is no rule {piece.name}; literal text needs quotes")
        return rules

    def _read_tokens(self) -> None:
        at = 0
        while at < len(self._source):
            token = _TOKEN.match(self._source, at)
            if token is None:
                raise self._wrong(at, _EXPECTED.get(self._source[at], "expected text, a class, a group or a rule"))
            if token["blank"] is None:
                self._tokens.append(token)
            at = token.end()

    def _body(self, tokens: Sequence[re.Match[str]]) -> Body:
        body: Body = []
        opened: list[int] = []  # places of parentheses in the body
        item: int | None = None  # where the last item starts, to which an operator applies
        num_operators = 0
        for token in tokens:
            sign = token["sign"]
            if sign in ("*", "+", "?") or token[0][0] == "{":
                if item is None or num_operators == MAX_OPERATORS:
                    raise self._wrong(token.start(), f"{token[0]} repeats nothing")
                body[item:] = ["(", *body[item:], sign or self._bounds(token), ")"]
                num_operators += 1
                continue
            num_operators = 0
            if sign in ("|", ")") and item is None:
                body.append('""')
            if sign == ")":
                if not opened:
                    raise self._wrong(token.start(), ") closes nothing")
                item = opened.pop()
            elif sign == "(":
                if len(opened) == MAX_NESTED:
                    raise self._wrong(token.start(), f"parentheses are nested more than {MAX_NESTED} deep")
                opened.append(len(body))
                item = None
            else:
                item = None if sign == "|" else len(body)
            body.append(sign if sign and sign != "." else self._piece(token))
        if opened:
            raise self._wrong(tokens[-1].end(), f"{len(opened)} parentheses are not closed")
        return body if item is not None else [*body, '""']

    def _piece(self, token: re.Match[str]) -> Piece:
        if token["name"]:
            return Reference(token[0], token.start())
        if token["text"] is not None:
            return Literal("".join(chr(self._code(char, token)) for char in _CHARS.findall(token["text"])))
        if token["chars"] is not None:
            return self._class(token)
        return ANY if token["sign"] else token[0]

    def _bounds(self, token: re.Match[str]) -> str:
        if not (token["low"] or token["high"]):
            raise self._wrong(token.start(), _EXPECTED["{"])
        low = int(token["low"] or 0)
        high = low if not token["comma"] else int(token["high"]) if token["high"] else None
        if max(low, high or 0) > MAX_REPEATED:
            raise self._wrong(token.start(), f"{token[0]} is more than {MAX_REPEATED} times")
        if high is not None and high < low:
            raise self._wrong(token.start(), f"{token[0]} has a maximum below its minimum")
        return f"{{{low},{'' if high is None else high}}}"

    def _class(self, token: re.Match[str]) -> str:
        chars = token["chars"].removeprefix("^")
        ranges: list[str] = []
        for first, last in _RANGES.findall(chars):
            low = self._code(first, token)
            high = self._code(last, token) if last else low
            if high < low:
                raise self._wrong(token.start(), f"the range {first!r} to {last!r} is empty")
            ranges.append(f"\\x{{{low:x}}}" + (f"-\\x{{{high:x}}}" if high > low else ""))
        if not token["chars"]:
            raise self._wrong(token.start(), "the class [] has no characters")
        return f"/[{'^' if chars != token['chars'] else ''}{''.join(ranges)}]/" if ranges else ANY

    def _code(self, char: str, token: re.Match[str]) -> int:
        """The code point of a character, which may be an escape."""
        if char[0] != "\\":
            return ord(char)
        if len(char) == 2 and char[1] not in _ESCAPED and char[1] not in _PLAIN:
            known = '\\n, \\r, \\t, \\\\, \\", \\], \\xNN, \\uNNNN or \\UNNNNNNNN'
            raise self._wrong(token.start(), f"{char} is not an escape: expected {known}")
        code = int(char[2:], 16) if len(char) > 2 else ord(_ESCAPED.get(char[1], char[1]))
        if code > _LAST_CODE or code in _SURROGATES:
            raise self._wrong(token.start(), f"{char} is not a character")
        return code

    def _wrong(self, at: int, what: str) -> InvalidRequest:
        found = self._source[at:].split("\n", 1)[0][:20]
        line = self._source.count("\n", 0, at) + 1
        return InvalidRequest(f"grammar: line {line}: {what}, at {found!r}. A GBNF grammar looks like {EXAMPLE}")
