"""4-bit matrices of safetensors (AWQ, GPTQ, compressed-tensors) as blocks of Q4_0 and Q4_1, which csrc/pack.c reads.

The codes are those of the file. Scales are rounded to fp16, which files have already, or bf16, whose numbers fp16 holds
down to 6.1e-5. The minimum of a group, -zero * scale, is rounded to fp16 too: that changes a weight by at most 2 ** -11
of the minimum, less than 1 % of the distance between two codes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.backends.native.library import GROUP, Bytes
from quire.weights.checkpoint import TensorType
from quire.weights.packed import INT4_ZERO, CodeType, PackedMatrix, unpack_pairs

MAX_ZERO = 16
MAX_HALF = 65504.0  # of fp16


class Blocks(NamedTuple):
    type: TensorType
    data: Bytes  # [O, bytes of a row]


def find_block_type(matrix: PackedMatrix) -> TensorType | None:
    """Return the type whose blocks hold a matrix, or None if no type does.

    Columns must be in the order of the inputs, which they are not in GPTQ files with act-order, in whole groups.
    """
    rows, columns = matrix.group
    is_whole = matrix.shape[1] % GROUP == 0 and (columns % GROUP == 0 or columns >= matrix.shape[1])
    if matrix.type is not CodeType.INT4 or matrix.order is not None or not is_whole or rows < 1:
        return None
    if not np.abs(matrix.scales).max(initial=0) < MAX_HALF / MAX_ZERO:  # also if a scale is NaN
        return None
    return TensorType.Q4_0 if matrix.zeros is None else TensorType.Q4_1


def to_blocks(matrix: PackedMatrix, kind: TensorType) -> Blocks:
    """Return a matrix in blocks of `find_block_type`, or of Q4_1, which holds those of Q4_0 as well."""
    num_rows, num_columns = matrix.shape
    num_groups = num_columns // GROUP
    codes = unpack_pairs(matrix.codes).reshape(num_rows, num_groups, 2, GROUP // 2)
    scales = _by_block(matrix, matrix.scales)
    parts = [_half_bytes(scales)]
    if kind is TensorType.Q4_1:
        zeros = np.float32(INT4_ZERO) if matrix.zeros is None else _by_block(matrix, matrix.zeros)
        parts.append(_half_bytes(-zeros * scales))
    parts.append(codes[:, :, 0] | codes[:, :, 1] << np.uint8(4))
    return Blocks(kind, np.concatenate(parts, axis=2).reshape(num_rows, -1))


def _by_block(matrix: PackedMatrix, values: np.ndarray) -> np.ndarray:
    """Return values of groups [rows of groups, G] as values of blocks [O, I / 32]."""
    num_rows, num_columns = matrix.shape
    rows, columns = matrix.group
    spread = np.repeat(values, rows, axis=0)[:num_rows]
    if columns >= num_columns:
        return np.repeat(spread, num_columns // GROUP, axis=1)
    return np.repeat(spread, columns // GROUP, axis=1)[:, : num_columns // GROUP]


def _half_bytes(values: np.ndarray) -> Bytes:
    return values.astype("<f2")[:, :, None].view(np.uint8)
