"""What ends answers in JSON, on a vocabulary of single bytes and a few longer tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.json_form import MAX_DIGITS, EndingJson, EndingJsonInText, JsonTokens
from quire.text.grammar import bound_times

TOKENS = [*(bytes([byte]) for byte in range(256)), b"12", b"999", b"e999", b"E+12", b'"}', b"]]", b"7,"]
LONG = {name: 256 + place for place, name in enumerate(("12", "999", "e999", "E+12", '"}', "]]", "7,"))}
EVERYTHING = (1 << len(TOKENS)) - 1


class Fixed:
    """Allows what it is told."""

    def __init__(self, bits: Callable[[], int]) -> None:
        self._bits = bits
        self.family = self

    def mask(self) -> bytes:
        return self._bits().to_bytes(-(-len(TOKENS) // 8), "little")

    def consume(self, token: int) -> bool:
        return token < 0


def after(text: str, bits: int = EVERYTHING) -> set[int]:
    """The tokens that may follow a text, where so many are allowed."""
    matcher = EndingJson(Fixed(lambda: bits), JsonTokens(TOKENS))
    for byte in text.encode():
        matcher.consume(byte)
    mask = int.from_bytes(matcher.mask(), "little")
    return {token for token in range(len(TOKENS)) if mask >> token & 1}


def is_narrowed(text: str) -> bool:
    return not {*b'{}[]",:abc19'} <= after(text)


def test_ordinary_answers_are_left_alone() -> None:
    for text in ('{"a": 12345', '{"a": "' + "1" * 60, "[true, false, null", '{"name": "eee 1e', "[1.5e", '["\\\\", 7'):
        assert after(text) >= set(b'{}[]",:abc')
    assert LONG["e999"] not in after("")  # it would make any number infinite
    assert LONG["E+12"] in after("[1")


def test_numbers_have_so_many_digits() -> None:
    assert ord("1") in after("[" + "1" * (MAX_DIGITS - 1))
    assert not after("[" + "1" * MAX_DIGITS) & {*b"0123456789", LONG["12"]}
    assert not after("[0." + "1" * MAX_DIGITS) & {*b"0123456789"}
    assert ord("1") in after("[1" + ", 1" * MAX_DIGITS)


def test_no_number_is_infinite() -> None:
    assert LONG["12"] in after("[1e")
    assert LONG["999"] not in after("[1e")
    assert LONG["999"] not in after("[1E+")
    assert ord("5") in after("[1e-3")
    assert LONG["12"] not in after("[1e-3")
    assert not after("[1e30") & {*b"0123456789"}
    assert ord("0") in after("[1e30, 1")
    assert LONG["999"] in after('["1e')  # a string


def test_a_digit_is_allowed_where_nothing_else_is() -> None:
    assert after("[" + "1" * 60, 1 << ord("1")) == {ord("1")}


@pytest.mark.parametrize("piece", ["a", "12", "word ", ",000", "🎈"])
def test_a_string_in_a_rut_may_only_end(piece: str) -> None:
    assert not is_narrowed('["' + piece * 8)
    text = '["' + piece * (300 // len(piece.encode()))
    assert after(text) == {ord('"'), LONG['"}']}
    others = EVERYTHING & ~JsonTokens(TOKENS).quotes
    again = piece.encode()[0]
    assert set(range(256)) - after(text, others) == {
        ord('"'),
        again,
    }  # it may not go on like that
    assert after(text, 1 << again) == {again}  # but where it must


def test_an_array_in_a_rut_may_only_end() -> None:
    assert after("[" + "2, " * 60) == {ord("]"), ord("}"), LONG["]]"]}
    assert after('{"name": "node", "children": [' * 12) == {ord("]"), ord("}"), LONG["]]"]}


def test_where_it_cannot_be_closed_yet_nothing_leaps_over_the_place() -> None:
    numbers = 1 << ord("7") | 1 << ord("8") | 1 << LONG["7,"]
    assert after("[" + "7, " * 43, numbers) == {ord("7"), ord("8")}
    assert after("[" + "7, " * 60, numbers) == {ord("8")}  # a whole turn later there was no such place
    assert after("[" + "7, " * 60, 1 << LONG["7,"]) == {LONG["7,"]}
    inside = after("[" + '"a", ' * 30 + '"a')  # the array goes on and on, not this string
    assert inside >= {*b'"abc'}
    assert LONG["7,"] not in inside


def test_what_holds_itself_over_and_over_is_closed_all_the_way() -> None:
    brackets = {ord("]"), ord("}"), LONG["]]"]}
    matcher = EndingJson(Fixed(lambda: EVERYTHING), JsonTokens(TOKENS))
    for byte in ('{"a": 1, ' + '"children": [{' * 20).encode():
        matcher.mask()
        matcher.consume(byte)
    num_closed = 0
    while (mask := int.from_bytes(matcher.mask(), "little")) & 1 << ord("a") == 0:
        assert {token for token in range(len(TOKENS)) if mask >> token & 1} == brackets
        matcher.consume(b"}]"[num_closed % 2])
        num_closed += 1
    assert 256 // 14 * 2 - 2 <= num_closed <= 40


def test_json_in_text_begins_where_no_line_may_end() -> None:
    is_text = True
    matcher = EndingJsonInText(Fixed(lambda: EVERYTHING if is_text else EVERYTHING & ~(1 << 10)), JsonTokens(TOKENS))

    def feed(text: str) -> int:
        for byte in text.encode():
            matcher.mask()
            matcher.consume(byte)
        return int.from_bytes(matcher.mask(), "little")

    assert feed('She said "' + "ha " * 200 + "1" * 60 + "1e") == EVERYTHING
    is_text = False
    assert feed('{"a": "ha ha') == EVERYTHING & ~(1 << 10)
    assert feed("ha " * 60) == 1 << ord('"') | 1 << LONG['"}']
    is_text = True
    assert feed('"}') == EVERYTHING


def test_longer_tokens_that_go_on_in_a_rut_are_known() -> None:
    found = JsonTokens([b"a", b"ab", b"aba", b"abab", b"b", b"ba", b"abb", b""]).prefixes(b"ab")
    assert found == 0b1111


def test_what_is_not_the_same_over_and_over_is_no_rut() -> None:
    assert not is_narrowed('["' + "".join(f"word{i} " for i in range(99)))
    assert not is_narrowed('["' + "-" * 100)
    assert not is_narrowed('["' + "a" * 200 + "b")
    assert not is_narrowed('["' + ("x" * 60 + "y" * 10) * 9)  # a piece of seventy bytes


def test_the_name_in_an_address_ends_with_its_at() -> None:
    rut = '["' + "-12" * 60
    of_names = sum(1 << byte for byte in b"abc123-.@")
    assert after(rut, of_names) == {ord("@")}
    assert after(rut, of_names | 1 << ord('"')) == {ord('"')}
    assert after(rut, of_names | 1 << ord(" ")) >= set(b"abc@ ")  # a string that is not yet long enough
    assert after('["ann-12', of_names) == set(b"abc123-.@")


def test_an_escaped_quote_is_not_an_end() -> None:
    assert after('["' + '\\"' * 150) == {ord('"'), LONG['"}']}
    assert ord("n") in after('["' + '\\"' * 150 + "\\")


def test_only_what_is_a_time_is_bounded() -> None:
    kept = {"const": {"format": "time"}, "properties": {"format": {"type": "string"}}, "format": "date"}
    assert bound_times(kept) == kept
    assert bound_times({"anyOf": [{"format": "time", "maxLength": 9}, {"format": "date-time", "maxLength": 99}]}) == {
        "anyOf": [{"format": "time", "maxLength": 9}, {"format": "date-time", "maxLength": 35}]
    }
