"""Kernels that follow each other without a pause: programmatic dependent launch, on Hopper and later.

A chained kernel lets the next one start as soon as all its own programs are on the card, and waits for the one before
when it first needs what that wrote. So its start (addresses, weights, which nobody writes) overlaps the other's end.
What a program reads before the wait must be constant; what it writes, it writes after. Since every chained kernel
waits, the one before having ended means that all before it have.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(IS_CHAINED: tl.constexpr):
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def is_chained() -> bool:
    """Whether to launch so: the card must know it. Triton's interpreter does not."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return not is_interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
