"""How the weights of a safetensors checkpoint are quantised: `quantization_config`, and the tensors of each matrix.

| layout | tensors of a module |
|---|---|
| FP8 | `weight` F8_E4M3 [O, I], `weight_scale_inv` or `weight_scale` |
| compressed-tensors, packed | `weight_packed` I32 [O, I / 8], `weight_scale` [O, G], `weight_shape`, and for some `weight_zero_point` [O / 8, G], `weight_g_idx` [I] |
| AWQ | `qweight` I32 [I, O / 8], `qzeros` [G, O / 8], `scales` [G, O] |
| GPTQ | `qweight` I32 [I / 8, O], `qzeros` [G, O / 8], `scales` [G, O], `g_idx` [I] |

8 is the number of 4-bit codes in an I32. Shapes and types are checked when a checkpoint is opened, contents when a
matrix is read.

Which modules are quantised is not read from the config: a quantised module has scales in the files, and others have
none. So the lists of modules (`ignore`, `modules_to_not_convert`, `targets`) are not evaluated. They may contain
regular expressions, and one from an untrusted file can run for hours.
"""  # noqa: E501

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quire.errors import ModelFileError
from quire.weights.checkpoint import FileMap, TensorInfo, TensorType
from quire.weights.fields import Fields, show

# O outputs, I inputs, G groups of inputs, N experts

FIELD = "quantization_config"
MAX_CONFIG_GROUPS = 256
MAX_GROUP_SIZE = 65_536
MIN_GROUP_SIZE = 8


class Method(StrEnum):
    """Who lays out the tensors."""

    FP8 = "fp8"  # Qwen, DeepSeek, Mistral: `weight`, and `weight_scale_inv` for blocks or for the whole matrix
    COMPRESSED = "compressed-tensors"  # llm-compressor
    AWQ = "awq"  # AutoAWQ
    GPTQ = "gptq"  # AutoGPTQ, GPTQModel


class WeightScheme(NamedTuple):
    """The codes of matrices and the weights that share a scale."""

    bits: int
    is_float: bool
    group: tuple[int, int]  # rows and columns; 0: all of them
    is_symmetric: bool = True  # of what `quire quantize` writes: without zero points. Readers find these in the files

    def group_of(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        rows, columns = self.group
        return min(rows or num_rows, num_rows), min(columns or num_columns, num_columns)


@dataclass(frozen=True, slots=True)
class Quantization:
    method: Method
    schemes: tuple[WeightScheme, ...]  # a matrix has one of them
    zero_offset: int = 0  # added to stored zero points


def read_quantization(config: Fields) -> Quantization | None:
    """Return how weights are quantised, None if they are not; raise if quire cannot read them.

    Multimodal models may say so beside their language model's sizes.
    """
    holder = config if config.get(FIELD) else config.find_table("text_config")
    if not holder.get(FIELD):
        return None
    fields = holder.table(FIELD)
    method = fields.get("quant_method")
    config.support(
        isinstance(method, str) and method in _METHODS,
        f"{fields.prefix}quant_method is {show(method)}: quantised safetensors are not supported "
        f"with it, but with {', '.join(_METHODS)}; use another file, the original model or a GGUF of it",
    )
    return _METHODS[method](fields)


def _refuse_unless(is_known: bool, fields: Fields, name: str, known: str) -> None:
    fields.support(is_known, f"{fields.prefix}{name} is {show(fields.get(name))}: not supported, only {known}")


def _group_size(fields: Fields, name: str = "group_size") -> int:
    """Return the columns of a group, 0 for a scale per row, which files write as -1."""
    if fields.get(name) == -1:
        return 0
    return fields.whole(name, MIN_GROUP_SIZE, MAX_GROUP_SIZE)


def _bits(fields: Fields, name: str, *known: int) -> int:
    bits = fields.whole(name, 1, 32)
    _refuse_unless(bits in known, fields, name, " and ".join(map(str, known)))
    return bits


# FP8


def _read_fp8(fields: Fields) -> Quantization:
    _refuse_unless(fields.get("fmt") in (None, "e4m3", "float8_e4m3fn"), fields, "fmt", "e4m3")
    if fields.get("weight_block_size") is not None:
        return Quantization(Method.FP8, (WeightScheme(8, True, _block(fields, "weight_block_size")),))
    whole, channel = WeightScheme(8, True, (0, 0)), WeightScheme(8, True, (1, 0))
    return Quantization(Method.FP8, (whole, channel))


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.get(name)
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)
    is_right = is_pair and all(1 <= one <= MAX_GROUP_SIZE for one in value)
    fields.require(is_right, name, f"not two whole numbers from 1 to {MAX_GROUP_SIZE}")
    return value[0], value[1]


