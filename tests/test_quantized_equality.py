"""Answers of quantised models do not depend on batching, as those of 16-bit models (`tests.equality`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.backends.torch.packed import PackedLinear
from quire.engine.model_text import ModelText
from quire.weights.quantizing import quantize_folder
from tests.backends.torch.rig import Rig
from tests.equality import CONDITIONS, answer_alone, compare, compare_on_hits, make_prompts
from tests.selection import mostly_nightly
from tests.weights.layouts import LAYOUTS, write_k_quants
from tests.weights.makers import VOCAB
from tests.weights.plain_folder import write_plain_folder
from tests.weights.test_quantizing import write_pair

NUM_PROMPTS, NUM_TOKENS = 4, 5  # of the default model
LAYOUTS_OF_TINY = {"fp8": "fp8 small blocks", "fp8 per output": "ct fp8 channel", "int4": "awq g32"}
GGUF_TYPES = {"Q4_K and Q6_K": None, "Q5_K": "Q5_K", "Q4_1": "Q4_1", "MXFP4": "MXFP4"}
PACKED = {  # as the torch backend describes its weights
    "fp8": "float32, fp8", "fp8 per output": "float32, fp8", "int4": "float32, int4",
    "Q4_K and Q6_K": "float32, int4, int8", "Q5_K": "float32, int8", "Q4_1": "float32, int4", "MXFP4": "float32, fp4",
    "default": "float32, int4", "default fp8": "float32, fp8", "default w4a16-asym": "float32, int4",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kept_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all formats packed on the CPU, as on a GPU."""
    monkeypatch.setattr(PackedLinear, "holds", classmethod(lambda _cls, _format: True))


def check(rig: Rig, prompts: list[tuple[int, ...]], num_tokens: int, conditions: list[str]) -> None:
    alone = answer_alone(rig, prompts, num_tokens)
    assert len({one.tokens for one in alone}) > 1  # the answers depend on the prompts
    for name in conditions:
        outcome = compare(rig, alone, name)
        assert outcome.differences == []
        assert outcome.num_tokens + len(outcome.near_ties) >= len(prompts)
        assert outcome.num_accepted or not CONDITIONS[name].get("has_drafts")
    assert compare_on_hits(rig, alone).differences == []


def check_packed(rig: Rig, name: str) -> None:
    """Check that the model's weights are packed, and not decoded."""
    if rig.config.backend == "torch":
        assert rig.engine.runner.facts().dtype == PACKED[name]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", [*LAYOUTS_OF_TINY, *GGUF_TYPES])
def test_small_models(name: str, backend: str, tiny_model: Path, tmp_path: Path) -> None:
    if name in GGUF_TYPES:
        path = write_k_quants(tmp_path, GGUF_TYPES[name])
    else:
        path, _ = write_pair(tiny_model, tmp_path, LAYOUTS[LAYOUTS_OF_TINY[name]])
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, VOCAB, int(length)).tolist()) for length in rng.integers(2, 40, 7)]
    rig = Rig(path, backend=backend, num_blocks=64)
    check_packed(rig, name)
    check(rig, prompts, 8, list(CONDITIONS))
    rig.engine.close()


@pytest.fixture(scope="module")
def plain(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain_folder(tmp_path_factory.mktemp("models") / "plain", default_model)


@pytest.mark.parametrize("backend", mostly_nightly(["native", "torch"], 1))
@pytest.mark.parametrize("name", ["default", "default fp8", "default w4a16-asym"])
@pytest.mark.kept("w4a16")
@pytest.mark.nightly
def test_the_default_model(name: str, backend: str, default_model: Path, plain: Path, tmp_path: Path) -> None:
    """Its own file has 4 bits and minima, as Q4_K has."""
    path = default_model
    if name != "default":
        path = tmp_path / "made"
        quantize_folder(plain, path, name.split()[1], 32)
    text = ModelText.open(default_model)
    rig = Rig(path, backend=backend, num_blocks=200, max_num_seqs=16)
    check_packed(rig, name)
    check(rig, make_prompts(text, NUM_PROMPTS), NUM_TOKENS, ["batched"])
    rig.engine.close()
    text.close()
