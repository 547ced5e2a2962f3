"""Products with packed experts: FP8, integers of 8 or 4 bits, and MXFP4.

Three ways, by the number of rows of the batch:

- A few rows alone read their experts with wide loads and sum in fp32, as `_packed_rows` does for a dense matrix.
- Rows sorted by expert, in tiles: the weights are decoded in registers for tensor cores of 16 bits. From `FP8_ROWS`
  rows of the batch on, FP8 weights are not decoded: rows are rounded to FP8, with a scale per row or per 128 columns,
  and multiplied in FP8, as `product_in_fp8` does.
- With many rows per expert, all but FP8 are decoded before the product: a tile would decode them again and again.

Sorting and results are as in `experts.py`. Weights are the left operand of all tiles: a tile of few rows then fills
tensor cores, which multiply at least 64 rows of the left operand, and decoded weights stay in registers.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.backends.torch.kernels.experts import SortedSlots, Tile, Tiling
from quire.backends.torch.kernels.fp8_rows import quantize_rows
from quire.backends.torch.kernels.linear import Strip, _gated_value
from quire.backends.torch.kernels.mxfp4_experts import sums_in_tiles, sums_of_rows
from quire.backends.torch.kernels.packed_linear import (
    HAS_ASSEMBLER,
    KINDS,
    STEP,
    _byte_values,
    _chunk_sums,
    _load_group,
    _load_group_of_step,
    _load_tile,
    _wide_nibbles,
)
from quire.backends.torch.packed import ExpertStack, PackedFormat, multiplies_in_fp8

# T rows of the batch, N experts, K experts chosen per row, E hidden size, F width of an expert, IN inputs, OUT outputs

FP8_ROWS = 65  # rows of the batch from which on FP8 experts are multiplied by rows in FP8, as dense matrices are
TILES_TOGETHER = 8  # tiles next to each other that read the same strip of their experts


_INT4 = tl.constexpr(2)  # 4 bits from here on; see KINDS
_FP4 = tl.constexpr(3)  # of experts always MXFP4, with exponents as scales: `packed.has_kernels` refuses others


# Few rows


@triton.jit
def _sums(
    x_at, c_at, scales, zeros, row, is_real, is_x,
    IN: tl.constexpr, R: tl.constexpr, X_ROWS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_ASSEMBLER: tl.constexpr,
):  # fmt: skip
    """Return the sums [R] of rows of codes at c_at [R, 1] times inputs at x_at [X_ROWS, 1]; X_ROWS is R or 1.

    The masks `is_real` and `is_x` have the same shapes. 16 bytes, which are in one thread, are summed before they are
    multiplied by their scale.
    """
    if KIND == _FP4:
        return sums_of_rows(x_at, c_at, scales + row[:, None] * (IN // GROUP), is_real, is_x, IN, R, BYTES)
    per_byte: tl.constexpr = 2 if KIND >= _INT4 else 1
    count: tl.constexpr = IN // per_byte
    groups: tl.constexpr = IN // GROUP if GROUP else 1
    span: tl.constexpr = GROUP if GROUP else IN
    total = tl.zeros((R, BYTES // 16), tl.float32)
    for offset in tl.static_range(0, count, BYTES):
        byte = offset + tl.arange(0, BYTES)
        chunk = (offset // 16 + tl.arange(0, BYTES // 16)) * (16 * per_byte)  # its first column
        is_in = (byte < count)[None, :]
        code = tl.load(c_at + byte[None, :], mask=is_real & is_in, other=0, eviction_policy="evict_first")
        zero = 8.0
        if zeros is not None:
            zero = _load_group(zeros, row, chunk, span, groups, GROUP_ROWS)
        if KIND < _INT4:
            value = tl.load(x_at + byte[None, :], mask=is_x & is_in, other=0.0).to(tl.float32)
            part = _chunk_sums(_byte_values(code, KIND) * value, R, BYTES)
            if zeros is not None:
                part -= _chunk_sums(value, X_ROWS, BYTES) * zero
        else:
            place = (byte // 16 * 32 + byte % 16)[None, :]
            first = tl.load(x_at + place, mask=is_x & is_in, other=0.0).to(tl.float32)
            second = tl.load(x_at + 16 + place, mask=is_x & is_in, other=0.0).to(tl.float32)
            low, high = _wide_nibbles(code, HAS_ASSEMBLER)
            part = _chunk_sums(low * first, R, BYTES) + _chunk_sums(high * second, R, BYTES)
            part -= _chunk_sums(first, X_ROWS, BYTES) * (128.0 + zero)
            part -= _chunk_sums(second, X_ROWS, BYTES) * (2048.0 + zero)
        total += part * _load_group(scales, row, chunk, GROUP, groups, GROUP_ROWS) if GROUP else part
    y = tl.sum(total, 1)
    if not GROUP:
        y *= tl.load(scales + row // GROUP_ROWS)
    return y


@triton.jit
def _gated_alone_quantized(
    x, codes, scales, zeros, bias, ids, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_ASSEMBLER: tl.constexpr,
):  # fmt: skip
    # A program computes a few gates and their ups, each gate next to its up.
    slot = tl.program_id(1)
    expert = tl.load(ids + slot).to(tl.int64)
    o = tl.arange(0, 2 * PAIRS)
    column = tl.program_id(0) * PAIRS + o // 2
    row = expert * (2 * F) + tl.minimum(column, F - 1) + o % 2 * F
    num_bytes: tl.constexpr = E // 2 if KIND >= _INT4 else E
    y = _sums(
        x + (slot // K).to(tl.int64) * E + tl.zeros((1, 1), tl.int32), codes + row[:, None] * num_bytes,
        scales, zeros, row, (column < F)[:, None], tl.full((1, 1), True, tl.int1),
        E, 2 * PAIRS, 1, BYTES, KIND, GROUP_ROWS, GROUP, HAS_ASSEMBLER,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = tl.split(tl.reshape(y.to(dtype).to(tl.float32), (PAIRS, 2)))  # rounded as when stored
    column = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    value = _gated_value(gate, up, ACTIVATION).to(dtype)
    tl.store(out + slot.to(tl.int64) * F + column, value, mask=column < F)


@triton.jit
def _down_alone_quantized(
    x, codes, scales, zeros, bias, ids, weights, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_ASSEMBLER: tl.constexpr,
):  # fmt: skip
    # A program computes one output of all experts of a row.
    column, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, SLOTS)
    is_slot = (k < K)[:, None]
    place = tl.load(ids + row * K + k, mask=k < K, other=0).to(tl.int64) * E + column
    num_bytes: tl.constexpr = F // 2 if KIND >= _INT4 else F
    y = _sums(
        x + (row * K + k)[:, None] * F, codes + place[:, None] * num_bytes, scales, zeros, place, is_slot, is_slot,
        F, SLOTS, SLOTS, BYTES, KIND, GROUP_ROWS, GROUP, HAS_ASSEMBLER,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + place).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    y = tl.sum(y * tl.load(weights + row * K + k, mask=k < K, other=0.0), 0)
    tl.store(out + row * E + column, y.to(dtype))


# Tiles


@triton.jit
def _load_rows(at, is_in, IS_WHOLE: tl.constexpr):
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=is_in, other=0.0)


@triton.jit
def _add_step(
    total, first, second, scale, zero, c_at, scales, zeros, row, column, is_in,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the product of 128 columns to the sums [OUTPUTS, ROWS]. 4-bit codes have two tiles of inputs."""
    low, high = _load_tile(
        c_at, scales, zeros, zero, row, column, is_in, first.dtype,
        IN, OUTPUTS, BYTES, KIND, GROUP_ROWS, GROUP, IN_PAIRS,
    )  # fmt: skip
    if GROUP == 128:
        product = tl.dot(low, first.T, input_precision="ieee")
    else:
        product = tl.dot(low, first.T, total, input_precision="ieee")
    if KIND >= _INT4:
        product = tl.dot(high, second.T, product, input_precision="ieee")
    return total + product * scale[:, None] if GROUP == 128 else product


