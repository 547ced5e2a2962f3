"""Early launches: a kernel starts before the previous one has ended.

This is CUDA's programmatic dependent launch, on Hopper and later. In a step of few rows, every kernel takes a few
microseconds, and starting it takes one or two. In graphs of few rows, norms, products and decodes of recurrent layers
are therefore launched early: such a kernel starts and reads weights while the previous kernel runs. Then it waits until
that kernel has ended and its results are visible. The previous kernel permits this by calling `let_next_start`, which
has no effect if the next kernel is launched normally.

Every program of a kernel that may be launched early must wait, even one without work: the next kernel relies on it.

With more rows, early launches cost more than they gain: the waiting programs take the place of programs that
read memory.
"""

from __future__ import annotations

import os
from functools import cache

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.language.target_info import cuda_capability_geq

MAX_EARLY_ROWS = 16

IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@cache
def can_launch_early() -> bool:
    """Return whether the GPU has early launches. Triton's interpreter has none."""
    if not IS_COMPILED.value:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def is_early(num_rows: int) -> bool:
    """Return whether to launch a kernel of a graph early."""
    return num_rows <= MAX_EARLY_ROWS and can_launch_early()


@triton.jit
def let_next_start():
    """Permit the next kernel to start when all programs of this one have started."""
    if IS_COMPILED:
        if cuda_capability_geq(9):
            cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    """Wait for the kernel before this one. What is read before the wait must be constant."""
    if IS_COMPILED:
        if cuda_capability_geq(9):
            cuda.gdc_wait()
