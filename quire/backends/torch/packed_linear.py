"""A matrix that stays packed in memory. The plain version decodes a few rows of it at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.backends.torch.fp8_rows import Inputs
from quire.backends.torch.layers import Linear, gated, product
from quire.backends.torch.packed import PackedFormat, PackedWeight
from quire.weights.spec import Activation

# T tokens in the batch, I inputs, O outputs


class PackedLinear(Linear):
    """One packed matrix, or several of one format with the same input, concatenated along their outputs."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias  # [O]

    @classmethod
    def holds(cls, format: PackedFormat) -> bool:
        """Return whether a file's matrices of this format stay packed.

        Decoding in every step is several times slower on a CPU, so GGUF types with minima are decoded when they are
        loaded.
        """
        return not format.has_half_zeros

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


class JoinedLinear(Linear):
    """Matrices with the same input that are stored in several formats: each part has its own product.

    Files mix formats: many GGUF files store values with more bits than queries and keys.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.bias = None  # the parts have their own

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        whole = torch.cat([part(x) for part in self.parts], 1)
        return whole if out is None else out.copy_(whole)

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:
        return torch.cat([part.project(x, is_graph=is_graph) for part in self.parts], 1)

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:  # noqa: ARG002
        return gated(self.project(x, is_graph=is_graph), activation)
