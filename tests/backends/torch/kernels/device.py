"""The device on which kernels are tested."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported and when a kernel is defined


def unit(dtype: torch.dtype) -> float:
    """Return the relative error of rounding to `dtype`. The interpreter truncates bf16, the GPU rounds."""
    epsilon = torch.finfo(dtype).eps
    return epsilon if DEVICE == "cpu" else epsilon / 2
