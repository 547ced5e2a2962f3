"""The gated delta net: one launch for decodes, four for prompts.

The state of a value head is a matrix S [K, V]. With key k, value v, query q, decay e = exp(g) and beta of a row:
S = e * S; d = (v - S^T k) * beta; S = S + k d^T; the output is S^T q. A decode reads and writes its state once, and
needs no second pass over it: S^T q of the new state is e * (S^T q) + d * (k . q) of the old one.

A prompt is processed in chunks of up to 64 rows. With G_i the sum of g up to row i of a chunk, all d of the chunk are
    D = U - W S,   U = X diag(beta) V,   W = X diag(beta * exp(G)) K,   X = (1 + A)^-1,
    A_ij = beta_i * (k_i . k_j) * exp(G_i - G_j) for j < i,
where S is the state before the chunk. U and W do not depend on it: after the convolution (`_convolved`), `_prepare`
computes them for all chunks in parallel. `_pass_states` goes through the chunks of a sequence, computes D and the next
state, and keeps every state for `_finish`, which computes the outputs of all chunks in parallel:
    O = diag(exp(G)) Q S + P D,   P_ij = (q_i . k_j) * exp(G_i - G_j) for j <= i.
Keys and queries stay as the convolution gives them: the factors of their L2 norms are applied to the other operand or
to the product, in fp32. So the operands of the tensor cores are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.chaining import is_early, let_next_start, wait_for_inputs
from quire.backends.torch.kernels.convolution import (
    MAX_TAPS,
    MIN_TAPS,
    ROWS,
    convolve,
    empty_work,
    old_inputs,
    padded,
    store_inputs,
    store_row,
    weighted,
)
from quire.backends.torch.state_work import CHUNK_ROWS, StateWork
from quire.weights.spec import DeltaNetSpec

# T rows of the batch, C channels, HK key heads, HV value heads, K and V sizes of a key and a value, M rows of a chunk

L2_EPS = tl.constexpr(1e-6)
MIN_SIZE, MAX_SIZE = 16, 256  # of a key or a value: tensor cores need 16, registers limit the rest
LEVELS = CHUNK_ROWS.bit_length() - 1
# Size of keys and values from which 16-bit numbers are multiplied as they are. With keys of 16 and values of 32,
# products of bf16 were wrong from the 17th row of a chunk on (H200, Triton 3.6; docs/experiments.md). Smaller heads,
# which no known model has, are multiplied in fp32.
MIN_HALF_SIZE = tl.constexpr(64)
PREPARE_REGISTERS = 168  # so that three programs of four warps run on a multiprocessor


class Passing(NamedTuple):
    """How `_pass_states` divides a state. Measured with benchmarks/delta_net.py, last in commit 0126243d."""

    columns: int  # of a program
    num_warps: int
    num_stages: int  # chunks being loaded: more need more shared memory, and fewer programs run at a time


FEW = Passing(columns=32, num_warps=4, num_stages=4)  # one program at a time on a multiprocessor: least time of a chunk
MANY = Passing(columns=64, num_warps=4, num_stages=2)
MAX_FEW = 132  # programs of FEW: the multiprocessors of an H200


class DeltaWeights(NamedTuple):
    """Weights of one layer, besides its projections."""

    taps: Tensor  # [taps, C], of the convolution
    decay: Tensor  # [HV] fp32: -exp(A_log)
    bias: Tensor  # [HV] fp32: dt_bias
    norm: Tensor  # [V] fp32
    eps: float  # of the norm


class _Chunked(NamedTuple):
    """Intermediate results between the launches of a prompt. Rows outside of chunks are not written."""

    mixed: Tensor  # [T, C]: convolved queries, keys and values
    norms: Tensor  # [T, 2 * HK] fp32: factors of the queries and keys
    w: Tensor  # [T, HV, K]
    d: Tensor  # [T, HV, V]: first U, then D
    products: Tensor  # [T, HV, M]: P
    q_factors: Tensor  # [HV, T] fp32: of the rows of Q S
    k_factors: Tensor  # [HV, T] fp32: of the keys in the next state
    decays: Tensor  # [chunks, HV] fp32: of the state over a chunk
    states: Tensor  # [chunks, HV, K, V]: before each chunk, in the model's type


@triton.jit
def _gates(x, decay, bias, head, mask, FIRST: tl.constexpr, HV: tl.constexpr):
    """Return g and beta of rows at `x`, 0 where masked."""
    b = tl.load(x + FIRST + head, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(x + FIRST + HV + head, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    return tl.where(mask, tl.load(decay + head) * softplus, 0.0), tl.where(mask, tl.sigmoid(b), 0.0)


@triton.jit
def _silu(y, dtype: tl.constexpr):
    return (y * tl.sigmoid(y)).to(dtype)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _update(
    state, q, k, kq, x, taps, decay, bias, norm, conv, matrices, source, target, head, out, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Update the state [K, V] of one value head of a row, and write its output."""
    dtype: tl.constexpr = out.dtype.element_ty
    i, j = tl.arange(0, K), tl.arange(0, V)
    at = 2 * HK * K + head * V + j
    now, z, scale = tl.load(x + at), tl.load(x + C + head * V + j).to(tl.float32), tl.load(norm + j)
    one, two, three = old_inputs(conv, source, at, j < V, C, TAPS)
    v = _silu(weighted(now, one, two, three, taps, at, j < V, C, TAPS), dtype).to(tl.float32)
    g, beta = _gates(x, decay, bias, head, True, C + HV * V, HV)
    shrink = tl.exp(g)
    by_key, by_query = tl.reduce((state * k[:, None], state * q[:, None]), 0, _add_two)
    d = (v - shrink * by_key) * beta
    place = (target * HV + head) * (K * V) + i[:, None] * V + j[None, :]
    tl.store(matrices + place, shrink * state + k[:, None] * d[None, :])
    o = shrink * by_query + d * kq
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    tl.store(out + head * V + j, (o * scale * z * tl.sigmoid(z)).to(dtype))
    tl.debug_barrier()  # all threads have read: the target may be the source
    store_row(now, one, two, conv, target, at, j < V, C, TAPS)


