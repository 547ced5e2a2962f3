"""Quantised safetensors and packed matrices: every layout against its definition, row orders, forgeries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.opening import open_checkpoint
from quire.weights.packed import CodeType, PackedMatrix, dequantize, take_rows
from quire.weights.quants import pack_blocks, to_float32
from quire.weights.reading import own_rows
from quire.weights.tensors import Heads, Place, Stripe, check_tensors
from tests.weights.layouts import (
    LAYOUTS,
    Layout,
    awq,
    awq_config,
    compressed,
    compressed_config,
    float_config,
    fp8,
    fp8_config,
    gptq_config,
    packed_config,
    quantize_arrays,
    write_quantized,
    write_tensors,
)
from tests.weights.makers import (
    EXPERTS,
    HIDDEN,
    Stored,
    config,
    llama_arrays,
    make_gguf,
    moe_arrays,
    moe_config,
    moe_keys,
    moe_tensors,
    set_scales,
    tiny_gguf,
)
from tests.weights.test_safetensors import own_name

Floats = NDArray[np.float32]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 64}


def wide_arrays() -> dict[str, Floats]:
    """A llama whose matrices have several groups of 128 in a row and several blocks of 128 rows."""
    rng = np.random.default_rng(1)
    arrays = {}
    for name, array in llama_arrays().items():
        shape = [{64: 256, 96: 384, 32: 128}[size] for size in array.shape]
        if "embed" in name or "lm_head" in name:
            shape[0] = 64
        arrays[name] = rng.standard_normal(shape).astype(np.float32)
    return arrays


def close(found: Floats, expected: Floats) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-6, atol=1e-7 * float(np.abs(expected).max())))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_means_what_it_says(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    weights = write_quantized(tmp_path / "m", layout, config(**WIDE), wide_arrays())
    checkpoint = open_checkpoint(tmp_path / "m")
    check_tensors(checkpoint)
    assert checkpoint.spec.quantization == layout.kind
    for file_name, expected in weights.items():
        own = own_name(file_name)
        raw, packed = checkpoint.read(own), checkpoint.read_packed(own)
        assert close(to_float32(raw), expected), own
        assert not raw.data.flags.writeable
        if not file_name.endswith("proj.weight"):
            assert packed is None
            continue
        info = checkpoint.tensors[own]
        assert packed is not None
        assert (info.type, packed.type, packed.shape) == (layout.kind, layout.kind.lower(), info.shape)
        assert close(dequantize(packed), expected)
    checkpoint.close()


def test_the_size_of_a_tensor_includes_its_scales(tmp_path: Path) -> None:
    write_quantized(tmp_path / "m", LAYOUTS["ct w4 asymmetric"], config(**WIDE), wide_arrays())
    info = open_checkpoint(tmp_path / "m").tensors["layers.0.down_proj.weight"]
    groups = 384 // 32
    assert info == (info.name, TensorType.INT4, (256, 384), 256 * 384 // 2 + 256 * groups * 2 + 32 * groups * 4)


# Matrices that share a tensor, and orders of rows


def fused(arrays: dict[str, Floats]) -> dict[str, Floats]:
    """Phi-3's form: q, k and v in one matrix, gate and up in another."""
    out = dict(arrays)
    for i in range(2):
        layer = f"model.layers.{i}"
        qkv = [out.pop(f"{layer}.self_attn.{one}_proj.weight") for one in "qkv"]
        gates = [out.pop(f"{layer}.mlp.{one}_proj.weight") for one in ("gate", "up")]
        out[f"{layer}.self_attn.qkv_proj.weight"] = np.concatenate(qkv)
        out[f"{layer}.mlp.gate_up_proj.weight"] = np.concatenate(gates)
    return out


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 small blocks", "ct w4 asymmetric", "awq g64", "gptq act-order"])
@pytest.mark.parametrize("size", [384, 320])  # 320: rows of up begin in the middle of a block of 128
def test_fused_matrices_are_split(name: str, size: int, tmp_path: Path) -> None:
    arrays = wide_arrays()
    for i in range(2):
        for one in ("gate", "up"):
            arrays[f"model.layers.{i}.mlp.{one}_proj.weight"] = arrays[f"model.layers.{i}.mlp.{one}_proj.weight"][:size]
        down = arrays[f"model.layers.{i}.mlp.down_proj.weight"]
        arrays[f"model.layers.{i}.mlp.down_proj.weight"] = np.ascontiguousarray(down[:, :size])
    settings = config("Phi3ForCausalLM", **{**WIDE, "intermediate_size": size, "head_dim": 64})
    weights = write_quantized(tmp_path / "m", LAYOUTS[name], settings, fused(arrays))
    checkpoint = open_checkpoint(tmp_path / "m")
    check_tensors(checkpoint)
    gate_up = weights["model.layers.1.mlp.gate_up_proj.weight"]
    qkv = weights["model.layers.1.self_attn.qkv_proj.weight"]
    expected = {"gate_proj": gate_up[:size], "up_proj": gate_up[size:], "q_proj": qkv[:256], "k_proj": qkv[256:384]}
    for own, values in expected.items():
        packed = checkpoint.read_packed(f"layers.1.{own}.weight")
        assert packed is not None
        assert close(dequantize(packed), values)
        assert close(to_float32(checkpoint.read(f"layers.1.{own}.weight")), values)
        if name == "fp8 blocks" and own == "up_proj":
            assert packed.group == ((128, 128) if size % 128 == 0 else (1, 128))


