"""Guessing tokens: where repeated text is found, how long guesses are, and when they are given up."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from quire.core.policy import StepCost
from quire.engine.engine import INDEX_PER_CALL, NUM_FAILURES, Drafter, TokenIndex, num_paying


def find_slowly(tokens: array[int], size: int) -> int | None:
    """The definition of `TokenIndex.find`."""
    last = tokens[len(tokens) - size :]
    ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == last]
    return ends[-1] if ends and len(tokens) > size else None


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_index_finds_the_last_occurrence(size: int) -> None:
    random = Random(size)
    index, tokens = TokenIndex(size), array("I", [random.randrange(3) for _ in range(40)])
    index.find(tokens)
    for _ in range(500):
        tokens.extend(random.randrange(3) for _ in range(random.choice((1, 1, 1, 4))))
        assert index.find(tokens) == find_slowly(tokens, size)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    index, tokens = TokenIndex(3), array("I", range(3 * INDEX_PER_CALL))
    tokens.extend([2 * INDEX_PER_CALL, 2 * INDEX_PER_CALL + 1, 2 * INDEX_PER_CALL + 2])
    found = [index.find(tokens) for _ in range(5)]
    assert found[0] is None
    assert found[-1] == 2 * INDEX_PER_CALL + 3


def test_a_guess_continues_the_repeated_text() -> None:
    drafter = Drafter(3)
    text = list(range(100, 120))
    tokens = array("I", [*text, 7, *text[:5]])
    assert list(drafter.guess(tokens, 21, 10).tokens) == text[5:10]  # as many as match
    tokens.append(text[5])
    assert list(drafter.guess(tokens, 21, 10).tokens) == text[6:12]
    assert list(drafter.guess(tokens, 21, 2).tokens) == text[6:8]


def test_wrong_guesses_demand_longer_matches() -> None:
    drafter, random = Drafter(2), Random(1)
    tokens = array("I", [random.randrange(4) for _ in range(200)])
    drafter.guess(tokens, 200, 4)

    def share() -> float:
        count = 0
        for _ in range(200):
            tokens.append(random.randrange(4))
            count += bool(drafter.guess(tokens, 200, 4).tokens)
        return count / 200

    before = share()
    for _ in range(8):
        drafter.learn(4, 0)
    after = share()
    assert before > 0.9
    assert after < 0.05
    for _ in range(8):
        drafter.learn(4, 4)
    assert share() > 0.9
    assert 0.9 < drafter.rate <= 1.0


def test_a_prediction_is_followed_left_and_found_again() -> None:
    prediction = list(range(50, 80))
    drafter = Drafter(3, prediction)
    tokens = array("I", [1, 2])
    guess = drafter.guess(tokens, 2, 4)
    assert (list(guess.tokens), guess.is_predicted) == (prediction[:4], True)
    tokens.extend(prediction[:3])
    assert list(drafter.guess(tokens, 2, 4).tokens) == prediction[3:7]
    tokens.append(9)  # something else
    assert not drafter.guess(tokens, 2, 4).tokens
    tokens.extend(prediction[4:7])
    assert list(drafter.guess(tokens, 2, 4).tokens) == prediction[7:11]
    tokens.extend(prediction[7:])
    assert not drafter.guess(tokens, 2, 4).is_predicted  # it is over


def test_a_wrong_prediction_is_used_less_until_tokens_match_again() -> None:
    prediction = list(range(50, 80))
    drafter, tokens = Drafter(3, prediction), array("I", [1, 2, 99, *prediction[:3]])
    assert drafter.guess(tokens, 2, 4).is_predicted
    for _ in range(2 * NUM_FAILURES):  # 3, 6, 12 tokens
        drafter.learn(4, 0)
    assert not drafter.guess(tokens, 2, 4).tokens
    for place in range(3, 12):
        assert not drafter.guess(tokens, 2, 4).tokens
        tokens.append(prediction[place])
    assert list(drafter.guess(tokens, 2, 4).tokens) == prediction[12:16]


def test_a_run_of_equal_tokens_and_a_cycle_continue() -> None:
    tokens = array("I", [1, 2, 5, 5, 5, 5])
    assert list(Drafter(3, reach=4).guess(tokens, 2, 7).tokens) == [5] * 7
    tokens = array("I", [9, 1, 2, 3, 1, 2, 3])
    assert list(Drafter(3, reach=4).guess(tokens, 2, 8).tokens) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert list(Drafter(3).guess(tokens, 2, 8).tokens) == [1, 2, 3]


def test_what_pays_where_rows_cost_time() -> None:
    cheap, dear = StepCost(1_000, 10), StepCost(10, 1_000)
    assert num_paying(1.0, 15, 1, cheap) == 15
    assert num_paying(0.0, 15, 1, cheap) == 0
    assert num_paying(0.95, 15, 1, dear) == 0
    assert 0 < num_paying(0.7, 15, 1, cheap) < 15
    assert num_paying(0.9, 15, 1, StepCost(1_000, 500, 0, 900)) == 0  # a single token has a fast path
    assert num_paying(0.9, 15, 16, StepCost(1_000, 500)) == 0  # the batch pays for the rows
