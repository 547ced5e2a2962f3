"""Tests of the fake runner, on which the tests of the scheduler rely."""

from __future__ import annotations

import pytest

from quire.backends.base import Capacity, Runner
from quire.backends.fake import FakeRunner, run_alone
from quire.core.step import BlockCopy, SeqSlice, StepPlan
from quire.core.values import SamplingParams
from quire.errors import InvariantViolation

CAPACITY = Capacity(num_blocks=10, block_size=4, max_num_seqs=4, max_model_len=36, vocab_size=1000)
GREEDY = SamplingParams(temperature=0)


def piece(
    tokens: list[int],
    start: int,
    table: list[int],
    history: list[int],
    *,
    batch_index: int = 0,
    length: int | None = None,
) -> SeqSlice:
    length = len(tokens) if length is None else length
    wants_token = start + length >= len(history)
    return SeqSlice(1, 0, batch_index, tokens, start, length, table, history, wants_token, GREEDY, len(history))


def plan(*slices: SeqSlice, copies: tuple[BlockCopy, ...] = (), released: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(slices, copies, released)


def execute(runner: FakeRunner, step: StepPlan) -> tuple[tuple[int, ...], ...]:
    runner.forward(step)
    runner.sample(None)
    return runner.collect().tokens


@pytest.mark.parametrize("is_late", [False, True])
def test_chunks_and_decodes_through_a_table_give_the_answer_of_the_oracle(is_late: bool) -> None:
    runner: Runner = FakeRunner(CAPACITY, is_late=is_late)
    assert isinstance(runner, FakeRunner)
    prompt = [5, 6, 7, 8, 9, 10]
    expected = run_alone(prompt, GREEDY, 2, block_size=4, vocab_size=1000)
    table = [7, 3]
    assert execute(runner, plan(piece(prompt[:3], 0, table, prompt))) == ((),)
    assert execute(runner, plan(piece(prompt[3:], 3, table, prompt))) == ((expected[0],),)
    # the second decode continues from the runner's own sample
    assert execute(runner, plan(piece([], 6, table, prompt, length=1))) == ((expected[1],),)
    runner.close()


def test_one_wrong_block_anywhere_changes_the_answer() -> None:
    prompt = list(range(12))
    answers = set()
    for spoiled in (None, 1, 2):
        runner = FakeRunner(CAPACITY)
        execute(runner, plan(piece(prompt[:8], 0, [1, 2, 3], prompt)))
        if spoiled is not None:
            runner.memory[spoiled][2] += 1
        answers.add(execute(runner, plan(piece(prompt[8:], 8, [1, 2, 3], prompt))))
    assert len(answers) == 3


def test_copies_precede_the_pass_and_unwritten_positions_are_poisoned() -> None:
    prompt = list(range(6))
    runner = FakeRunner(CAPACITY)
    execute(runner, plan(piece(prompt, 0, [1, 2], prompt)))
    longer = [*prompt, 77, 78]
    tokens = execute(runner, plan(piece([77, 78], 6, [1, 5], longer), copies=(BlockCopy(2, 5),)))
    assert tokens == (tuple(run_alone(longer, GREEDY, 1, block_size=4, vocab_size=1000)),)
    assert runner.memory[2][2:] == [-1, -1]  # the source is unchanged


def test_a_late_step_does_not_touch_blocks_that_were_added_to_its_table_later() -> None:
    """They may belong to another request, whose last step is the same one."""
    runner = FakeRunner(CAPACITY, is_late=True)
    execute(runner, plan(piece([1, 2, 3, 4], 0, [5], [1, 2, 3, 4])))
    before, table = [*runner.memory[5]], [1]
    runner.forward(plan(piece([7, 8, 9, 10], 0, table, [7, 8, 9, 10])))
    runner.sample(None)
    table.append(5)
    runner.collect()
    assert runner.memory[5] == before


def test_masks_forbid_tokens() -> None:
    capacity = Capacity(10, 4, 4, 36, vocab_size=20)
    runner = FakeRunner(capacity)
    for allowed in range(20):
        runner.forward(plan(piece([1, 2], 0, [1], [1, 2])))
        runner.sample({0: (1 << allowed).to_bytes(3, "little")})
        assert runner.collect().tokens == ((allowed,),)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (plan(piece([1], 0, [], [1])), "does not cover"),
        (plan(piece([1], 0, [0], [1])), "does not cover"),
        (plan(piece([1], 0, [10], [1])), "does not cover"),
        (plan(piece([1, 2], 0, [1], [1, 2], length=1)), "no valid tokens or length"),
        (plan(piece([], 0, [1], [1], length=2)), "no valid tokens or length"),
        (plan(piece([1], 0, [1], [1], batch_index=4)), "out of range"),
        (plan(piece([1], 0, [1], [1]), piece([1], 0, [2], [1])), "used twice"),
        (plan(piece([1], 0, [1], [1]), piece([1], 0, [1], [1], batch_index=1)), "two slices write"),
        (plan(piece([1], 0, [1], [1]), piece([9], 4, [1, 2], [1] * 5, batch_index=1)), "written by one slice and read"),
        (plan(piece([1], 0, [1], [1]), copies=(BlockCopy(1, 2),)), "written by one slice and read"),
        (plan(piece([1], 0, [1], [1]), copies=(BlockCopy(2, 3), BlockCopy(3, 4))), "depends on their order"),
        (plan(piece([1], 0, [1], [1]), copies=(BlockCopy(2, 4), BlockCopy(3, 4))), "depends on their order"),
    ],
)
def test_plans_that_break_the_contract_are_refused(step: StepPlan, message: str) -> None:
    with pytest.raises(InvariantViolation, match=message):
        FakeRunner(CAPACITY).forward(step)


def test_calls_out_of_order_are_refused() -> None:
    runner = FakeRunner(CAPACITY, is_late=True)
    with pytest.raises(InvariantViolation, match="sample without"):
        runner.sample(None)
    with pytest.raises(InvariantViolation, match="no step in flight"):
        runner.collect()
    runner.forward(plan(piece([], 3, [1], [1, 2, 3], length=1)))
    with pytest.raises(InvariantViolation, match="before the last step was sampled"):
        runner.forward(plan())
    runner.sample(None)
    with pytest.raises(InvariantViolation, match="no sampled token to continue from"):
        runner.collect()