def test_experts_one_by_one_and_stacked(tmp_path: Path) -> None:
    """transformers 5 saves the experts of FP8 models as stacks, with a stack of scales."""
    layout = Layout(fp8_config(weight_block_size=[32, 32]), fp8(32, 32), "FP8")
    arrays = moe_arrays()
    weights = write_quantized(tmp_path / "single", layout, moe_config(), arrays)
    tensors, _ = quantize_arrays(layout, arrays)
    stacked = {name: one for name, one in tensors.items() if ".experts." not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts."
        for ending, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            one = [
                [tensors[f"{prefix}{e}.{part}_proj.{ending}"].array for part in ("gate", "up")] for e in range(EXPERTS)
            ]
            down = [tensors[f"{prefix}{e}.down_proj.{ending}"] for e in range(EXPERTS)]
            both = np.stack([np.concatenate(pair) for pair in one])
            stacked[f"{prefix}gate_up_proj{suffix}"] = Stored(down[0].dtype, both)
            stacked[f"{prefix}down_proj{suffix}"] = Stored(down[0].dtype, np.stack([part.array for part in down]))
    folder = write_tensors(tmp_path / "stacked", {**moe_config(), "quantization_config": layout.config}, stacked)
    for path in (tmp_path / "single", folder):
        checkpoint = open_checkpoint(path)
        check_tensors(checkpoint)
        for part in ("gate_proj", "up_proj", "down_proj"):
            packed = checkpoint.read_packed(f"layers.1.experts.2.{part}.weight")
            assert packed is not None
            assert packed.group == (32, 32)
            assert close(dequantize(packed), weights[f"model.layers.1.mlp.experts.2.{part}.weight"])


def test_queries_and_gates_alternate_by_head() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (512, 64), np.uint8)
    scales = rng.random((4, 1), np.float32)
    matrix = PackedMatrix(CodeType.INT8, (512, 64), codes, scales, (128, 64))
    whole = dequantize(matrix)
    gates = np.arange(512).reshape(2, 2, 128)[:, 1].reshape(-1)
    assert take_rows(matrix, gates).group == (128, 64)  # whole blocks keep their scale
    for rows in (gates, np.arange(100, 300), rng.permutation(512)):
        assert (dequantize(take_rows(matrix, rows)) == whole[rows]).all()
    assert take_rows(matrix, np.arange(100, 300)).scales.shape == (200, 1)


