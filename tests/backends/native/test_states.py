"""Layers with a state: the distributions of `transformers`, and the same bits in any chunks, batches and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends import kv_memory
from quire.backends.native.library import Floats
from quire.backends.native.runner import NativeRunner
from quire.core.step import SeqSlice, StateSnapshot
from quire.errors import InvariantViolation
from tests.backends.contract import random_prompt
from tests.backends.native.matrices import logits_of, same_bits
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_invariance import check_same, run_requests
from tests.backends.native.test_models import check_rows
from tests.backends.native.test_runner import open_runner
from tests.backends.native.test_windows import logits
from tests.backends.plans import piece, plan
from tests.backends.torch.families import STATE_FAMILIES
from tests.backends.torch.rig import Rig
from tests.selection import mostly_nightly
from tests.weights.converting import write_gguf

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((70, 1, 33, 5, 96))]
NUM_BLOCKS, NUM_STATES = 24, 17


MANY = 10_000  # more slots than any pool has
SETTINGS: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 8}


@dataclass(frozen=True)
class Case:
    reference: RoundedReference
    path: Path
    expected: list[Floats]  # logits of all positions of every prompt, alone, on one thread


@pytest.fixture(scope="module", params=STATE_FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    reference = RoundedReference(request.param, folder)
    runner = open_runner(folder, precision="exact", **SETTINGS)
    expected = [logits_of(runner.model, prompt) for prompt in PROMPTS]
    runner.close()
    return Case(reference, folder, expected)


@pytest.fixture
def runner(case: Case) -> Iterator[NativeRunner]:
    runner = open_runner(case.path, precision="exact", **SETTINGS)
    assert runner.capacity().num_states >= NUM_STATES
    yield runner
    runner.close()


def part(number: int, start: int, length: int, **changes: Any) -> SeqSlice:
    """A slice of a prompt, in its own blocks, with its state in its own slot."""
    made = piece(
        tokens=PROMPTS[number][start : start + length],
        start=start,
        length=length,
        request_id=number,
        batch_index=number,
        block_table=range(1 + 4 * number, 5 + 4 * number),
        state_source=1 + number if start else 0,
        state_target=1 + number,
    )
    return made._replace(**changes)


def slot_bits(runner: NativeRunner, slot: int) -> bytes:
    """The state in one slot, of all layers."""
    return b"".join(pool[slot].tobytes() for pool in runner.model.memory.state_arrays())


def test_distributions(case: Case) -> None:
    for prompt, expected in zip(PROMPTS, case.expected, strict=True):
        found = torch.log_softmax(torch.from_numpy(expected), -1)
        check_rows(case.reference, found, case.reference.logprobs(prompt))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 32, 64])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_in_chunks(case: Case, runner: NativeRunner, chunk: int, num_threads: int) -> None:
    """In place, and from one slot to another."""
    runner.use_threads(num_threads)
    for slots in ((9, 9), (9, 10)):
        for turn, start in enumerate(range(0, len(PROMPTS[0]), chunk)):
            length = min(chunk, len(PROMPTS[0]) - start)
            slice_ = part(0, start, length, state_source=slots[(turn + 1) % 2] if start else 0)
            found = logits(runner, slice_._replace(state_target=slots[turn % 2]))
            assert same_bits(found[0], case.expected[0][start + length - 1])
    assert not any(slot_bits(runner, 0))


@pytest.mark.parametrize("positions", [(1,), (69,), (32,), (3, 4, 5, 64), (10, 20, 30)])
def test_snapshots(case: Case, runner: NativeRunner, positions: tuple[int, ...]) -> None:
    """A snapshot is the state that a slice which ends there leaves, and a request may continue from it."""
    snapshots = tuple(StateSnapshot(position, 5 + i) for i, position in enumerate(positions))
    found = logits(runner, part(0, 0, 70, snapshots=snapshots, state_target=4))
    assert same_bits(found[0], case.expected[0][-1])
    for position, slot in snapshots:
        before = slot_bits(runner, slot)
        rest = logits(runner, part(0, position, 70 - position, state_source=slot, state_target=15))
        assert same_bits(rest[0], case.expected[0][-1])
        assert slot_bits(runner, 15) == slot_bits(runner, 4)
        assert slot_bits(runner, slot) == before  # it is read only
        logits(runner, part(0, 0, position, state_target=16))
        assert slot_bits(runner, 16) == before


def test_other_slots_are_unchanged(runner: NativeRunner) -> None:
    for pool in runner.model.memory.state_arrays():
        pool[1:] = 7
    logits(runner, part(0, 0, 20, snapshots=(StateSnapshot(5, 6),), state_target=3))
    for pool in runner.model.memory.state_arrays():
        assert np.flatnonzero((pool[1:] != 7).any(axis=tuple(range(1, pool.ndim)))).tolist() == [2, 5]
        assert not pool[0].any()


@pytest.mark.parametrize(
    "wrong",
    [
        part(0, 0, 5, state_target=0),
        part(0, 0, 5, state_target=MANY),
        part(0, 0, 5, state_target=-1),
        part(0, 0, 5, state_source=MANY),
        part(0, 0, 5, state_source=-1),
        part(0, 0, 5, snapshots=(StateSnapshot(2, 0),)),
        part(0, 0, 5, snapshots=(StateSnapshot(2, MANY),)),
        part(0, 0, 5, snapshots=(StateSnapshot(0, 5),)),
        part(0, 0, 5, snapshots=(StateSnapshot(5, 5),)),
        part(0, 0, 5, snapshots=(StateSnapshot(6, 5),)),
        part(0, 0, 5, snapshots=(StateSnapshot(3, 5), StateSnapshot(2, 6))),
    ],
)
def test_out_of_bounds_states_are_refused(runner: NativeRunner, wrong: SeqSlice) -> None:
    with pytest.raises(InvariantViolation):
        runner.forward(plan(wrong))
    runner.abandon()
    assert not runner.model.memory.states.any()


@pytest.mark.parametrize("precision", ["fast", "balanced", "exact"])
def test_other_kernels(case: Case, kernels: str, precision: str) -> None:
    """Each variant has its own bits."""
    runner = open_runner(case.path, precision=precision, **SETTINGS)
    expected = logits_of(runner.model, PROMPTS[4])
    if precision == "exact":
        found = torch.log_softmax(torch.from_numpy(expected), -1)
        check_rows(case.reference, found, case.reference.logprobs(PROMPTS[4]))
    for start in range(0, 96, 12):
        assert same_bits(logits(runner, part(4, start, 12))[0], expected[start + 11])
    assert kernels in runner.facts().backend
    runner.close()


# Through the scheduler


@pytest.mark.parametrize(
    "name", [*STATE_FAMILIES, "mistral with a window", "gemma3", "gpt_oss", "gemma4 with shared layers"]
)
@pytest.mark.parametrize("seed", mostly_nightly(range(2), 1))
@pytest.mark.kept("qwen3_5_moe", "lfm2_moe", "mistral", "gemma3", "shared layers")
def test_random_requests(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes, snapshots, forks, preemption and cancellation: each answer has the bits of the request alone."""
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", True)
    rng = Random(seed)
    RoundedReference(name, tmp_path, seed)
    sizes = {"max_num_seqs": rng.choice((2, 5, 8)), "max_chunk_tokens": rng.choice((5, 16, 64))}
    rig = Rig(tmp_path, backend="native", num_blocks=rng.choice((14, 40)), max_waiting=100, **sizes)
    assert rig.engine.capacity.num_states or rig.engine.capacity.num_window_blocks
    found = run_requests(rng, rig, 24)
    assert len(found) > 12
    rig.engine.runner.use_threads(1)
    for one, answer in found.values():
        rig.reset(enable_prefix_caching=False)
        check_same(answer, rig.answer(one.prompt, one.num_tokens, **one.sampling))
    rig.engine.close()


# Files of llama.cpp


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "gpt_oss", "gemma4 with experts"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """The heads of a delta net are in another order. Heads of 32 are rounded in the same groups in any order."""
    changes = {"linear_value_head_dim": 32} if name.startswith("qwen3_5") else {}
    reference = RoundedReference(name, tmp_path / "m", **changes)
    runner = open_runner(write_gguf(tmp_path / "m", tmp_path / "m.gguf"), precision="exact", **SETTINGS)
    found = torch.log_softmax(torch.from_numpy(logits_of(runner.model, PROMPTS[4])), -1)
    check_rows(reference, found, reference.logprobs(PROMPTS[4]))
    runner.close()
