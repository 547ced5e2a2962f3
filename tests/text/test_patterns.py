"""Translation of JSON Schema patterns, and what it omits."""

from __future__ import annotations

import pytest

from quire.text.patterns import MAX_NESTING, hold_pattern
from tests.schema_suite import allows, compiled, spellings

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
    (PASSWORD, ["Secret123", "aaaaaaA1"], ["secret123", "Secretttt", "S1"]),
]


def texts_allowed(pattern: str, texts: list[str]) -> list[str]:
    schema = {"type": "string", "allOf": [{"pattern": source} for source in hold_pattern(pattern).sources]}
    matcher = compiled(schema)
    return [text for text in texts if any(allows(matcher, one) for one in spellings(text))]


@pytest.mark.parametrize(("pattern", "right", "wrong"), EXACT, ids=[row[0] for row in EXACT])
def test_exact_patterns(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert hold_pattern(pattern).problem == ""
    assert texts_allowed(pattern, right + wrong) == right


@pytest.mark.parametrize(
    ("pattern", "problem", "right", "wrong"),
    [
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
    assert held.sources == ()
    assert held.problem


@pytest.mark.parametrize("pattern", [r"[\B]", r"[^\B]", r"[a-\B]", r"[\B-a]", r"^x[\w\B]$"])
def test_a_class_with_a_non_character_is_refused(pattern: str) -> None:
    held = hold_pattern(pattern)
    assert held.sources == ()
    assert held.problem == r"\B is not a character, so it cannot be in a class"


@pytest.mark.parametrize("pattern", [r"[a-\p{L}]", r"[\p{L}-a]", r"[\d-\B]", r"[\b-\d]", r"[a-\b]", r"[--\S]"])
def test_odd_ranges_are_enforced_or_reported(pattern: str) -> None:
    held = hold_pattern(pattern)
    if not held.problem:
        compiled({"type": "string", "pattern": held.sources[0]})
