"""The matrix product of a single row: one stream's decode, which is nothing but reading the weights.

The library's kernel for this shape reads a small matrix at a third of the memory's speed, because it is made for tiles.
Here a program takes a few rows of the matrix and reads them whole, many loads under way at once. The two halves of a
gated MLP are read by the same program, so that their product needs no launch of its own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.weights.spec import Activation

# I inputs, O outputs, F = O / 2 outputs of a gated product


class Strip(NamedTuple):
    """What a program reads at a time."""

    outputs: int
    inputs: int
    num_warps: int


@triton.jit
def _row_product(
    x, weight, bias, out,
    IN: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    o = tl.arange(0, OUTPUTS)
    if IS_GATED:  # a gate and its up side by side
        row = tl.program_id(0) * (OUTPUTS // 2) + o // 2
        is_in = row < OUT // 2
        row += (o % 2) * (OUT // 2)
    else:
        row = tl.program_id(0) * OUTPUTS + o
        is_in = row < OUT
    start = weight + tl.where(is_in, row, 0).to(tl.int64) * IN
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, IN, INPUTS):
        i = first + tl.arange(0, INPUTS)
        if IN % INPUTS == 0:
            w = tl.load(start[:, None] + i[None, :], eviction_policy="evict_first")
            value = tl.load(x + i)
        else:
            w = tl.load(start[:, None] + i[None, :], mask=(i < IN)[None, :], other=0.0)
            value = tl.load(x + i, mask=i < IN, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + row, mask=is_in, other=0.0).to(tl.float32)
    if IS_GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate, up = tl.split(tl.reshape(y.to(dtype).to(tl.float32), (OUTPUTS // 2, 2)))  # rounded as if stored
        inner = gate
        if not IS_SILU:  # gelu by tanh, see elementwise.py
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        column = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        tl.store(out + column, (gate * tl.sigmoid(inner) * up).to(dtype), mask=column < OUT // 2)
    else:
        tl.store(out + row, y.to(out.dtype.element_ty), mask=is_in)


@cache
def _strip(num_outputs: int, num_inputs: int) -> Strip:
    """Measured (docs/performance.md): enough programs to fill the card, and no more than that needs."""
    if num_outputs > 4096 or num_inputs <= 1024:
        return Strip(outputs=4, inputs=512, num_warps=2)
    return Strip(outputs=4 if num_outputs > 2048 else 2, inputs=1024, num_warps=4)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, I] times weight [O, I] transposed: [1, O]."""
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((1, num_outputs))
    strip = _strip(num_outputs, num_inputs)
    _row_product[(-(-num_outputs // strip.outputs),)](
        x, weight, bias, out, IN=num_inputs, OUT=num_outputs, OUTPUTS=strip.outputs, INPUTS=strip.inputs,
        IS_GATED=False, IS_SILU=False, num_warps=strip.num_warps,
    )  # fmt: skip
    return out


def gated_row_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """activation(gate) * up [1, F] of the product with weight [2F, I], gates first."""
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((1, num_outputs // 2))
    strip = _strip(num_outputs, num_inputs)
    outputs = max(strip.outputs, 2)
    _row_product[(-(-num_outputs // outputs),)](
        x, weight, bias, out, IN=num_inputs, OUT=num_outputs, OUTPUTS=outputs, INPUTS=strip.inputs,
        IS_GATED=True, IS_SILU=activation is Activation.SILU,
        num_warps=strip.num_warps,
    )  # fmt: skip
    return out
