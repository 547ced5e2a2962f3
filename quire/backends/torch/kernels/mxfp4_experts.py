"""Decoding of experts in MXFP4, in registers: a step reads a quarter of the bytes of bf16.

A byte of codes holds weights j and j + 16 of a group of 32 (`PackedWeight`). A tile of bytes is therefore two tiles of
weights, and each is multiplied by its own tile of inputs: nothing is reordered. A code has a sign, two bits of exponent
and one of mantissa. Moved to the same places of a float32 it is the weight times 2 ** -126, exactly, subnormal or not;
one multiplication by the exponent of the group corrects that.

The kernels of `quantized_experts.py` call the sums of this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.experts import _load
from quire.backends.torch.kernels.packed_linear import HAS_ASSEMBLER
from quire.backends.torch.packed import PackedWeight

# N experts, IN or I inputs, OUT or O outputs

EXPANDED_GROUPS = 256  # per program


@triton.jit
def _unscaled(code):
    """Return the weights times 2 ** -126 of codes in the upper four bits of 32."""
    bits = (code & 0x80000000) | ((code >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decoded_pairs(codes, exponents, R: tl.constexpr, BYTES: tl.constexpr):
    """Return what `_decoded` returns in bf16, with two weights in each instruction: half as many instructions."""
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
def _decoded(
    codes, exponents, dtype: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr, IN_PAIRS: tl.constexpr
):  # fmt: skip
    """Return the two tiles of weights [R, BYTES] of a tile of codes, with exponents [R, BYTES / 16]."""
    if IN_PAIRS:
        return _decoded_pairs(codes, exponents, R, BYTES)
    wide = codes.to(tl.uint32)
    scale = ((exponents.to(tl.uint32) + 126) << 23).to(tl.float32, bitcast=True)  # times 2 ** 126
    scale = tl.broadcast_to(scale[:, :, None], (R, BYTES // 16, 16)).reshape((R, BYTES))
    low = (_unscaled(wide << 28) * scale).to(dtype)
    return low, (_unscaled(wide << 24) * scale).to(dtype)


@triton.jit
def _add_step(
    total, first, second, c_at, e_at, start,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the product of the bytes from `start` on, and of their two tiles of inputs, to the sums [OUTPUTS, ROWS]."""
    is_whole: tl.constexpr = (IN // 2) % BYTES == 0
    codes = _load(c_at, start + tl.arange(0, BYTES), IN // 2, is_whole)
    exponents = _load(e_at, start // 16 + tl.arange(0, BYTES // 16), IN // 32, is_whole)
    low, high = _decoded(codes, exponents, first.dtype, OUTPUTS, BYTES, IN_PAIRS)
    total = tl.dot(low, first.T, total, input_precision="ieee")
    return tl.dot(high, second.T, total, input_precision="ieee")


@triton.jit
def sums_in_tiles(
    x, codes, exponents, source, row,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_GATED: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the sums [OUTPUTS, ROWS] of outputs `row` and, of a gated product, of those OUT further.

    The weights are the left operand: tensor cores read it from registers, in which the weights are decoded.
    """
    step: tl.constexpr = INPUTS // 2  # bytes
    is_whole: tl.constexpr = IN % INPUTS == 0
    byte, group = tl.arange(0, step), tl.arange(0, step // 16)
    x_at = x + source[:, None].to(tl.int64) * IN + (byte // 16 * 32 + byte % 16)[None, :]
    c_at = codes + row[:, None] * (IN // 2) + byte[None, :]
    e_at = exponents + row[:, None] * (IN // 32) + group[None, :]
    total, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, IN // 2, step):
        first = _load(x_at, start + byte, IN // 2, is_whole)
        second = _load(x_at + 16, start + byte, IN // 2, is_whole)
        total = _add_step(total, first, second, c_at, e_at, start, IN, OUTPUTS, step, IN_PAIRS)
        if IS_GATED:
            up_at, ue_at = c_at + OUT * (IN // 2), e_at + OUT * (IN // 32)
            up = _add_step(up, first, second, up_at, ue_at, start, IN, OUTPUTS, step, IN_PAIRS)
        x_at += INPUTS
        c_at += step
        e_at += step // 16
    return total, up


@triton.jit
def sums_of_rows(x_at, c_at, e_at, is_real, is_x, IN: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr):
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


@triton.jit(do_not_specialize=["num_groups"])
def _expand(codes, exponents, out, num_groups, GROUPS: tl.constexpr, IN_PAIRS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    byte = tl.arange(0, 16)[None, :]
    is_in = group < num_groups
    c = tl.load(codes + group * 16 + byte, mask=is_in, other=0)
    e = tl.load(exponents + group, mask=is_in, other=0)
    low, high = _decoded(c, e, out.dtype.element_ty, GROUPS, 16, IN_PAIRS)
    target = out + group * 32 + byte
    tl.store(target, low, mask=is_in)
    tl.store(target + 16, high, mask=is_in)


def expanded(weight: PackedWeight) -> Tensor:
    """Return the decoded matrix [O, I]."""
    out = weight.codes.new_empty(weight.shape, dtype=weight.dtype)
    num_groups = weight.scales.numel()
    _expand[(-(-num_groups // EXPANDED_GROUPS),)](
        weight.codes, weight.scales, out, num_groups, GROUPS=EXPANDED_GROUPS,
        IN_PAIRS=HAS_ASSEMBLER and weight.dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out
