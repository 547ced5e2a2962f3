"""Converts tensors of any stored type to float32, and blocks of GGUF to a `PackedMatrix`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import MissingExtra, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, RawTensor, TensorType
from quire.weights.packed import CodeType, PackedMatrix, floats, pack_pairs

CHUNK_ELEMENTS = 1 << 20  # decoded at once: the decoders make several copies of their input


def to_float32(raw: RawTensor) -> NDArray[np.float32]:
    """Return a copy with the shape `info.shape`."""
    data = np.ascontiguousarray(raw.data)
    if raw.info.type in (TensorType.F32, TensorType.F16, TensorType.BF16):
        return floats(data, raw.info.type).reshape(raw.info.shape)
    return _dequantize(raw, data)


def _dequantize(raw: RawTensor, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode rows in chunks. A tensor of experts [N, rows, columns] is N * rows rows."""
    decode = _decoder(raw.info.type)
    out = np.empty(raw.info.shape, np.float32)
    rows = out.reshape(-1, raw.info.shape[-1])
    coded = data.reshape(rows.shape[0], -1)
    step = max(1, CHUNK_ELEMENTS // rows.shape[1])
    with np.errstate(all="ignore"):  # a scale in the file may be infinite
        for start in range(0, len(rows), step):
            rows[start : start + step] = decode(coded[start : start + step])
    return out


def _decoder(kind: TensorType) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Return a function of rows of bytes [R, B] that returns rows of floats."""
    if kind in _CODEBOOKS:
        return lambda coded: _look_up(kind, coded)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise MissingExtra.of(f"a tensor of type {kind}", "gguf") from None
    if kind not in GGMLQuantizationType.__members__:
        raise UnsupportedModel(f"the installed gguf package does not decode {kind}: upgrade it")
    number = GGMLQuantizationType[kind]
    return lambda coded: dequantize(coded, number)


# 4-bit codes that are places in a table. The decoders of the gguf package are a third as fast.

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_CODEBOOKS = {TensorType.IQ4_NL: IQ4_CODES, TensorType.IQ4_XS: IQ4_CODES, TensorType.MXFP4: E2M1_CODES}


def _look_up(kind: TensorType, coded: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = coded.reshape(-1, BLOCKS[kind].num_bytes)
    if kind is TensorType.MXFP4:
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        codes = blocks[:, 1:]
    elif kind is TensorType.IQ4_NL:
        scales = _half(blocks, 0)
        codes = blocks[:, 2:]
    else:
        scales = _iq4_xs_scales(blocks)
        codes = blocks[:, 8:]
    values = np.empty((scales.size, 2, 16), np.float32)  # [groups, nibble, code]
    packed = codes.tobytes()
    for nibble in range(2):
        table = bytes(_CODEBOOKS[kind][byte >> 4 * nibble & 15] & 255 for byte in range(256))
        found = np.frombuffer(packed.translate(table), np.int8).reshape(-1, 16)  # faster than numpy's indexing
        np.multiply(found, scales.reshape(-1, 1), out=values[:, nibble], dtype=np.float32)
    return values.reshape(len(coded), -1)


def _iq4_xs_scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return [N, 8]: a float16 times signed factors of 6 bits, of which 4 are in bytes 4 to 7, 2 in bytes 2 and 3."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    factors: NDArray[np.float32] = (low | high << 4).astype(np.float32) - 32
    return _half(blocks, 0) * factors


# Blocks as a packed matrix, for the types that have equal groups of codes of 4 to 8 bits. Codes of 5 and 6 bits take 8.
# The value of a weight is that of llama.cpp, up to the rounding of float32. A type with a minimum m per group,
# w = d * code + m, has a zero of -m / d.

# B blocks of a tensor, S groups in a block


class _Decoded(NamedTuple):
    codes: NDArray[np.uint8]  # [B, weights of a block], one code per byte
    scales: NDArray[np.float32]  # [B, S]
    minima: NDArray[np.float32] | None = None  # [B, S], added after scaling


def pack_blocks(raw: RawTensor) -> PackedMatrix | None:
    """Return a matrix of GGUF blocks; None: its type has no such form."""
    layout = BLOCK_LAYOUTS.get(raw.info.type)
    if layout is None or len(raw.info.shape) != 2:
        return None
    rows, columns = raw.info.shape
    blocks = np.ascontiguousarray(raw.data).reshape(-1, BLOCKS[raw.info.type].num_bytes)
    with np.errstate(all="ignore"):  # a scale in the file may be infinite or NaN
        codes, scales, minima = layout.decode(blocks)
        zeros = None
        if minima is not None:
            codes, scales, zeros = _with_zeros(codes, scales, minima)
    codes = codes.reshape(rows, columns)
    return PackedMatrix(
        layout.type,
        (rows, columns),
        pack_pairs(codes) if layout.type.bits == 4 else codes,
        scales.reshape(rows, -1),
        (1, layout.group),
        None if zeros is None else zeros.reshape(rows, -1),
    )


def _with_zeros(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], minima: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Return codes, scales and zeros. A group with scale 0 has equal weights: (0 - -1) * minimum."""
    is_flat = scales == 0
    zeros = np.where(is_flat, np.float32(-1), -minima / scales)
    groups = codes.reshape(*scales.shape, -1)
    return np.where(is_flat[..., None], np.uint8(0), groups), np.where(is_flat, minima, scales), zeros


def _half(blocks: NDArray[np.uint8], first: int) -> NDArray[np.float32]:
    """Return the float16 at a byte of each block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return codes of 4 bits. The low half of byte i is weight i; the high halves follow after all low ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q8_0(blocks: NDArray[np.uint8]) -> _Decoded:
    return _Decoded(blocks[:, 2:], _half(blocks, 0))


def _q4_0(blocks: NDArray[np.uint8]) -> _Decoded:
    return _Decoded(_halves(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: NDArray[np.uint8]) -> _Decoded:
    return _Decoded(_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the fifth bits of 32 codes as 16 or 0: bit i of four bytes belongs to code i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: NDArray[np.uint8]) -> _Decoded:
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Decoded((codes.view(np.int8) - np.int8(16)).view(np.uint8), _half(blocks, 0))


def _q5_1(blocks: NDArray[np.uint8]) -> _Decoded:
    return _Decoded(_halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: NDArray[np.uint8]) -> _Decoded:
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32))  # 64 weights in 32 bytes
    return _Decoded(codes.reshape(len(blocks), -1), *_k_scales(blocks))


def _q5_k(blocks: NDArray[np.uint8]) -> _Decoded:
    """As Q4_K, with 32 bytes before the codes: bit i of byte j is the fifth bit of weight j of group i."""
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [B, 8, 32]
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high << np.uint8(4)
    return _Decoded(codes.reshape(len(blocks), -1), *_k_scales(blocks))


def _k_scales(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scales and minima of eight groups of 32, with factors of 6 bits for both in bytes 4 to 15."""
    packed = blocks[:, 4:16]
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate((first & 63, high & 15 | first >> 6 << 4), axis=1)
    offsets = np.concatenate((second & 63, high >> 4 | second >> 6 << 4), axis=1)
    return _half(blocks, 0) * factors, -(_half(blocks, 2) * offsets)


def _q6_k(blocks: NDArray[np.uint8]) -> _Decoded:
    """Sixteen groups of 16: 128 bytes of low 4 bits, 64 of high 2 bits, 16 signed factors, a scale."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # for each 128 weights: bytes of the weights 0 to 63
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = np.concatenate((low & 15, low >> 4), axis=2) | high << 4  # [B, 2, 4, 32]
    signed = codes.view(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _Decoded(signed.view(np.uint8).reshape(len(blocks), -1), _half(blocks, 208) * factors)


def _mxfp4(blocks: NDArray[np.uint8]) -> _Decoded:
    return _Decoded(_halves(blocks[:, 1:]), np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127))


class _Layout(NamedTuple):
    type: CodeType
    group: int
    decode: Callable[[NDArray[np.uint8]], _Decoded]


BLOCK_LAYOUTS = {
    TensorType.Q8_0: _Layout(CodeType.INT8, 32, _q8_0),
    TensorType.Q4_0: _Layout(CodeType.INT4, 32, _q4_0),
    TensorType.Q4_1: _Layout(CodeType.INT4, 32, _q4_1),
    TensorType.Q5_0: _Layout(CodeType.INT8, 32, _q5_0),
    TensorType.Q5_1: _Layout(CodeType.INT8, 32, _q5_1),
    TensorType.Q4_K: _Layout(CodeType.INT4, 32, _q4_k),
    TensorType.Q5_K: _Layout(CodeType.INT8, 32, _q5_k),
    TensorType.Q6_K: _Layout(CodeType.INT8, 16, _q6_k),
    TensorType.MXFP4: _Layout(CodeType.FP4, 32, _mxfp4),
}
