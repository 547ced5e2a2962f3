"""Products of dense matrices, whose bits do not depend on the number of rows.

The matrix units add up the products of an output in the order of the inputs. The inputs are one part; those of a matrix
with at least twice as many inputs as outputs are PARTS parts, whose sums are added in order: such a matrix has few
tiles, and its sums are long. A product of any number of rows keeps this order, so a row has the same bits alone and in
every batch. This holds for 16-bit numbers: products of 32 bits use the library.

Three kernels and the library do this. `few_rows` is for up to MAX_FEW rows, whose time is the time to read the weights:
16 outputs and 8 rows are a tile of the matrix units, and the first weights are read before the previous kernel has
ended. `tile_product` is for any number; its parts may be programs of their own, and the following norm adds them up.
`large_product` has large tiles, read by the copy engine. The library's product is used where `is_library_exact` finds
that it has the same bits: for one part it has, except for some numbers of rows for which it divides the inputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.backends.torch.kernels.chaining import can_launch_early, is_early, let_next_start, wait_for_inputs
from quire.weights.spec import Activation

# I inputs, O outputs, F = O / 2 outputs of a gated product, R rows of a tile, P parts

PARTS = 4
MAX_FEW = 32  # rows
MAX_SPLIT = 256  # rows of a product whose parts are programs of their own
CHECKED_ROWS = 256  # rows of the library's product that are compared at a time
WHOLE_TILES = 100  # that nearly fill the card


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
def _weights(start, first, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    """Load columns of the rows or parts of rows that begin at `start` [.., O]: [.., O, WIDTH]."""
    k = first + tl.arange(0, WIDTH)
    if SPAN % WIDTH == 0:
        return tl.load(tl.expand_dims(start, -1) + k)
    return tl.load(tl.expand_dims(start, -1) + k, mask=k < SPAN, other=0.0)


@triton.jit
def _inputs(start, is_row, first, WIDTH: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """Load columns of the input rows that begin at `start` [.., R]: [.., WIDTH, R]."""
    k = first + tl.arange(0, WIDTH)
    if PARTS == 1:  # loaded in the order of the memory
        return tl.load(start[:, None] + k[None, :], mask=is_row[:, None] & (k < SPAN)[None, :], other=0.0).T
    return tl.load(tl.expand_dims(start, -2) + k[:, None], mask=is_row[None, :] & (k < SPAN)[:, None], other=0.0)


@triton.jit
def _few_sums(
    start, rows, is_row, SPAN: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the rows at `rows` [.., R] by the weights at `start` [.., O], SPAN columns each. Returns [.., O, R].

    FIRST, SECOND, THIRD: columns that are loaded before the wait for the inputs. INPUTS: of the others, at a time.
    """
    shape: tl.constexpr = (PARTS, OUTPUTS, ROWS) if PARTS > 1 else (OUTPUTS, ROWS)
    total = tl.zeros(shape, tl.float32)
    first = _weights(start, 0, FIRST, SPAN)
    second, third = first, first
    if SECOND:
        second = _weights(start, FIRST, SECOND, SPAN)
    if THIRD:
        third = _weights(start, FIRST + SECOND, THIRD, SPAN)
    wait_for_inputs()
    total = tl.dot(first, _inputs(rows, is_row, 0, FIRST, SPAN, PARTS), total, input_precision="ieee")
    if SECOND:
        total = tl.dot(second, _inputs(rows, is_row, FIRST, SECOND, SPAN, PARTS), total, input_precision="ieee")
    if THIRD:
        total = tl.dot(third, _inputs(rows, is_row, FIRST + SECOND, THIRD, SPAN, PARTS), total, input_precision="ieee")
    for k in tl.range(FIRST + SECOND + THIRD, SPAN, INPUTS, num_stages=STAGES):
        inputs = _inputs(rows, is_row, k, INPUTS, SPAN, PARTS)
        total = tl.dot(_weights(start, k, INPUTS, SPAN), inputs, total, input_precision="ieee")
    return total


