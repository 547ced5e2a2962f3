"""TextStream: tokens that belong to an answer, their text offsets, and when text is released."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.stream import TextDelta, TextStream, TokenText
from quire.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_gguf

_TOKENIZER = Tokenizer.from_gguf(byte_level_gguf())


def _letters(text: str) -> list[int]:
    ids = [_TOKENIZER.token_to_id(letter) for letter in text]
    return [token_id for token_id in ids if token_id is not None]


def test_the_token_that_completes_the_stop_is_the_last() -> None:
    stream = TextStream(_TOKENIZER, stops=["END"])
    first = stream.push(_letters("abE"))
    assert (first.text, first.num_tokens, first.stop) == ("ab", 3, None)
    last = stream.push(_letters("NDxyz"))
    assert (last.text, last.num_tokens, last.stop) == ("", 2, "END")
    assert [token.text for token in last.tokens] == ["N", "D"]
    assert (stream.num_tokens, stream.stop) == (5, "END")
    assert stream.push(_letters("more")) == TextDelta("", 0)  # in flight when the stop was found
    assert stream.finish() == TextDelta("", 0)


def test_held_text_is_released_at_the_end() -> None:
    stream = TextStream(_TOKENIZER, stops=["END"])
    assert stream.push(_letters("aEN")).text == "a"
    assert stream.finish() == TextDelta("EN", 0)


def test_an_incomplete_character_at_the_end() -> None:
    party = _TOKENIZER.encode("\U0001f9ff")
    stream = TextStream(_TOKENIZER)
    assert stream.push(party[:-1]).text == ""
    assert stream.finish().text == "\ufffd"
    stream = TextStream(_TOKENIZER, stops=["\ufffd"])
    stream.push(party[:-1])
    assert stream.finish() == TextDelta("", 0, "\ufffd")


def test_the_stop_can_be_part_of_the_answer() -> None:
    stream = TextStream(_TOKENIZER, stops=["b"], include_stop=True)
    assert stream.push(_letters("abc")).text == "ab"


@given(
    st.text(alphabet="abcxyz é🎉<|im_end|>", max_size=40),
    st.lists(st.sampled_from(["xy", "🎉", "é<", "zz"]), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_tokens_account_for_the_text(text: str, stops: list[str]) -> None:
    stream = TextStream(_TOKENIZER, stops=stops)
    shown = ""
    tokens: list[TokenText] = []
    for token_id in _TOKENIZER.encode_plain(text):
        delta = stream.push([token_id])
        shown += delta.text
        tokens += delta.tokens
    shown += stream.finish().text
    assert len(tokens) == stream.num_tokens
    whole = "".join(token.text for token in tokens)
    assert whole.startswith(shown)
    assert all(whole[token.offset :].startswith(token.text) for token in tokens)
    if stream.stop is None:
        assert shown == text
    else:
        assert shown + stream.stop == text[: len(shown) + len(stream.stop)]
