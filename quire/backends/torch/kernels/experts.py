"""Routed experts: every row of the batch is multiplied by the matrices of the few experts that its router chooses.

A single row, and a few rows that mostly choose different experts, are not sorted: `_gated_alone` and `_down_alone` read
the chosen experts of every row in parallel.

For more rows, the pairs of a row and an expert, called slots, are sorted by expert on the device. Every expert's run of
slots is cut into tiles of at most ROWS rows, and a tile reads its expert once. Small tiles stream the weights at the
memory's speed; large tiles are for prompts. All shapes depend on the number of rows only, and the host never waits, so
a graph can contain everything: programs for tiles that do not exist return at once.

All products of 16-bit matrices add up in the order of the inputs, and a row's experts in the order of its choice. So
the bits of a row do not depend on its place in a tile, on the other rows, or on their number. Gate, up and down are
rounded as in a dense MLP; routing weights and the sum over the experts are fp32.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.backends.torch.kernels.linear import PARTS, _few_sums, _gated_pairs, _gated_value, few_strip

# T rows of the batch, N experts, K experts chosen per row, S = T * K slots, E hidden size, F width of an expert

MAX_ALONE = 4  # rows that are not sorted by expert, if there are enough experts
SHORT, LONG = 1024, 4096  # slots that a program of `_sort` reads; more slots are cut into chunks of LONG
GROUP = 8  # tiles next to each other that read the same strip of their experts, if they have the same one
SUM_BLOCK = 1024


class Tile(NamedTuple):
    """The shape of a program of a grouped product. A gated product has `outputs` gates and as many ups."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    is_bulk: bool = False  # reads the weights with the bulk copy engine, which needs whole tiles along the inputs


class Tiling(NamedTuple):
    """The shapes of both grouped products, and whether they multiply in FP8."""

    rows: int
    gate_up: Tile
    down: Tile
    is_fp8: bool = False


class Routing(NamedTuple):
    ids: Tensor  # [T, K] int32, the best expert first
    weights: Tensor  # [T, K] fp32


class SortedSlots(NamedTuple):
    order: Tensor  # [S] int32: the slots in the order of their experts
    tiles: Tensor  # [1 + 3 * max_tiles] int32: the number of tiles; then expert, first and end in `order` of each
    max_tiles: int


