"""Matrices of experts in MXFP4: 4-bit codes, and an exponent for every 32 weights.

They stay packed in memory. The plain version decodes one expert at a time; the kernels (`kernels/mxfp4_experts.py`)
decode inside their products.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.weights.checkpoint import RawTensor
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
