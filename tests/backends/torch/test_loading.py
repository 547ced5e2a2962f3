"""Generated weights: the same every time, in the form that the layers expect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.torch.loading import (
    DUMMY_STD,
    WeightLoader,
    weight_bytes,
)
from quire.backends.torch.models.decoder import DecoderModel, DenseMlp
from quire.weights.families import BY_MODEL_TYPE, BY_NAME
from quire.weights.opening import open_checkpoint
from quire.weights.tensors import transformers_targets
from tests.backends.torch.families import FAMILIES, Reference


def made_up(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = FAMILIES[name]()
    document = config.to_dict()
    document["architectures"] = [BY_MODEL_TYPE[config.model_type]]
    (folder / "config.json").write_text(json.dumps(document))
    checkpoint = open_checkpoint(folder, "dummy")
    with torch.inference_mode():
        return DecoderModel(WeightLoader(checkpoint, dtype, torch.device("cpu")), 512)


def matrices(weights: DecoderModel) -> list[Tensor]:
    linears, experts = [weights.head], []
    for layer in weights.layers:
        linears += [layer.mixer.in_proj, layer.mixer.out_proj]
        if isinstance(layer.mlp, DenseMlp):
            linears += [layer.mlp.gate_up_proj, layer.mlp.down_proj]
        else:
            linears.append(layer.mlp.router)
            experts += [one for one in (layer.mlp.experts.gate_up, layer.mlp.experts.down) if isinstance(one, Tensor)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [weights.embedding, *(linear.weight for linear in linears), *biases, *experts]


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "gemma3", "phi3", "qwen3_moe"])
def test_norms_are_one_and_the_rest_is_small_noise(name: str, tmp_path: Path) -> None:
    weights = made_up(name, tmp_path)
    for norm in (weights.norm.weight, *(norm for layer in weights.layers for norm in layer.norms.values())):
        assert (norm == 1).all()  # also Gemma's, whose files hold the difference from 1
    for matrix in matrices(weights):
        assert 0 < float(matrix.abs().max()) < 6 * DUMMY_STD
    assert 0.9 < float(weights.embedding.std()) / DUMMY_STD < 1.1


def test_matrices_are_reproducible_and_distinct(tmp_path: Path) -> None:
    first, second = (matrices(made_up("llama with biases", tmp_path)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    layers = [layer.mlp for layer in made_up("llama", tmp_path).layers]
    assert isinstance(layers[0], DenseMlp)
    assert isinstance(layers[1], DenseMlp)
    assert not torch.equal(layers[0].down_proj.weight, layers[1].down_proj.weight)


def norms(weights: DecoderModel) -> dict[str, Tensor]:
    """Return norms by quire's name."""
    found = {"norm.weight": weights.norm.weight}
    for index, layer in enumerate(weights.layers):
        found |= {f"layers.{index}.{name}.weight": norm for name, norm in layer.norms.items()}
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "olmoe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_are_kept_in_fp32_for_every_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Equal to the file to the bit, plus 1 for Gemma, which would not fit into 16 bits."""
    reference = Reference(name, tmp_path, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    with torch.inference_mode():
        weights = DecoderModel(WeightLoader(checkpoint, dtype, torch.device("cpu")), 512)
    checkpoint.close()
    state = reference.model.state_dict()
    names = transformers_targets(state, BY_NAME[checkpoint.spec.family], checkpoint.spec.architecture)
    saved = {names[key].names[0]: value for key, value in state.items() if key.endswith("norm.weight")}
    loaded = norms(weights)
    assert loaded.keys() == saved.keys()
    for key, norm in loaded.items():
        assert norm.dtype == torch.float32
        assert torch.equal(norm, 1 + saved[key] if name == "gemma3" else saved[key])
    if name == "gemma3":
        assert not torch.equal(weights.norm.weight, weights.norm.weight.to(dtype).float())
    assert {one.dtype for one in matrices(weights)} == {dtype}
    held = [*loaded.values(), *{id(one): one for one in matrices(weights)}.values()]
    assert weight_bytes(checkpoint.spec, dtype) == sum(one.nbytes for one in held)
