"""The prediction of steps, on made-up machines: no test here measures time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from quire.core.request import SamplingParams
from quire.core.step import SeqSlice, StepPlan
from quire.engine.worker.step_estimate import KEPT, NO_WORK, StepEstimator, work_of

Slices = Sequence[tuple[int, int]]  # of each: where it starts, how many tokens it computes

BASE_S, TOKEN_S = 5e-3, 24e-6  # a model of 8 billion weights on an H200
DECODE: Slices = [(500, 1)]


def plan(slices: Slices) -> StepPlan:
    return StepPlan(
        tuple(
            SeqSlice(number, 0, number, (), start, length, (), (), True, SamplingParams(), start)
            for number, (start, length) in enumerate(slices)
        ),
        (),
        (),
    )


def learn(pace: StepEstimator, steps: Iterable[tuple[Slices, float]]) -> StepEstimator:
    for slices, took_s in steps:
        pace.learn(work_of(plan(slices)), took_s)
    return pace


def predict(pace: StepEstimator, slices: Slices) -> float:
    return pace.predict_s(work_of(plan(slices)))


def takes(slices: Slices, base_s: float = BASE_S, token_s: float = TOKEN_S) -> float:
    return base_s + token_s * sum(length for _, length in slices)


def test_nothing_is_predicted_of_nothing() -> None:
    pace = StepEstimator()
    assert predict(pace, [(0, 16_384)]) == 0
    pace.learn(NO_WORK, 5.0)
    assert predict(pace, [(0, 16_384)]) == 0
    learn(pace, [(DECODE, 1.0)])
    assert pace.predict_s(NO_WORK) == 0


def test_a_decode_does_not_say_what_a_prompt_costs() -> None:
    """16,384 decodes of 5 ms are 82 s; the step takes 0.4 s."""
    pace = learn(StepEstimator(), [(DECODE, BASE_S)] * 100)
    assert takes([(0, 16_384)]) < predict(pace, [(0, 16_384)]) < 10 * takes([(0, 16_384)])
    assert predict(pace, DECODE) == BASE_S


def test_many_decodes_at_once_do_not_say_it_either() -> None:
    pace = learn(StepEstimator(), [([(500, 1)] * count, BASE_S) for count in (1, 2, 4, 8, 16, 32, 64)] * KEPT)
    assert takes([(0, 16_384)]) < predict(pace, [(0, 16_384)]) < 10 * takes([(0, 16_384)])


@pytest.mark.parametrize(("base_s", "token_s"), [(BASE_S, TOKEN_S), (4e-3, 1.65e-3), (0.4, 0.05), (1e-4, 0.01)])
@pytest.mark.parametrize("seed", range(4))
def test_decodes_and_prompts_give_base_and_slope(base_s: float, token_s: float, seed: int) -> None:
    """Of a GPU, of CPUs, and of a machine where a decode is no cheaper than a token of a prompt."""
    random = Random(seed)
    pace = StepEstimator()
    for _ in range(300):
        steps: list[Slices] = [[(random.randint(0, 200), 1)] * random.randint(1, 8), [(0, random.randint(16, 512))]]
        for slices in steps:
            noise = math.exp(random.gauss(0, 0.1)) * (50 if random.random() < 0.02 else 1)
            learn(pace, [(slices, noise * takes(slices, base_s, token_s))])
    for slices in ([(0, 1)], [(0, 100)], [(0, 512)], [(0, 512)] * 4):
        expected_s = takes(slices, base_s, token_s)
        assert expected_s / 2 < predict(pace, slices) < 2 * expected_s


def test_prompts_are_not_forgotten_while_there_are_only_decodes() -> None:
    """On this machine a token is so dear that the share a decode is taken for would be far too little."""
    prompt: Slices = [(0, 2000)]
    pace = learn(StepEstimator(), [([(0, 500)], takes([(0, 500)], 0.01, 0.05))])
    learn(pace, [(DECODE, 0.06)] * 10_000)
    assert takes(prompt, 0.01, 0.05) / 2 < predict(pace, prompt) < 2 * takes(prompt, 0.01, 0.05)


def test_an_outlier_changes_nothing_among_others_and_little_alone() -> None:
    pace = learn(StepEstimator(), [(DECODE, BASE_S)] * 5 + [([(0, 512)], takes([(0, 512)]))] * 5)
    before_s = predict(pace, [(0, 16_384)])
    learn(pace, [(DECODE, 60.0), ([(0, 512)], 60.0)])
    assert predict(pace, [(0, 16_384)]) == before_s
    alone = learn(StepEstimator(), [(DECODE, BASE_S), ([(0, 512)], 60.0)])
    assert predict(alone, [(0, 16_384)]) < 60.0 + 16_384 * BASE_S  # no token took longer than a whole step
    learn(alone, [([(0, 512)], takes([(0, 512)]))])
    assert predict(alone, [(0, 16_384)]) == pytest.approx(before_s)


def test_a_machine_that_slows_down_is_believed() -> None:
    pace = learn(StepEstimator(), [(DECODE, BASE_S)] * 100)
    learn(pace, [(DECODE, 8 * BASE_S)] * (KEPT // 2 + 1))
    assert predict(pace, DECODE) == 8 * BASE_S


def test_a_longer_context_takes_longer() -> None:
    pace = learn(StepEstimator(), [(DECODE, BASE_S), ([(0, 512)], takes([(0, 512)]))])
    short, long = predict(pace, [(0, 512)]), predict(pace, [(60_000, 512)])
    assert 3 * short < long < 30 * short  # 512 queries read 60,000 keys each
    assert predict(pace, [(60_000, 1)] * 64) > 10 * predict(pace, [(100, 1)] * 64)


def test_its_memory_is_bounded() -> None:
    random = Random(0)
    pace = StepEstimator()
    for _ in range(5000):
        learn(pace, [([(random.randrange(2**17), random.randint(1, 2**20))], 1.0)])
    assert len(pace._sizes) <= 32
    assert all(len(size._last) == len(size._sorted) <= KEPT for size in pace._sizes.values())


def test_the_cost_of_a_row_is_the_slope_between_small_steps_and_large_batches() -> None:
    pace = StepEstimator()
    assert pace.cost() is None
    learn(pace, [([(0, 1)], 0.007)] * 5)
    assert pace.cost() is None  # one size does not tell a base from a slope
    learn(pace, [([(0, 1)] * 16, 0.037)] * 5)
    cost = pace.cost()
    assert cost is not None
    assert cost.base_ns == pytest.approx(5_000_000, rel=0.1)
    assert cost.token_ns == pytest.approx(2_000_000, rel=0.1)
    learn(pace, [([(0, 2000)], 30.0)] * 5)  # a long prompt, attention above all: it says nothing of rows
    assert pace.cost() == pytest.approx(cost, rel=0.1)


def test_rows_that_cost_nothing_have_a_price_all_the_same() -> None:
    pace = learn(StepEstimator(), [([(0, 1)], 0.007), ([(0, 1)] * 16, 0.006)])
    assert pace.cost() == (7_000_000, 1, 0, 0)


def test_a_step_of_one_token_may_have_a_faster_way() -> None:
    pace = learn(StepEstimator(), [([(0, 1)], 0.0055), ([(0, 1)] * 2, 0.0095), ([(0, 1)] * 16, 0.041)])
    cost = pace.cost()
    assert cost is not None
    assert cost.token_ns == pytest.approx(2_250_000, rel=0.1)
    assert cost.base_ns == pytest.approx(5_000_000, rel=0.1)
    assert cost.single_ns == pytest.approx(1_750_000, rel=0.1)
