"""Keys and values in FP8, in plain PyTorch: the reference of `quire.backends.torch.kernels.fp8_kv`.

The key or value of one token and head is stored as e4m3 codes with one scale, in bf16. The scale maps the largest
number to the largest code, so the number that matters most is nearly exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

# D head size

LARGEST = 448.0  # of the codes
TINY = 2.0**-90  # vectors of smaller numbers are stored as 0


def encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., D] in uint8 and scales [..] in bf16; codes 0 and scale NaN for vectors that are not finite."""
    vectors = vectors.float()
    peaks = vectors.abs().amax(-1)
    is_stored = (peaks >= TINY) & peaks.isfinite()
    scales = (peaks * (1 / LARGEST)).bfloat16()
    inverse = torch.where(is_stored, 1 / scales.float(), 0.0)
    codes = (vectors * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(~is_stored[..., None], 0)
    return codes, scales.masked_fill_(peaks < TINY, 0.0).masked_fill_(~peaks.isfinite(), float("nan"))


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the vectors of codes [.., D] and scales [..] into `out` [.., D]."""
    torch.mul(codes.view(torch.float8_e4m3fn).float(), scales.float()[..., None], out=out)
