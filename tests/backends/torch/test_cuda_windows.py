"""Window blocks on the GPU runner, compared with the reference that keeps whole contexts.

Blocks behind the window are filled with NaN (`WindowBlocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.backends.torch import attention_work, graphs
from quire.backends.torch.cuda import CudaRunner, _halves
from quire.backends.torch.fused_linear import FusedLinear
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.runner import TorchRunner
from quire.core.step import StateSnapshot
from quire.weights.opening import open_checkpoint
from tests.backends.plans import piece
from tests.backends.torch.families import Reference
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.window_rig import Driver, check_shared_keys, difference, random_tokens

BOUND = 2e-5  # of log-probabilities in fp32
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {"gemma3": TWO, "mistral with a window": {"num_hidden_layers": 2}}

# Padding rows compute on any memory content. The interpreter computes in numpy, which warns about it.
pytestmark = [
    pytest.mark.sweep("file"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]

Make = Callable[..., Any]


@pytest.fixture(scope="module", params=list(MODELS))
def make_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("model")
    Reference(request.param, folder, **MODELS[request.param])
    checkpoint = open_checkpoint(folder, "auto")
    device = torch.device(DEVICE)
    with torch.inference_mode():
        model = DecoderModel(WeightLoader(checkpoint, torch.float32, device, linear=FusedLinear), 512)

    def make(num_window_blocks: int = 0, max_graph_tokens: int = 0, *, is_reference: bool = False) -> Any:
        store = KVStore(model.kv_spec.within(512), 64, 8, torch.float32, device, num_window_blocks)
        if is_reference:
            return TorchRunner(model, store, max_num_seqs=8, max_model_len=512)
        return CudaRunner(model, store, max_num_seqs=8, max_model_len=512, max_graph_tokens=max_graph_tokens)

    return make


STEPS = [
    [(0, 40), (1, 3)],
    [(0, 17), (1, 1), (2, 25)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 45), (0, 1)],
    *[[(0, 1), (1, 1), (2, 1)] for _ in range(5)],
]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_only_blocks_within_the_window_are_read(
    make_runner: Make, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_work, "PIECE", 64)  # so that rows have parts
    monkeypatch.setattr(graphs, "MAX_MISSES", 1 if has_graphs else 1000)
    tokens = [random_tokens(90, seed) for seed in range(3)]
    whole = Driver(make_runner(is_reference=True), tokens)
    runner = make_runner(num_window_blocks=30, max_graph_tokens=64 if has_graphs else 0)
    windows = Driver(runner, tokens, seed=1)
    for step in STEPS:
        whole.step(*step)
        windows.step(*step)
    assert difference(whole, windows) <= BOUND
    kinds = runner._graphs._graphs
    assert {kind.is_mixed for kind in kinds} == ({True, False} if has_graphs else set())
    assert None not in kinds.values()
    assert not any(pool[:, 0].any() for pool in runner.store.pools.values())  # padding writes nothing
    capacity, facts = runner.capacity(), runner.facts()
    assert (capacity.window, capacity.num_window_blocks) == (24, 30)
    assert 0 < facts.window_bytes <= facts.kv_bytes


def test_shared_keys_are_read_and_not_written(make_runner: Make) -> None:
    check_shared_keys(make_runner(is_reference=True), make_runner(num_window_blocks=30), 20, BOUND)


def test_a_slice_is_cut_between_its_states() -> None:
    """A slice of tokens [10, 20) that does not fit runs in halves, the second from the state that the first wrote."""
    sizes = {"start": 10, "length": 10, "tokens": list(range(10)), "block_table": [1, 2, 3]}
    whole = piece(**sizes, state_source=4, state_target=5, snapshots=(StateSnapshot(12, 6), StateSnapshot(17, 7)))
    (((first,), _), ((second,), _)) = _halves((whole,), (0,))
    assert (first.start, first.length, second.start, second.length) == (10, 5, 15, 5)
    assert (first.state_source, first.state_target, first.snapshots) == (4, 5, (StateSnapshot(12, 6),))
    assert (second.state_source, second.state_target, second.snapshots) == (5, 5, (StateSnapshot(17, 7),))
    exact = whole._replace(snapshots=(StateSnapshot(15, 6),))
    (((first,), _), ((second,), _)) = _halves((exact,), (0,))
    assert (first.state_target, first.snapshots) == (6, ())
    assert (second.state_source, second.state_target, second.snapshots) == (6, 5, ())
