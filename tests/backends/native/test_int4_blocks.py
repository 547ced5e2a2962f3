"""4-bit safetensors keep their codes: 5 bits per weight in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.backends.native.packing import find_block_type, pack_model, to_blocks
from quire.errors import UnsupportedModel
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.opening import open_checkpoint
from quire.weights.packed import CodeType, PackedMatrix, dequantize
from quire.weights.quants import to_float32
from tests.backends.native.test_packing import HALF_EPS, KINDS, unpacked
from tests.weights.layouts import LAYOUTS, Layout, gptq, gptq_config, quantize_arrays, write_quantized
from tests.weights.makers import config, mixed_safetensors, moe_arrays, moe_config
from tests.weights.test_packed import WIDE, wide_arrays

Q8 = 1  # of csrc/quire.h


def random_int4(shape: tuple[int, int], group: tuple[int, int], *, has_zeros: bool) -> PackedMatrix:
    rng = np.random.default_rng(0)
    num_scales = -(-shape[0] // group[0]), -(-shape[1] // group[1])
    codes = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, num_scales).astype(np.float16).astype(np.float32) / np.float32(16)
    zeros = rng.integers(0, 16, num_scales).astype(np.float32) if has_zeros else None
    return PackedMatrix(CodeType.INT4, shape, codes, scales, group, zeros)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"),
    [((9, 96), (1, 32)), ((8, 256), (1, 128)), ((5, 192), (1, 192)), ((6, 64), (6, 64)), ((3, 320), (1, 128))],
)
def test_codes_are_kept(shape: tuple[int, int], group: tuple[int, int], has_zeros: bool) -> None:
    matrix = random_int4(shape, group, has_zeros=has_zeros)
    kind = find_block_type(matrix)
    assert kind is (TensorType.Q4_1 if has_zeros else TensorType.Q4_0)
    expected = dequantize(matrix)
    for one in {kind, TensorType.Q4_1}:
        blocks = to_blocks(matrix, one)
        raw = RawTensor(TensorInfo("x", one, shape, blocks.data.nbytes), blocks.data)
        difference = np.abs(to_float32(raw) - expected)
        if has_zeros:  # the minimum is rounded
            step = np.repeat(np.repeat(matrix.scales, group[0], 0)[: shape[0]], group[1], 1)[:, : shape[1]]
            assert (difference <= 15 * HALF_EPS * step).all()
        else:
            assert difference.max() == 0


def test_matrices_without_blocks() -> None:
    plain = random_int4((4, 128), (1, 32), has_zeros=True)
    assert find_block_type(plain) is TensorType.Q4_1
    assert find_block_type(replace(plain, order=np.arange(128, dtype=np.int32)[::-1])) is None
    assert find_block_type(random_int4((4, 48), (1, 48), has_zeros=False)) is None  # not whole blocks
    assert find_block_type(random_int4((4, 96), (1, 48), has_zeros=False)) is None
    for scale in (1e5, np.nan, np.inf):
        assert find_block_type(replace(plain, scales=np.full_like(plain.scales, scale))) is None


@pytest.mark.parametrize("name", ["awq g32", "awq g128", "ct w4 asymmetric", "ct w4 channel", "gptq g32", "gptq v2"])
def test_models_take_5_bits(name: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, LAYOUTS[name], config(**WIDE), wide_arrays())
    checkpoint = open_checkpoint(tmp_path)
    model = pack_model(checkpoint, 1)
    for index, layer in enumerate(model.layers):
        parts = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
        for field, names in parts.items():
            linear = getattr(layer, field)
            assert all(
                part.kind in (KINDS[TensorType.Q4_0], KINDS[TensorType.Q4_1]) for part in linear.parts[: len(names)]
            )
            expected = [to_float32(checkpoint.read(f"layers.{index}.{one}.weight")) for one in names]
            difference = np.abs(unpacked(linear) - np.concatenate(expected))
            assert difference.max() <= HALF_EPS * max(float(np.abs(one).max()) for one in expected) * 4


def test_another_order_of_columns_takes_8_bits(tmp_path: Path) -> None:
    write_quantized(tmp_path, LAYOUTS["gptq act-order"], config(**WIDE), wide_arrays())
    checkpoint = open_checkpoint(tmp_path)
    model = pack_model(checkpoint, 1)  # owns the memory of its layers
    layer = model.layers[0]
    assert layer.down.parts[0].kind == Q8
    expected = to_float32(checkpoint.read("layers.0.down_proj.weight"))
    assert np.abs(unpacked(layer.down) - expected).max() <= np.abs(expected).max() / 200


@pytest.mark.parametrize("is_mixed", [False, True])
def test_experts(is_mixed: bool, tmp_path: Path) -> None:
    """The memory of experts is allocated by what the first one needs: another order in a later one is refused."""
    layout = Layout(gptq_config(4, 32, sym=False), gptq(4, 32, is_symmetric=False))
    arrays = moe_arrays()
    write_quantized(tmp_path, layout, moe_config(), arrays)
    if is_mixed:
        odd = "model.layers.1.mlp.experts.2.down_proj"
        tensors, _ = quantize_arrays(layout, arrays)
        ordered, _ = quantize_arrays(replace(layout, write=gptq(4, 32, is_symmetric=False, has_order=True)), arrays)
        tensors |= {name: one for name, one in ordered.items() if name.startswith(odd)}
        (tmp_path / "model.safetensors").write_bytes(mixed_safetensors(tensors))
        with pytest.raises(UnsupportedModel, match=r"layers\.1\.experts\.2\.down_proj\.weight has another order"):
            pack_model(open_checkpoint(tmp_path), 1)
        return
    checkpoint = open_checkpoint(tmp_path)
    model = pack_model(checkpoint, 1)  # owns the memory of its layers
    layer = model.layers[1]
    assert layer.experts[2].down.parts[0].kind == KINDS[TensorType.Q4_1]
    expected = to_float32(checkpoint.read("layers.1.experts.2.down_proj.weight"))
    assert np.abs(unpacked(layer.experts[2].down) - expected).max() <= HALF_EPS * np.abs(expected).max() * 4
