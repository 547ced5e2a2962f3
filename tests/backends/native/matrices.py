"""Packed matrices for tests: packed from any type, unpacked, multiplied, and with their bytes read here."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.native.library import GROUP, Bytes, Floats, Linear, Matrix, load_library
from quire.backends.native.model import Engine, NativeModel, build_batch
from quire.backends.native.packing import SOURCES
from quire.weights.checkpoint import BLOCKS, RawTensor, TensorInfo, TensorType
from quire.weights.quants import to_float32
from tests.backends.plans import piece
from tests.weights.makers import set_scales

PANEL = 8
SIGNED_NIBBLES = 3  # a kind of matrix, see csrc/quire.h
KIND_OF_Q4_0 = SIGNED_NIBBLES if platform.machine() in ("aarch64", "arm64") else 0
GUARD = 64  # bytes before and after the memory that C may write, and their content
GUARD_BYTE = 0xA5

Doubles = NDArray[np.float64]


class Guarded:
    """Memory that C may fill, with guards around it."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._whole = np.full(num_bytes + 2 * GUARD, GUARD_BYTE, np.uint8)
        self.array: NDArray[Any] = self._whole[GUARD : GUARD + num_bytes].view(dtype).reshape(shape)

    def check(self) -> None:
        assert (self._whole[:GUARD] == GUARD_BYTE).all()
        assert (self._whole[-GUARD:] == GUARD_BYTE).all()


class Packed:
    """A matrix [rows, cols], packed from a file's bytes."""

    def __init__(self, type: TensorType, data: Bytes, rows: int, cols: int) -> None:
        self.library = load_library()
        self.rows, self.cols = rows, cols
        self.file = to_float32(RawTensor(TensorInfo("x", type, (rows, cols), data.nbytes), data.reshape(rows, -1)))
        self.kind: int = self.library.quire_source_kind(SOURCES[type])
        guarded = Guarded((self.library.quire_packed_bytes(self.kind, rows, cols),), np.uint8)
        data = np.ascontiguousarray(data)
        self.library.quire_pack(SOURCES[type], data.ctypes.data, rows, cols, guarded.array.ctypes.data)
        guarded.check()
        self.bytes: Bytes = guarded.array
        self.matrix = Matrix(self.bytes.ctypes.data, self.kind, rows, cols)

    def unpack(self, rows: int | None = None, cols: int | None = None) -> Floats:
        """Unpack as the library reads it; with other sizes, including the padding."""
        rows, cols = rows or self.rows, cols or self.cols
        matrix = Matrix(self.bytes.ctypes.data, self.kind, rows, cols)
        out = Guarded((rows, cols), np.float32)
        for row in range(rows):
            self.library.quire_unpack(ctypes.byref(matrix), row, out.array[row].ctypes.data)
        out.check()
        return out.array

    @property
    def minima(self) -> Floats:
        """Return [rows, cols]: the value of code 0, read from the bytes as csrc/quire.h describes them."""
        num_panels, num_groups = -(-self.rows // PANEL), -(-self.cols // GROUP)
        groups = self.bytes.reshape(num_panels, num_groups, -1)
        if self.kind != 0:
            return np.zeros((self.rows, self.cols), np.float32)
        minima = np.ascontiguousarray(groups[:, :, 144:160]).view("<f2")  # [panels, groups, 8]
        by_row = minima.transpose(0, 2, 1).reshape(-1, num_groups).repeat(GROUP, 1)
        return by_row[: self.rows, : self.cols].astype(np.float32)


def signed_nibbles(rows: int, cols: int, seed: int = 0) -> Packed:
    """Make signed nibbles on any machine: the bytes of 4-bit floats, with other values."""
    packed = coded(TensorType.MXFP4, rows, cols, seed)
    packed.kind = packed.matrix.kind = SIGNED_NIBBLES
    return packed


def coded(type: TensorType, rows: int, cols: int, seed: int = 0) -> Packed:
    """Make random codes with random scales, some of them negative, zero or subnormal."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[type]
    data = rng.integers(0, 256, (rows * cols // block.num_elements, block.num_bytes), np.uint8)
    scales = rng.normal(0, 0.01, (len(data), 2)) * 2.0 ** rng.integers(-16, 3, (len(data), 1))
    scales[rng.random(len(data)) < 0.05] = 0
    set_scales(type, data, scales)
    return Packed(type, data, rows, cols)


def floats(values: NDArray[Any], type: TensorType = TensorType.F32) -> Packed:
    return Packed(type, float_bytes(values, type), *values.shape)


def float_bytes(values: NDArray[Any], type: TensorType) -> Bytes:
    values = np.ascontiguousarray(values, np.float32)
    if type is TensorType.BF16:
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype("<f2" if type is TensorType.F16 else "<f4").view(np.uint8)


def join(parts: Sequence[Packed], bias: Floats | None = None) -> Linear:
    linear = Linear(num_parts=len(parts))
    for place, part in enumerate(parts):
        linear.parts[place] = part.matrix
    if bias is not None:
        linear.bias = bias.ctypes.data
    return linear


def project(engine: Engine, parts: Sequence[Packed], x: Floats, refine: int, bias: Floats | None = None) -> Floats:
    """Multiply x [M, cols] with the parts, side by side."""
    x = np.ascontiguousarray(x, np.float32)
    out = Guarded((len(x), sum(part.rows for part in parts)), np.float32)
    linear = join(parts, bias)
    status = engine.library.quire_project(
        engine.handle, ctypes.byref(linear), x.ctypes.data, len(x), refine, out.array.ctypes.data
    )
    assert status == 0
    out.check()
    return out.array


def logits_of(model: NativeModel, tokens: list[int]) -> Floats:
    """Return the logits [T, V] of one sequence, from an empty cache. Overwrites the first blocks and state."""
    blocks = range(1, -(-len(tokens) // model.capacity.block_size) + 1)
    slice_ = piece(tokens=tokens, length=len(tokens), block_table=blocks, window_table=blocks, state_target=1)
    batch = build_batch([slice_], np.zeros(1, np.int32), model.capacity)
    return model.forward(batch, np.arange(len(tokens), dtype=np.int32))[0]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether all bits are equal, NaNs included."""
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())
