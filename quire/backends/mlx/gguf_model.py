"""Loads a GGUF file or quantised safetensors into a model of mlx-lm, one parameter at a time.

A matrix that quire reads as codes of 4 to 8 bits (`Checkpoint.read_packed`) keeps them if MLX has its groups of inputs:
32, 64 or 128. Both compute w = scale * code + bias for each group; only the layout differs, and the type of scales and
biases: MLX keeps them in the type of the activations. So in float32 the weights are those of the file, up to the
rounding of float32. In float16 they are too for most types; the scales of Q4_K and Q5_K, products of a float16 and a
6-bit number, are rounded to 11 bits, which changes weights by 0.02 % (root mean square, measured on random blocks). In
bfloat16, scales of all types are rounded to 8 bits, and weights change by 0.17 %.

Other types of matrices are quantised again to 8 bits. For Q6_K that changes the weights by 0.4 %, a sixth of the error
of the file's own 6 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from quire.backends.base import Progress
from quire.backends.mlx.parameters import Layout, choose_layout, dtype_name, file_errors, set_layouts
from quire.backends.mlx.spec_model import file_norm_shift
from quire.errors import InvalidRequest, ModelFileError
from quire.weights.checkpoint import PACKED_TYPES, Checkpoint, RawTensor, TensorType
from quire.weights.packed import CHUNK_ELEMENTS, INT4_ZERO, CodeType, PackedMatrix
from quire.weights.quants import pack_blocks, to_float32
from quire.weights.tensors import check_tensors, transformers_parameters

MLX_GROUP_SIZES = (32, 64, 128)
INT4_BITS = 4
ROUNDED = Layout(8, 32)  # of types whose codes MLX cannot hold
PLAIN_TYPES = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.BF16: "<u2"}  # numpy has no bfloat16

Quantized = tuple[Layout, mx.array, mx.array, mx.array]  # and weight, scales and biases of a matrix


def load_tensors(
    model: Module, checkpoint: Checkpoint, dtype: mx.Dtype, bits: int | None, progress: Progress | None
) -> None:
    """Fill a model that was made from the checkpoint's spec. `bits`: for matrices that the file does not quantise."""
    check_tensors(checkpoint)
    tensors = checkpoint.tensors
    if bits is not None and not any(len(one.shape) == 2 and one.type in PLAIN_TYPES for one in tensors.values()):
        raise InvalidRequest(
            f"quantize = {bits}: {checkpoint.path} is quantised already, to {checkpoint.spec.quantization}"
        )
    parameters = transformers_parameters(checkpoint.spec)  # mlx-lm has the same names
    layouts: dict[str, Layout] = {}
    weights: dict[str, mx.array] = {}
    done, total = 0, sum(tensors[one].num_bytes for held in parameters.values() for one in held)
    for name, held in parameters.items():
        with file_errors(checkpoint.path):
            quantized = _quantized(checkpoint, held, dtype, bits)
            if quantized is None:
                weights[name] = _plain(checkpoint, held, dtype)
            else:
                layer = name.removesuffix(".weight")
                layouts[layer], weights[name], scales, biases = quantized
                weights |= {f"{layer}.scales": scales, f"{layer}.biases": biases}
            mx.eval(weights)
        done += sum(tensors[one].num_bytes for one in held)
        if progress is not None:
            progress(done, total)
    set_layouts(model, layouts)
    with file_errors(checkpoint.path):
        model.load_weights(list(weights.items()))


def _plain(checkpoint: Checkpoint, held: Sequence[str], dtype: mx.Dtype) -> mx.array:
    array = _read(checkpoint, held)
    if held[0].endswith("norm.weight"):
        array = array.astype(mx.float32) + file_norm_shift(checkpoint.spec)
    return array.astype(dtype)