@triton.jit
def _route(
    logits, expert_scales, ids, weights, scale,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    logit = tl.load(logits + row * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    # One number orders logits and, among equal ones, experts. NaN is the greatest: any row gets valid experts.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # the two zeros are equal
    key = tl.where(logit != logit, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    least: tl.constexpr = -(2**63)
    left = tl.where(n < N, (key.to(tl.int64) << 32) | (BLOCK - 1 - n), least)
    slot = tl.arange(0, SLOTS)
    expert = tl.zeros((SLOTS,), tl.int32)
    chosen_key = tl.zeros((SLOTS,), tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        left = tl.where(left == best, least, left)
        expert = tl.where(slot == k, BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32), expert)
        chosen_key = tl.where(slot == k, (best >> 32).to(tl.int32), chosen_key)
    chosen = (chosen_key ^ ((chosen_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    top = tl.sum(tl.where(slot == 0, chosen, 0.0), 0)
    weight = tl.where(slot < K, tl.exp(chosen - top), 0.0)
    total = tl.sum(weight, 0) if RENORMALIZES else tl.sum(tl.exp(logit - top), 0)
    weight = weight / total * scale
    if expert_scales is not None:
        weight *= tl.load(expert_scales + expert)
    tl.store(ids + row * K + slot, expert, mask=slot < K)
    tl.store(weights + row * K + slot, weight, mask=slot < K)


@triton.jit(do_not_specialize=["num_slots"])
def _count(ids, counts, num_slots, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    is_in = slot < num_slots
    expert = tl.load(ids + slot, mask=is_in, other=0)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(expert, EXPERTS, mask=is_in))


@triton.jit(do_not_specialize=["num_slots", "num_chunks", "tile_rows"])
def _sort(
    ids, counts, order, tiles, num_slots, num_chunks, tile_rows, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # A program finds the slots of one expert in one chunk. Nothing depends on the order in which programs run.
    mine, chunk = tl.program_id(0), tl.program_id(1)
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    is_in = slot < num_slots
    expert = tl.load(ids + slot, mask=is_in, other=0)
    n = tl.arange(0, EXPERTS)
    if counts is None:
        total = tl.histogram(expert, EXPERTS, mask=is_in)
        earlier = tl.zeros((EXPERTS,), tl.int32)
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        earlier = tl.zeros((EXPERTS,), tl.int32)
        for number in tl.range(0, num_chunks, loop_unroll_factor=4):
            count = tl.load(counts + number * EXPERTS + n)
            total += count
            earlier += tl.where(number < chunk, count, 0)
    first = tl.sum(tl.where(n < mine, total, 0), 0)
    is_mine = is_in & (expert == mine)
    place = first + tl.sum(tl.where(n == mine, earlier, 0), 0) + tl.cumsum(is_mine.to(tl.int32), 0) - 1
    tl.store(order + place, slot, mask=is_mine)
    if chunk == 0:
        num_tiles = (total + tile_rows - 1) // tile_rows
        end = first + tl.sum(tl.where(n == mine, total, 0), 0)
        entry = tiles + 1 + 3 * tl.sum(tl.where(n < mine, num_tiles, 0), 0)
        for start in range(first, end, tile_rows):
            tl.store(entry, mine)
            tl.store(entry + 1, start)
            tl.store(entry + 2, end)
            entry += 3
        if mine == 0:
            tl.store(tiles, tl.sum(num_tiles, 0))


@triton.jit
def _load(at, i, IN: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load inputs i of some rows. Loads without a mask are wide."""
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=(i < IN)[None, :], other=0.0)


@triton.jit
def _multiply(
    x, weight, bias, order, out, expert, first, end, strip,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, IS_GATED: tl.constexpr, KIND: tl.constexpr, IS_BULK: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows by a strip of their expert's matrix."""
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.where(is_row, place, first)  # rows past the end repeat the first and are not stored
    slot = tl.load(order + place)
    column = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    source = slot // K if IS_GATED else place  # gated rows are written in the order of the experts
    x_at = x + source[:, None].to(tl.int64) * IN + i[None, :]
    w_row = expert * (2 * OUT if IS_GATED else OUT) + strip * OUTPUTS
    if IS_BULK:  # a strip past the end reads what follows, or zeros, and is not stored
        w_at = x_at  # not used
    else:  # columns past the end wrap around
        w_at = weight + (w_row - strip * OUTPUTS + column % OUT)[:, None].to(tl.int64) * IN + i[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, IN, INPUTS):
        a = _load(x_at, start + i, IN, IN % INPUTS == 0)
        b = weight.load([w_row, start]) if IS_BULK else _load(w_at, start + i, IN, IN % INPUTS == 0)
        total = tl.dot(a, b.T, total, input_precision="ieee")
        if IS_GATED:
            b = (
                weight.load([w_row + OUT, start])
                if IS_BULK
                else _load(w_at + OUT * IN, start + i, IN, IN % INPUTS == 0)
            )
            up = tl.dot(a, b.T, up, input_precision="ieee")
        x_at += INPUTS
        w_at += INPUTS
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        b_at = bias + expert * (2 * OUT if IS_GATED else OUT) + column % OUT
        total += tl.load(b_at).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(b_at + OUT).to(tl.float32)[None, :]
    target = slot
    if IS_GATED:
        total = _gated_value(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), KIND)  # as when stored
        target = place
    is_in = is_row[:, None] & (column < OUT)[None, :]
    tl.store(out + target[:, None].to(tl.int64) * OUT + column[None, :], total.to(dtype), mask=is_in)


@triton.jit
def _grouped_product(
    x, weight, bias, order, tiles, out,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, KIND: tl.constexpr, IS_BULK: tl.constexpr,
):  # fmt: skip
    num_strips: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    tile = program // (GROUP * num_strips) * GROUP + program % GROUP
    strip = program // GROUP % num_strips
    if tile >= tl.load(tiles):
        return
    expert = tl.load(tiles + 1 + 3 * tile)
    first = tl.load(tiles + 2 + 3 * tile)
    end = tl.load(tiles + 3 + 3 * tile)
    if ROWS == 128 and end - first <= 64:  # an expert's last tile is often less than half full
        _multiply(
            x, weight, bias, order, out, expert, first, end, strip,
            IN, OUT, K, 64, OUTPUTS, INPUTS, IS_GATED, KIND, IS_BULK,
        )  # fmt: skip
    else:
        _multiply(
            x, weight, bias, order, out, expert, first, end, strip,
            IN, OUT, K, ROWS, OUTPUTS, INPUTS, IS_GATED, KIND, IS_BULK,
        )  # fmt: skip


@triton.jit
def _weighted_sum(y, weights, out, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    num_blocks: tl.constexpr = (E + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        value = tl.load(y + (row * K + k) * E + column, mask=column < E, other=0.0)
        total = tl.fma(value.to(tl.float32), tl.load(weights + row * K + k), total)
    tl.store(out + row * E + column, total.to(out.dtype.element_ty), mask=column < E)


@triton.jit
def _gated_alone(
    x, weight, bias, ids, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    # A program computes some gates, each next to its up, of one slot: the first row of a tile of the matrix units.
    slot = tl.program_id(1)
    o, r = tl.arange(0, OUTPUTS), tl.arange(0, 8)
    column = tl.program_id(0) * (OUTPUTS // 2) + o // 2
    row = tl.load(ids + slot).to(tl.int64) * (2 * F) + column % F + (o % 2) * F
    rows = x + (slot // K).to(tl.int64) * E + r * 0
    y = _few_sums(weight + row * E, rows, r == 0, E, 1, OUTPUTS, 8, FIRST, SECOND, 0, INPUTS, STAGES)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    value = _gated_pairs(y, OUTPUTS, 8, out.dtype.element_ty, KIND)
    column = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    target = out + slot.to(tl.int64) * F + column
    tl.store(target[:, None] + r[None, :], value, mask=(column < F)[:, None] & (r == 0)[None, :])


@triton.jit
def _down_alone(
    x, weight, bias, ids, weights, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program computes some outputs of all experts of a row: they are the parts of a sum.
    row = tl.program_id(1).to(tl.int64)
    k, o, r = tl.arange(0, SLOTS), tl.arange(0, OUTPUTS), tl.arange(0, 8)
    column = tl.program_id(0) * OUTPUTS + o
    expert = tl.load(ids + row * K + k, mask=k < K, other=0).to(tl.int64)
    place = expert[:, None] * E + (column % E)[None, :]  # [SLOTS, O]
    rows = (x + (row * K + tl.where(k < K, k, 0)) * F)[:, None] + (r * 0)[None, :]
    y = _few_sums(weight + place * F, rows, r == 0, F, SLOTS, OUTPUTS, 8, FIRST, SECOND, 0, INPUTS, STAGES)
    if bias is not None:
        y += tl.load(bias + place).to(tl.float32)[:, :, None]
    dtype: tl.constexpr = out.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    total = tl.zeros((OUTPUTS, 8), tl.float32)
    for one in tl.static_range(K):  # in the order of `_weighted_sum`
        value = tl.sum(tl.where(k[:, None, None] == one, y, 0.0), 0)
        total = tl.fma(value, tl.load(weights + row * K + one), total)
    is_stored = (column < E)[:, None] & (r == 0)[None, :]
    tl.store((out + row * E + column)[:, None] + r[None, :], total.to(dtype), mask=is_stored)


@cache
def _padded(size: int, least: int = 1) -> int:
    return max(int(triton.next_power_of_2(size)), least)


@cache  # every layer of a step calls this
def tiling(num_rows: int, num_experts: int, num_chosen: int, itemsize: int) -> Tiling:
    """Return the tiles for this number of rows. Measured in docs/performance.md."""
    mean = num_rows * num_chosen / num_experts  # rows per expert
    if itemsize > 2:  # fp32, without tensor cores
        tile = Tile(outputs=32, inputs=32, num_warps=4, num_stages=3)
        return Tiling(16 if mean <= 12 else 64, tile, tile)
    if mean <= 4:
        return Tiling(16, Tile(32, 128, 4, 5), Tile(64, 128, 4, 4))
    if mean <= 24:
        return Tiling(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))
    return Tiling(128, Tile(128, 64, 8, 4, is_bulk=True), Tile(256, 64, 8, 4, is_bulk=True))


def is_alone(num_rows: int, num_experts: int, num_chosen: int) -> bool:
    """Return whether `experts_alone` suits this number of rows: most choose experts that no other row chooses."""
    return num_rows == 1 or (num_rows <= MAX_ALONE and 4 * num_rows * num_chosen <= num_experts)


def max_tiles(num_rows: int, num_experts: int, num_chosen: int, tile_rows: int) -> int:
    """Return a number of tiles that no choice of experts exceeds."""
    num_slots = num_rows * num_chosen
    num_used = min(num_slots, num_experts)  # the number of tiles grows with the number of experts that are used
    return num_used + (num_slots - num_used) // tile_rows


def route(
    logits: Tensor, num_chosen: int, *, renormalizes: bool, scale: float, expert_scales: Tensor | None = None
) -> Routing:
    """Choose experts by the logits [T, N] of the router. Of equal logits, the first is chosen first."""
    num_rows, num_experts = logits.shape
    ids = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=logits.device)
    _route[(num_rows,)](
        logits, expert_scales, ids, weights, scale, N=num_experts, K=num_chosen, BLOCK=_padded(num_experts),
        SLOTS=_padded(num_chosen), RENORMALIZES=renormalizes, num_warps=1,
    )  # fmt: skip
    return Routing(ids, weights)


def sort_slots(ids: Tensor, num_experts: int, tile_rows: int) -> SortedSlots:
    """Sort the slots by expert and cut each expert's into tiles."""
    num_rows, num_chosen = ids.shape
    num_slots = num_rows * num_chosen
    bound = max_tiles(num_rows, num_experts, num_chosen, tile_rows)
    start = -(-num_slots // 4) * 4  # Triton compiles another kernel for addresses that are not multiples of 16 bytes
    space = ids.new_empty(start + 1 + 3 * bound)
    order, tiles = space[:num_slots], space[start:]
    block, experts = min(_padded(num_slots, SHORT), LONG), _padded(num_experts, 32)
    counts, num_chunks = None, 1
    if num_slots > LONG:
        num_chunks = -(-num_slots // LONG)
        counts = ids.new_empty((num_chunks, experts))
        _count[(num_chunks,)](ids, counts, num_slots, EXPERTS=experts, BLOCK=block, num_warps=4)
    _sort[(num_experts, num_chunks)](
        ids, counts, order, tiles, num_slots, num_chunks, tile_rows, EXPERTS=experts, BLOCK=block,
        num_warps=8 if counts is None else 4,
    )  # fmt: skip
    return SortedSlots(order, tiles, bound)


def grouped_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: SortedSlots, num_chosen: int, shape: Tiling, tile: Tile,
    kind: int | None,
) -> Tensor:  # fmt: skip
    """Multiply each slot's row by its expert's matrix. `kind`: of the activation of a gated product, see `KINDS`.

    With a kind: x [T, E] and weight [N, 2F, E] give [S, F], in the order of the experts. Without: x is that, and weight
    [N, E, F] gives [S, E] in the order of the slots. The bias [N, 2F] or [N, E] is added.
    """
    num_outputs, num_inputs = weight.shape[1:]
    if kind is not None:
        num_outputs //= 2
    out = x.new_empty((len(slots.order), num_outputs))
    num_programs = -(-slots.max_tiles // GROUP) * GROUP * -(-num_outputs // tile.outputs)
    is_bulk = tile.is_bulk and num_inputs % tile.inputs == 0
    matrix = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.outputs, tile.inputs]) if is_bulk else weight
    _grouped_product[(num_programs,)](
        x, matrix, bias, slots.order, slots.tiles, out, IN=num_inputs, OUT=num_outputs, K=num_chosen,
        ROWS=shape.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, GROUP=GROUP,
        IS_GATED=kind is not None, KIND=kind or 0, IS_BULK=is_bulk,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [T, E] over the experts of y [S, E] times weights [T, K], the best expert first."""
    num_rows, num_chosen = weights.shape
    size = y.shape[1]
    out = y.new_empty((num_rows, size))
    block = min(_padded(size), SUM_BLOCK)
    _weighted_sum[(num_rows * -(-size // block),)](y, weights, out, E=size, K=num_chosen, BLOCK=block, num_warps=4)
    return out


class Biases(NamedTuple):
    """Biases of the experts, or None."""

    gate_up: Tensor | None = None  # [N, 2F]
    down: Tensor | None = None  # [N, E]


def gated_alone(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, kind: int) -> Tensor:
    """Return the gated products [S, F] of a few rows x [T, E], which read their experts independently."""
    size, width, (num_rows, num_chosen) = x.shape[1], weight.shape[1] // 2, ids.shape
    out = x.new_empty((num_rows * num_chosen, width))
    strip = few_strip(2 * width, size, 1, 1)
    _gated_alone[(-(-2 * width // strip.outputs), num_rows * num_chosen)](
        x, weight, bias, ids, out, E=size, F=width, K=num_chosen, OUTPUTS=strip.outputs, FIRST=strip.columns[0],
        SECOND=strip.columns[1], INPUTS=strip.inputs, STAGES=strip.num_stages, KIND=kind, num_warps=strip.num_warps,
    )  # fmt: skip
    return out


def down_alone(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, num_slots: int) -> Tensor:
    """Return the weighted sums [T, E] of the products of x [S, F]. `num_slots`: a power of two from K on."""
    size, width, (num_rows, num_chosen) = weight.shape[1], x.shape[1], ids.shape
    out = x.new_empty((num_rows, size))
    strip = few_strip(size, width, max(num_slots, PARTS + 1), 1)
    _down_alone[(-(-size // strip.outputs), num_rows)](
        x, weight, bias, ids, weights, out, E=size, F=width, K=num_chosen, SLOTS=max(num_slots, 2),
        OUTPUTS=strip.outputs, FIRST=strip.columns[0], SECOND=strip.columns[1], INPUTS=strip.inputs,
        STAGES=strip.num_stages, num_warps=strip.num_warps,
    )  # fmt: skip
    return out
