"""Products of many rows with packed weights.

FP8 weights are multiplied by inputs that are rounded to FP8 too, in tensor cores with twice the rate of bf16. On an
H200 (4.8 TB/s, 990 TFLOP/s in bf16 and 1,979 in FP8 by the datasheet) a product of T rows reads a weight in 0.2 ps and
multiplies it in T * 1 fs: from about 200 rows on the operations count, and FP8 halves both. Inputs have a scale for
each row if the weights have one for each output, and for each 128 columns if the weights are in blocks: the sums of 128
columns are then multiplied by both scales.

The library's products are faster than ours. For scales of rows it has tiles of 128 x 128 only, of which a product of
few rows and outputs has too few to fill the card. For one scale in all it has other tiles too. The scales of such small
products are therefore applied by the kernel that reads them (`Fp8Product`). Only Hopper has a library product for
blocks.

Other weights are decoded into a matrix of the model's type, for the library's product. That moves about 4.5 bytes per
weight, 1.1 ps, which 1,000 rows or more hide; up to `TILED_ROWS` rows, decoding inside the product is faster.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.kernels.fp8_rows import GROUP, apply_scales, quantize_rows
from quire.backends.torch.kernels.packed_linear import HAS_ASSEMBLER, KINDS, _e2m1, _load_group, _spread
from quire.backends.torch.layers import Fp8Product, Fp8Rows, Inputs
from quire.backends.torch.packed import PackedWeight, multiplies_in_fp8

# T rows, I inputs, O outputs

TILED_ROWS = 64  # up to this number, products other than FP8 decode inside
ALIGNMENT = 16  # of both sizes of a matrix, for the library's product in FP8
EXPANDED_BYTES = 4096  # per program
MAX_EXPANDED = 1 << 28  # weights that are decoded at a time: half a gigabyte
LIBRARY_TILE = 128
UNSCALED_TILES = 512  # about four times the multiprocessors of an H200

_FP8 = tl.constexpr(0)  # see KINDS
_INT4 = tl.constexpr(2)


class Fp8Tile(NamedTuple):
    """The shape of a program of `_fp8_product`."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _fp8_product(
    x, x_scales, codes, scales, bias, out, num_rows, stride,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    # Programs of one strip of the matrix are adjacent, so the strip is read from memory once.
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile, strip = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    t, column, i = tile * ROWS + tl.arange(0, ROWS), strip * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, 128)
    source, row = t % num_rows, column % OUT  # what is past the end wraps around and is not stored
    is_whole: tl.constexpr = IN % 128 == 0
    groups: tl.constexpr = (IN + 127) // 128 if HAS_GROUPS else 1
    x_at = x + source[:, None].to(tl.int64) * IN + i[None, :]
    w_at = codes + row[:, None].to(tl.int64) * IN + i[None, :]
    xs_at = x_scales + source  # [T, groups], column by column
    ws_at = scales + row // GROUP_ROWS * groups
    if GROUP_ROWS % OUTPUTS == 0:  # a strip has one scale
        ws_at = scales + strip * OUTPUTS // GROUP_ROWS * groups + tl.zeros((1,), tl.int32)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    x_scale, scale = tl.load(xs_at), tl.load(ws_at)
    for start in range(0, IN, 128):
        if is_whole:
            a, b = tl.load(x_at + start), tl.load(w_at + start)
        else:
            is_in = (start + i < IN)[None, :]
            a, b = tl.load(x_at + start, mask=is_in, other=0.0), tl.load(w_at + start, mask=is_in, other=0.0)
        if IS_WIDE:  # the interpreter has no product of FP8
            a, b = a.to(tl.float32), b.to(tl.float32)
        if HAS_GROUPS:  # the scales of the next step are loaded early
            later = tl.minimum(start // 128 + 1, groups - 1)
            next_x_scale, next_scale = tl.load(xs_at + later * stride), tl.load(ws_at + later)
            if GROUP_ROWS % OUTPUTS == 0:
                total += tl.dot(a, b.T) * (x_scale * scale)[:, None]
            else:
                total += tl.dot(a, b.T) * x_scale[:, None] * scale[None, :]
            x_scale, scale = next_x_scale, next_scale
        else:
            total = tl.dot(a, b.T, total)
    if not HAS_GROUPS:
        total = total * x_scale[:, None] * scale[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    is_in = (t < num_rows)[:, None] & (column < OUT)[None, :]
    tl.store(out + t[:, None].to(tl.int64) * OUT + column[None, :], total.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _expand_packed(
    codes, scales, zeros, out,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 2 if KIND >= _INT4 else 1
    count: tl.constexpr = IN // per_byte
    groups: tl.constexpr = IN // GROUP if GROUP else 1
    span: tl.constexpr = GROUP if GROUP else IN
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < OUT
    row = tl.where(is_row, row, 0)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    column = (tl.program_id(1) * (BYTES // 16) + tl.arange(0, BYTES // 16)) * (16 * per_byte)
    is_in = is_row[:, None] & (byte < count)[None, :]
    code = tl.load(codes + row[:, None].to(tl.int64) * count + byte[None, :], mask=is_in, other=0)
    scale = _spread(_load_group(scales, row, column, span, groups, GROUP_ROWS), ROWS, BYTES)
    zero = 8.0
    if zeros is not None:
        zero = _spread(_load_group(zeros, row, column, span, groups, GROUP_ROWS), ROWS, BYTES)
    dtype: tl.constexpr = out.dtype.element_ty
    o_at = out + row[:, None].to(tl.int64) * IN
    if per_byte == 2:
        if KIND == _INT4:
            low, high = (code & 15).to(tl.float32) - zero, (code >> 4).to(tl.float32) - zero
        else:
            wide = code.to(tl.uint32)
            low, high = _e2m1(wide << 28), _e2m1(wide << 24)
        place = (byte // 16 * 32 + byte % 16)[None, :]
        later = _spread(_load_group(scales, row, column + 16, span, groups, GROUP_ROWS), ROWS, BYTES)
        tl.store(o_at + place, (low * scale).to(dtype), mask=is_in)
        tl.store(o_at + place + 16, (high * later).to(dtype), mask=is_in)
    else:
        if KIND == _FP8:
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = code.to(tl.int8, bitcast=True).to(tl.float32)
            if zeros is not None:
                value -= zero
        tl.store(o_at + byte[None, :], (value * scale).to(dtype), mask=is_in)


@cache
def fp8_tile(num_rows: int, num_outputs: int) -> Fp8Tile:
    """Return the tile with enough programs to fill the card. To be measured on the device."""
    if num_rows <= 64 or (num_rows <= 256 and num_outputs <= 8192):
        return Fp8Tile(64, 128, 4, 4)
    return Fp8Tile(128, 128, 8, 4)


def fp8_product(rows: Fp8Rows, weight: PackedWeight, bias: Tensor | None, tile: Fp8Tile | None = None) -> Tensor:
    """Multiply rows [T, I] by FP8 weights [O, I] transposed: [T, O] in the model's type."""
    num_rows, num_inputs = len(rows), rows.codes.shape[1]
    format = weight.format
    tile = tile or fp8_tile(num_rows, len(weight))
    out = rows.scales.new_empty((num_rows, len(weight)), dtype=weight.dtype)
    num_programs = -(-num_rows // tile.rows) * -(-len(weight) // tile.outputs)
    # As bytes, codes would pass through registers on their way to the tensor cores.
    codes = weight.codes.view(torch.float8_e4m3fn)
    _fp8_product[(num_programs,)](
        rows.codes, rows.scales, codes, weight.scales, bias, out, num_rows, rows.scales.stride(1),
        IN=num_inputs, OUT=len(weight), ROWS=tile.rows, OUTPUTS=tile.outputs,
        GROUP_ROWS=format.group_rows, HAS_GROUPS=format.group_columns > 0,
        IS_WIDE=not HAS_ASSEMBLER, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def is_fp8(weight: PackedWeight) -> bool:
    """Return whether inputs are rounded to FP8 for this matrix."""
    return multiplies_in_fp8(weight.format)


def has_library_product(weight: PackedWeight) -> bool:
    """Return whether the library multiplies these weights in FP8."""
    num_outputs, num_inputs = weight.shape
    is_known = is_fp8(weight) and weight.dtype == torch.bfloat16
    if not is_known or num_outputs % ALIGNMENT or num_inputs % ALIGNMENT:
        return False
    if weight.format.group_columns == 0:
        return weight.format.group_rows == 1
    is_aligned = num_outputs % GROUP == 0 and num_inputs % (4 * GROUP) == 0
    return weight.format.group_rows == GROUP and is_aligned and has_block_product(weight.codes.device)


@cache
def has_block_product(device: torch.device) -> bool:
    """Return whether the library multiplies FP8 in blocks. That depends on its version and the card, so it is tried."""
    if device.type != "cuda":
        return False
    codes = torch.zeros((4 * GROUP, 4 * GROUP), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.ones((4, 4 * GROUP), device=device)
    try:
        _multiply(codes, codes, scales.t(), scales[:, :4].contiguous().t(), torch.bfloat16, is_fast=False)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def _multiply(
    codes: Tensor, weights: Tensor, row_scales: Tensor, scales: Tensor, dtype: torch.dtype, *, is_fast: bool
) -> Tensor:
    """Multiply codes [T, I] by weights [O, I] transposed, in the library."""
    out: Tensor = torch._scaled_mm(
        codes, weights.t(), scale_a=row_scales, scale_b=scales, out_dtype=dtype, use_fast_accum=is_fast
    )
    return out


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def unscaled_product(rows: Fp8Rows, weight: PackedWeight) -> Fp8Product:
    """Multiply the codes of rows [T, I] by those of weights with a scale per output, transposed."""
    one, codes = _one(rows.codes.device), weight.codes.view(torch.float8_e4m3fn)
    values = _multiply(rows.codes, codes, one, one, weight.dtype, is_fast=True)
    return Fp8Product(values, rows.scales, weight.scales.view(-1))


def is_unscaled(num_rows: int, weight: PackedWeight, bias: Tensor | None) -> bool:
    """Return whether the scales of a product of so many rows are applied later."""
    num_tiles = -(-num_rows // LIBRARY_TILE) * -(-len(weight) // LIBRARY_TILE)
    is_per_output = weight.format.group_columns == 0
    return bias is None and num_tiles <= UNSCALED_TILES and is_per_output and has_library_product(weight)


def product_in_fp8(x: Inputs, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Round x [T, I] to FP8 and multiply it by FP8 weights transposed: [T, O]."""
    has_groups = weight.format.group_columns > 0
    rows = x if isinstance(x, Fp8Rows) else quantize_rows(x, has_groups=has_groups)
    if not has_library_product(weight):
        return fp8_product(rows, weight, bias)
    if is_unscaled(len(rows), weight, bias):
        return apply_scales(unscaled_product(rows, weight))
    codes = weight.codes.view(torch.float8_e4m3fn)
    scales = weight.scales.t() if has_groups else weight.scales.view(1, -1)
    out = _multiply(rows.codes, codes, rows.scales, scales, weight.dtype, is_fast=not has_groups)[: len(rows)]
    return out if bias is None else out.add_(bias)


def expanded(weight: PackedWeight) -> Tensor:
    """Return the decoded matrix [O, I], with its columns in the order of the codes."""
    num_outputs, num_inputs = weight.shape
    format = weight.format
    out = weight.scales.new_empty(weight.shape, dtype=weight.dtype)
    num_bytes = weight.codes.shape[1]
    width = min(int(triton.next_power_of_2(num_bytes)), 1024)
    rows = EXPANDED_BYTES // width
    _expand_packed[(-(-num_outputs // rows), -(-num_bytes // width))](
        weight.codes, weight.scales, weight.zeros, out, IN=num_inputs, OUT=num_outputs, ROWS=rows, BYTES=width,
        KIND=KINDS[format.type], GROUP_ROWS=format.group_rows, GROUP=format.group_columns, num_warps=4,
    )  # fmt: skip
    return out


def expanded_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Decode the matrix, then multiply x [T, I] by it transposed. Large matrices are decoded in strips of outputs."""
    num_outputs, num_inputs = weight.shape
    step = max(MAX_EXPANDED // num_inputs // GROUP, 1) * GROUP
    if num_outputs <= step:
        return F.linear(x, expanded(weight), bias)
    out = x.new_empty((len(x), num_outputs))
    for first in range(0, num_outputs, step):
        last = min(first + step, num_outputs)
        strip = F.linear(x, expanded(weight.rows(first, last)), None if bias is None else bias[first:last])
        out[:, first:last] = strip
    return out
