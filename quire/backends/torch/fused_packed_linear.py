"""A packed matrix on a GPU: the product is chosen by the number of rows."""

from __future__ import annotations

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
from quire.backends.torch.packed_linear import PackedLinear
from quire.weights.spec import Activation


class FusedPackedLinear(PackedLinear):
    __slots__ = ()

    def project(self, x: Tensor, *, is_graph: bool) -> Tensor:
        if is_graph and len(x) <= MAX_ROWS:
            multiply = packed_row_product if len(x) in ROW_COUNTS else packed_tile_product
            return multiply(self._ordered(x), self.packed, self.bias)
        return self(x)

    def project_back(self, x: Tensor, *, is_graph: bool) -> Tensor:
        is_few = is_graph and len(x) <= MAX_ROWS and len(x) not in ROW_COUNTS
        if is_few and can_split(*self.packed.shape):
            return packed_product_in_parts(self._ordered(x), self.packed, self.bias)
        return self.project(x, is_graph=is_graph)

    def gated(self, x: Tensor, activation: Activation, *, is_graph: bool) -> Tensor:
        if is_graph and len(x) <= MAX_ROWS:
            multiply = packed_gated_row_product if len(x) in ROW_COUNTS else packed_gated_tile_product
            return multiply(self._ordered(x), self.packed, self.bias, activation)
        return gated(self(x), activation)
