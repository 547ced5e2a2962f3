"""Matrix products of few rows with packed weights, which are decoded in registers: a step reads fewer bytes.

`_packed_rows` is for one input row, and with 8-bit codes also for two. Like `_row_product`, each program reads a few
whole rows of the matrix with wide loads. One thread loads sixteen neighbouring codes of a row, and sums their products
with the inputs before it multiplies the sum by their scale.

`_packed_tiles` is for up to 64 rows. Tensor cores multiply the codes as bf16 or fp16, which represent them exactly. If
a group has at least as many columns as a step, its scale multiplies the sum; the scale of a smaller group multiplies
the codes. Zeros in fp16 are subtracted, and the difference is scaled, in fp32: the weight is rounded once.

4-bit codes are in blocks of 32 weights: byte j holds weights j and j + 16 (`PackedWeight`). A tile of bytes is
therefore two tiles of weights, each multiplied by its own tile of inputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.chaining import can_launch_early, is_early, let_next_start, wait_for_inputs
from quire.backends.torch.kernels.linear import PARTS, Strip, _activated
from quire.backends.torch.packed import PackedFormat, PackedWeight
from quire.weights.packed import CodeType
from quire.weights.spec import Activation

# I inputs, O outputs, F = O / 2 outputs of a gated product

MAX_ROWS = 64  # of products in parts, and of those of FP8: more rows have FP8 tensor cores
TILE_ROWS = (16, 32, 64, 128)
ROW_COUNTS = (1, 2)  # of `packed_row_product`
STEP = 128  # columns of a step of `_packed_tiles`
SPLIT_OUTPUTS = 8192  # up to this number, products to the hidden size are in parts: there are too few tiles
KINDS = {CodeType.FP8: 0, CodeType.INT8: 1, CodeType.INT4: 2, CodeType.FP4: 3}
NIBBLES = (CodeType.INT4, CodeType.FP4)
HAS_ASSEMBLER = not triton.knobs.runtime.interpret  # the interpreter has none

_FP8 = tl.constexpr(0)  # see KINDS
_INT4 = tl.constexpr(2)  # 4 bits from here on
_FP4 = tl.constexpr(3)


class Tile(NamedTuple):
    """The shape of a program of `_packed_tiles`."""

    outputs: int
    num_warps: int
    num_stages: int


@triton.jit
def _store_row(
    products, row, is_in, bias, out,
    OUT: tl.constexpr, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Add up the products [OUTPUTS, INPUTS] of one input row, and store its outputs."""
    y = tl.sum(products, 1)
    if bias is not None:
        y += tl.load(bias + row, mask=is_in, other=0.0).to(tl.float32)
    if IS_GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate, up = tl.split(tl.reshape(y.to(dtype).to(tl.float32), (OUTPUTS // 2, 2)))  # rounded as when stored
        column = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        tl.store(out + column, (_activated(gate, IS_SILU) * up).to(dtype), mask=column < OUT // 2)
    else:
        tl.store(out + row, y.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _e2m1(code):
    """Return the weights of codes in the upper four bits of 32: moved to a float32, a code is the weight / 2 ** 126."""
    bits = (code & 0x80000000) | ((code >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def _wide_nibbles(codes, HAS_ASSEMBLER: tl.constexpr):
    """Return 128 plus the low and 2048 plus the high halves of bytes, in fp32.

    A half that is moved into the mantissa of such a number is added to it: half the instructions of a conversion. The
    caller subtracts the same multiples of the inputs.
    """
    if HAS_ASSEMBLER:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 left, right, first, last;
            shl.b32 left, $8, 8;
            shr.b32 right, $8, 8;
            shl.b32 first, $8, 16;
            shr.b32 last, $8, 16;
            lop3.b32 $0, first, 0x000F0000, 0x43000000, 0xEA;
            lop3.b32 $1, left, 0x000F0000, 0x43000000, 0xEA;
            lop3.b32 $2, $8, 0x000F0000, 0x43000000, 0xEA;
            lop3.b32 $3, right, 0x000F0000, 0x43000000, 0xEA;
            lop3.b32 $4, left, 0x0000F000, 0x45000000, 0xEA;
            lop3.b32 $5, $8, 0x0000F000, 0x45000000, 0xEA;
            lop3.b32 $6, right, 0x0000F000, 0x45000000, 0xEA;
            lop3.b32 $7, last, 0x0000F000, 0x45000000, 0xEA;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = (codes & 15).to(tl.float32) + 128.0, (codes >> 4).to(tl.float32) + 2048.0
    return low, high


@triton.jit
def _byte_values(codes, KIND: tl.constexpr):
    """Return the values of codes of 8 bits in fp32."""
    if KIND == _FP8:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _load_inputs(at, i, COUNT: tl.constexpr, IS_WHOLE: tl.constexpr):
    value = tl.load(at) if IS_WHOLE else tl.load(at, mask=i < COUNT, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _chunk_sums(value, R: tl.constexpr, BYTES: tl.constexpr):
    """Sum chunks of 16, which are in one thread: [R, BYTES / 16]."""
    return tl.sum(value.reshape((R, BYTES // 16, 16)), 2)


@triton.jit
def _row_sums(
    x, low, high, byte, zero, KIND: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the sums [R, BYTES / 16] of codes times one row of inputs, less zeros [R, BYTES / 16] or a number."""
    if KIND < _INT4:
        first = _load_inputs(x + byte, byte, COUNT, IS_WHOLE)[None, :]
        total = _chunk_sums(low * first, R, BYTES)
        if HAS_ZEROS:
            total -= _chunk_sums(first, 1, BYTES) * zero
    else:
        x_at = x + byte // 16 * 32 + byte % 16
        first = _load_inputs(x_at, byte, COUNT, IS_WHOLE)[None, :]
        second = _load_inputs(x_at + 16, byte, COUNT, IS_WHOLE)[None, :]
        total = _chunk_sums(low * first, R, BYTES) + _chunk_sums(high * second, R, BYTES)
        if KIND == _INT4:
            total -= _chunk_sums(first, 1, BYTES) * (128.0 + zero) + _chunk_sums(second, 1, BYTES) * (2048.0 + zero)
    return total


@triton.jit
def _load_group(at, row, column, GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Load scales or zeros [rows, columns] of the groups of some rows and columns of the matrix."""
    group = tl.minimum(column // GROUP, GROUPS - 1)  # columns past the end are masked elsewhere
    return tl.load(at + (row // GROUP_ROWS)[:, None] * GROUPS + group[None, :]).to(tl.float32)


@triton.jit
def _spread(scale, R: tl.constexpr, BYTES: tl.constexpr):
    """Repeat scales of chunks for each of their bytes: [R, BYTES]."""
    return tl.broadcast_to(scale[:, :, None], (R, BYTES // 16, 16)).reshape((R, BYTES))


@triton.jit
def _load_codes(at, byte, COUNT: tl.constexpr, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        codes = tl.load(at + byte[None, :], eviction_policy="evict_first")
    else:
        codes = tl.load(at + byte[None, :], mask=(byte < COUNT)[None, :], other=0, eviction_policy="evict_first")
    return codes


@triton.jit
def _scaled_sums(
    x, code, scales, zeros, row, offset,
    IN: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_ASSEMBLER: tl.constexpr,
):  # fmt: skip
    """Return the sums [R, BYTES / 16] of codes [R, BYTES] from byte `offset` on, for one or two rows of inputs."""
    columns: tl.constexpr = 16 * IN // COUNT  # of a chunk
    is_whole: tl.constexpr = COUNT % BYTES == 0
    groups: tl.constexpr = IN // GROUP if GROUP else 1
    byte = offset + tl.arange(0, BYTES)
    column = (offset // 16 + tl.arange(0, BYTES // 16)) * columns
    zero = 8.0
    if zeros is not None:
        zero = _load_group(zeros, row, column, GROUP if GROUP else IN, groups, GROUP_ROWS)
    scale = 1.0
    if GROUP:
        scale = _load_group(scales, row, column, GROUP, groups, GROUP_ROWS)
    if KIND == _INT4:
        low, high = _wide_nibbles(code, HAS_ASSEMBLER)
    elif KIND == _FP4:
        wide = code.to(tl.uint32)
        low, high = _e2m1(wide << 28), _e2m1(wide << 24)
        if GROUP == 16:  # the halves of a block have scales of their own
            low *= _spread(scale, R, BYTES)
            high *= _spread(_load_group(scales, row, column + 16, GROUP, groups, GROUP_ROWS), R, BYTES)
            scale = 1.0
    else:
        low = _byte_values(code, KIND)
        high = low
    first = scale * _row_sums(x, low, high, byte, zero, KIND, COUNT, R, BYTES, zeros is not None, is_whole)
    second = first
    if ROWS > 1:
        second = scale * _row_sums(x + IN, low, high, byte, zero, KIND, COUNT, R, BYTES, zeros is not None, is_whole)
    return first, second


@triton.jit
def _packed_rows(
    x, codes, scales, zeros, bias, out,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr, HAS_ASSEMBLER: tl.constexpr,
):  # fmt: skip
    # GROUP is the number of columns of a scale; 0: all.
    let_next_start()
    count: tl.constexpr = IN // 2 if KIND >= _INT4 else IN  # bytes of a row
    is_whole: tl.constexpr = count % BYTES == 0
    o = tl.arange(0, OUTPUTS)
    if IS_GATED:  # each gate next to its up
        row = tl.program_id(0) * (OUTPUTS // 2) + o // 2
        is_in = row < OUT // 2
        row = tl.where(is_in, row, 0) + (o % 2) * (OUT // 2)
    else:
        row = tl.program_id(0) * OUTPUTS + o
        is_in = row < OUT
        row = tl.where(is_in, row, 0)
    start = (codes + row.to(tl.int64) * count)[:, None]
    code = _load_codes(start, tl.arange(0, BYTES), count, is_whole)
    wait_for_inputs()
    total, second = _scaled_sums(
        x, code, scales, zeros, row, 0, IN, count, ROWS, OUTPUTS, BYTES, KIND, GROUP_ROWS, GROUP, HAS_ASSEMBLER
    )  # fmt: skip
    for offset in range(BYTES, count, BYTES):
        code = _load_codes(start, offset + tl.arange(0, BYTES), count, is_whole)
        one, other = _scaled_sums(
            x, code, scales, zeros, row, offset,
            IN, count, ROWS, OUTPUTS, BYTES, KIND, GROUP_ROWS, GROUP, HAS_ASSEMBLER,
        )  # fmt: skip
        total += one
        second += other
    if not GROUP:
        scale = tl.load(scales + row // GROUP_ROWS)[:, None]
        total *= scale
        second *= scale
    _store_row(total, row, is_in, bias, out, OUT, OUTPUTS, IS_GATED, IS_SILU)
    if ROWS > 1:
        width: tl.constexpr = OUT // 2 if IS_GATED else OUT
        _store_row(second, row, is_in, bias, out + width, OUT, OUTPUTS, IS_GATED, IS_SILU)


@triton.jit
def _paired_nibbles(codes, offset):
    """Return the low and high halves of bytes in bf16, plus offset - 128, two in each instruction."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, v, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 a, $2, 0, 0x4140;
        lop3.b32 v, a, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, v, one, $3;
        shr.b32 a, a, 4;
        lop3.b32 v, a, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, v, one, $3;
        }""",
        "=&r,=&r,r,r", [codes, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return low, high


@triton.jit
def _paired_e2m1(codes):
    """Return the weights of the low and high halves of bytes in bf16, two in each instruction.

    Moved to a bf16, a code is the weight / 2 ** 126.
    """
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, v, sign, factor, nothing;
        mov.b32 factor, 0x7E807E80;
        mov.b32 nothing, 0x80008000;
        prmt.b32 a, $2, 0, 0x4140;
        shl.b32 sign, a, 12;
        and.b32 sign, sign, 0x80008000;
        shl.b32 v, a, 6;
        lop3.b32 v, v, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 $0, v, factor, nothing;
        shl.b32 sign, a, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 v, a, 2;
        lop3.b32 v, v, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 $1, v, factor, nothing;
        }""",
        "=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return low, high


@triton.jit
def _decoded(codes, zero, dtype: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr,
             IN_PAIRS: tl.constexpr):  # fmt: skip
    """Return the two tiles of values of a tile of bytes [R, BYTES], which are the same for codes of 8 bits.

    `zero` is None, or [R, BYTES] fp32. Codes and whole zeros are exact in 16 bits.
    """
    if KIND == _INT4 and IN_PAIRS:
        offset = tl.full((R, BYTES), -136.0, tl.bfloat16) if zero is None else (-128.0 - zero).to(tl.bfloat16)
        low, high = _paired_nibbles(codes, offset)
    elif KIND == _INT4:
        less = 8.0 if zero is None else zero
        low, high = ((codes & 15).to(tl.float32) - less).to(dtype), ((codes >> 4).to(tl.float32) - less).to(dtype)
    elif KIND == _FP4 and IN_PAIRS:
        low, high = _paired_e2m1(codes)
    elif KIND == _FP4:
        wide = codes.to(tl.uint32)
        low, high = _e2m1(wide << 28).to(dtype), _e2m1(wide << 24).to(dtype)
    elif KIND == _FP8:
        low = codes.to(tl.float8e4nv, bitcast=True)
        # By way of fp32: the instruction from fp16 to bf16, which the compiler would use, is slow.
        low = low.to(tl.float16) if dtype == tl.float16 else low.to(tl.float32).to(dtype)
        high = low
    else:
        low = codes.to(tl.int8, bitcast=True).to(dtype)
        high = low
    return low, high


@triton.jit
def _with_minima(
    codes, scale, zero, KIND: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr, HAS_ASSEMBLER: tl.constexpr
):  # fmt: skip
    """Return the two tiles of weights in fp32. `scale` is 1 or [R, BYTES / 16], as `zero`.

    Each is code * scale + minimum: one operation per weight. Halves of a block have the same scale.
    """
    if KIND == _INT4:
        low, high = _wide_nibbles(codes, HAS_ASSEMBLER)
        wide = tl.zeros_like(zero) + scale
        factor = _spread(wide, R, BYTES)
        low = low * factor + _spread((-128.0 - zero) * wide, R, BYTES)
        high = high * factor + _spread((-2048.0 - zero) * wide, R, BYTES)
    else:
        wide = tl.zeros_like(zero) + scale
        low = _byte_values(codes, KIND) * _spread(wide, R, BYTES) - _spread(zero * wide, R, BYTES)
        high = low
    return low, high


@triton.jit
def _load_step(
    at, row, column, AFTER: tl.constexpr, IN: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Load the scales or zeros [rows, BYTES / 16] of 128 columns, AFTER columns after the first of each chunk.

    If the size of groups divides 128, or 128 divides it, the index is written so that the compiler can see that the
    groups of a row are neighbours: it then copies them together and ahead of time.
    """
    groups: tl.constexpr = IN // GROUP
    chunk = tl.arange(0, BYTES // 16) * (2048 // BYTES) + AFTER
    if IN % 128 == 0 and (GROUP % 128 == 0 or 128 % GROUP == 0):
        group = column // GROUP + (tl.arange(0, BYTES // 16) if GROUP == 2048 // BYTES else chunk // GROUP)
    else:
        group = tl.minimum((column + chunk) // GROUP, groups - 1)  # columns past the end are masked elsewhere
    return tl.load(at + (row // GROUP_ROWS)[:, None] * groups + group[None, :]).to(tl.float32)


@triton.jit
def _load_group_of_step(
    scales, zeros, row, group, groups, OUTPUTS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Load the scale and the zero [OUTPUTS] of a step if groups have 128 columns."""
    scale, zero = tl.zeros((OUTPUTS,), tl.float32), tl.zeros((OUTPUTS,), tl.float32)
    if GROUP == 128:
        at = row // GROUP_ROWS * groups + group
        scale += tl.load(scales + at)
        if zeros is not None:
            zero += tl.load(zeros + at).to(tl.float32)
    return scale, zero


@triton.jit
def _load_tile(
    c_at, scales, zeros, zero, row, column, is_in, dtype: tl.constexpr,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Load and decode 128 columns from `column` on, multiplied by their scales if groups are smaller than that.

    `zero` [OUTPUTS] is the zero of these columns if groups have 128.
    """
    per_byte: tl.constexpr = 128 // BYTES
    if IN % 128 == 0:
        codes = tl.load(c_at + column // per_byte)
    else:
        codes = tl.load(c_at + column // per_byte, mask=is_in, other=0)
    is_small: tl.constexpr = GROUP > 0 and GROUP < 128
    span: tl.constexpr = GROUP if GROUP else IN
    if zeros is not None and zeros.dtype.element_ty == tl.float16:
        scale = 1.0
        if is_small:
            scale = _load_step(scales, row, column, 0, IN, BYTES, span, GROUP_ROWS)
        zero = _load_step(zeros, row, column, 0, IN, BYTES, span, GROUP_ROWS)
        low, high = _with_minima(codes, scale, zero, KIND, OUTPUTS, BYTES, IN_PAIRS)
        low, high = low.to(dtype), high.to(dtype)
    else:
        less = None
        if zeros is not None and GROUP == 128:
            less = tl.broadcast_to(zero[:, None], (OUTPUTS, BYTES))
        elif zeros is not None:
            less = _spread(_load_step(zeros, row, column, 0, IN, BYTES, span, GROUP_ROWS), OUTPUTS, BYTES)
        low, high = _decoded(codes, less, dtype, KIND, OUTPUTS, BYTES, IN_PAIRS)
        if is_small:
            scale = _load_step(scales, row, column, 0, IN, BYTES, span, GROUP_ROWS).to(dtype)
            low *= _spread(scale, OUTPUTS, BYTES)
            if KIND >= _INT4 and GROUP % 32 != 0:  # the halves of a chunk of bytes have scales of their own
                scale = _load_step(scales, row, column, 16, IN, BYTES, span, GROUP_ROWS).to(dtype)
            if KIND >= _INT4:
                high *= _spread(scale, OUTPUTS, BYTES)
    return low, high


@triton.jit
def _load_rows(at, is_row, is_in, IS_WHOLE: tl.constexpr):
    return tl.load(at, mask=is_row, other=0.0) if IS_WHOLE else tl.load(at, mask=is_row & is_in, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _packed_tiles(
    x, codes, scales, zeros, bias, out, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    # The weights are the left operand: tensor cores read it from registers, in which the weights are decoded.
    # A program sums SPAN columns, 128 in each step.
    let_next_start()
    per_byte: tl.constexpr = 2 if KIND >= _INT4 else 1
    step: tl.constexpr = 128 // per_byte  # bytes
    is_whole: tl.constexpr = IN % 128 == 0
    groups: tl.constexpr = IN // GROUP if GROUP else 1
    dtype: tl.constexpr = x.dtype.element_ty
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile, strip, part = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles, tl.program_id(1)
    t = tile * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, OUTPUTS)
    if IS_GATED:  # each gate next to its up
        row = (strip * (OUTPUTS // 2) + o // 2) % (OUT // 2) + (o % 2) * (OUT // 2)
    else:
        row = (strip * OUTPUTS + o) % OUT  # rows past the end wrap around and are not stored
    byte = tl.arange(0, step)
    place = byte // 16 * 32 + byte % 16 if per_byte == 2 else byte  # of the byte's first weight
    is_row = (t < num_rows)[:, None]
    x_at = x + t[:, None].to(tl.int64) * IN + place[None, :]
    c_at = codes + row[:, None].to(tl.int64) * (IN // per_byte) + byte[None, :]
    first = part * SPAN
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale, zero = _load_group_of_step(scales, zeros, row, first // 128, groups, OUTPUTS, GROUP_ROWS, GROUP)
    wait_for_inputs()
    for column in range(first, tl.minimum(first + SPAN, IN), 128):
        is_in = (column + place < IN)[None, :]
        a = _load_rows(x_at + column, is_row, is_in, is_whole)
        low, high = _load_tile(
            c_at, scales, zeros, zero, row, column, is_in, dtype,
            IN, OUTPUTS, step, KIND, GROUP_ROWS, GROUP, IN_PAIRS,
        )  # fmt: skip
        later = tl.minimum(column // 128 + 1, groups - 1)  # loaded early
        next_scale, zero = _load_group_of_step(scales, zeros, row, later, groups, OUTPUTS, GROUP_ROWS, GROUP)
        if GROUP == 128:
            product = tl.dot(low, a.T, input_precision="ieee")
        else:
            product = tl.dot(low, a.T, total, input_precision="ieee")
        if per_byte == 2:
            a = _load_rows(x_at + 16 + column, is_row, is_in, is_whole)
            product = tl.dot(high, a.T, product, input_precision="ieee")
        total = total + product * scale[:, None] if GROUP == 128 else product
        scale = next_scale
    if GROUP == 0:
        total *= tl.load(scales + row // GROUP_ROWS)[:, None]
    _store_tile(total, t, row, strip, part, num_rows, bias, out, OUT, ROWS, OUTPUTS, IS_GATED, IS_SILU)


@triton.jit
def _store_tile(
    total, t, row, strip, part, num_rows, bias, out,
    OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Store the sums [OUTPUTS, ROWS] of a tile, with the bias in the first part."""
    if bias is not None:
        if part == 0:
            total += tl.load(bias + row).to(tl.float32)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    is_row = (t < num_rows)[None, :]
    if IS_GATED:
        rounded = total.to(dtype).to(tl.float32)  # as when stored
        gate, up = tl.split(tl.permute(tl.reshape(rounded, (OUTPUTS // 2, 2, ROWS)), (0, 2, 1)))
        column = strip * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        value = (_activated(gate, IS_SILU) * up).to(dtype)
        is_in = is_row & (column < OUT // 2)[:, None]
        tl.store(out + t[None, :] * (OUT // 2) + column[:, None], value, mask=is_in)
    else:
        column = strip * OUTPUTS + tl.arange(0, OUTPUTS)
        is_in = is_row & (column < OUT)[:, None]
        tl.store(out + (part * num_rows + t[None, :]) * OUT + column[:, None], total.to(dtype), mask=is_in)


@cache
def row_strip(num_outputs: int, num_bytes: int) -> Strip:
    """Return the strip for rows of so many bytes. Measured in docs/performance.md."""
    if num_bytes <= 1024:
        return Strip(outputs=4, width=1024, num_warps=2)
    if num_outputs <= 2048:
        return Strip(outputs=2, width=2048, num_warps=4)
    if num_bytes <= 2048 and num_outputs > 4096:
        return Strip(outputs=8, width=1024, num_warps=2)
    if num_outputs > 8192:
        return Strip(outputs=4, width=1024, num_warps=2)
    return Strip(outputs=8 if num_bytes <= 4096 and num_outputs <= 4096 else 4, width=2048, num_warps=4)


@cache
def tile_shape(rows: int, type: CodeType, *, is_wide: bool) -> Tile:
    """Return a tile that leaves enough programs to fill the card. Wide products have many, so their tiles are larger.

    See docs/performance.md.
    """
    has_nibbles = type in NIBBLES
    if rows > 64:
        return Tile(outputs=128, num_warps=8, num_stages=3)
    if rows > 32:
        num_warps = 8 if is_wide and type is CodeType.FP8 else 4
        return Tile(outputs=128 if is_wide or has_nibbles else 64, num_warps=num_warps, num_stages=3)
    if has_nibbles:
        return Tile(outputs=128 if is_wide else 64, num_warps=4, num_stages=3)
    return Tile(outputs=64, num_warps=2, num_stages=3) if is_wide else Tile(outputs=32, num_warps=2, num_stages=4)


def has_row_product(num_rows: int, format: PackedFormat) -> bool:
    """Return whether `packed_row_product` computes so many rows. Two rows of 4-bit codes take less time in a tile."""
    return num_rows == 1 or (num_rows in ROW_COUNTS and format.type not in NIBBLES and not format.has_half_zeros)


def packed_row_product(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """Multiply x [T, I] of few rows by weight [O, I] transposed: [T, O].

    With an activation, return activation(gate) * up [T, F] of the product with weight [2F, I], gates first.
    """
    num_outputs, num_inputs = weight.shape
    is_gated, format = activation is not None, weight.format
    out = x.new_empty((len(x), num_outputs // 2 if is_gated else num_outputs))
    strip = row_strip(num_outputs, weight.codes.shape[1])
    _packed_rows[(-(-num_outputs // strip.outputs),)](
        x, weight.codes, weight.scales, weight.zeros, bias, out, IN=num_inputs, OUT=num_outputs, ROWS=len(x),
        OUTPUTS=strip.outputs, BYTES=strip.width, KIND=KINDS[format.type], GROUP_ROWS=format.group_rows,
        GROUP=format.group_columns, IS_GATED=is_gated, IS_SILU=activation is Activation.SILU,
        HAS_ASSEMBLER=HAS_ASSEMBLER, num_warps=strip.num_warps, launch_pdl=can_launch_early(),
    )  # fmt: skip
    return out


def packed_tile_product(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: Activation | None = None, *, num_parts: int = 1
) -> Tensor:
    """Like `packed_row_product`, of any number of rows.

    `num_parts`: PARTS for a matrix of few outputs. Returns fp32 partial sums [PARTS, T, O].
    """
    num_rows, num_inputs = x.shape
    is_gated, format = activation is not None, weight.format
    if num_parts > 1:
        out = x.new_empty((num_parts, num_rows, len(weight)), dtype=torch.float32)
    else:
        out = x.new_empty((num_rows, len(weight) // 2 if is_gated else len(weight)))
    rows = next((size for size in TILE_ROWS if num_rows <= size), TILE_ROWS[-1])
    tile = tile_shape(rows, format.type, is_wide=num_parts > 1 or is_gated or len(weight) > 8192)
    num_tiles = -(-num_rows // rows) * -(-len(weight) // tile.outputs)
    _packed_tiles[(num_tiles, num_parts)](
        x, weight.codes, weight.scales, weight.zeros, bias, out, num_rows, IN=num_inputs, OUT=len(weight), ROWS=rows,
        OUTPUTS=tile.outputs, SPAN=-(-num_inputs // (STEP * num_parts)) * STEP, KIND=KINDS[format.type],
        GROUP_ROWS=format.group_rows, GROUP=format.group_columns, IS_GATED=is_gated,
        IS_SILU=activation is Activation.SILU, IN_PAIRS=HAS_ASSEMBLER and x.dtype == torch.bfloat16,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=is_early(rows),
    )  # fmt: skip
    return out


def can_split(num_outputs: int, num_inputs: int) -> bool:
    """Return whether a product to the hidden size is computed in parts: every part has a step."""
    return num_outputs <= SPLIT_OUTPUTS and num_inputs > (PARTS - 1) * -(-num_inputs // (STEP * PARTS)) * STEP
