"""Matrices of the experts of a layer that stay packed in memory: MXFP4, and the formats of `packed.py`.

MXFP4 has 4-bit codes, and an exponent for every 32 weights. The plain versions decode one expert at a time; the kernels
(`kernels/mxfp4_experts.py`, `kernels/quantized_experts.py`) decode inside their products, or multiply in FP8.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.backends.torch.packed import PackedFormat, PackedWeight, format_of, has_whole_zeros, pack, quantize
from quire.weights.checkpoint import RawTensor
from quire.weights.packed import CodeType, PackedMatrix
from quire.weights.quants import E2M1_CODES

# N experts, O outputs, I inputs

GROUP = 32  # weights that share an exponent
BLOCK_BYTES = 17  # in files: the exponent, and 16 bytes of codes
BIAS = 127  # of exponents
STD = 2.8  # of random codes
MAX_EXPONENT = 128  # the kernels decode with 2 ** (exponent - 1), which must be finite


class Mxfp4Stack:
    """One matrix [O, I] of every expert, packed. Indexing decodes the matrix of one expert.

    Byte j of a group holds weight j in its low half and weight j + 16 in its high half, as in GGUF files.
    """

    __slots__ = ("codes", "dtype", "exponents", "shape")

    def __init__(self, codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> None:
        num_experts, num_outputs, num_groups = exponents.shape
        if codes.shape != (num_experts, num_outputs, num_groups * GROUP // 2):
            raise ValueError(f"codes of {tuple(codes.shape) = } do not match {tuple(exponents.shape) = }")
        self.codes = codes  # [N, O, I / 2] uint8
        self.exponents = exponents  # [N, O, I / 32] uint8
        self.dtype = dtype  # of decoded weights
        self.shape = torch.Size((num_experts, num_outputs, num_groups * GROUP))

    @classmethod
    def empty(cls, num_experts: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: str | torch.device,
              ) -> Mxfp4Stack:  # fmt: skip
        shape = (num_experts, num_outputs)
        codes = torch.empty((*shape, num_inputs // 2), dtype=torch.uint8, device=device)
        return cls(codes, torch.empty((*shape, num_inputs // GROUP), dtype=torch.uint8, device=device), dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def itemsize(self) -> int:
        """Bytes of a decoded weight."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def set_rows(self, expert: int, first: int, raw: RawTensor) -> None:
        """Copy rows from a file into the matrix of an expert, from row `first` on."""
        blocks = raw.data.reshape(raw.info.shape[0], -1, BLOCK_BYTES)
        rows = slice(first, first + len(blocks))
        self.exponents[expert, rows].copy_(torch.from_numpy(np.ascontiguousarray(blocks[..., 0])))
        codes = np.ascontiguousarray(blocks[..., 1:]).reshape(len(blocks), -1)
        self.codes[expert, rows].copy_(torch.from_numpy(codes))

    def invent(self, random: torch.Generator, std: float) -> None:
        """Fill with random weights of about this standard deviation."""
        self.codes.random_(0, 256, generator=random)
        self.exponents.fill_(BIAS + round(math.log2(std / STD)))

    def __getitem__(self, expert: int) -> Tensor:
        """Return the matrix [O, I] of one expert."""
        table = torch.tensor(E2M1_CODES, dtype=torch.float32, device=self.codes.device)  # doubled
        codes = self.codes[expert].view(self.shape[1], -1, 1, GROUP // 2).int()
        values = table[torch.cat((codes & 15, codes >> 4), 2)]  # [O, groups, 2, 16]
        exponents = self.exponents[expert].int() - (BIAS + 1)
        return torch.ldexp(values, exponents[:, :, None, None]).view(self.shape[1:]).to(self.dtype)


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
