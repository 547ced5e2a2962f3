"""Packed matrices on the device: codes of 4 or 8 bits, with a scale for every rectangle of weights.

The layout is the one that the kernels read. `PackedMatrix`, the layout of files, becomes this one without loss, apart
from the rounding to fp16 of scales of small groups and of zeros that are not whole. That changes a scale or a zero by
at most 2 ** -11 of it; a scale below 6.1e-5, which fp16 holds with fewer bits, by at most 3e-8.

`PackedLinear` is a matrix that stays packed in memory. The plain version decodes a few rows of it at a time.

The matrices of the experts of a layer stay packed together (`PackedStack`), also in MXFP4 (`Mxfp4Stack`), which has
4-bit codes and an exponent for every 32 weights. The plain versions decode one expert at a time; the kernels
(`kernels/quantized_experts.py`) decode inside their products, or multiply in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.backends.torch.layers import Inputs, Linear, gated, product
from quire.weights.checkpoint import RawTensor
from quire.weights.packed import CodeType, PackedMatrix, dequantize
from quire.weights.quants import E2M1_CODES
from quire.weights.spec import Activation

# O outputs, I inputs, G groups along the inputs

PAIRED = 32  # weights of a 4-bit block: byte j of a block holds weight j and, in its high half, weight j + 16
LARGE_GROUP = 512  # weights: scales of larger groups are fp32, because they are few
GROUP_COLUMNS = (16, 32, 64, 128)  # that the kernels know; a scale for whole rows is the other kind
MAX_HALF = 65504.0  # of fp16
MAX_WHOLE_ZERO = 16  # of zeros in a byte
NO_ZERO = 8.0  # of 4-bit integers without zeros
E4M3_MAX = 448.0
MAX_INT4 = 7.0  # of codes without zeros
MIN_SCALE = 1e-7  # not zero in fp16
CHUNK_WEIGHTS = 1 << 24  # decoded at a time by the plain product
BIAS = 127  # of exponents


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """What kernels are compiled for, besides the shape. `group_columns` is 0 for one scale per row of scales."""

    type: CodeType
    group_rows: int
    group_columns: int
    has_zeros: bool = False
    has_order: bool = False
    has_half_zeros: bool = False  # zeros are fp16: those of a group with a minimum are fractions
    has_exponents: bool = False  # scales are powers of two, in bytes

    @property
    def zero_dtype(self) -> torch.dtype:
        return torch.float16 if self.has_half_zeros else torch.uint8

    @property
    def without_zeros(self) -> PackedFormat:
        return replace(self, has_zeros=False, has_half_zeros=False)

    @property
    def default_zero(self) -> float:
        """The zero of a matrix without zeros."""
        return NO_ZERO if self.type is CodeType.INT4 else 0.0

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.type.bits

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.has_exponents:
            return torch.uint8
        is_small = 0 < self.group_rows * self.group_columns <= LARGE_GROUP
        return torch.float16 if is_small else torch.float32

    def num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_columns) if self.group_columns else 1

    def fits(self, num_inputs: int) -> bool:
        """Return whether the kernels can compute with matrices of this format."""
        if self.type.bits == 4 and num_inputs % PAIRED:
            return False
        if self.type is CodeType.INT4 and self.group_columns == 16:  # less than a block
            return False
        return self.group_columns == 0 or (self.group_columns in GROUP_COLUMNS and num_inputs % self.group_columns == 0)


FP8_PER_OUTPUT = PackedFormat(CodeType.FP8, 1, 0)
INT4_IN_GROUPS = PackedFormat(CodeType.INT4, 1, 128)
MXFP4 = PackedFormat(CodeType.FP4, 1, 32, has_exponents=True)
QUANTIZED = {8: FP8_PER_OUTPUT, 4: INT4_IN_GROUPS}  # `--quantize`, by bits


class PackedWeight:
    """A matrix [O, I]: weight = (code - zero) * scale, as in `PackedMatrix`."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None,
        format: PackedFormat,
        dtype: torch.dtype,
    ) -> None:
        num_outputs, num_bytes = codes.shape
        self.shape = torch.Size((num_outputs, num_bytes * format.codes_per_byte))
        self.codes = codes  # [O, I] uint8, or [O, I / 2] in blocks of PAIRED weights
        self.scales = scales  # [ceil(O / group rows), G] fp16 or fp32, or uint8: exponents
        self.zeros = zeros  # the same shape, uint8 or fp16
        self.order = order  # [I] int64
        self.format = format
        self.dtype = dtype  # of decoded weights

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def empty(
        cls, num_outputs: int, num_inputs: int, format: PackedFormat, dtype: torch.dtype, device: str | torch.device
    ) -> PackedWeight:
        codes = torch.empty((num_outputs, num_inputs // format.codes_per_byte), dtype=torch.uint8, device=device)
        shape = (-(-num_outputs // format.group_rows), format.num_groups(num_inputs))
        scales = torch.empty(shape, dtype=format.scale_dtype, device=device)
        zeros = torch.empty(shape, dtype=format.zero_dtype, device=device) if format.has_zeros else None
        order = torch.arange(num_inputs, device=device) if format.has_order else None
        return cls(codes, scales, zeros, order, format, dtype)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def decode(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows [first, last) in `dtype`. Their columns are in the order of the codes."""
        last = len(self) if last is None else last
        rows, columns = self.format.group_rows, self.format.group_columns or self.shape[1]
        values = _values(self.codes[first:last], self.format.type)
        index = torch.arange(first, last, device=self.codes.device) // rows
        scales = self.scales[index].float()
        if self.format.has_exponents:
            scales = torch.ldexp(torch.ones_like(scales), scales - BIAS)
        scales = scales.repeat_interleave(columns, 1)[:, : self.shape[1]]
        if self.zeros is not None:
            values -= self.zeros[index].float().repeat_interleave(columns, 1)[:, : self.shape[1]]
        else:
            values -= self.format.default_zero
        return values.mul_(scales).to(self.dtype)

    def rows(self, first: int, last: int) -> PackedWeight:
        """Return outputs [first, last), which share the memory. `first` begins a row of scales."""
        scales = slice(first // self.format.group_rows, -(-last // self.format.group_rows))
        zeros = None if self.zeros is None else self.zeros[scales]
        return PackedWeight(self.codes[first:last], self.scales[scales], zeros, self.order, self.format, self.dtype)

    def chunks(self) -> list[tuple[int, int]]:
        """Cut the rows such that a decoded chunk takes little memory."""
        step = max(CHUNK_WEIGHTS // self.shape[1], 1)
        return [(first, min(first + step, len(self))) for first in range(0, len(self), step)]

    def invent(self, random: torch.Generator, std: float) -> None:
        """Fill with random weights of about this standard deviation."""
        if self.format.type is CodeType.FP8:
            for first, last in self.chunks():
                shape = (last - first, self.shape[1])
                noise = torch.randn(shape, generator=random, device=self.codes.device).mul_(E4M3_MAX / 8)
                self.codes[first:last] = _to_e4m3(noise)
            self.scales.fill_(std * 8 / E4M3_MAX)
            return
        self.codes.random_(0, 256, generator=random)
        scale = std / {CodeType.INT8: 74.0, CodeType.INT4: 4.6, CodeType.FP4: 2.8}[self.format.type]
        self.scales.fill_(BIAS + round(math.log2(scale)) if self.format.has_exponents else scale)
        if self.zeros is not None and self.format.has_half_zeros:
            middle = torch.rand(self.zeros.shape, generator=random, device=self.zeros.device).mul_(4).sub_(2)
            self.zeros.copy_(middle.add_(self.format.default_zero))
        elif self.zeros is not None:
            self.zeros.random_(6, 11, generator=random)


def _values(codes: Tensor, kind: CodeType) -> Tensor:
    """Return the values [rows, I] fp32 of codes, without scales and zeros."""
    if kind is CodeType.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if kind is CodeType.INT8:
        return codes.view(torch.int8).float()
    blocks = codes.view(len(codes), -1, 1, PAIRED // 2)
    halves = torch.cat((blocks & 15, blocks >> 4), 2).view(len(codes), -1)
    if kind is CodeType.INT4:
        return halves.float()
    table = torch.tensor(E2M1_CODES, dtype=torch.float32, device=codes.device) / 2
    return table[halves.int()]


def _to_e4m3(values: Tensor) -> Tensor:
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _paired(codes: Tensor) -> Tensor:
    """Convert 4-bit codes from the order of files (neighbours share a byte) to blocks of PAIRED."""
    halves = torch.stack((codes & 15, codes >> 4), 2).view(len(codes), -1, 2, PAIRED // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(codes), -1)


def format_of(matrices: Sequence[PackedMatrix]) -> PackedFormat | None:
    """Return the format of matrices stacked along their outputs, or None if there is no common one.

    Blocks of several rows become scales of single rows where a matrix ends within a block.
    """
    first = matrices[0]
    columns = {0 if one.group[1] >= one.shape[1] else one.group[1] for one in matrices}
    if len({one.type for one in matrices}) > 1 or len(columns) > 1:
        return None
    if any(not _same(one.order, first.order) for one in matrices):
        return None
    group_rows = {one.group[0] for one in matrices}
    is_aligned = len(group_rows) == 1 and all(one.shape[0] % one.group[0] == 0 for one in matrices)
    if len(matrices) == 1 and first.group[0] < first.shape[0]:
        is_aligned = True
    rows = first.group[0] if is_aligned and columns != {0} else 1  # the library's FP8 has a scale per output
    format = PackedFormat(
        first.type,
        rows,
        columns.pop(),
        any(one.zeros is not None for one in matrices),
        first.order is not None,
        not all(has_whole_zeros(one) for one in matrices),
    )
    return format if format.fits(first.shape[1]) and all(_is_in_range(one) for one in matrices) else None


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def has_whole_zeros(matrix: PackedMatrix) -> bool:
    """Return whether the zeros are bytes, or there are none."""
    if (zeros := matrix.zeros) is None:
        return True
    is_whole = (zeros == np.rint(zeros)) & (zeros >= 0) & (zeros <= MAX_WHOLE_ZERO)
    return matrix.type is CodeType.INT4 and bool(is_whole.all())


def _is_in_range(matrix: PackedMatrix) -> bool:
    """Return whether fp16 can hold scales and zeros. NaN is not in range."""
    held = (matrix.scales,) if matrix.zeros is None else (matrix.scales, matrix.zeros)
    has_zeros = matrix.zeros is None or matrix.type in (CodeType.INT4, CodeType.INT8)
    return has_zeros and all(bool(np.abs(one).max(initial=0) < MAX_HALF) for one in held)


def pack(
    matrices: Sequence[PackedMatrix], format: PackedFormat, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    """Stack matrices of a common format along their outputs and copy them to the device."""
    num_outputs, num_inputs = sum(one.shape[0] for one in matrices), matrices[0].shape[1]
    whole = PackedWeight.empty(num_outputs, num_inputs, format, dtype, device)
    first = scale_row = 0
    for one in matrices:
        codes = torch.from_numpy(np.array(one.codes)).to(device)
        whole.codes[first : first + len(codes)] = _paired(codes) if one.type.bits == 4 else codes
        num_scales = -(-one.shape[0] // format.group_rows)
        rows = slice(scale_row, scale_row + num_scales)
        whole.scales[rows] = _scale_rows(one, one.scales, format).to(device)
        if whole.zeros is not None and one.zeros is None:
            whole.zeros[rows] = format.default_zero
        elif whole.zeros is not None and one.zeros is not None:
            whole.zeros[rows] = _scale_rows(one, one.zeros, format).to(device, format.zero_dtype)
        first += one.shape[0]
        scale_row += num_scales
    if whole.order is not None and (order := matrices[0].order) is not None:
        whole.order.copy_(torch.from_numpy(order))
    return whole


def _scale_rows(matrix: PackedMatrix, values: np.ndarray, format: PackedFormat) -> Tensor:
    """Return scales or zeros of a matrix with `format.group_rows` outputs per row."""
    scales = torch.from_numpy(np.array(values))
    if matrix.group[0] == format.group_rows:
        return scales
    return scales.repeat_interleave(matrix.group[0], 0)[: matrix.shape[0]]


def decoded(matrix: PackedMatrix) -> Tensor:
    """Return a matrix of any format [O, I] fp32, in the order of the inputs, on the CPU."""
    return torch.from_numpy(dequantize(matrix))


def quantize(weight: Tensor, format: PackedFormat) -> PackedWeight:
    """Quantise a matrix [O, I] of 16 or 32 bits by rounding to the nearest code. `format` is one of QUANTIZED."""
    num_outputs, num_inputs = weight.shape
    whole = PackedWeight.empty(num_outputs, num_inputs, format, weight.dtype, weight.device)
    groups = format.num_groups(num_inputs)
    most = E4M3_MAX if format.type is CodeType.FP8 else MAX_INT4
    for first, last in whole.chunks():
        rows = weight[first:last].float().view(last - first, groups, -1)
        scales = rows.abs().amax(2).div_(most).clamp_(min=MIN_SCALE).to(format.scale_dtype)
        rows = (rows / scales[:, :, None].float()).view(last - first, -1)
        if format.type is CodeType.FP8:
            whole.codes[first:last] = _to_e4m3(rows)
        else:
            codes = rows.round_().add_(NO_ZERO).clamp_(0, 15).byte()
            whole.codes[first:last] = _paired(codes[:, ::2] | (codes[:, 1::2] << 4))
        whole.scales[first:last] = scales
    return whole


# T tokens in the batch, I inputs, O outputs


class PackedLinear(Linear):
    """One packed matrix, or several of one format with the same input, concatenated along their outputs."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias  # [O]

    @classmethod
    def holds(cls, format: PackedFormat) -> bool:
        """Return whether a file's matrices of this format stay packed.

        Decoding in every step is several times slower on a CPU, so GGUF types with minima are decoded when they are
        loaded.
        """
        return not format.has_half_zeros

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = self._ordered(x)
        whole = x.new_empty((len(x), len(self.packed))) if out is None else out
        for first, last in self.packed.chunks():
            bias = None if self.bias is None else self.bias[first:last]
            whole[:, first:last] = product(x, self.packed.decode(first, last), bias)
        return whole

    def _ordered(self, x: Tensor) -> Tensor:
        """Return the inputs in the order of the codes."""
        return x if self.packed.order is None else torch.index_select(x, 1, self.packed.order)


class JoinedLinear(Linear):
    """Matrices with the same input that are stored in several formats: each part has its own product.

    Files mix formats: many GGUF files store values with more bits than queries and keys.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.bias = None  # the parts have their own

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        whole = torch.cat([part(x) for part in self.parts], 1)
        return whole if out is None else out.copy_(whole)

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:
        return torch.cat([part.project(x, is_graph=is_graph) for part in self.parts], 1)

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:  # noqa: ARG002
        return gated(self.project(x, is_graph=is_graph), activation)


# N experts, O outputs, I inputs

SMALLER_GROUPS = (64, 32)  # for matrices that groups of 128 do not divide
FP8_COLUMNS = (0, 128)  # of scales of weights that are multiplied in FP8
BLOCK_BYTES = 17  # of MXFP4 in files: the exponent, and 16 bytes of codes
MAX_EXPONENT = 128  # the kernels decode with 2 ** (exponent - 1), which must be finite


class ExpertStack:
    """One matrix [O, I] of every expert, packed. Indexing decodes the matrix of one expert."""

    def __init__(self, whole: PackedWeight, num_experts: int) -> None:
        self.whole = whole  # [N * O, I]: the matrices one below the other
        self.shape = torch.Size((num_experts, len(whole) // num_experts, whole.shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def format(self) -> PackedFormat:
        return self.whole.format

    @property
    def dtype(self) -> torch.dtype:
        """Type of decoded weights."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """Return the matrix [O, I] of one expert."""
        num_outputs = self.shape[1]
        return self.whole.decode(expert * num_outputs, (expert + 1) * num_outputs)


class PackedStack(ExpertStack):
    """Experts in a format of files' `PackedMatrix`."""

    @classmethod
    def empty(cls, num_experts: int, num_outputs: int, num_inputs: int, format: PackedFormat, dtype: torch.dtype,
              device: str | torch.device) -> PackedStack:  # fmt: skip
        return cls(PackedWeight.empty(num_experts * num_outputs, num_inputs, format, dtype, device), num_experts)

    def set_rows(self, expert: int, first: int, matrix: PackedMatrix) -> None:
        """Copy a matrix of a file into that of an expert, from row `first` on.

        Its format is that of the stack, apart from the zeros.
        """
        has_half_zeros = not has_whole_zeros(matrix)
        format = replace(self.format, has_zeros=matrix.zeros is not None, has_half_zeros=has_half_zeros)
        self._copy(expert * self.shape[1] + first, pack([matrix], format, self.dtype, self.whole.codes.device))

    def quantize(self, expert: int, weight: Tensor) -> None:
        """Set the matrix of an expert to the nearest codes of weight [O, I]."""
        self._copy(expert * self.shape[1], quantize(weight, self.format))

    def _copy(self, first: int, part: PackedWeight) -> None:
        whole, group_rows = self.whole, self.format.group_rows
        whole.codes[first : first + len(part)] = part.codes
        scale_rows = slice(first // group_rows, (first + len(part)) // group_rows)
        whole.scales[scale_rows] = part.scales
        if part.zeros is not None and whole.zeros is None:  # the matrices before this one had the default
            whole.zeros = torch.full_like(whole.scales, self.format.default_zero, dtype=part.zeros.dtype)
            whole.format = replace(whole.format, has_zeros=True, has_half_zeros=part.format.has_half_zeros)
        elif whole.zeros is not None and part.format.has_half_zeros and not self.format.has_half_zeros:
            whole.zeros = whole.zeros.half()  # those before were whole
            whole.format = replace(whole.format, has_half_zeros=True)
        if whole.zeros is not None:
            whole.zeros[scale_rows] = self.format.default_zero if part.zeros is None else part.zeros


class Mxfp4Stack(ExpertStack):
    """Experts in MXFP4, whose blocks of codes are those of GGUF files."""

    @classmethod
    def empty(cls, num_experts: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: str | torch.device,
              ) -> Mxfp4Stack:  # fmt: skip
        return cls(PackedWeight.empty(num_experts * num_outputs, num_inputs, MXFP4, dtype, device), num_experts)

    def set_rows(self, expert: int, first: int, raw: RawTensor) -> None:
        """Copy rows from a file into the matrix of an expert, from row `first` on."""
        blocks = raw.data.reshape(raw.info.shape[0], -1, BLOCK_BYTES)
        start = expert * self.shape[1] + first
        rows = slice(start, start + len(blocks))
        self.whole.scales[rows].copy_(torch.from_numpy(np.ascontiguousarray(blocks[..., 0])))
        codes = np.ascontiguousarray(blocks[..., 1:]).reshape(len(blocks), -1)
        self.whole.codes[rows].copy_(torch.from_numpy(codes))


Stack = Tensor | ExpertStack  # one matrix of every expert


def has_kernels(format: PackedFormat) -> bool:
    """Return whether experts are computed with in this format. Inputs are never reordered."""
    return not format.has_order and format.type is not CodeType.FP4


def stack_format(matrix: PackedMatrix) -> PackedFormat | None:
    """Return the format that a matrix has in a stack; None: it cannot be in one.

    Matrices of one stack may differ in their zeros.
    """
    format = format_of([matrix])
    if format is None or not has_kernels(format):
        return None
    group_rows = format.group_rows if matrix.shape[0] % format.group_rows == 0 else 1
    return replace(format, group_rows=group_rows)


def fitting_format(format: PackedFormat, num_inputs: int) -> PackedFormat | None:
    """Return the format, or that with the largest smaller groups, that fits matrices of so many inputs; or None."""
    for columns in (format.group_columns, *SMALLER_GROUPS):
        if columns <= format.group_columns and (found := replace(format, group_columns=columns)).fits(num_inputs):
            return found
    return None


def multiplies_in_fp8(format: PackedFormat) -> bool:
    """Return whether many rows are rounded to FP8 for experts in this format."""
    return format.type is CodeType.FP8 and format.group_columns in FP8_COLUMNS


def have_common_kernels(gate_up: PackedFormat, down: PackedFormat) -> bool:
    """Return whether the kernels compute with two matrices of an expert in these formats."""
    is_same_kind = gate_up.has_exponents == down.has_exponents
    return is_same_kind and multiplies_in_fp8(gate_up) == multiplies_in_fp8(down)
