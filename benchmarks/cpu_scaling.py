"""Measures a step of the native backend by the number of sequences and the length of their contexts.

    python benchmarks/cpu_scaling.py                      # a table, two minutes
    python benchmarks/cpu_scaling.py --plot scaling.svg   # and a plot

A decode step multiplies every weight with every row and reads every key and value of every sequence once. Its time
should therefore be base + per_row * rows + per_key * keys; the three constants are fitted to the steps of this run. The
table has each step's time divided by that model: a step far above 1 costs more than its arithmetic and bytes explain.
From three rows on, rows are computed in fours; one and two are computed from the packed bytes. That is a bend, not an
error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.backends.machine import usable_cores
from quire.backends.native.library import Engine, kernels_in_use
from quire.backends.native.model import Batch, NativeModel
from quire.backends.native.packing import pack_model
from quire.core.cache.block import BLOCK_SIZE
from quire.weights.hub import resolve
from quire.weights.opening import open_checkpoint

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (32, 256, 512, 1024, 2048)
BUDGET_S = 0.8  # for the measurements of one step


def open_model(path: Path, num_threads: int, precision: str) -> NativeModel:
    checkpoint = open_checkpoint(path, "auto")
    try:
        num_blocks = max(ROWS) * (max(CONTEXTS) // BLOCK_SIZE + 1) + 1
        return NativeModel(
            checkpoint.spec,
            pack_model(checkpoint, num_threads),
            Engine(num_threads),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max(CONTEXTS) + BLOCK_SIZE,
            precision=precision,
        )
    finally:
        checkpoint.close()


def decodes(num_rows: int, context: int) -> Batch:
    """Return a batch of one token for each of `num_rows` sequences that share nothing."""
    width = -(-(context + 1) // BLOCK_SIZE)
    return Batch(
        tokens=np.arange(num_rows, dtype=np.int32) + 100,
        positions=np.full(num_rows, context, np.int32),
        first_rows=np.arange(num_rows + 1, dtype=np.int32),
        tables=np.arange(1, num_rows * width + 1, dtype=np.int32).reshape(num_rows, width),
        sampled=tuple(range(num_rows)),
    )


def best_ms(model: NativeModel, batch: Batch) -> float:
    rows = batch.last_rows
    took: list[float] = []
    end_s = time.perf_counter() + BUDGET_S
    while len(took) < 3 or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        model.forward(batch, rows)
        took.append(1e3 * (time.perf_counter() - started_s))
    return min(took)


def explain(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit base + per_row * rows + per_key * keys by least squares of relative errors, over steps of 4 or more rows."""
    rows, contexts = np.meshgrid(ROWS, CONTEXTS, indexing="ij")
    terms = np.stack([np.ones(rows.size), rows.ravel(), (rows * contexts).ravel()], axis=1)
    is_tiled = rows.ravel() >= 4
    weights = 1 / times.ravel()
    fit, *_ = np.linalg.lstsq(terms[is_tiled] * weights[is_tiled, None], np.ones(int(is_tiled.sum())), rcond=None)
    print(f"\n{fit[0]:.2f} ms + {fit[1]:.3f} ms per row + {1e3 * fit[2]:.3f} us per key of a sequence")
    explained: NDArray[np.float64] = (terms @ fit).reshape(times.shape)
    return explained


def table(title: str, cells: NDArray[np.float64], form: str) -> str:
    lines = [[title, *(f"{context:,}" for context in CONTEXTS)], ["---"] * (len(CONTEXTS) + 1)]
    lines += [[str(rows), *(format(cell, form) for cell in line)] for rows, line in zip(ROWS, cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(times: NDArray[np.float64], explained: NDArray[np.float64], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, context in enumerate(CONTEXTS):
        (line,) = axes.plot(ROWS, times[:, index], "o", markersize=4, label=f"context {context:,}")
        axes.plot(ROWS, explained[:, index], "-", color=line.get_color(), linewidth=1)
    axes.set(xlabel="sequences in the step", ylabel="ms", xscale="log", yscale="log")
    axes.set_title("A decode step: measured (dots), explained (lines)")
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: quire's default model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--precision", default="balanced", choices=("fast", "balanced", "exact"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg or .png")
    args = parser.parse_args(argv)
    model = open_model(resolve(args.model), args.threads, args.precision)
    print(f"{kernels_in_use()}, {model.engine.num_threads} threads, {args.precision}")
    times = np.array([[best_ms(model, decodes(rows, context)) for context in CONTEXTS] for rows in ROWS])
    explained = explain(times)
    print("\n" + table("rows \\ context: ms", times, ".1f"))
    print("\n" + table("measured over explained", times / explained, ".2f"))
    if args.plot:
        plot(times, explained, args.plot)


if __name__ == "__main__":
    main()
