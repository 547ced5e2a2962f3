"""Rounds matrices to few bits: the nearest code, without calibration data.

A group of weights has one scale. It is stored in the type of the file's other tensors, so codes are computed with the
stored scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from quire.weights.packed import CodeType, PackedMatrix, fp8_values, pack_pairs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# O outputs, I inputs, G groups in a row, W weights in a group

FP8_MAX = 448.0
# The largest weight of a group is this many scales. With 7.5 or 8 it is cut to 7, and the others are closer.
_INT4_SPANS = (7.0, 7.5, 8.0)
_INT8_SPANS = (127.0,)

Store = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]  # rounds scales to the type that they are stored in


def round_fp8(weights: NDArray[np.float32], group: tuple[int, int], store: Store) -> PackedMatrix:
    """Round to e4m3, with a scale for each rectangle of `group` weights."""
    import numpy as np

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
    import numpy as np

    codes = np.searchsorted(_fp8_limits(), np.abs(values)).astype(np.uint8)
    return codes | np.signbit(values).astype(np.uint8) << np.uint8(7)


@cache
def _fp8_limits() -> NDArray[np.float32]:
    """Return the largest number that is rounded to each positive code but the last."""
    import numpy as np

    values = fp8_values()[:127]
    middles = (values[:-1] + values[1:]) / 2  # exact: neighbours differ by one of their 4 bits
    is_odd = np.arange(126) % 2 == 1
    return np.where(is_odd, np.nextafter(middles, np.float32(0)), middles)


def round_symmetric(weights: NDArray[np.float32], bits: int, width: int, store: Store) -> PackedMatrix:
    """Round groups of `width` weights of a row to signed integers; of several scales, take that of the least error."""
    import numpy as np

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
    import numpy as np

    groups = weights.reshape(len(weights), -1, width)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = store(_nonzero((high - low) / np.float32(15)))
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = pack_pairs(codes.reshape(weights.shape))
    return PackedMatrix(CodeType.INT4, weights.shape, packed, scales, (1, width), zeros)


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales that can be divided by: groups of zeros have a scale of 1."""
    import numpy as np

    return np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
