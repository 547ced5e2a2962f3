"""Compares quire with vLLM's figures on one H200: workloads A, B, C and T on the shapes of real models.

    python benchmarks/gpu.py                      # everything, in under ten minutes
    python benchmarks/gpu.py --only A,C --models qwen3-0.6b
    python benchmarks/gpu.py --quick              # a smoke run with tiny shapes, on any machine

Random weights in real shapes, bf16, token ids in and out, no end tokens. The engine is driven directly, so only torch,
triton and transformers are needed (and PYTHONPATH=. if quire is not installed). Correctness is checked first. Figures
are printed as they are measured; a stage that fails prints its error, and the others continue.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu_correctness
import gpu_ready
import harness
import torch
from gpu_machine import Machine, Run, engine_config, loaded
from gpu_workloads import (
    A0,
    A1,
    ANCHORS,
    CACHE,
    FULL,
    GAIN,
    QUICK,
    READY,
    SHAPES,
    TREE,
    UNITS,
    Anchor,
    B,
    C,
    Scale,
    Workload,
    limit_s,
    workload_a,
    workload_b,
    workload_c,
    write_shape,
)
from harness import Stages, number, ratio, say

STAGES = ("correctness", "A", "B", "C", "T", "ready", "cache")
CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    shape: str
    values: list[float]
    anchor: Anchor
    note: str = ""

    @property
    def unit(self) -> str:
        return UNITS.get(self.what, "tok/s")

    @property
    def ours(self) -> float:
        return statistics.median(self.values)

    @property
    def is_held(self) -> bool | None:
        times = self._times(self.anchor.bar)
        return None if times is None else times >= 1

    def _times(self, other: float | None) -> float | None:
        """Return the ratio to the other figure. Above 1: ours is better."""
        if other is None or self.ours <= 0:
            return None
        return self.ours / other if self.unit in ("tok/s", "x") else other / self.ours

    def cells(self) -> list[str]:
        vllm, bar, limit = ([number(one), ratio(self._times(one))] for one in self.anchor)
        held = {None: "", True: "yes", False: "NO"}[self.is_held]
        return [self.what, self.shape, number(self.ours, self.unit), *vllm, *bar, held, *limit]


HEADS = ("", "shape", "ours", "vLLM 0.26", "times", "bar", "times", "held", "limit", "times")


@dataclass(slots=True)
class Report:
    figures: list[Figure] = field(default_factory=list)
    checks: list[gpu_correctness.Check] = field(default_factory=list)
    stages: Stages = field(default_factory=Stages)

    def check(self, check: gpu_correctness.Check) -> None:
        self.checks.append(check)
        say(str(check))

    def text(self) -> str:
        figures = harness.table(HEADS, [figure.cells() for figure in self.figures])
        return "\n\n".join([figures, *map(str, self.checks)])


class Bench:
    """The stages in order. The engine of each shape is made once, and freed before the next."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.scale: Scale = QUICK if args.quick else FULL
        self.folder = folder
        self.report = Report()

    def run(self) -> Report:
        if "correctness" in self.args.only:
            for dtype in ("float32", "bfloat16"):
                for family in self.args.families:
                    self.report.stages.attempt(f"{family} in {dtype}", self._family, family, dtype)
        if "ready" in self.args.only:
            for shape in self.args.models:
                self.report.stages.attempt(f"{READY}, {shape}", self._ready, shape)
        for shape in self.args.models:
            self.report.stages.attempt(shape, self._shape, shape)
        return self.report

    def _loaded(self, shape: str, *, is_fp32: bool = False) -> AbstractContextManager[Machine]:
        """The engine of a shape; in fp32, of its first layers."""
        args = self.args
        settings: dict[str, Any] = {"quantize": args.quantize, "kv_cache_dtype": args.kv_cache_dtype}
        if args.kv_gib is not None:
            settings["kv_memory"] = int(args.kv_gib * 2**30)
        elif is_fp32:
            settings["kv_memory"] = gpu_correctness.FP32_KV_BYTES
        num_layers = None
        if is_fp32:
            settings["dtype"], num_layers = "float32", gpu_correctness.FP32_LAYERS
        config = engine_config(self.scale, args.device, **settings)
        return loaded(shape, self.scale, config, self.folder / shape, num_layers)

    # Stages

    def _family(self, name: str, dtype: str) -> None:
        folder = self.folder / f"{name}-{dtype}".replace(" ", "-")
        self.report.check(gpu_correctness.check_family(name, dtype, self.args.device, folder))

    def _ready(self, shape: str) -> None:
        folder = self.folder / shape
        write_shape(shape, self.scale, folder)
        found = gpu_ready.measure(folder, self.args.device, self.scale.max_num_seqs, self.scale.max_model_len)
        note = ", ".join(f"{name.removesuffix('_s')} {value:.2f}" for name, value in found.items())
        self._add(READY, shape, [found["first_token_s"]], note=note)

    def _shape(self, shape: str) -> None:
        stages = {
            "correctness": self._batching,
            "A": self._a,
            "B": self._b,
            "C": self._c,
            "T": self._t,
            "cache": self._cache,
        }
        if shape != self.args.models[0]:
            del stages["cache"]  # a cost per step shows most where steps are shortest: one shape is enough
        chosen = {name: action for name, action in stages.items() if name in self.args.only}
        if "correctness" in chosen and shape in gpu_correctness.COMPARED_IN_FP32:
            del chosen["correctness"]
            self.report.stages.attempt(f"correctness, {shape} in fp32", self._batching_in_fp32, shape)
        if not chosen:
            return
        with self._loaded(shape) as machine:
            for name, action in chosen.items():
                self.report.stages.attempt(f"{name}, {shape}", action, machine, shape)

    def _batching_in_fp32(self, shape: str) -> None:
        with self._loaded(shape, is_fp32=True) as machine:
            self._batching(machine, f"{shape} in fp32, {gpu_correctness.FP32_LAYERS} layers")

    def _batching(self, machine: Machine, shape: str) -> None:
        for check in gpu_correctness.check_batching(machine, shape):
            self.report.check(check)

    def _a(self, machine: Machine, shape: str) -> None:
        machine.run(workload_a(self.scale, 0))
        for seed, what in ((0, A0), (1, A1)):
            self._runs(what, shape, machine, workload_a(self.scale, seed))

    def _b(self, machine: Machine, shape: str) -> None:
        self._runs(B, shape, machine, workload_b(self.scale), num_warm_ups=2)  # graphs of siblings: once they occur

    def _c(self, machine: Machine, shape: str) -> None:
        singles = self._runs(C, shape, machine, workload_c(self.scale), num_warm_ups=1)
        best = max(run.tokens_per_s for run in singles)
        together = workload_c(self.scale, CLIENTS)
        machine.run(together)
        rates = [machine.run(together).tokens_per_s for _ in range(self.args.repeats)]
        note = f"{number(statistics.median(rates), 'tok/s')} over {number(best, 'tok/s')}"
        self._add(GAIN, shape, [rate / best for rate in rates], note=note)

    def _t(self, machine: Machine, shape: str) -> None:
        machine.run_tree()
        runs = [machine.run_tree() for _ in range(self.args.repeats)]
        note = f"{runs[0].num_cached} tokens found in the cache"
        self._add(TREE, shape, [run.tokens_per_s for run in runs], note=note)

    def _cache(self, machine: Machine, shape: str) -> None:
        workload, uncached = workload_a(self.scale, 0), machine.uncached_engine()
        sides = {
            "with": lambda _: machine.run(workload).wall_s,
            "without": lambda _: machine.run(workload, uncached).wall_s,
        }
        found = harness.alternate(sides, self.args.repeats)
        costs = [100 * (one - 1) for one in harness.ratios(found["with"], found["without"])]
        self._add(CACHE, shape, costs, note="more time for A, seed 0, with the cache than without")

    def _runs(self, what: str, shape: str, machine: Machine, workload: Workload, num_warm_ups: int = 0) -> list[Run]:
        for _ in range(num_warm_ups):
            machine.run(workload)
        runs = [machine.run(workload) for _ in range(self.args.repeats)]
        least_s = limit_s(machine.spec, workload)
        note = f"{runs[0].num_cached} of {workload.num_in} tokens found in the cache, {runs[0].num_steps} steps"
        if UNITS.get(what) == "s":
            self._add(what, shape, [run.wall_s for run in runs], least_s, note)
        else:
            self._add(what, shape, [run.tokens_per_s for run in runs], workload.num_out / least_s, note)
        return runs

    def _add(self, what: str, shape: str, values: list[float], limit: float | None = None, note: str = "") -> None:
        anchor = ANCHORS.get((what, shape), Anchor())
        anchor = anchor._replace(limit=anchor.limit or limit)
        if self.scale.is_quick:  # other shapes, maybe no GPU: the figures of others do not apply
            anchor = Anchor()
        figure = Figure(what, shape, values, anchor, note)
        self.report.figures.append(figure)
        say(f"{what} on {shape}: {number(figure.ours, figure.unit)} ({', '.join(map(number, values))}) {note}")


def parse() -> argparse.Namespace:
    families = gpu_correctness.FAMILIES
    parser = harness.options(__doc__)
    parser.add_argument("--only", type=harness.names(STAGES), default=STAGES, help=f"some of {','.join(STAGES)}")
    parser.add_argument("--models", type=harness.names(SHAPES), default=tuple(SHAPES), help="shapes, by name")
    parser.add_argument("--families", type=harness.names(families), default=families)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantize", type=int, help="bits of weights: 8 is FP8, 4 is INT4; default: bf16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--kv-gib", type=float, help="memory for the KV pool; default: by free memory")
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny shapes, one repeat")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.families, args.kv_gib = 1, gpu_correctness.QUICK_FAMILIES, 2**-10
    return args


def main() -> None:
    args = parse()
    with TemporaryDirectory() as folder:
        report = Bench(args, Path(folder)).run()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    say(f"\n{device}, torch {torch.__version__}, medians of {args.repeats}\n\n{report.text()}")
    broken = [str(check) for check in report.checks if not check.is_held] + report.stages.failures
    if broken:
        sys.exit("not correct: " + "; ".join(broken))


if __name__ == "__main__":
    main()