# compressed-tensors

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense")


def _read_compressed(fields: Fields) -> Quantization:
    _check_format(fields)
    sparsity = fields.table("sparsity_config")
    _refuse_unless(sparsity.get("format") in (None, "dense"), sparsity, "format", "dense")
    transforms = fields.table("transform_config")
    is_plain = not transforms.get("config_groups")
    _refuse_unless(is_plain, transforms, "config_groups", "weights without transforms of their inputs")
    groups = fields.table("config_groups")
    fields.require(
        1 <= len(groups.values) <= MAX_CONFIG_GROUPS,
        "config_groups",
        f"not an object of 1 to {MAX_CONFIG_GROUPS} groups",
    )
    schemes = [_compressed_scheme(groups.table(name)) for name in groups.values]
    known = tuple(dict.fromkeys(one for one in schemes if one is not None))
    return Quantization(Method.COMPRESSED, known)


def _check_format(fields: Fields) -> None:
    _refuse_unless(fields.get("format") in (None, *_FORMATS), fields, "format", ", ".join(_FORMATS))


def _compressed_scheme(group: Fields) -> WeightScheme | None:
    """Return the scheme of one config group; None: its weights are not quantised."""
    _check_format(group)
    for name in ("input_activations", "output_activations"):
        activations = group.table(name)
        # Activations keep 16 bits here. For weights made for FP8 activations that is more precise; weights made for
        # integer activations are often scaled against them.
        group.support(
            not activations.values or (activations.get("type") == "float" and activations.get("num_bits") == 8),
            f"{activations.prefix}type is {show(activations.get('type'))}, num_bits "
            f"{show(activations.get('num_bits'))}: activations of other types than 8-bit floats are not supported",
        )
    weights = group.table("weights")
    if not weights.values:
        return None
    kind = weights.get("type")
    _refuse_unless(kind in (None, "int", "float"), weights, "type", "int and float")
    is_float = kind == "float"
    bits = _bits(weights, "num_bits", 8) if is_float else _bits(weights, "num_bits", 4, 8)
    _refuse_unless(weights.get("dynamic") in (None, False), weights, "dynamic", "false")
    return WeightScheme(bits, is_float, _compressed_group(weights))


def _compressed_group(weights: Fields) -> tuple[int, int]:
    group_size = weights.get("group_size")
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = weights.get("strategy") or default
    _refuse_unless(
        strategy in ("tensor", "channel", "group", "block"), weights, "strategy", "tensor, channel, group and block"
    )
    if strategy == "group":
        return 1, _group_size(weights)
    if strategy == "block":
        return _block(weights, "block_structure")
    return (0, 0) if strategy == "tensor" else (1, 0)


# Integers of 4 and 8 bits


def _read_awq(fields: Fields) -> Quantization:
    version = fields.get("version")
    _refuse_unless(version is None or str(version).lower() == "gemm", fields, "version", "gemm")
    old = "q_group_size" if "q_group_size" in fields else "group_size"
    bits = _bits(fields, "w_bit" if "w_bit" in fields else "bits", 4)
    return Quantization(Method.AWQ, (WeightScheme(bits, False, (1, _group_size(fields, old))),))


_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the first format stores zero points less 1


def _read_gptq(fields: Fields) -> Quantization:
    name = fields.get("checkpoint_format") or "gptq"
    _refuse_unless(
        isinstance(name, str) and name in _GPTQ_OFFSETS,
        fields,
        "checkpoint_format",
        "checkpoint_format gptq and gptq_v2",
    )
    _refuse_unless(not fields.get("is_marlin_format"), fields, "is_marlin_format", "checkpoint_format gptq and gptq_v2")
    return _gptq(fields, _GPTQ_OFFSETS[name])


def _gptq(fields: Fields, zero_offset: int) -> Quantization:
    scheme = WeightScheme(_bits(fields, "bits", 4, 8), False, (1, _group_size(fields)))
    return Quantization(Method.GPTQ, (scheme,), zero_offset)


