"""A matrix that stays packed in memory. The plain version decodes a few rows of it at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.torch.layers import Linear, product
from quire.backends.torch.packed import PackedWeight

# T tokens in the batch, I inputs, O outputs


class PackedLinear(Linear):
    """One packed matrix, or several of one format with the same input, concatenated along their outputs."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias  # [O]

    @property
    def num_outputs(self) -> int:
        return len(self.packed)

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = self._ordered(x)
        whole = x.new_empty((len(x), self.num_outputs)) if out is None else out
        for first, last in self.packed.chunks():
            bias = None if self.bias is None else self.bias[first:last]
            whole[:, first:last] = product(x, self.packed.decode(first, last), bias)
        return whole

    def _ordered(self, x: Tensor) -> Tensor:
        """Return the inputs in the order of the codes."""
        return x if self.packed.order is None else torch.index_select(x, 1, self.packed.order)
