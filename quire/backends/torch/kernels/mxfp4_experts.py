"""Products with experts in MXFP4, which are decoded in registers: a step reads a quarter of the bytes of bf16.

A byte of codes holds weights j and j + 16 of a group of 32 (`Mxfp4Stack`). A tile of bytes is therefore two tiles of
weights, and each is multiplied by its own tile of inputs: nothing is reordered. A code has a sign, two bits of exponent
and one of mantissa. Moved to the same places of a float32 it is the weight times 2 ** -126, exactly, subnormal or not;
one multiplication by the exponent of the group corrects that.

Sorting, tiles and results are as in `experts.py`, which calls this module.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.experts import SortedSlots, Tile, Tiling
from quire.backends.torch.kernels.linear import _gated_value
from quire.backends.torch.packed import Mxfp4Stack

# T rows of the batch, N experts, K experts chosen per row, E hidden size, F width of an expert, IN inputs, OUT outputs

HAS_PAIRS = not triton.knobs.runtime.interpret  # the interpreter has no assembler
TILES_TOGETHER = 8  # tiles next to each other that read the same strip of their experts
EXPANDED_GROUPS = 256  # per program
ALONE_BYTES = 512  # of an output, per step of a program for few rows of the batch
ALONE_PAIRS = 2  # gates and their ups per program
ALONE_WARPS = (2, 2)  # of the two kernels for few rows


@triton.jit
def _unscaled(code):
    """Return the weights times 2 ** -126 of codes in the upper four bits of 32."""
    bits = (code & 0x80000000) | ((code >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scales(exponent):
    """Return 2 ** 126 times the scales of groups."""
    return ((exponent.to(tl.uint32) + 126) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(codes, exponents, dtype: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr):
    """Return the two tiles of weights [R, BYTES] of a tile of codes, with exponents [R, BYTES / 16]."""
    wide = codes.to(tl.uint32)
    scale = tl.broadcast_to(_scales(exponents)[:, :, None], (R, BYTES // 16, 16)).reshape((R, BYTES))
    low = (_unscaled(wide << 28) * scale).to(dtype)
    return low, (_unscaled(wide << 24) * scale).to(dtype)


@triton.jit
def _decoded_pairs(codes, exponents, R: tl.constexpr, BYTES: tl.constexpr):
    """The same as `_decoded` in bf16, with two weights in each instruction: half as many instructions."""
    scale = ((exponents.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    scale = tl.broadcast_to(scale[:, :, None], (R, BYTES // 16, 16)).reshape((R, BYTES))
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, m, s, z;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shl.b32 m, a, 6;
        shl.b32 s, a, 12;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, z, m, 0xEA;
        fma.rn.bf16x2 $0, m, $5, z;
        shl.b32 m, b, 6;
        shl.b32 s, b, 12;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, z, m, 0xEA;
        fma.rn.bf16x2 $1, m, $6, z;
        shl.b32 m, a, 2;
        shl.b32 s, a, 8;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, z, m, 0xEA;
        fma.rn.bf16x2 $2, m, $5, z;
        shl.b32 m, b, 2;
        shl.b32 s, b, 8;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, z, m, 0xEA;
        fma.rn.bf16x2 $3, m, $6, z;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r", [codes, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    return low, high


@triton.jit
def _load_bytes(at, i, COUNT: tl.constexpr, IS_WHOLE: tl.constexpr):
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=(i < COUNT)[None, :], other=0)


@triton.jit
def _multiply_packed(
    x, codes, exponents, bias, order, out, expert, first, end, strip,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr, IS_GATED: tl.constexpr, KIND: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows by a strip of their expert's matrix.

    The weights are the left operand: tensor cores read it from registers, in which the weights are decoded.
    """
    num_matrix: tl.constexpr = 2 * OUT if IS_GATED else OUT  # outputs of an expert
    dtype: tl.constexpr = out.dtype.element_ty
    is_whole: tl.constexpr = (IN // 2) % BYTES == 0
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.where(is_row, place, first)  # rows past the end repeat the first and are not stored
    slot = tl.load(order + place)
    column = strip * OUTPUTS + tl.arange(0, OUTPUTS)
    row = (expert * num_matrix + column % OUT).to(tl.int64)  # columns past the end wrap around
    byte, group = tl.arange(0, BYTES), tl.arange(0, BYTES // 16)
    source = slot // K if IS_GATED else place  # gated rows are written in the order of the experts
    x_at = x + source[:, None].to(tl.int64) * IN + (byte // 16 * 32 + byte % 16)[None, :]
    c_at = codes + row[:, None] * (IN // 2) + byte[None, :]
    e_at = exponents + row[:, None] * (IN // 32) + group[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, IN // 2, BYTES):
        a1 = _load_bytes(x_at, start + byte, IN // 2, is_whole)
        a2 = _load_bytes(x_at + 16, start + byte, IN // 2, is_whole)
        c = _load_bytes(c_at, start + byte, IN // 2, is_whole)
        e = _load_bytes(e_at, start // 16 + group, IN // 32, is_whole)
        if IN_PAIRS:
            low, high = _decoded_pairs(c, e, OUTPUTS, BYTES)
        else:
            low, high = _decoded(c, e, dtype, OUTPUTS, BYTES)
        total = tl.dot(low, a1.T, total, input_precision="ieee")
        total = tl.dot(high, a2.T, total, input_precision="ieee")
        if IS_GATED:
            c = _load_bytes(c_at + OUT * (IN // 2), start + byte, IN // 2, is_whole)
            e = _load_bytes(e_at + OUT * (IN // 32), start // 16 + group, IN // 32, is_whole)
            if IN_PAIRS:
                low, high = _decoded_pairs(c, e, OUTPUTS, BYTES)
            else:
                low, high = _decoded(c, e, dtype, OUTPUTS, BYTES)
            up = tl.dot(low, a1.T, up, input_precision="ieee")
            up = tl.dot(high, a2.T, up, input_precision="ieee")
        x_at += 2 * BYTES
        c_at += BYTES
        e_at += BYTES // 16
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias + row + OUT).to(tl.float32)[:, None]
    target = slot
    if IS_GATED:
        total = _gated_value(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), KIND)  # as when stored
        target = place
    is_in = is_row[None, :] & (column < OUT)[:, None]
    tl.store(out + target[None, :].to(tl.int64) * OUT + column[:, None], total.to(dtype), mask=is_in)


@triton.jit
def _mxfp4_product(
    x, codes, exponents, bias, order, tiles, out,
    IN: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, TOGETHER: tl.constexpr,
    IS_GATED: tl.constexpr, KIND: tl.constexpr, IN_PAIRS: tl.constexpr,
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
    _multiply_packed(
        x, codes, exponents, bias, order, out, expert, first, end, strip,
        IN, OUT, K, ROWS, OUTPUTS, BYTES, IS_GATED, KIND, IN_PAIRS,
    )  # fmt: skip


@triton.jit
def _dot_packed(x_at, c_at, e_at, is_real, is_x, IN: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr):
    """Return the sums [R] of R rows of codes times inputs. `x_at` and its mask `is_x` are both [R, 1] or [1, 1].

    A group is summed before it is multiplied by its exponent. Inputs are multiplied by 2 ** 96, so that the sum does
    not underflow.
    """
    total = tl.zeros((R, BYTES // 16), tl.float32)
    for start in tl.static_range(0, IN // 2, BYTES):
        byte = start + tl.arange(0, BYTES)
        group = start // 16 + tl.arange(0, BYTES // 16)
        is_in, is_x_in = is_real & (byte < IN // 2)[None, :], is_x & (byte < IN // 2)[None, :]
        column = (byte // 16 * 32 + byte % 16)[None, :]
        code = tl.load(c_at + byte[None, :], mask=is_in, other=0, eviction_policy="evict_first").to(tl.uint32)
        exponent = tl.load(e_at + group[None, :], mask=is_real & (group < IN // 32)[None, :], other=0)
        x1 = tl.load(x_at + column, mask=is_x_in, other=0.0).to(tl.float32) * 79228162514264337593543950336.0
        x2 = tl.load(x_at + 16 + column, mask=is_x_in, other=0.0).to(tl.float32) * 79228162514264337593543950336.0
        value = _unscaled(code << 28) * x1 + _unscaled(code << 24) * x2
        value = tl.sum(value.reshape((R, BYTES // 16, 16)), 2)
        total += value * ((exponent.to(tl.uint32) + 30) << 23).to(tl.float32, bitcast=True)
    return tl.sum(total, 1)


@triton.jit
def _gated_alone_mxfp4(
    x, codes, exponents, bias, ids, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    # A program computes a few gates and their ups, each gate next to its up.
    slot = tl.program_id(1)
    expert = tl.load(ids + slot).to(tl.int64)
    o = tl.arange(0, 2 * PAIRS)
    column = tl.program_id(0) * PAIRS + o // 2
    row = expert * (2 * F) + tl.minimum(column, F - 1) + o % 2 * F
    x_at = x + (slot // K).to(tl.int64) * E + tl.zeros((1, 1), tl.int32)
    y = _dot_packed(
        x_at, codes + row[:, None] * (E // 2), exponents + row[:, None] * (E // 32), (column < F)[:, None],
        tl.full((1, 1), True, tl.int1), E, 2 * PAIRS, BYTES,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = tl.split(tl.reshape(y.to(dtype).to(tl.float32), (PAIRS, 2)))  # rounded as when stored
    column = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    value = _gated_value(gate, up, KIND).to(dtype)
    tl.store(out + slot.to(tl.int64) * F + column, value, mask=column < F)


@triton.jit
def _down_alone_mxfp4(
    x, codes, exponents, bias, ids, weights, out,
    E: tl.constexpr, F: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    # A program computes one output of all experts of a row.
    column, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, SLOTS)
    expert = tl.load(ids + row * K + k, mask=k < K, other=0).to(tl.int64)
    place = expert * E + column
    y = _dot_packed(
        x + (row * K + k)[:, None] * F, codes + place[:, None] * (F // 2), exponents + place[:, None] * (F // 32),
        (k < K)[:, None], (k < K)[:, None], F, SLOTS, BYTES,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + place).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    y = tl.sum(y * tl.load(weights + row * K + k, mask=k < K, other=0.0), 0)
    tl.store(out + row * E + column, y.to(dtype))


@triton.jit(do_not_specialize=["num_groups"])
def _expand(codes, exponents, out, num_groups, GROUPS: tl.constexpr, IN_PAIRS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    byte = tl.arange(0, 16)[None, :]
    is_in = group < num_groups
    c = tl.load(codes + group * 16 + byte, mask=is_in, other=0)
    e = tl.load(exponents + group, mask=is_in, other=0)
    if IN_PAIRS:
        low, high = _decoded_pairs(c, e, GROUPS, 16)
    else:
        low, high = _decoded(c, e, out.dtype.element_ty, GROUPS, 16)
    target = out + group * 32 + byte
    tl.store(target, low, mask=is_in)
    tl.store(target + 16, high, mask=is_in)


def expanded(stack: Mxfp4Stack) -> Tensor:
    """Return the decoded matrices [N, O, I] of all experts."""
    out = torch.empty(stack.shape, dtype=stack.dtype, device=stack.codes.device)
    num_groups = stack.exponents.numel()
    _expand[(-(-num_groups // EXPANDED_GROUPS),)](
        stack.codes, stack.exponents, out, num_groups, GROUPS=EXPANDED_GROUPS,
        IN_PAIRS=HAS_PAIRS and stack.dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


@cache  # every layer of a step calls this
def mxfp4_tiling(num_rows: int, num_experts: int, num_chosen: int, itemsize: int) -> Tiling:
    """Return the tiles for this number of rows of the batch. Measured in docs/performance.md."""
    mean = num_rows * num_chosen / num_experts  # rows per expert
    if itemsize > 2:  # fp32, without tensor cores
        tile = Tile(outputs=32, inputs=32, num_warps=4, num_stages=3)
        return Tiling(16 if mean <= 12 else 64, tile, tile)
    if mean <= 12:
        return Tiling(16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
    if mean <= 24:
        return Tiling(32, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))
    return Tiling(64, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))


def grouped_product(
    x: Tensor, weight: Mxfp4Stack, bias: Tensor | None, slots: SortedSlots, num_chosen: int, shape: Tiling, tile: Tile,
    kind: int | None,
) -> Tensor:  # fmt: skip
    """Multiply each slot's row by its expert's matrix, as in `experts.py`."""
    num_outputs, num_inputs = weight.shape[1:]
    if kind is not None:
        num_outputs //= 2
    out = x.new_empty((len(slots.order), num_outputs))
    num_programs = -(-slots.max_tiles // TILES_TOGETHER) * TILES_TOGETHER * -(-num_outputs // tile.outputs)
    _mxfp4_product[(num_programs,)](
        x, weight.codes, weight.exponents, bias, slots.order, slots.tiles, out, IN=num_inputs, OUT=num_outputs,
        K=num_chosen, ROWS=shape.rows, OUTPUTS=tile.outputs, BYTES=tile.inputs // 2, TOGETHER=TILES_TOGETHER,
        IS_GATED=kind is not None, KIND=kind or 0, IN_PAIRS=HAS_PAIRS and x.dtype == torch.bfloat16,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def gated_alone(x: Tensor, weight: Mxfp4Stack, bias: Tensor | None, ids: Tensor, kind: int) -> Tensor:
    """Return the gated products [S, F] of a few rows x [T, E], which read their experts independently."""
    size, width, (num_rows, num_chosen) = x.shape[1], weight.shape[1] // 2, ids.shape
    pairs = ALONE_PAIRS
    out = x.new_empty((num_rows * num_chosen, width))
    _gated_alone_mxfp4[(-(-width // pairs), num_rows * num_chosen)](
        x, weight.codes, weight.exponents, bias, ids, out, E=size, F=width, K=num_chosen, PAIRS=pairs,
        BYTES=_alone_bytes(size), KIND=kind, num_warps=ALONE_WARPS[0],
    )  # fmt: skip
    return out


def down_alone(
    x: Tensor, weight: Mxfp4Stack, bias: Tensor | None, ids: Tensor, weights: Tensor, num_slots: int
) -> Tensor:
    """Return the weighted sums [T, E] of the products of x [S, F]. `num_slots`: a power of two from K on."""
    size, width, (num_rows, num_chosen) = weight.shape[1], x.shape[1], ids.shape
    out = x.new_empty((num_rows, size))
    _down_alone_mxfp4[(size, num_rows)](
        x, weight.codes, weight.exponents, bias, ids, weights, out, E=size, F=width, K=num_chosen, SLOTS=num_slots,
        BYTES=_alone_bytes(width), num_warps=ALONE_WARPS[1],
    )  # fmt: skip
    return out


def _alone_bytes(num_inputs: int) -> int:
    return min(int(triton.next_power_of_2(num_inputs // 2)), ALONE_BYTES)
