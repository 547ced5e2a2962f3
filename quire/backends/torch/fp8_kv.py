"""Keys and values in FP8, in plain PyTorch: the reference of `quire.backends.torch.kernels.fp8_kv`.

The key or value of one token and head is stored as e4m3 codes with one scale, a power of two. Multiplying by a power of
two is exact, so a decoded vector has the same numbers in every type, and in every order of operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

# D head size

MANTISSA_BITS = 23  # of fp32
SIGNLESS = 0x7FFFFFFF
INFINITY = 0x7F800000
# The largest code is 448 = 1.75 * 2 ** 8. Adding ROUND_UP carries into the exponent if a number has more than 1.75.
ROUND_UP = 0x1FFFFF
LARGEST_EXPONENT = 8
NOT_FINITE = 255  # the scale of a vector with a number that is not finite; its codes are 0


def encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., D] and scales [..] of vectors [.., D], both uint8. A scale s means 2 ** (s - 127)."""
    vectors = vectors.float()
    peaks = (vectors.view(torch.int32) & SIGNLESS).amax(-1)  # ordered as the numbers are, NaN last
    is_finite = peaks < INFINITY
    scales = (((peaks + ROUND_UP) >> MANTISSA_BITS) - LARGEST_EXPONENT).clamp_(0, NOT_FINITE - 1)
    factors = ((2 * 127 - scales) << MANTISSA_BITS).view(torch.float32)  # the inverse of the scales
    codes = (vectors * factors[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill_(~is_finite[..., None], 0)
    return codes, scales.masked_fill_(~is_finite, NOT_FINITE).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the vectors of codes [.., D] and scales [..] into `out` [.., D]. Those that are not finite become NaN."""
    factors = (scales.int() << MANTISSA_BITS).view(torch.float32)  # 0 of scale 0, infinity of NOT_FINITE
    torch.mul(codes.view(torch.float8_e4m3fn).float(), factors[..., None], out=out)
