"""The size of the KV pool: the configured size exactly, or by default a share of the free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.backends import kv_memory
from quire.backends.base import BackendOptions
from quire.backends.kv_memory import CPU_CAP, CPU_SHARE, DEFAULT_MAX_BLOCKS, KVCosts, MemoryRequest
from quire.engine.composition import EngineConfig, make_engine
from quire.errors import InvalidRequest

GIB = 1 << 30
BLOCK_BYTES = 23_040 * 32  # SmolLM2-135M in fp16


def request(max_model_len: int = 2048, block_bytes: int = BLOCK_BYTES, **options: Any) -> MemoryRequest:
    settings = BackendOptions(max_num_seqs=4, **options)
    return MemoryRequest(settings, KVCosts(block_bytes), max_model_len, 4, 512, has_overlap=False)


def test_kv_memory_is_used_exactly() -> None:
    """4 requests of 2,048 tokens use at most 256 blocks: the other 11,393 are prefix cache."""
    assert request(kv_memory=8 * GIB).divide(16 * GIB, GIB).num_blocks == 8 * GIB // BLOCK_BYTES == 11_650


def test_num_blocks_is_used_exactly() -> None:
    assert request(num_blocks=10_000).divide(16 * GIB, GIB).num_blocks == 10_000
    with pytest.raises(InvalidRequest, match="num_blocks = 10000 take"):
        request(num_blocks=10_000).divide(GIB, GIB)


@pytest.mark.parametrize("max_model_len", [64, 2048, 1 << 20])
def test_the_default_uses_the_whole_budget(max_model_len: int) -> None:
    assert request(max_model_len).divide(16 * GIB, 3 * GIB).num_blocks == 3 * GIB // BLOCK_BYTES


@pytest.mark.parametrize(("free", "taken"), [(4 * GIB, int(4 * GIB * CPU_SHARE)), (64 * GIB, CPU_CAP)])
def test_the_default_on_a_cpu(free: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: free)
    assert request().divide_on_cpu().num_blocks == taken // BLOCK_BYTES


def test_only_the_default_number_of_blocks_is_bounded() -> None:
    assert request(4096, 1024).divide(8 * GIB, 4 * GIB).num_blocks == DEFAULT_MAX_BLOCKS
    assert request(4096, 1024, kv_memory=4 * GIB).divide(8 * GIB, 4 * GIB).num_blocks == 4 << 20


def test_a_default_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds a context of 0 tokens"):
        request().divide(GIB, -1)


def pool_of(path: Path, **settings: Any) -> tuple[int, int]:
    """Return the blocks and bytes of an engine for two requests of 64 tokens, which use 4 blocks."""
    engine = make_engine(path, EngineConfig(device="cpu", threads=1, max_num_seqs=2, max_model_len=64, **settings))
    try:
        return engine.capacity.num_blocks, engine.runner.facts().kv_bytes
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_backends_allocate_the_configured_pool(backend: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks, num_bytes = pool_of(tiny_model, backend=backend, num_blocks=100)
    assert num_blocks == 100
    block_bytes = num_bytes // 100
    assert pool_of(tiny_model, backend=backend, kv_memory=1000 * block_bytes + 7)[0] == 1000
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 10 << 20)
    assert pool_of(tiny_model, backend=backend)[0] == int((10 << 20) * CPU_SHARE) // block_bytes
