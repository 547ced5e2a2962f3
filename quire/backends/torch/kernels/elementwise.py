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


@triton.jit(do_not_specialize=["stride_part"])
def _norm(
    x,
    residual,
    weight,
    out,
    eps,
    factor,
    total_factor,
    stride_part,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_TOTAL_FACTOR: tl.constexpr,
):
    let_next_start()
    column = tl.arange(0, BLOCK)
    is_in = column < E
    place = tl.program_id(0).to(tl.int64) * E + column
    scale = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)  # loaded early, in parallel with the sum
    wait_for_inputs()
    value = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32)
    if PARTS > 1:  # a split product: its sum is rounded as the whole product would be
        for part in range(1, PARTS):
            value += tl.load(x + part * stride_part + place, mask=is_in, other=0.0)
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if residual is not None:
        if HAS_FACTOR:
            value = (value * factor).to(out.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + place, mask=is_in, other=0.0).to(tl.float32)
        if HAS_TOTAL_FACTOR:
            value = value.to(out.dtype.element_ty).to(tl.float32) * total_factor
        rounded = value.to(out.dtype.element_ty)  # the norm uses the rounded value that the next layers read
        tl.store(residual + place, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / E + eps)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=is_in)


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
    inner = gate
    if not IS_SILU:  # gelu with tanh: (1 + tanh(a)) / 2 is the sigmoid of 2a; 1.5957... is 2 * sqrt(2 / pi)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * F + column, (gate * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=is_in)


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


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, is_graph: bool = False) -> Tensor:
    """Return the RMS norm of the rows of x [T, E] in `dtype`, or of the sum of its fp32 parts [parts, T, E]."""
    return _normed(x, None, weight, eps, dtype, is_graph=is_graph)


def add_norm(
    x: Tensor,
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
    total = x if residual is None else residual
    return _normed(x, residual, weight, eps, total.dtype, factor, total_factor, is_graph=is_graph), total


def _normed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    factor: float = 1.0,
    total_factor: float = 1.0,
    *,
    is_graph: bool,
) -> Tensor:
    """Launch the norm kernel. `weight` [E] is fp32, whatever the model's dtype."""
    num_rows, size = x.shape[-2:]
    num_parts = len(x) if x.dim() == 3 else 1
    out = x.new_empty((num_rows, size), dtype=dtype)
    width, num_warps = _row_shape(size)
    _norm[(num_rows,)](
        x, residual, weight, out, eps, factor, total_factor, num_rows * size,
        E=size, BLOCK=width, PARTS=num_parts, HAS_FACTOR=factor != 1, HAS_TOTAL_FACTOR=total_factor != 1,
        num_warps=num_warps, launch_pdl=is_graph and is_early(num_rows),
    )  # fmt: skip
    return out


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
