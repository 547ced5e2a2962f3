"""Keywords of JSON Schema are enforced or reported, patterns are translated, mistakes are refused with their path."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import jsonschema_rs
import llguidance
import pytest

from quire.errors import InvalidRequest
from quire.text.grammar import json_schema_grammar
from quire.text.messages import ChatRequest, Message, Part, Role, Tool
from quire.text.patterns import MAX_NESTING, hold_pattern
from quire.text.schemas import (
    KEYWORDS,
    MAX_GROWTH_CHARS,
    MAX_HELD_CHARS,
    HeldSchema,
    SchemaNotHeld,
    hold_schema,
)
from tests.schema_suite import allows, compiled, spellings, without


class Row(NamedTuple):
    schema: dict[str, Any]
    right: Sequence[Any] = ()
    wrong: Sequence[Any] = ()
    named: tuple[str, ...] = ()  # the keywords that are not enforced


def obj(properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "object", **({} if properties is None else {"properties": properties}), **more}


def arr(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


INT, STR = {"type": "integer"}, {"type": "string"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
COLORS = {"enum": ["red", "green", "blue"]}
BIG = 2**53 + 1
TREE = {"$defs": {"node": obj({"kids": arr(items={"$ref": "#/$defs/node"})})}, "$ref": "#/$defs/node"}

ROWS: dict[str, Row] = {
    # types and values
    "type": Row(INT, [1, -7], [1.5, "1", None]),
    "types": Row({"type": ["string", "null"]}, ["a", None], [1, False]),
    "const": Row({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
    "a long const": Row({"const": "x" * 5000}, ["x" * 5000], ["x" * 4999]),
    "a large const": Row({"const": 2**62}, [2**62], [2**62 + 1]),
    "a const that readers round": Row({"const": BIG}, [BIG], [BIG - 1], ("const",)),
    "enum": Row(COLORS, ["red"], ["pink", 1]),
    "an enum of kinds": Row({"enum": [1, "1", True, None, []]}, [1, "1", True, None, []], [0, False, [1]]),
    # numbers
    "minimum": Row({"type": "number", "minimum": 5}, [5, 7.5], [4.9, -6]),
    "exclusive bounds": Row({**INT, "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [1, 2], [0, 3]),
    "exclusive bounds of draft 4": Row({**DRAFT_4, **INT, "minimum": 0, "exclusiveMinimum": True}, [1], [0]),
    "a bound beyond what is exact": Row({**INT, "minimum": BIG}, [BIG], [0], ("minimum",)),
    "multipleOf": Row({"type": "number", "multipleOf": 0.25}, [0.75, -2], [0.3]),
    "multipleOf of many digits": Row({**INT, "multipleOf": 99999999}, [99999999], [5], ("multipleOf",)),
    "multipleOf that rounding breaks": Row({"type": "number", "multipleOf": 0.07}, [0.14], [0.1], ("multipleOf",)),
    "multipleOf twice": Row({**INT, "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [12, 24], [4, 6, 8]),
    # strings
    "lengths": Row({**STR, "minLength": 2, "maxLength": 3}, ["ab", "äöü", "😀😀"], ["a", "abcd"]),
    "a length with a point": Row({**STR, "maxLength": 2.0}, ["ab"], ["abc"]),
    "pattern": Row({**STR, "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    "a pattern without quotes": Row({**STR, "pattern": '^[^"]+$'}, ["a\\b"], ['a"b']),
    "a pattern with look-aheads": Row(
        {**STR, "pattern": r"^(?=.*\d)(?=.*[a-z]).{3,5}$"}, ["ab1", "1a..."], ["a1", "a1...."], ("pattern",)
    ),
    "a pattern with a look-ahead": Row({**STR, "pattern": "^(?!a)[a-z]+$"}, ["ba"], ["ab", "7"], ("pattern",)),
    "a pattern with a word boundary": Row({**STR, "pattern": r"\bx\b"}, ["a x"], ["axb", "y"], ("pattern",)),
    "a date": Row({**STR, "format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-2-1"]),
    "a time": Row({**STR, "format": "time"}, ["12:30:00Z", "23:59:60Z"], ["12:30:60Z", "12:30"]),
    "a date-time": Row({**STR, "format": "date-time"}, ["2024-02-29T00:00:00+01:00"], ["2023-02-29T00:00:00Z"]),
    "e-mail": Row({**STR, "format": "email"}, ["a.b@c.org"], ["a.b", "@c.org", "a" * 65 + "@c.org"]),
    "a host": Row({**STR, "format": "hostname"}, ["a-b.example.com"], ["-a.com", "a_b", "a" * 64]),
    "a pointer": Row({**STR, "format": "json-pointer"}, ["", "/a/0"], ["a", "/~2"]),
    "an unknown format": Row({**STR, "format": "color"}, ["red"], [1], ("format",)),
    "a format of integers": Row({**INT, "format": "int32"}, [2**31 - 1], [2**31]),
    "a format of large integers": Row({**INT, "format": "int64"}, [2**31], [], ("format",)),
    "a format of another kind": Row({**INT, "format": "date"}, [1], ["2024-01-01"]),
    "two formats": Row({**STR, "format": "date", "pattern": "^2024"}, ["2024-01-01"], ["2023-01-01"]),
    # arrays
    "items": Row(arr(items=INT), [[], [1, 2]], [["a"], [1, None]]),
    "sizes": Row(arr(minItems=1, maxItems=2.0), [[1], [1, 2]], [[], [1, 2, 3]]),
    "prefixItems": Row(arr(prefixItems=[INT, STR], items=False), [[1, "a"], [1]], [["a"], [1, "a", 2]]),
    "items of draft 7": Row({**DRAFT_7, **arr(items=[INT], additionalItems=STR)}, [[1, "a"]], [["a"], [1, 2]]),
    "uniqueItems of an enum": Row(
        arr(items=COLORS, uniqueItems=True), [[], ["red", "blue"]], [["red", "red"]], ("uniqueItems",)
    ),
    "uniqueItems of one": Row(arr(maxItems=1, uniqueItems=True), [[1]], [[1, 1]]),
    "uniqueItems that is off": Row(arr(uniqueItems=False), [[1, 1]], []),
    "uniqueItems of anything": Row(arr(uniqueItems=True), [[1, 2]], [[1, 1]], ("uniqueItems",)),
    "contains in a short array": Row(
        arr(maxItems=3, contains={"const": 1}), [[1], [0, 0, 1]], [[], [0, 2]], ("contains",)
    ),
    "contains in a long array": Row(
        arr(contains={"const": 1}, minContains=1, maxContains=2), [[0, 1]], [[0]], ("contains",)
    ),
    "unevaluatedItems": Row(arr(prefixItems=[INT], unevaluatedItems=False), [[1]], [[1, 2]], ("unevaluatedItems",)),
    "unevaluatedItems beside others": Row(
        arr(allOf=[{"prefixItems": [INT]}], unevaluatedItems=False), [[1]], [[1, 2]], ("unevaluatedItems",)
    ),
    # objects
    "no properties": Row(obj(), [{}, {"any": [1]}], [[]]),
    "properties are all there are": Row(obj({"a": INT}), [{}, {"a": 1}], [{"a": "x"}]),
    "additionalProperties": Row(obj({"a": INT}, additionalProperties=STR), [{"a": 1, "b": "x"}], [{"a": 1, "b": 2}]),
    "required": Row(obj({"a": INT, "b": INT}, required=["b"]), [{"b": 1}, {"a": 1, "b": 2}], [{}, {"a": 1}]),
    "required and not listed": Row(obj({"a": INT}, required=["b"]), [{"a": 1, "b": None}], [{"a": 1}]),
    "patternProperties": Row(
        obj(patternProperties={"^n_": INT}, additionalProperties=False), [{"n_a": 1}], [{"n_a": "x"}, {"x": 1}]
    ),
    "patternProperties and properties": Row(
        obj({"n_a": {"maximum": 5}}, patternProperties={"^n_": INT}), [{"n_a": 5, "n_b": 9}], [{"n_a": 6}, {"n_b": "x"}]
    ),
    "patterns that overlap": Row(
        obj(patternProperties={"a": INT, "b": {"minimum": 5}}, additionalProperties=False),
        [{"a": 1, "b": 7}],
        [{"c": 1}],
        ("patternProperties",),
    ),
    "patterns that overlap and agree": Row(
        obj(patternProperties={"a": INT, "b": INT}, additionalProperties=False), [{"a": 1}], [{"b": "x"}, {"c": 1}]
    ),
    "a pattern of names that is none": Row(
        obj(patternProperties={r"\bx": INT}, additionalProperties=False),
        [{"x": 1}],
        [{"x": "a"}],
        (r"patternProperties.\bx", "additionalProperties"),
    ),
    "propertyNames by pattern": Row(
        obj(propertyNames={"pattern": "^[a-z]+$"}, additionalProperties=INT), [{"ab": 1}], [{"A": 1}, {"ab": "x"}]
    ),
    "propertyNames by length": Row(obj(propertyNames={"maxLength": 2}), [{"ab": 1}], [{"abc": 1}]),
    "propertyNames by enum": Row(obj(propertyNames=COLORS, additionalProperties=INT), [{"red": 1}], [{"pink": 1}]),
    "propertyNames beside properties": Row(
        obj({"A": INT}, propertyNames={"pattern": "^[a-z]$"}), [{}], [{"A": 1}], ("propertyNames",)
    ),
    "no names": Row(obj(propertyNames=False), [{}], [{"a": 1}]),
    "sizes of maps": Row(obj(minProperties=1, maxProperties=2), [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    "at least one of the properties": Row(obj({"a": INT, "b": INT}, minProperties=1), [{"a": 1}, {"b": 1}], [{}]),
    "at most one of the properties": Row(
        obj({"a": INT, "b": INT, "c": INT}, maxProperties=1), [{}, {"c": 1}], [{"a": 1, "b": 1}]
    ),
    "sizes of half open objects": Row(
        obj({"a": INT}, minProperties=2, additionalProperties=True), [{"a": 1, "b": 1}], [{"a": 1}], ("minProperties",)
    ),
    "dependentRequired": Row(
        obj({"a": INT, "b": INT}, dependentRequired={"a": ["b"]}), [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]
    ),
    "dependentSchemas": Row(
        obj({"a": INT, "b": {}}, dependentSchemas={"a": {"properties": {"b": INT}, "required": ["b"]}}),
        [{"b": "x"}, {"a": 1, "b": 1}],
        [{"a": 1}, {"a": 1, "b": "x"}],
    ),
    "dependencies of draft 7": Row(obj({"a": INT, "b": INT}, dependencies={"a": ["b"]}), [{"b": 1}], [{"a": 1}]),
    "unevaluatedProperties": Row(
        obj({"a": INT}, allOf=[{"properties": {"b": INT}}], unevaluatedProperties=False),
        [{"a": 1, "b": 1}],
        [{"a": 1, "c": 1}],
        ("unevaluatedProperties",),
    ),
    "unevaluatedProperties alone": Row(obj({"a": INT}, unevaluatedProperties=False), [{"a": 1}], [{"b": 1}]),
    "unevaluatedProperties beside a condition": Row(
        obj({"a": INT}, **{"if": {"required": ["a"]}, "then": {"properties": {"b": {}}}}, unevaluatedProperties=False),
        [{"a": 1}],
        [{"a": "x"}],
        ("if", "unevaluatedProperties"),
    ),
    # schemas of the same value
    "allOf": Row({"allOf": [{"minimum": 1}, {"maximum": 3}, INT]}, [1, 3], [0, 4, "a"]),
    "allOf of objects": Row(
        {"allOf": [obj({"a": INT}, required=["a"]), obj({"b": INT})]}, [{"a": 1, "b": 2}], [{"b": 2}, {"a": "x"}]
    ),
    "anyOf": Row({"anyOf": [INT, {"const": "a"}]}, [1, "a"], ["b", None]),
    "anyOf beside properties": Row(
        obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]), [{"a": 1}, {"b": 1}], [{}]
    ),
    "anyOf that adds properties": Row(
        obj({"a": INT}, anyOf=[{"properties": {"b": INT}, "required": ["b"]}, {"properties": {"c": STR}}]),
        [{"a": 1, "b": 1}, {"a": 1, "c": "x"}],
        [{"a": 1, "c": 1}],
    ),
    "oneOf by type": Row({"oneOf": [INT, STR]}, [1, "a"], [None]),
    "oneOf by tag": Row(
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                "cat": obj({"kind": {"const": "cat"}, "x": INT}, required=["kind"]),
                "dog": obj({"kind": {"const": "dog"}, "x": STR}, required=["kind"]),
            },
        },
        [{"kind": "cat", "x": 1}, {"kind": "dog", "x": "a"}],
        [{"kind": "cat", "x": "a"}, {"x": 1}],
    ),
    "oneOf by many tags": Row(
        {"oneOf": [obj({"n": {"const": i}, "x": INT}, required=["n"]) for i in range(300)]},
        [{"n": 299, "x": 1}],
        [{"n": 300}, {"x": 1}],
    ),
    "oneOf of labelled values": Row({"oneOf": [{"const": i, "title": "T"} for i in range(500)]}, [499], [500]),
    "oneOf by names": Row(
        {"oneOf": [obj({"a": INT}, required=["a"]), obj({"b": INT}, required=["b"])]},
        [{"a": 1}],
        [{}, {"a": "x"}],
        ("oneOf",),
    ),
    "oneOf by ranges": Row({"oneOf": [{**INT, "maximum": 0}, {**INT, "minimum": 1}]}, [0, 1], ["a"], ("oneOf",)),
    "oneOf that has an opposite": Row(
        obj({"a": INT, "b": INT}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}],
        [{}, {"a": 1, "b": 1}],
        ("oneOf",),
    ),
    "oneOf that overlaps": Row(
        {"oneOf": [{**STR, "pattern": "a"}, {**STR, "pattern": "b"}]}, ["a"], ["ab", "c"], ("oneOf",)
    ),
    "not a type": Row({"not": {"type": ["string", "null"]}}, [1, []], ["a", None], ("not",)),
    "not an integer": Row({"not": INT}, ["a"], [1], ("not",)),
    "not these names": Row(
        {**obj({"a": INT, "b": INT}), "not": {"required": ["a", "b"]}},
        [{"a": 1}, {}],
        [{"a": 1, "b": 1}],
        ("not",),
    ),
    "if, then and else": Row(
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 5}},
        ["ab", 5],
        ["a", 4],
        ("if",),
    ),
    "if by a tag": Row(
        obj(
            {"kind": {"enum": ["a", "b"]}, "x": {}},
            required=["kind", "x"],
            **{"if": {"properties": {"kind": {"const": "a"}}}, "then": {"properties": {"x": INT}}},
        ),
        [{"kind": "a", "x": 1}, {"kind": "b", "x": "s"}],
        [{"kind": "a", "x": "s"}],
        ("if",),
    ),
    # references
    "a definition": Row({"$ref": "#/$defs/a", "$defs": {"a": INT}}, [1], ["a"]),
    "a definition of draft 7": Row({**obj({"x": {"$ref": "#/definitions/a"}}), "definitions": {"a": INT}}, [{"x": 1}]),
    "a reference with siblings": Row({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": INT}}, [3], [4, "a"]),
    "a tree": Row(TREE, [{}, {"kids": [{"kids": []}]}], [{"kids": [1]}]),
    "the root": Row(obj({"next": {"$ref": "#"}}), [{"next": {"next": {}}}], [{"next": 1}]),
    "an anchor": Row({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INT}}}, [1], [], ("$ref",)),
    "an id": Row({"$id": "http://a.b/c", "$ref": "d", "$defs": {"d": {"$id": "d", **INT}}}, [1], [], ("$ref",)),
    "a pointer below the id of the root": Row({"$id": "x", "$ref": "#/$defs/d", "$defs": {"d": INT}}, [1], ["a"]),
    "a pointer with escapes": Row({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INT}}, [1], ["a"]),
    "a remote reference": Row(obj({"a": {"$ref": "https://x.org/s"}}), [{"a": 1}], [[]], ("properties.a.$ref",)),
    "a dynamic reference": Row({"$dynamicRef": "#x"}, [1], [], ("$dynamicRef",)),
    "a problem in a definition": Row(
        {**arr(items={"$ref": "#/$defs/a"}), "$defs": {"a": {**STR, "format": "x"}}},
        [["a"]],
        [[1]],
        ("$defs.a.format",),
    ),
    # annotations
    "annotations": Row({"title": "T", "default": 1, "examples": [2], "x-other": {"not": {}}, **INT}, [1], ["a"]),
    "a property named like a keyword": Row(obj({"not": INT, "$ref": STR}), [{"not": 1, "$ref": "a"}], [{"not": "a"}]),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_keyword_is_enforced_or_reported(row: Row) -> None:
    grammar = json_schema_grammar(row.schema, strict=False)
    assert grammar.unenforced == row.named
    matcher = compiled(json.loads(grammar.source))
    rest = without(row.schema, row.named)
    for value in row.right:
        assert any(allows(matcher, text) for text in spellings(value)), f"{value} is not allowed"
    for value in row.wrong:
        is_allowed = any(allows(matcher, text) for text in spellings(value))
        assert not is_allowed or (row.named and jsonschema_rs.is_valid(rest, value)), f"{value} is allowed"


def test_every_keyword_of_the_table_has_a_row() -> None:
    used = {keyword for row in ROWS.values() for keyword in re.findall(r"'([$A-Za-z]+)': ", str(row.schema))}
    assert KEYWORDS.keys() - used == {"$recursiveRef"}


NOT_PASSED_ON = [keyword for keyword, row in KEYWORDS.items() if isinstance(row.hold, str)]


@pytest.mark.parametrize("keyword", [*NOT_PASSED_ON, "if", "uniqueItems", "propertyNames", "dependentRequired"])
def test_the_compiler_refuses_what_the_table_does_not_pass_on(keyword: str) -> None:
    """If this fails after an update, llguidance enforces the keyword: pass it on."""
    with pytest.raises(ValueError, match="Unimplemented keys"):
        compiled({keyword: True})


def written(matcher: llguidance.LLMatcher, rng: random.Random) -> str | None:
    """A random text that the grammar allows. None: it did not end, or ends with an incomplete character."""
    state = matcher.deep_copy()
    text = bytearray()
    while len(text) < 200 and not state.is_stopped():
        mask = state.compute_bitmask()
        choices = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not choices or (state.is_accepting() and rng.random() < 0.4):
            break
        weights = [20 if byte in b'"}],0123456789' else 6 if 32 <= byte < 127 else 1 for byte in choices]
        text += bytes(rng.choices(choices, weights))
        state.consume_token(text[-1])
    try:
        return text.decode() if state.is_accepting() or state.is_stopped() else None
    except UnicodeDecodeError:
        return None


# Two are excluded: one is not a schema of any draft, the other forbids more without its patterns than with them.
JUDGED = [row for name, row in ROWS.items() if name != "patterns that overlap"]


@pytest.mark.parametrize("row", JUDGED)
def test_generated_texts_match_every_enforced_keyword(row: Row) -> None:
    matcher = compiled(hold_schema(row.schema).schema)
    judge = jsonschema_rs.validator_for(without(row.schema, row.named), validate_formats=True)
    for seed in range(6):
        text = written(matcher, random.Random(seed))
        if text is not None and not re.search(r"[eE][+-]?\d{4}", text):  # numbers that Python can parse
            assert judge.is_valid(json.loads(text, parse_float=Decimal)), text


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.named])
def test_strict_refuses_the_keyword_by_name(row: Row) -> None:
    with pytest.raises(SchemaNotHeld) as caught:
        hold_schema(row.schema, strict=True)
    assert caught.value.path == row.named[0]
    assert "lenient" not in str(caught.value)
    assert "coerce" not in str(caught.value)


CLOSED = {"type": "object", "properties": {"a": INT}}
NAMES: list[tuple[dict[str, Any], bool]] = [
    (CLOSED, False),
    ({"type": "object"}, True),
    ({"type": "object", "required": ["a"]}, True),
    ({**CLOSED, "additionalProperties": True}, True),
    ({**CLOSED, "patternProperties": {"^other$": INT}}, True),
    ({**CLOSED, "patternProperties": {"^x": INT}}, False),
    ({"allOf": [CLOSED, {"properties": {"other": {}}}]}, True),
    ({"allOf": [CLOSED, {"properties": {"b": {}}}]}, True),
    ({"allOf": [CLOSED]}, False),
    ({"$ref": "#/$defs/c", "properties": {"other": INT}, "$defs": {"c": CLOSED}}, True),
    ({"$ref": "#/$defs/c", "properties": {"b": INT}, "$defs": {"c": CLOSED}}, True),
    ({"$ref": "#/$defs/c", "type": "object", "$defs": {"c": CLOSED}}, False),
    ({"anyOf": [CLOSED, {"type": "string"}]}, False),
    ({"anyOf": [CLOSED, {"type": "object"}]}, True),
    ({**CLOSED, "anyOf": [{"required": ["a"]}]}, False),
    ({**CLOSED, "anyOf": [{"properties": {"other": INT}}, {"properties": {"b": INT}}]}, True),
    ({**CLOSED, "anyOf": [{"properties": {"a": {"minimum": 1}}}, {"required": ["a"]}]}, False),
    ({**CLOSED, "if": {"required": ["a"]}, "then": {"properties": {"other": {}}}}, True),
    ({**CLOSED, "required": ["other"]}, True),
    ({**CLOSED, "minProperties": 2}, True),
    ({**CLOSED, "not": {"properties": {"other": INT}, "required": ["other"]}}, False),
    ({"allOf": [{"allOf": [CLOSED]}, {"additionalProperties": INT}]}, True),
]


@pytest.mark.parametrize(("schema", "is_open"), NAMES)
def test_names_that_are_not_listed(schema: dict[str, Any], is_open: bool) -> None:
    """`other` is an invented name unless a schema of the value allows it."""
    matcher = compiled(hold_schema(schema).schema)
    assert any(allows(matcher, text) for text in spellings({"a": 1, "other": 2})) is is_open


def test_objects_described_in_two_places_are_not_closed_against_each_other() -> None:
    first = {"properties": {"x": {"properties": {"a": INT}, "required": ["a"]}}}
    second = {"properties": {"x": {"properties": {"b": INT}, "required": ["b"]}}}
    matcher = compiled(hold_schema({"allOf": [first, second]}).schema)
    assert allows(matcher, '{"x": {"a": 1, "b": 2}}')
    assert not allows(matcher, '{"x": {"a": 1}}')


def test_a_listed_name_cannot_be_written_as_another() -> None:
    schema = {"properties": {"a": INT}, "additionalProperties": STR, "type": "object"}
    matcher = compiled(hold_schema(schema).schema)
    assert allows(matcher, '{"a": 1, "b": "x"}')
    assert not allows(matcher, '{"\\u0061": "x"}')


def defined(number: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/d{number}"}


def nested(depth: int, around: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    return around(nested(depth - 1, around)) if depth else STR


HOSTILE: dict[str, dict[str, Any]] = {
    "a chain": {"$defs": {f"d{i}": {"items": defined(i + 1)} for i in range(1200)}, **defined(0)},
    "doublings": {"$defs": {f"d{i}": {"allOf": [defined(i + 1)] * 2} for i in range(60)}, **defined(0)},
    "exclusions": {**defined(0), "$defs": {f"d{i}": {"oneOf": [defined(i + 1)] * 9} for i in range(30)}},
    "branches": {
        "properties": {f"p{i}": {} for i in range(1000)},
        "anyOf": [{"properties": {f"q{i}": {}}} for i in range(1000)],
    },
    "itself": {"not": {"$ref": "#"}, "if": {"$ref": "#"}, "then": False},
    "names in names": nested(
        8, lambda inner: obj(propertyNames={"enum": [f"n{i}" for i in range(20)]}, additionalProperties=inner)
    ),
    "formats": obj({f"a{i}": {"format": "hostname"} for i in range(800)}),
    "formats and conditions": obj(
        {f"a{i}": {"if": {"format": "hostname"}, "then": {"format": "date-time"}} for i in range(300)}
    ),
    "patterns": obj({f"a{i}": {"pattern": r"\s\S" * 30} for i in range(200)}),
    "objects": obj({f"a{i}": obj({}) for i in range(1200)}),
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_hostile_schemas_cost_little(schema: dict[str, Any]) -> None:
    """Work without bound is given up and reported. The limits are steps and sizes, not seconds."""
    held = hold_schema(schema)
    num_given, num_held = len(json.dumps(schema)), len(json.dumps(held.schema))
    assert num_held <= min(MAX_HELD_CHARS, num_given + MAX_GROWTH_CHARS + 8_000)  # 8,000 for names and references


def test_a_schema_that_is_too_large_is_reported_as_a_whole() -> None:
    assert list(hold_schema({"type": "array", **HOSTILE["a chain"]}).unenforced) == ["$"]
    assert hold_schema({"type": "array", **HOSTILE["a chain"]}).schema == {"type": "array"}


# Schemas whose work grows with a product of their parts. What takes too many steps is reported.
USERS = {f"a{i}": {"$ref": "#/$defs/A", "type": "object"} for i in range(800)}
MANY_NAMES: dict[str, Any] = {f"n{i}": {} for i in range(2500)}
PRODUCTS: dict[str, tuple[dict[str, Any], str]] = {
    "users of many schemas": ({"$defs": {"A": {"allOf": [{}] * 4000}}, "properties": USERS}, ""),
    "users of schemas with names": (
        {"$defs": {"A": {"allOf": [{"required": ["x"]}] * 2000}}, "properties": USERS},
        "",
    ),
    "users of many names": (
        {"$defs": {"A": obj(MANY_NAMES)}, "properties": USERS},
        "",
    ),
    "pairs of schemas": ({"oneOf": [{"allOf": [{}] * 2000}, {"allOf": [{}] * 2000}]}, "oneOf"),
    "pairs with many values": ({"oneOf": [{"allOf": [{}] * 2000}, {"enum": [*range(8000)]}]}, "oneOf"),
    "pairs of lists of values": ({"oneOf": [{"enum": [i + j / 128 for j in range(80)]} for i in range(90)]}, "oneOf"),
    "pairs of patterns": (
        obj(patternProperties={f"^{chr(0x4E00 + i)}": True for i in range(4900)}),
        "patternProperties",
    ),
    "circles": (
        {
            "$defs": {f"d{i}": {"anyOf": [defined((i + 1) % 90), defined((i + 7) % 90)]} for i in range(90)},
            "properties": {f"a{i}": {**defined(i), "type": "object"} for i in range(90)},
        },
        "",
    ),
}


class TooManyCalls(Exception):
    pass


def with_few_calls(work: Callable[[], HeldSchema], at_most: int = 1_000_000) -> HeldSchema:
    """Fail if the work makes more function calls than this. Unlike time, calls do not depend on the machine."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")
        if num_calls > at_most:
            raise TooManyCalls

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(("schema", "named"), PRODUCTS.values(), ids=PRODUCTS)
def test_the_work_for_a_schema_is_bounded(schema: dict[str, Any], named: str) -> None:
    source = json.dumps(schema)
    schema = json.loads(source)  # every part is a separate object
    held = with_few_calls(lambda: hold_schema(schema))
    paths = list(held.unenforced)
    if paths == ["$"]:  # given up as a whole, after equally little work
        assert len(source) > MAX_HELD_CHARS
        return
    assert not named or named in paths
    if named:
        with pytest.raises(SchemaNotHeld):
            hold_schema(schema, strict=True)


