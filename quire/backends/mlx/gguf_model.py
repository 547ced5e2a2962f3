"""Loads a GGUF file or quantised safetensors into a model of mlx-lm, one tensor at a time.

Quantised matrices stay packed (see `gguf_weights`), and so do 4-bit codes of safetensors in groups that MLX has. Other
types of safetensors, and Q6_K, whose groups MLX does not have, are quantised again to 8 bits in groups of 32. For Q6_K
that changes the weights by 0.4 % (root mean square, measured on random blocks), a sixth of the error of the file's own
6 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from quire.backends.base import Progress
from quire.backends.mlx.evaluation import file_errors, flat_parameters
from quire.backends.mlx.gguf_weights import GROUP_SIZE, PACKINGS, pack
from quire.backends.mlx.quantization import Layout, choose_layout, dtype_name, set_layouts
from quire.backends.mlx.spec_model import file_norm_shift
from quire.errors import InvalidRequest, ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.names import transformers_parameters
from quire.weights.packed import INT4_ZERO
from quire.weights.quants import to_float32
from quire.weights.spec import ModelSpec
from quire.weights.tensors import check_tensors

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
