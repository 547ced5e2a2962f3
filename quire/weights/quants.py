"""Converts tensors of any stored type to float32, and rounds matrices to few bits.

Rounding takes the nearest code, without calibration data. A group of weights has one scale. It is stored in the type of
the file's other tensors, so codes are computed with the stored scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.errors import MissingExtra, UnsupportedModel
from quire.weights.checkpoint import RawTensor, TensorType
from quire.weights.packed import CodeType, PackedMatrix, fp8_values, pack_pairs

CHUNK_ELEMENTS = 1 << 20  # decoded at once: the decoders make several copies of their input


def to_float32(raw: RawTensor) -> NDArray[np.float32]:
    """Return a copy with the shape `info.shape`."""
    kind, data = raw.info.type, np.ascontiguousarray(raw.data)
    if kind is TensorType.F32:
        return data.view("<f4").astype(np.float32).reshape(raw.info.shape)
    if kind is TensorType.F16:
        with np.errstate(invalid="ignore"):  # NaN is allowed
            return data.view("<f2").astype(np.float32).reshape(raw.info.shape)
    if kind is TensorType.BF16:  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(raw.info.shape)
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
    if kind is TensorType.MXFP4:
        blocks = coded.reshape(-1, 17)
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        codes = blocks[:, 1:]
    elif kind is TensorType.IQ4_NL:
        blocks = coded.reshape(-1, 18)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        codes = blocks[:, 2:]
    else:
        blocks = coded.reshape(-1, 136)
        scales = iq4_xs_scales(blocks)
        codes = blocks[:, 8:]
    values = np.empty((scales.size, 2, 16), np.float32)  # [groups, nibble, code]
    packed = codes.tobytes()
    for nibble in range(2):
        table = bytes(_CODEBOOKS[kind][byte >> 4 * nibble & 15] & 255 for byte in range(256))
        found = np.frombuffer(packed.translate(table), np.int8).reshape(-1, 16)  # faster than numpy's indexing
        np.multiply(found, scales.reshape(-1, 1), out=values[:, nibble], dtype=np.float32)
    return values.reshape(len(coded), -1)


def iq4_xs_scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return [N, 8]: a float16 times signed factors of 6 bits, of which 4 are in bytes 4 to 7, 2 in bytes 2 and 3."""
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    factors: NDArray[np.float32] = (low | high << 4).astype(np.float32) - 32
    return scales * factors


# O outputs, I inputs, G groups in a row, W weights in a group

FP8_MAX = 448.0
# The largest weight of a group is this many scales. With 7.5 or 8 it is cut to 7, and the others are closer.
_INT4_SPANS = (7.0, 7.5, 8.0)
_INT8_SPANS = (127.0,)

Store = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]  # rounds scales to the type that they are stored in


def round_fp8(weights: NDArray[np.float32], group: tuple[int, int], store: Store) -> PackedMatrix:
    """Round to e4m3, with a scale for each rectangle of `group` weights."""
    rows, columns = weights.shape
    height, width = min(group[0] or rows, rows), min(group[1] or columns, columns)
    padded = np.zeros((-(-rows // height) * height, -(-columns // width) * width), np.float32)
    padded[:rows, :columns] = weights
    blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
    scales = store(_nonzero(np.abs(blocks).max((1, 3)) / np.float32(FP8_MAX)))
    scaled: NDArray[np.float32] = np.divide(blocks, scales[:, None, :, None], dtype=np.float32)
    codes = to_fp8(scaled).reshape(padded.shape)[:rows, :columns]
    return PackedMatrix(CodeType.FP8, (rows, columns), np.ascontiguousarray(codes), scales, (height, width))


def to_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest codes; of two equally near ones, the even one. Values beyond the range become the largest."""
    codes = np.searchsorted(_fp8_limits(), np.abs(values)).astype(np.uint8)
    return codes | np.signbit(values).astype(np.uint8) << np.uint8(7)


@cache
def _fp8_limits() -> NDArray[np.float32]:
    """Return the largest number that is rounded to each positive code but the last."""
    values = fp8_values()[:127]
    middles = (values[:-1] + values[1:]) / 2  # exact: neighbours differ by one of their 4 bits
    is_odd = np.arange(126) % 2 == 1
    return np.where(is_odd, np.nextafter(middles, np.float32(0)), middles)


def round_symmetric(weights: NDArray[np.float32], bits: int, width: int, store: Store) -> PackedMatrix:
    """Round groups of `width` weights of a row to signed integers; of several scales, take that of the least error."""
    groups = weights.reshape(len(weights), -1, width)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    largest = np.abs(groups).max(2)
    best = np.full(largest.shape, np.inf, np.float32)
    scales, codes = np.ones_like(largest), np.zeros(groups.shape, np.int8)
    for span in _INT4_SPANS if bits == 4 else _INT8_SPANS:
        tried = store(_nonzero(largest / np.float32(span)))
        rounded = np.clip(np.rint(groups / tried[..., None]), low, high)
        error = np.square(rounded * tried[..., None] - groups).sum(2)
        is_better = error < best
        best = np.where(is_better, error, best)
        scales = np.where(is_better, tried, scales)
        codes = np.where(is_better[..., None], rounded.astype(np.int8), codes)
    signed = codes.reshape(weights.shape)
    if bits == 8:
        return PackedMatrix(CodeType.INT8, weights.shape, signed.view(np.uint8), scales, (1, width))
    packed = pack_pairs((signed + np.int8(8)).view(np.uint8))
    return PackedMatrix(CodeType.INT4, weights.shape, packed, scales, (1, width))


def round_asymmetric(weights: NDArray[np.float32], width: int, store: Store) -> PackedMatrix:
    """Round groups of `width` weights of a row to 0 to 15, with a zero point for each group."""
    groups = weights.reshape(len(weights), -1, width)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = store(_nonzero((high - low) / np.float32(15)))
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = pack_pairs(codes.reshape(weights.shape))
    return PackedMatrix(CodeType.INT4, weights.shape, packed, scales, (1, width), zeros)


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales that can be divided by: groups of zeros have a scale of 1."""
    return np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
