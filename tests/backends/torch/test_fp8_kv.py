"""The FP8 KV cache of both torch runners: bytes, copies, and distributions that depend on nothing but the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.backends.torch import attention_work, graphs
from quire.backends.torch.kv_store import KVStore
from quire.core.step import BlockCopy
from quire.engine.composition import EngineConfig, make_engine
from quire.errors import InvalidRequest
from tests.backends.plans import piece
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.hf_architectures import write_model
from tests.backends.torch.rig import Answer, Rig
from tests.backends.torch.test_cuda import prompt, small

# Padding rows compute on any memory content. The interpreter computes in numpy, which warns about it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]

# Of log-probabilities. Two ways to compute a key in fp32 differ in the last bit, which may round to another code.
BOUND = 2e-3
FAMILIES = ("llama tied", "gemma3", "gemma4 with shared layers", "gpt_oss", "mistral with a window", "qwen3_5", "phi3")
CPU = torch.device("cpu")
SPEC = KVSpec((LayerKV(1, 8), LayerKV(2, 16, window=16), LayerState(2, 12), LayerKV(1, 8, shared_with=0)), is_fp8=True)


def rows(answer: Answer) -> Tensor:
    assert answer.error is None
    return torch.stack(answer.rows)


def distance(one: Answer, other: Answer) -> float:
    assert one.tokens == other.tokens
    return float((rows(one) - rows(other)).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.kept("llama", "gemma3", "qwen3_5")
def test_both_runners_agree(name: str, tmp_path: Path) -> None:
    """And differ from a cache in fp32, by the rounding of keys and values."""
    small(name, tmp_path)
    tokens = prompt(35)
    plain = Rig(tmp_path).answer(tokens, 3)
    reference = Rig(tmp_path, kv_cache_dtype="fp8").answer(tokens, 3)
    fused = FusedRig(tmp_path, is_fp8=True).answer(tokens, 3)
    assert distance(reference, fused) < BOUND
    assert float((rows(plain)[0] - rows(reference)[0]).abs().max()) > 2 * distance(reference, fused)
    assert float((rows(plain)[0] - rows(reference)[0]).abs().max()) < 0.1


@pytest.mark.parametrize("name", ["llama tied", "gemma3", "qwen3_5"])
def test_chunks_batches_and_cached_prefixes_change_nothing(name: str, tmp_path: Path) -> None:
    """Keys of the present chunk are read through the cache too, so it does not matter where a prompt is cut."""
    small(name, tmp_path)
    tokens, other = prompt(60), prompt(21, 7)
    rig = Rig(tmp_path, kv_cache_dtype="fp8", enable_prefix_caching=False)
    whole = rig.answer(tokens, 6)
    plain = Rig(tmp_path).answer(tokens, 6)
    found: dict[str, Answer] = {}
    rig.reset(max_chunk_tokens=7, enable_prefix_caching=False)
    found["in chunks"] = rig.answer(tokens, 6)
    rig.reset(enable_prefix_caching=False)
    first, _ = rig.start(tokens, 6), rig.start(other, 9)
    found["batched"] = rig.run(first, first + 1)[first]
    rig.reset(enable_prefix_caching=True)
    rig.answer(tokens, 2)
    found["on a cached prefix"] = rig.answer(tokens, 6)
    assert found["on a cached prefix"].num_cached_tokens >= 32
    for answer in found.values():
        assert distance(answer, whole) < BOUND
    assert float((rows(plain)[0] - rows(whole)[0]).abs().max()) > BOUND  # rounding of the cache shows


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.kept("True")
def test_siblings_and_graphs(has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings read a shared prefix in wide items; forks copy codes and scales of their last block."""
    small("llama", tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(attention_work, "PIECE", 64)
    rig = FusedRig(tmp_path, is_fp8=True)
    monkeypatch.setattr(graphs, "MAX_MISSES", 2 if has_graphs else 1000)
    if has_graphs:
        monkeypatch.setattr(rig.runner._graphs, "_is_compiled", lambda: True)
    head = prompt(70)  # ends within a block
    rig.answer([*head, 5], 1)
    ids = [rig.start(head + prompt(4, seed), 5) for seed in range(5)]
    answers = rig.run(*ids)
    assert rig.num_copies
    assert bool(rig.runner._graphs._graphs) == has_graphs
    reference = Rig(tmp_path, kv_cache_dtype="fp8", enable_prefix_caching=False)
    for seed, request_id in enumerate(ids):
        assert answers[request_id].num_cached_tokens == len(head)
        assert distance(answers[request_id], reference.answer(head + prompt(4, seed), 5)) < BOUND


# The store


def test_bytes() -> None:
    """A byte for each number, two for each scale. States have the type of the model."""
    full, window = 2 * (8 + 2), 2 * 2 * (16 + 2)
    assert SPEC.full_block_bytes(8, 4) == SPEC.full_block_bytes(8, 2) == 8 * full
    assert SPEC.window_block_bytes(8, 4) == 8 * window
    assert SPEC.state_bytes(4) == replace(SPEC, is_fp8=False).state_bytes(4) == 2 * 12 * 4
    assert SPEC.context_bytes(100, 2) == 100 * full + 16 * window + 2 * 12 * 2
    assert SPEC.within(10).is_fp8
    store = KVStore(SPEC, 10, 8, torch.float32, CPU, 6)
    assert store.facts()["window_bytes"] == 6 * SPEC.window_block_bytes(8, 4)
    assert store.facts()["kv_bytes"] == 10 * SPEC.full_block_bytes(8, 4) + store.facts()["window_bytes"]
    assert store.layers[3] is store.layers[0]
    assert store.scales[3] is store.scales[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_reads_what_it_wrote(dtype: torch.dtype) -> None:
    store = KVStore(SPEC, 10, 8, dtype, CPU, 6)
    kv = torch.randn(12, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)  # layer 1: 2 KV heads of 16
    blocks = torch.tensor([3] * 8 + [5] * 4)
    slots = store.slots(blocks, torch.tensor([2] * 8 + [4] * 4), torch.arange(12) % 8)
    store.store(1, kv, slots)
    (context,) = store.contexts(torch.tensor([[2, 4]]), 12, 16).values()
    context.read(1)
    got = torch.cat((context.keys, context.values), 1)[0].transpose(0, 1)
    assert got.dtype == dtype
    assert bool(((got - kv).abs() <= kv.abs() / 16 + kv.abs().amax(-1, keepdim=True) * 2**-17).all())
    store.copy([BlockCopy(2, 1)], is_window=True)
    (copied,) = store.contexts(torch.tensor([[1, 4]]), 12, 16).values()
    copied.read(1)
    assert torch.equal(torch.cat((copied.keys, copied.values), 1)[0].transpose(0, 1), got)


def test_a_purge_removes_what_is_not_finite() -> None:
    store = KVStore(SPEC, 10, 8, torch.float32, CPU, 6)
    kv = torch.ones(2, 2, 8)
    kv[1, 0, 3] = float("nan")
    store.store(0, kv, store.slots(torch.tensor([3, 4]), torch.tensor([1, 1]), torch.tensor([0, 0])))
    (context,) = store.contexts(torch.tensor([[3, 4]]), 9).values()
    assert int(store.scales[0].isnan().sum()) == 1
    context.read(0)
    assert context.keys[0, 0, 8].isnan().all()
    store.purge(piece(block_table=[3, 4], window_table=[]))
    context.read(0)
    assert not context.keys[0, 0, 8].any()
    assert float((context.values[0, 0, 8] - 1).abs().max()) < 0.01
    assert float((context.keys[0, 0, 0] - 1).abs().max()) < 0.01


# Settings


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt_neox")
    config = EngineConfig(backend="torch", device="cpu", num_blocks=20, kv_cache_dtype="fp8")
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype = 'fp8': \w+ runs through transformers"):
        make_engine(tmp_path, config)