@triton.jit
def _decode(
    projected, taps, decay, bias, norm, conv, matrices, decodes, out, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    let_next_start()
    # A program has one value head. If the target is the source, the first program of a key head has all its value
    # heads, because the others would read inputs of the query and the key that it writes.
    GROUP: tl.constexpr = HV // HK
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(decodes + row * 2).to(tl.int64), tl.load(decodes + row * 2 + 1).to(tl.int64)
    key_head = head % HK if IS_TILED else head // GROUP
    is_first = (head < HK) if IS_TILED else (head % GROUP == 0)
    i, j, both = tl.arange(0, K), tl.arange(0, V), tl.arange(0, 2 * K)
    x = projected + row * WIDTH
    at = both // K * (HK * K) + key_head * K + both % K  # channels of the query, then of the key
    is_skipped = (target == 0) | ((target == source) & (is_first == 0))
    place = i[:, None] * V + j[None, :]
    has_state = (source != 0) & (is_skipped == 0)
    # No other kernel of the step writes the states of this layer, so they are loaded before the wait.
    state = tl.load(matrices + (source * HV + head) * (K * V) + place, mask=has_state, other=0.0)
    # One tensor for both, with an element for each thread: the compiler would repeat smaller loads in every warp.
    one, two, three = old_inputs(conv, source, at, both < 2 * K, C, TAPS)
    wait_for_inputs()
    now = tl.load(x + at)
    if is_skipped:
        return
    qk = _silu(weighted(now, one, two, three, taps, at, both < 2 * K, C, TAPS), out.dtype.element_ty).to(tl.float32)
    q, k = tl.split(tl.trans(tl.reshape(qk, (2, K))))
    qq, kk, kq = tl.reduce((q * q, k * k, k * q), 0, _add_three)
    q_scale, k_scale = tl.rsqrt(qq + L2_EPS) * K**-0.5, tl.rsqrt(kk + L2_EPS)
    q, k, kq = q * q_scale, k * k_scale, kq * q_scale * k_scale
    out += row * (HV * V)
    _update(
        state, q, k, kq, x, taps, decay, bias, norm, conv, matrices, source, target, head, out, eps,
        HK, HV, K, V, C, TAPS,
    )  # fmt: skip
    if GROUP > 1:
        if target == source:
            for _ in range(1, GROUP):
                head += HK if IS_TILED else 1
                state = tl.load(matrices + (source * HV + head) * (K * V) + place)
                _update(
                    state, q, k, kq, x, taps, decay, bias, norm, conv, matrices, source, target, head, out, eps,
                    HK, HV, K, V, C, TAPS,
                )  # fmt: skip
    if is_first:
        store_row(now, one, two, conv, target, at, both < 2 * K, C, TAPS)


@triton.jit
def _convolved(
    projected, taps, conv, chunks, mixed, norms,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # A program has some rows of a chunk and one head: a query, a key or a value.
    chunk = chunks + tl.program_id(0) // (M // ROWS) * 6
    skipped = tl.program_id(0) % (M // ROWS) * ROWS
    num_rows = tl.load(chunk + 1) - skipped
    if num_rows <= 0:
        return
    row, before, source = tl.load(chunk) + skipped, tl.load(chunk + 2) + skipped, tl.load(chunk + 3)
    head = tl.program_id(1)
    is_value = head >= 2 * HK
    n, m = tl.arange(0, N), tl.arange(0, ROWS)
    channel = tl.where(is_value, 2 * HK * K + (head - 2 * HK) * V, head * K) + n
    is_in = n < tl.where(is_value, V, K)
    y = convolve(projected, conv, taps, row, num_rows, before, source, channel, is_in, C, WIDTH, TAPS, ROWS, False)
    y = _silu(y, mixed.dtype.element_ty)
    rows = (row + m).to(tl.int64)
    tl.store(mixed + rows[:, None] * C + channel[None, :], y, mask=(m < num_rows)[:, None] & is_in[None, :])
    if head < 2 * HK:
        norm = tl.rsqrt(tl.sum(y.to(tl.float32) * y.to(tl.float32), 1) + L2_EPS)
        norm *= tl.where(head < HK, K**-0.5, 1.0)
        tl.store(norms + rows * (2 * HK) + head, norm, mask=m < num_rows)


@triton.jit
def _product(a, b, dtype: tl.constexpr):
    return tl.dot(a.to(dtype), b.to(dtype), input_precision="ieee")


@triton.jit
def _inverse(a, M: tl.constexpr, LEVELS: tl.constexpr, dtype: tl.constexpr):
    """Return the inverse of 1 + a, for a strictly lower triangular [M, M], from products in `dtype`.

    If X inverts the diagonal blocks of size s, and L has the blocks below them within blocks of size 2s, then
    X - X L X inverts the diagonal blocks of size 2s.
    """
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        is_below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        x -= _product(_product(x, tl.where(is_below, a, 0.0), dtype), x, dtype)
    return x


@triton.jit(do_not_specialize=["num_all"])
def _prepare(
    projected, decay, bias, chunks, mixed, norms, w, u, products, q_factors, k_factors, decays, num_all,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = mixed.dtype.element_ty
    # The entries of the inverse are at most 1, and fp16 is more exact there than bf16.
    inverse_dtype: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    factor_dtype: tl.constexpr = dtype if K >= MIN_HALF_SIZE and V >= MIN_HALF_SIZE else tl.float32
    chunk = chunks + tl.program_id(0) * 6
    row, num_rows = tl.load(chunk), tl.load(chunk + 1)
    if num_rows == 0:
        return
    head = tl.program_id(1)
    key_head = head % HK if IS_TILED else head // (HV // HK)
    i, j, m = tl.arange(0, K), tl.arange(0, V), tl.arange(0, M)
    rows, is_row = (row + m).to(tl.int64), m < num_rows
    is_in = is_row[:, None]
    at = mixed + rows[:, None] * C
    k = tl.load(at + (HK + key_head) * K + i[None, :], mask=is_in, other=0.0).to(factor_dtype)
    q = tl.load(at + key_head * K + i[None, :], mask=is_in, other=0.0).to(factor_dtype)
    q_scale = tl.load(norms + rows * (2 * HK) + key_head, mask=is_row, other=0.0)
    k_scale = tl.load(norms + rows * (2 * HK) + HK + key_head, mask=is_row, other=0.0)
    g, beta = _gates(projected + rows * WIDTH, decay, bias, head, is_row, C + HV * V, HV)
    total = tl.cumsum(g, 0)
    whole = tl.sum(tl.where(m == M - 1, total, 0.0), 0)  # the same rounding as in `total`
    tl.store(q_factors + head * num_all + rows, q_scale * tl.exp(total), mask=is_row)
    tl.store(k_factors + head * num_all + rows, k_scale * tl.exp(whole - total), mask=is_row)
    tl.store(decays + tl.program_id(0) * HV + head, tl.exp(whole))

    is_before = m[:, None] >= m[None, :]
    shrink = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)) * k_scale[None, :]
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * shrink * (beta * k_scale)[:, None]
    p = tl.dot(q, tl.trans(k), input_precision="ieee") * shrink * q_scale[:, None]
    at = (rows * HV + head)[:, None]
    tl.store(products + at * M + m[None, :], tl.where(is_before, p, 0.0).to(dtype), mask=is_in)
    x = _inverse(tl.where(m[:, None] > m[None, :], a, 0.0), M, LEVELS, inverse_dtype)
    wide = tl.dot((x * (beta * k_scale * tl.exp(total))[None, :]).to(factor_dtype), k, input_precision="ieee")
    tl.store(w + at * K + i[None, :], wide.to(dtype), mask=is_in)
    v = tl.load(mixed + rows[:, None] * C + 2 * HK * K + head * V + j[None, :], mask=is_in, other=0.0)
    wide = tl.dot((x * beta[None, :]).to(factor_dtype), v.to(factor_dtype), input_precision="ieee")
    tl.store(u + at * V + j[None, :], wide.to(dtype), mask=is_in)


@triton.jit(do_not_specialize=["num_all"])
def _pass_states(
    projected, conv, matrices, chunks, sequences, mixed, w, d, k_factors, decays, states, num_all,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    SHARE: tl.constexpr, SHARE_PAD: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = states.dtype.element_ty
    factor_dtype: tl.constexpr = dtype if K >= MIN_HALF_SIZE and V >= MIN_HALF_SIZE else tl.float32
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(sequences + sequence * 2), tl.load(sequences + sequence * 2 + 1)
    if first == last:
        return
    key_head = head % HK if IS_TILED else head // (HV // HK)
    i, j, m = tl.arange(0, K), split * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, M)
    place = i[:, None] * V + j[None, :]
    row, source = tl.load(chunks + first * 6), tl.load(chunks + first * 6 + 3)
    first_at = matrices + (source.to(tl.int64) * HV + head) * (K * V)
    state = tl.load(first_at + place, mask=source != 0, other=0.0)
    share = (head * (V // COLUMNS) + split) * SHARE
    channel = share + tl.arange(0, SHARE_PAD)
    is_in = (channel < share + SHARE) & (channel < C)
    while first < last:
        target, end = tl.load(chunks + first * 6 + 4), tl.load(chunks + first * 6 + 5)
        last_row, last_rows = tl.load(chunks + end * 6 - 6), tl.load(chunks + end * 6 - 5)
        # No condition and no table of rows inside, so that the compiler loads ahead: all chunks but the last are full.
        for index in range(first, end):
            rows = (row + (index - first) * M + m).to(tl.int64)
            is_row = rows < last_row + last_rows
            keys = tl.load(
                mixed + rows[:, None] * C + (HK + key_head) * K + i[None, :], mask=is_row[:, None], other=0.0
            )
            wide = tl.load(w + (rows * HV + head)[:, None] * K + i[None, :], mask=is_row[:, None], other=0.0)
            at = d + (rows * HV + head)[:, None] * V + j[None, :]
            u = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
            factor = tl.load(k_factors + head * num_all + rows, mask=is_row, other=0.0)
            shrink = tl.load(decays + index * HV + head)
            rounded = state.to(dtype)
            tl.store(states + (index * HV + head).to(tl.int64) * (K * V) + place, rounded)
            new = u - tl.dot(wide.to(factor_dtype), rounded.to(factor_dtype), input_precision="ieee")
            tl.store(at, new.to(dtype), mask=is_row[:, None])
            keys = tl.trans(keys).to(factor_dtype)
            state = shrink * state + tl.dot(keys, (new * factor[:, None]).to(factor_dtype), input_precision="ieee")
        tl.store(matrices + (target.to(tl.int64) * HV + head) * (K * V) + place, state)
        before = tl.load(chunks + end * 6 - 4)
        store_inputs(
            projected, conv, last_row, last_rows, before, source, target, channel, is_in, C, WIDTH, TAPS, PAD, False
        )
        row, first = last_row + last_rows, end


@triton.jit(do_not_specialize=["num_all"])
def _finish(
    projected, chunks, mixed, d, products, q_factors, states, norm, out, eps, num_all,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
    row, num_rows = tl.load(chunks + index * 6), tl.load(chunks + index * 6 + 1)
    if num_rows == 0:
        return
    key_head = head % HK if IS_TILED else head // (HV // HK)
    i, j, m = tl.arange(0, K), tl.arange(0, V), tl.arange(0, M)
    rows, is_row = (row + m).to(tl.int64), (m < num_rows)
    at = rows * HV + head
    queries = tl.load(mixed + rows[:, None] * C + key_head * K + i[None, :], mask=is_row[:, None], other=0.0)
    state = tl.load(states + (index * HV + head).to(tl.int64) * (K * V) + i[:, None] * V + j[None, :])
    p = tl.load(products + at[:, None] * M + m[None, :], mask=is_row[:, None], other=0.0)
    new = tl.load(d + at[:, None] * V + j[None, :], mask=is_row[:, None], other=0.0)
    z = tl.load(projected + rows[:, None] * WIDTH + C + head * V + j[None, :], mask=is_row[:, None], other=0.0)
    z = z.to(tl.float32)
    factor = tl.load(q_factors + head * num_all + rows, mask=is_row, other=0.0)
    factor_dtype: tl.constexpr = p.dtype if K >= MIN_HALF_SIZE and V >= MIN_HALF_SIZE else tl.float32
    o = tl.dot(queries.to(factor_dtype), state.to(factor_dtype), input_precision="ieee") * factor[:, None]
    o = tl.dot(p.to(factor_dtype), new.to(factor_dtype), acc=o, input_precision="ieee")
    o *= tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None] * tl.load(norm + j)[None, :]
    o *= z * tl.sigmoid(z)
    tl.store(out + at[:, None] * V + j[None, :], o.to(out.dtype.element_ty), mask=is_row[:, None])


def is_supported(spec: DeltaNetSpec) -> bool:
    sizes = (spec.key_head_size, spec.value_head_size)
    has_sizes = all(MIN_SIZE <= size <= MAX_SIZE and size & (size - 1) == 0 for size in sizes)
    return has_sizes and MIN_TAPS <= spec.num_taps <= MAX_TAPS


def projected_size(spec: DeltaNetSpec) -> int:
    """Return the columns of the projection: queries, keys, values, z, b, a."""
    return spec.num_channels + spec.value_size + 2 * spec.num_value_heads


def delta_net(
    projected: Tensor,  # [T, C + HV * V + 2 * HV]: queries, keys, values, z, b, a
    weights: DeltaWeights,
    spec: DeltaNetSpec,
    conv: Tensor,  # [slots, taps - 1, C]
    matrices: Tensor,  # [slots, HV, K, V] fp32
    work: StateWork,
    *,
    is_graph: bool = False,
) -> Tensor:
    """Return the normed and gated outputs [T, HV * V], and update the states."""
    out = projected.new_empty((len(projected), spec.num_value_heads * spec.value_head_size))
    if len(work.decodes):
        decode(projected, weights, spec, conv, matrices, work.decodes, out, is_graph=is_graph)
    if len(work.sequences):
        chunked = prepare(projected, weights, spec, conv, work.chunks)
        pass_states(projected, spec, conv, matrices, work, chunked)
        finish(projected, weights, spec, work.chunks, chunked, out)
    return out


def _sizes(spec: DeltaNetSpec) -> dict[str, int | bool]:
    """Return what the kernels of states are compiled for. `WIDTH`: of a projected row."""
    return {
        "HK": spec.num_key_heads,
        "HV": spec.num_value_heads,
        "K": spec.key_head_size,
        "V": spec.value_head_size,
        "C": spec.num_channels,
        "WIDTH": projected_size(spec),
        "IS_TILED": spec.is_tiled,
    }


def decode(
    projected: Tensor,
    weights: DeltaWeights,
    spec: DeltaNetSpec,
    conv: Tensor,
    matrices: Tensor,
    decodes: Tensor,  # [rows, DECODE_FIELDS]
    out: Tensor,
    *,
    is_graph: bool = False,
) -> None:
    """Write the outputs of the first rows, each of which belongs to a different sequence."""
    _decode[(len(decodes), spec.num_value_heads)](
        projected, weights.taps, weights.decay, weights.bias, weights.norm, conv, matrices, decodes, out, weights.eps,
        TAPS=spec.num_taps, num_warps=4, num_stages=1, launch_pdl=is_graph and is_early(len(decodes)), **_sizes(spec),
    )  # fmt: skip


def prepare(projected: Tensor, weights: DeltaWeights, spec: DeltaNetSpec, conv: Tensor, chunks: Tensor) -> _Chunked:
    """Compute everything of the chunks that does not depend on states."""
    num_rows, num_chunks = len(projected), len(chunks)
    heads, key_size, value_size = spec.num_value_heads, spec.key_head_size, spec.value_head_size

    def floats(*sizes: int) -> Tensor:
        return projected.new_empty(sizes, dtype=torch.float32)

    chunked = _Chunked(
        mixed=projected.new_empty((num_rows, spec.num_channels)),
        norms=floats(num_rows, 2 * spec.num_key_heads),
        w=projected.new_empty((num_rows, heads, key_size)),
        d=projected.new_empty((num_rows, heads, value_size)),
        products=projected.new_empty((num_rows, heads, CHUNK_ROWS)),
        q_factors=floats(heads, num_rows),
        k_factors=floats(heads, num_rows),
        decays=floats(num_chunks, heads),
        states=projected.new_empty((num_chunks, heads, key_size, value_size)),
    )
    _convolved[(num_chunks * (CHUNK_ROWS // ROWS), 2 * spec.num_key_heads + heads)](
        projected, weights.taps, conv, chunks, chunked.mixed, chunked.norms,
        HK=spec.num_key_heads, K=key_size, V=value_size, C=spec.num_channels, WIDTH=projected_size(spec),
        TAPS=spec.num_taps, M=CHUNK_ROWS, ROWS=ROWS, N=max(key_size, value_size), num_warps=2,
    )  # fmt: skip
    _prepare[(num_chunks, heads)](
        projected, weights.decay, weights.bias, chunks, *chunked[:-1], num_rows,
        M=CHUNK_ROWS, LEVELS=LEVELS, num_warps=4, maxnreg=PREPARE_REGISTERS, **_sizes(spec),
    )  # fmt: skip
    return chunked


def _passing(spec: DeltaNetSpec, num_sequences: int) -> Passing:
    return FEW if num_sequences * spec.value_size <= MAX_FEW * FEW.columns else MANY


def pass_states(
    projected: Tensor,
    spec: DeltaNetSpec,
    conv: Tensor,
    matrices: Tensor,
    work: StateWork,
    chunked: _Chunked,
) -> None:
    """Compute the states before the chunks, and store those after them where the chunks say so."""
    passing = _passing(spec, len(work.sequences))
    columns = min(spec.value_head_size, passing.columns)
    num_splits = spec.value_head_size // columns
    share = -(-spec.num_channels // (spec.num_value_heads * num_splits))
    _pass_states[(len(work.sequences), spec.num_value_heads, num_splits)](
        projected, conv, matrices, work.chunks, work.sequences,
        chunked.mixed, chunked.w, chunked.d, chunked.k_factors, chunked.decays, chunked.states, len(projected),
        TAPS=spec.num_taps, PAD=padded(spec.num_taps), M=CHUNK_ROWS, COLUMNS=columns,
        SHARE=share, SHARE_PAD=padded(share),
        num_warps=passing.num_warps, num_stages=passing.num_stages, **_sizes(spec),
    )  # fmt: skip


def finish(
    projected: Tensor, weights: DeltaWeights, spec: DeltaNetSpec, chunks: Tensor, chunked: _Chunked, out: Tensor
) -> None:
    """Write the outputs of the rows of all chunks."""
    _finish[(len(chunks), spec.num_value_heads)](
        projected, chunks, chunked.mixed, chunked.d, chunked.products, chunked.q_factors, chunked.states,
        weights.norm, out, weights.eps, len(projected), M=CHUNK_ROWS, num_warps=8, **_sizes(spec),
    )  # fmt: skip


def delta_net_calls(spec: DeltaNetSpec, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return launches, with shapes only, of all kernels of `delta_net`."""

    def meta(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    def floats(size: int) -> Tensor:
        return meta(size, kind=torch.float32)

    heads, channels = spec.num_value_heads, spec.num_channels
    weights = DeltaWeights(
        meta(spec.num_taps, channels), floats(heads), floats(heads), floats(spec.value_head_size), 1e-6
    )
    conv = meta(2, spec.num_taps - 1, channels)
    matrices = meta(2, heads, spec.key_head_size, spec.value_head_size, kind=torch.float32)
    projected = meta(2, projected_size(spec))
    run = partial(delta_net, projected, weights, spec, conv, matrices)
    works = (empty_work(1, 1, 1), empty_work(0, 1, MAX_FEW))  # decodes and one prompt, many prompts
    return [*(partial(run, work) for work in works), partial(run, empty_work(1, 0, 0), is_graph=True)]
