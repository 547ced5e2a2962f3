"""Step predictions for simulated machines. No test here measures time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from quire.core.step import SeqSlice, StepPlan
from quire.core.values import SamplingParams
from quire.engine.engine import StepEstimator, Work, work_of

Slices = Sequence[tuple[int, int]]  # start and number of tokens of each

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


def learn(estimator: StepEstimator, steps: Iterable[tuple[Slices, float]]) -> StepEstimator:
    for slices, took_s in steps:
        estimator.learn(work_of(plan(slices)), took_s)
    return estimator


def predict(estimator: StepEstimator, slices: Slices) -> float:
    return estimator.predict_s(work_of(plan(slices)))


def takes(slices: Slices, base_s: float = BASE_S, token_s: float = TOKEN_S) -> float:
    return base_s + token_s * sum(length for _, length in slices)


def test_without_samples_the_prediction_is_0() -> None:
    estimator = StepEstimator()
    assert predict(estimator, [(0, 16_384)]) == 0
    estimator.learn(Work(), 5.0)
    assert predict(estimator, [(0, 16_384)]) == 0
    learn(estimator, [(DECODE, 1.0)])
    assert estimator.predict_s(Work()) == 0


def test_steps_of_one_effort_do_not_show_the_cost_of_a_token() -> None:
    estimator = StepEstimator()
    one, two = work_of(plan([(99, 1)])), work_of(plan([(0, 2)]))
    for _ in range(9):
        estimator.learn(one, 0.01)
        estimator.learn(two._replace(effort=one.effort), 0.01)
    assert estimator.cost() is None


def test_a_decode_does_not_show_the_cost_of_a_prompt() -> None:
    """16,384 decodes of 5 ms are 82 s; the step takes 0.4 s."""
    estimator = learn(StepEstimator(), [(DECODE, BASE_S)] * 100)
    assert takes([(0, 16_384)]) < predict(estimator, [(0, 16_384)]) < 10 * takes([(0, 16_384)])
    assert predict(estimator, DECODE) == BASE_S


@pytest.mark.parametrize(("base_s", "token_s"), [(BASE_S, TOKEN_S), (4e-3, 1.65e-3), (0.4, 0.05), (1e-4, 0.01)])
@pytest.mark.parametrize("seed", range(4))
def test_decodes_and_prompts_give_base_and_slope(base_s: float, token_s: float, seed: int) -> None:
    """For a GPU, CPUs, and a machine where a decode costs as much as a prompt token."""
    random = Random(seed)
    estimator = StepEstimator()
    for _ in range(300):
        steps: list[Slices] = [[(random.randint(0, 200), 1)] * random.randint(1, 8), [(0, random.randint(16, 512))]]
        for slices in steps:
            noise = math.exp(random.gauss(0, 0.1)) * (50 if random.random() < 0.02 else 1)
            learn(estimator, [(slices, noise * takes(slices, base_s, token_s))])
    for slices in ([(0, 1)], [(0, 100)], [(0, 512)], [(0, 512)] * 4):
        expected_s = takes(slices, base_s, token_s)
        assert expected_s / 2 < predict(estimator, slices) < 2 * expected_s


def test_decodes_do_not_displace_prompts() -> None:
    """On this machine tokens are so expensive that an estimate from decodes would be far too low."""
    prompt: Slices = [(0, 2000)]
    estimator = learn(StepEstimator(), [([(0, 500)], takes([(0, 500)], 0.01, 0.05))])
    learn(estimator, [(DECODE, 0.06)] * 10_000)
    assert takes(prompt, 0.01, 0.05) / 2 < predict(estimator, prompt) < 2 * takes(prompt, 0.01, 0.05)


def test_an_outlier_has_little_effect() -> None:
    estimator = learn(StepEstimator(), [(DECODE, BASE_S)] * 5 + [([(0, 512)], takes([(0, 512)]))] * 5)
    before_s = predict(estimator, [(0, 16_384)])
    learn(estimator, [(DECODE, 60.0), ([(0, 512)], 60.0)])
    assert predict(estimator, [(0, 16_384)]) == before_s
    alone = learn(StepEstimator(), [(DECODE, BASE_S), ([(0, 512)], 60.0)])
    assert predict(alone, [(0, 16_384)]) < 60.0 + 16_384 * BASE_S  # no token takes longer than a whole step
    learn(alone, [([(0, 512)], takes([(0, 512)]))])
    assert predict(alone, [(0, 16_384)]) == pytest.approx(before_s)


def test_a_longer_context_takes_longer() -> None:
    estimator = learn(StepEstimator(), [(DECODE, BASE_S), ([(0, 512)], takes([(0, 512)]))])
    short, long = predict(estimator, [(0, 512)]), predict(estimator, [(60_000, 512)])
    assert 3 * short < long < 30 * short  # 512 queries read 60,000 keys each
    assert predict(estimator, [(60_000, 1)] * 64) > 10 * predict(estimator, [(100, 1)] * 64)


def test_the_cost_of_a_row_is_the_slope_between_small_steps_and_large_batches() -> None:
    estimator = StepEstimator()
    assert estimator.cost() is None
    learn(estimator, [([(0, 1)], 0.007)] * 5)
    assert estimator.cost() is None  # one size does not separate base and slope
    learn(estimator, [([(0, 1)] * 16, 0.037)] * 5)
    cost = estimator.cost()
    assert cost is not None
    assert cost.base_ns == pytest.approx(5_000_000, rel=0.1)
    assert cost.token_ns == pytest.approx(2_000_000, rel=0.1)
    learn(estimator, [([(0, 2000)], 30.0)] * 5)  # a long prompt, mostly attention: not used for the cost of rows
    assert estimator.cost() == pytest.approx(cost, rel=0.1)


def test_a_single_token_step_may_be_faster() -> None:
    estimator = learn(StepEstimator(), [([(0, 1)], 0.0055), ([(0, 1)] * 2, 0.0095), ([(0, 1)] * 16, 0.041)])
    cost = estimator.cost()
    assert cost is not None
    assert cost.token_ns == pytest.approx(2_250_000, rel=0.1)
    assert cost.base_ns == pytest.approx(5_000_000, rel=0.1)
    assert cost.single_ns == pytest.approx(1_750_000, rel=0.1)
