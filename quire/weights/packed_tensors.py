"""Quantised matrices in safetensors: the tensors that make up one matrix, and how each layout packs its codes.

| layout | tensors of a module |
|---|---|
| FP8 | `weight` F8_E4M3 [O, I], `weight_scale_inv` or `weight_scale` |
| compressed-tensors, packed | `weight_packed` I32 [O, I / 8], `weight_scale` [O, G], `weight_shape`, and for some `weight_zero_point` [O / 8, G], `weight_g_idx` [I] |
| AWQ | `qweight` I32 [I, O / 8], `qzeros` [G, O / 8], `scales` [G, O] |
| GPTQ | `qweight` I32 [I / 8, O], `qzeros` [G, O / 8], `scales` [G, O], `g_idx` [I] |

8 is the number of 4-bit codes in an I32. Shapes and types are checked when a checkpoint is opened, contents when a
matrix is read.
"""  # noqa: E501

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import ModelFileError
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.fields import show
from quire.weights.quantization import Method, Quantization

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# O outputs, I inputs, G groups of inputs, N experts

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
# Scales of activations, which keep 16 bits here.
_UNUSED_ENDINGS = (".input_scale", ".activation_scale", ".output_scale", ".input_zero_point")
KV_SCALES = "scales of the KV cache"
_KV_ENDINGS = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of each eight, that is in the lowest 4 bits, the next, ...


class Part(NamedTuple):
    """A tensor of a file that belongs to a quantised matrix."""

    name: str
    dtype: str  # of the file: I32
    shape: tuple[int, ...]
    num_bytes: int


Shape = tuple[int, int]
ReadPart = Callable[[Part, int, int], "NDArray[np.uint8]"]  # a part, first byte, number of bytes


class PackedTensor(NamedTuple):
    """A quantised matrix of a file, or a stack of them."""

    info: TensorInfo  # its name is the one that a plain matrix would have; [O, I] or [N, O, I]
    method: Method
    group: tuple[int, int]
    codes: Part
    scales: Part
    zeros: Part | None = None
    zero_offset: int = 0
    order: Part | None = None  # the group of each input


def is_part(name: str, dtype: object) -> bool:
    """Return whether a tensor belongs to a quantised matrix."""
    return name.endswith(_PART_ENDINGS) or (dtype in PART_BYTES and dtype not in ("F32", "F16", "BF16"))


def is_unused(name: str) -> bool:
    return name.endswith(_UNUSED_ENDINGS)


def is_kv_scale(name: str) -> bool:
    return name.endswith(_KV_ENDINGS)


# Finding matrices


