"""From qkv to attention in one launch: norms of the heads, rotation, and storing keys and values in their blocks.

The heads of a row are side by side: queries, keys, values. A block of the cache holds the keys of all heads, then the
values. Head H + i of a row is therefore head i of a block, key or value, and a program processes a few heads of any
kind: for values the norm is 1 and the angle 0. All tensors are contiguous, but the rows of qkv may be parts of longer
rows: gates follow in some models.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.fp8_kv import choose_scale, encode, magnitude

# T rows of the batch, H query heads, K kv heads, D head size, R rotated dimensions of a head, P positions

ELEMENTS = 1024  # per program, in whole heads: with NUM_WARPS, each thread has 16 bytes of each half
NUM_WARPS = 2


@triton.jit
def _weight(q_norm, k_norm, dim, is_query, is_key):
    # Two loads instead of one from a computed address, which the compiler would not recognise as aligned.
    return tl.where(is_query, tl.load(q_norm + dim, mask=is_query), tl.load(k_norm + dim, mask=is_key))


@triton.jit
def _times(x, weight, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    if ROUNDS_FIRST:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _peak(x, y, is_in):
    """Return the largest magnitude of each head [HEADS, 1]."""
    return tl.max(tl.where(is_in, tl.maximum(magnitude(x), magnitude(y)), 0), 1, keep_dims=True)


@triton.jit(do_not_specialize=["positions", "batch_indices", "tables", "max_blocks"])
def _rope_store(
    qkv, positions, batch_indices, tables, cosines, sines, layer, scales, q, q_norm, k_norm, query_factors, kept,
    eps, max_blocks, stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    batch_index = tl.load(batch_indices + row)
    is_real = batch_index >= 0  # else a padding row: it reads position 0 and does not write to the cache
    position = tl.where(is_real, tl.load(positions + row), 0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    is_query, is_key = head < H, (head >= H) & (head < H + K)
    is_head, turns = head < H + 2 * K, head < H + K
    pair = tl.arange(0, HALF_PAD)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    in_pair, in_rest = is_head & (pair < HALF), is_head & (rest < D)

    # All loads come before the first sum, so that they overlap.
    source = qkv + row * stride + head * D
    x1 = tl.load(source + pair, mask=in_pair, other=0.0).to(tl.float32)  # [HEADS, R / 2]
    x2 = tl.load(source + HALF + pair, mask=in_pair, other=0.0).to(tl.float32)
    x3 = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)  # [HEADS, D - R]: not rotated
    block = tl.load(tables + batch_index * max_blocks + position // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
    cosine, sine = 1.0, 0.0
    if cosines is not None:
        cosine = tl.load(cosines + position * HALF + pair, mask=turns & in_pair, other=1.0)
        sine = tl.load(sines + position * HALF + pair, mask=turns & in_pair, other=0.0)
    if q_norm is not None:
        w1 = _weight(q_norm, k_norm, pair, is_query & in_pair, is_key & in_pair)
        w2 = _weight(q_norm, k_norm, HALF + pair, is_query & in_pair, is_key & in_pair)
        w3 = _weight(q_norm, k_norm, rest, is_query & in_rest, is_key & in_rest)
        squares = tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) + tl.sum(x3 * x3, 1, keep_dims=True)
        scale = tl.rsqrt(squares / D + eps)  # [HEADS, 1]
        x1 = tl.where(turns, _times(x1 * scale, w1, dtype, ROUNDS_FIRST), x1)
        x2 = tl.where(turns, _times(x2 * scale, w2, dtype, ROUNDS_FIRST), x2)
        x3 = tl.where(turns, _times(x3 * scale, w3, dtype, ROUNDS_FIRST), x3)
        if HAS_VALUE_NORM:
            factor = tl.where(turns, 1.0, scale)
            x1, x2, x3 = x1 * factor, x2 * factor, x3 * factor
    y1, y2, y3 = x1, x2, x3
    if cosines is not None:
        y1 = x1 * cosine - x2 * sine
        y2 = x2 * cosine + x1 * sine
    y1, y2, y3 = y1.to(dtype), y2.to(dtype), y3.to(dtype)
    if query_factors is not None:
        factor = tl.where(is_query, tl.load(query_factors + position), 1.0).to(dtype)
        y1, y2, y3 = (y1 * factor).to(dtype), (y2 * factor).to(dtype), (y3 * factor).to(dtype)

    target = q + (row * H + head) * D
    tl.store(target + pair, y1, mask=in_pair & is_query)
    tl.store(target + HALF + pair, y2, mask=in_pair & is_query)
    tl.store(target + rest, y3, mask=in_rest & is_query)
    is_stored = is_real
    if kept is not None:
        is_stored = tl.load(kept + row) >= 0
    is_kept = (head >= H) & (head < tl.where(is_stored, H + 2 * K, H))
    vector = (block * 2 * K + head - H) * BLOCK_SIZE + position % BLOCK_SIZE  # [HEADS, 1]
    if scales is not None:
        scale = choose_scale(tl.maximum(_peak(y1, y2, in_pair), _peak(y3, y3, in_rest)))
        tl.store(scales + vector, scale.to(tl.bfloat16), mask=is_kept)
        y1, y2, y3 = encode(y1, scale), encode(y2, scale), encode(y3, scale)
    target = layer + vector * D
    tl.store(target + pair, y1, mask=in_pair & is_kept)
    tl.store(target + HALF + pair, y2, mask=in_pair & is_kept)
    tl.store(target + rest, y3, mask=in_rest & is_kept)


class Tiling(NamedTuple):
    """How the heads of a row are divided. Widths are powers of two."""

    num_programs: int
    heads: int  # per program
    half: int  # half of the rotated dimensions
    rest: int  # dimensions that are not rotated


@cache
def _tiling(num_heads: int, head_size: int, half: int) -> Tiling:
    """Return the tiling. Cached: Triton's helpers take microseconds of host time, and every layer calls them."""
    heads = max(ELEMENTS // triton.next_power_of_2(head_size), 1)
    rest = max(head_size - 2 * half, 1)
    return Tiling(triton.cdiv(num_heads, heads), heads, triton.next_power_of_2(half), triton.next_power_of_2(rest))


def rope_store(
    qkv: Tensor,  # [T, (H + 2K) * D]: rows may be apart
    positions: Tensor,  # [T] int32
    batch_indices: Tensor,  # [T] int32: rows of `tables`; -1: a padding row
    tables: Tensor,  # [batch_indices, most blocks] int32
    cosines: Tensor | None,  # [P, R / 2] fp32; None: no rotation
    sines: Tensor | None,  # [P, R / 2] fp32
    layer: Tensor,  # [blocks, 2, K, block size, D]
    num_heads: int,
    q_norm: Tensor | None,  # [D] fp32; both norms or none
    k_norm: Tensor | None,  # [D] fp32
    eps: float,
    *,
    rounds_first: bool = False,  # round to the type of qkv before the weight of a norm as well as after it
    query_factors: Tensor | None = None,  # [P] fp32: queries are multiplied by it
    kept: Tensor | None = None,  # [T] int32; -1: the row's keys are in a shared block already, and are not stored
    has_value_norm: bool = False,  # values are normed without a weight
    is_shared: bool = False,  # qkv holds queries only, and `layer` is not changed
    scales: Tensor | None = None,  # [blocks, 2, K, block size]: `layer` holds FP8
) -> Tensor:
    """Norm and rotate queries and keys. Return the queries [T, H, D]; store keys and values in `layer`."""
    num_rows = qkv.shape[0]
    _, _, num_kv_heads, block_size, head_size = layer.shape
    num_kv_heads = 0 if is_shared else num_kv_heads
    half = head_size // 2 if cosines is None else cosines.shape[1]
    tiling = _tiling(num_heads + 2 * num_kv_heads, head_size, half)
    q = qkv.new_empty((num_rows, num_heads, head_size))
    _rope_store[(num_rows, tiling.num_programs)](
        qkv, positions, batch_indices, tables, cosines, sines, layer, scales, q, q_norm, k_norm, query_factors, kept,
        eps, tables.stride(0), qkv.stride(0),
        H=num_heads, K=num_kv_heads, D=head_size, HALF=half, BLOCK_SIZE=block_size,
        HEADS=tiling.heads, HALF_PAD=tiling.half, REST_PAD=tiling.rest, ROUNDS_FIRST=rounds_first,
        HAS_VALUE_NORM=has_value_norm,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return q
