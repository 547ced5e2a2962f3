"""Plans of one step, to drive a runner without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from quire.backends.base import Runner
from quire.core.step import BlockCopy, SeqSlice, StepPlan
from quire.core.values import SamplingParams
from quire.errors import InvariantViolation

TOKENS = [5, 6, 7, 8, 9]


def piece(**changes: Any) -> SeqSlice:
    made = SeqSlice(
        request_id=1,
        epoch=0,
        batch_index=0,
        tokens=TOKENS,
        start=0,
        length=len(TOKENS),
        block_table=[1],
        history=TOKENS,
        wants_token=True,
        sampling=SamplingParams(temperature=0.0),
        num_prompt_tokens=len(TOKENS),
    )
    return made._replace(**changes)


def plan(*slices: SeqSlice, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(slices, copies, ())


def run(runner: Runner, *slices: SeqSlice, copies: tuple[BlockCopy, ...] = ()) -> list[tuple[int, ...]]:
    runner.forward(plan(*slices, copies=copies))
    runner.sample(None)
    result = runner.collect()
    assert not result.failures
    return list(result.tokens)


def check_order_of_calls(runner: Runner) -> None:
    """Check that calls in the wrong order are refused, and that the runner goes on."""
    with pytest.raises(InvariantViolation):
        runner.sample(None)
    with pytest.raises(InvariantViolation):
        runner.collect()
    runner.forward(plan(piece()))
    with pytest.raises(InvariantViolation):
        runner.forward(plan(piece()))
    runner.abandon()
    with pytest.raises(InvariantViolation):
        runner.sample(None)
    run(runner, piece())
