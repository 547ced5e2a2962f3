"""Tests of the validation in `make structured`, on given answers."""

from __future__ import annotations

import pytest

from tests.structured import Verdict, judge_text, report

CUT = Verdict("cut", "length", "", "[0, 0, 0")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict("whole", "stop", "", "[]"), 0),
        (CUT, 0),
        (Verdict("wrong", "stop", '"x" is not of type "array"', '"x"'), 1),
        (Verdict("cut early", "length", "cut after 7 tokens", "[0, 0"), 1),
        (Verdict("failed", "error", "grammar: too complex", ""), 1),
        (Verdict("unknown", "abort", "", ""), 1),
    ],
)
def test_only_an_incorrect_answer_fails(verdict: Verdict, code: int) -> None:
    assert report([CUT, verdict], 512) == code


def test_numbers_have_no_range_limit() -> None:
    assert judge_text({"type": "number"}, "1e999") == ""
    assert judge_text({"type": "integer"}, "7" * 400) == ""
    assert judge_text({"type": "integer"}, "7.5")
    assert judge_text({"type": "integer"}, "[")
