"""Packed weights hold the contents of the file: unpacked again, and compared with gguf's own decoders."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.native.library import GROUP, Floats, Linear, load_library
from quire.backends.native.packing import SOURCES, PackedModel, pack_model
from quire.weights.checkpoint import BLOCKS, FILE_TYPES, Checkpoint, TensorType
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.spec import ModelSpec
from tests.backends.native.matrices import KIND_OF_Q4_0, PANEL, Packed, coded, floats
from tests.weights.makers import config, llama_arrays, set_scales, write_folder

ROWS = (1, 7, 8, 9, 33)
COLUMNS = (1, 31, 32, 33, 64, 100, 289)
PLAIN = (TensorType.F32, TensorType.F16, TensorType.BF16)
HALF_EPS = 2.0**-11  # half a step of fp16
SMALLEST_SCALE = 2.0**-24  # in fp16

# Types whose codes are kept

KEPT = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q8_0, TensorType.IQ4_NL, TensorType.MXFP4)
KEPT_256 = (TensorType.TQ1_0, TensorType.TQ2_0)
KINDS = {TensorType.Q4_0: KIND_OF_Q4_0, TensorType.Q4_1: 0, TensorType.MXFP4: 2}  # others: 8 bits


@pytest.mark.parametrize("type", KEPT)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [32, 96, 320])
def test_codes_of_a_file_are_kept(type: TensorType, rows: int, cols: int) -> None:
    packed = coded(type, rows, cols, seed=rows + cols)
    assert np.array_equal(packed.unpack(), packed.file)
    assert packed.kind == KINDS.get(type, 1)


@pytest.mark.parametrize("type", KEPT_256)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [256, 768])
def test_codes_in_blocks_of_256_are_kept(type: TensorType, rows: int, cols: int) -> None:
    packed = coded(type, rows, cols, seed=rows + cols)
    assert np.array_equal(packed.unpack(), packed.file)
    assert packed.kind == 0


@pytest.mark.parametrize("rows", ROWS)
def test_iq4_xs_is_kept_to_fp16_of_its_scales(rows: int) -> None:
    """A group's scale is a product of 11 and 6 bits, as in Q4_K; its codes are kept."""
    packed = coded(TensorType.IQ4_XS, rows, 512, seed=rows)
    difference = np.abs(packed.unpack() - packed.file)
    assert (difference <= HALF_EPS * np.abs(packed.file) * 1.001 + 127 * SMALLEST_SCALE / 2).all()
    assert difference.max() > 0


@pytest.mark.parametrize("exponent", range(0, 256, 5))
def test_every_power_of_two_of_mxfp4(exponent: int) -> None:
    """Half of 2^(e - 127) is a scale of fp16 if e is from 104 to 143. Other scales are rounded to fp16."""
    data = np.random.default_rng(exponent).integers(0, 256, (9, 17), np.uint8)
    data[:, 0] = exponent
    packed = Packed(TensorType.MXFP4, data, 9, 32)
    found = packed.unpack()
    if 104 <= exponent <= 143:
        assert np.array_equal(found, packed.file)
    elif exponent < 104:
        assert (np.abs(found - packed.file) <= 12 * SMALLEST_SCALE / 2).all()
    elif exponent == 255:
        assert np.isnan(found).all()  # float32 does not hold these numbers either
    else:
        assert np.array_equal(np.sign(found), np.sign(packed.file))


@pytest.mark.parametrize("type", [type for type in KEPT if type is not TensorType.MXFP4])
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 8188.0, -8188.0])
def test_extreme_scales_of_a_file_are_kept(type: TensorType, scale: float) -> None:
    data = np.random.default_rng(0).integers(0, 256, (9, BLOCKS[type].num_bytes), np.uint8)
    data[:, :2] = np.array([scale], "<f2").view(np.uint8)
    if type is TensorType.Q4_1:
        data[:, 2:4] = np.array([-3 * scale], "<f2").view(np.uint8)
    packed = Packed(type, data, 9, 32)
    assert np.array_equal(packed.unpack(), packed.file)


@pytest.mark.parametrize("rows", ROWS)
def test_q4_k_is_kept_to_fp16_of_its_scales(rows: int) -> None:
    """A group's scale is a product of 11 and 6 bits, and fp16 has 11: the scale, and the minimum, move by 2^-11."""
    packed = coded(TensorType.Q4_K, rows, 512, seed=rows)
    minima = np.abs(packed.minima)
    bound = HALF_EPS * (np.abs(packed.file) + 2 * minima) + 16 * SMALLEST_SCALE / 2
    difference = np.abs(packed.unpack() - packed.file)
    assert (difference <= bound * 1.001).all()
    assert difference.max() > 0  # otherwise the bound would be untested


# Types that become 8 bits


