"""A matrix on a GPU: products of few rows, which are part of a graph, have kernels of their own."""

from __future__ import annotations

from torch import Tensor

from quire.backends.torch.fp8_rows import Inputs, Outputs
from quire.backends.torch.kernels.elementwise import gated
from quire.backends.torch.kernels.linear import (
    THIN,
    gated_row_product,
    gated_tile_product,
    is_single,
    is_small,
    product_in_parts,
    row_product,
    tile_product,
)
from quire.backends.torch.layers import Linear, plain
from quire.weights.spec import Activation


class FusedLinear(Linear):
    """A dense matrix of 16 or 32 bits. The kernels for graphs are compiled by the time a graph is captured."""

    __slots__ = ()

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:
        x = plain(x)
        if is_graph and is_single(len(x), self.weight):
            return row_product(x, self.weight, self.bias)
        if is_graph and is_small(len(x), self.weight):
            return tile_product(x, self.weight, self.bias)
        return self(x)

    def project_back(self, x: Inputs, *, is_graph: bool) -> Outputs:
        x = plain(x)
        if is_graph and self.num_outputs <= THIN and is_small(len(x), self.weight):
            return product_in_parts(x, self.weight, self.bias)
        return self.project(x, is_graph=is_graph)

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:  # noqa: ARG002
        x = plain(x)
        if is_graph and is_single(len(x), self.weight):
            return gated_row_product(x, self.weight, self.bias, activation)
        if is_graph and is_small(len(x), self.weight):
            return gated_tile_product(x, self.weight, self.bias, activation)
        return gated(self(x), activation)
