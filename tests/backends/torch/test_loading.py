"""Weights that are made up: the same every time, as the layers expect them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.torch.loading import DUMMY_STD, ModelWeights, load_weights
from quire.weights.opening import open_checkpoint
from tests.backends.torch.families import FAMILIES


def made_up(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    config = FAMILIES[name]()
    architecture = {"gemma3_text": "Gemma3ForCausalLM"}.get(config.model_type)
    document = config.to_dict()
    document["architectures"] = [architecture or f"{config.model_type.capitalize()}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(document))
    checkpoint = open_checkpoint(folder, "dummy")
    with torch.inference_mode():
        return load_weights(checkpoint, dtype, torch.device("cpu"))


def matrices(weights: ModelWeights) -> list[Tensor]:
    linears = [
        linear
        for layer in weights.layers
        for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    ]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [weights.embedding, weights.head, *(linear.weight for linear in linears), *biases]


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "gemma3", "phi3"])
def test_norms_are_one_and_the_rest_is_small_noise(name: str, tmp_path: Path) -> None:
    weights = made_up(name, tmp_path)
    for norm in (weights.norm, *(norm for layer in weights.layers for norm in layer.norms.values())):
        assert (norm == 1).all()  # gemma's too, whose files hold what is to be added to 1
    for matrix in matrices(weights):
        assert 0 < float(matrix.abs().max()) < 6 * DUMMY_STD
    assert 0.9 < float(weights.embedding.std()) / DUMMY_STD < 1.1


def test_they_are_the_same_every_time_and_no_two_alike(tmp_path: Path) -> None:
    first, second = (matrices(made_up("llama with biases", tmp_path)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    layers = [layer.o_proj.weight for layer in made_up("llama", tmp_path).layers]
    assert not torch.equal(layers[0], layers[1])


def test_they_come_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    weights = made_up("qwen3", tmp_path, torch.bfloat16)
    assert {one.dtype for one in matrices(weights)} == {torch.bfloat16}
