"""Loads a GGUF file or quantised safetensors into a model of mlx-lm, one tensor at a time.

Quantised matrices stay packed (see `gguf_weights`), and so do 4-bit codes of safetensors in groups that MLX has. Other
types of safetensors, and Q6_K, whose groups MLX does not have, are quantised again to 8 bits in groups of 32. For Q6_K
that changes the weights by 0.4 % (root mean square, measured on random blocks), a sixth of the error of the file's own
6 bits.

GGUF's quantised blocks are repacked as MLX's affine quantisation, without rounding the codes.

Both formats compute w = scale * code + bias for groups of 32 weights. Only the layout differs, and the type of scales
and biases: MLX keeps them in the type of the activations, GGUF in float16, or in Q4_K, Q5_K and IQ4_XS as products of a
float16 and a 6-bit number. So in float32 the weights are exactly those of the file. In float16 the other types keep
their scales exactly, and those of Q4_K, Q5_K and IQ4_XS are rounded to 11 bits. Measured on random blocks, that changes
the weights by 0.02 % (root mean square); a second quantisation to 8 bits would change them by 0.13 %. In bfloat16,
scales of all types but MXFP4 are rounded to 8 bits, and weights change by 0.17 %.

The 4-bit codes of IQ4_NL, IQ4_XS and MXFP4 are places in a table of integers. The integers become the codes: 8 bits for
IQ4_NL and IQ4_XS, 5 bits for MXFP4. Q2_K, Q3_K and Q6_K have groups of 16, which MLX does not have, and the other types
have tables of vectors: these are not repacked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from quire.backends.base import Progress
from quire.backends.mlx.parameters import Layout, choose_layout, dtype_name, file_errors, flat_parameters, set_layouts
from quire.backends.mlx.spec_model import file_norm_shift
from quire.errors import InvalidRequest, ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.gguf import BLOCKS
from quire.weights.packed import INT4_ZERO, CodeType
from quire.weights.quants import BLOCK_LAYOUTS, E2M1_CODES, IQ4_CODES, iq4_xs_scales, to_float32
from quire.weights.spec import ModelSpec
from quire.weights.tensors import check_tensors, transformers_parameters

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


# Decoders


def _shared(kind: TensorType, zero: int = 0) -> Callable[[Bytes], Blocks]:
    """Return the decoder of a type that `gguf_packed` knows. `zero`: the code of weights of 0, without minima."""
    layout = BLOCK_LAYOUTS[kind]
    shift = np.uint8(zero if layout.type is CodeType.INT8 else 0)  # signed codes become unsigned

    def decode(blocks: Bytes) -> Blocks:
        codes, scales, minima = layout.decode(blocks)
        return Blocks(codes.reshape(len(blocks), -1) + shift, scales, -zero * scales if minima is None else minima)

    return decode


def _float16(blocks: Bytes, start: int) -> Floats:
    """Return [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Return the codes of blocks of 32, which are stored as two halves."""
    return np.concatenate((data & 15, data >> 4), axis=1)


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
    codes, scales, _ = BLOCK_LAYOUTS[TensorType.MXFP4].decode(blocks)
    halved = scales * np.float32(0.5)
    return Blocks(_E2M1_CODES[codes], halved, -12 * halved)


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


PACKINGS: dict[TensorType, Packing] = {
    TensorType.Q4_0: Packing(4, _shared(TensorType.Q4_0, 8)),
    TensorType.Q4_1: Packing(4, _shared(TensorType.Q4_1)),
    TensorType.Q5_0: Packing(5, _shared(TensorType.Q5_0, 16)),
    TensorType.Q5_1: Packing(5, _shared(TensorType.Q5_1)),
    TensorType.Q8_0: Packing(8, _shared(TensorType.Q8_0, 128)),
    TensorType.Q4_K: Packing(4, _shared(TensorType.Q4_K)),
    TensorType.Q5_K: Packing(5, _shared(TensorType.Q5_K)),
    TensorType.IQ4_NL: Packing(8, _iq4_nl),
    TensorType.IQ4_XS: Packing(8, _iq4_xs),
    TensorType.MXFP4: Packing(5, _mxfp4),
    TensorType.TQ1_0: Packing(2, _tq1_0),
    TensorType.TQ2_0: Packing(2, _tq2_0),
}


MLX_GROUP_SIZES = (32, 64, 128)
INT4_BITS = 4
UNPACKED = Layout(8, GROUP_SIZE)  # of quantised types without a packing

PLAIN_TYPES = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.BF16: "<u2"}  # numpy has no bfloat16


def load_tensors(
    model: Module, checkpoint: Checkpoint, dtype: mx.Dtype, bits: int | None, progress: Progress | None
) -> str:
    """Fill a model that was made from the checkpoint's spec. Returns a description of the weights."""
    check_tensors(checkpoint)
    parts = transformers_parameters(checkpoint.spec)  # mlx-lm has the same names
    infos = [_join(name, [checkpoint.tensors[one] for one in held]) for name, held in parts.items()]
    _check_parameters(model, infos, checkpoint.spec)
    layouts = _choose_layouts(infos, bits, checkpoint, parts)
    set_layouts(model, {_layer_of(name): layout for name, layout in layouts.items()})
    total, done = sum(info.num_bytes for info in infos), 0
    for info in infos:
        with file_errors(checkpoint.path):
            arrays = _load(checkpoint, info, parts[info.name], layouts.get(info.name), dtype)
            mx.eval(list(arrays.values()))
            model.load_weights(list(arrays.items()), strict=False)
        done += info.num_bytes
        if progress is not None:
            progress(done, total)
    return _describe(infos, layouts, dtype)


def _join(name: str, parts: list[TensorInfo]) -> TensorInfo:
    """Return the description of tensors one below the other, as mlx-lm's class holds them."""
    if len({(part.type, part.shape[1:]) for part in parts}) > 1:
        raise UnsupportedModel(f"mlx-lm holds {name} as one matrix, and the file holds its parts in several types")
    rows = sum(part.shape[0] for part in parts)
    return TensorInfo(name, parts[0].type, (rows, *parts[0].shape[1:]), sum(part.num_bytes for part in parts))


def _read(checkpoint: Checkpoint, info: TensorInfo, parts: tuple[str, ...]) -> RawTensor:
    raws = [checkpoint.read(name) for name in parts]
    data = raws[0].data if len(raws) == 1 else np.concatenate([raw.data for raw in raws])
    return RawTensor(info._replace(type=raws[0].info.type), data)


def _check_parameters(model: Module, infos: list[TensorInfo], spec: ModelSpec) -> None:
    """Raise if mlx-lm's class has other parameters than the file, such as no bias where the file has one."""
    has = {name: tuple(array.shape) for name, array in flat_parameters(model)}
    needs = {info.name: info.shape for info in infos}
    differing = sorted(name for name in has.keys() | needs.keys() if has.get(name) != needs.get(name))
    if differing:
        name = differing[0]
        raise UnsupportedModel(
            f"mlx-lm does not run this {spec.family}: its {name} is {has.get(name)}, the file's {needs.get(name)}"
        )


def _find_group(checkpoint: Checkpoint, info: TensorInfo, parts: tuple[str, ...]) -> int | None:
    """Return the group size with which MLX holds a matrix of 4-bit codes as it is; None: it does not."""
    if info.type is not TensorType.INT4:
        return None
    groups = set()
    for name in parts:
        matrix = checkpoint.read_packed(name)
        assert matrix is not None
        groups.add(None if matrix.order is not None or matrix.group[0] != 1 else matrix.group[1])
    size = groups.pop()
    return size if not groups and size in MLX_GROUP_SIZES and info.shape[1] % size == 0 else None


def _load(
    checkpoint: Checkpoint, info: TensorInfo, parts: tuple[str, ...], layout: Layout | None, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Return the parameters of one tensor."""
    if info.type is not TensorType.INT4 or layout is None or layout.bits != INT4_BITS:
        return _convert(checkpoint, _read(checkpoint, info, parts), layout, dtype)
    matrices = [matrix for name in parts if (matrix := checkpoint.read_packed(name)) is not None]
    codes = np.concatenate([np.ascontiguousarray(matrix.codes).view("<u4") for matrix in matrices])
    scales = np.concatenate([matrix.scales for matrix in matrices])
    zeros = [np.float32(INT4_ZERO) if matrix.zeros is None else matrix.zeros for matrix in matrices]
    biases = np.concatenate([-one * matrix.scales for one, matrix in zip(zeros, matrices, strict=True)])
    return _quantized(checkpoint, info, mx.array(codes), mx.array(scales), mx.array(biases), dtype)


def _choose_layouts(
    infos: list[TensorInfo], bits: int | None, checkpoint: Checkpoint, parts: Mapping[str, tuple[str, ...]]
) -> dict[str, Layout]:
    """Return the layout of every matrix that will be quantised. A packed matrix stays as it is, whatever `bits` is."""
    layouts: dict[str, Layout] = {}
    num_changed = 0
    for info in infos:
        if len(info.shape) != 2:
            continue
        packing = PACKINGS.get(info.type)
        if packing is not None:
            layouts[info.name] = Layout(packing.bits, GROUP_SIZE)
            continue
        if (group_size := _find_group(checkpoint, info, parts[info.name])) is not None:
            layouts[info.name] = Layout(INT4_BITS, group_size)
            continue
        layout = choose_layout(info.shape[1], bits) if bits is not None else None
        num_changed += layout is not None
        if layout is None and info.type not in PLAIN_TYPES:
            layout = UNPACKED if info.shape[1] % GROUP_SIZE == 0 else None
        if layout is not None:
            layouts[info.name] = layout
    if bits is not None and not num_changed:
        raise InvalidRequest(
            f"quantize = {bits}: {checkpoint.path} is quantised already, to {checkpoint.spec.quantization}"
        )
    return layouts


def _layer_of(name: str) -> str:
    return name.removesuffix(".weight")


def _convert(checkpoint: Checkpoint, raw: RawTensor, layout: Layout | None, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Return the parameters of one tensor."""
    info = raw.info
    if layout is None:
        array = _to_array(raw)
        if info.name.endswith("norm.weight"):
            array = array.astype(mx.float32) + file_norm_shift(checkpoint.spec)
        return {info.name: array.astype(dtype)}
    if info.type in PACKINGS:
        packed = pack(raw)
        weight, scales, biases = (mx.array(one) for one in (packed.weight, packed.scales, packed.biases))
    else:
        weight, scales, biases = mx.quantize(_to_array(raw).astype(dtype), layout.group_size, layout.bits)
    return _quantized(checkpoint, info, weight, scales, biases, dtype)


def _quantized(
    checkpoint: Checkpoint, info: TensorInfo, weight: mx.array, scales: mx.array, biases: mx.array, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Return the parameters of a quantised matrix."""
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    if not mx.all(mx.isfinite(scales) & mx.isfinite(biases)).item():
        raise ModelFileError(
            f"{checkpoint.path}: tensor {info.name} has scales that are not finite in {dtype_name(dtype)};"
            " if the file is not damaged, dtype = 'float32' can hold them"
        )
    layer = _layer_of(info.name)
    return {f"{layer}.weight": weight, f"{layer}.scales": scales, f"{layer}.biases": biases}


def _to_array(raw: RawTensor) -> mx.array:
    plain = PLAIN_TYPES.get(raw.info.type)
    if plain is None:
        return mx.array(to_float32(raw))
    array = mx.array(np.ascontiguousarray(raw.data).view(plain).reshape(raw.info.shape))
    return array.view(mx.bfloat16) if raw.info.type is TensorType.BF16 else array


def _describe(infos: list[TensorInfo], layouts: Mapping[str, Layout], dtype: mx.Dtype) -> str:
    """Name the format of most weights, and then every type that was quantised again."""
    num_bytes: Counter[tuple[TensorType, Layout | None]] = Counter()
    for info in infos:
        if len(info.shape) == 2:
            num_bytes[info.type, layouts.get(info.name)] += info.num_bytes
    (kind, layout), _ = num_bytes.most_common(1)[0]
    others = [f"{one} as {to}" for one, to in num_bytes if to and one not in PACKINGS and (one, to) != (kind, layout)]
    return ", ".join([f"{kind} as {layout}" if layout else dtype_name(dtype), *others])