@pytest.mark.parametrize("name", ["$id", "id"])
def test_references_below_an_id_do_not_resolve_to_the_outer_schema(name: str) -> None:
    inner = {name: "http://a/b", "$defs": {"d0": {"type": "string"}}, "properties": {"x": defined(0)}}
    held = hold_schema({"$defs": {"d0": {"type": "integer"}}, "properties": {"in": inner, "out": defined(0)}})
    assert list(held.unenforced) == ["properties.in.properties.x.$ref"]
    assert not allows(compiled(held.schema), '{"out": "a"}')


def test_a_pattern_with_an_invalid_class_is_reported() -> None:
    for pattern in (r"[\B]", r"[a-\B]"):
        held = hold_schema(obj({"a": {**STR, "pattern": pattern}}))
        assert list(held.unenforced) == ["properties.a.pattern"]
        assert "pattern" not in held.schema["properties"]["a"]
        with pytest.raises(SchemaNotHeld, match=r"properties\.a\.pattern cannot be enforced: \\B is not a character"):
            hold_schema(obj({"a": {**STR, "pattern": pattern}}), strict=True)


def test_ordinary_schemas_do_not_grow_too_large() -> None:
    for name in ("date-time", "hostname", "email"):
        held = hold_schema(obj({f"p{i}": {**STR, "format": name} for i in range(150)}))
        assert held.unenforced == ()
        assert len(json.dumps(held.schema)) < 15_000


