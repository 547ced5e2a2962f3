"""Compares the paged-decode kernel of the MLX backend with gather + SDPA on this machine's GPU.

    PYTHONPATH=. python benchmarks/mlx_decode.py

Prints, for batch sizes and contexts, the times of both for one layer, and their ratio: above 1, the kernel is faster.
When a model is loaded, the backend measures a few of these points and uses the kernel from the batch size on at which
it is faster. Every figure is the median over runs of several layers, whose pools do not fit in the GPU's cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import mlx.core as mx

from quire.backends.mlx.kernel_check import check, measure_times
from quire.backends.mlx.paged_decode import PagedDecode, Shape


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the paged-decode kernel with gather + SDPA.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="ROWS")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 4096, 16384], metavar="TOKENS")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    parser.add_argument("--block-size", type=int, default=32)
    options = parser.parse_args(arguments)
    try:
        kernel = PagedDecode()
    except RuntimeError as error:
        print(f"nothing to measure: {error}", file=sys.stderr)
        return 1
    dtype = getattr(mx, options.dtype)
    shape = Shape(options.heads, options.kv_heads, options.head_size, options.head_size, options.block_size, dtype)
    if (problem := check(kernel, shape)) is not None:
        print(f"the kernel disagrees with gather + SDPA: {problem}", file=sys.stderr)
        return 1
    heads = f"query heads {options.heads}, KV heads {options.kv_heads}, head size {options.head_size}"
    print(f"{kernel.language.name}: {heads}, {options.dtype}")
    print(f"{'rows':>5} {'context':>8} {'gather us':>10} {'kernel us':>10} {'times faster':>13}")
    for batch, context in itertools.product(options.batches, options.contexts):
        gather_s, kernel_s = measure_times(kernel, shape, batch, context)
        times = f"{gather_s * 1e6:>10.1f} {kernel_s * 1e6:>10.1f} {gather_s / kernel_s:>13.2f}"
        print(f"{batch:>5} {context:>8} {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
