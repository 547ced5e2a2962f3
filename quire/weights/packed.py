"""A matrix of few bits per weight, in one layout for all file formats.

Files pack weights in many ways. Readers convert them to a `PackedMatrix` when they load a matrix, without loss, so that
backends have a few kinds of codes instead of one kernel per file format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

# O outputs, I inputs, R rows of a chunk, G groups in a row

CHUNK_ELEMENTS = 1 << 20  # decoded at once
INT4_ZERO = 8  # of INT4 without zeros
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class CodeType(StrEnum):
    """What the codes of a packed matrix mean."""

    FP8 = "fp8"  # e4m3 without infinities, one byte each
    INT8 = "int8"  # signed, one byte each
    INT4 = "int4"  # 0 to 15, two per byte
    FP4 = "fp4"  # e2m1, two per byte

    @property
    def bits(self) -> int:
        return 4 if self in (CodeType.INT4, CodeType.FP4) else 8


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [O, I]: weight = (code - zero) * scale.

    A scale belongs to a rectangle of `group` = (rows, columns) weights: (1, 128) are groups of a 4-bit format,
    (128, 128) the blocks of FP8 files, (1, I) a scale per output.
    """

    type: CodeType
    shape: tuple[int, int]
    codes: NDArray[np.uint8]  # [O, I], or [O, I / 2]: weight 2j is in the low half of byte j, weight 2j + 1 in the high
    scales: NDArray[np.float32]  # [ceil(O / group rows), ceil(I / group columns)]
    group: tuple[int, int]
    zeros: NDArray[np.float32] | None = None  # as `scales`; None: 0, and 8 for INT4
    order: NDArray[np.int32] | None = None  # [I]: column j multiplies input order[j]; None: input j


# Decoding


def dequantize(matrix: PackedMatrix) -> NDArray[np.float32]:
    """Return the weights [O, I], with column j for input j."""
    num_rows, num_columns = matrix.shape
    out = np.empty(matrix.shape, np.float32)
    step = max(1, CHUNK_ELEMENTS // num_columns)
    with np.errstate(all="ignore"):  # a scale in the file may be infinite or NaN
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            out[rows] = _decode_rows(matrix, rows)
    return out


def _decode_rows(matrix: PackedMatrix, rows: slice) -> NDArray[np.float32]:
    values = decode(matrix.type, matrix.codes[rows])  # [R, I]
    scale_rows = np.arange(rows.start, rows.stop) // matrix.group[0]
    zeros = matrix.zeros
    if zeros is not None:
        values -= _spread(zeros[scale_rows], matrix)
    elif matrix.type is CodeType.INT4:
        values -= INT4_ZERO
    values *= _spread(matrix.scales[scale_rows], matrix)
    if matrix.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, matrix.order] = values
    return ordered


def _spread(by_group: NDArray[np.float32], matrix: PackedMatrix) -> NDArray[np.float32]:
    """Return values [R, G] of groups as values that can be combined with [R, I]."""
    if by_group.shape[1] == 1:
        return by_group
    return np.repeat(by_group, matrix.group[1], axis=1)[:, : matrix.shape[1]]


def decode(kind: CodeType, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of rows of codes, before zeros and scales."""
    if kind is CodeType.INT8:
        return codes.view(np.int8).astype(np.float32)
    if kind is CodeType.FP8:
        return fp8_values()[codes]
    return _pair_values(kind)[codes].reshape(len(codes), -1)


@cache
def fp8_values() -> NDArray[np.float32]:
    """Return the value of each code of e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, two NaN."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    values = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), normal)
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


@cache
def _pair_values(kind: CodeType) -> NDArray[np.float32]:
    """Return the two values of each byte [256, 2]."""
    table = np.array(E2M1 if kind is CodeType.FP4 else range(16), np.float32)
    codes = np.arange(256)
    return np.stack((table[codes & 15], table[codes >> 4]), axis=1)


def floats(data: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Return a copy of plain numbers of 8 to 32 bits as float32. `kind` is their type in safetensors."""
    if kind == "F8_E8M0":  # a power of two
        with np.errstate(over="ignore"):
            return np.ldexp(np.float32(1), data.astype(np.int32) - 127).astype(np.float32)
    if kind == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN is allowed
        return data.view("<f2" if kind == "F16" else "<f4").astype(np.float32)


# Changing the order of rows and columns


def take_rows(matrix: PackedMatrix, rows: NDArray[np.int64]) -> PackedMatrix:
    """Return the matrix of some rows, in the given order.

    Blocks of several rows keep one scale if they are taken as a whole; otherwise each row gets its own.
    """
    height = matrix.group[0]
    starts = rows[::height]
    whole = np.repeat(starts, height)[: len(rows)] + np.arange(len(rows)) % height
    if (starts % height == 0).all() and (rows == whole).all():
        scale_rows, group = starts // height, matrix.group
    else:
        scale_rows, group = rows // height, (1, matrix.group[1])
    return replace(
        matrix,
        shape=(len(rows), matrix.shape[1]),
        codes=matrix.codes[rows],
        scales=matrix.scales[scale_rows],
        zeros=None if matrix.zeros is None else matrix.zeros[scale_rows],
        group=group,
    )


def pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return codes of 4 bits [O, I] as bytes [O, I / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def unpack_pairs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return bytes [O, I / 2] as codes of 4 bits [O, I]."""
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def without_default(kind: CodeType, zeros: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return zeros, or None if all are those that a matrix without zeros has."""
    return None if (zeros == (INT4_ZERO if kind is CodeType.INT4 else 0)).all() else zeros
