"""Validation of grammars before compilation."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.text.grammar import (
    MAX_DEPTH,
    MAX_SOURCE_CHARS,
    Grammar,
    GrammarKind,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    json_style,
    lark_json,
    lark_text,
    regex_grammar,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("xml", "a", "kind 'xml'"),
        (GrammarKind.REGEX, 5, "grammar: source = 5 is not text"),
        (GrammarKind.REGEX, "a" * (MAX_SOURCE_CHARS + 1), "grammar: it has 65537 characters, more than 65536"),
        (GrammarKind.REGEX, "a\ud800", "U+D800 at character 1"),
        (GrammarKind.REGEX, "a\\", "ends with a backslash"),
        (GrammarKind.REGEX, "a\\\\\\", "ends with a backslash"),
        (GrammarKind.JSON_SCHEMA, "{", "not JSON"),
        (GrammarKind.JSON_SCHEMA, '{"const": NaN}', "NaN is not JSON"),
        (GrammarKind.JSON_SCHEMA, "true", "schema = true is not a JSON object"),
        (GrammarKind.JSON_SCHEMA, "[" * 30000, "not JSON"),
    ],
)
def test_invalid_grammars_are_refused(kind: Any, source: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match="grammar") as caught:
        Grammar(kind, source)
    assert message in str(caught.value)


def test_deep_schemas_are_refused() -> None:
    json_schema_grammar(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="nested 33 deep, more than 32"):
        json_schema_grammar(nested(MAX_DEPTH + 1))
    with pytest.raises(InvalidRequest, match="nested 33 deep"):
        json_schema_grammar({"enum": [nested(MAX_DEPTH - 1)]})


@pytest.mark.parametrize("schema", [None, [], "object", {"const": float("nan")}, {"const": object()}])
def test_invalid_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="schema"):
        json_schema_grammar(schema)


@pytest.mark.parametrize("choices", [[], "yes", [1], ["a"] * 5000])
def test_invalid_choices_are_refused(choices: Any) -> None:
    with pytest.raises(InvalidRequest, match="choices"):
        choice_grammar(choices)


def test_unenforced_keywords_are_listed_and_not_compared() -> None:
    loose = json_schema_grammar({"type": "string", "format": "color"}, strict=False)
    assert loose.unenforced == ("format",)
    assert loose == json_schema_grammar({"type": "string"})
    with pytest.raises(InvalidRequest, match=r'^grammar: format cannot be enforced: "color" is not a format'):
        json_schema_grammar({"type": "string", "format": "color"})
    assert json_object_grammar() == json_schema_grammar({"type": "object"})
    assert regex_grammar("a") == Grammar(GrammarKind.REGEX, "a")


def test_choices_are_escaped() -> None:
    assert choice_grammar(["a.b", "c|d"]).source == r"a\.b|c\|d"


def test_objects_with_additional_names_disable_unicode_escapes() -> None:
    """The compiler would treat \\u0061 as a different name than the listed a."""
    opened = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert "json_allowed_escapes" in json_style(opened)
    assert "json_allowed_escapes" in json_style({"items": opened})
    assert "json_allowed_escapes" not in json_style({**opened, "additionalProperties": False})
    assert "json_allowed_escapes" not in json_style({"enum": [opened]})


def test_terms_of_lark() -> None:
    assert lark_text('say "é"\n') == '"say \\"é\\"\\n"'
    assert lark_json({"type": "string"}).startswith('%json {"type": "string", "x-guidance": {"whitespace_flexible"')
