"""Repacks GGUF's quantised blocks as MLX's affine quantisation, without rounding the codes.

Both formats compute w = scale * code + bias for groups of 32 weights. Only the layout differs, and the type of scales
and biases: MLX keeps them in the type of the activations, GGUF in float16, or in Q4_K, Q5_K and IQ4_XS as products of a
float16 and a 6-bit number. So in float32 the weights are exactly those of the file. In float16 the other types keep
their scales exactly, and those of Q4_K, Q5_K and IQ4_XS are rounded to 11 bits. Measured on random blocks, that changes
the weights by 0.02 % (root mean square); a second quantisation to 8 bits would change them by 0.13 %. In bfloat16,
scales of all types but MXFP4 are rounded to 8 bits, and weights change by 0.17 %.

The 4-bit codes of IQ4_NL, IQ4_XS and MXFP4 are places in a table of integers. The integers become the codes: 8 bits
for IQ4_NL and IQ4_XS, 5 bits for MXFP4. Q2_K, Q3_K and Q6_K have groups of 16, which MLX does not have, and the other
types have tables of vectors: these are not repacked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.weights.checkpoint import RawTensor, TensorType
from quire.weights.gguf import BLOCKS
from quire.weights.quants import E2M1_CODES, IQ4_CODES, iq4_xs_scales

GROUP_SIZE = 32
CHUNK_ELEMENTS = 1 << 20  # repacked at once: the decoders make several copies of their input

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Blocks(NamedTuple):
    """Decoded blocks of one type: N blocks of G groups."""

    codes: Bytes  # [N, G * 32], unsigned
    scales: Floats  # [N, G]
    biases: Floats  # [N, G]


class PackedWeight(NamedTuple):
    """A matrix in MLX's layout."""

    weight: NDArray[np.uint32]  # [rows, columns * bits / 32]
    scales: Floats  # [rows, columns / 32]
    biases: Floats  # [rows, columns / 32]


class Packing(NamedTuple):
    bits: int
    decode: Callable[[Bytes], Blocks]  # from [N, bytes per block]


