"""Attention over the paged cache, driven by a list of work items from `quire.backends.torch.attention_work`.

An item consists of query rows, a range of keys and a block table. Prompts, decodes, chunks after a cached prefix and
the shared prefix of siblings are all such items, so one kernel is enough. A row whose keys are in one item is written
directly; if they are split over several items, each writes a part and `merge` joins the parts. A program processes one
item and one KV head, so each block of that head is read once for all its query heads.

The bits of a row do not depend on how the work is divided. Its keys are cut into pieces (`attention_work.PIECE`). The
softmax over each piece starts anew, and `_join` joins the pieces from left to right, within an item or from parts.

Keys and values in FP8 are converted to fp16 when they are loaded. Their scales multiply the scores and the weights of
the softmax, which are fewer than the numbers of keys and values.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch import attention_work
from quire.backends.torch.kernels.chaining import let_next_start
from quire.backends.torch.kernels.fp8_kv import decode, scale_queries

# T rows of the batch, H query heads, K kv heads, G = H / K, D head size, P parts

LOG2E = 1.4426950408889634
MERGED = 8  # parts that `merge` loads at a time


class Tiling(NamedTuple):
    """How a program divides its item. Measured in docs/performance.md."""

    rows: int  # query rows times heads of the group: at least 16, for the matrix units
    keys: int  # per iteration: the same in both tilings of a head size, because rounding depends on it
    num_warps: int
    num_stages: int  # of loads: those of the block table and those of keys and values take two each
    max_registers: int | None = None  # per thread, so that more programs run side by side


NARROW = Tiling(rows=16, keys=128, num_warps=4, num_stages=3)  # items of one token: decodes
WIDE = Tiling(rows=128, keys=128, num_warps=8, num_stages=2)  # items of many: prompts, and shared prefixes of siblings
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
def _scale_weights(weights, scales, is_seen):
    """Multiply weights [M, N] by the scales [N] of their values, relative to the highest that a row sees [M].

    So weights stay at most 1, and are exact enough in fp16. Returns them and the highest scales.
    """
    scales = tl.where(is_seen, scales.to(tl.float32)[None, :], 0.0)
    highest = tl.maximum(tl.max(tl.where(scales == scales, scales, 0.0), 1), 1e-37)
    return weights * (scales * (1.0 / highest)[:, None]), highest


@triton.jit
def _attend_tile(
    queries, row_scale, layer, scales, table, position, start, first, high, head, scale, cap, window,
    K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the softmax over the keys [start, start + N) that are in [first, high): peaks, sums and mixed values."""
    keys_at = start + tl.arange(0, N)
    # Outside the range the null block is read. Masked values have no weight, but must be finite.
    is_key = (keys_at >= first) & (keys_at < high)
    block = tl.load(table + keys_at // BLOCK, mask=is_key, other=0).to(tl.int64)
    place = (block * 2 * K + head) * BLOCK + keys_at % BLOCK  # [N]
    keys, values = _load(layer, scales, place, tl.arange(0, D_PAD), queries.dtype, K * BLOCK, D, D_PAD)
    scores = tl.dot(queries, keys, input_precision="ieee") * scale  # [M, N], in powers of two
    if scales is not None:
        scores = scores * row_scale[:, None] * tl.load(scales + place).to(tl.float32)[None, :]
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / cap)) + 1.0))
        scores *= 1.4426950408889634
    is_seen = (keys_at < high)[None, :] & (keys_at[None, :] <= position[:, None])
    if HAS_WINDOW:
        is_seen = is_seen & (keys_at[None, :] > position[:, None] - window)
    scores = tl.where(is_seen, scores, float("-inf"))
    peak = tl.maximum(tl.max(scores, 1), -1e30)  # finite: minus infinity minus itself is NaN
    weights = tl.exp2(scores - peak[:, None])
    # A product, because the order in which `tl.sum` adds depends on the tile.
    ones = tl.full((N, 16), 1.0, queries.dtype)
    total = tl.max(tl.dot(weights.to(values.dtype), ones, input_precision="ieee"), 1)
    if scales is not None:
        weights, highest = _scale_weights(weights, tl.load(scales + K * BLOCK + place), is_seen)
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee") * highest[:, None]
    else:
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, total, mixed


@triton.jit
def _join(peak, total, mixed, other_peak, other_total, other_mixed):
    """Join the softmax over some keys with that over the keys after them: peaks [M], sums [M], mixed values [M, D].

    All roundings are explicit, so that joining in registers and from memory gives the same bits. Keys that a row does
    not see change nothing.
    """
    higher = tl.maximum(peak, other_peak)
    shrink, other_shrink = tl.exp2(peak - higher), tl.exp2(other_peak - higher)
    total = tl.fma(total, shrink, other_total * other_shrink)
    return higher, total, tl.fma(mixed, shrink[:, None], other_mixed * other_shrink[:, None])