@triton.jit
def _decoding_sums(
    x, codes, scales, zeros, source, row,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, IS_GATED: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the sums [OUTPUTS, ROWS] of outputs `row` and, of a gated product, of those OUT further."""
    per_byte: tl.constexpr = 2 if KIND >= _INT4 else 1
    step: tl.constexpr = 128 // per_byte  # bytes
    is_whole: tl.constexpr = IN % 128 == 0
    groups: tl.constexpr = IN // GROUP if GROUP else 1
    byte = tl.arange(0, step)
    place = byte // 16 * 32 + byte % 16 if per_byte == 2 else byte  # of the byte's first weight
    x_at = x + source[:, None].to(tl.int64) * IN + place[None, :]
    c_at = codes + row[:, None] * (IN // per_byte) + byte[None, :]
    up_at = c_at + OUT * (IN // per_byte)
    total, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale, zero = _load_group_of_step(scales, zeros, row, 0, groups, OUTPUTS, GROUP_ROWS, GROUP)
    up_scale, up_zero = scale, zero
    if IS_GATED:
        up_scale, up_zero = _load_group_of_step(scales, zeros, row + OUT, 0, groups, OUTPUTS, GROUP_ROWS, GROUP)
    for column in range(0, IN, 128):
        is_in = (column + place < IN)[None, :]
        first = _load_rows(x_at + column, is_in, is_whole)
        second = _load_rows(x_at + 16 + column, is_in, is_whole) if per_byte == 2 else first
        later = tl.minimum(column // 128 + 1, groups - 1)  # loaded early
        next_scale, next_zero = _load_group_of_step(scales, zeros, row, later, groups, OUTPUTS, GROUP_ROWS, GROUP)
        total = _add_step(
            total, first, second, scale, zero, c_at, scales, zeros, row, column, is_in,
            IN, OUTPUTS, step, KIND, GROUP_ROWS, GROUP, IN_PAIRS,
        )  # fmt: skip
        if IS_GATED:
            next_up_scale, next_up_zero = _load_group_of_step(
                scales, zeros, row + OUT, later, groups, OUTPUTS, GROUP_ROWS, GROUP
            )
            up = _add_step(
                up, first, second, up_scale, up_zero, up_at, scales, zeros, row + OUT, column, is_in,
                IN, OUTPUTS, step, KIND, GROUP_ROWS, GROUP, IN_PAIRS,
            )  # fmt: skip
            up_scale, up_zero = next_up_scale, next_up_zero
        scale, zero = next_scale, next_zero
    if GROUP == 0:
        total *= tl.load(scales + row // GROUP_ROWS)[:, None]
        if IS_GATED:
            up *= tl.load(scales + (row + OUT) // GROUP_ROWS)[:, None]
    return total, up


@triton.jit
def _fp8_dot(w, x, total, scale, x_scale, HAS_GROUPS: tl.constexpr, IS_WIDE: tl.constexpr):
    if IS_WIDE:  # the interpreter has no product of FP8
        w, x = w.to(tl.float32), x.to(tl.float32)
    if HAS_GROUPS:
        return total + tl.dot(w, x.T) * (scale[:, None] * x_scale[None, :])
    return tl.dot(w, x.T, total)


@triton.jit
def _fp8_sums(
    x, x_scales, x_stride, codes, scales, source, first_row, row,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, HAS_GROUPS: tl.constexpr, IS_GATED: tl.constexpr, IS_WIDE: tl.constexpr,
    IS_BULK: tl.constexpr,
):  # fmt: skip
    """Like `_decoding_sums`, of rows and weights in FP8. `first_row` is the first of `row`."""
    is_whole: tl.constexpr = IN % 128 == 0
    groups: tl.constexpr = IN // 128 if HAS_GROUPS else 1
    i = tl.arange(0, 128)
    x_at = x + source[:, None].to(tl.int64) * IN + i[None, :]
    # In bulk, a strip past the end reads what follows, or zeros, and is not stored; there are no addresses.
    w_at = x_at if IS_BULK else codes + row[:, None] * IN + i[None, :]
    xs_at = x_scales + source  # [rows, groups], column by column
    s_at = scales + row // GROUP_ROWS * groups
    if GROUP_ROWS % OUTPUTS == 0:  # a strip has one scale
        s_at = scales + first_row // GROUP_ROWS * groups + tl.zeros((1,), tl.int32)
    su_at = s_at + OUT // GROUP_ROWS * groups
    total, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
    x_scale, scale = tl.load(xs_at), tl.load(s_at).to(tl.float32)
    up_scale = tl.load(su_at).to(tl.float32) if IS_GATED else scale
    for start in range(0, IN, 128):
        is_in = (start + i < IN)[None, :]
        a = _load_rows(x_at + start, is_in, is_whole)
        w = codes.load([first_row, start]) if IS_BULK else _load_rows(w_at + start, is_in, is_whole)
        next_x_scale, next_scale, next_up_scale = x_scale, scale, up_scale
        if HAS_GROUPS:  # the scales of the next step are loaded early
            later = tl.minimum(start // 128 + 1, groups - 1)
            next_x_scale, next_scale = tl.load(xs_at + later * x_stride), tl.load(s_at + later).to(tl.float32)
            if IS_GATED:
                next_up_scale = tl.load(su_at + later).to(tl.float32)
        total = _fp8_dot(w, a, total, scale, x_scale, HAS_GROUPS, IS_WIDE)
        if IS_GATED:
            w = (
                codes.load([first_row + OUT, start])
                if IS_BULK
                else _load_rows(w_at + OUT * IN + start, is_in, is_whole)
            )
            up = _fp8_dot(w, a, up, up_scale, x_scale, HAS_GROUPS, IS_WIDE)
        x_scale, scale, up_scale = next_x_scale, next_scale, next_up_scale
    if not HAS_GROUPS:
        total *= scale[:, None] * x_scale[None, :]
        up *= up_scale[:, None] * x_scale[None, :]
    return total, up


@triton.jit
def _multiply_quantized(
    x, x_scales, x_stride, codes, scales, zeros, bias, order, out, expert, first, end, strip,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_ASSEMBLER: tl.constexpr, IN_PAIRS: tl.constexpr, IS_BULK: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows by a strip of their expert's matrix."""
    num_matrix: tl.constexpr = 2 * OUT if IS_GATED else OUT  # outputs of an expert
    dtype: tl.constexpr = out.dtype.element_ty
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.where(is_row, place, first)  # rows past the end repeat the first and are not stored
    slot = tl.load(order + place)
    column = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert.to(tl.int64) * num_matrix + column % OUT  # columns past the end wrap around
    source = slot // K if IS_GATED else place  # gated rows are written in the order of the experts
    if KIND == _FP4:
        total, up = sums_in_tiles(x, codes, scales, source, row, IN, OUT, ROWS, OUTPUTS, INPUTS, IS_GATED, IN_PAIRS)
    elif x_scales is None:
        total, up = _decoding_sums(
            x, codes, scales, zeros, source, row, IN, OUT, ROWS, OUTPUTS, KIND, GROUP_ROWS, GROUP, IS_GATED, IN_PAIRS
        )  # fmt: skip
    else:
        total, up = _fp8_sums(
            x, x_scales, x_stride, codes, scales, source, expert * num_matrix + strip * OUTPUTS, row,
            IN, OUT, ROWS, OUTPUTS, GROUP_ROWS, GROUP > 0, IS_GATED, not HAS_ASSEMBLER, IS_BULK,
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias + row + OUT).to(tl.float32)[:, None]
    target = slot
    if IS_GATED:
        total = _gated_value(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)  # as when stored
        target = place
    is_in = is_row[None, :] & (column < OUT)[:, None]
    tl.store(out + target[None, :].to(tl.int64) * OUT + column[:, None], total.to(dtype), mask=is_in)


@triton.jit(do_not_specialize=["x_stride"])
def _quantized_product(
    x, x_scales, x_stride, codes, scales, zeros, bias, order, tiles, out,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, TOGETHER: tl.constexpr, KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_ASSEMBLER: tl.constexpr, IN_PAIRS: tl.constexpr,
    IS_BULK: tl.constexpr,
):  # fmt: skip
    num_strips: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    tile = program // (TOGETHER * num_strips) * TOGETHER + program % TOGETHER
    strip = program // TOGETHER % num_strips
    if tile >= tl.load(tiles):
        return
    expert = tl.load(tiles + 1 + 3 * tile)
    first = tl.load(tiles + 2 + 3 * tile)
    end = tl.load(tiles + 3 + 3 * tile)
    if ROWS == 128 and end - first <= 64:  # an expert's last tile is often less than half full
        _multiply_quantized(
            x, x_scales, x_stride, codes, scales, zeros, bias, order, out, expert, first, end, strip,
            IN, OUT, K, 64, OUTPUTS, INPUTS, KIND, GROUP_ROWS, GROUP, IS_GATED, ACTIVATION, HAS_ASSEMBLER, IN_PAIRS,
            IS_BULK,
        )  # fmt: skip
    else:
        _multiply_quantized(
            x, x_scales, x_stride, codes, scales, zeros, bias, order, out, expert, first, end, strip,
            IN, OUT, K, ROWS, OUTPUTS, INPUTS, KIND, GROUP_ROWS, GROUP, IS_GATED, ACTIVATION, HAS_ASSEMBLER, IN_PAIRS,
            IS_BULK,
        )  # fmt: skip


# Shapes of programs, by the most rows per expert: measured with `benchmarks/gpu_formats.py --experts --sweep`, last in
# commit 0126243d.

_SMALL, _WIDE, _BULK = Tile(64, STEP, 4, 4), Tile(128, STEP, 4, 4), Tile(128, STEP, 8, 4, is_bulk=True)
Tilings = tuple[tuple[float, Tiling], ...]
FP8_TILINGS: Tilings = (  # weights with a scale per output
    (12, Tiling(16, _SMALL, _WIDE, is_fp8=True)),
    (24, Tiling(32, _SMALL, _WIDE, is_fp8=True)),
    (48, Tiling(64, _SMALL, Tile(128, STEP, 8, 4), is_fp8=True)),
    (math.inf, Tiling(128, _BULK, _BULK, is_fp8=True)),
)
FP8_BLOCK_TILINGS: Tilings = (  # weights in blocks: the sums of a step are in registers beside the total
    *FP8_TILINGS[:-1],
    (math.inf, Tiling(128, Tile(64, STEP, 4, 3, is_bulk=True), Tile(128, STEP, 4, 3, is_bulk=True), is_fp8=True)),
)
DECODING_TILINGS: Tilings = (
    (12, Tiling(16, _SMALL, _SMALL)),
    (24, Tiling(32, Tile(64, STEP, 4, 3), Tile(128, STEP, 8, 3))),
    (math.inf, Tiling(64, Tile(128, STEP, 8, 3), Tile(128, STEP, 4, 3))),
)
MXFP4_TILINGS: Tilings = (
    (12, Tiling(16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))),
    (24, Tiling(32, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))),
    (math.inf, Tiling(64, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),
)