def test_shared_formats_are_enforced() -> None:
    schema = obj({"a": {**STR, "format": "date"}, "b": {"format": "date"}, "c": {**STR, "format": "email"}})
    matcher = compiled(hold_schema(schema).schema)
    assert allows(matcher, '{"a": "2024-02-29", "b": "2023-02-28", "c": "a@b.de"}')
    assert allows(matcher, '{"b": 7}')
    assert not allows(matcher, '{"a": "2023-02-29"}')
    assert not allows(matcher, '{"b": "2023-02-29"}')
    assert not allows(matcher, '{"c": "a@' + "b" * 64 + '.de"}')


TYPES = "is not one of null, boolean, integer, number, string, array, object"
ADDRESS = {"type": "object", "properties": {"city": {"type": "string"}}}

MISTAKES: list[tuple[dict[str, Any], str]] = [
    # types and values
    ({"type": "text"}, f'type = "text" {TYPES}'),
    ({"type": "any"}, f'type = "any" {TYPES}'),
    ({"type": ["string", "date"]}, f'type = ["string", "date"] {TYPES}'),
    ({"type": []}, f"type = [] {TYPES}"),
    ({"type": {"enum": ["string"]}}, f'type = {{"enum": ["string"]}} {TYPES}'),
    ({"enum": []}, "enum = [] is not a list of one or more values"),
    ({"enum": "red"}, 'enum = "red" is not a list of one or more values'),
    # numbers and sizes
    ({"minimum": "5"}, 'minimum = "5" is not a number'),
    ({"maximum": True}, "maximum = true is not a number"),
    ({"exclusiveMinimum": "0"}, 'exclusiveMinimum = "0" is not a number'),
    ({"multipleOf": 0}, "multipleOf = 0 is not a number above 0"),
    ({"type": "string", "minLength": -1}, "minLength = -1 is not a non-negative integer"),
    ({"type": "string", "maxLength": 2.5}, "maxLength = 2.5 is not a non-negative integer"),
    ({"type": "array", "maxItems": True}, "maxItems = true is not a non-negative integer"),
    ({"minProperties": "1"}, 'minProperties = "1" is not a non-negative integer'),
    ({"uniqueItems": "yes"}, 'uniqueItems = "yes" is not true or false'),
    # patterns
    ({"pattern": 7}, "pattern = 7 is not a string"),
    ({"pattern": "(a"}, 'pattern = "(a" is not a regular expression: a group is not closed'),
    ({"pattern": "a)"}, 'pattern = "a)" is not a regular expression: a closing parenthesis has no opening one'),
    ({"pattern": "[a-"}, 'pattern = "[a-" is not a regular expression: a character class is not closed'),
    ({"pattern": "[z-a]"}, 'pattern = "[z-a]" is not a regular expression: a character range is not in order'),
    ({"pattern": "*a"}, 'pattern = "*a" is not a regular expression: * repeats nothing'),
    ({"pattern": "a**"}, 'pattern = "a**" is not a regular expression: a quantifier follows another'),
    ({"pattern": "a{3,1}"}, 'pattern = "a{3,1}" is not a regular expression: {3,1} is not a range'),
    ({"pattern": "a\\"}, r'pattern = "a\\" is not a regular expression: it ends with a backslash'),
    (
        {"patternProperties": {"(a": {}}},
        'patternProperties = {"(a": {}} has a name that is not a regular expression: a group is not closed',
    ),
    ({"format": 5}, "format = 5 is not a string"),
    # schemas in schemas
    ({"properties": []}, "properties = [] is not an object"),
    ({"properties": {"a": "string"}}, 'properties.a = "string" is not a schema'),
    ({"properties": {"a": None}}, "properties.a = null is not a schema"),
    ({"properties": {"a": ["string"]}}, 'properties.a = ["string"] is not a schema'),
    ({"patternProperties": {"a": ["string"]}}, 'patternProperties.a = ["string"] is not a schema'),
    ({"$defs": {"a": ["string"]}}, '$defs.a = ["string"] is not a schema'),
    ({"dependentSchemas": {"a": ["b"]}}, 'dependentSchemas.a = ["b"] is not a schema'),
    ({"properties": {"a": {"type": "str"}}}, f'properties.a.type = "str" {TYPES}'),
    (
        {"properties": {"a": {"type": "string", "required": True}}},
        "properties.a.required = true is not a list of names",
    ),
    ({"required": "a"}, 'required = "a" is not a list of names'),
    ({"required": ["a", 1]}, 'required = ["a", 1] is not a list of names'),
    ({"items": 7}, "items = 7 is not a schema"),
    ({"items": [{"type": "text"}]}, f'items[0].type = "text" {TYPES}'),
    ({"prefixItems": {}}, "prefixItems = {} is not a list"),
    ({"additionalProperties": "no"}, 'additionalProperties = "no" is not a schema'),
    ({"allOf": {}}, "allOf = {} is not a list"),
    ({"anyOf": []}, "anyOf = [] is not a list of one or more schemas"),
    ({"oneOf": [{}, {"minLength": "2"}]}, 'oneOf[1].minLength = "2" is not a non-negative integer'),
    ({"not": {"type": 1}}, f"not.type = 1 {TYPES}"),
    ({"if": {}, "then": {"type": "x"}}, f'then.type = "x" {TYPES}'),
    ({"$defs": []}, "$defs = [] is not an object"),
    ({"$defs": {"unused": {"type": "text"}}}, f'$defs.unused.type = "text" {TYPES}'),
    ({"dependentRequired": {"a": "b"}}, 'dependentRequired = {"a": "b"} is not an object of lists of names'),
    ({"dependencies": {"a": [1]}}, 'dependencies = {"a": [1]} is not an object of schemas or lists of names'),
    # references
    ({"$ref": 1}, "$ref = 1 is not a string"),
    ({"$ref": "#/$defs/b", "$defs": {}}, '$ref = "#/$defs/b" is not in this schema'),
    ({"properties": {"a": {"$ref": "#/definitions/A"}}}, 'properties.a.$ref = "#/definitions/A" is not in this schema'),
    ({"$ref": "#/anyOf/-1", "anyOf": [{}]}, '$ref = "#/anyOf/-1" is not in this schema'),
    ({"$ref": "#/anyOf/ 0", "anyOf": [{}]}, '$ref = "#/anyOf/ 0" is not in this schema'),
    ({"$id": "http://a/b", "$ref": "#/x"}, '$ref = "#/x" is not in this schema'),
    ({"$ref": "#/title", "title": "t"}, 'title = "t" is not a schema'),
    ({"$ref": "#"}, '$ref = "#" leads back to itself'),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        '$ref = "#/$defs/a" leads back to itself',
    ),
    ({"$ref": "#/components/a", "components": {"a": {"type": "text"}}}, f'components.a.type = "text" {TYPES}'),
    ({"enum": [["x" * 200]], "type": ["x" * 200]}, 'type = ["xxxxxxxxxx'),
]