def _read_auto_round(fields: Fields) -> Quantization:
    """Read a config of AutoRound, which writes the layouts of others."""
    packing = fields.get("packing_format")
    _refuse_unless(fields.get("data_type") in (None, "int"), fields, "data_type", "int")
    if packing in ("auto_round:auto_gptq", "auto_round:gptq"):
        return _gptq(fields, _GPTQ_OFFSETS["gptq"])
    if packing in ("auto_round", "auto_round:gptqmodel"):
        return _gptq(fields, _GPTQ_OFFSETS["gptq_v2"])
    known = ("auto_round:auto_awq", "auto_round:awq")
    _refuse_unless(
        packing in known, fields, "packing_format", "auto_round, auto_round:auto_gptq and auto_round:auto_awq"
    )
    return _read_awq(fields)


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
}


# What `quire quantize` writes

GROUP_SIZES = (32, 64, 128)
FORMATS = {  # integers in groups of a row, whose width is an option; floats in blocks or rows
    "fp8": WeightScheme(8, True, (128, 128)),
    "fp8-channel": WeightScheme(8, True, (1, 0)),
    "w4a16": WeightScheme(4, False, (1, 0)),
    "w4a16-asym": WeightScheme(4, False, (1, 0), is_symmetric=False),
    "w8a16": WeightScheme(8, False, (1, 0)),
}


# The tensors of a matrix

# Types of the tensors that make up a matrix, with their bytes. F8_E8M0 is a power of two.
PART_BYTES = {
    "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8,
}  # fmt: skip
_SCALE_TYPES = ("F16", "BF16", "F32", "F8_E8M0")
_INDEX_TYPES = ("I32", "I64")
# Endings of the tensors that belong to a quantised matrix.
_PART_ENDINGS = (
    ".weight_packed", ".weight_shape", ".weight_scale", "_scale_inv", ".weight_zero_point", ".weight_g_idx",
    ".qweight", ".qzeros", ".scales", ".g_idx",
)  # fmt: skip
# Scales of activations, and of keys and values, which keep 16 bits here.
_UNUSED_ENDINGS = (
    ".input_scale", ".activation_scale", ".output_scale", ".input_zero_point",
    ".k_scale", ".v_scale", ".q_scale", ".prob_scale",
)  # fmt: skip


class FileTensor(NamedTuple):
    """A tensor of a safetensors file under its name there."""

    name: str
    dtype: str  # of the file: I32
    shape: tuple[int, ...]
    num_bytes: int
    buffer: FileMap
    offset: int  # from the start of the file


Shape = tuple[int, int]


class PackedTensor(NamedTuple):
    """A quantised matrix of a file, or a stack of them."""

    info: TensorInfo  # its name is the one that a plain matrix would have; [O, I] or [N, O, I]
    method: Method
    group: tuple[int, int]
    codes: FileTensor
    scales: FileTensor
    zeros: FileTensor | None = None
    zero_offset: int = 0
    order: FileTensor | None = None  # the group of each input


def is_part(name: str, dtype: object) -> bool:
    """Return whether a tensor belongs to a quantised matrix."""
    return name.endswith(_PART_ENDINGS) or (dtype in PART_BYTES and dtype not in ("F32", "F16", "BF16"))


def is_unused(name: str) -> bool:
    return name.endswith(_UNUSED_ENDINGS)


# Finding matrices


def find_packed(parts: Mapping[str, FileTensor], quantization: Quantization, source: str) -> dict[str, PackedTensor]:
    """Return all quantised matrices by the name of a plain one. Every part must belong to a matrix."""
    finder = _Finder(parts, quantization, source)
    found: dict[str, PackedTensor] = {}
    for part in parts.values():
        tensor = finder.find(part)
        if tensor is not None:
            if tensor.info.name in found:
                raise ModelFileError(f"{source}: {show(tensor.info.name)} is stored twice")
            found[tensor.info.name] = tensor
    left = [name for name in parts if name not in finder.used]
    if left:
        raise ModelFileError(
            f"{source}: tensor {show(left[0])} of type {parts[left[0]].dtype} belongs to no matrix of "
            f"{quantization.method}"
        )
    return found


