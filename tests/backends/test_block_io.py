"""Block I/O of the fake runner, which also refuses calls that break the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.backends.base import Capacity
from quire.backends.fake import MAX_POLLS, POISON, FakeRunner
from quire.core.step import BlockCopy, MemoryKind, MemoryRef, StepPlan
from quire.errors import InvariantViolation
from tests.backends.block_io_contract import (
    NUM_CACHED,
    BlockIOContract,
    Places,
    allocate,
    block_io,
    enqueue,
    part,
    random_tokens,
    wait,
)

PLAIN = Capacity(num_blocks=20, block_size=8, max_num_seqs=4, max_model_len=80, vocab_size=160)
WINDOWS: dict[str, Any] = {"window": 12, "num_window_blocks": 18}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": WINDOWS,
    "states": {"num_states": 9},
    "both": {**WINDOWS, "num_states": 9},
}
BOTH = replace(PLAIN, **KINDS["both"])
PLACES = Places([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], 3)


@pytest.fixture(params=[(name, is_late) for name in KINDS for is_late in (False, True)], ids=str)
def runner(request: pytest.FixtureRequest) -> FakeRunner:
    name, is_late = request.param
    return FakeRunner(replace(PLAIN, **KINDS[name]), is_late=is_late)


class TestFake(BlockIOContract):
    pass


def test_buffers_are_words() -> None:
    runner = FakeRunner(BOTH)
    runner.memory[3][:] = [2**62 - 1, POISON, *range(6)]
    runner.window_memory[4][:] = range(10, 18)
    runner.states[5] = 77
    pieces = [MemoryRef(MemoryKind.BLOCK, 3), MemoryRef(MemoryKind.WINDOW, 4), MemoryRef(MemoryKind.STATE, 5)]
    buffers = allocate(block_io(runner), pieces)
    assert block_io(runner).export(pieces, buffers).is_done()
    assert buffers[0].cast("q").tolist() == [2**62 - 1, -1, *range(6)]
    assert bytes(buffers[0][:8]) == (2**62 - 1).to_bytes(8, "little")
    assert buffers[1].cast("q").tolist() == list(range(10, 18))
    assert buffers[2].cast("q").tolist() == [77]


def test_a_late_runner_copies_late() -> None:
    """Nobody can rely on content before `is_done`."""
    runner = FakeRunner(BOTH, is_late=True)
    io, pieces = block_io(runner), PLACES.cached(runner)
    buffers = allocate(io, pieces)
    enqueue(runner, part(PLACES, random_tokens(1), 0, NUM_CACHED))
    copy = io.export(pieces, buffers)
    for _ in range(MAX_POLLS + 1):
        assert not copy.is_done()  # the step before it has not run
    runner.collect()
    assert all(set(buffer.cast("q").tolist()) == {POISON} for buffer in buffers)
    wait(copy)
    assert all(POISON not in buffer.cast("q").tolist() for buffer in buffers)
    targets = [MemoryRef(kind, index + (10 if kind is MemoryKind.BLOCK else 4)) for kind, index in pieces]
    runner.memory[11][:] = range(8)
    enqueue(runner, part(PLACES, random_tokens(1), 0, NUM_CACHED))
    copy = io.import_(targets, buffers)
    assert runner.memory[11] == list(range(8))  # a step that is in flight may still read it
    runner.collect()
    assert runner.memory[11] == [POISON] * 8
    buffers[0].cast("q")[0] = 5  # too early: the copy is not done
    wait(copy)
    assert runner.memory[11][0] == 5


def test_a_step_must_not_use_what_is_imported() -> None:
    runner = FakeRunner(BOTH, is_late=True)
    io, tokens = block_io(runner), random_tokens(1)
    for kind, index in ((MemoryKind.BLOCK, 2), (MemoryKind.WINDOW, 8), (MemoryKind.STATE, 3)):
        pieces = [MemoryRef(kind, index)]
        copy = io.import_(pieces, allocate(io, pieces))
        with pytest.raises(InvariantViolation, match="is being imported"):
            runner.forward(StepPlan((part(PLACES, tokens, 0, NUM_CACHED),), (), ()))
        for call in (io.export, io.import_):
            with pytest.raises(InvariantViolation, match="is being imported is copied"):
                call(pieces, allocate(io, pieces))
        wait(copy)
        enqueue(runner, part(PLACES, tokens, 0, NUM_CACHED))
        runner.collect()
    pieces = [MemoryRef(MemoryKind.BLOCK, 19), MemoryRef(MemoryKind.WINDOW, 17)]
    io.import_(pieces, allocate(io, pieces))
    step = part(PLACES, tokens, 0, NUM_CACHED)
    for copies in ({"copies": (BlockCopy(1, 19),)}, {"window_copies": (BlockCopy(17, 1),)}):
        with pytest.raises(InvariantViolation, match="is being imported"):
            runner.forward(StepPlan((step,), **{"copies": (), "released": (), **copies}))  # type: ignore[arg-type]


def test_memory_is_copied_between_steps() -> None:
    runner = FakeRunner(BOTH, is_late=True)
    runner.forward(StepPlan((part(PLACES, random_tokens(1), 0, NUM_CACHED),), (), ()))
    with pytest.raises(InvariantViolation, match="between the forward pass of a step and its sampling"):
        block_io(runner).export([], [])


def test_layouts() -> None:
    changes: list[dict[str, Any]] = [*KINDS.values(), {"block_size": 4}, {"window": 11, "num_window_blocks": 18}]
    layouts = [block_io(FakeRunner(replace(PLAIN, **change))).layout for change in changes]
    assert len(set(layouts)) == len(layouts)
    assert layouts[0] == block_io(FakeRunner(replace(PLAIN, num_blocks=30, max_model_len=40))).layout
