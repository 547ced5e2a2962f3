"""Where kernels are tested."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported and when a kernel is defined


def unit(dtype: torch.dtype) -> float:
    """How far a number rounded to `dtype` may be off, of its size. The interpreter cuts bf16 off, the GPU rounds."""
    epsilon = torch.finfo(dtype).eps
    return epsilon if DEVICE == "cpu" else epsilon / 2
