"""Kernels between the matrix products: embedding, norms and the gate of the MLP.

All are limited by memory, so each reads its tensors once and computes in fp32 registers. All tensors are contiguous.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.chaining import is_early, let_next_start, wait_for_inputs
from quire.backends.torch.kernels.fp8_rows import empty_rows, row_shape, store_in_fp8
from quire.backends.torch.kernels.linear import _activated
from quire.backends.torch.layers import Fp8Product, Fp8Rows, Outputs
from quire.backends.torch.packed import E4M3_MAX
from quire.weights.spec import Activation

# T rows of the batch, E hidden size, F width of the MLP, V vocabulary

GATED_BLOCK = 1024  # elements per program of `gated`: 16 bytes per thread of four warps


@triton.jit(do_not_specialize=["tokens", "batch_indices", "last_samples"])
def _embed(tokens, batch_indices, last_samples, embedding, out, scale, E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    batch_index = tl.load(batch_indices + row)
    sample = tl.load(last_samples + batch_index, mask=(token < 0) & (batch_index >= 0), other=0)
    token = tl.where(token < 0, sample, token)
    token = tl.where(batch_index < 0, 0, token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(embedding + token * E + column, mask=column < E).to(tl.float32) * scale
    tl.store(out + row * E + column, value.to(out.dtype.element_ty), mask=column < E)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _norm(
    x, row_scales, output_scales, residual, weight, out, out_scales, eps, factor, total_factor, num_rows, stride,
    E: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_TOTAL_FACTOR: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    # With `out_scales`, the norm is rounded to FP8, from the value that would be stored otherwise.
    let_next_start()
    like = out if out_scales is None else (x if residual is None else residual)
    dtype: tl.constexpr = like.dtype.element_ty  # of the model
    column = tl.arange(0, BLOCK)
    is_in = column < E
    row = tl.program_id(0).to(tl.int64)
    place = row * E + column
    scale = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)  # loaded early, in parallel with the sum
    output_scale = 1.0
    if row_scales is not None:
        output_scale = tl.load(output_scales + column, mask=is_in, other=0.0)
    wait_for_inputs()
    value = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32)
    if PARTS > 1:  # a split product: its sum is rounded as the whole product would be
        for part in range(1, PARTS):
            value += tl.load(x + part * (num_rows * E) + place, mask=is_in, other=0.0)
        value = value.to(dtype).to(tl.float32)
    if row_scales is not None:  # so is a product of FP8
        value = (value * (tl.load(row_scales + row) * output_scale)).to(dtype).to(tl.float32)
    if residual is not None:
        if HAS_FACTOR:
            value = (value * factor).to(dtype).to(tl.float32)
        value += tl.load(residual + place, mask=is_in, other=0.0).to(tl.float32)
        if HAS_TOTAL_FACTOR:
            value = value.to(dtype).to(tl.float32) * total_factor
        rounded = value.to(dtype)  # the norm uses the rounded value that the next layers read
        tl.store(residual + place, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / E + eps)
    value = (value * scale).to(dtype)
    if out_scales is None:
        tl.store(out + place, value, mask=is_in)
    else:
        store_in_fp8(value.to(tl.float32), out, out_scales, row, stride, E, BLOCK, GROUP, MAX)


@triton.jit(do_not_specialize=["stride"])
def _norm_columns(x, weight, eps, stride, FIRST: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    is_in = column < E
    place = x + tl.program_id(0).to(tl.int64) * stride + FIRST + column
    scale = tl.load(weight + column, mask=is_in, other=0.0)
    value = tl.load(place, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / E + eps)
    tl.store(place, (value * scale).to(x.dtype.element_ty), mask=is_in)


@triton.jit
def _gated(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    num_blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    column = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_in = column < F
    gate = tl.load(gate_up + row * 2 * F + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (_activated(gate, IS_SILU) * up).to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _gate_output(out, gate, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    num_blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_in = column < F
    value = tl.load(out + row * F + column, mask=is_in, other=0.0).to(tl.float32)
    factor = tl.sigmoid(tl.load(gate + row * stride + column, mask=is_in, other=0.0).to(tl.float32))
    tl.store(out + row * F + column, (value * factor).to(out.dtype.element_ty), mask=is_in)


@cache  # Triton's helpers take microseconds of host time, and every layer of a step calls this
def _row_shape(size: int) -> tuple[int, int]:
    """Return the padded width and the warps of a program that processes a row: at most 16 elements per thread."""
    width = triton.next_power_of_2(size)
    return width, min(max(width // 512, 4), 16)


def embed(tokens: Tensor, batch_indices: Tensor, last_samples: Tensor, embedding: Tensor, scale: float) -> Tensor:
    """Return rows [T, E] of the embedding [V, E], times `scale`. Token -1 is the last sample of the batch index."""
    num_rows, size = tokens.shape[0], embedding.shape[1]
    out = embedding.new_empty((num_rows, size))
    width, num_warps = _row_shape(size)
    _embed[(num_rows,)](
        tokens, batch_indices, last_samples, embedding, out, scale, E=size, BLOCK=width, num_warps=num_warps
    )  # fmt: skip
    return out


def norm(x: Outputs, weight: Tensor, eps: float, dtype: torch.dtype, *, is_graph: bool = False) -> Tensor:
    """Return the RMS norm of the rows of x [T, E] in `dtype`, or of the sum of its fp32 parts [parts, T, E]."""
    num_rows, size = _shape(x)
    out = weight.new_empty((num_rows, size), dtype=dtype)
    _launch_norm(x, None, weight, out, None, eps, is_graph=is_graph)
    return out


def add_norm(
    x: Outputs,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    factor: float = 1.0,
    total_factor: float = 1.0,
    *,
    is_graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of total_factor * (factor * x + residual), and that sum, which overwrites `residual`.

    Without a residual the sum is x.

    x is [T, E], or, with a residual, fp32 parts [parts, T, E].
    """
    total = _total(x, residual)
    out = torch.empty_like(total)
    _launch_norm(x, residual, weight, out, None, eps, factor, total_factor, is_graph=is_graph)
    return out, total