@pytest.mark.parametrize(("schema", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
@pytest.mark.parametrize("strict", [False, True])
def test_a_mistake_is_refused_with_its_path_and_value(schema: dict[str, Any], message: str, strict: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        json_schema_grammar(schema, strict=strict)
    assert str(caught.value).startswith(f"grammar: {message}")
    assert len(str(caught.value)) < 300
    parameters = {"type": "object", "properties": {"x": schema}}
    if "$ref" not in str(schema):  # their pointers name the root
        with pytest.raises(InvalidRequest) as caught:
            chat(Tool("f", "", parameters, is_strict=strict))
        assert str(caught.value).startswith(f"tools[0].parameters.properties.x.{message}")


def chat(tool: Tool) -> ChatRequest:
    return ChatRequest((Message(Role.USER, (Part("Hi"),)),), tools=(tool,))


# What clients send, and what is valid but not enforced. Each with the keywords that are not enforced.
ODD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({}, ()),
    "an object without properties": ({"type": "object"}, ()),
    "annotations": ({"$schema": "http://json-schema.org/draft-07/schema#", "title": 1, "description": None}, ()),
    "an unknown keyword": ({"type": "string", "x-order": 1, "nullable": True, "example": "#/nowhere"}, ()),
    "an unknown format": ({"type": "string", "format": "color"}, ("format",)),
    "absent keywords as null": (
        {"type": "object", "properties": {"a": {"enum": None}}, "items": None, "not": None},
        (),
    ),
    "empty lists": ({"type": "object", "properties": {}, "required": [], "allOf": []}, ()),
    "a type twice": ({"type": ["string", "string"]}, ()),
    "draft 4": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ()),
    "a tuple of draft 7": ({"type": "array", "items": [{"type": "string"}], "additionalItems": False}, ()),
    "a property that is called $ref": ({"type": "object", "properties": {"$ref": {"type": "string"}}}, ()),
    "a property that is called type": ({"type": "object", "properties": {"type": {"enum": ["text"]}}}, ()),
    "values like schemas": ({"enum": [{"type": "text", "$ref": "#/x"}], "default": {"type": "text"}}, ()),
    "another document": ({"$ref": "https://example.com/a.json#/b"}, ("$ref",)),
    "another file": ({"$ref": "other.json"}, ("$ref",)),
    "a dynamic reference": ({"$dynamicRef": "#x"}, ("$dynamicRef",)),
    "an anchor of draft 7": ({"$ref": "#a", "definitions": {"a": {"$id": "#a", "type": "string"}}}, ("$ref",)),
    "ids of draft 4": ({"$ref": "#a", "definitions": {"a": {"id": "#a", "type": "string"}}}, ("$ref",)),
    "an anchor that does not exist": ({"$ref": "#nowhere"}, ("$ref",)),
    "recursion with content": (
        {"type": "object", "properties": {"next": {"$ref": "#"}, "kids": {"items": {"$ref": "#"}}}},
        (),
    ),
    "a reference within a part with a URN": (
        {"$ref": "#/$defs/c", "$defs": {"c": {"$id": "urn:a:b", "$defs": {"d": ADDRESS}, "$ref": "#/$defs/d"}}},
        ("$defs.c.$ref",),
    ),
    "a look-around": ({"type": "string", "pattern": "a(?!b)"}, ("pattern",)),
    "another dialect": ({"type": "string", "pattern": "(?i)^a++$"}, ("pattern",)),
    "a number beyond what is exact": ({"type": "integer", "maximum": 2**60}, ("maximum",)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_schemas_are_accepted(name: str) -> None:
    schema, unenforced = ODD[name]
    assert json_schema_grammar(schema, strict=False).unenforced == unenforced
    chat(Tool("f", "", {"properties": {}, **schema, "type": "object"}, is_strict=False))


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PASSWORD = r"^(?=.*[A-Z])(?=.*\d).{8,}$"

# pattern, texts that match, texts that do not
EXACT: list[tuple[str, list[str], list[str]]] = [
    ("", ["", "x"], []),
    ("bc", ["bc", "abcd"], ["b", "ac"]),
    ("^[a-z0-9-]{3,20}$", ["a-slug", "abc"], ["ab", "A-slug", "a" * 21]),
    ("^.$", ["a", '"', "\\"], ["\n", "\r", "\u2028", "ab"]),
    (r"^\S+$", ["ab", "\u0085"], ["a b", "\ufeff", "\u00a0"]),
    (r"^\d\D\w\W$", ["1a_-"], ["٣a_-", "1aé-"[:3] + "b"]),
    (r'^[^"]*$', ["", "a\\n\n"], ['"', 'a"b']),
    (r"^[^\\]+$", ["a", '"'], ["\\"]),
    (r'^(?:[^"\n]|\n)$', ["a", "\n"], ['"']),
    ("^[a&&b]$", ["a", "&"], ["c"]),
    ("^[[]$", ["["], ["a"]),
    (r"^[\w-.]$", ["a", "-", "."], [","]),
    (r"^[+-\d]$", ["+", "-", "7"], [","]),
    (r"^\u0041\x42\cJ\t$", ["AB\n\t"], ["AB"]),
    (r"^\uD83D\uDE00\u{1F600}$", ["😀😀"], ["😀"]),
    (r"^\p{Lu}\p{Script=Greek}[\p{L}'-]$", ["Éπ'", "Aπ-"], ["éπ'", "Aa'"]),
    (r"^[^\p{P}]$", ["a", "\n"], ['"', "\\", "-"]),
    ("(^a|b$)", ["ax", "xb"], ["xa", "bx"]),
    ("a|^b|c$", ["xa", "bx", "xc"], ["xb", "cx"]),
    ("^a{2,}?b*?$", ["aa", "aab"], ["a"]),
    ("^(?<year>[0-9]{4})-(?:0|1)$", ["2026-1"], ["2026-2"]),
    ("^{.*}$", ["{x}"], ["x"]),
    (r"^\/a\-b\.$", ["/a-b."], ["/a-bx"]),
    ("[^]", ["a", "\n"], [""]),
]


def texts_allowed(pattern: str, texts: list[str]) -> list[str]:
    schema = {"type": "string", "pattern": hold_pattern(pattern).source}
    matcher = compiled(schema)
    return [text for text in texts if any(allows(matcher, one) for one in spellings(text))]


@pytest.mark.parametrize(("pattern", "right", "wrong"), EXACT, ids=[row[0] for row in EXACT])
def test_exact_patterns(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert hold_pattern(pattern).problem == ""
    assert texts_allowed(pattern, right + wrong) == right


@pytest.mark.parametrize(
    ("pattern", "problem", "right", "wrong"),
    [
        (PASSWORD, "a look-around is not supported", ["Secret123", "secret123"], ["S1"]),
        (ZOD_EMAIL, "a look-around is not supported", ["a.b@c.org", ".a@c.org"], ["a@c", "a b@c.org"]),
        (r"\bfoo\b", "a word boundary is not supported", ["foo", "xfoox"], ["fo"]),
        (r"^(a|b)\1$", "a back-reference is not supported", ["aa", "ab"], ["ca"]),
        (r"^a(?=b).$", "a look-around is not supported", ["ab", "ac"], ["a"]),
        ("a^b", "^ in the middle is not supported", ["ab"], ["ba"]),
    ],
)
def test_omitted_assertions_are_reported(pattern: str, problem: str, right: list[str], wrong: list[str]) -> None:
    assert hold_pattern(pattern).problem == problem
    assert texts_allowed(pattern, right + wrong) == right


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "[a", "a**", "*a", "a{3,2}", "(?i)a", "(?>a)", r"\q", "\\", r"\p{Klingon}", "[b-a]", r"\u{110000}",
     "(?:a{200}){200}", "(" * (MAX_NESTING + 1), r"\xZ", "(?=a)*"],
)  # fmt: skip
def test_invalid_patterns_enforce_nothing(pattern: str) -> None:
    held = hold_pattern(pattern)
    assert held.source == ""
    assert held.problem


@pytest.mark.parametrize("pattern", [r"[\B]", r"[^\B]", r"[a-\B]", r"[\B-a]", r"^x[\w\B]$"])
def test_a_class_with_a_non_character_is_refused(pattern: str) -> None:
    held = hold_pattern(pattern)
    assert held.source == ""
    assert held.problem == r"\B is not a character, so it cannot be in a class"


@pytest.mark.parametrize("pattern", [r"[a-\p{L}]", r"[\p{L}-a]", r"[\d-\B]", r"[\b-\d]", r"[a-\b]", r"[--\S]"])
def test_odd_ranges_are_enforced_or_reported(pattern: str) -> None:
    held = hold_pattern(pattern)
    if not held.problem:
        compiled({"type": "string", "pattern": held.source})