def half_steps(values: Floats) -> Floats:
    """Return [rows, cols]: how far rounding to 8 bits may move each number if the group's scale is rounded to fp16."""
    rows, cols = values.shape
    padded = np.zeros((rows, -(-cols // GROUP) * GROUP), np.float32)
    padded[:, :cols] = np.abs(values)
    peaks = padded.reshape(rows, -1, GROUP).max(-1)
    scales = np.maximum(peaks / 127 * (1 + 2 * HALF_EPS), peaks / 127 + SMALLEST_SCALE)
    steps: Floats = (scales / 2).repeat(GROUP, 1)
    return steps[:, :cols]


ROUNDED = (TensorType.Q2_K, TensorType.Q3_K, TensorType.Q5_1, TensorType.Q5_K, TensorType.Q6_K)


@pytest.mark.parametrize("type", ROUNDED)
@pytest.mark.parametrize("rows", ROWS)
def test_other_types_are_packed_as_if_they_were_floats(type: TensorType, rows: int) -> None:
    packed = coded(type, rows, 512, seed=rows)
    assert np.array_equal(packed.bytes, floats(packed.file).bytes)


@pytest.mark.parametrize("type", ROUNDED)
def test_rounding_to_8_bits_changes_weights_by_half_a_percent(type: TensorType) -> None:
    """docs/cpu.md states it. The types themselves change a model's weights by far more."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (512 * 1024 // BLOCKS[type].num_elements, BLOCKS[type].num_bytes), np.uint8)
    set_scales(type, data, rng.uniform(0.5, 2, (len(data), 2)) * 1e-3)
    packed = Packed(type, data, 512, 1024)
    error = np.sqrt(np.square(packed.unpack() - packed.file).sum() / np.square(packed.file).sum())
    assert 0.001 < error < 0.006


def test_every_type_that_c_reads_is_tested_here() -> None:
    tested = {*KEPT, *KEPT_256, *ROUNDED, *PLAIN, TensorType.Q4_K, TensorType.IQ4_XS}
    assert tested == SOURCES.keys()
    assert sorted(SOURCES.values()) == [*range(len(SOURCES))]


@pytest.mark.parametrize("type", PLAIN)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", COLUMNS)
def test_numbers_are_kept_to_half_a_step(type: TensorType, rows: int, cols: int) -> None:
    values = np.random.default_rng(rows * cols).normal(0, 0.05, (rows, cols))
    packed = floats(values, type)
    assert (np.abs(packed.unpack() - packed.file) <= half_steps(packed.file)).all()


def test_numbers_beyond_the_largest_scale_stay_large() -> None:
    packed = floats(np.array([[1e30, -1e30, 1.0, 0.0]]))
    assert packed.unpack()[0, :2].tolist() == [65504.0 * 127, -65504.0 * 127]


def test_numbers_that_fit_8_bits_are_kept_exactly() -> None:
    codes = np.arange(-127, 129, dtype=np.float32).clip(-127, 127).reshape(8, 32)
    codes[:, 0] = 127
    assert np.array_equal(floats(codes / 64).unpack(), codes / 64)


@pytest.mark.parametrize("type", PLAIN)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 5, 31, 40, 69])
def test_nan_stays_nan(type: TensorType, wrong: float, column: int) -> None:
    """Its whole group becomes NaN, whatever its position in the group; other groups do not."""
    values = np.random.default_rng(0).normal(size=(9, 70))
    values[3, column] = wrong
    is_sound = np.isfinite(floats(values, type).unpack())
    expected = np.ones((9, 70), np.bool_)
    first = column // GROUP * GROUP
    expected[3, first : first + GROUP] = False
    assert not is_sound[3, column]
    assert is_sound[expected].all()


# Layout


@pytest.mark.parametrize("type", KEPT)
def test_padding_rows_of_a_panel_are_zeros(type: TensorType) -> None:
    padding = coded(type, 11, 64).unpack(rows=16)[11:]
    assert not padding.any()


def test_padding_columns_of_a_group_are_zeros() -> None:
    whole = floats(np.ones((3, 70))).unpack(rows=8, cols=96)
    assert whole[:3, :70].all()
    assert not whole[3:].any()
    assert not whole[:, 70:].any()


@pytest.mark.parametrize(("kind", "group_bytes"), [(0, 160), (1, 272), (2, 144), (3, 144)])
def test_packed_bytes(kind: int, group_bytes: int) -> None:
    size = load_library().quire_packed_bytes
    assert size(kind, 1, 1) == size(kind, PANEL, GROUP) == group_bytes
    assert size(kind, 9, 33) == 4 * group_bytes
    assert size(kind, 8_000_000, 32_000) == 1_000_000 * 1000 * group_bytes  # more than 32 bits


def test_byte_order_matches_the_header_comment() -> None:
    """[step of 4 inputs][row][input of the step]; the high nibble of a Q4 byte is the place 16 inputs later."""
    values = np.arange(256).reshape(8, 32) % 251 - 125.0
    values[:, 0] = 127
    eight = floats(values)
    steps = eight.bytes[:256].view(np.int8).reshape(8, 8, 4)
    assert np.array_equal(steps.transpose(1, 0, 2).reshape(8, 32), values)
    four = coded(TensorType.Q4_1, 8, 32)
    low, high = four.bytes[:128] & 15, four.bytes[:128] >> 4
    codes = np.concatenate([low, high]).reshape(8, 8, 4).transpose(1, 0, 2).reshape(8, 32)
    scales = four.bytes[128:144].view("<f2").astype(np.float32)[:, None]
    assert np.array_equal(scales * codes + four.minima, four.file)


# Whole models


def unpacked(linear: Linear) -> Floats:
    library = load_library()
    rows: list[Any] = []
    for part in linear.parts[: linear.num_parts]:
        out = np.empty((part.rows, part.cols), np.float32)
        for row in range(part.rows):
            library.quire_unpack(ctypes.byref(part), row, out[row].ctypes.data)
        rows.append(out)
    return np.concatenate(rows)


def read(pointer: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(pointer))


def check_matrix(checkpoint: Checkpoint, linear: Linear, *names: str) -> None:
    expected = np.concatenate([to_float32(checkpoint.read(name)) for name in names])
    found = unpacked(linear)
    types = {checkpoint.tensors[name].type for name in names}
    if types <= {*KEPT, *KEPT_256}:
        assert np.array_equal(found, expected), names
    elif TensorType.Q4_K in types:
        assert np.abs(found - expected).max() <= 2 * HALF_EPS * np.abs(expected).max(), names
    else:
        assert (np.abs(found - expected) <= half_steps(expected)).all(), names


def check_model(checkpoint: Checkpoint, packed: PackedModel, spec: ModelSpec) -> None:
    check_matrix(checkpoint, packed.embedding, "embedding.weight")
    check_matrix(checkpoint, packed.head, "embedding.weight" if spec.is_tied else "head.weight")
    for index, layer in enumerate(packed.layers):
        prefix = f"layers.{index}."
        check_matrix(checkpoint, layer.qkv, *(f"{prefix}{one}_proj.weight" for one in "qkv"))
        check_matrix(checkpoint, layer.o, f"{prefix}o_proj.weight")
        check_matrix(checkpoint, layer.gate_up, f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        check_matrix(checkpoint, layer.down, f"{prefix}down_proj.weight")
        norm = to_float32(checkpoint.read(f"{prefix}input_norm.weight")) + np.float32(spec.norm_offset)
        assert read(layer.input_norm, spec.hidden_size) == norm.tolist()


def test_a_folder_of_bfloat16(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        name: (array.view(np.uint32) >> 16).astype("<u2") for name, array in llama_arrays().items()
    }
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", config(torch_dtype="bfloat16"), arrays, dtype="BF16"))
    packed = pack_model(checkpoint, 2)
    check_model(checkpoint, packed, checkpoint.spec)
    assert bytes(packed.head) != bytes(packed.embedding)
    checkpoint.close()


def test_dummy_weights_are_the_same_each_time(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config())
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder, "dummy")
    one, two = pack_model(checkpoint, 1), pack_model(checkpoint, 2)
    assert np.array_equal(unpacked(one.head), unpacked(two.head))
    assert unpacked(one.head).std() == pytest.approx(0.02, rel=0.1)
    assert set(read(one.layers[0].input_norm, 64)) == {1.0}
    assert not np.array_equal(unpacked(one.layers[0].o), unpacked(one.layers[1].o))
    checkpoint.close()


@pytest.mark.parametrize("type", [type for type, block in BLOCKS.items() if block.num_elements > 1])
def test_a_gguf_file_of_every_type(type: TensorType, tmp_path: Path) -> None:
    from tests.weights.makers import Tensor, llama_keys, llama_tensors, make_gguf
    from tests.weights.test_quants import random_blocks

    number = next(number for number, (one, _) in FILE_TYPES.items() if one is type)
    per_row = BLOCKS[type].num_elements
    ffn = 256
    tensors = llama_tensors()
    for name in tensors:
        if ".ffn_" in name and not name.endswith("norm.weight"):
            dims = (ffn, 64) if "down" in name else (64, ffn)
            count = ffn * 64
            if dims[0] % per_row:
                tensors[name] = Tensor(dims, 0, np.random.default_rng(0).normal(size=count).astype("<f4").tobytes())
            else:
                tensors[name] = Tensor(dims, number, random_blocks(type, count // per_row, seed=1).tobytes())
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(llama_keys(llama__feed_forward_length=ffn), list(tensors.items())))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["layers.1.down_proj.weight"].type is type
    check_model(checkpoint, pack_model(checkpoint, 1), checkpoint.spec)
    checkpoint.close()