class _Finder:
    def __init__(self, parts: Mapping[str, FileTensor], quantization: Quantization, source: str) -> None:
        self.parts = parts
        self.quantization = quantization
        self.source = source
        self.used: set[str] = set()

    def find(self, part: FileTensor) -> PackedTensor | None:
        """Return the matrix whose codes the part holds, None if it holds none."""
        method = self.quantization.method
        if method in (Method.AWQ, Method.GPTQ):
            return self._columns(part) if part.name.endswith(".qweight") else None
        if part.name.endswith(".weight_packed"):
            return self._rows(part)
        if part.dtype in ("F8_E4M3", "I8") and not part.name.endswith(_PART_ENDINGS):
            return self._plain(part)
        return None

    def require(self, is_right: bool, part: FileTensor, problem: str) -> None:
        if not is_right:
            raise ModelFileError(f"{self.source}: tensor {show(part.name)} is {part.dtype} {part.shape}: {problem}")

    def _take(self, part: FileTensor, dtypes: tuple[str, ...]) -> FileTensor:
        self.require(part.dtype in dtypes, part, f"not of type {' or '.join(dtypes)}")
        self.used.add(part.name)
        return part

    def _find(self, name: str, dtypes: tuple[str, ...]) -> FileTensor | None:
        part = self.parts.get(name)
        return None if part is None else self._take(part, dtypes)

    def _need(self, name: str, dtypes: tuple[str, ...], owner: FileTensor) -> FileTensor:
        part = self._find(name, dtypes)
        if part is None:
            raise ModelFileError(f"{self.source}: tensor {show(owner.name)} has no {show(name)} beside it")
        return part

    def _group(
        self, codes: FileTensor, scales: FileTensor, shape: Shape, bits: int, *, is_float: bool
    ) -> tuple[int, int]:
        """Return the weights that share a scale: the scheme of the config that has the found number of scales."""
        found = _scale_shape(scales, shape[0])
        groups = {
            scheme.group_of(*shape)
            for scheme in self.quantization.schemes
            if (scheme.bits, scheme.is_float) == (bits, is_float)
        }
        fitting = [one for one in sorted(groups) if num_groups(shape, one) == found]
        expected = " or ".join(str(num_groups(shape, one)) for one in sorted(groups)) or "another type"
        self.require(
            len(fitting) == 1,
            scales,
            f"scales of {show(codes.name)} {shape}, {bits} bits, need {expected} by config.json",
        )
        return fitting[0]

    def _tensor(self, name: str, kind: TensorType, shape: tuple[int, ...], *parts: FileTensor | None) -> TensorInfo:
        return TensorInfo(name, kind, shape, sum(part.num_bytes for part in parts if part is not None))

    def _plain(self, codes: FileTensor) -> PackedTensor:
        """Find the scales of a matrix with one byte per code, or of a stack of matrices."""
        self._take(codes, ("F8_E4M3", "I8"))
        is_stack = len(codes.shape) == 3
        self.require(len(codes.shape) in (2, 3), codes, "not a matrix")
        scales = self._find(f"{codes.name}_scale_inv", _SCALE_TYPES)
        if scales is None:
            scales = self._need(f"{codes.name}_scale", _SCALE_TYPES, codes)
        is_right = not is_stack or (len(scales.shape) == 3 and scales.shape[0] == codes.shape[0])
        self.require(is_right, scales, f"not scales of {show(codes.name)} {codes.shape}")
        one = scales._replace(shape=scales.shape[1:]) if is_stack else scales
        is_float = codes.dtype == "F8_E4M3"
        rows, columns = codes.shape[-2:]
        group = self._group(codes, one, (rows, columns), 8, is_float=is_float)
        zeros = None if is_float else self._find(f"{codes.name}_zero_point", ("I8",))
        if zeros is not None:
            is_right = not is_stack and _scale_shape(zeros, rows) == _scale_shape(scales, rows)
            self.require(is_right, zeros, f"not of the shape of {show(scales.name)}")
        kind = TensorType.FP8 if is_float else TensorType.INT8
        info = self._tensor(codes.name, kind, codes.shape, codes, scales, zeros)
        return PackedTensor(info, self.quantization.method, group, codes, scales, zeros)

    def _rows(self, codes: FileTensor) -> PackedTensor:
        """Find the parts of a matrix whose rows are packed: compressed-tensors."""
        self._take(codes, ("I32",))
        stem = codes.name.removesuffix("_packed")
        self.require(len(codes.shape) == 2, codes, "not a matrix")
        scales = self._need(f"{stem}_scale", _SCALE_TYPES, codes)
        shape, bits = self._unpacked_shape(codes, self._find(f"{stem}_shape", _INDEX_TYPES))
        group = self._group(codes, scales, shape, bits, is_float=False)
        groups = num_groups(shape, group)
        zeros = self._find(f"{stem}_zero_point", ("I32", "I8"))
        if zeros is not None:
            packed_rows = -(-shape[0] * bits // 32)
            expected = (packed_rows, groups[1]) if zeros.dtype == "I32" else groups
            self.require(zeros.shape == expected and groups[0] == shape[0], zeros, f"not of shape {expected}")
        order = self._index(f"{stem}_g_idx", shape[1], group)
        info = self._tensor(stem, _KINDS[bits], shape, codes, scales, zeros, order)
        return PackedTensor(info, Method.COMPRESSED, group, codes, scales, zeros, order=order)

    def _unpacked_shape(self, codes: FileTensor, stored: FileTensor | None) -> tuple[tuple[int, int], int]:
        """Return the shape of a packed matrix and its bits, which follow from its width."""
        candidates = dict.fromkeys(scheme.bits for scheme in self.quantization.schemes if not scheme.is_float)
        rows, words = codes.shape
        if stored is None:
            self.require(len(candidates) == 1, codes, "its weight_shape is missing")
            bits = next(iter(candidates))
            return (rows, words * 32 // bits), bits
        self.require(stored.shape == (2,), stored, "not two numbers")
        # Not through the map: the server lists tensors too, see FileMap.
        data = stored.buffer.copy(stored.offset, stored.num_bytes)
        given = struct.unpack("<2q" if stored.dtype == "I64" else "<2i", data)
        fitting = [bits for bits in candidates if -(-given[1] * bits // 32) == words]
        is_right = bool(fitting) and given[0] == rows and given[1] > 0 and given[1] % 2 == 0
        self.require(is_right, codes, f"does not hold the even rows of a matrix {given} by config.json")
        return (rows, given[1]), fitting[0]

    def _columns(self, codes: FileTensor) -> PackedTensor:
        """Find the parts of a matrix that is stored transposed: AWQ and GPTQ."""
        self._take(codes, ("I32",))
        stem = codes.name.removesuffix("qweight")
        scales = self._need(f"{stem}scales", _SCALE_TYPES, codes)
        self.require(len(codes.shape) == 2 and len(scales.shape) == 2, codes, "not a matrix")
        (scheme,) = self.quantization.schemes
        per_word, is_awq = 32 // scheme.bits, self.quantization.method is Method.AWQ
        inputs, outputs = codes.shape if is_awq else (codes.shape[0] * per_word, codes.shape[1])
        outputs = outputs * per_word if is_awq else outputs
        group = scheme.group_of(outputs, inputs)
        groups = num_groups((outputs, inputs), group)[1]
        is_right = scales.shape == (groups, outputs) and inputs % 2 == 0
        self.require(is_right, scales, f"scales of {show(codes.name)} need {(groups, outputs)} by config.json")
        zeros = self._find(f"{stem}qzeros", ("I32",))
        if zeros is not None:
            expected = (groups, outputs // per_word)
            is_right = zeros.shape == expected and outputs % per_word == 0
            self.require(is_right, zeros, f"zero points of {show(codes.name)} need {expected}")
        order = None if is_awq else self._index(f"{stem}g_idx", inputs, group)
        shape = (outputs, inputs)
        info = self._tensor(f"{stem}weight", _KINDS[scheme.bits], shape, codes, scales, zeros, order)
        offset = self.quantization.zero_offset
        return PackedTensor(info, self.quantization.method, group, codes, scales, zeros, offset, order)

    def _index(self, name: str, num_inputs: int, group: tuple[int, int]) -> FileTensor | None:
        """Find the group of each input. A matrix with one group needs none."""
        part = self._find(name, _INDEX_TYPES)
        if part is None:
            return None
        self.require(part.shape == (num_inputs,), part, f"not the groups of {num_inputs} inputs")
        return None if group[1] >= num_inputs else part


_KINDS = {4: TensorType.INT4, 8: TensorType.INT8}


def _scale_shape(scales: FileTensor, num_rows: int) -> tuple[int, ...]:
    """Return the shape of scales as rows and columns. A scale of the whole matrix has any number of dimensions."""
    if math.prod(scales.shape) == 1:
        return 1, 1
    return (num_rows, 1) if scales.shape == (num_rows,) else scales.shape


def num_groups(shape: tuple[int, int], group: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // group[0]), -(-shape[1] // group[1])
