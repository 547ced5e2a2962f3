"""Keys and values in FP8 inside kernels: the codes and scales of `quire.backends.torch.kv_store`.

Rounding is done with integers, so that all cards and Triton's interpreter store the same codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from quire.backends.torch.kernels.chaining import IS_COMPILED

# M rows, D head size


@triton.jit
def magnitude(x):
    """Return numbers without their signs, as integers in the same order; NaN is the largest."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def choose_scale(peak):
    """Return the scale of vectors whose largest magnitude is `peak`, in fp32, rounded to bf16."""
    bits = magnitude(peak.to(tl.float32, bitcast=True) * (1.0 / 448.0))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    scale = tl.where(peak < 0x12800000, 0.0, bits.to(tl.float32, bitcast=True))  # 2 ** -90
    return tl.where(peak < 0x7F800000, scale, float("nan"))


@triton.jit
def encode(x, scale):
    """Return the e4m3 codes of numbers, rounded to the nearest, ties to even; 0 if the scale is 0 or NaN."""
    is_stored = scale > 0.0
    x = x.to(tl.float32) * tl.div_rn(1.0, tl.where(is_stored, scale, 1.0))
    size = magnitude(x)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # exponents begin at -7 instead of -127
    # Numbers below 2 ** -6 are multiples of 2 ** -9, which is the distance of numbers at 2 ** 14.
    small = magnitude(tl.abs(x) + 16384.0) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(is_stored, code, 0).to(tl.uint8)


@triton.jit
def decode(codes, dtype: tl.constexpr):
    """Return the numbers of e4m3 codes, which are exact in fp16 and fp32."""
    if IS_COMPILED and cuda_capability_geq(8, 9):
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    codes = codes.to(tl.int16)
    half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)  # too small by 2 ** 8
    return (half * 256.0).to(dtype)


@triton.jit
def scale_queries(queries):
    """Return queries [M, D] in fp16, and the factor [M] of each row; queries in fp32 stay as they are.

    Codes are converted to fp16 by one instruction, but to bf16 by several. A row is scaled by a power of two, so that
    all of its numbers that matter are exact in fp16.
    """
    if queries.dtype == tl.float32:
        return queries, tl.full((queries.shape[0],), 1.0, tl.float32)
    exponent = tl.minimum(tl.maximum(tl.max(magnitude(queries), 1) >> 23, 14), 254)  # [M]
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest number gets the exponent 14
    queries = (queries.to(tl.float32) * factor[:, None]).to(tl.float16)
    return queries, ((exponent - 14) << 23).to(tl.float32, bitcast=True)
