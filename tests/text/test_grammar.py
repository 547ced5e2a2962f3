"""Validation of grammars before compilation, and GBNF: translations allow exactly what the grammar allows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine import grammars as grammars_module
from quire.engine.grammars import Grammars
from quire.errors import InvalidRequest
from quire.text.grammar import (
    MAX_DEPTH,
    MAX_SOURCE_CHARS,
    Grammar,
    GrammarKind,
    choice_grammar,
    gbnf_to_lark,
    is_gbnf,
    is_lark,
    json_object_grammar,
    json_schema_grammar,
    json_style,
    lark_grammar,
    lark_json,
    lark_text,
    regex_grammar,
)
from quire.text.tokenizer import Tokenizer


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


# In the style of llama.cpp's documentation: multi-line rules, comments, rule names with dashes.
JSON = r"""
# any JSON object
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value      # a comment "in between
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)?
  ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GREEDY = r"""
root ::= word-of-many "x" | "foo" | "foobar" [-+]?
word-of-many ::= [a-z]+ |
  [A-Z]{2,3}
"""
EXPRESSIONS = r"""
root ::= sum
sum ::= sum "+" product | product
product ::= [a-z]+ "a" | "(" sum ")"
"""
# grammar, texts it allows, texts it does not
TRANSLATED: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "y"]),
    ('root ::= ("a" | "b") . [^ab\\n] "\\u00e9\\U0001F642\\x41"?', ["a\ncé🙂A", "bb-"], ["aaa", "ab\n", "cab"]),
    ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["aab", "ba"]),  # equal numbers of both
    ('root ::= item{2} item{1,} | item{0,1} "!"\nitem ::= [0-9]', ["123", "1234", "1!", "!"], ["12", "12!"]),
    (JSON, ['{}', '{"a": [1, -2.5, true, "x\\u00e9é"]}', '{"a": {"b": null}\n  }'], ['{"a": }', "[]", '{"a": 01}']),
    # With longest-match lexemes the "x" or the end of "foo" would never be found.
    (GREEDY, ["ax", "xx", "xyzx", "ABx", "foo", "foobar", "foobar-"], ["x", "ABCDx", "foo-", "abc"]),
    (EXPRESSIONS, ["ba", "aa+(ca+aa)", "((xya))"], ["a", "ba+", "(ba"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return grammars_module.open_tokenizer(tiny_model, "auto")[0]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    yield made
    made.close()


def allows(grammars: Grammars, tokenizer: Tokenizer, source: str, text: str) -> bool:
    matcher = grammars.compile(lark_grammar(source)).matcher()
    for token in (*tokenizer.encode_plain(text), 2):
        mask = matcher.mask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.consume(token)
    return True


@pytest.mark.parametrize(("source", "good", "bad"), TRANSLATED, ids=range(len(TRANSLATED)))
def test_a_translation_allows_exactly_what_the_grammar_does(
    source: str, good: list[str], bad: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    lark = gbnf_to_lark(source)
    found = {text: allows(grammars, tokenizer, lark, text) for text in (*good, *bad)}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def test_tokens_are_named_as_in_lark() -> None:
    assert gbnf_to_lark("root ::= <[7]> <think> .*").splitlines()[-1] == "r0_root: <[7]> <think> ( /(?s:.)/ * )"


WRONG = [
    ('answer ::= "yes"', 'no rule root, the start of a GBNF grammar, as in root ::= "yes" | "no"'),
    ('root ::= "a"\n  b\n', "line 2: there is no rule b; literal text needs quotes"),
    ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
    ('root ::= "a', "line 1: the string has no closing quote, at '\"a'"),
    ("root ::= [a-z", "line 1: the class has no closing bracket, at '[a-z'"),
    ("root ::= []", "the class [] has no characters"),
    ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
    ('root ::= (\n"a"\n', "line 2: 1 parentheses are not closed"),
    ('root ::= "a" )', "line 1: ) closes nothing"),
    ('root ::= "a"{,}', "expected a repetition count, as in {3}, {2,} or {2,5}"),
    ('root ::= "a"{3,2}', "{3,2} has a maximum below its minimum"),
    ('root ::= "a"{20000}', "{20000} is more than 10000 times"),
    ('root ::= "\\q"', "\\q is not an escape: expected \\n"),
    ('root ::= "\\ud800"', "\\ud800 is not a character"),
    ("root ::= !<[3]>", "! before a token is not supported"),
    ('root ::= "a" (="b")', "expected ::= after the name of a rule; a look-ahead (= ...) is not supported, at"),
    ("root = x ::= y", "line 1: expected ::= after the name of a rule"),
    ("root ::= " + "(" * 200, "nested more than 32 deep"),
    ("root ::= | *", "line 1: * repeats nothing"),
    ("::= root", "line 1: expected a rule"),
    ('root ::= "a"' + "*" * 10_000, "line 1: * repeats nothing, at '*"),
    ("#" * (MAX_SOURCE_CHARS + 1), "65537 characters are more than 65536"),
]


@pytest.mark.parametrize(("source", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar") as error:
        gbnf_to_lark(source)
    assert message in str(error.value)


@given(
    st.lists(
        st.sampled_from(
            ["root", "::=", '"', "[", "]", "(", ")", "|", "*", "{", "2,", "}", "\\", "x", "^", "-", " ", "\n", "#", "<"]
        )
    )
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_translated_or_refused(parts: list[str]) -> None:
    with contextlib.suppress(InvalidRequest):
        gbnf_to_lark("".join(("root ::= ", *parts)))


def test_the_deepest_grammar_is_translated() -> None:
    deep = "root ::= " + '("a" | ' * 32 + '"b"' + ")?*+" * 32
    assert gbnf_to_lark(deep).count("+") == 32


def test_a_long_chain_of_rules_is_translated() -> None:
    rules = [f"r{i} ::= r{i + 1}" for i in range(4000)]
    assert gbnf_to_lark("\n".join(("root ::= r0", *rules, 'r4000 ::= "x"'))).endswith('"x"')


@pytest.mark.parametrize(
    ("source", "gbnf", "lark"),
    [
        ('root ::= "x"', True, False),
        ('\n  # a\n  my-rule  ::= "start: x"', True, False),
        ('start: "::="', False, True),
        ('%llguidance {}\n?start: x\nx: "y"', False, True),
        (json.dumps({"a": 1}), False, False),
    ],
)
def test_gbnf_and_lark_are_distinguished(source: str, gbnf: bool, lark: bool) -> None:
    assert (is_gbnf(source), is_lark(source)) == (gbnf, lark)


def test_pathological_grammars_take_linear_time() -> None:
    """A comment with ambiguous matches, many lines with `start`, a long number, many references."""
    with pytest.raises(InvalidRequest, match="closes nothing"):
        gbnf_to_lark("root ::= a " + "#" * 60_000 + "\n)")
    assert not is_lark("start\n" * 10_000)
    with pytest.raises(InvalidRequest, match=r"expected a repetition count, as in \{3\}"):
        gbnf_to_lark('root ::= "a"{' + "9" * 5_000 + "}")
    with pytest.raises(InvalidRequest, match=r"expected a repetition count"):
        gbnf_to_lark('root ::= "a"{' + " " * 60_000 + "x")
    with pytest.raises(InvalidRequest, match="line 15001: there is no rule b"):
        gbnf_to_lark("root ::= a\n" + "a\n" * 14_999 + "b\n" + 'a ::= "x"')