def find_packed(
    parts: Mapping[str, Part], quantization: Quantization, read: ReadPart, source: str
) -> dict[str, PackedTensor]:
    """Return all quantised matrices by the name of a plain one. Every part must belong to a matrix."""
    finder = _Finder(parts, quantization, read, source)
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
    def __init__(self, parts: Mapping[str, Part], quantization: Quantization, read: ReadPart, source: str) -> None:
        self.parts = parts
        self.quantization = quantization
        self.read = read
        self.source = source
        self.used: set[str] = set()

    def find(self, part: Part) -> PackedTensor | None:
        """Return the matrix whose codes the part holds, None if it holds none."""
        method = self.quantization.method
        if method in (Method.AWQ, Method.GPTQ):
            return self._columns(part) if part.name.endswith(".qweight") else None
        if part.name.endswith(".weight_packed"):
            return self._rows(part)
        if part.dtype in ("F8_E4M3", "I8") and not part.name.endswith(_PART_ENDINGS):
            return self._plain(part)
        return None

    def wrong(self, part: Part, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: tensor {show(part.name)} is {part.dtype} {part.shape}: {problem}")

    def _take(self, part: Part, dtypes: tuple[str, ...]) -> Part:
        if part.dtype not in dtypes:
            raise self.wrong(part, f"not of type {' or '.join(dtypes)}")
        self.used.add(part.name)
        return part

    def _find(self, name: str, dtypes: tuple[str, ...]) -> Part | None:
        part = self.parts.get(name)
        return None if part is None else self._take(part, dtypes)

    def _need(self, name: str, dtypes: tuple[str, ...], owner: Part) -> Part:
        part = self._find(name, dtypes)
        if part is None:
            raise ModelFileError(f"{self.source}: tensor {show(owner.name)} has no {show(name)} beside it")
        return part

    def _group(self, codes: Part, scales: Part, shape: Shape, bits: int, *, is_float: bool) -> tuple[int, int]:
        """Return the weights that share a scale: the scheme of the config that has the found number of scales."""
        found = _scale_shape(scales, shape[0])
        groups = {
            scheme.group_of(*shape)
            for scheme in self.quantization.schemes
            if (scheme.bits, scheme.is_float) == (bits, is_float)
        }
        fitting = [one for one in sorted(groups) if num_groups(shape, one) == found]
        if len(fitting) != 1:
            expected = " or ".join(str(num_groups(shape, one)) for one in sorted(groups)) or "another type"
            raise self.wrong(
                scales, f"scales of {show(codes.name)} {shape}, {bits} bits, need {expected} by config.json"
            )
        return fitting[0]

    def _tensor(self, name: str, kind: TensorType, shape: tuple[int, ...], *parts: Part | None) -> TensorInfo:
        return TensorInfo(name, kind, shape, sum(part.num_bytes for part in parts if part is not None))

    def _plain(self, codes: Part) -> PackedTensor:
        """Find the scales of a matrix with one byte per code, or of a stack of matrices."""
        self._take(codes, ("F8_E4M3", "I8"))
        if len(codes.shape) not in (2, 3):
            raise self.wrong(codes, "not a matrix")
        scales = self._find(f"{codes.name}_scale_inv", _SCALE_TYPES)
        if scales is None:
            scales = self._need(f"{codes.name}_scale", _SCALE_TYPES, codes)
        one = scales
        if len(codes.shape) == 3:
            if len(scales.shape) != 3 or scales.shape[0] != codes.shape[0]:
                raise self.wrong(scales, f"not scales of {show(codes.name)} {codes.shape}")
            one = scales._replace(shape=scales.shape[1:])
        is_float = codes.dtype == "F8_E4M3"
        rows, columns = codes.shape[-2:]
        group = self._group(codes, one, (rows, columns), 8, is_float=is_float)
        zeros = None if is_float else self._find(f"{codes.name}_zero_point", ("I8",))
        if zeros is not None and (len(codes.shape) == 3 or _scale_shape(zeros, rows) != _scale_shape(scales, rows)):
            raise self.wrong(zeros, f"not of the shape of {show(scales.name)}")
        kind = TensorType.FP8 if is_float else TensorType.INT8
        info = self._tensor(codes.name, kind, codes.shape, codes, scales, zeros)
        return PackedTensor(info, self.quantization.method, group, codes, scales, zeros)

    def _rows(self, codes: Part) -> PackedTensor:
        """Find the parts of a matrix whose rows are packed: compressed-tensors."""
        self._take(codes, ("I32",))
        stem = codes.name.removesuffix("_packed")
        if len(codes.shape) != 2:
            raise self.wrong(codes, "not a matrix")
        scales = self._need(f"{stem}_scale", _SCALE_TYPES, codes)
        shape, bits = self._unpacked_shape(codes, self._find(f"{stem}_shape", _INDEX_TYPES))
        group = self._group(codes, scales, shape, bits, is_float=False)
        found = num_groups(shape, group)
        zeros = self._find(f"{stem}_zero_point", ("I32", "I8"))
        if zeros is not None:
            packed_rows = -(-shape[0] * bits // 32)
            expected = (packed_rows, found[1]) if zeros.dtype == "I32" else found
            if zeros.shape != expected or found[0] != shape[0]:
                raise self.wrong(zeros, f"not of shape {expected}")
        order = self._index(f"{stem}_g_idx", shape[1], group)
        info = self._tensor(stem, _KINDS[bits], shape, codes, scales, zeros, order)
        return PackedTensor(info, Method.COMPRESSED, group, codes, scales, zeros, order=order)

    def _unpacked_shape(self, codes: Part, stored: Part | None) -> tuple[tuple[int, int], int]:
        """Return the shape of a packed matrix and its bits, which follow from its width."""
        candidates = dict.fromkeys(scheme.bits for scheme in self.quantization.schemes if not scheme.is_float)
        rows, words = codes.shape
        if stored is None:
            if len(candidates) != 1:
                raise self.wrong(codes, "its weight_shape is missing")
            bits = next(iter(candidates))
            return (rows, words * 32 // bits), bits
        if stored.shape != (2,):
            raise self.wrong(stored, "not two numbers")
        given = struct.unpack(
            "<2q" if stored.dtype == "I64" else "<2i", self.read(stored, 0, stored.num_bytes).tobytes()
        )
        for bits in candidates:
            if given[0] == rows and given[1] > 0 and -(-given[1] * bits // 32) == words and given[1] % 2 == 0:
                return (rows, given[1]), bits
        raise self.wrong(codes, f"does not hold the even rows of a matrix {given} by config.json")

    def _columns(self, codes: Part) -> PackedTensor:
        """Find the parts of a matrix that is stored transposed: AWQ and GPTQ."""
        self._take(codes, ("I32",))
        stem = codes.name.removesuffix("qweight")
        scales = self._need(f"{stem}scales", _SCALE_TYPES, codes)
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise self.wrong(codes, "not a matrix")
        (scheme,) = self.quantization.schemes
        per_word, is_awq = 32 // scheme.bits, self.quantization.method is Method.AWQ
        inputs, outputs = codes.shape if is_awq else (codes.shape[0] * per_word, codes.shape[1])
        outputs = outputs * per_word if is_awq else outputs
        group = scheme.group_of(outputs, inputs)
        count = num_groups((outputs, inputs), group)[1]
        if scales.shape != (count, outputs) or inputs % 2:
            raise self.wrong(scales, f"scales of {show(codes.name)} need {(count, outputs)} by config.json")
        zeros = self._find(f"{stem}qzeros", ("I32",))
        if zeros is not None and (zeros.shape != (count, outputs // per_word) or outputs % per_word):
            raise self.wrong(zeros, f"zero points of {show(codes.name)} need {(count, outputs // per_word)}")
        order = None if is_awq else self._index(f"{stem}g_idx", inputs, group)
        shape = (outputs, inputs)
        info = self._tensor(f"{stem}weight", _KINDS[scheme.bits], shape, codes, scales, zeros, order)
        offset = self.quantization.zero_offset
        return PackedTensor(info, self.quantization.method, group, codes, scales, zeros, offset, order)

    def _index(self, name: str, num_inputs: int, group: tuple[int, int]) -> Part | None:
        """Find the group of each input. A matrix with one group needs none."""
        part = self._find(name, _INDEX_TYPES)
        if part is None:
            return None
        if part.shape != (num_inputs,):
            raise self.wrong(part, f"not the groups of {num_inputs} inputs")
        return None if group[1] >= num_inputs else part


_KINDS = {4: TensorType.INT4, 8: TensorType.INT8}


def _scale_shape(scales: Part, num_rows: int) -> tuple[int, ...]:
    """Return the shape of scales as rows and columns. A scale of the whole matrix has any number of dimensions."""
    if math.prod(scales.shape) == 1:
        return 1, 1
    return (num_rows, 1) if scales.shape == (num_rows,) else scales.shape


def num_groups(shape: tuple[int, int], group: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // group[0]), -(-shape[1] // group[1])
