"""The division of memory among blocks, window blocks and recurrent states."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from quire.backends import kv_memory
from quire.backends.base import BackendOptions
from quire.backends.kv_memory import (
    MIN_SNAPSHOTS,
    KVCosts,
    KVSpec,
    LayerKV,
    LayerState,
    MemoryRequest,
)
from quire.errors import InvalidRequest

MIB, GIB = 1 << 20, 1 << 30
# Gemma 3 4B in bf16: 29 layers with a window of 1024 and 5 without; 4 heads of 256.
WINDOWS = KVCosts(full_block=5 * 128 * 1024, window_block=29 * 128 * 1024, window=1024)
# Qwen3.5 0.8B in bf16: 6 layers with 2 heads of 256, and 18 with a state of 1 MiB.
STATES = KVCosts(full_block=6 * 64 * 1024, state=18 * MIB)


def request(costs: KVCosts, *, has_overlap: bool = True, max_model_len: int = 32_768, **options: Any) -> MemoryRequest:
    chosen = BackendOptions(**options)
    return MemoryRequest(chosen, costs, max_model_len, chosen.max_num_seqs or 256, 8192, has_overlap)


def test_windows_of_long_contexts_cost_what_the_window_costs() -> None:
    """For 4 blocks there is one window block: the window and a chunk are 2,048 of 8,192 tokens."""
    memory = request(WINDOWS).divide(64 * GIB, 40 * GIB)
    assert memory.max_chunk_tokens == 1024
    assert memory.num_window_blocks == -(-memory.num_blocks // 4)
    assert 0 <= 40 * GIB - memory.num_bytes(WINDOWS) < WINDOWS.full_block + WINDOWS.window_block
    whole = request(KVCosts(WINDOWS.full_block + WINDOWS.window_block)).divide(64 * GIB, 40 * GIB)
    assert memory.num_blocks > 2.7 * whole.num_blocks


def test_a_window_pool_holds_at_least_one_request() -> None:
    memory = request(WINDOWS, kv_memory=400 * MIB).divide(GIB, GIB)
    assert memory.num_window_blocks == 2047 // 32 + 4 == 67
    assert memory.num_blocks == (400 * MIB - 67 * WINDOWS.window_block) // WINDOWS.full_block
    larger = request(WINDOWS, num_blocks=100, max_chunk_tokens=4096).divide(GIB, GIB)
    assert (larger.num_window_blocks, larger.max_chunk_tokens) == (5119 // 32 + 4, 4096)
    with pytest.raises(InvalidRequest, match=r"^kv_memory = 200 MiB is less than the .* 67 window blocks and 0 states"):
        request(WINDOWS, kv_memory=200 * MIB).divide(GIB, GIB)


def test_short_contexts_have_a_window_block_for_every_block() -> None:
    memory = request(WINDOWS, max_model_len=2048).divide(64 * GIB, 4 * GIB)
    assert memory.num_window_blocks == memory.num_blocks


def test_a_model_of_windows_only() -> None:
    """Blocks that are stored in no layer cost nothing; they are in proportion to the window blocks."""
    costs = replace(WINDOWS, full_block=0)
    memory = request(costs).divide(64 * GIB, 4 * GIB)
    assert memory.num_window_blocks == 4 * GIB // costs.window_block
    assert 4 * (memory.num_window_blocks - 1) < memory.num_blocks <= 4 * memory.num_window_blocks
    small = request(costs, kv_memory=300 * MIB).divide(GIB, GIB)
    assert (small.num_window_blocks, small.num_blocks) == (300 * MIB // costs.window_block, 328)


def test_states_get_half_of_what_running_requests_leave() -> None:
    memory = request(STATES).divide(120 * GIB, 100 * GIB)
    num_live = 1 + 2 * 256
    left = 100 * GIB - num_live * STATES.state
    assert memory.max_num_seqs == 256
    assert memory.num_states - num_live == left // 2 // STATES.state
    assert 0 <= 100 * GIB - memory.num_bytes(STATES) < STATES.full_block
    one_each = request(STATES, has_overlap=False, max_num_seqs=64).divide(120 * GIB, 4 * GIB)
    assert one_each.num_states == 65 + (4 * GIB - 65 * STATES.state) // 2 // STATES.state


def test_there_are_no_more_cached_states_than_blocks() -> None:
    costs = KVCosts(full_block=MIB, state=1024)
    memory = request(costs, max_num_seqs=4).divide(2 * GIB, GIB)
    assert 0.49 * memory.num_blocks < memory.num_states - 9 <= memory.num_blocks  # as many as half of them at least
    assert 0 <= GIB - memory.num_bytes(costs) < 2 * MIB
    assert request(costs, num_blocks=10, max_num_seqs=4).divide(GIB, GIB).num_states == 9 + 10
    assert request(costs, num_blocks=3, max_num_seqs=4).divide(GIB, GIB).num_states == 9 + MIN_SNAPSHOTS


def test_fewer_requests_run_if_their_states_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        memory = request(STATES).divide(16 * GIB, 8 * GIB)
    assert memory.max_num_seqs == (4 * GIB // STATES.state - 1) // 2 == 113
    assert "max_num_seqs is 113 instead of 256" in caplog.text
    assert memory.num_bytes(STATES) <= 8 * GIB
    configured = request(STATES, max_num_seqs=200).divide(16 * GIB, 8 * GIB)  # more than half, as configured
    assert configured.max_num_seqs == 200
    with pytest.raises(InvalidRequest, match=r"^max_num_seqs = 256 takes .* has room for those of 223\. Lower max_num"):
        request(STATES, max_num_seqs=256).divide(16 * GIB, 8 * GIB)
    with pytest.raises(InvalidRequest, match=r"^max_num_seqs = 256 takes .* KV cache of 20.0 MiB has room for those"):
        request(STATES, kv_memory=20 * MIB).divide(16 * GIB, 8 * GIB)


def test_configured_sizes_are_refused_if_they_do_not_fit() -> None:
    with pytest.raises(InvalidRequest, match=r"^kv_memory = 8\.0 GiB is more than the 4\.0 GiB that are free$"):
        request(STATES, kv_memory=8 * GIB).divide(4 * GIB, GIB)
    with pytest.raises(InvalidRequest, match=r"^num_blocks = 100000 takes .* with 25000 window blocks and 0 states"):
        request(WINDOWS, num_blocks=100_000).divide(4 * GIB, GIB)
    with pytest.raises(InvalidRequest, match="holds 0 states and a context of 0 tokens, which is too short"):
        request(WINDOWS).divide(GIB, 100 * MIB)


def test_any_budget_is_used_and_not_exceeded() -> None:
    rng = Random(1)
    for _ in range(500):
        window = rng.choice([0, 24, 1024, 4096])
        costs = KVCosts(
            full_block=rng.choice([0, 4096, 300_000]) if window else rng.choice([4096, 300_000]),
            window_block=rng.choice([5000, 900_000]) if window else 0,
            state=rng.choice([0, 3000, MIB]),
            window=window,
        )
        budget = rng.choice([MIB, 50 * MIB, GIB, 20 * GIB])
        try:
            memory = request(costs, kv_memory=budget, max_num_seqs=rng.choice([None, 1, 8])).divide(64 * GIB, 0)
        except InvalidRequest:
            continue
        assert memory.num_bytes(costs) <= budget
        assert memory.num_blocks >= 2
        more = replace(memory, num_blocks=memory.num_blocks + 2, num_window_blocks=memory.num_window_blocks + 2)
        assert not window or more.num_bytes(costs) > budget or not costs.full_block
        assert bool(memory.num_window_blocks) == bool(window)
        assert bool(memory.num_states) == bool(costs.state)
        if costs.state:
            assert memory.num_states >= 1 + 2 * memory.max_num_seqs + MIN_SNAPSHOTS


SPEC = KVSpec((LayerKV(2, 16), LayerKV(2, 16, window=64), LayerState(3, 10)))


def test_costs_of_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", False)
    assert KVCosts.of(SPEC, 8, 2) == KVCosts(2 * 1024, state=60)
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", True)
    assert KVCosts.of(SPEC, 8, 2) == KVCosts(1024, 1024, 60, 64)
    assert KVCosts.of(SPEC, 8, 2, has_windows=False) == KVCosts(2 * 1024, state=60)
    assert KVCosts.of(SPEC.within(64), 8, 2) == KVCosts(2 * 1024, state=60)
    fp8 = replace(SPEC, is_fp8=True)  # 16 numbers and a scale of two bytes; states keep their type
    assert KVCosts.of(fp8, 8, 2) == KVCosts(8 * 4 * 18, 8 * 4 * 18, 60, 64)
