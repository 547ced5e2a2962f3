"""Block I/O of the native runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.backends import kv_memory
from quire.backends.block_io import model_key
from quire.backends.kv_memory import LayerKV
from quire.backends.native.runner import NativeRunner
from quire.weights.opening import open_checkpoint
from quire.weights.spec import OTHER, RopeSpec
from tests.backends.block_io_contract import BlockIOContract, block_io
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_runner import open_runner

SETTINGS: dict[str, Any] = {"block_size": 8, "num_blocks": 20}
FAMILIES = ("llama", "gemma3", "gemma4 with shared layers", "mistral with a window", "qwen3_5", "lfm2")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    RoundedReference(request.param, folder)
    return folder


@pytest.fixture
def runner(folder: Path) -> Iterator[NativeRunner]:
    runner = open_runner(folder, **SETTINGS)
    yield runner
    runner.close()


class TestNative(BlockIOContract):
    def test_a_piece_is_all_layers(self, runner: NativeRunner) -> None:
        """Layers that share keys are stored once."""
        memory, sizes = runner.model.memory, block_io(runner).sizes
        assert sizes.block * runner.capacity().num_blocks == memory.blocks.nbytes - 64
        assert sizes.window * runner.capacity().num_window_blocks == max(memory.window_blocks.nbytes - 64, 0)
        assert sizes.state * runner.capacity().num_states == memory.states.nbytes
        owners = [layer for layer in memory.kv.layers if isinstance(layer, LayerKV) and layer.shared_with is None]
        assert sum(len(pool) for pools in memory.pools()[:2] for pool in pools) == len(owners)


def layout_of(folder: Path, **settings: Any) -> str:
    runner = open_runner(folder, **{**SETTINGS, **settings})
    layout = block_io(runner).layout
    runner.close()
    return layout


def test_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that changes bytes is named; sizes of the pools are not."""
    RoundedReference("gemma3", tmp_path / "a")
    RoundedReference("gemma3", tmp_path / "b", rms_norm_eps=1e-5)
    plain = layout_of(tmp_path / "a")
    assert plain == layout_of(tmp_path / "a", num_blocks=30, max_num_seqs=3, threads=2, max_model_len=300)
    assert layout_of(tmp_path / "a", num_blocks=30) == plain
    others: list[dict[str, Any]] = [
        {"block_size": 16},
        {"precision": "exact"},
        {"precision": "fast"},
        {"max_model_len": 20},
    ]
    layouts = [plain, *(layout_of(tmp_path / "a", **other) for other in others), layout_of(tmp_path / "b")]
    monkeypatch.setattr(kv_memory, "HAS_WINDOWS", False)
    layouts.append(layout_of(tmp_path / "a"))
    assert len(set(layouts)) == len(layouts)


def test_a_longer_context_may_have_other_frequencies(tmp_path: Path) -> None:
    RoundedReference("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.spec
    checkpoint.close()
    rope = RopeSpec(1e4, 16, (1.0,) * 8, long_factors=(2.0,) * 8, original_context=100)
    layers = tuple(replace(layer, mixer=replace(layer.attention, rope=rope)) for layer in spec.layers)
    keys = {length: model_key(replace(spec, layers=layers), (), length) for length in (90, 100, 101, 200)}
    assert keys[90] == keys[100] != keys[101] == keys[200]
    assert model_key(spec, (), 90) == model_key(spec, (), 200) not in keys.values()
    other = replace(spec, family=OTHER)  # what another library does with long contexts is not known
    assert model_key(other, (), 90) != model_key(other, (), 200)


def test_kernels_are_part_of_the_layout(tmp_path: Path, kernels: str) -> None:
    RoundedReference("llama", tmp_path)
    assert f"kernels={kernels.replace(' ', '_')} " in layout_of(tmp_path)
