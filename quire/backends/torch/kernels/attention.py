"""Attention over the paged cache, driven by a list of work items from `quire.backends.torch.attention_work`.

An item consists of query rows, a range of keys and a block table. Prompts, decodes, chunks after a cached prefix and
the shared prefix of siblings are all such items, so one kernel is enough. A row whose keys are in one item is written
directly; if they are split over several items, each writes a part and `merge` joins the parts. A program processes one
item and one KV head, so each block of that head is read once for all its query heads.

Keys and values in FP8 are converted to fp16 when they are loaded. Their scales multiply the scores and the weights of
the softmax, which are fewer than the numbers of keys and values.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.chaining import let_next_start
from quire.backends.torch.kernels.fp8_kv import decode, scale_queries

# T rows of the batch, H query heads, K kv heads, G = H / K, D head size, P parts

ITEM_FIELDS = 6  # first row, number of rows, batch index of the block table, first key, last key + 1, index of the part
LOG2E = 1.4426950408889634
MERGED = 16  # parts merged at a time


class Tiling(NamedTuple):
    """How a program divides its item. Measured in docs/performance.md."""

    rows: int  # query rows times heads of the group: at least 16, for the matrix units
    keys: int  # per iteration
    num_warps: int
    num_stages: int  # tiles of keys being loaded


NARROW = Tiling(rows=16, keys=128, num_warps=4, num_stages=2)  # items of one token: decodes
WIDE = Tiling(rows=128, keys=64, num_warps=4, num_stages=2)  # items of many: prompts, and shared prefixes of siblings
WIDE_FP8 = WIDE._replace(num_warps=8)  # with 4 warps, the converted keys and values do not fit the registers
ROW_BYTES = 256  # largest key for these tilings; larger ones would not fit the shared memory of smaller cards


@triton.jit
def _load(layer, scales, place, d, dtype: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return keys [D, N] and values [N, D], without their scales. Values follow VALUES vectors after their keys."""
    if D == D_PAD:
        keys = tl.load(layer + place[None, :] * D + d[:, None])
        values = tl.load(layer + VALUES * D + place[:, None] * D + d[None, :])
    else:
        keys = tl.load(layer + place[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0)
        values = tl.load(layer + VALUES * D + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0)
    if scales is not None:
        keys, values = decode(keys, dtype), decode(values, dtype)
    return keys, values


@triton.jit
def _mask(scores, keys_at, high, position, window, HAS_WINDOW: tl.constexpr):
    """Return scores [M, N], minus infinity for keys that a row does not see."""
    is_seen = (keys_at < high)[None, :] & (keys_at[None, :] <= position[:, None])
    if HAS_WINDOW:
        is_seen = is_seen & (keys_at[None, :] > position[:, None] - window)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _scale_weights(weights, scales, is_key, highest):
    """Multiply weights [M, N] by the scales [N] of their values, relative to the highest scale so far.

    So weights stay at most 1, and are exact enough in fp16. Returns them, the highest scale, and the factor of what was
    summed before.
    """
    scales = tl.load(scales, mask=is_key, other=0.0).to(tl.float32)
    higher = tl.maximum(highest, tl.max(tl.where(scales == scales, scales, 0.0), 0))
    return weights * (scales / higher)[None, :], higher, highest / higher


@triton.jit
def _add_sink(sink, peak, total):
    """Add a score without a value to a softmax. Returns its peak, its sum and the factor of what was summed before."""
    higher = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - higher)
    return higher, total * shrink + tl.exp2(sink - higher), shrink