def _quantized(checkpoint: Checkpoint, held: Sequence[str], dtype: mx.Dtype, bits: int | None) -> Quantized | None:
    """Return a quantised matrix that consists of some tensors of the file; None: it is not quantised."""
    info = checkpoint.tensors[held[0]]
    if len(info.shape) != 2:
        return None
    found = _pack([part for name in held for part in _packed_parts(checkpoint, name)])
    if found is None:
        layout = ROUNDED if info.shape[1] % ROUNDED.group_size == 0 else None
        if info.type in PLAIN_TYPES:
            layout = choose_layout(info.shape[1], bits) if bits is not None else None
        if layout is None:
            return None
        found = layout, *mx.quantize(_read(checkpoint, held).astype(dtype), layout.group_size, layout.bits)
    layout, weight, scales, biases = found
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    if not mx.all(mx.isfinite(scales) & mx.isfinite(biases)).item():
        raise ModelFileError(
            f"{checkpoint.path}: tensor {held[0]} has scales that are not finite in {dtype_name(dtype)};"
            " if the file is not damaged, dtype = 'float32' can hold them"
        )
    return layout, weight, scales, biases


def _packed_parts(checkpoint: Checkpoint, name: str) -> Iterator[PackedMatrix | None]:
    """Yield a matrix in parts of some rows: decoding blocks of GGUF makes several copies of a part."""
    if checkpoint.tensors[name].type in (*PLAIN_TYPES, *PACKED_TYPES):
        yield checkpoint.read_packed(name)
        return
    raw = checkpoint.read(name)
    num_rows, num_columns = raw.info.shape
    step = max(1, CHUNK_ELEMENTS // num_columns)
    for first in range(0, num_rows, step):
        rows = raw.data.reshape(num_rows, -1)[first : first + step]
        yield pack_blocks(RawTensor(raw.info._replace(shape=(len(rows), num_columns)), rows))


def _pack(matrices: Sequence[PackedMatrix | None]) -> Quantized | None:
    """Return matrices one below the other, with the codes of the file; None: MLX cannot hold them."""
    packed = [one for one in matrices if one is not None and _has_mlx_groups(one)]
    kinds = {(one.type, one.group[1]) for one in packed}
    if len(packed) < len(matrices) or len(kinds) > 1:
        return None
    ((kind, group_size),) = kinds
    codes = np.concatenate([one.codes for one in packed])
    scales = np.concatenate([one.scales for one in packed])
    default = np.float32(INT4_ZERO if kind is CodeType.INT4 else 0)
    zeros = [np.full_like(one.scales, default) if one.zeros is None else one.zeros for one in packed]
    bits, offset = (INT4_BITS, 0) if kind is CodeType.INT4 else _width(codes.view(np.int8))
    words = codes if kind is CodeType.INT4 else pack_codes(codes + np.uint8(offset), bits)
    with np.errstate(all="ignore"):  # a scale in the file may be infinite or NaN
        biases = -(np.concatenate(zeros) + np.float32(offset)) * scales
    return Layout(bits, group_size), mx.array(words.view("<u4")), mx.array(scales), mx.array(biases)


def _has_mlx_groups(matrix: PackedMatrix) -> bool:
    rows, columns = matrix.group
    has_groups = rows == 1 and columns in MLX_GROUP_SIZES and matrix.shape[1] % columns == 0
    return has_groups and matrix.order is None and matrix.type in (CodeType.INT4, CodeType.INT8)


def _width(codes: NDArray[np.int8]) -> tuple[int, int]:
    """Return the bits of MLX's codes, which are not negative, and what is added to those of the file."""
    lowest, highest = int(codes.min()), int(codes.max())
    if lowest >= 0:
        return (5, 0) if highest < 32 else (8, 0)
    return (5, 16) if lowest >= -16 and highest < 16 else (8, 128)


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return codes [O, I] as one stream of bits for each row, lowest first [O, I * bits / 8]."""
    if bits == 8:
        return codes
    words: NDArray[Any] = codes
    for width, kind in ((bits, "<u2"), (2 * bits, "<u4"), (4 * bits, "<u8")):  # pairs, fours and eights of codes
        words = words[:, ::2] | words[:, 1::2].astype(kind) << width
    return words.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits].reshape(len(codes), -1)


def _read(checkpoint: Checkpoint, held: Sequence[str]) -> mx.array:
    return mx.concatenate([_to_array(checkpoint.read(name)) for name in held])


def _to_array(raw: RawTensor) -> mx.array:
    plain = PLAIN_TYPES.get(raw.info.type)
    if plain is None:
        return mx.array(to_float32(raw))
    array = mx.array(np.ascontiguousarray(raw.data).view(plain).reshape(raw.info.shape))
    return array.view(mx.bfloat16) if raw.info.type is TensorType.BF16 else array