def test_rows_are_taken_and_moved_as_their_bytes_are() -> None:
    """Three heads of two rows of queries and two of gates; then two heads of six rows, of which four are rotated."""
    held = np.arange(12 * 5, dtype=np.uint8)
    held.flags.writeable = False
    gates = Place(TensorInfo("layers.0.q_gate.weight", TensorType.F32, (6, 5), 30), "q", 0, Stripe(1, 2, 3))
    whole = Place(TensorInfo("layers.0.q_proj.weight", TensorType.F32, (12, 5), 60), "q", 0)
    for place, heads, expected in (
        (gates, None, [2, 3, 6, 7, 10, 11]),
        (whole, Heads(2, 6, 4), [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]),
    ):
        found = own_rows(held, place, heads)
        assert place.num_file_bytes == 60
        assert own_rows(np.arange(12), place, heads).tolist() == expected
        assert (found.reshape(-1, 5) == held.reshape(12, 5)[expected]).all()
        assert not found.flags.writeable


def test_rows_of_an_interleaved_family(tmp_path: Path) -> None:
    settings = config("Glm4ForCausalLM", **WIDE, partial_rotary_factor=0.5, attention_bias=False)
    arrays = wide_arrays()
    for i in range(2):
        layer = f"model.layers.{i}"
        gates = [arrays.pop(f"{layer}.mlp.{one}_proj.weight") for one in ("gate", "up")]
        arrays[f"{layer}.mlp.gate_up_proj.weight"] = np.concatenate(gates)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            arrays[f"{layer}.{name}.weight"] = arrays[f"{layer}.input_layernorm.weight"]
    weights = write_quantized(tmp_path / "m", LAYOUTS["fp8 blocks"], settings, arrays)
    write_tensors(tmp_path / "plain", settings, {name: Stored("F32", one) for name, one in weights.items()})
    one, other = open_checkpoint(tmp_path / "m"), open_checkpoint(tmp_path / "plain")
    check_tensors(one)
    for name in other.tensors:
        assert close(to_float32(one.read(name)), to_float32(other.read(name))), name


