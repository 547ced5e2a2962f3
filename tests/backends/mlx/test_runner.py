"""The MLX runner: in-place writes, prefix hits without copies, the plans it refuses, and the failures it survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.backends.mlx import build
from quire.backends.mlx.paged_cache import KVStore
from quire.backends.mlx.runner import MlxRunner
from quire.core.step import BlockCopy, StepPlan
from quire.engine.composition import EngineConfig, make_runner
from quire.engine.engine import MAX_FAILED_STEPS, BrokenRunner
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.opening import open_checkpoint
from tests.backends.contract import POISONED, VOCAB, Contract, check_poisoned, random_prompt
from tests.backends.mlx.architectures import DenseReference, write_model
from tests.backends.plans import check_order_of_calls, piece, plan, run
from tests.backends.torch.rig import Answer, Rig

NUM_BLOCKS = 64
SETTINGS: dict[str, Any] = {"backend": "mlx", "dtype": "float32", "num_blocks": NUM_BLOCKS}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m", "llama")


def open_runner(path: Path, **settings: Any) -> MlxRunner:
    checkpoint = open_checkpoint(path)
    try:
        runner = make_runner(checkpoint, EngineConfig(**{**SETTINGS, "max_num_seqs": 4, **settings}))
    finally:
        checkpoint.close()
    assert isinstance(runner, MlxRunner)
    return runner


@pytest.fixture
def runner(model_path: Path) -> Iterator[MlxRunner]:
    runner = open_runner(model_path)
    yield runner
    runner.close()


def contents(store: KVStore) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for array in store.arrays]


# Memory


def test_steps_write_the_pools_in_place(model_path: Path) -> None:
    """Prompts, decodes and block copies, with a step in flight: no step takes the memory of one layer's pool."""
    rig = Rig(model_path, **{**SETTINGS, "num_blocks": 4096})
    runner = rig.engine.runner
    assert isinstance(runner, MlxRunner)
    layer = runner.store.arrays[0].nbytes
    rig.reset(overlap=True, num_blocks=4096, max_chunk_tokens=16)
    rig.answer(random_prompt(1, 40), 4, logprobs=None)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    head = random_prompt(2, 70)
    ids = [rig.start([*head, last], 12, logprobs=None, temperature=1.0, seed=last) for last in (3, 4)]
    ids += [rig.start(random_prompt(5 + i, 20 * i), 12, logprobs=None) for i in (1, 2)]
    rig.run(*ids)
    rig.run(rig.start([*head, 3, 5], 5, logprobs=None))
    assert rig.num_copies
    assert mx.get_peak_memory() - before < layer
    rig.engine.close()


