"""Checks the paged-decode kernel against gather + SDPA when a model is loaded, and measures from when on it is faster.

The kernel may be wrong on a GPU on which it was never tested, and its gain differs from GPU to GPU. Both are therefore
measured on the machine itself, with the shapes of the model, before the kernel is used.
"""

# B rows, H query heads, K KV heads, D size of a query or key, V size of a value, W blocks in the widest block table

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, cast

import mlx.core as mx

from quire.backends.mlx.paged_decode import Attention, Shape

MEASURED_ROWS = (1, 4, 16)
MEASURED_CONTEXTS = (256, 2048)
MEASURED_BYTES = 128 << 20  # of the pools of a measurement: more than the caches of most GPUs hold
MAX_MEASURED_LAYERS = 16
REPEATS = 5


def gather_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    tables: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute the kernel's result by gather + SDPA: copy the blocks of every row and attend to the copy."""
    dense = [
        mx.take(pool, tables, axis=0).reshape(tables.shape[0], -1, *pool.shape[2:]).swapaxes(1, 2)
        for pool in (keys, values)
    ]  # [B, K, W * block size, D or V]
    positions = mx.arange(dense[0].shape[2])
    mask = positions < lengths[:, None]
    if window:
        mask = mask & (positions >= lengths[:, None] - window)
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    settings: dict[str, Any] = {"scale": scale, "mask": mask[:, None, None], "sinks": sinks}
    return mx.fast.scaled_dot_product_attention(queries[:, :, None], *dense, **settings)[:, :, 0]


# Largest error of a result, relative to the largest number of the reference in float32.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 1e-2}

# Lengths of the rows. MLX compiles a second variant for fewer than 8 rows: Metal gets such arrays as constants. The
# longest rows are computed in several parts.
CHECKED_LENGTHS = ((1, 33, 300), (1, 2, 31, 32, 33, 64, 150, 300))
CHECKED_WINDOW = 70
UNUSED = 1000.0  # in slots that no row may use


class Example(NamedTuple):
    """Arguments of `Attention`."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    tables: mx.array
    lengths: mx.array
    sinks: mx.array


def check(kernel: Attention, shape: Shape, dtypes: Sequence[mx.Dtype] | None = None) -> str | None:
    """Compare the kernel with gather + SDPA on random pools and return the first disagreement.

    Each shape and type is compiled on its own, so the check uses the model's. A kernel that does not compile is a
    disagreement.
    """
    for dtype, lengths in itertools.product(dtypes or (shape.dtype,), CHECKED_LENGTHS):
        example = make_example(lengths, dataclasses.replace(shape, dtype=dtype))
        for window, has_sinks in itertools.product((0, CHECKED_WINDOW), (False, True)):
            case = f"{dtype}, {len(lengths)} rows, {window = }, {has_sinks = }"
            try:
                error = find_error(kernel, example, window=window, has_sinks=has_sinks)
            except (RuntimeError, ValueError) as reason:
                return f"{case}: the kernel does not run: {reason}"
            if not error <= TOLERANCES[dtype]:  # also true for NaN
                return f"{case}: {error = :.2e} exceeds {TOLERANCES[dtype]}"
    return None


def find_error(kernel: Attention, example: Example, *, window: int, has_sinks: bool) -> float:
    """Return the largest error of a result, relative to the largest number of the reference in float32."""
    scale, sinks = example.queries.shape[-1] ** -0.5, example.sinks if has_sinks else None
    found = kernel(*example[:5], scale=scale, window=window, sinks=sinks)
    queries, keys, values = (array.astype(mx.float32) for array in example[:3])
    places = example.tables, example.lengths
    expected = gather_attention(queries, keys, values, *places, scale=scale, window=window, sinks=sinks)
    if found.shape != expected.shape or found.dtype != example.queries.dtype:
        raise ValueError(f"the result has the shape {found.shape} and the type {found.dtype}")
    error = mx.abs(found.astype(mx.float32) - expected).max() / mx.abs(expected).max()
    return cast(float, error.item())


def make_example(lengths: Sequence[int], shape: Shape) -> Example:
    """Return random rows with these lengths.

    Block ids are in random order. The last row shares the first half of its blocks with the row before, as after a
    prefix hit. Slots behind the end of a row hold large numbers, so that a result shows if they were used.
    """
    random, size_of_block = Random(len(lengths)), shape.block_size
    num_blocks = [math.ceil(length / size_of_block) for length in lengths]
    ids = random.sample(range(1, sum(num_blocks) + 1), sum(num_blocks))
    rows = [[ids.pop() for _ in range(count)] for count in num_blocks]
    for before, last in itertools.pairwise(rows[-2:]):
        shared = min(len(before), len(last)) // 2
        last[:shared] = before[:shared]
    tables = mx.array([row + [0] * (max(num_blocks) - len(row)) for row in rows], mx.int32)

    keys_of_random = iter(mx.random.split(mx.random.key(len(lengths)), 4))
    pools = []
    for size in (shape.head_size, shape.value_size):
        pool = mx.random.normal(
            (sum(num_blocks) + 1, shape.block_size, shape.num_kv_heads, size), key=next(keys_of_random)
        )
        pool[0] = UNUSED
        for row, length in zip(rows, lengths, strict=True):
            if length % size_of_block:
                pool[row[-1], length % size_of_block :] = UNUSED
        pools.append(pool.astype(shape.dtype))
    queries = mx.random.normal((len(lengths), shape.num_heads, shape.head_size), key=next(keys_of_random))
    return Example(
        queries=queries.astype(shape.dtype),
        keys=pools[0],
        values=pools[1],
        tables=tables,
        lengths=mx.array(list(lengths), mx.int32),
        sinks=mx.random.normal((shape.num_heads,), key=next(keys_of_random)).astype(shape.dtype),
    )


def find_least_rows(kernel: Attention, shape: Shape) -> int | None:
    """Return from how many rows on the kernel is faster at all measured contexts; None: it is not."""
    least = None
    for rows in reversed(MEASURED_ROWS):
        times = [measure_times(kernel, shape, rows, context) for context in MEASURED_CONTEXTS]
        if any(kernel_s >= gather_s for gather_s, kernel_s in times):
            break
        least = rows
    return least


def measure_times(kernel: Attention, shape: Shape, rows: int, context: int) -> tuple[float, float]:
    """Return the seconds per layer of gather + SDPA and of the kernel: medians over layers with pools of their own."""
    num_layers = min(max(MEASURED_BYTES // (rows * context * shape.token_bytes), 1), MAX_MEASURED_LAYERS)
    layers = [make_example([context - 5] * rows, shape) for _ in range(num_layers)]
    mx.eval(layers)
    return _seconds(gather_attention, layers), _seconds(kernel, layers)


def _seconds(attend: Attention, layers: Sequence[Example]) -> float:
    """Return the median time of a layer, after a run that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        mx.eval([attend(*layer[:5], scale=layer.queries.shape[-1] ** -0.5) for layer in layers])
        times.append((time.perf_counter() - began) / len(layers))
    return statistics.median(times[1:])