# Blocks of GGUF


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_gguf_blocks_keep_their_values(kind: str) -> None:
    rng = np.random.default_rng(0)
    block = BLOCKS[TensorType(kind)]
    shape = (6, 512)
    blocks = rng.integers(0, 256, (6 * 512 // block.num_elements, block.num_bytes), np.uint8)
    scales = rng.uniform(-1, 1, (len(blocks), 2)) / 64
    scales[0, 0] = 0  # all weights of the block are its minimum
    set_scales(kind, blocks, scales)
    if kind == "MXFP4":
        blocks[1, 0] = 0  # the smallest exponent
    raw = RawTensor(TensorInfo("x", TensorType(kind), shape, blocks.nbytes), blocks.reshape(6, -1))
    packed = pack_blocks(raw)
    assert packed is not None
    assert packed.group == (1, 16 if kind == "Q6_K" else 32)
    expected = to_float32(raw)
    largest = np.abs(expected).reshape(len(blocks), -1).max(1).repeat(block.num_elements).reshape(shape)
    assert (np.abs(dequantize(packed) - expected) <= 1e-6 * largest).all()


@pytest.mark.parametrize("kind", ["Q3_K", "IQ4_XS", "F16", "TQ1_0"])
def test_other_gguf_types_are_not_packed(kind: str) -> None:
    block = BLOCKS[TensorType(kind)]
    data = np.zeros((2, 512 // block.num_elements * block.num_bytes), np.uint8)
    assert pack_blocks(RawTensor(TensorInfo("x", TensorType(kind), (2, 512), data.nbytes), data)) is None


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_gguf_file_has_the_same_rows_in_both_forms(has_experts: bool, tmp_path: Path) -> None:
    """Rows of queries and keys are moved in GGUF files of Llama, and experts are stacked."""
    made = make_gguf(moe_keys(), list(moe_tensors().items())) if has_experts else tiny_gguf()
    (tmp_path / "x.gguf").write_bytes(made)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    packed = {name: checkpoint.read_packed(name) for name in checkpoint.tensors}
    found = {name: matrix for name, matrix in packed.items() if matrix is not None}
    assert {checkpoint.tensors[name].type for name in found} == {TensorType.Q4_0, TensorType.Q8_0}
    for name, matrix in found.items():
        assert (dequantize(matrix) == to_float32(checkpoint.read(name))).all()


# Configs


def opened(folder: Path, layout: Layout, settings: dict[str, Any] | None = None) -> Checkpoint:
    write_quantized(folder, layout, settings or config(**WIDE), wide_arrays())
    return open_checkpoint(folder)


def test_several_config_groups_and_kv_scales(tmp_path: Path) -> None:
    """Attention in FP8 and the MLP in 4 bits. Scales of activations and of the KV cache are not used."""
    settings = packed_config(4, 64)
    groups = settings["config_groups"] | {"group_1": float_config("channel")["config_groups"]["group_0"]}
    settings |= {
        "format": "mixed-precision",
        "config_groups": groups,
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    arrays = wide_arrays()
    four, four_weights = quantize_arrays(Layout(settings, compressed(4, 64)), arrays, chosen=lambda n: "mlp." in n)
    eight, eight_weights = quantize_arrays(
        Layout(settings, fp8(1, 0, ending="weight_scale")), arrays, chosen=lambda n: "self_attn" in n
    )
    tensors = {**four, **{name: one for name, one in eight.items() if "self_attn" in name}}
    for name in [name for name in four if "self_attn" in name]:
        if name not in eight or tensors[name].dtype == "F32":
            tensors[name] = eight[name]
    for ending in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_proj.input_scale"):
        tensors[f"model.layers.0.{ending}"] = Stored("F32", np.ones((), np.float32))
    checkpoint = open_checkpoint(write_tensors(tmp_path, config(**WIDE, quantization_config=settings), tensors))
    check_tensors(checkpoint)
    types = {name: info.type for name, info in checkpoint.tensors.items()}
    assert (types["layers.0.q_proj.weight"], types["layers.0.up_proj.weight"]) == (TensorType.FP8, TensorType.INT4)
    for name, expected in {**eight_weights, **{n: w for n, w in four_weights.items() if "mlp." in n}}.items():
        assert close(to_float32(checkpoint.read(own_name(name))), expected)


def test_biases_that_autogptq_invents_are_left_out(tmp_path: Path) -> None:
    layout, name = LAYOUTS["gptq g32"], "model.layers.0.mlp.up_proj.bias"
    for value, is_accepted in ((0.0, True), (0.5, False)):
        tensors, _ = quantize_arrays(layout, wide_arrays())
        tensors[name] = Stored("F16", np.full(384, value, "<f2"))
        settings = config(**WIDE, quantization_config=layout.config)
        checkpoint = open_checkpoint(write_tensors(tmp_path, settings, tensors))
        if is_accepted:
            check_tensors(checkpoint)
            continue
        with pytest.raises(ModelFileError, match=r"unexpected: 'layers.0.up_proj.bias'"):
            check_tensors(checkpoint)


def test_awq_without_zero_points(tmp_path: Path) -> None:
    def write(weights: Floats, rng: np.random.Generator) -> Any:
        written = awq(32)(weights, rng)
        del written.tensors["qzeros"]
        return written

    checkpoint = opened(tmp_path / "m", Layout(awq_config(32), write))
    packed = checkpoint.read_packed("layers.0.q_proj.weight")
    assert packed is not None
    assert packed.zeros is None


def group(**changes: Any) -> dict[str, Any]:
    settings = packed_config(4, 32)
    settings["config_groups"]["group_0"] |= changes
    return settings


def weights_of(**changes: Any) -> dict[str, Any]:
    return packed_config(4, 32, **changes)


INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "quark"}, "quantization_config.quant_method is 'quark': quantised safetensors are not"),
    "no method": ({"bits": 4}, "quantization_config.quant_method is None"),
    "fp8 of another kind": (fp8_config(fmt="e5m2"), "quantization_config.fmt is 'e5m2': not supported, only e4m3"),
    "activations in int8": (group(input_activations=INT8_ACTIVATIONS), "type is 'int', num_bits 8: activations of"),
    "nvfp4": ({**group(), "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized': not supported, only"),
    "nvfp4 in a group": (group(format="nvfp4-pack-quantized"), "group_0.format is 'nvfp4-pack-quantized'"),
    "floats of 4 bits": (weights_of(type="float"), "group_0.weights.num_bits is 4: not supported, only 8"),
    "3 bits": (compressed_config("pack-quantized", num_bits=3), "num_bits is 3: not supported, only 4 and 8"),
    "strategy": (weights_of(strategy="tensor_group"), "strategy is 'tensor_group'"),
    "sparse": ({**group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24"),
    "rotations": ({**group(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.config_groups is"),
    "awq of another version": (awq_config(32, version="gemv"), "quantization_config.version is 'gemv'"),
    "awq of 8 bits": (awq_config(32, bits=8), "quantization_config.bits is 8: not supported, only 4"),
    "gptq of 3 bits": (gptq_config(3, 32), "bits is 3: not supported, only 4 and 8"),
    "marlin": (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "auto-round": (gptq_config(4, 32, quant_method="auto-round"), "packing_format is None: not supported, only auto_r"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_kinds_are_refused_by_name_and_value(case: str, tmp_path: Path) -> None:
    quantization, message = REFUSED[case]
    tensors = {"x": Stored("I8", np.zeros(3, np.int8))}
    folder = write_tensors(tmp_path, config(quantization_config=quantization), tensors)
    checkpoint = open_checkpoint(folder)  # mlx-lm may run it
    with pytest.raises(UnsupportedModel, match=message):
        check_tensors(checkpoint)


def test_an_unsupported_family_says_that_it_is_quantised(tmp_path: Path) -> None:
    settings = config("DeepseekV3ForCausalLM", quantization_config=fp8_config())
    write_tensors(tmp_path, settings, {"x": Stored("F8_E4M3", np.zeros(3, np.uint8))})
    with pytest.raises(UnsupportedModel, match=r"'DeepseekV3ForCausalLM'; .*; its weights are quantised \(fp8\)"):
        check_tensors(open_checkpoint(tmp_path))


# Forgeries

Tensors = dict[str, Stored]
Q = "model.layers.0.self_attn.q_proj."


def drop(ending: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[Q + ending]

    return change


def put(ending: str, dtype: str, array: NDArray[Any]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({Q + ending: Stored(dtype, array)})


def cut(ending: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        one = tensors[Q + ending]
        tensors[Q + ending] = Stored(one.dtype, np.resize(one.array, shape))

    return change


FORGED: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "fp8 without scales": ("fp8 blocks", drop("weight_scale_inv"), "has no '.*weight_scale' beside it"),
    "fp8 of another shape": ("fp8 blocks", cut("weight_scale_inv", 3, 2), r"\(3, 2\): scales of .* need \(2, 2\)"),
    "fp8 scales of bytes": ("fp8 blocks", put("weight_scale_inv", "I8", np.zeros((2, 2), "i1")), "not of type F16 or"),
    "fp8 of one dimension": ("fp8 blocks", cut("weight", 7), r"F8_E4M3 \(7,\): not a matrix"),
    "no scales": ("ct w4 g32", drop("weight_scale"), "weight_packed' has no '.*weight_scale' beside it"),
    "groups of another size": ("ct w4 g32", cut("weight_scale", 256, 4), r"need \(256, 8\) by config.json"),
    "shape of another matrix": ("ct w4 g32", put("weight_shape", "I64", np.array([256, 512])), "does not hold the"),
    "negative shape": ("ct w4 g32", put("weight_shape", "I64", np.array([256, -256])), "does not hold the"),
    "shape of 3": ("ct w4 g32", put("weight_shape", "I64", np.array([1, 256, 256])), "not two numbers"),
    "zeros of another shape": ("ct w4 asymmetric", cut("weight_zero_point", 32, 7), r"not of shape \(32, 8\)"),
    "group out of range": ("ct w4 act-order", put("weight_g_idx", "I32", np.full(256, 8, "<i4")), "each group 32"),
    "negative group": ("ct w4 act-order", put("weight_g_idx", "I32", np.arange(256, dtype="<i4") - 2), "each group 32"),
    "groups of too few": ("ct w4 act-order", cut("weight_g_idx", 7), "not the groups of 256 inputs"),
    "gptq without scales": ("gptq g32", drop("scales"), "has no '.*scales' beside it"),
    "gptq zeros": ("gptq g32", cut("qzeros", 8, 31), r"need \(8, 32\)"),
    "gptq groups": ("gptq act-order", put("g_idx", "I32", np.full(256, 2**31 - 1, "<i4")), "each group 32 inputs"),
    "gptq scales": ("gptq g32", cut("scales", 7, 256), r"need \(8, 256\) by config.json"),
    "awq words of bytes": ("awq g32", put("qweight", "I8", np.zeros((256, 32), np.int8)), "not of type I32"),
    "plain and quantised": ("awq g32", put("weight", "F32", np.zeros((256, 256), "<f4")), "is stored twice"),
    "a part of no matrix": ("awq g32", put("g_idx", "I32", np.zeros(3, "<i4")), "belongs to no matrix of awq"),
    "words in fp8": ("fp8 blocks", put("weight_packed", "I32", np.zeros((3, 3), "<i4")), "has no '.*weight_scale'"),
    "integers of 64 bits": ("fp8 blocks", put("weight", "I64", np.zeros((2, 2), "<i8")), "belongs to no matrix of fp8"),
    "type of no use": ("fp8 blocks", put("weight_scale_inv", "F64", np.zeros((2, 2))), "has type 'F64'"),
}  # fmt: skip


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    for own in checkpoint.tensors:
        checkpoint.read(own)


@pytest.mark.parametrize("case", FORGED)
def test_forged_tensors_are_refused(case: str, tmp_path: Path) -> None:
    name, change, message = FORGED[case]
    tensors, _ = quantize_arrays(LAYOUTS[name], wide_arrays())
    change(tensors)
    write_tensors(tmp_path, config(**WIDE, quantization_config=LAYOUTS[name].config), tensors)
    with pytest.raises(ModelFileError, match=message) as refused:
        read_all(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.filterwarnings("error")
def test_scales_that_are_not_finite_are_data(tmp_path: Path) -> None:
    tensors, _ = quantize_arrays(LAYOUTS["fp8 blocks"], wide_arrays())
    tensors[f"{Q}weight_scale_inv"] = Stored("F32", np.array([[np.inf, np.nan], [0, -1]], "<f4"))
    tensors[f"{Q}weight"].array[0, 0] = 127
    write_tensors(tmp_path, config(**WIDE, quantization_config=LAYOUTS["fp8 blocks"].config), tensors)
    values = to_float32(open_checkpoint(tmp_path).read("layers.0.q_proj.weight"))
    assert np.isnan(values[:128, 128:]).all()
    assert (values[128:, :128] == 0).all()


def test_a_hidden_size_that_groups_do_not_divide() -> None:
    assert HIDDEN == 64
    matrix = PackedMatrix(
        CodeType.INT8, (2, 80), np.ones((2, 80), np.uint8), np.arange(6, dtype=np.float32).reshape(2, 3), (1, 32)
    )
    assert dequantize(matrix)[1].tolist() == [3.0] * 32 + [4.0] * 32 + [5.0] * 16
