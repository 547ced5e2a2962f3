"""The native runner: the plans it refuses, the failures it survives, and the facts it reports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.base import Capacity
from quire.backends.native.library import kernels_in_use
from quire.backends.native.model import Engine
from quire.backends.native.runner import NativeRunner
from quire.backends.sampling import BROKEN
from quire.core.step import BlockCopy, StepPlan
from quire.engine.composition import EngineConfig, make_runner
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.config import spec_from_config
from quire.weights.opening import open_checkpoint
from quire.weights.tensors import expected_tensors
from tests.backends.contract import NEVER, POISONED, check_poisoned, sound_prompt
from tests.backends.native.references import llama_name
from tests.backends.native.test_invariance import check_same
from tests.backends.plans import check_order_of_calls, piece, plan, run
from tests.backends.torch.rig import Rig
from tests.weights.makers import VOCAB, config, llama_arrays, write_folder

NUM_BLOCKS = 12


def arrays_with(name: str = "", place: Any = (), value: float = np.nan) -> dict[str, Any]:
    arrays = {key: array * 0.2 if array.ndim == 2 else array for key, array in llama_arrays().items()}
    if name:
        arrays[name][place] = value
    return arrays


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "m", config(), arrays_with())


def open_runner(path: Path, **settings: Any) -> NativeRunner:
    checkpoint = open_checkpoint(path)
    try:
        defaults = {"backend": "native", "num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "threads": 1}
        runner = make_runner(checkpoint, EngineConfig(**{**defaults, **settings}))
    finally:
        checkpoint.close()
    assert isinstance(runner, NativeRunner)
    return runner


@pytest.fixture
def runner(model_path: Path) -> Iterator[NativeRunner]:
    runner = open_runner(model_path)
    yield runner
    runner.close()


# Checks before C


@pytest.mark.parametrize(
    "wrong",
    [
        plan(piece(tokens=[5, 6, 7, 8, VOCAB])),
        plan(piece(tokens=[-1, 6, 7, 8, 9])),
        plan(piece(block_table=[NUM_BLOCKS])),
        plan(piece(block_table=[-1])),
        plan(piece(block_table=[])),
        plan(piece(start=256, block_table=[1] * 9)),
        plan(piece(batch_index=4)),
        plan(piece(), copies=(BlockCopy(1, NUM_BLOCKS),)),
        plan(piece(), copies=(BlockCopy(NUM_BLOCKS, 1),)),
        plan(piece(), copies=(BlockCopy(-1, 1),)),
        plan(piece(), copies=(BlockCopy(2, 3), BlockCopy(1, -1))),
        plan(piece(block_table=[NUM_BLOCKS]), copies=(BlockCopy(1, 2),)),  # the copy is valid, the step is not
    ],
)
def test_an_out_of_bounds_plan_changes_nothing(runner: NativeRunner, wrong: StepPlan) -> None:
    run(runner, piece(), piece(batch_index=1, block_table=[NUM_BLOCKS - 1]))
    before = runner.model.memory.blocks.copy()
    with pytest.raises(InvariantViolation):
        runner.forward(wrong)
    assert np.array_equal(runner.model.memory.blocks, before)
    runner.abandon()
    run(runner, piece())


def test_calls_in_the_wrong_order(runner: NativeRunner) -> None:
    check_order_of_calls(runner)


def test_after_close_nothing_reaches_c(model_path: Path) -> None:
    runner = open_runner(model_path)
    runner.forward(plan(piece()))
    runner.close()
    runner.close()
    assert runner.facts().num_threads == 1
    calls: list[tuple[Any, Any]] = [(runner.sample, None), (runner.forward, plan(piece())), (runner.use_threads, 2)]
    for call, argument in calls:
        with pytest.raises(InvariantViolation):
            call(argument)


# Blocks


def test_only_values_that_are_not_finite_are_purged(runner: NativeRunner) -> None:
    model = runner.model
    halves = model.memory.blocks[:-64].view(np.float16).reshape(model.spec.num_layers, NUM_BLOCKS, -1)
    halves[:] = np.random.default_rng(0).normal(size=halves.shape).astype(np.float16)
    halves[:, :, 3], halves[:, :, 5], halves[:, :, -1], halves[:, :, 9] = np.nan, np.inf, -np.inf, 65504
    expected = halves.copy()
    for block in (2, NUM_BLOCKS - 1):
        expected[:, block, [3, 5, -1]] = 0
    model.purge_blocks([2, NUM_BLOCKS - 1])
    assert np.array_equal(halves, expected, equal_nan=True)


def test_a_step_writes_only_its_own_positions(runner: NativeRunner) -> None:
    """Keys are [head][dimension][position], values [head][position][dimension], one after the other."""
    model, spec = runner.model, runner.model.spec
    blocks = model.memory.blocks[:-64].view(np.float16).reshape(spec.num_layers, NUM_BLOCKS, -1)
    blocks[:] = 7
    run(runner, piece(start=30, block_table=[4, 9]))
    written = blocks != 7
    assert sorted(set(np.flatnonzero(written.any((0, 2))).tolist())) == [4, 9]
    size = runner.capacity().block_size
    for block, batch_indices in ((4, {30, 31}), (9, {0, 1, 2})):
        num_keys = spec.attention.head_size * size
        for head in range(spec.attention.num_kv_heads):
            part = blocks[:, block, head * (num_keys + size * 32) : (head + 1) * (num_keys + size * 32)] != 7
            keys = part[:, :num_keys].reshape(spec.num_layers, spec.attention.head_size, size)
            values = part[:, num_keys:].reshape(spec.num_layers, size, 32)
            assert set(np.flatnonzero(keys.any((0, 1))).tolist()) == batch_indices
            assert set(np.flatnonzero(values.any((0, 2))).tolist()) == batch_indices
            assert not values[:, :, spec.attention.head_size :].any()


# NaN and infinity


def poisoned_rig(folder: Path, *poison: Any) -> Rig:
    return Rig(write_folder(folder, config(), arrays_with(*poison)), backend="native", num_blocks=12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_poisoned_token_fails_only_its_own_requests(tmp_path: Path, value: float) -> None:
    sound = poisoned_rig(tmp_path / "sound")
    rig = poisoned_rig(tmp_path / "poisoned", "model.embed_tokens.weight", (POISONED, 17), value)
    check_poisoned(rig, lambda prompt, answer: check_same(answer, sound.answer(prompt, 4, **NEVER)))
    sound.engine.close()
    rig.engine.close()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_nan_weights_never_produce_a_token(name: str, tmp_path: Path) -> None:
    """One value is enough, wherever it is: no kernel treats it as a number."""
    rig = poisoned_rig(tmp_path / "m", name, 7)
    ids = [rig.start(sound_prompt(number, 2 + 17 * number), 3) for number in range(3)]
    answers = rig.run(*ids)
    assert [answers[request_id].error for request_id in ids] == [BROKEN] * 3
    assert all(answer.tokens == [] for answer in answers.values())
    rig.engine.close()


# Threads


@pytest.mark.parametrize("num_threads", [0, -1])
def test_invalid_thread_counts_are_refused(runner: NativeRunner, num_threads: int) -> None:
    for call in (runner.use_threads, Engine):
        with pytest.raises(InvalidRequest):
            call(num_threads)
    run(runner, piece())


# Memory

OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from tests.backends.plans import TOKENS, piece, plan, run
from tests.backends.torch.rig import Rig

rig = Rig(Path(sys.argv[1]), backend="native", num_blocks=200, max_chunk_tokens=4096, max_num_batched_tokens=4096)
small, large = [5, 6, 7], [3 + i % 40 for i in range(4000)]
first = rig.answer(small, 3)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
failed = rig.answer(large, 3)
after = rig.answer([*small, 8], 3)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert "no memory for a step of 4000 tokens" in failed.error, failed.error
assert failed.tokens == [] and after.error is None and first.error is None
assert rig.answer(large, 3).error is None
rig.reset(enable_prefix_caching=False)
assert rig.answer([*small, 8], 3).tokens == after.tokens
print("alive")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit of a process works on Linux only")
def test_a_step_without_memory_fails_only_its_requests(tmp_path: Path) -> None:
    """Runs in a process with a limited address space: 4000 tokens need about 100 MB."""
    settings = config(max_position_embeddings=4096, intermediate_size=2048)
    rng = np.random.default_rng(0)
    arrays = {
        llama_name(name): (rng.standard_normal(shape) * 0.2).astype(np.float32)
        for name, shape in expected_tensors(spec_from_config(settings, {}, "m", "F32")).items()
    }
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(write_folder(tmp_path / "m", settings, arrays))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.stdout.endswith("alive\n"), child.stderr


# Reported facts


def test_facts_and_capacity(model_path: Path) -> None:
    runner = open_runner(model_path, precision="exact", max_model_len=200)
    facts, capacity = runner.facts(), runner.capacity()
    assert (facts.backend, facts.device, facts.dtype) == (f"native ({kernels_in_use()})", "cpu", "F32, exact")
    num_weights = sum(array.size for array in llama_arrays().values())
    assert num_weights < facts.weight_bytes < 1.2 * num_weights
    head_bytes = 2 * (16 * 32 + 32 * 32)  # keys, and values in whole vectors
    assert facts.kv_bytes == 2 * NUM_BLOCKS * 2 * head_bytes + 64
    expected = Capacity(NUM_BLOCKS, 32, max_num_seqs=4, max_model_len=200, vocab_size=VOCAB, has_overlap=False)
    mixed: dict[str, Any] = {"has_costly_rows": True, "max_mixed_tokens": 64, "max_drafts": 15}
    assert capacity == replace(expected, **mixed)
    runner.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cuda"},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"max_model_len": 257},
        {"threads": 4096},
        {"num_blocks": 1 << 30},
        {"num_blocks": None, "kv_memory": 1},
    ],
)
def test_unsupported_settings_are_refused(model_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(reversed(settings)))):
        open_runner(model_path, **settings)
