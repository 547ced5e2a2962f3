"""Excerpts of prompts: bounded, escaped, and cut at the right token."""

from __future__ import annotations

import pytest

from quire.core.cache import CacheExplanation, StopReason
from quire.text.tokenizer import MAX_CHARS, Excerpt, Tokenizer, excerpt_at, stopped_text


def excerpt(tokenizer: Tokenizer, before: str, after: str) -> Excerpt:
    head = tokenizer.encode(before, add_special=False)
    return excerpt_at(tokenizer, (*head, *tokenizer.encode(after, add_special=False)), len(head))


def test_short_prompts_are_quoted_whole(json_tokenizer: Tokenizer) -> None:
    assert excerpt(json_tokenizer, "Name three", " rivers.") == Excerpt("Name three", " rivers.")
    assert excerpt(json_tokenizer, "", "Hi") == Excerpt("", "Hi")


def test_long_prompts_are_cut_on_both_sides(json_tokenizer: Tokenizer) -> None:
    found = excerpt(json_tokenizer, "a" * 5000 + "x" * 40, "y" * 40 + "b" * 5000)
    assert found == Excerpt("…" + "x" * MAX_CHARS, "y" * MAX_CHARS + "…")


def test_control_characters_are_escaped(json_tokenizer: Tokenizer) -> None:
    found = excerpt(json_tokenizer, "one\ntwo\x1b[2J", "\u202ethree\t\x00")
    assert found == Excerpt("one\\ntwo\\x1b[2J", "\\u202ethree\\t\\x00")


@pytest.mark.parametrize("reason", StopReason)
def test_only_a_match_that_ended_in_the_prompt_has_a_text(json_tokenizer: Tokenizer, reason: StopReason) -> None:
    prompt = json_tokenizer.encode("Name three rivers.", add_special=False)
    found = stopped_text(json_tokenizer, prompt, CacheExplanation(4, 0, 4, reason))
    assert (found is None) == (reason in (StopReason.COMPLETE, StopReason.OFF))
