"""Excerpts of prompts: bounded, escaped, and cut at the right token."""

from __future__ import annotations

import json

import pytest

from quire.core.cache.prefix import CacheExplanation, StopReason
from quire.text.tokenizer import MAX_CHARS, Excerpt, Tokenizer, excerpt_at, stopped_text
from tests.text.vocabularies import byte_level_json


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {})


def excerpt(tokenizer: Tokenizer, before: str, after: str) -> Excerpt:
    head = tokenizer.encode(before, add_special=False)
    return excerpt_at(tokenizer, (*head, *tokenizer.encode(after, add_special=False)), len(head))


def test_short_prompts_are_quoted_whole(tokenizer: Tokenizer) -> None:
    assert excerpt(tokenizer, "Name three", " rivers.") == Excerpt("Name three", " rivers.")
    assert excerpt(tokenizer, "", "Hi") == Excerpt("", "Hi")


def test_long_prompts_are_cut_on_both_sides(tokenizer: Tokenizer) -> None:
    found = excerpt(tokenizer, "a" * 5000 + "x" * 40, "y" * 40 + "b" * 5000)
    assert found == Excerpt("…" + "x" * MAX_CHARS, "y" * MAX_CHARS + "…")


def test_control_characters_are_escaped(tokenizer: Tokenizer) -> None:
    found = excerpt(tokenizer, "one\ntwo\x1b[2J", "\u202ethree\t\x00")
    assert found == Excerpt("one\\ntwo\\x1b[2J", "\\u202ethree\\t\\x00")


@pytest.mark.parametrize("reason", StopReason)
def test_only_a_match_that_ended_in_the_prompt_has_a_text(tokenizer: Tokenizer, reason: StopReason) -> None:
    prompt = tokenizer.encode("Name three rivers.", add_special=False)
    found = stopped_text(tokenizer, prompt, CacheExplanation(4, 0, 4, reason))
    assert (found is None) == (reason in (StopReason.COMPLETE, StopReason.OFF))
