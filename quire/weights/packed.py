"""A matrix of few bits per weight, in one layout for all file formats.

Files pack weights in many ways. Readers convert them to a `PackedMatrix` when they load a matrix, without loss, so that
backends have a few kinds of codes instead of one kernel per file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# O outputs, I inputs


class CodeType(StrEnum):
    """What the codes of a packed matrix mean."""

    FP8 = "fp8"  # e4m3 without infinities, one byte each
    INT8 = "int8"  # signed, one byte each
    INT4 = "int4"  # 0 to 15, two per byte
    FP4 = "fp4"  # e2m1, two per byte

    @property
    def bits(self) -> int:
        return 4 if self in (CodeType.INT4, CodeType.FP4) else 8


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [O, I]: weight = (code - zero) * scale.

    A scale belongs to a rectangle of `group` = (rows, columns) weights: (1, 128) are groups of a 4-bit format,
    (128, 128) the blocks of FP8 files, (1, I) a scale per output.
    """

    type: CodeType
    shape: tuple[int, int]
    codes: NDArray[np.uint8]  # [O, I], or [O, I / 2]: weight 2j is in the low half of byte j, weight 2j + 1 in the high
    scales: NDArray[np.float32]  # [ceil(O / group rows), ceil(I / group columns)]
    group: tuple[int, int]
    zeros: NDArray[np.float32] | None = None  # as `scales`; None: 0, and 8 for INT4
    order: NDArray[np.int32] | None = None  # [I]: column j multiplies input order[j]; None: input j

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, with scales and zeros of 16 bits."""
        num_scales = self.scales.size * (1 if self.zeros is None else 2)
        return self.codes.nbytes + 2 * num_scales + (0 if self.order is None else self.order.nbytes)
