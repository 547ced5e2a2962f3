"""Routed experts: what each form of a file must hold, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.config import spec_from_config
from quire.weights.opening import open_checkpoint
from quire.weights.other import read_spec
from quire.weights.spec import OTHER, ExpertsSpec, ModelSpec
from quire.weights.tensors import check_tensors
from tests.weights.makers import (
    EXPERT,
    EXPERTS,
    HIDDEN,
    LAYERS,
    Tensor,
    config,
    make_gguf,
    moe_arrays,
    moe_config,
    moe_keys,
    moe_tensors,
    weights,
    write_folder,
)

Arrays = dict[str, NDArray[Any]]
PREFIX = "model.layers.1.mlp.experts"


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_config(config(architecture, **changes), {}, "config.json", "F32")


def refusal(folder: Path, arrays: Arrays, **changes: Any) -> str:
    with pytest.raises(ModelFileError) as refused:
        check_tensors(open_checkpoint(write_folder(folder, moe_config(**changes), arrays)))
    return str(refused.value)


def gguf_refusal(path: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    path.write_bytes(make_gguf(moe_keys(**changes), list(tensors.items())))
    with pytest.raises(ModelFileError) as refused:
        check_tensors(open_checkpoint(path))
    return str(refused.value)


def test_layers_without_experts() -> None:
    def routed(**changes: Any) -> list[bool]:
        found = spec("Qwen3MoeForCausalLM", **{**moe_config(), "num_hidden_layers": 4, **changes})
        return [isinstance(layer.mlp, ExpertsSpec) for layer in found.layers]

    assert routed() == [True] * 4
    assert routed(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert routed(decoder_sparse_step=2) == [False, True, False, True]
    with pytest.raises(ModelFileError, match="mlp_only_layers is 'x': not a list of layer numbers"):
        routed(mlp_only_layers="x")


def test_both_names_of_the_number_of_experts() -> None:
    old, new = moe_config(num_experts=6), moe_config(num_experts=None, num_local_experts=6)
    assert spec_from_config(old, {}, "x", "F32") == spec_from_config(new, {}, "x", "F32")


# Files


def test_a_missing_and_an_extra_expert(tmp_path: Path) -> None:
    arrays = moe_arrays()
    del arrays[f"{PREFIX}.2.up_proj.weight"]
    arrays[f"{PREFIX}.{EXPERTS}.up_proj.weight"] = arrays[f"{PREFIX}.0.up_proj.weight"]
    text = refusal(tmp_path / "m", arrays)
    assert "missing: layers.1.experts.2.up_proj.weight; " in text
    assert f"unexpected: 'layers.1.experts.{EXPERTS}.up_proj.weight'" in text


def test_an_expert_of_the_wrong_shape(tmp_path: Path) -> None:
    arrays = moe_arrays()
    arrays[f"{PREFIX}.1.down_proj.weight"] = np.zeros((HIDDEN, EXPERT + 1), np.float32)
    shapes = f"layers.1.experts.1.down_proj.weight ({HIDDEN}, {EXPERT + 1}) for ({HIDDEN}, {EXPERT})"
    assert f"of the wrong shape: {shapes}" in refusal(tmp_path / "m", arrays)


@pytest.mark.parametrize("num_experts", [EXPERTS - 1, EXPERTS + 1])
def test_another_number_of_experts_than_in_the_config(num_experts: int, tmp_path: Path) -> None:
    for arrays in (moe_arrays(), moe_arrays(is_stacked=True)):
        text = refusal(tmp_path / "m", arrays, num_experts=num_experts)
        assert "router.weight" in text
        assert "experts." in text
    assert "router.weight" in gguf_refusal(tmp_path / "m.gguf", moe_tensors(), qwen3moe__expert_count=num_experts)


def test_stacks_of_the_wrong_shape(tmp_path: Path) -> None:
    good = moe_arrays(is_stacked=True)
    check_tensors(open_checkpoint(write_folder(tmp_path / "m", moe_config(), good)))
    stack = good[f"{PREFIX}.gate_up_proj"]
    wrong = {
        "transposed": stack.swapaxes(1, 2),
        "of one matrix": stack[:, :EXPERT],
        "flat": stack.reshape(-1, HIDDEN),
        "a vector": stack.reshape(-1),
        "of fewer experts": stack[:-1],
        "of more experts": np.concatenate([stack, stack[:1]]),
    }
    for array in wrong.values():
        arrays = {**good, f"{PREFIX}.gate_up_proj": np.ascontiguousarray(array)}
        assert "experts." in refusal(tmp_path / "m", arrays)


def test_stacks_of_the_wrong_shape_in_a_gguf(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    name = "blk.0.ffn_up_exps.weight"
    for dims in ((HIDDEN, EXPERT), (HIDDEN, EXPERT, EXPERTS + 1), (HIDDEN, EXPERT, EXPERTS - 1), (EXPERT, HIDDEN, 4)):
        assert "up_proj" in gguf_refusal(tmp_path / "m.gguf", {**moe_tensors(), name: weights(rng, *dims)})
    missing = {key: one for key, one in moe_tensors().items() if key != name}
    assert "missing: layers.0.experts.0.up_proj.weight" in gguf_refusal(tmp_path / "m.gguf", missing)


def test_experts_alone_and_in_a_stack_are_duplicates(tmp_path: Path) -> None:
    text = refusal(tmp_path / "m", {**moe_arrays(), **moe_arrays(is_stacked=True)})
    assert "duplicates 'layers.0.experts.0.gate_proj.weight'" in text


# Settings


def test_numbers_of_experts_are_refused_by_name_and_value(tmp_path: Path) -> None:
    for field, value, message in (
        ("num_experts", 0, "num_experts is 0"),
        ("num_experts", 1 << 20, "num_experts is 1048576"),
        ("num_experts_per_tok", EXPERTS + 1, f"num_experts_per_tok is {EXPERTS + 1}"),
        ("moe_intermediate_size", -1, "moe_intermediate_size is -1"),
        ("norm_topk_prob", "yes", "norm_topk_prob is 'yes'"),
    ):
        with pytest.raises(ModelFileError, match=message):
            spec_from_config(moe_config(**{field: value}), {}, "config.json", "F32")
    for field, value in (("expert_used_count", EXPERTS + 1), ("expert_feed_forward_length", 0), ("expert_count", 5000)):
        text = gguf_refusal(tmp_path / "m.gguf", moe_tensors(), **{f"qwen3moe__{field}": value})
        assert f"qwen3moe.{field} is {value}" in text
    text = gguf_refusal(tmp_path / "m.gguf", moe_tensors(), qwen3moe__expert_shared_count=1)
    assert "qwen3moe.expert_shared_count is 1: not supported" in text
    assert "architecture qwen3moe" in gguf_refusal(tmp_path / "m.gguf", moe_tensors(), qwen3moe__expert_count=0)


def test_settings_that_change_the_equations_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"clip_qkv is 8\.0: not supported"):
        spec("OlmoeForCausalLM", clip_qkv=8.0)
    with pytest.raises(ModelFileError, match=r"rope_parameters\.rope_theta is missing"):
        spec("Ministral3ForCausalLM", model_type="ministral3")


GRANITE = {"position_embedding_type": "rope", "num_local_experts": 0, "layer_types": ["attention"] * LAYERS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba", "attention"]}, r"layer_types is \['mamba', 'attention'\]: Granite 4 runs only if"),
        ({"layer_types": None}, "layer_types is None"),
        ({"num_local_experts": 64}, "num_local_experts is 64"),
        ({"num_local_experts": None}, "num_local_experts is 8"),  # the default
        ({"position_embedding_type": "nope"}, "position_embedding_type 'nope'"),
    ],
)
def test_hybrid_granite_is_left_to_mlx_lm(changes: dict[str, Any], message: str) -> None:
    settings = config("GraniteMoeHybridForCausalLM", **{**GRANITE, **changes})
    with pytest.raises(UnsupportedModel, match=message):
        spec_from_config(settings, {}, "config.json", "F32")
    for fields in ({}, {"quantization": {"bits": 4, "group_size": 64}}):
        found = read_spec({**settings, **fields}, {}, "config.json", "F32")
        assert (found.family, found.num_layers) == (OTHER, LAYERS)
        assert "Granite 4" in found.unsupported or "position_embedding_type" in found.unsupported


def test_multimodal_mistral_with_another_text_model_is_left_to_mlx_lm() -> None:
    inner = config("Inner", model_type="mistral4")
    settings = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner}
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type 'mistral4' is not ministral3"):
        spec_from_config(settings, {}, "config.json", "F32")
    assert read_spec(settings, {}, "config.json", "F32").family == OTHER
    gemma = {**settings, "architectures": ["Gemma3ForConditionalGeneration"]}
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type 'mistral4' is not gemma3"):
        read_spec(gemma, {}, "config.json", "F32")