@triton.jit
def _gated_pairs(y, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return the values [O / 2, R] of products [O, R], each gate next to its up, rounded as when stored."""
    pairs = tl.reshape(y.to(dtype).to(tl.float32), (OUTPUTS // 2, 2, ROWS))
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    return _gated_value(gate, up, KIND).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, weight, bias, out, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    IS_GATED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    let_next_start()
    SPAN: tl.constexpr = IN // PARTS
    o, r = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    if IS_GATED:  # each gate next to its up
        row = tl.program_id(0) * (OUTPUTS // 2) + o // 2
        is_in = row < OUT // 2
        row += (o % 2) * (OUT // 2)
    else:
        row = tl.program_id(0) * OUTPUTS + o
        is_in = row < OUT
    is_row = r < num_rows
    start = weight + tl.where(is_in, row, 0).to(tl.int64) * IN
    rows = x + r * IN
    if PARTS > 1:
        part = tl.arange(0, PARTS) * SPAN
        start, rows = start[None, :] + part[:, None], rows[None, :] + part[:, None]
    sums = _few_sums(start, rows, is_row, SPAN, PARTS, OUTPUTS, ROWS, FIRST, SECOND, THIRD, INPUTS, STAGES)
    y = sums
    if PARTS > 1:
        number = tl.arange(0, PARTS)[:, None, None]
        y = tl.sum(tl.where(number == 0, sums, 0.0), 0)
    if bias is not None:
        y += tl.load(bias + row, mask=is_in, other=0.0).to(tl.float32)[:, None]
    for part in tl.static_range(1, PARTS):
        y += tl.sum(tl.where(number == part, sums, 0.0), 0)
    dtype: tl.constexpr = out.dtype.element_ty
    if IS_GATED:
        column = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        is_stored = (column < OUT // 2)[:, None] & is_row[None, :]
        value = _gated_pairs(y, OUTPUTS, ROWS, dtype, KIND)
        tl.store(out + r[None, :] * (OUT // 2) + column[:, None], value, mask=is_stored)
    else:
        tl.store(out + r[None, :] * OUT + row[:, None], y.to(dtype), mask=is_in[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _tile_product(
    x, weight, bias, out, num_rows, num_inputs, num_outputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    let_next_start()
    # Programs of one strip of the matrix are adjacent, so the strip is read from memory once.
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile, strip = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    t = tile * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, OUTPUTS)
    row = (strip * OUTPUTS + o) % num_outputs
    span = num_inputs // PARTS
    first = tl.program_id(1) * span  # of a split product
    k = first + tl.arange(0, INPUTS)
    # Rows past the end wrap around and are not stored: loads without a mask are wide.
    x_at = x + (t % num_rows)[:, None].to(tl.int64) * num_inputs + k[None, :]
    w_at = weight + row[:, None].to(tl.int64) * num_inputs + k[None, :]
    wait_for_inputs()
    part_sum = tl.zeros((ROWS, OUTPUTS), tl.float32)
    total = part_sum
    if bias is not None:
        if first == 0:
            total += tl.load(bias + row).to(tl.float32)[None, :]
    num_steps = tl.cdiv(span if IS_SPLIT else num_inputs, INPUTS)
    for step in range(num_steps):
        if IS_WHOLE:
            part_sum = tl.dot(tl.load(x_at), tl.load(w_at).T, part_sum, input_precision="ieee")
        else:
            is_in = (step * INPUTS + tl.arange(0, INPUTS) < num_inputs)[None, :]
            inputs, weights = tl.load(x_at, mask=is_in, other=0.0), tl.load(w_at, mask=is_in, other=0.0)
            part_sum = tl.dot(inputs, weights.T, part_sum, input_precision="ieee")
        x_at += INPUTS
        w_at += INPUTS
        if PARTS > 1 and not IS_SPLIT:
            if (step + 1) % (num_steps // PARTS) == 0:
                total += part_sum
                part_sum = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if PARTS == 1 or IS_SPLIT:
        total += part_sum
    column = strip * OUTPUTS + o
    is_in = (t < num_rows)[:, None] & (column < num_outputs)[None, :]
    place = (tl.program_id(1) * num_rows + t).to(tl.int64)
    value = total.to(out.dtype.element_ty)
    tl.store(out + place[:, None] * num_outputs + column[None, :], value, mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def _large_product(
    x, weight, bias, out, num_rows, num_inputs, num_outputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # x and weight are descriptors. GROUP tiles of rows by all tiles of outputs are neighbours, so both stay in a cache.
    num_tiles, num_strips = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * num_strips)
    size = min(num_tiles - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * num_strips)
    row, column = (group * GROUP + place % size) * ROWS, place // size * OUTPUTS
    t, o = row + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS)
    part_sum = tl.zeros((ROWS, OUTPUTS), tl.float32)
    total = part_sum
    if bias is not None:
        total += tl.load(bias + o, mask=o < num_outputs, other=0.0).to(tl.float32)[None, :]
    num_steps = tl.cdiv(num_inputs, INPUTS)
    for step in range(num_steps):
        tile = weight.load([column, step * INPUTS])
        part_sum = tl.dot(x.load([row, step * INPUTS]), tile.T, part_sum, input_precision="ieee")
        if PARTS > 1:
            if (step + 1) % (num_steps // PARTS) == 0:
                total += part_sum
                part_sum = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if PARTS == 1:
        total += part_sum
    is_in = (t < num_rows)[:, None] & (o < num_outputs)[None, :]
    tl.store(out + t[:, None].to(tl.int64) * num_outputs + o[None, :], total.to(out.dtype.element_ty), mask=is_in)


def num_parts(weight: Tensor) -> int:
    """Return the number of parts of the sums of a product with this matrix."""
    num_outputs, num_inputs = weight.shape
    return PARTS if num_inputs >= 2 * num_outputs and num_inputs % (PARTS * 128) == 0 else 1


class Few(NamedTuple):
    """How a program of `few_rows` reads its strip of the matrix."""

    outputs: int
    columns: tuple[int, int, int]  # of each part, loaded before the wait; 0: none
    inputs: int  # of the rest, at a time
    num_stages: int
    num_warps: int


@cache
def few_strip(num_outputs: int, span: int, parts: int, rows: int) -> Few:
    """Return the strip for a matrix. Measured in docs/performance.md."""
    if parts > PARTS:  # of experts
        return Few(16, (128, 0, 0), 128, 3, 4)
    if parts > 1:
        return Few(16, (256, 256, 256 if span == 768 else 0), 256, 3, 4)
    if span > 1024:
        return Few(32, (512, 0, 0), 512, 4, 4) if num_outputs <= 4096 else Few(32, (256, 0, 0), 256, 4, 1)
    if span <= 512:
        return Few(16, (max(triton.next_power_of_2(span), 16), 0, 0), 16, 1, 1)
    columns = (512, triton.next_power_of_2(span - 512), 0)
    return Few(32, columns, 16, 1, 2) if rows <= 8 else Few(64, columns, 16, 1, 4)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply x [T, I] of up to MAX_FEW rows by weight [O, I] transposed: [T, O], into `out` if given.

    With an activation, return activation(gate) * up [T, F] of the product with weight [2F, I], gates first.
    """
    num_outputs, num_inputs = weight.shape
    if out is None:
        out = x.new_empty((len(x), num_outputs if activation is None else num_outputs // 2))
    parts, rows = num_parts(weight), 8 if len(x) <= 8 else 16 if len(x) <= 16 else MAX_FEW
    outputs, columns, inputs, num_stages, num_warps = few_strip(num_outputs, num_inputs // parts, parts, rows)
    _few_rows[(-(-num_outputs // outputs),)](
        x, weight, bias, out, len(x), IN=num_inputs, OUT=num_outputs, PARTS=parts, ROWS=rows, OUTPUTS=outputs,
        FIRST=columns[0], SECOND=columns[1], THIRD=columns[2], INPUTS=inputs, STAGES=num_stages,
        IS_GATED=activation is not None, KIND=0 if activation is None else KINDS[activation],
        num_warps=num_warps, launch_pdl=can_launch_early(),
    )  # fmt: skip
    return out


def tile_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, is_split: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply any number of rows. `is_split`: return the sums of the parts [PARTS, T, O] in fp32."""
    num_rows, num_inputs = x.shape
    num_outputs, parts = len(weight), num_parts(weight)
    if is_split:
        out = x.new_empty((parts, num_rows, num_outputs), dtype=torch.float32)
    elif out is None:
        out = x.new_empty((num_rows, num_outputs))
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64 if num_rows <= 128 or not is_split else 128
    outputs = 64 if rows > 64 else 32
    if is_split and rows >= 64 and num_outputs >= WHOLE_TILES * 32:
        outputs = 128
    is_large, inputs = rows * outputs > 8192, 64 if rows * outputs >= 4096 else 128
    _tile_product[(-(-num_rows // rows) * -(-num_outputs // outputs), parts if is_split else 1)](
        x, weight, bias, out, num_rows, num_inputs, num_outputs,
        ROWS=rows, OUTPUTS=outputs, INPUTS=inputs, PARTS=parts, IS_SPLIT=is_split, IS_WHOLE=num_inputs % inputs == 0,
        num_warps=8 if is_large else 4, num_stages=3 if is_large else 4, launch_pdl=is_early(num_rows),
    )  # fmt: skip
    return out


def large_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Like `tile_product` for many rows. Rows of x and weight must be multiples of 16 bytes."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    rows, outputs, num_warps = 128, 256, 8
    if -(-num_rows // 128) * -(-num_outputs // 256) < WHOLE_TILES:
        outputs = 128
    if -(-num_rows // 128) * -(-num_outputs // 128) < WHOLE_TILES:
        rows, num_warps = 64, 4
    if out is None:
        out = x.new_empty((num_rows, num_outputs))
    _large_product[(-(-num_rows // rows) * -(-num_outputs // outputs),)](
        TensorDescriptor.from_tensor(x, [rows, 64]), TensorDescriptor.from_tensor(weight, [outputs, 64]),
        bias, out, num_rows, num_inputs, num_outputs,
        ROWS=rows, OUTPUTS=outputs, INPUTS=64, PARTS=num_parts(weight), GROUP=8, num_warps=num_warps, num_stages=4,
    )  # fmt: skip
    return out


def own_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Return the product of a kernel of ours that does not depend on the shape of the matrix."""
    if len(x) > MAX_SPLIT and weight.shape[1] % 8 == 0:
        return large_product(x, weight, bias, out=out)
    return tile_product(x, weight, bias, out=out)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of a step that has no graph: one of few, for which the library is compared."""
    unit = 16 if num_rows <= 64 else 32 if num_rows <= 512 else 128 if num_rows <= 2048 else 256
    return -(-num_rows // unit) * unit


_exact: dict[tuple[object, ...], bool] = {}  # by what the library's choice of an algorithm may depend on


def is_library_exact(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the library's product of so many rows has the bits of ours, found once by a comparison.

    Numbers of rows that graphs and padded steps do not have are not compared: each would take two products.
    """
    if padded_rows(num_rows) != num_rows or num_parts(weight) > 1:
        return False
    key = (num_rows, weight.shape, weight.dtype, bias is None, weight.device)
    if key not in _exact:
        x = torch.randn((num_rows, weight.shape[1]), device=weight.device).to(weight.dtype)
        found = F.linear(x, weight, bias)
        _exact[key] = all(
            torch.equal(tile_product(some, weight, bias), own)
            for some, own in zip(x.split(CHECKED_ROWS), found.split(CHECKED_ROWS), strict=True)
        )
    return _exact[key]


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, I] by weight [O, I] transposed, by the library if it has the same bits."""
    if weight.dtype == torch.float32 or is_library_exact(len(x), weight, bias):
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)
    return own_product(x, weight, bias, out=out)
