"""Each stored type as float32, compared with decoders written here one number at a time."""

from __future__ import annotations

import builtins
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import MissingExtra, UnsupportedModel
from quire.weights import quants
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.gguf import BLOCKS
from quire.weights.quants import to_float32
from tests.weights.makers import set_scales

QUANTISED = [kind for kind, block in BLOCKS.items() if block.num_elements > 1]
# Types whose codes are places in tables of vectors. gguf decodes them; here, known blocks are decoded.
VECTORS = [kind for kind in QUANTISED if kind.startswith(("IQ1", "IQ2", "IQ3"))]
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def decode(kind: TensorType, data: bytes) -> list[float]:
    """Decode one block as the format's description defines it."""
    if kind is TensorType.Q8_0:
        return [half(data, 0) * code for code in struct.unpack_from("<32b", data, 2)]
    if kind in (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1):
        return decode_simple(kind, data)
    if kind in (TensorType.Q4_K, TensorType.Q5_K):
        return decode_k(kind, data)
    return DECODERS[kind](data)


def decode_simple(kind: TensorType, data: bytes) -> list[float]:
    has_minimum, has_high = kind.endswith("_1"), kind.startswith("Q5")
    scale, at = half(data, 0), 2
    minimum = half(data, at) if has_minimum else 0.0
    at += 2 * has_minimum
    high = struct.unpack_from("<I", data, at)[0] if has_high else 0
    at += 4 * has_high
    values = []
    for i in range(32):
        code = data[at + i % 16] >> (4 if i >= 16 else 0) & 15
        code |= (high >> i & 1) << 4
        middle = 0 if has_minimum else 16 if has_high else 8
        values.append(scale * (code - middle) + minimum)
    return values