@triton.jit
def _join_part(peak, total, mixed, parts, target, is_in, d, D: tl.constexpr):
    """Join with the parts at target [M]; where is_in [M] is false, with nothing."""
    at = parts + target * (D + 4)
    other_peak, other_total = tl.load(at + D, mask=is_in, other=-1e30), tl.load(at + D + 1, mask=is_in, other=0.0)
    other_mixed = tl.load(at[:, None] + d[None, :], mask=is_in[:, None] & (d < D)[None, :], other=0.0)
    return _join(peak, total, mixed, other_peak, other_total, other_mixed)


@triton.jit
def _finish(peak, total, mixed, sinks, heads, is_in):
    """Add the score of a head without a value, and return the mean [M, D] of the values."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_in, other=-1e30).to(tl.float32) * 1.4426950408889634
        peak, total, mixed = _join(peak, total, mixed, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(mixed))
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend_item(
    item, num_rows, q, layer, scales, tables, positions, first_parts, out, parts, sinks,
    scale, cap, window, stride_q, stride_table, num_heads,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_NARROW: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, MAX_KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, batch_index, low, high, part = (
        tl.load(item), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    )  # fmt: skip
    m, d = tl.arange(0, M), tl.arange(0, D_PAD)
    is_row = m // G < num_rows
    rows = row + m // G  # [M]: of the batch
    heads = head * G + m % G
    position = tl.load(positions + rows, mask=is_row, other=-1)
    is_in = is_row[:, None] & (d < D)[None, :]
    queries = tl.load(q + rows[:, None] * stride_q + heads[:, None] * D + d[None, :], mask=is_in, other=0.0)  # [M, D]
    first_part = tl.load(first_parts + 2 * rows + IS_NARROW, mask=is_row, other=0).to(tl.int64)
    has_parts = tl.load(first_parts + 2 * row + 2) > tl.load(
        first_parts + 2 * row + IS_NARROW
    )  # as all rows of the item
    first = low
    if HAS_WINDOW:  # no row sees keys before the first row's window, and blocks behind it may belong to others
        first = tl.maximum(tl.min(tl.where(is_row, position, 2147483647), 0) - window + 1, low)
        low = first // N * N
    peak = tl.full((M,), -1e30, tl.float32)  # finite: minus infinity minus itself is NaN
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D_PAD), tl.float32)
    if IS_NARROW:  # the first item of a row goes on from what it shares with its siblings
        num_shared, shared = tl.load(item + 6), tl.load(item + 7)
        for before in range(0, num_shared):
            target = (shared + before + tl.zeros((M,), tl.int64)) * num_heads + heads
            peak, total, mixed = _join_part(peak, total, mixed, parts, target, is_row, d, D)
    row_scale = total  # used in FP8 only
    if scales is not None:
        queries, row_scale = scale_queries(queries)
    table = tables + batch_index * stride_table
    FAR: tl.constexpr = PIECES * PIECE if N == PIECE else 0
    IS_FAR: tl.constexpr = MAX_KEYS > FAR
    if FAR > 0:  # each tile is a piece
        for start in range(low, tl.minimum(high, FAR), N):
            peak, total, mixed = _join(peak, total, mixed, *_attend_tile(
                queries, row_scale, layer, scales, table, position, start, first, high, head, scale, cap, window,
                K, D, D_PAD, BLOCK, N, HAS_CAP, HAS_WINDOW,
            ))  # fmt: skip
    if IS_FAR:
        piece_peak, piece_total = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
        piece_mixed = tl.zeros((M, D_PAD), tl.float32)
        for start in range(tl.maximum(low, FAR), high, N):
            piece_peak, piece_total, piece_mixed = _join(piece_peak, piece_total, piece_mixed, *_attend_tile(
                queries, row_scale, layer, scales, table, position, start, first, high, head, scale, cap, window,
                K, D, D_PAD, BLOCK, N, HAS_CAP, HAS_WINDOW,
            ))  # fmt: skip
            after = start + N
            if (after >= high) | ((after % PIECE == 0) & ((after & -after) * PIECES >= after)):  # the end of a piece
                peak, total, mixed = _join(peak, total, mixed, piece_peak, piece_total, piece_mixed)
                piece_peak, piece_total = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32)
                piece_mixed = tl.zeros((M, D_PAD), tl.float32)
    if has_parts:
        at = parts + ((first_part + part) * num_heads + heads) * (D + 4)
        tl.store(at[:, None] + d[None, :], mixed, mask=is_in)
        tl.store(at + D, peak, mask=is_row)
        tl.store(at + D + 1, total, mask=is_row)
    else:
        mixed = _finish(peak, total, mixed, sinks, heads, is_row)
        target = rows.to(tl.int64) * num_heads + heads
        tl.store(out + target[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["window", "stride_table", "num_items"])
def _attend(
    q, layer, scales, tables, positions, items, first_parts, out, parts, sinks,
    scale, cap, window, stride_q, stride_table, num_heads, num_items,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_NARROW: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, MAX_KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    num_rows = tl.load(items + index * 8 + 1)
    next_rows = tl.load(
        items + (index + tl.num_programs(0)) * 8 + 1, mask=index + tl.num_programs(0) < num_items, other=0
    )
    while num_rows > 0:  # the first item without rows is padding, and so are those after it
        _attend_item(
            items + index * 8, num_rows, q, layer, scales, tables, positions, first_parts, out, parts, sinks,
            scale, cap, window, stride_q, stride_table, num_heads,
            K, G, D, D_PAD, BLOCK, M, N, HAS_CAP, HAS_WINDOW, IS_NARROW, PIECE, PIECES, MAX_KEYS,
        )  # fmt: skip
        index += tl.num_programs(0)
        num_rows = next_rows
        following = index + tl.num_programs(0)
        next_rows = tl.load(items + following * 8 + 1, mask=(num_rows > 0) & (following < num_items), other=0)


@triton.jit
def _merge(
    parts, first_parts, out, sinks, num_heads, D: tl.constexpr, D_PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0)
    first = tl.load(first_parts + 2 * row + 1)
    last = tl.load(first_parts + 2 * row + 2)
    if last == first:
        return
    one, d = tl.arange(0, 1), tl.arange(0, D_PAD)
    heads = tl.program_id(1) + one
    peak = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, D_PAD), tl.float32)
    for start in range(first, last, N):
        for ahead in tl.static_range(N):  # loads do not wait for each other, joins keep their order
            part = start + ahead + one
            target = part.to(tl.int64) * num_heads + heads
            peak, total, mixed = _join_part(peak, total, mixed, parts, target, part < last, d, D)
    mixed = _finish(peak, total, mixed, sinks, heads, one == 0)
    target = row.to(tl.int64) * num_heads + heads
    tl.store(out + target[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=(d < D)[None, :])


@cache  # Triton's own function takes microseconds, and every layer of a step calls it
def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


@cache
def tilings(head_size: int, itemsize: int) -> tuple[Tiling, Tiling]:
    """Return NARROW and WIDE, or smaller tilings, for keys of this size. `itemsize`: of queries."""
    row_bytes = _power(head_size) * itemsize
    if row_bytes <= ROW_BYTES:
        return NARROW, WIDE
    if row_bytes <= 2 * ROW_BYTES:
        return NARROW._replace(keys=64), WIDE._replace(rows=64, keys=64)
    return NARROW._replace(keys=32, num_stages=3, max_registers=None), WIDE._replace(rows=32, keys=32, num_stages=1)


def part_size(num_heads: int, head_size: int) -> int:
    """Return the numbers of a part: of each head its values times their weights, its largest score and sum of weights.

    The weights are relative to that score. Two more numbers keep the others aligned.
    """
    return num_heads * (head_size + 4)


def rows_per_item(tiling: Tiling, num_groups: int) -> int:
    """Return how many tokens an item of this tiling may hold."""
    return max(tiling.rows // num_groups, 1)


def attend(
    q: Tensor,  # [T, H, D]
    layer: Tensor,  # [blocks, 2, K, block size, D]
    tables: Tensor,  # [batch_indices, most blocks] int32
    positions: Tensor,  # [T] int32
    items: Tensor,  # [items, ITEM_FIELDS] int32; those without rows are last
    first_parts: Tensor,  # [2 T + 1] int32: `attention_work.Work`
    parts: Tensor,  # fp32, of any shape: at least part_size() numbers for each part
    out: Tensor,  # [T, H, D]
    *,
    tiling: Tiling,
    scale: float,
    window: int,
    cap: float,
    num_spare: int = 0,  # items that have no program of their own
    sinks: Tensor | None = None,  # [H]: a score that takes part in the softmax and has no value
    scales: Tensor | None = None,  # [blocks, 2, K, block size]: `layer` holds FP8
) -> None:
    """Process one list of items. The wide one must be first: narrow items read parts that it writes."""
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = layer.shape[2:4]
    num_groups = num_heads // num_kv_heads
    _attend[(max(len(items) - num_spare, 1), num_kv_heads)](
        q, layer, scales, tables, positions, items, first_parts, out, parts, sinks,
        scale * LOG2E, cap, window, q.stride(0), tables.stride(0), num_heads, len(items),
        K=num_kv_heads, G=num_groups, D=head_size, D_PAD=max(_power(head_size), 16), BLOCK=block_size,
        M=max(tiling.rows, _power(num_groups)), N=min(tiling.keys, attention_work.PIECE),
        HAS_CAP=cap > 0, HAS_WINDOW=window > 0, IS_NARROW=int(tiling.rows == NARROW.rows),
        PIECE=attention_work.PIECE, PIECES=attention_work.PIECES, MAX_KEYS=_power(tables.shape[1] * block_size),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.max_registers,
    )  # fmt: skip


def merge(parts: Tensor, first_parts: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """Join the parts of every row of out [T, H, D] that is split."""
    num_rows, num_heads, head_size = out.shape
    _merge[(num_rows, num_heads)](
        parts, first_parts, out, sinks, num_heads,
        D=head_size, D_PAD=_power(head_size), N=MERGED, num_warps=4,
    )  # fmt: skip
