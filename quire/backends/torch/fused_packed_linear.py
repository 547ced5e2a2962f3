"""A packed matrix on a GPU: the product is chosen by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.torch.kernels.elementwise import gated
from quire.backends.torch.kernels.packed_linear import (
    MAX_ROWS,
    ROW_COUNTS,
    can_split,
    packed_gated_row_product,
    packed_gated_tile_product,
    packed_product_in_parts,
    packed_row_product,
    packed_tile_product,
)
from quire.backends.torch.kernels.packed_products import TILED_ROWS, expanded_product, is_fp8, product_in_fp8
from quire.backends.torch.packed import PackedFormat
from quire.backends.torch.packed_linear import PackedLinear
from quire.weights.packed import CodeType
from quire.weights.spec import Activation

MIN_FP8_CAPABILITY = (8, 9)  # Ada; then Hopper and Blackwell
MAX_EXPANDED = 1 << 28  # weights of a matrix that is decoded for a product; those of a head take too much memory


class FusedPackedLinear(PackedLinear):
    """The kernels for graphs are compiled by the time a graph is captured."""

    __slots__ = ()

    @classmethod
    def holds(cls, format: PackedFormat) -> bool:
        """Return whether the kernels compile for this format. Older GPUs have no instructions for FP8."""
        if format.type is not CodeType.FP8 or not torch.cuda.is_available():
            return True
        return torch.cuda.get_device_capability() >= MIN_FP8_CAPABILITY

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        whole = self._multiplied(self._ordered(x))
        return whole if out is None else out.copy_(whole)

    def _multiplied(self, x: Tensor) -> Tensor:
        if is_fp8(self.packed):
            return product_in_fp8(x, self.packed, self.bias)
        if self.packed.shape.numel() <= MAX_EXPANDED:
            return expanded_product(x, self.packed, self.bias)
        return (packed_row_product if len(x) in ROW_COUNTS else packed_tile_product)(x, self.packed, self.bias)

    @property
    def _max_rows(self) -> int:
        """Most rows of products that decode inside."""
        return MAX_ROWS if is_fp8(self.packed) else TILED_ROWS

    def project(self, x: Tensor, *, is_graph: bool) -> Tensor:
        if is_graph and len(x) <= self._max_rows:
            multiply = packed_row_product if len(x) in ROW_COUNTS else packed_tile_product
            return multiply(self._ordered(x), self.packed, self.bias)
        return self(x)

    def project_back(self, x: Tensor, *, is_graph: bool) -> Tensor:
        is_few = is_graph and len(x) <= MAX_ROWS and len(x) not in ROW_COUNTS
        if is_few and can_split(*self.packed.shape):
            return packed_product_in_parts(self._ordered(x), self.packed, self.bias)
        return self.project(x, is_graph=is_graph)

    def gated(self, x: Tensor, activation: Activation, *, is_graph: bool) -> Tensor:
        if is_graph and len(x) <= self._max_rows:
            multiply = packed_gated_row_product if len(x) in ROW_COUNTS else packed_gated_tile_product
            return multiply(self._ordered(x), self.packed, self.bias, activation)
        return gated(self(x), activation)
