"""Window blocks in the reference path: only blocks within the window are read, and shared blocks are not written."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.runner import TorchRunner
from quire.core.step import StateSnapshot
from quire.weights.opening import open_checkpoint
from tests.backends.plans import piece
from tests.backends.torch.families import Reference
from tests.backends.torch.window_rig import Driver, check_shared_keys, difference, random_tokens

BOUND = 3e-6  # of log-probabilities in fp32: sums of keys are grouped in another way
WINDOWED = ["gemma3", "mistral with a window", "gemma2"]
CPU = torch.device("cpu")

Make = Callable[..., TorchRunner]


@pytest.fixture(scope="module", params=WINDOWED)
def make_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("model")
    Reference(request.param, folder)
    checkpoint = open_checkpoint(folder, "auto")
    with torch.inference_mode():
        model = DecoderModel(WeightLoader(checkpoint, torch.float32, CPU), 512)

    def make(num_window_blocks: int = 0, num_blocks: int = 64, max_model_len: int = 512) -> TorchRunner:
        kv_spec = model.kv_spec.within(max_model_len)
        store = KVStore(kv_spec, num_blocks, 8, torch.float32, CPU, num_window_blocks)
        return TorchRunner(model, store, max_num_seqs=8, max_model_len=max_model_len)

    return make


def run_both(make_runner: Make, tokens: list[list[int]], steps: list[list[tuple[int, int]]]) -> None:
    whole, windows = Driver(make_runner(), tokens), Driver(make_runner(num_window_blocks=30), tokens, seed=1)
    for step in steps:
        whole.step(*step)
        windows.step(*step)
    assert difference(whole, windows) <= BOUND


def test_random_steps(make_runner: Make) -> None:
    rng = Random(5)
    tokens = [random_tokens(120, seed) for seed in range(4)]
    left = [len(one) for one in tokens]
    steps = []
    while any(left):
        takes = []
        for request in rng.sample(range(4), rng.randint(1, 4)):
            count = min(rng.choice([1, 1, 2, 7, 8, 20]), left[request])
            if count:
                takes.append((request, count))
                left[request] -= count
        steps += [takes] if takes else []
    run_both(make_runner, tokens, steps)


def test_a_long_prompt_is_attended_in_parts(make_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.backends.torch.batch.MAX_QUERIES", 16)
    run_both(make_runner, [random_tokens(140, 1)], [[(0, 130)], [(0, 1)]])


def test_the_size_of_both_pools(make_runner: Make) -> None:
    runner = make_runner(num_window_blocks=24)
    facts, capacity = runner.facts(), runner.capacity()
    spec = runner.model.kv_spec
    assert facts.kv_bytes == 64 * spec.full_block_bytes(8, 4) + 24 * spec.window_block_bytes(8, 4)
    assert facts.window_bytes == 24 * spec.window_block_bytes(8, 4) > 0
    assert (facts.state_bytes, capacity.num_states) == (0, 0)
    assert (capacity.window, capacity.num_window_blocks, capacity.num_blocks) == (24, 24, 64)


@pytest.mark.parametrize("num_shared", [5, 20, 34])
def test_shared_keys_are_read_and_not_written(make_runner: Make, num_shared: int) -> None:
    check_shared_keys(make_runner(num_window_blocks=30), make_runner(num_window_blocks=30), num_shared, BOUND)


# Layers of several kinds


MIXED = KVSpec(
    (
        LayerState(3, 10, num_heads=2, key_size=4, value_size=5),
        LayerKV(2, 16),
        LayerKV(2, 16, window=24),
        LayerState(2, 6),
        LayerKV(2, 16, window=24, shared_with=2),
        LayerKV(2, 16, shared_with=1),
    )
)


def test_layers_that_share_keys_have_no_storage() -> None:
    store = KVStore(MIXED, 10, 8, torch.float32, CPU, 6)
    assert sorted(store.layers) == [1, 2, 4, 5]
    assert store.layers[4] is store.layers[2]
    assert store.layers[5] is store.layers[1]
    assert store.facts()["kv_bytes"] == 10 * MIXED.full_block_bytes(8, 4) + 6 * MIXED.window_block_bytes(8, 4)
    assert KVStore(MIXED, 10, 8, torch.float32, CPU).facts()["kv_bytes"] == 10 * MIXED.block_bytes(8, 4)


def state_piece(**changes: Any) -> Any:
    return piece(**{"block_table": [1, 2, 3, 4], "window_table": [1, 2, 3, 4], **changes})


def test_pools_of_states() -> None:
    store = KVStore(MIXED, 10, 8, torch.bfloat16, CPU, 6, 9)
    assert {index: tuple(pool.shape) for index, pool in store.conv.items()} == {0: (9, 3, 10), 3: (9, 2, 6)}
    assert {index: tuple(pool.shape) for index, pool in store.matrices.items()} == {0: (9, 2, 4, 5)}
    assert (store.conv[0].dtype, store.matrices[0].dtype) == (torch.bfloat16, torch.float32)
    assert store.facts()["state_bytes"] == 9 * MIXED.state_bytes(2)
    for pool in store.state_pools():
        pool[1:] = float("nan")
    store.purge(state_piece(state_source=1, state_target=3, snapshots=(StateSnapshot(2, 7),)))
    for pool in store.state_pools():
        assert [bool(slot.isnan().any()) for slot in pool] == [n not in (0, 3, 7) for n in range(9)]
