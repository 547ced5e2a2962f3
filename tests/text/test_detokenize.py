"""Incremental detokenization: only whole characters, and the same text as decode."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.stream import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_gguf, library_tokenizer, sentencepiece_gguf

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
    assert detokenizer.push_each(ids) == ["", "é", "", "", "", "🎉"]
    assert detokenizer.push(ids[2:4]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_an_invalid_character_does_not_delay_later_text() -> None:
    tokenizer = _tokenizer("prefix")
    half = tokenizer.token_to_id("<0xF0>")
    letter = tokenizer.token_to_id("a")
    assert half is not None
    assert letter is not None
    assert Detokenizer(tokenizer).push_each([half, letter]) == ["", "\ufffda"]


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokenizer = _tokenizer("bytes")
    ids = tokenizer.encode("a<|im_end|>b<think>")
    assert Detokenizer(tokenizer).push(ids) == "ab<think>"
    assert Detokenizer(tokenizer, skip_special=False).push(ids) == "a<|im_end|>b<think>"


def test_the_first_space() -> None:
    tokenizer = _tokenizer("prefix")
    ids = tokenizer.encode("hello world", add_special=False)
    assert Detokenizer(tokenizer).push_each([2, *ids]) == ["", "hello", " world"]
    assert Detokenizer(tokenizer, keep_prefix_space=True).push_each(ids) == [" hello", " world"]
    assert Detokenizer(_tokenizer("bare")).push(ids) == " hello world"
