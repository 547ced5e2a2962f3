"""The text of an answer: characters, stop strings, offsets of tokens, and when text is released."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.text.tokenizer import Detokenizer, StopStrings, Tokenizer
from tests.text.vocabularies import byte_level_gguf, library_tokenizer, sentencepiece_gguf

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def _naive(text: str, stops: list[str]) -> tuple[str, str | None, str]:
    """The text before the stop, the stop, and the text with it: reading one character at a time."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop, text[:end]
    return text, None, text


@given(STOPS, st.lists(st.text(alphabet="abcd", max_size=6), max_size=12), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_any_chunking_equals_a_search(stops: list[str], chunks: list[str], include_stop: bool) -> None:
    before, expected, with_stop = _naive("".join(chunks), stops)
    goal = with_stop if include_stop else before
    matcher = StopStrings(stops, include_stop=include_stop)
    shown, found = "", None
    for chunk in chunks:
        match = matcher.push(chunk)
        shown += match.text
        assert goal.startswith(shown)  # no released text has to be retracted
        found = found or match.stop
    assert shown + matcher.finish() == goal
    assert found == expected


@given(STOPS, st.text(alphabet="abcd", max_size=20))
def test_only_possible_starts_are_held_back(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    if matcher.push(text).stop is None:
        could_begin = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert len(matcher._held) == max(could_begin, default=0)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["x"] * 17, "stop has 17 strings, more than 16"),
        (["ok", ""], r"stop\[1\] has 0 characters, not 1 to 256"),
        (["a" * 257], r"stop\[0\] has 257 characters"),
        (["\ud800"], r"stop\[0\] has a lone surrogate"),
        ([5], r"stop\[0\] is a int"),
        ("abc", "stop = 'abc' is a string"),
    ],
)
def test_limits(stops: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StopStrings(stops)


def test_the_longest_stops_in_a_long_text() -> None:
    stops = [letter * 255 + "!" for letter in "abcdefghijklmnop"]
    matcher = StopStrings(stops)
    shown = sum(len(matcher.push("a").text) for _ in range(20_000))
    assert shown == 20_000 - 255


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("🎉👩\u200d💻\u0301日本é \u2581"))
CUTS = st.lists(st.integers(1, 5), max_size=30)


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_gguf() if kind == "bytes" else sentencepiece_gguf(prefix=kind == "prefix"))


@functools.cache
def _library() -> Any:
    return library_tokenizer(byte_level_gguf())


def _chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in [*cuts, len(ids)]:
        chunks.append(ids[at : at + size])
        at += size
    return chunks


@given(TEXT, CUTS)
@settings(max_examples=300, deadline=None)
def test_joined_pushes_are_the_text(text: str, cuts: list[int]) -> None:
    tokenizer = _tokenizer("bytes")
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for chunk in _chunks(tokenizer.encode_plain(text), cuts):
        shown += detokenizer.push(chunk)
        assert text.startswith(shown)  # no incomplete character was returned
    assert shown == text
    assert detokenizer.finish() == ""


@given(st.sampled_from(["bytes", "prefix", "bare"]), st.lists(st.integers(0, 420)), CUTS, st.booleans())
@settings(max_examples=500, deadline=None)
def test_pushes_equal_decode(kind: str, ids: list[int], cuts: list[int], skip_special: bool) -> None:
    tokenizer = _tokenizer(kind)
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    shown = "".join(detokenizer.push(chunk) for chunk in _chunks(ids, cuts)) + detokenizer.finish()
    assert shown == tokenizer.decode(ids, skip_special=skip_special)


@given(st.lists(st.integers(3, 330)))
@settings(max_examples=300, deadline=None)
def test_decode_equals_the_library(ids: list[int]) -> None:
    assert _tokenizer("bytes").decode(ids) == _library().decode(ids, skip_special_tokens=True)


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = _tokenizer("prefix")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "é🎉".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push((token_id,)) for token_id in ids] == ["", "é", "", "", "", "🎉"]
    assert detokenizer.push(ids[2:4]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_an_invalid_character_does_not_delay_later_text() -> None:
    tokenizer = _tokenizer("prefix")
    half = tokenizer.token_to_id("<0xF0>")
    letter = tokenizer.token_to_id("a")
    assert half is not None
    assert letter is not None
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push((token_id,)) for token_id in (half, letter)] == ["", "\ufffda"]


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokenizer = _tokenizer("bytes")
    ids = tokenizer.encode("a<|im_end|>b<think>")
    assert Detokenizer(tokenizer).push(ids) == "ab<think>"
    assert Detokenizer(tokenizer, skip_special=False).push(ids) == "a<|im_end|>b<think>"


def test_the_first_space() -> None:
    tokenizer = _tokenizer("prefix")
    ids = tokenizer.encode("hello world", add_special=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push((token_id,)) for token_id in (2, *ids)] == ["", "hello", " world"]
    detokenizer = Detokenizer(tokenizer, keep_prefix_space=True)
    assert [detokenizer.push((token_id,)) for token_id in ids] == [" hello", " world"]
    assert Detokenizer(_tokenizer("bare")).push(ids) == " hello world"