@cache  # every layer of a step calls this
def quantized_tiling(num_rows: int, num_experts: int, num_chosen: int, itemsize: int, format: PackedFormat) -> Tiling:
    """Return the tiles for this number of rows of the batch."""
    mean = num_rows * num_chosen / num_experts  # rows per expert
    if multiplies_in_fp8(format) and num_rows >= FP8_ROWS:
        tilings = FP8_BLOCK_TILINGS if format.group_columns else FP8_TILINGS
    elif itemsize > 2:  # fp32, without tensor cores
        tile = Tile(32, 32, num_warps=4, num_stages=3) if format.has_exponents else Tile(32, STEP, 4, 2)
        return Tiling(16 if mean <= 12 else 64, tile, tile)
    else:
        tilings = MXFP4_TILINGS if format.has_exponents else DECODING_TILINGS
    return next(shape for most, shape in tilings if mean <= most)


@cache
def alone_shape(num_bytes: int, *, is_gated: bool, has_exponents: bool) -> Strip:
    """Return the shape for outputs of so many bytes. Measured in docs/performance.md."""
    if has_exponents:
        return Strip(2 if is_gated else 1, min(int(triton.next_power_of_2(num_bytes)), 512), 2)
    if is_gated and num_bytes <= 1024:
        return Strip(4, 256, 1)
    width = min(int(triton.next_power_of_2(num_bytes)), 1024 if is_gated else 512)
    while num_bytes % width and width > 128:  # whole steps need no mask
        width //= 2
    return Strip(2 if is_gated else 1, width, 2)


