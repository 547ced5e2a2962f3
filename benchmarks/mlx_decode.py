"""Compares the paged-decode kernel of the MLX backend with gather + SDPA on this machine's GPU.

    PYTHONPATH=. python benchmarks/mlx_decode.py

Prints, for batch sizes and contexts, the times of both for one layer, and their ratio: above 1, the kernel is faster.
The last lines are the table of this machine, for `PAYS` in quire/backends/mlx/paged_decode.py. Every figure is the
median over runs of several layers, whose pools together do not fit in the GPU's cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from random import Random

import mlx.core as mx

from quire.backends.mlx.paged_decode import PagedDecode, check, gather_attention, gather_mask

BLOCK_SIZE = 32
MIN_BYTES = 512 * 2**20  # of all layers' pools
LAYERS = (2, 32)  # fewest and most


def time_us(run: Callable[[], Sequence[mx.array]], repeats: int) -> float:
    """Return the median time of one array of `run`."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        arrays = run()
        mx.eval(arrays)
        times.append(1e6 * (time.perf_counter() - began) / len(arrays))
    return statistics.median(times[2:])


def measure(kernel: PagedDecode, batch: int, context: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the times of gather + SDPA and of the kernel in microseconds."""
    width = context // BLOCK_SIZE
    dtype = getattr(mx, options.dtype)
    shape = (batch * width, BLOCK_SIZE, options.kv_heads, options.head_size)
    layer_bytes = 2 * dtype.size * batch * context * options.kv_heads * options.head_size
    num_layers = min(max(MIN_BYTES // layer_bytes, LAYERS[0]), LAYERS[1])
    layers = [(mx.random.normal(shape, dtype), mx.random.normal(shape, dtype)) for _ in range(num_layers)]
    queries = mx.random.normal((batch, options.heads, options.head_size), dtype)
    ids = Random(0).sample(range(batch * width), batch * width)
    tables = mx.array(ids, mx.int32).reshape(batch, width)
    lengths = mx.full((batch,), context - 5, mx.int32)
    mx.eval(layers, queries, tables, lengths)
    scale = options.head_size**-0.5

    def gather() -> list[mx.array]:
        mask = gather_mask(lengths, context)
        return [gather_attention(queries, *pools, tables, mask, scale=scale) for pools in layers]

    def fused() -> list[mx.array]:
        return [kernel(queries, *pools, tables, lengths, scale=scale) for pools in layers]

    return time_us(gather, options.repeats), time_us(fused, options.repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the paged-decode kernel with gather + SDPA.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="ROWS")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 4096, 16384], metavar="TOKENS")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    try:
        kernel = PagedDecode()
    except RuntimeError as error:
        print(f"nothing to measure: {error}", file=sys.stderr)
        return 1
    shapes = {"num_heads": options.heads, "num_kv_heads": options.kv_heads}
    sizes = {"head_size": options.head_size, "value_size": options.head_size}
    if (problem := check(kernel, **shapes, **sizes, dtypes=[getattr(mx, options.dtype)])) is not None:
        print(f"the kernel disagrees with gather + SDPA: {problem}", file=sys.stderr)
        return 1
    print(f"{kernel.language.name}: {options.heads} heads on {options.kv_heads}, {options.head_size}, {options.dtype}")
    print(f"{'rows':>5} {'context':>8} {'gather us':>10} {'kernel us':>10} {'times faster':>13}")
    table: dict[int, dict[int, float]] = {batch: {} for batch in options.batches}
    for batch, context in itertools.product(options.batches, options.contexts):
        gather_us, kernel_us = measure(kernel, batch, context, options)
        ratio = table[batch][context] = round(gather_us / kernel_us, 2)
        print(f"{batch:>5} {context:>8} {gather_us:>10.1f} {kernel_us:>10.1f} {ratio:>13}", flush=True)
    for batch, figures in table.items():
        print(f"{batch}: {figures},")
    return 0


if __name__ == "__main__":
    sys.exit(main())