def add_norm_in_fp8(
    x: Outputs,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    factor: float = 1.0,
    total_factor: float = 1.0,
    *,
    has_groups: bool = False,
    is_graph: bool = False,
) -> tuple[Fp8Rows, Tensor]:
    """Return the same as `add_norm`, rounded to FP8."""
    total = _total(x, residual)
    rows = empty_rows(len(total), total.shape[1], total.device, has_groups=has_groups)
    _launch_norm(
        x, residual, weight, rows.codes, rows.scales, eps, factor, total_factor, has_groups=has_groups,
        is_graph=is_graph,
    )  # fmt: skip
    return rows, total


def _total(x: Outputs, residual: Tensor | None) -> Tensor:
    if residual is not None:
        return residual
    assert isinstance(x, Tensor), "a product is added to a residual"
    return x


def _shape(x: Outputs) -> tuple[int, int]:
    num_rows, size = (x.values if isinstance(x, Fp8Product) else x).shape[-2:]
    return num_rows, size


def _launch_norm(
    x: Outputs,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    out_scales: Tensor | None,
    eps: float,
    factor: float = 1.0,
    total_factor: float = 1.0,
    *,
    has_groups: bool = False,
    is_graph: bool,
) -> None:
    """Launch the norm kernel. `weight` [E] is fp32, whatever the model's dtype."""
    num_rows, size = _shape(x)
    values, row_scales, output_scales, num_parts = x, None, None, 1
    if isinstance(x, Fp8Product):
        values, row_scales, output_scales = x.values, x.row_scales, x.output_scales
    elif x.dim() == 3:
        num_parts = len(x)
    width, num_warps = _row_shape(size)
    group = stride = 0
    if out_scales is not None:
        stride = out_scales.stride(1)
        width, group = row_shape(size, has_groups=has_groups)
        num_warps = min(max(width // 256, 4), 16)
    _norm[(num_rows,)](
        values, row_scales, output_scales, residual, weight, out, out_scales, eps, factor, total_factor, num_rows,
        stride, E=size, BLOCK=width, GROUP=group, PARTS=num_parts, HAS_FACTOR=factor != 1,
        HAS_TOTAL_FACTOR=total_factor != 1, MAX=E4M3_MAX, num_warps=num_warps,
        launch_pdl=is_graph and is_early(num_rows),
    )  # fmt: skip


def norm_columns(x: Tensor, first: int, size: int, weight: Tensor, eps: float) -> None:
    """Replace columns [first, first + size) of the rows of x by their RMS norm. `weight` [size] is fp32."""
    width, num_warps = _row_shape(size)
    _norm_columns[(x.shape[0],)](
        x, weight, eps, x.stride(0), FIRST=first, E=size, BLOCK=width, num_warps=num_warps
    )  # fmt: skip


def step_tokens(tokens: Tensor, batch_indices: Tensor, last_samples: Tensor) -> Tensor:
    """Return token ids [T] as int64. Token -1 is the last sample of the batch index; padding rows have token 0."""
    sampled = last_samples[batch_indices.clamp(min=0)]
    known = torch.where(tokens < 0, sampled, tokens)
    return torch.where(batch_indices < 0, 0, known).long()


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up [T, F], given both side by side in one tensor [T, 2F]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, size))
    _gated[(num_rows * -(-size // GATED_BLOCK),)](
        gate_up, out, F=size, BLOCK=GATED_BLOCK, IS_SILU=activation is Activation.SILU, num_warps=4
    )
    return out


def gate_output(out: Tensor, gate: Tensor) -> Tensor:
    """Multiply out [T, F] by the sigmoids of gate [T, F], whose rows may be parts of longer rows. Returns `out`."""
    num_rows, size = out.shape
    _gate_output[(num_rows * -(-size // GATED_BLOCK),)](
        out, gate, gate.stride(0), F=size, BLOCK=GATED_BLOCK, num_warps=4
    )
    return out
