"""The FP8 KV cache of both torch runners: bytes, copies, and distributions that depend on nothing but the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.backends.sampling import BROKEN
from quire.backends.torch import attention_work, graphs
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.decoder import DecoderModel
from quire.core.step import BlockCopy
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.generation import GenerationParams
from quire.engine.llm import LLM
from quire.errors import InvalidRequest
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
    monkeypatch.setattr(attention_work, "MIN_SHARED", 64)
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
    assert store.num_window_bytes == 6 * SPEC.window_block_bytes(8, 4)
    assert store.num_bytes == 10 * SPEC.full_block_bytes(8, 4) + store.num_window_bytes
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
    store.purge([3, 4])
    context.read(0)
    assert not context.keys[0, 0, 8].any()
    assert float((context.values[0, 0, 8] - 1).abs().max()) < 0.01
    assert float((context.keys[0, 0, 0] - 1).abs().max()) < 0.01


@pytest.mark.nightly
def test_a_failed_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """A NaN in the cache fails its request, and not the next one, which gets the same blocks."""
    small("llama", tmp_path)
    tokens = [token for token in prompt(40) if token != 7]
    for rig in (Rig(tmp_path, kv_cache_dtype="fp8", num_blocks=4), FusedRig(tmp_path, is_fp8=True, num_blocks=4)):
        runner: Any = rig.engine.runner
        expected = rig.answer(tokens, 2)
        rig.reset()
        assert isinstance(runner.model, DecoderModel)
        with torch.inference_mode():
            runner.model.embedding[7] = float("nan")
        assert rig.answer([7, *tokens], 2).error == BROKEN
        assert not any(bool(pool.isnan().any()) for pool in runner.store.scale_pools.values())
        rig.reset()
        assert distance(rig.answer(tokens, 2), expected) < BOUND


# Settings


def test_the_pool_holds_more_tokens(tmp_path: Path) -> None:
    path = small("qwen3", tmp_path).path
    sizes: dict[str, Any] = {"kv_memory": 1 << 20, "num_blocks": None}
    plain, fp8 = Rig(path, **sizes), Rig(path, kv_cache_dtype="fp8", **sizes)
    head_size = plain.engine.runner.model.spec.attention.head_size  # type: ignore[attr-defined]
    ratio = fp8.engine.capacity.num_blocks / plain.engine.capacity.num_blocks
    assert ratio == pytest.approx(4 * head_size / (head_size + 2), rel=0.03)  # fp32 on a CPU
    assert fp8.engine.runner.facts().kv_bytes <= 1 << 20
    assert (plain.engine.runner.facts().kv_dtype, fp8.engine.runner.facts().kv_dtype) == ("float32", "fp8")
    assert fp8.engine.runner.facts().dtype == "float32, KV cache in fp8"


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt_neox")
    config = EngineConfig(backend="torch", device="cpu", num_blocks=20, kv_cache_dtype="fp8")
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype = 'fp8': \w+ runs through transformers"):
        make_engine(tmp_path, config)


def test_a_cache_on_disk_is_not_read_in_another_type(tiny_model: Path, tmp_path: Path) -> None:
    """A cache that was written in FP8 is read in FP8 only, and one in fp32 in fp32 only."""
    given = GenerationParams(max_tokens=2, temperature=0.0)
    tokens = [7 + number % 50 for number in range(200)]
    num_cached = []
    for kv_cache_dtype in ("fp8", "auto", "fp8", "auto"):
        with LLM(
            tiny_model,
            backend="torch",
            device="cpu",
            num_blocks=40,
            max_model_len=512,
            disk_cache="16M",
            cache_dir=str(tmp_path / "kv"),
            kv_cache_dtype=kv_cache_dtype,
        ) as llm:
            assert llm.engine.scheduler.cache.levels is not None
            llm.engine.scheduler.cache.levels.ns_per_token = 10**9  # so that every load pays
            (output,) = llm.generate([tokens], given)
            num_cached.append(output.usage.cached_tokens)
    assert num_cached == [0, 0, 199, 199]
