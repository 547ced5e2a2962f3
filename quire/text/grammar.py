"""Constraints on an answer: JSON object, JSON schema, regular expression, grammar or token list.

`Grammar` is a plain value, validated at construction and sent to the worker, which computes the masks. Errors that only
a compiler can find, such as a regular expression that does not parse, are reported there before generation starts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    unenforced = tuple(one.path for one in held.unenforced)
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(held.schema), unenforced, given=schema_text(schema))


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
