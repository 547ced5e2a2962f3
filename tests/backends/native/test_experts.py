"""Routed experts: the choice, stacked tensors of GGUF files, batches of all shapes, and experts in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.base import Capacity
from quire.backends.native import packing
from quire.backends.native.library import Floats
from quire.backends.native.model import Engine, NativeModel
from quire.backends.native.packing import pack_model
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import open_checkpoint
from tests.backends.contract import random_prompt
from tests.backends.native.matrices import logits_of, same_bits
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_models import check
from tests.backends.torch.rig import Rig
from tests.weights.makers import HIDDEN


def model_of(checkpoint: Checkpoint, num_threads: int = 1, precision: str = "exact") -> NativeModel:
    packed = pack_model(checkpoint, num_threads)
    capacity = Capacity(64, 16, max_num_seqs=1, max_model_len=400, vocab_size=checkpoint.spec.vocab_size)
    return NativeModel(checkpoint.spec, packed, Engine(num_threads), capacity, precision)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = tmp_path_factory.mktemp("model")
    RoundedReference("olmoe", folder)
    checkpoint = open_checkpoint(folder)
    yield checkpoint
    checkpoint.close()


# Batches


@pytest.mark.parametrize("length", [1, 2, 3, 5, 17, 300])
@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_rows_do_not_depend_on_others(olmoe: Checkpoint, length: int, num_threads: int) -> None:
    """The logits of the first tokens of a prompt are the same with any tokens after them, on any number of threads."""
    one, many = model_of(olmoe), model_of(olmoe, num_threads)
    prompt = random_prompt(length, length)
    whole = logits_of(one, prompt)
    assert same_bits(logits_of(many, prompt), whole)
    for part in {1, length // 2, length - 1} - {0}:
        assert same_bits(logits_of(one, prompt[:part]), whole[:part])
    one.engine.close()
    many.engine.close()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", ["fast", "balanced", "exact"])
def test_every_variant_and_precision(olmoe: Checkpoint, precision: str) -> None:
    """Experts with one, two, three and more rows take different paths through the kernels."""
    model = model_of(olmoe, 2, precision)
    prompt = random_prompt(1, 40)
    whole = logits_of(model, prompt)
    for part in range(1, 12):
        assert same_bits(logits_of(model, prompt[:part]), whole[:part])
    model.engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 64, "num_experts_per_tok": 1},
        {"num_experts": 3, "num_experts_per_tok": 3},
        {"num_experts": 33, "num_experts_per_tok": 8, "moe_intermediate_size": 20},
        {"norm_topk_prob": False},
    ],
    ids=str,
)
def test_other_numbers_of_experts(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = RoundedReference("qwen3_moe", tmp_path, **changes)
    rig = Rig(tmp_path, backend="native", precision="exact")
    for length in (1, 40):
        prompt = random_prompt(length, length)
        check(reference, prompt, rig.answer(prompt, 10))
    rig.engine.close()


# The choice


def choice_of(folder: Path, router: Floats) -> Floats:
    """Return the logits of two tokens of a model with this router in its only layer."""
    RoundedReference("mixtral", folder, num_hidden_layers=1, num_local_experts=len(router))
    checkpoint = open_checkpoint(folder)
    packed = pack_model(checkpoint, 1)
    found = np.ascontiguousarray(router, np.float32)
    packed.layers[0].router = found.ctypes.data
    capacity = Capacity(4, 16, max_num_seqs=1, max_model_len=16, vocab_size=checkpoint.spec.vocab_size)
    model = NativeModel(checkpoint.spec, packed, Engine(1), capacity)
    logits = logits_of(model, [5, 6])
    model.engine.close()
    checkpoint.close()
    return logits


def test_of_equal_scores_the_lower_number_is_chosen(tmp_path: Path) -> None:
    """Experts 0 and 1 win all ties: a lower score of the others changes nothing."""
    equal = np.zeros((5, HIDDEN), np.float32)
    logits = choice_of(tmp_path, equal)
    assert np.isfinite(logits).all()
    mean = np.full(HIDDEN, 1e-3, np.float32)
    by_sign = [choice_of(tmp_path, np.stack([0 * mean, 0 * mean, *3 * [sign * mean]])) for sign in (1, -1)]
    assert any(same_bits(one, logits) for one in by_sign)
    assert not all(same_bits(one, logits) for one in by_sign)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_detected(tmp_path: Path, wrong: float) -> None:
    router = np.random.default_rng(0).normal(size=(5, HIDDEN)).astype(np.float32)
    router[3, 7] = wrong
    assert not np.isfinite(choice_of(tmp_path, router)).any()


# Files


# Memory


def test_experts_in_a_file(olmoe: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = logits_of(model_of(olmoe), random_prompt(2, 30))
    monkeypatch.setattr(packing, "available_bytes", lambda: 1000)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    model = model_of(olmoe, 2)
    assert model.packed.has_experts_on_disk
    assert list((tmp_path / "cache").iterdir()) == []  # the file has no name
    assert same_bits(logits_of(model, random_prompt(2, 30)), expected)
    model.engine.close()


@pytest.mark.parametrize(("other_bytes", "is_file"), [(700, False), (701, True)])
def test_the_share_of_memory(other_bytes: int, is_file: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packing, "available_bytes", lambda: 1000)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    memory = packing.ExpertMemory({"a": 30, "b": 36}, other_bytes=other_bytes - 28)
    assert memory.is_file == is_file
    assert not packing.ExpertMemory({}, other_bytes=10_000).is_file  # a dense model needs none
    memory["a"][:], memory["b"][:] = 1, 2
    assert (memory["a"].size, memory["b"].size, memory["a"].sum(), memory["b"].sum()) == (30, 36, 30, 72)


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="QUIRE_CACHE"):
        packing.map_new_file(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []
