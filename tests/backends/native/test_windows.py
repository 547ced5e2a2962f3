"""Window blocks and shared blocks: same bits as with one pool, and what a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends import kv_memory
from quire.backends.native.library import Floats
from quire.backends.native.runner import NativeRunner
from quire.core.step import BlockCopy, SeqSlice, StepPlan
from quire.errors import InvariantViolation
from tests.backends.contract import random_prompt
from tests.backends.native.matrices import logits_of, same_bits
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_runner import NUM_BLOCKS, open_runner
from tests.backends.plans import piece, plan, run

BLOCK_SIZE = 8
MANY = 10_000  # more than any pool has
PROMPT = random_prompt(3, 70)  # of 9 blocks; the window of the model is 17


@pytest.fixture(scope="module", params=["mistral with a window", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    RoundedReference(request.param, folder)
    return folder


@pytest.fixture
def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeRunner]:
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", True)
    runner = open_runner(folder, block_size=BLOCK_SIZE, num_blocks=2 * NUM_BLOCKS)
    assert runner.capacity().num_window_blocks >= 2 * NUM_BLOCKS
    assert 0 < runner.capacity().window < 40
    yield runner
    runner.close()


@pytest.fixture
def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Floats]:
    """Logits of every position of the prompt, from a runner with one pool."""
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", False)
    runner = open_runner(folder, block_size=BLOCK_SIZE, num_blocks=2 * NUM_BLOCKS)
    assert runner.capacity().num_window_blocks == 0
    yield logits_of(runner.model, PROMPT)
    runner.close()


def slice_of(start: int, length: int, **changes: Any) -> SeqSlice:
    made = piece(
        tokens=PROMPT[start : start + length],
        start=start,
        length=length,
        block_table=list(range(1, 10)),
        window_table=list(range(11, 20)),
        history=PROMPT,
        num_prompt_tokens=len(PROMPT),
    )
    return made._replace(**changes)


def logits(runner: NativeRunner, *slices: SeqSlice, **copies: Any) -> Floats:
    """Run a step and return the logits of the last row of each slice."""
    runner.forward(StepPlan(slices, copies.get("copies", ()), (), copies.get("window_copies", ())))
    assert runner._forwarded is not None
    found = runner._forwarded.logits.copy()
    runner.abandon()
    return found


def num_full_layers(runner: NativeRunner) -> int:
    return sum(not layer.has_window_blocks for layer in runner.model.layers)


def num_window_blocks(runner: NativeRunner) -> int:
    return runner.capacity().num_window_blocks


def poison(runner: NativeRunner, *window_blocks: int) -> None:
    """Write NaN to blocks of all layers with a window."""
    pool = runner.model.memory.window_blocks[:-64].view(np.uint16)
    num_layers = runner.model.spec.num_layers - num_full_layers(runner)
    pool.reshape(num_layers, num_window_blocks(runner), -1)[:, list(window_blocks)] = 0x7E00


@pytest.mark.parametrize("chunk", [1, 5, 8, 32, 70])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_same_bits_as_with_one_pool(runner: NativeRunner, expected: Floats, chunk: int, num_threads: int) -> None:
    runner.use_threads(num_threads)
    for start in range(0, len(PROMPT), chunk):
        length = min(chunk, len(PROMPT) - start)
        assert same_bits(logits(runner, slice_of(start, length))[0], expected[start + length - 1])


def test_blocks_behind_the_window_are_not_read(runner: NativeRunner, expected: Floats) -> None:
    """Their entries are of blocks with NaN, of the null block, or of no block at all."""
    window, table = runner.capacity().window, list(range(11, 20))
    for start in range(0, len(PROMPT), 5):
        first = max(start - window + 1, 0) // BLOCK_SIZE
        poison(runner, 0, *range(11, 11 + first), 22)
        for behind in (0, 22, MANY):
            changed = [behind] * first + table[first:]
            found = logits(runner, slice_of(start, 5, window_table=changed))
            assert same_bits(found[0], expected[start + 4])


def test_blocks_may_move(runner: NativeRunner, expected: Floats) -> None:
    logits(runner, slice_of(0, 40))
    copies = (BlockCopy(12, 21), BlockCopy(13, 22), BlockCopy(14, 23), BlockCopy(15, 20))
    table = [0, 21, 22, 23, 20, 16, 17, 18, 19]
    found = logits(runner, slice_of(40, 30, window_table=table), window_copies=copies)
    assert same_bits(found[0], expected[-1])
    poison(runner, 21, 22, 23, 20)
    assert same_bits(logits(runner, slice_of(40, 30))[0], expected[-1])  # the sources are unchanged


@pytest.mark.parametrize(
    "wrong",
    [
        slice_of(0, 5, window_table=[]),
        slice_of(0, 9, window_table=[11]),
        slice_of(0, 5, window_table=[MANY]),
        slice_of(0, 5, window_table=[-1]),
        slice_of(60, 5, window_table=[0] * 8 + [MANY]),
    ],
)
def test_out_of_bounds_window_tables_are_refused(runner: NativeRunner, wrong: SeqSlice) -> None:
    with pytest.raises(InvariantViolation):
        runner.forward(plan(wrong))
    runner.abandon()
    with pytest.raises(InvariantViolation):
        runner.forward(StepPlan((slice_of(0, 5),), (), (), (BlockCopy(1, MANY),)))
    runner.abandon()
    run(runner, slice_of(0, 5))


# Shared blocks


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_positions_before_kv_start_are_read_and_not_written(runner: NativeRunner, expected: Floats, chunk: int) -> None:
    """A request computes positions again, for another kind of memory, whose blocks it shares."""
    memory = runner.model.memory
    logits(runner, slice_of(0, 70))
    blocks = memory.blocks.copy()
    memory.window_blocks[:] = 0
    for start in range(0, 60, chunk):
        length = min(chunk, 60 - start)
        found = logits(runner, slice_of(start, length, kv_start=60))
        assert same_bits(found[0], expected[start + length - 1])
        assert np.array_equal(memory.blocks, blocks)
    found = logits(runner, slice_of(0, 70, kv_start=60, block_table=[*range(1, 8), 20, 21]))
    assert np.array_equal(memory.blocks, blocks) == (not num_full_layers(runner))


def test_poisoned_window_blocks_are_purged(runner: NativeRunner) -> None:
    logits(runner, slice_of(0, 30))
    poison(runner, 11, 12, 13, 14)
    runner.forward(plan(slice_of(30, 3)))
    runner.sample(None)
    assert runner.collect().failures
    num_layers = runner.model.spec.num_layers - num_full_layers(runner)
    pool = runner.model.memory.window_blocks[:-64].view(np.float16)
    pool = pool.reshape(num_layers, num_window_blocks(runner), -1)
    first = max(30 - runner.capacity().window + 1, 0) // BLOCK_SIZE
    assert np.isfinite(pool[:, 11 + first : 16]).all()
