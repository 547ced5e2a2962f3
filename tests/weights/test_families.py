"""Every family: the tensors that transformers saves, the same model as GGUF, and what files of experts must hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import spec_from_config
from quire.weights.families import FAMILIES as ROWS
from quire.weights.opening import open_checkpoint
from quire.weights.other import read_spec
from quire.weights.quants import to_float32
from quire.weights.spec import OTHER, DeltaNetSpec, ExpertsSpec, ModelSpec
from quire.weights.tensors import check_tensors, expected_tensors, is_norm, norm_offset
from tests.weights.converting import write_gguf
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

pytest.importorskip("transformers")
from tests.backends.torch.families import EVERY_FAMILY, Reference

# GGUF has no key for these settings, and llama.cpp assumes: every sixth layer of Gemma 3 and every fourth of SmolLM3
# differ, Gemma's scale follows from the size of a head, experts of Qwen are renormalised, those of OLMoE are not.
IN_GGUF: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gpt_oss": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5},
}
# The converter does not write the window, and llama.cpp's Qwen 3 has no dense layers.
NOT_IN_GGUF = ("mistral with a window", "qwen3_moe with a dense layer", "lfm2 with biases")
MOE = ("qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe", "lfm2_moe")


def test_every_row_is_tested() -> None:
    names = {name.split()[0] for name in EVERY_FAMILY}
    assert names == {row.name for row in ROWS}


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it."""
    return Reference(name, tmp_path_factory.mktemp("saved"), **IN_GGUF.get(name, {})).path


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    return {name: to_float32(checkpoint.read(name)).copy() for name in checkpoint.tensors}


def same_tensors(one: Checkpoint, other: Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in read_all(one).items():
        shift = norm_offset(one.spec, name) - norm_offset(other.spec, name) if is_norm(name) else 0.0
        expected = in_order_of(other.spec, one.spec, name, array + np.float32(shift))
        found = to_float32(other.read(name))
        if name.endswith(".a_log"):  # a GGUF holds its exponential
            assert np.allclose(expected, found, rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(expected, found), name


def in_order_of(spec: ModelSpec, own: ModelSpec, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a tensor of a delta net whose value heads are ordered by key head in the order of another file."""
    if not name.startswith("layers.") or spec == own:
        return array
    net = spec.layers[int(name.split(".")[1])].mixer
    tensor = name.split(".", 2)[2]
    if not isinstance(net, DeltaNetSpec) or not net.is_tiled:
        return array
    rank = dict.fromkeys(net.key_heads, 0)
    heads = []  # by head of the other file: the head here
    for key in net.key_heads:
        heads.append(key * (net.num_value_heads // net.num_key_heads) + rank[key])
        rank[key] += 1
    rows = np.arange(net.value_size).reshape(net.num_value_heads, -1)[heads].flatten()
    if tensor in ("in_proj_a.weight", "in_proj_b.weight", "a_log", "dt_bias"):
        return array[heads]
    if tensor in ("in_proj_qkv.weight", "conv.weight"):
        return np.concatenate([array[: 2 * net.key_size], array[2 * net.key_size :][rows]])
    if tensor == "in_proj_z.weight":
        return array[rows]
    return array[:, rows] if tensor == "out_proj.weight" else array


def test_the_tensors_that_transformers_saves(name: str, saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    check_tensors(checkpoint)
    assert checkpoint.spec.family == name.split()[0]
    sizes = [array.size for file in saved.glob("*.safetensors") for array in load_file(file).values()]
    assert sum(sizes) == sum(int(np.prod(shape)) for shape in expected_tensors(checkpoint.spec).values())


# Experts in safetensors


def write_stacked(source: Path, folder: Path) -> Path:
    """Write a copy whose experts are stacked, as transformers 5 holds them in memory."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    arrays = load_file(source / "model.safetensors")
    found = {
        name.replace("block_sparse_moe", "mlp"): array for name, array in arrays.items() if ".experts." not in name
    }
    layers = sorted({name.split(".experts.")[0] for name in arrays if ".experts." in name})
    for layer in layers:
        num_experts = len({name for name in arrays if name.startswith(f"{layer}.experts.")}) // 3
        gate, down, up = (
            np.stack([arrays[f"{layer}.experts.{i}.{one}.weight"] for i in range(num_experts)])
            for one in (("gate_proj", "down_proj", "up_proj") if layer.endswith(".mlp") else ("w1", "w2", "w3"))
        )
        stacked = layer.replace("block_sparse_moe", "mlp")
        found[f"{stacked}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        found[f"{stacked}.experts.down_proj"] = down
    save_file(found, folder / "model.safetensors")
    return folder


def write_sharded(source: Path, folder: Path, *, has_index: bool) -> Path:
    """Write a copy in three files; an expert's matrices are in different ones."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    arrays = load_file(source / "model.safetensors")
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        save_file({name: array for name, array in arrays.items() if weight_map[name] == file}, folder / file)
    if has_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("name", [*MOE, "qwen3_moe with a dense layer"], scope="module")
def test_stacked_and_sharded_experts(saved: Path, tmp_path: Path) -> None:
    alone = open_checkpoint(saved)
    folders = (
        write_stacked(saved, tmp_path / "stacked"),
        write_sharded(saved, tmp_path / "sharded", has_index=True),
        write_sharded(saved, tmp_path / "no index", has_index=False),
    )
    for folder in folders:
        other = open_checkpoint(folder)
        check_tensors(other)
        assert other.spec == alone.spec
        same_tensors(alone, other)


# GGUF


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, string and None of nested dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from flat(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from flat(item, f"{path}[{i}]")
    else:
        yield path, value


def fields_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a spec that do not depend on the format: a GGUF's norms include Gemma's offset."""
    ignored = (".family", ".architecture", ".norm_offset", ".is_tiled")
    return {path: value for path, value in flat(checkpoint.spec) if not path.endswith(ignored)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = list(one.keys() ^ other.keys())
    for path in one.keys() & other.keys():
        first, second = one[path], other[path]
        is_real = isinstance(first, float) and isinstance(second, float)
        if first != (pytest.approx(second, rel=1e-6) if is_real else second):
            found.append(f"{path}: {first} {second}")
    return sorted(found)


def test_a_gguf_of_the_same_model_is_equal(name: str, saved: Path, tmp_path: Path) -> None:
    if name in NOT_IN_GGUF:
        pytest.skip("llama.cpp's converter cannot express it")
    ours, theirs = open_checkpoint(saved), open_checkpoint(write_gguf(saved, tmp_path / "m.gguf"))
    check_tensors(theirs)
    assert differences(fields_of(ours), fields_of(theirs)) == []
    same_tensors(ours, theirs)


@pytest.mark.parametrize("name", MOE, scope="module")
def test_a_gguf_with_fused_experts(saved: Path, tmp_path: Path) -> None:
    theirs = open_checkpoint(write_gguf(saved, tmp_path / "m.gguf", fuses_experts=True))
    check_tensors(theirs)
    same_tensors(open_checkpoint(saved), theirs)


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
