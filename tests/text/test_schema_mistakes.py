"""Mistakes in schemas are refused with their path and value, strict or not; odd schemas that are valid are not."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.text.grammar import json_schema_grammar
from quire.text.messages import ChatRequest, Message, Part, Role, Tool

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
    ({"$ref": "#nowhere"}, '$ref = "#nowhere" is not in this schema'),
    ({"$id": "http://a/b", "$ref": "b#/x"}, '$ref = "b#/x" is not in this schema'),
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
    "an address that is too long": (
        {"$id": "http://a/" + "b/" * 100, "$ref": "#/$defs/a", "$defs": {"a": ADDRESS}},
        ("$ref",),
    ),
    "recursion with content": (
        {"type": "object", "properties": {"next": {"$ref": "#"}, "kids": {"items": {"$ref": "#"}}}},
        (),
    ),
    "a reference within a part with a URN": (
        {"$ref": "urn:a:b", "$defs": {"c": {"$id": "urn:a:b", "$defs": {"d": ADDRESS}, "$ref": "#/$defs/d"}}},
        (),
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
