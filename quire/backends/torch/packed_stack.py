"""Matrices of the experts of a layer that stay packed in memory, in the formats of `packed.py`.

The plain version decodes one expert at a time; the kernels (`kernels/quantized_experts.py`) decode inside their
products, or multiply in FP8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.backends.torch.mxfp4 import Mxfp4Stack
from quire.backends.torch.packed import PackedFormat, PackedWeight, format_of, has_whole_zeros, pack, quantize
from quire.weights.packed import CodeType, PackedMatrix

# N experts, O outputs, I inputs

SMALLER_GROUPS = (64, 32)  # for matrices that groups of 128 do not divide
FP8_COLUMNS = (0, 128)  # of scales of weights that are multiplied in FP8


class PackedStack:
    """One matrix [O, I] of every expert, packed. Indexing decodes the matrix of one expert."""

    __slots__ = ("shape", "whole")

    def __init__(self, whole: PackedWeight, num_experts: int) -> None:
        num_outputs, rest = divmod(len(whole), num_experts)
        if rest or num_outputs % whole.format.group_rows:
            raise ValueError(f"{tuple(whole.shape) = } in {whole.format} do not hold matrices of {num_experts = }")
        if not has_kernels(whole.format):
            raise ValueError(f"experts in {whole.format} have no kernels")
        self.whole = whole  # [N * O, I]: the matrices one below the other
        self.shape = torch.Size((num_experts, num_outputs, whole.shape[1]))

    @classmethod
    def empty(cls, num_experts: int, num_outputs: int, num_inputs: int, format: PackedFormat, dtype: torch.dtype,
              device: str | torch.device) -> PackedStack:  # fmt: skip
        return cls(PackedWeight.empty(num_experts * num_outputs, num_inputs, format, dtype, device), num_experts)

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
    def itemsize(self) -> int:
        """Bytes of a decoded weight."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """Return the matrix [O, I] of one expert."""
        num_outputs = self.shape[1]
        return self.whole.decode(expert * num_outputs, (expert + 1) * num_outputs)

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

    def invent(self, random: torch.Generator, std: float) -> None:
        """Fill with random weights of about this standard deviation."""
        self.whole.invent(random, std)


Stack = Tensor | Mxfp4Stack | PackedStack  # one matrix of every expert


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
    return multiplies_in_fp8(gate_up) == multiplies_in_fp8(down)


def dense(stack: PackedStack) -> Tensor:
    """Return the decoded matrices [N, O, I]."""
    return stack.whole.dense().view(stack.shape)
