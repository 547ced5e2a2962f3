"""Kernels of all operations that tests/backends/torch/operations.py remembers, and what they compute.

`python -m tests.backends.torch.operations_child` prints the bits of the results in Triton's interpreter as it is.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from typing import Any

import torch

from tests.backends.torch.kernels.device import DEVICE  # before triton, which reads what it sets

import triton  # isort: skip
import triton.language as tl  # isort: skip

SIZE = 32
NUM_ROUNDS = 3  # the first is learned from, the others are computed from what was learned
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@triton.jit  # type: ignore[untyped-decorator]
def arithmetic(x_ptr, y_ptr, out_ptr, is_float: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    x = tl.load(x_ptr + places)
    y = tl.load(y_ptr + places, mask=places < size - 3, other=1)
    out = out_ptr + places
    tl.store(out, x + y)
    tl.store(out + size, x - y)
    tl.store(out + 2 * size, x * y)
    tl.store(out + 3 * size, x / y)
    tl.store(out + 4 * size, tl.where(x > y, x, y))
    tl.store(out + 5 * size, (x >= y) & (y != x))
    tl.store(out + 6 * size, (x < y) | (y == x), mask=places > 4)
    tl.store(out + 7 * size, tl.where(y <= x, 1, 0))
    tl.store(out + 8 * size, x + tl.load(x_ptr))
    if not is_float:
        tl.store(out + 9 * size, x // y)
        tl.store(out + 10 * size, x % y)
        tl.store(out + 11 * size, (x & y) + (x | y) + (x ^ y))
        tl.store(out + 12 * size, (x >> y) + (y << (x & y)))


@triton.jit  # type: ignore[untyped-decorator]
def with_numbers(x_ptr, out_ptr, number, is_float: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    x = tl.load(x_ptr + places)
    out = out_ptr + places
    tl.store(out, 7 - x, mask=places > 4)
    tl.store(out + size, x * 3 + 1)
    tl.store(out + 2 * size, 100 / x)
    tl.store(out + 3 * size, x * number)
    tl.store(out + 4 * size, number - x)
    tl.store(out + 5 * size, (x < 2) | (x == 3))
    if is_float:
        tl.store(out + 6 * size, x * 0.7)
        tl.store(out + 7 * size, tl.where(x > 0.5, x, 0.0))
        tl.store(out + 8 * size, 1.5 - x)
        tl.store(out + 9 * size, tl.where(x > 1, x, float("-inf")))
    else:
        tl.store(out + 6 * size, 100 // x + 100 % x)
        tl.store(out + 7 * size, (1 << (x & 3)) + (5 & x) + (64 >> (x & 3)))
        tl.store(out + 8 * size, x // 3 - x % 5)
        tl.store(out + 9 * size, (x | 8) + (x ^ 3))


@triton.jit  # type: ignore[untyped-decorator]
def convert(x_ptr, y_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)
    target = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, x.to(target))
    tl.store(y_ptr + size + places, x, mask=places % 3 != 1)
    rows = tl.load(x_ptr + places[:, None] * 0 + places[None, :], mask=(places > 5)[:, None], other=0.0).to(target)
    tl.store(y_ptr + 2 * size + places[:, None] * size + places[None, :], rows)


def numbers(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return numbers of all sizes, also infinite ones, those that are none, and subnormal ones. No integer is 0."""
    if dtype not in (*FLOATS, torch.float8_e4m3fn):
        return torch.randint(1, 11, (SIZE,), generator=generator).to(dtype)
    values = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40])
    return values.to(dtype)


def results() -> dict[str, list[str]]:
    """Return a digest of the results of each round, for each kernel and pair of types."""
    found: dict[str, list[str]] = {}
    generator = torch.Generator().manual_seed(0)
    signed = [dtype for dtype in INTEGERS if dtype != torch.uint8]  # the language mixes no others in divisions
    pairs = [*product(FLOATS, FLOATS), *product(signed, signed), (torch.uint8, torch.uint8)]
    for one, other in [*pairs, (torch.float32, torch.int32)]:
        found[f"arithmetic {one} {other}"] = [_arithmetic(one, other, generator) for _ in range(NUM_ROUNDS)]
    for one in (*INTEGERS, *FLOATS):
        if one != torch.bfloat16:  # the interpreter has no numbers of it
            found[f"with numbers {one}"] = [_with_numbers(one, generator) for _ in range(NUM_ROUNDS)]
    small = [(torch.float8_e4m3fn, dtype) for dtype in FLOATS[:3]]
    for one, other in [*product((*FLOATS, *INTEGERS), repeat=2), *small, *(pair[::-1] for pair in small)]:
        if one != other:
            found[f"convert {one} {other}"] = [_convert(one, other, generator) for _ in range(NUM_ROUNDS)]
    return found


def _arithmetic(one: torch.dtype, other: torch.dtype, generator: torch.Generator) -> str:
    x, y = (numbers(dtype, generator).to(DEVICE) for dtype in (one, other))
    out = torch.zeros(13 * SIZE, dtype=torch.float64 if one in FLOATS else torch.int64, device=DEVICE)
    arithmetic[(1,)](x, y, out, is_float=one in FLOATS, size=SIZE)
    return _digest(out)


def _with_numbers(one: torch.dtype, generator: torch.Generator) -> str:
    x = numbers(one, generator).to(DEVICE)
    out = torch.zeros(10 * SIZE, dtype=torch.float64 if one in FLOATS else torch.int64, device=DEVICE)
    with_numbers[(1,)](x, out, 3, is_float=one in FLOATS, size=SIZE)
    return _digest(out)


def _convert(one: torch.dtype, other: torch.dtype, generator: torch.Generator) -> str:
    x = numbers(one, generator)
    if other in INTEGERS:  # what has no integer becomes whatever the processor makes of it
        x = torch.where(x.float().isfinite(), x.float().abs(), 1.0).to(one)
    out = torch.zeros((2 + SIZE) * SIZE, dtype=other, device=DEVICE)
    convert[(1,)](x.to(DEVICE), out, size=SIZE)
    return _digest(out)


def _digest(out: torch.Tensor) -> str:
    return hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> Any:
    print(json.dumps(results()))


if __name__ == "__main__":
    main()
