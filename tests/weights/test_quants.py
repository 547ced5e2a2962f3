"""Each stored type as float32, compared with decoders written here one number at a time."""

from __future__ import annotations

import builtins
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import MissingExtra
from quire.weights import quants
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.gguf import BLOCKS
from quire.weights.quants import to_float32

QUANTISED = [kind for kind in TensorType if BLOCKS[kind].num_elements > 1]


def half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def decode(kind: TensorType, data: bytes) -> list[float]:
    """Decode one block as the format's description defines it."""
    if kind is TensorType.Q8_0:
        return [half(data, 0) * code for code in struct.unpack_from("<32b", data, 2)]
    if kind in (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1):
        return decode_simple(kind, data)
    if kind is TensorType.Q6_K:
        return decode_q6_k(data)
    return decode_k(kind, data)


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


def random_blocks(kind: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Make random codes with small scales: random bits would often be infinite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, BLOCKS[kind].num_bytes), np.uint8)
    scales = rng.uniform(-1, 1, (num_blocks, 2)).astype("<f2").view(np.uint8)
    if kind is TensorType.Q6_K:
        blocks[:, 208:] = scales[:, :2]
    else:
        width = 2 if kind in (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q5_0) else 4
        blocks[:, :width] = scales[:, :width]
    return blocks


def raw(kind: TensorType, shape: tuple[int, ...], data: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(TensorInfo("x", kind, shape, data.size), data)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_blocks(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 3 * 512)  # several chunks, the last one short
    rows, columns = 10, 512
    blocks = random_blocks(kind, rows * columns // BLOCKS[kind].num_elements, seed=1)
    expected = [value for block in blocks for value in decode(kind, block.tobytes())]
    found = to_float32(raw(kind, (rows, columns), blocks.reshape(rows, -1)))
    assert found.shape == (rows, columns)
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5, atol=1e-5)


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
