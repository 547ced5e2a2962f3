"""Tensors of FP8 products between two kernels: inputs that are rounded already, and products that are not scaled yet.

The library's fastest product of FP8 knows one scale for all inputs and one for all weights. A scale for each row and
one for each output are therefore applied by the kernel that reads the product, and the kernel that writes the inputs
of a product rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

# T rows, I inputs, O outputs


class Fp8Inputs(Enum):
    """What a scale of inputs in FP8 belongs to."""

    PER_ROW = auto()
    PER_GROUP = auto()  # of 128 columns


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Inputs rounded to FP8: value = code * scale. There may be rows of padding."""

    codes: Tensor  # [T or more, I] e4m3
    scales: Tensor  # [T or more, 1] fp32, or [T or more, ceil(I / 128)], column by column
    num_rows: int  # T

    def __len__(self) -> int:
        return self.num_rows


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """A product of codes: the whole product is value * row scale * output scale."""

    values: Tensor  # [T, O] in the model's type
    row_scales: Tensor  # [T, 1] fp32
    output_scales: Tensor  # [O] fp32

    def __len__(self) -> int:
        return len(self.values)


Inputs = Tensor | Fp8Rows
Outputs = Tensor | Fp8Product
