"""Reads matrices of few bits, in every layout of files, as a `PackedMatrix`.

Blocks of GGUF: for the types that have equal groups of codes of 4 to 8 bits. Codes of 5 and 6 bits take 8 here. The
value of a weight is that of llama.cpp, up to the rounding of float32. A type with a minimum m per group,
w = d * code + m, has a zero of -m / d.

Safetensors: FP8, compressed-tensors, AWQ and GPTQ (`quire/weights/packed_tensors.py` finds their parts), and the MXFP4
of gpt-oss, which gets the blocks of GGUF.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelFileError
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.fields import show
from quire.weights.gpt_oss import BLOCK_BYTES, ExpertPart, ReadBytes
from quire.weights.packed import CodeType, PackedMatrix, pack_pairs, unpack_pairs, without_default
from quire.weights.packed_tensors import AWQ_ORDER, PackedTensor, Part, ReadPart, num_groups
from quire.weights.quantization import Method

# B blocks of a tensor, S groups in a block


class _Decoded(NamedTuple):
    codes: NDArray[np.uint8]  # [B, weights of a block], one code per byte
    scales: NDArray[np.float32]  # [B, S]
    minima: NDArray[np.float32] | None = None  # [B, S], added after scaling


def pack_blocks(raw: RawTensor) -> PackedMatrix | None:
    """Return a matrix of GGUF blocks; None: its type has no such form."""
    layout = _LAYOUTS.get(raw.info.type)
    if layout is None or len(raw.info.shape) != 2:
        return None
    rows, columns = raw.info.shape
    blocks = np.ascontiguousarray(raw.data).reshape(-1, layout.block_bytes)
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
    block_bytes: int
    group: int
    decode: Callable[[NDArray[np.uint8]], _Decoded]


_LAYOUTS = {
    TensorType.Q8_0: _Layout(CodeType.INT8, 34, 32, _q8_0),
    TensorType.Q4_0: _Layout(CodeType.INT4, 18, 32, _q4_0),
    TensorType.Q4_1: _Layout(CodeType.INT4, 20, 32, _q4_1),
    TensorType.Q5_0: _Layout(CodeType.INT8, 22, 32, _q5_0),
    TensorType.Q5_1: _Layout(CodeType.INT8, 24, 32, _q5_1),
    TensorType.Q4_K: _Layout(CodeType.INT4, 144, 32, _q4_k),
    TensorType.Q5_K: _Layout(CodeType.INT8, 176, 32, _q5_k),
    TensorType.Q6_K: _Layout(CodeType.INT8, 210, 16, _q6_k),
    TensorType.MXFP4: _Layout(CodeType.FP4, 17, 32, _mxfp4),
}


# Safetensors

# Reading


def read_matrix(tensor: PackedTensor, expert: int, read: ReadPart, source: str) -> PackedMatrix:
    """Read a matrix; of a stack, that of one expert."""
    if tensor.method in (Method.AWQ, Method.GPTQ):
        return _read_columns(tensor, read, source)
    shape = (tensor.info.shape[-2], tensor.info.shape[-1])
    codes, scales = tensor.codes, tensor.scales
    num_stacked = tensor.info.shape[0] if len(tensor.info.shape) == 3 else 1
    kind = CodeType(tensor.info.type.lower())
    code_bytes, scale_bytes = codes.num_bytes // num_stacked, scales.num_bytes // num_stacked
    data = read(codes, expert * code_bytes, code_bytes).reshape(shape[0], -1)[:, : shape[1] * kind.bits // 8]
    if codes.dtype == "I32" and kind is CodeType.INT8:
        data = data ^ np.uint8(128)  # stored from 0 to 255
    scale = _floats(scales, read(scales, expert * scale_bytes, scale_bytes)).reshape(num_groups(shape, tensor.group))
    zeros = None if tensor.zeros is None else _row_zeros(tensor, tensor.zeros, shape[0], scale.shape, read)
    zeros = None if zeros is None else without_default(kind, zeros)
    matrix = PackedMatrix(kind, shape, data, scale, tensor.group, zeros)
    return matrix if tensor.order is None else _ordered(matrix, tensor.order, read, source)


def _row_zeros(
    tensor: PackedTensor, zeros: Part, num_rows: int, shape: tuple[int, ...], read: ReadPart
) -> NDArray[np.float32]:
    """Read zero points of compressed-tensors: signed bytes, or packed along the rows with an offset."""
    is_int4 = tensor.info.type is TensorType.INT4
    data = read(zeros, 0, zeros.num_bytes)
    if zeros.dtype == "I8":
        return data.view(np.int8).reshape(shape).astype(np.float32) + (8 if is_int4 else 0)
    values = _along_rows(data, zeros.shape, 4 if is_int4 else 8)[:num_rows].astype(np.float32)
    return values if is_int4 else values - 128


def _read_columns(tensor: PackedTensor, read: ReadPart, source: str) -> PackedMatrix:
    kind = CodeType(tensor.info.type.lower())
    outputs, inputs = tensor.info.shape
    words = read(tensor.codes, 0, tensor.codes.num_bytes)
    if tensor.method is Method.AWQ:
        codes = pack_pairs(np.ascontiguousarray(_awq_outputs(words, tensor.codes.shape).T))
    else:  # a word holds eight or four inputs, in the order of `PackedMatrix`
        codes = words.reshape(-1, outputs, 4).transpose(1, 0, 2).reshape(outputs, -1)
        codes = codes ^ np.uint8(128) if kind is CodeType.INT8 else codes
    scales = _floats(tensor.scales, read(tensor.scales, 0, tensor.scales.num_bytes)).reshape(tensor.scales.shape)
    zeros = None
    if tensor.zeros is not None:
        stored = read(tensor.zeros, 0, tensor.zeros.num_bytes)
        found = (
            _awq_outputs(stored, tensor.zeros.shape)
            if tensor.method is Method.AWQ
            else _along_columns(stored, tensor.zeros.shape, kind.bits)
        )
        shift = tensor.zero_offset - (128 if kind is CodeType.INT8 else 0)
        zeros = without_default(kind, np.ascontiguousarray(found.T).astype(np.float32) + np.float32(shift))
    matrix = PackedMatrix(kind, (outputs, inputs), codes, np.ascontiguousarray(scales.T), tensor.group, zeros)
    return matrix if tensor.order is None else _ordered(matrix, tensor.order, read, source)


def _ordered(matrix: PackedMatrix, order: Part, read: ReadPart, source: str) -> PackedMatrix:
    """Return the matrix with its columns sorted by their groups, if they are not."""
    inputs, width = matrix.shape[1], matrix.group[1]
    groups = read(order, 0, order.num_bytes).view("<i8" if order.dtype == "I64" else "<i4").astype(np.int64)
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


def _floats(part: Part, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    if part.dtype == "F8_E8M0":
        with np.errstate(over="ignore"):
            return np.ldexp(np.float32(1), data.astype(np.int32) - 127).astype(np.float32)
    if part.dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN is allowed
        return data.view("<f2" if part.dtype == "F16" else "<f4").astype(np.float32)


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
    codes[:, list(AWQ_ORDER)] = eights
    return codes.reshape(shape[0], -1)


def read_part(part: ExpertPart, whole: TensorInfo, read_bytes: ReadBytes) -> RawTensor:
    """Read one tensor. `whole` is the file's tensor that holds it."""
    rows = slice(part.first, None, part.step)
    size = whole.num_bytes // whole.shape[0]
    flat = read_bytes(part.file_name, part.expert * size, size)
    if part.kind == "_blocks":
        shape = whole.shape[1:]
        scales = read_bytes(part.file_name.removesuffix("_blocks") + "_scales", part.expert * size // 16, size // 16)
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