# Launches


def grouped_product(
    x: Tensor, weight: ExpertStack, bias: Tensor | None, slots: SortedSlots, num_chosen: int,
    shape: Tiling, tile: Tile, kind: int | None,
) -> Tensor:  # fmt: skip
    """Multiply each slot's row by its expert's matrix, as in `experts.py`."""
    num_outputs, num_inputs = weight.shape[1:]
    whole, format = weight.whole, weight.format
    if kind is not None:
        num_outputs //= 2
    out = x.new_empty((len(slots.order), num_outputs))
    x_scales, x_stride, codes, is_bulk = None, 0, whole.codes, False
    if shape.is_fp8:
        given = quantize_rows(x, has_groups=format.group_columns > 0)
        x, x_scales, x_stride = given.codes, given.scales, given.scales.stride(1)
        codes = codes.view(torch.float8_e4m3fn)  # as bytes they would pass through registers on their way to the cores
        is_bulk = tile.is_bulk and num_inputs % STEP == 0
    matrix = TensorDescriptor.from_tensor(codes, [tile.outputs, STEP]) if is_bulk else codes
    num_programs = -(-slots.max_tiles // TILES_TOGETHER) * TILES_TOGETHER * -(-num_outputs // tile.outputs)
    _quantized_product[(num_programs,)](
        x, x_scales, x_stride, matrix, whole.scales, whole.zeros, bias, slots.order, slots.tiles, out, IN=num_inputs,
        OUT=num_outputs, K=num_chosen, ROWS=shape.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        TOGETHER=TILES_TOGETHER, KIND=KINDS[format.type], GROUP_ROWS=format.group_rows, GROUP=format.group_columns,
        IS_GATED=kind is not None,
        ACTIVATION=kind or 0, HAS_ASSEMBLER=HAS_ASSEMBLER, IN_PAIRS=HAS_ASSEMBLER and x.dtype == torch.bfloat16,
        IS_BULK=is_bulk, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def gated_alone(x: Tensor, weight: ExpertStack, bias: Tensor | None, ids: Tensor, kind: int) -> Tensor:
    """Return the gated products [S, F] of a few rows x [T, E], which read their experts independently."""
    size, width, (num_rows, num_chosen) = x.shape[1], weight.shape[1] // 2, ids.shape
    whole, format = weight.whole, weight.format
    shape = alone_shape(whole.codes.shape[1], is_gated=True, has_exponents=format.has_exponents)
    out = x.new_empty((num_rows * num_chosen, width))
    _gated_alone_quantized[(-(-width // shape.outputs), num_rows * num_chosen)](
        x, whole.codes, whole.scales, whole.zeros, bias, ids, out, E=size, F=width, K=num_chosen, PAIRS=shape.outputs,
        BYTES=shape.width, KIND=KINDS[format.type], GROUP_ROWS=format.group_rows, GROUP=format.group_columns,
        ACTIVATION=kind, HAS_ASSEMBLER=HAS_ASSEMBLER, num_warps=shape.num_warps,
    )  # fmt: skip
    return out


def down_alone(
    x: Tensor, weight: ExpertStack, bias: Tensor | None, ids: Tensor, weights: Tensor, num_slots: int
) -> Tensor:
    """Return the weighted sums [T, E] of the products of x [S, F]. `num_slots`: a power of two from K on."""
    size, width, (num_rows, num_chosen) = weight.shape[1], x.shape[1], ids.shape
    whole, format = weight.whole, weight.format
    shape = alone_shape(whole.codes.shape[1], is_gated=False, has_exponents=format.has_exponents)
    out = x.new_empty((num_rows, size))
    _down_alone_quantized[(size, num_rows)](
        x, whole.codes, whole.scales, whole.zeros, bias, ids, weights, out, E=size, F=width, K=num_chosen,
        SLOTS=num_slots, BYTES=shape.width, KIND=KINDS[format.type], GROUP_ROWS=format.group_rows,
        GROUP=format.group_columns, HAS_ASSEMBLER=HAS_ASSEMBLER, num_warps=shape.num_warps,
    )  # fmt: skip
    return out
