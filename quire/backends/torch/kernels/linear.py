"""Matrix products of few rows: decodes, whose time is the time to read the weights.

For a single row the library's kernel reads a small matrix at a third of the memory's speed, because it is made for
tiles. `_row_product` reads a few whole rows of the matrix per program, with many loads in flight, for up to four input
rows. For more rows and a small matrix there are too few tiles to fill the card: `_tile_product` also splits the sum,
into parts that the following norm adds up in order. Both compute the two halves of a gated MLP in one program, so that
the gate needs no launch. Large matrices and many rows use the library.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.chaining import can_launch_early, is_early, let_next_start, wait_for_inputs
from quire.weights.spec import Activation

# I inputs, O outputs, F = O / 2 outputs of a gated product


MAX_ROWS = 64  # of a product that does not use the library
MAX_WEIGHTS = 8 << 20  # larger matrices fill the card with the library's tiles
THIN = 2048  # outputs: up to this number there are too few tiles, and the sum is split
PARTS = 4


KINDS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}


class Strip(NamedTuple):
    """The part of a matrix that a program reads at a time."""

    outputs: int  # of gated experts, gates: each is read with its up
    width: int  # inputs; of packed matrices, bytes of codes
    num_warps: int


@triton.jit
def _activated(gate, IS_SILU: tl.constexpr):
    inner = gate
    if not IS_SILU:  # gelu with tanh: (1 + tanh(a)) / 2 is the sigmoid of 2a; 1.5957... is 2 * sqrt(2 / pi)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def _gated_value(gate, up, KIND: tl.constexpr):
    """Return activation(gate) * up. KIND: see KINDS."""
    if KIND == 2:  # comparisons keep NaN, which the minimum of two numbers does not
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        value = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        value = _activated(gate, KIND == 0) * up
    return value


@triton.jit
def _weights(start, i, IN: tl.constexpr, INPUTS: tl.constexpr):
    """Load columns `i` of the rows at `start`."""
    if IN % INPUTS == 0:
        w = tl.load(start[:, None] + i[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(start[:, None] + i[None, :], mask=(i < IN)[None, :], other=0.0)
    return w.to(tl.float32)


@triton.jit
def _inputs(x, i, IN: tl.constexpr, INPUTS: tl.constexpr):
    value = tl.load(x + i) if IN % INPUTS == 0 else tl.load(x + i, mask=i < IN, other=0.0)
    return value.to(tl.float32)[None, :]


@triton.jit
def _store_row(
    products, row, is_in, bias, out,
    OUT: tl.constexpr, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Add up the products [OUTPUTS, INPUTS] of one input row, and store its outputs."""
    y = tl.sum(products, 1)
    if bias is not None:
        y += tl.load(bias + row, mask=is_in, other=0.0).to(tl.float32)
    if IS_GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate, up = tl.split(tl.reshape(y.to(dtype).to(tl.float32), (OUTPUTS // 2, 2)))  # rounded as when stored
        column = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        tl.store(out + column, (_activated(gate, IS_SILU) * up).to(dtype), mask=column < OUT // 2)
    else:
        tl.store(out + row, y.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _row_product(
    x, weight, bias, out,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    # The sums of 1, 2 or 4 input rows are variables of their own: in one tensor, the compiler would move the weights to
    # another layout for it.
    let_next_start()
    o = tl.arange(0, OUTPUTS)
    if IS_GATED:  # each gate next to its up
        row = tl.program_id(0) * (OUTPUTS // 2) + o // 2
        is_in = row < OUT // 2
        row += (o % 2) * (OUT // 2)
    else:
        row = tl.program_id(0) * OUTPUTS + o
        is_in = row < OUT
    start = weight + tl.where(is_in, row, 0).to(tl.int64) * IN
    i = tl.arange(0, INPUTS)
    w = _weights(start, i, IN, INPUTS)
    wait_for_inputs()
    first = w * _inputs(x, i, IN, INPUTS)
    second, third, fourth = first, first, first
    if ROWS > 1:
        second = w * _inputs(x + IN, i, IN, INPUTS)
    if ROWS > 2:
        third = w * _inputs(x + 2 * IN, i, IN, INPUTS)
        fourth = w * _inputs(x + 3 * IN, i, IN, INPUTS)
    for offset in range(INPUTS, IN, INPUTS):
        i = offset + tl.arange(0, INPUTS)
        w = _weights(start, i, IN, INPUTS)
        first += w * _inputs(x, i, IN, INPUTS)
        if ROWS > 1:
            second += w * _inputs(x + IN, i, IN, INPUTS)
        if ROWS > 2:
            third += w * _inputs(x + 2 * IN, i, IN, INPUTS)
            fourth += w * _inputs(x + 3 * IN, i, IN, INPUTS)
    WIDTH: tl.constexpr = OUT // 2 if IS_GATED else OUT
    _store_row(first, row, is_in, bias, out, OUT, OUTPUTS, IS_GATED, IS_SILU)
    if ROWS > 1:
        _store_row(second, row, is_in, bias, out + WIDTH, OUT, OUTPUTS, IS_GATED, IS_SILU)
    if ROWS > 2:
        _store_row(third, row, is_in, bias, out + 2 * WIDTH, OUT, OUTPUTS, IS_GATED, IS_SILU)
        _store_row(fourth, row, is_in, bias, out + 3 * WIDTH, OUT, OUTPUTS, IS_GATED, IS_SILU)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_product(
    x, weight, bias, out, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPAN: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    let_next_start()
    # Programs of one strip of the matrix are adjacent, so the strip is read from memory once.
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile, strip, part = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles, tl.program_id(1)
    t = tile * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, OUTPUTS)
    if IS_GATED:  # each gate next to its up
        row = (strip * (OUTPUTS // 2) + o // 2) % (OUT // 2) + (o % 2) * (OUT // 2)
    else:
        row = (strip * OUTPUTS + o) % OUT
    i = part * SPAN + tl.arange(0, INPUTS)
    # Rows past the end wrap around and are not stored: loads without a mask are wide.
    x_at = x + (t % num_rows)[:, None] * IN + i[None, :]
    w_at = weight + row[:, None].to(tl.int64) * IN + i[None, :]
    wait_for_inputs()
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for _ in range(0, SPAN, INPUTS):
        total = tl.dot(tl.load(x_at), tl.load(w_at).T, total, input_precision="ieee")
        x_at += INPUTS
        w_at += INPUTS
    if bias is not None:
        if part == 0:
            total += tl.load(bias + row).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), (ROWS, OUTPUTS // 2, 2)))  # as when stored
        column = strip * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        is_in = (t < num_rows)[:, None] & (column < OUT // 2)[None, :]
        value = (_activated(gate, IS_SILU) * up).to(dtype)
        tl.store(out + t[:, None] * (OUT // 2) + column[None, :], value, mask=is_in)
    else:
        column = strip * OUTPUTS + o
        is_in = (t < num_rows)[:, None] & (column < OUT)[None, :]
        tl.store(out + (part * num_rows + t[:, None]) * OUT + column[None, :], total.to(dtype), mask=is_in)


@cache
def _strip(num_outputs: int, num_inputs: int) -> Strip:
    """Return the strip with just enough programs to fill the card. Measured in docs/performance.md."""
    if num_outputs > 4096 or num_inputs <= 1024:
        return Strip(outputs=4, width=512, num_warps=2)
    return Strip(outputs=4 if num_outputs > 2048 else 2, width=1024, num_warps=4)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """Multiply x [1, 2 or 4, I] by weight [O, I] transposed: [T, O].

    With an activation, return activation(gate) * up [T, F] of the product with weight [2F, I], gates first.
    """
    num_outputs, num_inputs = weight.shape
    is_gated = activation is not None
    out = x.new_empty((len(x), num_outputs // 2 if is_gated else num_outputs))
    strip = _strip(num_outputs, num_inputs)
    outputs = max(strip.outputs, 2) if is_gated else strip.outputs
    _row_product[(-(-num_outputs // outputs),)](
        x, weight, bias, out, IN=num_inputs, OUT=num_outputs, ROWS=len(x), OUTPUTS=outputs, INPUTS=strip.width,
        IS_GATED=is_gated, IS_SILU=activation is Activation.SILU,
        num_warps=strip.num_warps, launch_pdl=can_launch_early(),
    )  # fmt: skip
    return out


def is_single(num_rows: int, weight: Tensor) -> bool:
    """Return whether `row_product` suits this product."""
    return num_rows == 1 or (num_rows in (2, 4) and weight.numel() <= MAX_WEIGHTS)


def is_small(num_rows: int, weight: Tensor) -> bool:
    """Return whether `tile_product` suits this product. It needs whole tiles along the inputs."""
    if num_rows > MAX_ROWS or is_single(num_rows, weight):
        return False
    return weight.numel() <= MAX_WEIGHTS and weight.shape[1] % (PARTS * 128) == 0


def tile_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None, *, num_parts: int = 1
) -> Tensor:
    """Like `row_product`, of any number of rows.

    `num_parts`: PARTS for a matrix of few outputs. Returns fp32 partial sums [PARTS, T, O].
    """
    num_rows, num_inputs = x.shape
    is_gated = activation is not None
    if num_parts > 1:
        out = x.new_empty((num_parts, num_rows, len(weight)), dtype=torch.float32)
    else:
        out = x.new_empty((num_rows, len(weight) // 2 if is_gated else len(weight)))
    outputs = 64 if is_gated else 32
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    num_tiles = -(-num_rows // rows) * -(-len(weight) // outputs)
    _tile_product[(num_tiles, num_parts)](
        x, weight, bias, out, num_rows, IN=num_inputs, OUT=len(weight), ROWS=rows, OUTPUTS=outputs,
        INPUTS=64 if rows == outputs == 64 else 128, SPAN=num_inputs // num_parts,
        IS_GATED=is_gated, IS_SILU=activation is Activation.SILU, num_warps=4, num_stages=4,
        launch_pdl=is_early(rows),
    )  # fmt: skip
    return out