def test_a_step_is_evaluated_when_the_one_before_it_is_done(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX copies a pool that an unfinished step still reads. The test above is too fast to detect it."""
    rig = Rig(model_path, **SETTINGS)
    rig.reset(overlap=True)
    events: list[str] = []
    for name in ("async_eval", "synchronize"):
        real = getattr(mx, name)

        def recorded(*args: Any, name: str = name, real: Any = real) -> None:
            events.append(name)
            real(*args)

        monkeypatch.setattr(mx, name, recorded)
    rig.answer(random_prompt(1, 40), 6, logprobs=None)
    assert events.count("async_eval") >= 6
    for one, two in pairwise(events):
        assert (one, two) != ("async_eval", "async_eval")
    rig.engine.close()


# Plans


@pytest.mark.parametrize(
    "wrong",
    [
        plan(piece(tokens=[5, 6, 7, 8, VOCAB])),
        plan(piece(tokens=[-1, 6, 7, 8, 9])),
        plan(piece(block_table=[NUM_BLOCKS])),
        plan(piece(block_table=[-1])),
        plan(piece(block_table=[])),
        plan(piece(start=510, block_table=[1] * 17)),
        plan(piece(batch_index=4)),
        plan(piece(length=4)),
        plan(piece(), copies=(BlockCopy(1, NUM_BLOCKS),)),
        plan(piece(), copies=(BlockCopy(-1, 1),)),
    ],
)
def test_an_out_of_bounds_plan_changes_nothing(runner: MlxRunner, wrong: StepPlan) -> None:
    expected = run(runner, piece(), piece(batch_index=1, block_table=[NUM_BLOCKS - 1]))
    before = contents(runner.store)
    with pytest.raises(InvariantViolation):
        runner.forward(wrong)
    runner.abandon()
    assert all(np.array_equal(one, two) for one, two in zip(contents(runner.store), before, strict=True))
    assert run(runner, piece()) == expected[:1]


def test_calls_in_the_wrong_order(runner: MlxRunner) -> None:
    check_order_of_calls(runner)


def test_a_step_writes_only_its_own_positions(runner: MlxRunner) -> None:
    before = contents(runner.store)
    run(runner, piece(start=30, block_table=[4, 9]))
    for now, then in zip(contents(runner.store), before, strict=True):
        places = np.argwhere((now != then).any((2, 3)))
        assert [tuple(place) for place in places.tolist()] == [(4, 30), (4, 31), (9, 0), (9, 1), (9, 2)]


# Failures


@pytest.mark.parametrize("overlap", [False, True])
def test_a_poisoned_token_fails_only_its_own_requests(tmp_path: Path, overlap: bool) -> None:
    folder = write_model(tmp_path / "m", "llama")
    reference, contract = DenseReference(folder), Contract()
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["model.embed_tokens.weight"][POISONED, 17] = float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    rig = Rig(folder, **{**SETTINGS, "num_blocks": 12})
    check_poisoned(rig, lambda prompt, answer: contract.check(reference, prompt, answer), overlap=overlap)
    rig.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_evaluation_ends_only_the_requests_of_its_step(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """MLX raises where a step is evaluated, which is after it was planned."""
    rig = Rig(model_path, **SETTINGS)
    rig.reset(overlap=overlap, enable_prefix_caching=False)
    prompt = random_prompt(4, 50)
    expected = rig.answer(prompt, 6)
    real: Any = mx.async_eval
    calls: list[int] = []

    def failing(*arrays: Any) -> None:
        calls.append(len(arrays))
        if len(calls) == 3:
            raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")
        real(*arrays)

    monkeypatch.setattr(mx, "async_eval", failing)
    failed = rig.answer(prompt, 6)
    assert "Unable to allocate" in (failed.error or "")
    after = rig.answer(prompt, 6)
    assert after.error is None
    assert after.tokens == expected.tokens
    rig.engine.close()


def test_a_step_that_can_never_be_evaluated_ends_the_runner(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools wait for the failed step's keys, so their content is lost. The worker is then replaced."""
    rig = Rig(model_path, **SETTINGS)
    rig.reset(overlap=True)

    def failing(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "async_eval", failing)
        patched.setattr(mx, "eval", failing)
        failed = rig.answer(random_prompt(4, 50), 6)
    assert "Unable to allocate" in (failed.error or "")

    def go_on() -> None:
        for number in range(MAX_FAILED_STEPS):
            assert "the KV cache was lost" in (rig.answer(random_prompt(number, 5), 2).error or "")

    with pytest.raises(BrokenRunner, match="the KV cache was lost"):
        go_on()
    rig.engine.close()


def test_a_runner_works_in_any_thread(model_path: Path) -> None:
    """MLX's streams belong to threads. Each step of this answer is run by another thread."""
    rig = Rig(model_path, **SETTINGS)
    rig.reset(overlap=True)
    prompt = random_prompt(4, 50)
    expected = rig.answer(prompt, 8)
    rig.reset(overlap=True)
    answers = {rig.start(prompt, 8): Answer()}
    while rig.engine.has_work:
        thread = threading.Thread(target=rig.step, args=(answers,))
        thread.start()
        thread.join()
    (answer,) = answers.values()
    assert answer.error is None
    assert answer.tokens == expected.tokens
    rig.engine.close()
    with pytest.raises(InvariantViolation, match="closed"):
        rig.engine.runner.collect()
    rig.engine.close()


# Settings


def test_facts_and_capacity(model_path: Path) -> None:
    runner = open_runner(model_path, max_model_len=200)
    facts, capacity = runner.facts(), runner.capacity()
    assert facts.backend.startswith("mlx ")
    assert (facts.device, facts.num_threads, facts.dtype) == ("cpu", 1, "float32")
    assert facts.kv_bytes == 2 * 2 * NUM_BLOCKS * 32 * 2 * 16 * 4
    assert facts.weight_bytes > 0
    sizes = capacity.num_blocks, capacity.block_size, capacity.max_num_seqs, capacity.max_model_len, capacity.vocab_size
    assert sizes == (NUM_BLOCKS, 32, 4, 200, VOCAB)
    assert capacity.has_overlap
    runner.use_threads(3)
    runner.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "metal"},
        {"device": "cuda"},
        {"dtype": "int8"},
        {"max_model_len": 513},
        {"num_blocks": 1 << 40},
        {"num_blocks": None, "kv_memory": 1},
    ],
)
def test_unsupported_settings_are_refused(model_path: Path, settings: dict[str, Any]) -> None:
    if settings.get("device") == "metal" and mx.metal.is_available():
        settings = {"device": "cuda"}
    with pytest.raises(InvalidRequest, match=next(iter(reversed(settings)))):
        open_runner(model_path, **settings)


def test_the_default_pool_is_bounded(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CPU_CAP", 8 << 20)
    runner = open_runner(model_path, num_blocks=None)
    assert runner.facts().kv_bytes <= 8 << 20
    assert runner.facts().kv_bytes > 7 << 20
    runner.close()
