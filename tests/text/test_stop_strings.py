"""Stop strings in streamed text, compared with a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.text.stream import StopStrings

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
        assert len(matcher.held) == max(could_begin, default=0)


def test_an_example() -> None:
    matcher = StopStrings(["\n\nUser:", "END"])
    assert matcher.push("Hello.\n") == ("Hello.", None)
    assert matcher.push("\nUse") == ("", None)
    assert matcher.push("ful. E") == ("\n\nUseful. ", None)
    assert matcher.push("ND of it") == ("", "END")
    assert matcher.push("more") == ("", None)
    assert matcher.finish() == ""


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