def pack(raw: RawTensor) -> PackedWeight:
    """Repack a matrix whose type is in PACKINGS."""
    bits, decode = PACKINGS[raw.info.type]
    num_rows, num_columns = raw.info.shape
    block = BLOCKS[raw.info.type]
    num_groups = num_columns // GROUP_SIZE
    packed = PackedWeight(
        np.empty((num_rows, num_columns * bits // 32), np.uint32),
        np.empty((num_rows, num_groups), np.float32),
        np.empty((num_rows, num_groups), np.float32),
    )
    data = raw.data.reshape(num_rows, -1)
    step = max(1, CHUNK_ELEMENTS // num_columns)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        blocks = decode(np.ascontiguousarray(data[rows]).reshape(-1, block.num_bytes))
        packed.weight[rows] = _pack_codes(blocks.codes, bits).reshape(rows.stop - start, -1)
        packed.scales[rows] = blocks.scales.reshape(-1, num_groups)
        packed.biases[rows] = blocks.biases.reshape(-1, num_groups)
    return packed


def _pack_codes(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Pack into one stream of bits, lowest first. Eight codes are exactly `bits` bytes."""
    if bits == 8:
        return codes.reshape(-1).view("<u4")
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1).view("<u4")
    eights = codes.reshape(-1, 8).astype("<u8")
    words = np.zeros(len(eights), "<u8")
    for i in range(8):
        words |= eights[:, i] << np.uint64(bits * i)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1).view("<u4")


# Decoders. A block starts with one or two float16 numbers; blocks of 32 codes are stored as two halves in nibbles.


def _float16(blocks: Bytes, start: int) -> Floats:
    """Return [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    return np.concatenate((data & 15, data >> 4), axis=1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Return [N, 32] from [N, 4]: bit i belongs to code i."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Blocks:
    scales = _float16(blocks, 0)
    return Blocks(_nibbles(blocks[:, 2:]), scales, -8 * scales)


def _q4_1(blocks: Bytes) -> Blocks:
    return Blocks(_nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Bytes) -> Blocks:
    scales = _float16(blocks, 0)
    return Blocks(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, -16 * scales)


def _q5_1(blocks: Bytes) -> Blocks:
    return Blocks(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Bytes) -> Blocks:
    scales = _float16(blocks, 0)
    return Blocks(blocks[:, 2:] ^ np.uint8(128), scales, -128 * scales)  # two's complement to an offset of 128


def _q4_k(blocks: Bytes) -> Blocks:
    codes = _nibble_pairs(blocks[:, 16:])
    return Blocks(codes.reshape(-1, 256), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(
        1
    )  # [N, 8, 32]: bit g is of group g
    codes = _nibble_pairs(blocks[:, 48:]) | fifth << np.uint8(4)
    return Blocks(codes.reshape(-1, 256), *_k_scales(blocks))


_IQ4_CODES = (np.array(IQ4_CODES, np.int16) + 128).astype(np.uint8)
_E2M1_CODES = (np.array(E2M1_CODES, np.int16) + 12).astype(np.uint8)


def _iq4_nl(blocks: Bytes) -> Blocks:
    scales = _float16(blocks, 0)
    return Blocks(_IQ4_CODES[_nibbles(blocks[:, 2:])], scales, -128 * scales)


def _iq4_xs(blocks: Bytes) -> Blocks:
    scales = iq4_xs_scales(blocks)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return Blocks(_IQ4_CODES[codes], scales, -128 * scales)


def _mxfp4(blocks: Bytes) -> Blocks:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return Blocks(_E2M1_CODES[_nibbles(blocks[:, 1:])], scales, -12 * scales)


def _tq1_0(blocks: Bytes) -> Blocks:
    """A byte holds five digits of base 3 as a fraction of 256: digit i is the integer part of 3 * frac(3^i * byte)."""
    powers = np.array((1, 3, 9, 27, 81), np.uint8)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    digits = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1).astype(np.uint16) * 3 >> 8
    return _ternary(digits.astype(np.uint8), _float16(blocks, 52))


def _tq2_0(blocks: Bytes) -> Blocks:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)  # [N, 2, 4, 32]
    return _ternary(codes.reshape(-1, 256), _float16(blocks, 64))


def _ternary(codes: Bytes, scale: Floats) -> Blocks:
    """Codes 0, 1 and 2 are the numbers -1, 0 and 1."""
    scales = np.repeat(scale, 8, axis=1)
    return Blocks(codes, scales, -scales)


def _nibble_pairs(data: Bytes) -> Bytes:
    """Return [N, 8, 32] from [N, 128]: 32 bytes hold two groups, the first in the low nibbles."""
    pairs = data.reshape(-1, 4, 1, 32)
    return np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and biases [N, 8]. Twelve bytes hold 6-bit factors: eight of the scale and eight of the minimum."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1)
    minima = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1)
    return _float16(blocks, 0) * factors, -_float16(blocks, 2) * minima


PACKINGS: dict[TensorType, Packing] = {
    TensorType.Q4_0: Packing(4, _q4_0),
    TensorType.Q4_1: Packing(4, _q4_1),
    TensorType.Q5_0: Packing(5, _q5_0),
    TensorType.Q5_1: Packing(5, _q5_1),
    TensorType.Q8_0: Packing(8, _q8_0),
    TensorType.Q4_K: Packing(4, _q4_k),
    TensorType.Q5_K: Packing(5, _q5_k),
    TensorType.IQ4_NL: Packing(8, _iq4_nl),
    TensorType.IQ4_XS: Packing(8, _iq4_xs),
    TensorType.MXFP4: Packing(5, _mxfp4),
    TensorType.TQ1_0: Packing(2, _tq1_0),
    TensorType.TQ2_0: Packing(2, _tq2_0),
}