def decode_k(kind: TensorType, data: bytes) -> list[float]:
    """Q4_K and Q5_K: eight groups of 32, each with a six-bit scale and a six-bit minimum."""
    scale, minimum, packed = half(data, 0), half(data, 2), data[4:16]
    has_high = kind is TensorType.Q5_K
    high, codes = data[16:48], data[48 if has_high else 16 :]
    values = []
    for group in range(8):
        if group < 4:
            step, low = packed[group] & 63, packed[group + 4] & 63
        else:
            step = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            low = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            code = codes[group // 2 * 32 + i] >> (4 if group % 2 else 0) & 15
            if has_high:
                code |= (high[i] >> group & 1) << 4
            values.append(scale * step * code - minimum * low)
    return values


def decode_q6_k(data: bytes) -> list[float]:
    low, high, scales, scale = data[:128], data[128:192], struct.unpack_from("<16b", data, 192), half(data, 208)
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        row, column = divmod(inside, 32)
        code = low[64 * part + 32 * (row % 2) + column] >> (4 if row >= 2 else 0) & 15
        code |= (high[32 * part + column] >> 2 * row & 3) << 4
        values.append(scale * scales[i // 16] * (code - 32))
    return values


def decode_q2_k(data: bytes) -> list[float]:
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        row, column = divmod(inside, 32)
        code = data[16 + 32 * part + column] >> 2 * row & 3
        factors = data[i // 16]
        values.append(half(data, 80) * (factors & 15) * code - half(data, 82) * (factors >> 4))
    return values


def decode_q3_k(data: bytes) -> list[float]:
    """The 16 factors of 6 bits: low nibbles of 8 bytes, then their high nibbles; two bits each of 4 bytes, in turn."""
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        row, column = divmod(inside, 32)
        code = data[32 + 32 * part + column] >> 2 * row & 3
        code -= 0 if data[column] >> (4 * part + row) & 1 else 4
        group = i // 16
        factor = data[96 + group % 8] >> (4 if group >= 8 else 0) & 15
        factor |= (data[104 + group % 4] >> 2 * (group // 4) & 3) << 4
        values.append(half(data, 108) * (factor - 32) * code)
    return values


def decode_iq4_nl(data: bytes) -> list[float]:
    return [half(data, 0) * IQ4[data[2 + i % 16] >> (4 if i >= 16 else 0) & 15] for i in range(32)]


def decode_iq4_xs(data: bytes) -> list[float]:
    high = struct.unpack_from("<H", data, 2)[0]
    values = []
    for i in range(256):
        group, inside = divmod(i, 32)
        factor = data[4 + group // 2] >> (4 if group % 2 else 0) & 15 | (high >> 2 * group & 3) << 4
        code = data[8 + 16 * group + inside % 16] >> (4 if inside >= 16 else 0) & 15
        values.append(half(data, 0) * (factor - 32) * IQ4[code])
    return values


def decode_mxfp4(data: bytes) -> list[float]:
    """A power of two, and floats of a sign, two bits of exponent and one bit of mantissa."""
    values = []
    for i in range(32):
        code = data[1 + i % 16] >> (4 if i >= 16 else 0) & 15
        values.append(2.0 ** (data[0] - 127) * E2M1[code & 7] * (-1 if code & 8 else 1))
    return values


def decode_tq1_0(data: bytes) -> list[float]:
    """Bytes are fractions of 256 in base 3: the next digit is the integer part of three times the fraction."""
    codes: list[int] = []
    for start, end, num_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        fractions = list(data[start:end])
        for _ in range(num_digits):
            codes += [3 * fraction >> 8 for fraction in fractions]
            fractions = [3 * fraction & 255 for fraction in fractions]
    return [half(data, 52) * (code - 1) for code in codes]


def decode_tq2_0(data: bytes) -> list[float]:
    return [half(data, 64) * ((data[i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3) - 1) for i in range(256)]


DECODERS = {
    TensorType.Q2_K: decode_q2_k,
    TensorType.Q3_K: decode_q3_k,
    TensorType.Q6_K: decode_q6_k,
    TensorType.IQ4_NL: decode_iq4_nl,
    TensorType.IQ4_XS: decode_iq4_xs,
    TensorType.MXFP4: decode_mxfp4,
    TensorType.TQ1_0: decode_tq1_0,
    TensorType.TQ2_0: decode_tq2_0,
}


def random_blocks(kind: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Make random codes with small scales: random bits would often be infinite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, BLOCKS[kind].num_bytes), np.uint8)
    set_scales(kind, blocks, rng.uniform(-1, 1, (num_blocks, 2)))
    return blocks


def raw(kind: TensorType, shape: tuple[int, ...], data: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(TensorInfo("x", kind, shape, data.size), data)


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if kind not in VECTORS])
def test_quantised_blocks(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 3 * 512)  # several chunks, the last one short
    rows, columns = 10, 512
    blocks = random_blocks(kind, rows * columns // BLOCKS[kind].num_elements, seed=1)
    expected = [value for block in blocks for value in decode(kind, block.tobytes())]
    found = to_float32(raw(kind, (rows, columns), blocks.reshape(rows, -1)))
    assert found.shape == (rows, columns)
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", VECTORS)
def test_known_blocks_of_vectors(kind: TensorType) -> None:
    """If all bits but those of the scale are 0, every code is the first vector with the smallest factor.

    That vector is 8 or 4 or 1 times a factor of 1/8, 1/4 or 1; in IQ1 it is -1 with a shift of 1/8.
    """
    block = np.zeros((3, BLOCKS[kind].num_bytes), np.uint8)
    set_scales(kind, block, np.array([[0.5, 0], [-3.0, 0], [0, 0]]))
    found = to_float32(raw(kind, (3, 256), block))
    first = -0.875 if kind.startswith("IQ1") else 1.0
    assert found.tolist() == [[0.5 * first] * 256, [-3.0 * first] * 256, [0.0] * 256]


@pytest.mark.parametrize("kind", QUANTISED)
def test_tensors_of_experts_are_decoded_like_matrices(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor [N, rows, columns] is N matrices. Chunks do not change the numbers."""
    num_experts, rows, columns = 3, 5, 512
    blocks = random_blocks(kind, num_experts * rows * columns // BLOCKS[kind].num_elements, seed=4)
    coded = blocks.reshape(num_experts * rows, -1)
    whole = to_float32(raw(kind, (num_experts, rows, columns), coded))
    assert whole.shape == (num_experts, rows, columns)
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) > 20
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 2 * columns)
    for expert in range(num_experts):
        alone = to_float32(raw(kind, (rows, columns), coded[expert * rows : (expert + 1) * rows]))
        assert np.array_equal(alone, whole[expert])


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "MXFP4"])
def test_codebooks_give_the_numbers_of_gguf(kind: str) -> None:
    """Including infinite and subnormal scales."""
    from gguf import GGMLQuantizationType, dequantize

    block = BLOCKS[TensorType(kind)]
    coded = np.random.default_rng(5).integers(0, 256, (256, 256 // block.num_elements * block.num_bytes), np.uint8)
    coded[:, 0] = np.arange(256)
    with np.errstate(all="ignore"):
        expected = dequantize(coded, GGMLQuantizationType[kind])
    assert np.array_equal(to_float32(raw(TensorType(kind), (256, 256), coded)), expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "MXFP4"])
def test_types_that_gguf_quantises_keep_numbers_they_can_hold(kind: str) -> None:
    from gguf import GGMLQuantizationType, quantize

    rng = np.random.default_rng(6)
    values = rng.choice((-6, -1, 0, 0.5, 4, 6) if kind == "MXFP4" else (-0.5, 0, 0.5), (8, 512)).astype(np.float32)
    values[:, ::32] = 6 if kind == "MXFP4" else 0.5
    coded = quantize(values, GGMLQuantizationType[kind])
    assert np.array_equal(to_float32(raw(TensorType(kind), values.shape, coded)), values)


def test_a_gguf_package_that_is_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    monkeypatch.setattr(gguf, "GGMLQuantizationType", SimpleNamespace(__members__={}))
    with pytest.raises(UnsupportedModel, match="the installed gguf package does not decode TQ2_0: upgrade it"):
        to_float32(raw(TensorType.TQ2_0, (1, 256), random_blocks(TensorType.TQ2_0, 1, seed=3)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantising_with_gguf_and_decoding_is_nearly_exact(kind: str) -> None:
    from gguf import GGMLQuantizationType, quantize

    values = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    coded = quantize(values, GGMLQuantizationType[kind])
    found = to_float32(raw(TensorType(kind), values.shape, coded))
    step = {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.2, "Q5_0": 0.15, "Q5_1": 0.1}[kind]
    assert np.abs(found - values).max() < step * 1.5


@pytest.mark.parametrize(("kind", "dtype"), [(TensorType.F32, "<f4"), (TensorType.F16, "<f2")])
def test_plain_floats(kind: TensorType, dtype: str) -> None:
    values = np.arange(12, dtype=dtype).reshape(3, 4)
    found = to_float32(raw(kind, (3, 4), values.view(np.uint8)))
    assert found.dtype == np.float32
    assert found.tolist() == values.tolist()
    assert found.flags.writeable


def test_bfloat16() -> None:
    data = np.array([0x3F80, 0xC000, 0x7F80], "<u2").view(np.uint8)
    assert to_float32(raw(TensorType.BF16, (3,), data)).tolist() == [1.0, -2.0, float("inf")]


def test_without_gguf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gguf(name: str, *rest: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(MissingExtra, match=r"needs gguf, which is not installed: \S+ -m pip install gguf"):
        to_float32(raw(TensorType.Q8_0, (1, 32), random_blocks(TensorType.Q8_0, 1, seed=3)))
    assert to_float32(raw(TensorType.F32, (1,), np.zeros(4, np.uint8))).tolist() == [0.0]