@triton.jit(do_not_specialize=["window", "stride_table"])
def _attend(
    q, layer, scales, tables, positions, items, first_parts, out, parts, lse, sinks,
    scale, cap, window, stride_q, stride_table, num_heads,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) * 6
    num_rows = tl.load(item + 1)
    if num_rows == 0:  # padding: the list is shorter than the grid
        return
    head = tl.program_id(1)
    row, batch_index, low, high, part = (
        tl.load(item), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    )  # fmt: skip
    m, d, n = tl.arange(0, M), tl.arange(0, D_PAD), tl.arange(0, N)
    is_row = m // G < num_rows
    rows = row + m // G  # [M]: of the batch
    heads = head * G + m % G
    position = tl.load(positions + rows, mask=is_row, other=-1)
    is_in = is_row[:, None] & (d < D)[None, :]
    queries = tl.load(q + rows[:, None] * stride_q + heads[:, None] * D + d[None, :], mask=is_in, other=0.0)  # [M, D]
    if HAS_WINDOW:  # no row sees keys before the first row's window, and blocks behind it may belong to others
        first = tl.min(tl.where(is_row, position, 2147483647), 0) - window + 1
        low = tl.maximum(low, first // BLOCK * BLOCK)
    peak = tl.full((M,), -1e30, tl.float32)  # finite: minus infinity minus itself is NaN
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D_PAD), tl.float32)
    row_scale, highest = total, 1.0  # used in FP8 only
    if scales is not None:
        queries, row_scale = scale_queries(queries)
        highest = tl.full((), 1e-37, tl.float32)  # of the scales of values
    for start in range(low, high, N):
        keys_at = start + n
        is_key = keys_at < high
        # Beyond the range the null block is read. Masked values have no weight, but must be finite.
        block = tl.load(tables + batch_index * stride_table + keys_at // BLOCK, mask=is_key, other=0).to(tl.int64)
        place = (block * 2 * K + head) * BLOCK + keys_at % BLOCK  # [N]
        keys, values = _load(layer, scales, place, d, queries.dtype, K * BLOCK, D, D_PAD)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale  # [M, N], in powers of two
        if scales is not None:
            scores = scores * row_scale[:, None] * tl.load(scales + place).to(tl.float32)[None, :]
        if HAS_CAP:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / cap)) + 1.0))
            scores *= 1.4426950408889634
        scores = _mask(scores, keys_at, high, position, window, HAS_WINDOW)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        if scales is not None:
            weights, highest, factor = _scale_weights(weights, scales + K * BLOCK + place, is_key, highest)
            shrink = shrink * factor
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = higher
    if scales is not None:
        mixed = mixed * highest
    first_part = tl.load(first_parts + rows, mask=is_row, other=0)
    is_whole = tl.load(first_parts + rows + 1, mask=is_row, other=0) - first_part == 0
    if sinks is not None:  # of a split row, `merge` adds it
        sink = tl.load(sinks + heads, mask=is_row & is_whole, other=-1e30).to(tl.float32) * 1.4426950408889634
        peak, total, shrink = _add_sink(sink, peak, total)
        mixed = mixed * shrink[:, None]
    total = tl.where(total == 0.0, 1.0, total)  # no key was seen: `merge` recognises that by the peak
    mixed = mixed / total[:, None]
    target = rows.to(tl.int64) * num_heads + heads
    tl.store(out + target[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=is_in & is_whole[:, None])
    target = (first_part + part).to(tl.int64) * num_heads + heads
    tl.store(parts + target[:, None] * D + d[None, :], mixed, mask=is_in & (is_whole == 0)[:, None])
    tl.store(lse + target, peak + tl.log2(total), mask=is_row & (is_whole == 0))


@triton.jit
def _merge(
    parts, lse, first_parts, out, sinks, num_heads, D: tl.constexpr, D_PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0)
    first = tl.load(first_parts + row)
    last = tl.load(first_parts + row + 1)
    if last == first:
        return
    head = tl.program_id(1)
    d, n = tl.arange(0, D_PAD), tl.arange(0, N)
    peak = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((D_PAD,), tl.float32)
    for start in range(first, last, N):
        part = (start + n).to(tl.int64)
        is_part = part < last
        target = part * num_heads + head
        height = tl.load(lse + target, mask=is_part, other=float("-inf"))  # [N]
        value = tl.load(
            parts + target[:, None] * D + d[None, :], mask=is_part[:, None] & (d < D)[None, :], other=0.0
        )  # [N, D]
        higher = tl.maximum(peak, tl.max(height, 0))
        weights = tl.exp2(height - higher)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * value, 0)
        peak = higher
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak, total, shrink = _add_sink(sink, peak, total)
        mixed = mixed * shrink
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    target = row.to(tl.int64) * num_heads + head
    tl.store(out + target * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


class Parts(NamedTuple):
    """Buffers for the parts of split rows. Shared by all layers, which run in sequence."""

    mixed: Tensor  # [P, H, D] fp32
    lse: Tensor  # [P, H] fp32: base-two logarithm of the part's softmax sum

    @classmethod
    def empty(cls, num_parts: int, num_heads: int, head_size: int, device: torch.device) -> Parts:
        mixed = torch.empty(num_parts, num_heads, head_size, dtype=torch.float32, device=device)
        return cls(mixed, torch.empty(num_parts, num_heads, dtype=torch.float32, device=device))


@cache  # Triton's own function takes microseconds, and every layer of a step calls it
def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


@cache
def tilings(head_size: int, itemsize: int, *, is_fp8: bool = False) -> tuple[Tiling, Tiling]:
    """Return NARROW and WIDE, or smaller tilings, for keys of this size. `itemsize`: of queries."""
    row_bytes = _power(head_size) * itemsize
    if row_bytes <= ROW_BYTES:
        return NARROW, WIDE_FP8 if is_fp8 else WIDE
    if row_bytes <= 2 * ROW_BYTES:
        return NARROW._replace(keys=64), WIDE._replace(rows=64, keys=32)
    return NARROW._replace(keys=32), WIDE._replace(rows=32, keys=32, num_stages=1)


def rows_per_item(tiling: Tiling, num_groups: int) -> int:
    """Return how many tokens an item of this tiling may hold."""
    return max(tiling.rows // num_groups, 1)


def attend(
    q: Tensor,  # [T, H, D]
    layer: Tensor,  # [blocks, 2, K, block size, D]
    tables: Tensor,  # [batch_indices, most blocks] int32
    positions: Tensor,  # [T] int32
    items: Tensor,  # [items, ITEM_FIELDS] int32; items without rows are skipped
    first_parts: Tensor,  # [T + 1] int32; a row without parts is written directly to `out`
    parts: Parts,
    out: Tensor,  # [T, H, D]
    *,
    tiling: Tiling,
    scale: float,
    window: int,
    cap: float,
    sinks: Tensor | None = None,  # [H]: a score that takes part in the softmax and has no value
    scales: Tensor | None = None,  # [blocks, 2, K, block size]: `layer` holds FP8
) -> None:
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = layer.shape[2:4]
    num_groups = num_heads // num_kv_heads
    _attend[(len(items), num_kv_heads)](
        q, layer, scales, tables, positions, items, first_parts, out, parts.mixed, parts.lse, sinks,
        scale * LOG2E, cap, window, q.stride(0), tables.stride(0), num_heads,
        K=num_kv_heads, G=num_groups, D=head_size, D_PAD=max(_power(head_size), 16), BLOCK=block_size,
        M=max(tiling.rows, _power(num_groups)), N=tiling.keys,
        HAS_CAP=cap > 0, HAS_WINDOW=window > 0,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def merge(parts: Parts, first_parts: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """Join the parts of every row of out [T, H, D] that has parts."""
    num_rows, num_heads, head_size = out.shape
    _merge[(num_rows, num_heads)](
        parts.mixed, parts.lse, first_parts, out, sinks, num_heads,
        D=head_size, D_PAD=_power(head_size), N=MERGED, num_warps=4,
    )  # fmt: skip
