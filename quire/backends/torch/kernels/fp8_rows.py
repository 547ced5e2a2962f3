"""Rounds inputs of products to FP8, and applies the scales of products of FP8.

A scale belongs to a row, or to 128 columns of a row. The scales of a group of columns are next to each other, as the
library reads them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.linear import _activated
from quire.backends.torch.layers import Fp8Product, Fp8Rows, Outputs
from quire.backends.torch.packed import E4M3_MAX
from quire.weights.spec import Activation

# T rows, I inputs, O outputs, F width of the MLP

GROUP = 128  # columns of a scale of inputs
SCALED_BLOCK = 1024  # elements per program
ROW_ALIGNMENT = 4  # of rows with groups, for the library's product


@triton.jit
def store_in_fp8(
    value, codes, scales, row, stride,
    IN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Round a row [BLOCK] of IN values to FP8. GROUP is the number of columns of a scale, `stride` that of groups."""
    i = tl.arange(0, BLOCK)
    value = value.reshape((BLOCK // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(value), 1) / MAX, 1e-12)
    code = tl.minimum(tl.maximum(value / scale[:, None], -MAX), MAX).to(tl.float8e4nv).reshape((BLOCK,))
    tl.store(codes + row * IN + i, code, mask=i < IN)
    group = tl.arange(0, BLOCK // GROUP)
    num_groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    tl.store(scales + group * stride + row, scale, mask=group < num_groups)


@triton.jit(do_not_specialize=["stride"])
def _quantize_rows(
    x, codes, scales, stride, IN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
    store_in_fp8(value, codes, scales, row, stride, IN, BLOCK, GROUP, MAX)


@triton.jit(do_not_specialize=["stride"])
def _gated_rows(
    gate_up, row_scales, output_scales, codes, scales, stride,
    F: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    # A program computes a row of activation(gate) * up and rounds it to FP8.
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_in = i < F
    gate = tl.load(gate_up + row * 2 * F + i, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=is_in, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    if row_scales is not None:
        scale = tl.load(row_scales + row)
        gate = (gate * (scale * tl.load(output_scales + i, mask=is_in, other=0.0))).to(dtype).to(tl.float32)
        up = (up * (scale * tl.load(output_scales + F + i, mask=is_in, other=0.0))).to(dtype).to(tl.float32)
    value = (_activated(gate, IS_SILU) * up).to(dtype).to(tl.float32)
    store_in_fp8(value, codes, scales, row, stride, F, BLOCK, GROUP, MAX)


@triton.jit
def _apply_scales(values, row_scales, output_scales, OUT: tl.constexpr, BLOCK: tl.constexpr):
    num_blocks: tl.constexpr = (OUT + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_in = column < OUT
    value = tl.load(values + row * OUT + column, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.load(row_scales + row) * tl.load(output_scales + column, mask=is_in, other=0.0)
    tl.store(values + row * OUT + column, value.to(values.dtype.element_ty), mask=is_in)


class RowShape(NamedTuple):
    """What the kernels are compiled for."""

    block: int  # the padded width
    group: int  # columns of a scale


@cache
def row_shape(num_inputs: int, *, has_groups: bool) -> RowShape:
    block = max(int(triton.next_power_of_2(num_inputs)), GROUP)
    return RowShape(block, GROUP if has_groups else block)


def empty_rows(num_rows: int, num_inputs: int, device: torch.device, *, has_groups: bool) -> Fp8Rows:
    """Return rows for a kernel to write, with a scale per row or per 128 columns."""
    padded = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT if has_groups else num_rows
    codes = torch.empty((padded, num_inputs), dtype=torch.float8_e4m3fn, device=device)
    if not has_groups:
        return Fp8Rows(codes, torch.empty((padded, 1), dtype=torch.float32, device=device), num_rows)
    num_groups = -(-num_inputs // GROUP)
    return Fp8Rows(codes, torch.empty((num_groups, padded), dtype=torch.float32, device=device).t(), num_rows)


def quantize_rows(x: Tensor, *, has_groups: bool) -> Fp8Rows:
    """Round x [T, I] to FP8, with a scale per row or per 128 columns."""
    num_rows, num_inputs = x.shape
    rows = empty_rows(num_rows, num_inputs, x.device, has_groups=has_groups)
    block, group = row_shape(num_inputs, has_groups=has_groups)
    _quantize_rows[(num_rows,)](
        x, rows.codes, rows.scales, rows.scales.stride(1), IN=num_inputs, BLOCK=block, GROUP=group, MAX=E4M3_MAX,
        num_warps=8 if block > 4096 else 4,
    )  # fmt: skip
    return rows


def gated_in_fp8(gate_up: Outputs, activation: Activation, *, has_groups: bool) -> Fp8Rows:
    """Return activation(gate) * up [T, F] in FP8, given both side by side [T, 2F]."""
    product = gate_up if isinstance(gate_up, Fp8Product) else None
    values = gate_up.values if isinstance(gate_up, Fp8Product) else gate_up
    num_rows, size = len(values), values.shape[1] // 2
    rows = empty_rows(num_rows, size, values.device, has_groups=has_groups)
    block, group = row_shape(size, has_groups=has_groups)
    _gated_rows[(num_rows,)](
        values, product and product.row_scales, product and product.output_scales, rows.codes, rows.scales,
        rows.scales.stride(1), F=size, BLOCK=block, GROUP=group, MAX=E4M3_MAX, IS_SILU=activation is Activation.SILU,
        num_warps=min(max(block // (512 if product is None else 1024), 4), 32),
    )  # fmt: skip
    return rows


def apply_scales(product: Fp8Product) -> Tensor:
    """Return the whole product [T, O]. Overwrites its values."""
    num_rows, num_outputs = product.values.shape
    _apply_scales[(num_rows * -(-num_outputs // SCALED_BLOCK),)](
        product.values, product.row_scales, product.output_scales, OUT=num_outputs, BLOCK=SCALED_BLOCK, num_warps=4
    )
    return product.values
