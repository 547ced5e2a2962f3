"""Matrices on a GPU, whole or packed: the product is chosen by the number of rows.

Products of few rows, which are part of a graph, have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.backends.machine import MIN_FP8_CAPABILITY
from quire.backends.torch.kernels.elementwise import gated
from quire.backends.torch.kernels.fp8_rows import gated_in_fp8, quantize_rows
from quire.backends.torch.kernels.linear import MAX_FEW, MAX_SPLIT, PARTS, few_rows, num_parts, product, tile_product
from quire.backends.torch.kernels.packed_linear import (
    MAX_ROWS,
    ROW_COUNTS,
    can_split,
    has_row_product,
    packed_row_product,
    packed_tile_product,
)
from quire.backends.torch.kernels.packed_products import (
    MAX_EXPANDED,
    TILED_ROWS,
    expanded_product,
    has_library_product,
    is_fp8,
    is_unscaled,
    product_in_fp8,
    unscaled_product,
)
from quire.backends.torch.layers import Fp8Inputs, Fp8Product, Fp8Rows, Inputs, Linear, Outputs, plain
from quire.backends.torch.packed import PackedFormat, PackedLinear, PackedWeight
from quire.weights.packed import CodeType
from quire.weights.spec import Activation


class FusedLinear(Linear):
    """A dense matrix of 16 or 32 bits. The kernels for graphs are compiled by the time a graph is captured.

    The bits of a row of 16-bit numbers do not depend on the number of rows, nor on whether it is part of a graph.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None and len(x) <= MAX_FEW:  # the head of a graph
            return few_rows(x, self.weight, self.bias, out=out)
        return product(x, self.weight, self.bias, out=out)

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:
        x = plain(x)
        return few_rows(x, self.weight, self.bias) if is_graph and len(x) <= MAX_FEW else self(x)

    def project_back(self, x: Inputs, *, is_graph: bool) -> Outputs:
        x = plain(x)
        if is_graph and MAX_FEW < len(x) <= MAX_SPLIT and num_parts(self.weight) > 1:
            return tile_product(x, self.weight, self.bias, is_split=True)
        return self.project(x, is_graph=is_graph)

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:  # noqa: ARG002
        x = plain(x)
        if is_graph and len(x) <= MAX_FEW:
            return few_rows(x, self.weight, self.bias, activation)
        return gated(self(x), activation)

    def has_kernel(self, num_rows: int) -> bool:
        return num_rows <= (MAX_FEW if num_parts(self.weight) == 1 else MAX_SPLIT)


class FusedPackedLinear(PackedLinear):
    """The kernels for graphs are compiled by the time a graph is captured."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__(packed, bias)
        self._has_library_product = has_library_product(packed)  # asked several times in every layer of a step

    @classmethod
    def holds(cls, format: PackedFormat) -> bool:
        """Return whether the kernels compile for this format. Older GPUs have no instructions for FP8."""
        if format.type is not CodeType.FP8 or not torch.cuda.is_available():
            return True
        return torch.cuda.get_device_capability() >= MIN_FP8_CAPABILITY

    def __call__(self, x: Inputs, out: Tensor | None = None) -> Tensor:
        whole = self._multiplied(self._ordered(x) if isinstance(x, Tensor) else x)
        return whole if out is None else out.copy_(whole)

    def _multiplied(self, x: Inputs) -> Tensor:
        if is_fp8(self.packed):
            return product_in_fp8(x, self.packed, self.bias)
        if self.packed.shape.numel() > MAX_EXPANDED and len(x) <= TILED_ROWS:  # a head: decoding all of it takes long
            return self._decoding_product(len(x))(plain(x), self.packed, self.bias)
        return expanded_product(plain(x), self.packed, self.bias)

    def _decoding_product(self, num_rows: int) -> Callable[..., Tensor]:
        return packed_row_product if has_row_product(num_rows, self.packed.format) else packed_tile_product

    def fp8_inputs(self, num_rows: int) -> Fp8Inputs | None:
        weight = self.packed
        if not is_fp8(weight) or weight.order is not None or num_rows in ROW_COUNTS:
            return None
        if weight.format.group_columns:
            return Fp8Inputs.PER_GROUP if num_rows > MAX_ROWS else None
        return Fp8Inputs.PER_ROW if num_rows > MAX_ROWS or self._has_library_product else None

    def has_kernel(self, num_rows: int) -> bool:
        """Return whether a product of so many rows decodes inside."""
        if is_fp8(self.packed):
            return num_rows <= MAX_ROWS and self.fp8_inputs(num_rows) is None
        return num_rows <= TILED_ROWS

    def _unscaled(self, x: Inputs) -> Fp8Product | None:
        """Return a product for the next kernel to scale, or None if there is none for this number of rows."""
        if self.fp8_inputs(len(x)) is not Fp8Inputs.PER_ROW or not is_unscaled(len(x), self.packed, self.bias):
            return None
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x, has_groups=False)
        return unscaled_product(rows, self.packed)

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:
        if not is_graph or not self.has_kernel(len(x)):
            return self(x)
        return self._decoding_product(len(x))(self._ordered(plain(x)), self.packed, self.bias)

    def project_back(self, x: Inputs, *, is_graph: bool) -> Outputs:
        num_rows, weight = len(x), self.packed
        if (product := self._unscaled(x)) is not None:
            return product
        is_few = is_graph and num_rows <= MAX_ROWS and self.has_kernel(num_rows)
        if is_few and not has_row_product(num_rows, weight.format) and can_split(*weight.shape):
            return packed_tile_product(self._ordered(plain(x)), weight, self.bias, num_parts=PARTS)
        return self.project(x, is_graph=is_graph)

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:
        num_rows, weight = len(x), self.packed
        if is_graph and self.has_kernel(num_rows):
            return self._decoding_product(num_rows)(self._ordered(plain(x)), weight, self.bias, activation)
        taken = None if reader is None else reader.fp8_inputs(num_rows)
        if taken is None:
            return gated(self(x), activation)
        product = self._unscaled(x)
        gate_up = self(x) if product is None else product
        return gated_in_fp8(gate_up, activation, has_groups=taken is Fp8Inputs.PER_GROUP)
