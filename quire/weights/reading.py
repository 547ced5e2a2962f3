"""Reads tensors: bytes of files as arrays with rows in quire's order, and quantised matrices in one layout.

Listing the tensors of a checkpoint does not need numpy, so checkpoints import this module when they read one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelFileError
from quire.weights.checkpoint import FileMap, RawTensor, TensorInfo, TensorType
from quire.weights.fields import show
from quire.weights.gpt_oss import BLOCK_BYTES, ExpertPart
from quire.weights.packed import (
    CodeType,
    PackedMatrix,
    dequantize,
    floats,
    pack_pairs,
    take_rows,
    unpack_pairs,
    without_default,
)  # fmt: skip
from quire.weights.quantization import FileTensor, Method, PackedTensor, num_groups
from quire.weights.tensors import Heads, Place

# O outputs, I inputs, G groups of inputs, N experts

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of each eight, that is in the lowest 4 bits, the next, ...
Item = TypeVar("Item", bound=Any)


def map_bytes(buffer: FileMap, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return a read-only view of a file."""
    if buffer.closed:
        raise ModelFileError(f"{buffer.path}: is closed")
    return np.frombuffer(buffer, np.uint8, num_bytes, offset)


def tensor_bytes(tensor: FileTensor, offset: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
    return map_bytes(tensor.buffer, tensor.offset + offset, tensor.num_bytes if num_bytes is None else num_bytes)


def read_plain(buffer: FileMap, offset: int, place: Place, heads: Heads | None) -> RawTensor:
    """Read a tensor that is not quantised, or whose rows are blocks. `offset`: of the file's tensor that holds it."""
    flat = own_rows(map_bytes(buffer, offset + place.offset, place.num_file_bytes), place, heads)
    shape = place.info.shape
    return RawTensor(place.info, flat if len(shape) < 2 else flat.reshape(math.prod(shape[:-1]), -1))


def own_rows(held: NDArray[Item], place: Place, heads: Heads | None) -> NDArray[Item]:
    """Return a tensor's own part of what is held from its first row on, in quire's order: bytes, or numbers of rows.

    Rows are quantised separately, so taking and moving some of them is exact. `heads`: those whose rotated pairs are
    neighbours in the file.
    """
    one = place.stripe
    found = held.reshape(one.num_heads, one.num_parts, -1)[:, one.place].reshape(-1)
    if heads is not None:
        rows, half = found.reshape(heads.num_heads, heads.head_size, -1), heads.rotary_size // 2
        moved = rows.copy()
        moved[:, :half] = rows[:, 0 : 2 * half : 2]
        moved[:, half : 2 * half] = rows[:, 1 : 2 * half : 2]
        found = moved.reshape(-1)
    found.flags.writeable = False
    return found


def restore_a_log(raw: RawTensor, source: str) -> RawTensor:
    """Return the logarithms that safetensors files hold; GGUF files hold -exp of them, in F32."""
    if raw.info.type is not TensorType.F32:
        raise ModelFileError(f"{source}: tensor {raw.info.name} is {raw.info.type}: not F32")
    values = raw.data.view("<f4")
    if not (values < 0).all():
        raise ModelFileError(f"{source}: tensor {raw.info.name} has values that are not negative")
    return RawTensor(raw.info, np.log(-values).astype("<f4").view(np.uint8))


def read_expert(part: ExpertPart, tensors: Mapping[str, FileTensor]) -> RawTensor:
    """Read a tensor of an expert of gpt-oss from the tensors of the files."""
    whole = tensors[part.file_name]
    rows = slice(part.first, None, part.step)
    size = whole.num_bytes // whole.shape[0]
    flat = tensor_bytes(whole, part.expert * size, size)
    if part.kind == "_blocks":
        shape = whole.shape[1:]
        exponents = tensors[part.file_name.removesuffix("_blocks") + "_scales"]
        scales = tensor_bytes(exponents, part.expert * size // 16, size // 16)
        data = _gguf_blocks(flat.reshape(shape)[rows], scales.reshape(shape[:-1])[rows])
    else:
        items = flat.view(np.uint32 if part.info.type is TensorType.F32 else np.uint16).reshape(whole.shape[1:])
        chosen = np.ascontiguousarray(items[rows] if part.kind == "_bias" else items[:, rows].T)
        data = chosen.view(np.uint8)
    data.flags.writeable = False
    return RawTensor(part.info, data)


def _gguf_blocks(codes: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of GGUF blocks [R, G * 17] of codes [R, G, 16] and exponents [R, G].

    A byte of the file holds neighbours; one of GGUF holds weights i and i + 16 of a block.
    """
    blocks = np.empty((*exponents.shape, BLOCK_BYTES), np.uint8)
    blocks[..., 0] = exponents
    low, high = codes[..., :8], codes[..., 8:]  # weights 0 to 15, and 16 to 31
    blocks[..., 1::2] = low & 15 | high << 4
    blocks[..., 2::2] = low >> 4 | high & 240
    return blocks.reshape(len(blocks), -1)


# Quantised matrices


def read_packed(tensor: PackedTensor, place: Place, heads: Heads | None, source: str) -> PackedMatrix:
    """Read the rows of a quantised matrix that are a tensor's own."""
    num_rows = tensor.info.shape[-2]
    matrix = read_matrix(tensor, place.first_row // num_rows, source)
    first = place.first_row % num_rows
    rows = own_rows(np.arange(first, first + place.info.shape[0] * place.stripe.num_parts), place, heads)
    is_whole = len(rows) == num_rows and bool((rows[1:] > rows[:-1]).all())
    return matrix if is_whole else take_rows(matrix, rows)


def as_floats(info: TensorInfo, matrix: PackedMatrix) -> RawTensor:
    values = dequantize(matrix).reshape(info.shape)
    data = values.view(np.uint8)
    data.flags.writeable = False
    return RawTensor(info._replace(type=TensorType.F32, num_bytes=values.nbytes), data)


def read_matrix(tensor: PackedTensor, expert: int, source: str) -> PackedMatrix:
    """Read a matrix; of a stack, that of one expert."""
    if tensor.method in (Method.AWQ, Method.GPTQ):
        return _read_columns(tensor, source)
    shape = (tensor.info.shape[-2], tensor.info.shape[-1])
    codes, scales = tensor.codes, tensor.scales
    num_stacked = tensor.info.shape[0] if len(tensor.info.shape) == 3 else 1
    kind = CodeType(tensor.info.type.lower())
    code_bytes, scale_bytes = codes.num_bytes // num_stacked, scales.num_bytes // num_stacked
    data = tensor_bytes(codes, expert * code_bytes, code_bytes).reshape(shape[0], -1)[:, : shape[1] * kind.bits // 8]
    if codes.dtype == "I32" and kind is CodeType.INT8:
        data = data ^ np.uint8(128)  # stored from 0 to 255
    stored = floats(tensor_bytes(scales, expert * scale_bytes, scale_bytes), scales.dtype)
    scale = stored.reshape(num_groups(shape, tensor.group))
    zeros = None if tensor.zeros is None else _row_zeros(tensor, tensor.zeros, shape[0], scale.shape)
    zeros = None if zeros is None else without_default(kind, zeros)
    matrix = PackedMatrix(kind, shape, data, scale, tensor.group, zeros)
    return matrix if tensor.order is None else _ordered(matrix, tensor.order, source)


def _row_zeros(tensor: PackedTensor, zeros: FileTensor, num_rows: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Read zero points of compressed-tensors: signed bytes, or packed along the rows with an offset."""
    is_int4 = tensor.info.type is TensorType.INT4
    data = tensor_bytes(zeros)
    if zeros.dtype == "I8":
        return data.view(np.int8).reshape(shape).astype(np.float32) + (8 if is_int4 else 0)
    values = _along_rows(data, zeros.shape, 4 if is_int4 else 8)[:num_rows].astype(np.float32)
    return values if is_int4 else values - 128


def _read_columns(tensor: PackedTensor, source: str) -> PackedMatrix:
    kind = CodeType(tensor.info.type.lower())
    outputs, inputs = tensor.info.shape
    words = tensor_bytes(tensor.codes)
    if tensor.method is Method.AWQ:
        codes = pack_pairs(np.ascontiguousarray(_awq_outputs(words, tensor.codes.shape).T))
    else:  # a word holds eight or four inputs, in the order of `PackedMatrix`
        codes = words.reshape(-1, outputs, 4).transpose(1, 0, 2).reshape(outputs, -1)
        codes = codes ^ np.uint8(128) if kind is CodeType.INT8 else codes
    scales = floats(tensor_bytes(tensor.scales), tensor.scales.dtype).reshape(tensor.scales.shape)
    zeros = None
    if tensor.zeros is not None:
        stored = tensor_bytes(tensor.zeros)
        found = (
            _awq_outputs(stored, tensor.zeros.shape)
            if tensor.method is Method.AWQ
            else _along_columns(stored, tensor.zeros.shape, kind.bits)
        )
        shift = tensor.zero_offset - (128 if kind is CodeType.INT8 else 0)
        zeros = without_default(kind, np.ascontiguousarray(found.T).astype(np.float32) + np.float32(shift))
    matrix = PackedMatrix(kind, (outputs, inputs), codes, np.ascontiguousarray(scales.T), tensor.group, zeros)
    return matrix if tensor.order is None else _ordered(matrix, tensor.order, source)


def _ordered(matrix: PackedMatrix, order: FileTensor, source: str) -> PackedMatrix:
    """Return the matrix with its columns sorted by their groups, if they are not."""
    inputs, width = matrix.shape[1], matrix.group[1]
    groups = tensor_bytes(order).view("<i8" if order.dtype == "I64" else "<i4").astype(np.int64)
    expected = np.arange(inputs) // width
    if (groups == expected).all() or (groups == -1).all():  # -1: not set
        return matrix
    sorted_columns = np.argsort(groups, kind="stable")
    if not (groups[sorted_columns] == expected).all():
        raise ModelFileError(f"{source}: tensor {show(order.name)} does not give each group {width} inputs")
    is_int4 = matrix.type is CodeType.INT4
    codes = unpack_pairs(matrix.codes) if is_int4 else matrix.codes
    codes = codes[:, sorted_columns]
    return replace(matrix, codes=pack_pairs(codes) if is_int4 else codes, order=sorted_columns.astype(np.int32))


def _along_columns(words: NDArray[np.uint8], shape: tuple[int, ...], bits: int) -> NDArray[np.uint8]:
    """Return the codes of words [R, C], which are neighbours in a row: [R, C * 32 / bits]."""
    data = words.reshape(shape[0], -1)
    return data if bits == 8 else unpack_pairs(data)


def _along_rows(words: NDArray[np.uint8], shape: tuple[int, ...], bits: int) -> NDArray[np.uint8]:
    """Return the codes of words [R, C], which are neighbours in a column: [R * 32 / bits, C]."""
    codes = _along_columns(words, shape, bits).reshape(*shape, -1)
    return codes.transpose(0, 2, 1).reshape(-1, shape[1])


def _awq_outputs(words: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the codes of words [R, C] in the order of the outputs: [R, 8 * C]."""
    eights = _along_columns(words, shape, 4).reshape(-1, 8)
    codes = np.empty_like(eights)
    codes[:, list(_AWQ_ORDER)] = eights
    return codes.reshape(shape[0], -1)
