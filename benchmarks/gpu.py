"""Compares quire with vLLM's figures on one H200: workloads A, B and C on the shapes of Qwen3-0.6B and Llama-3-8B.

    python benchmarks/gpu.py --out results        # everything, in under ten minutes
    python benchmarks/gpu.py --only A,idle --models qwen3-0.6b
    python benchmarks/gpu.py --quick              # a smoke run with tiny shapes, on any machine

Random weights in real shapes, bf16, token ids in and out, no end tokens. The engine is driven directly, so only torch,
triton and transformers are needed (and PYTHONPATH=. if quire is not installed). Correctness is checked first. Figures
are printed as they are measured; a stage that fails prints its error, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu_correctness
import gpu_peer
import gpu_profile
import gpu_ready
import torch
from gpu_driving import Machine, Run, Settings
from gpu_workloads import (
    A0,
    A1,
    ANCHORS,
    CACHE,
    FULL,
    GAIN,
    PEER_ANCHOR,
    QUICK,
    QWEN,
    READY,
    SHAPES,
    TREE,
    Anchor,
    B,
    C,
    Scale,
    Workload,
    limit_s,
    workload_a,
    workload_b,
    workload_c,
    workload_peer,
    write_shape,
)

from quire import __version__

STAGES = ("correctness", "A", "B", "C", "T", "ready", "idle", "transformers", "cache")
CLIENTS = 4
PEER = "64 x 256, beside transformers"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    shape: str
    unit: str
    ours: float
    values: list[float]  # of which it is the median
    vllm: float | None
    bar: float | None
    limit: float | None
    note: str = ""

    @property
    def is_more_better(self) -> bool:
        return Anchor(self.unit, None, None).is_more_better

    def times(self, other: float | None) -> float | None:
        """Return the ratio to the other figure. Above 1: ours is better."""
        if other is None or self.ours <= 0:
            return None
        return self.ours / other if self.is_more_better else other / self.ours

    @property
    def is_held(self) -> bool | None:
        if self.bar is None:
            return None
        return self.ours >= self.bar if self.is_more_better else self.ours <= self.bar

    def cells(self) -> list[str]:
        held = {None: "", True: "yes", False: "NO"}[self.is_held]
        ratios = [_ratio(self.times(other)) for other in (self.vllm, self.bar, self.limit)]
        vllm, bar, limit = (_number(one, "") for one in (self.vllm, self.bar, self.limit))
        ours = _number(self.ours, self.unit)
        return [self.what, self.shape, ours, vllm, ratios[0], bar, ratios[1], held, limit, ratios[2]]


HEADS = ("", "shape", "ours", "vLLM 0.26", "times", "bar", "times", "held", "limit", "times")


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 100 else f"{value:.3g} {unit}".rstrip()


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclass(slots=True)
class Report:
    """All results, written again after each stage: a run that is killed leaves what was measured until then."""

    out: Path | None
    facts: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    checks: list[gpu_correctness.Check] = field(default_factory=list)
    windows: dict[str, list[gpu_profile.Window]] = field(default_factory=dict)
    ready: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        spread = ", ".join(_number(value, "") for value in figure.values)
        say(f"{figure.what} on {figure.shape}: {_number(figure.ours, figure.unit)} ({spread}) {figure.note}")

    def check(self, check: gpu_correctness.Check) -> None:
        self.checks.append(check)
        say(str(check))

    def table(self) -> str:
        lines = [HEADS, ["---"] * len(HEADS), *(figure.cells() for figure in self.figures)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def document(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "figures": [{**asdict(one), "is_held": one.is_held} for one in self.figures],
            "correctness": [one.document() for one in self.checks],
            "profile": {shape: [one.document() for one in found] for shape, found in self.windows.items()},
            "ready": self.ready,
            "notes": self.notes,
            "failures": self.failures,
        }

    def write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps(self.document(), indent=2) + "\n")
        parts = [self.table(), gpu_profile.table(self.windows) if self.windows else "", *map(str, self.checks)]
        (self.out / "gpu.md").write_text("\n\n".join(filter(None, parts)) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


class Bench:
    """The stages in order. The engine of each shape is made once, and freed before the next."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.scale: Scale = QUICK if args.quick else FULL
        self.stages: tuple[str, ...] = args.only
        self.shapes: tuple[str, ...] = args.models
        self.repeats: int = args.repeats
        self.families: tuple[str, ...] = gpu_correctness.QUICK_FAMILIES if args.quick else args.families
        kv_bytes = None if args.kv_gib is None else int(args.kv_gib * 2**30)
        kv_bytes = 1 << 20 if args.quick else kv_bytes
        self.settings = Settings(
            args.device,
            args.step_tokens,
            args.chunk_tokens,
            kv_bytes,
            quantize=args.quantize,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        self.folder = folder
        self.report = Report(args.out, facts(args))

    def run(self) -> Report:
        if "correctness" in self.stages:
            for dtype in ("float32", "bfloat16"):
                for family in self.families:
                    self._attempt(f"{family} in {dtype}", self._family, family, dtype)
        if "ready" in self.stages:
            for shape in self.shapes:
                self._attempt(f"{READY}, {shape}", self._ready, shape)
        if {"correctness", "A", "B", "C", "T", "idle", "cache"} & {*self.stages}:
            for shape in self.shapes:
                self._attempt(shape, self._shape, shape)
        if "transformers" in self.stages and QWEN in self.shapes:
            self._attempt("transformers", self._beside_transformers)
        return self.report

    def _attempt(self, what: str, action: Callable[..., None], *arguments: Any) -> None:
        started_s = time.perf_counter()
        try:
            action(*arguments)
        except Exception:
            self.report.failures.append(what)
            say(f"{what}: FAILED\n{traceback.format_exc()}")
        took_s = time.perf_counter() - started_s
        self.report.notes.setdefault("took_s", {})[what] = round(took_s, 1)
        say(f"  [{what}: {took_s:.1f} s]")
        self.report.write()

    @contextmanager
    def _machine(self, shape: str, settings: Settings) -> Iterator[Machine]:
        with Machine(shape, self.scale, settings, self.folder / shape) as machine:
            capacity, kv_bytes = machine.engine.capacity, machine.engine.runner.facts().kv_bytes
            say(f"{shape}: loaded in {machine.loaded_s:.1f} s; {capacity.num_blocks} blocks, {kv_bytes / 1e9:.1f} GB")
            graphs_s = machine.prepare()
            say(f"{shape}: {len(graphs_s)} graphs in {sum(graphs_s):.1f} s, longest {max(graphs_s, default=0.0):.2f} s")
            yield machine

    # Stages

    def _family(self, name: str, dtype: str) -> None:
        folder = self.folder / f"{name}-{dtype}".replace(" ", "-")
        for check in gpu_correctness.check_family(name, dtype, self.settings.device, folder):
            self.report.check(check)
        if dtype == "float32":
            self.report.check(gpu_correctness.check_masks(name, self.settings.device, folder / "masks"))

    def _ready(self, shape: str) -> None:
        folder = self.folder / shape
        write_shape(shape, self.scale, folder)
        found = gpu_ready.measure(folder, self.settings.device, self.scale.max_num_seqs, self.scale.max_model_len)
        self.report.ready[shape] = found
        first_s = found["first_token_s"]
        note = ", ".join(f"{name.removesuffix('_s')} {value:.2f}" for name, value in found.items())
        self._add(READY, shape, [first_s], note=f"to the first token; {note}")

    def _shape(self, shape: str) -> None:
        stages = {
            "correctness": self._batching,
            "A": self._a,
            "B": self._b,
            "C": self._c,
            "T": self._t,
            "cache": self._cache,
            "idle": self._idle,
        }
        if "correctness" in self.stages and shape in gpu_correctness.COMPARED_IN_FP32:
            del stages["correctness"]
            self._attempt(f"correctness, {shape} in fp32", self._batching_in_fp32, shape)
        if not {*stages} & {*self.stages}:
            return
        with self._machine(shape, self.settings) as machine:
            for stage, action in stages.items():
                # A cost per step shows most where steps are shortest: one shape is enough.
                if stage in self.stages and (stage != "cache" or shape == self.shapes[0]):
                    self._attempt(f"{stage}, {shape}", action, machine, shape)

    def _batching_in_fp32(self, shape: str) -> None:
        num_layers = gpu_correctness.FP32_LAYERS
        kv_bytes = self.settings.kv_bytes or gpu_correctness.FP32_KV_BYTES
        settings = replace(self.settings, dtype="float32", kv_bytes=kv_bytes, num_layers=num_layers)
        with self._machine(shape, settings) as machine:
            self._batching(machine, f"{shape} in fp32, {num_layers} layers")

    def _batching(self, machine: Machine, shape: str) -> None:
        for check in gpu_correctness.check_batching(machine, shape):
            self.report.check(check)

    def _a(self, machine: Machine, shape: str) -> None:
        machine.run(workload_a(self.scale, 0))
        for seed, what in ((0, A0), (1, A1)):
            workload = workload_a(self.scale, seed)
            runs = [machine.run(workload) for _ in range(self.repeats)]
            note = f"{runs[0].num_cached} tokens found in the cache, {len(runs[0].steps)} steps"
            self._add(what, shape, [run.tokens_per_s for run in runs], machine, workload, note)

    def _b(self, machine: Machine, shape: str) -> None:
        workload = workload_b(self.scale)
        for _ in range(2):  # graphs for siblings are captured once siblings occur
            machine.run(workload)
        runs = [machine.run(workload) for _ in range(self.repeats)]
        note = f"{runs[0].num_cached} of {workload.num_in} tokens found in the cache"
        self._add(B, shape, [run.wall_s for run in runs], machine, workload, note)

    def _c(self, machine: Machine, shape: str) -> None:
        workload = workload_c(self.scale)
        machine.run(workload)
        singles = [machine.run(workload).tokens_per_s for _ in range(self.repeats)]
        self._add(C, shape, singles, machine, workload)
        together = workload_c(self.scale, CLIENTS)
        machine.run(together)
        best = max(singles)
        rates = [machine.run(together).tokens_per_s for _ in range(self.repeats)]
        note = f"{_number(statistics.median(rates), 'tok/s')} over {_number(best, 'tok/s')}"
        self._add(GAIN, shape, [rate / best for rate in rates], note=note)

    def _t(self, machine: Machine, shape: str) -> None:
        machine.run_tree()
        runs = [machine.run_tree() for _ in range(self.repeats)]
        note = f"{runs[0].num_cached} tokens found in the cache"
        self._add(TREE, shape, [run.tokens_per_s for run in runs], note=note)

    def _cache(self, machine: Machine, shape: str) -> None:
        """Run with and without the cache in turn: each pair gives its cost."""
        workload = workload_a(self.scale, 0)
        uncached = machine.uncached_engine()
        costs = []
        for _ in range(self.repeats):
            cached_s = machine.run(workload).wall_s
            costs.append(100 * (cached_s / machine.run(workload, uncached).wall_s - 1))
        self._add(CACHE, shape, costs, note="more time for A, seed 0, with the cache than without")

    def _idle(self, machine: Machine, shape: str) -> None:
        self.report.windows[shape] = gpu_profile.profile_windows(machine, workload_a(self.scale, 0))
        say(gpu_profile.table({shape: self.report.windows[shape]}))
        for window in self.report.windows[shape]:
            top = "\n".join(f"  {ms / window.num_steps:8.4f} ms per step  {name}" for name, ms in window.top_ms.items())
            say(f"{shape}, {window.what}:\n{top}")

    def _beside_transformers(self) -> None:
        workload, warm_up = workload_peer(self.scale), workload_peer(self.scale, seed=1)
        with self._machine(QWEN, self.settings) as machine:
            machine.run(warm_up)
            runs: list[Run] = [machine.run(workload) for _ in range(self.repeats)]
        ours = [run.tokens_per_s for run in runs]
        self._add(PEER, QWEN, ours)
        warm_up = Workload(warm_up.name, warm_up.prompts[:2], warm_up.samplings[:2])
        theirs = gpu_peer.run_peer(self.scale, workload, warm_up)
        ratio = statistics.median(ours) / theirs
        self.report.notes["transformers"] = {"tokens_per_s": theirs, "ratio": ratio}
        say(f"transformers generate_batch: {_number(theirs, 'tok/s')}, ours {ratio:.1f} times that")

    def _add(
        self,
        what: str,
        shape: str,
        values: list[float],
        machine: Machine | None = None,
        workload: Workload | None = None,
        note: str = "",
    ) -> None:
        anchor = ANCHORS.get((what, shape), PEER_ANCHOR)
        limit = anchor.limit
        if limit is None and machine is not None and workload is not None:
            least_s = limit_s(machine.spec, workload)
            limit = workload.num_out / least_s if anchor.is_more_better else least_s
        vllm, bar = anchor.vllm, anchor.bar
        if self.scale.is_quick:  # other shapes, maybe no GPU: the figures of others do not apply
            vllm = bar = limit = None
        ours = statistics.median(values)
        self.report.add(Figure(what, shape, anchor.unit, ours, values, vllm, bar, limit, note))


def facts(args: argparse.Namespace) -> dict[str, Any]:
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quire": __version__,
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "command": " ".join(sys.argv),
        "repeats": args.repeats,
        "is_quick": args.quick,
    }


def parse() -> argparse.Namespace:
    def names(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
        def read(text: str) -> tuple[str, ...]:
            found = tuple(text.split(","))
            if unknown := [name for name in found if name not in allowed]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
            return found

        return read

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names(STAGES), default=STAGES, help=f"some of {','.join(STAGES)}")
    parser.add_argument("--models", type=names(tuple(SHAPES)), default=tuple(SHAPES), help="shapes, by name")
    parser.add_argument("--families", type=names(gpu_correctness.FAMILIES), default=gpu_correctness.FAMILIES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--step-tokens", type=int, help="most tokens per step")
    parser.add_argument("--chunk-tokens", type=int, help="most tokens of one prompt per step")
    parser.add_argument("--quantize", type=int, help="bits of weights: 8 is FP8, 4 is INT4; default: bf16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--kv-gib", type=float, help="memory for the KV pool; default: by free memory")
    parser.add_argument("--out", type=Path, help="write gpu.json and gpu.md to this folder")
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny shapes, one repeat")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    return args


def main() -> None:
    started_s = time.perf_counter()
    args = parse()
    with TemporaryDirectory() as folder:
        report = Bench(args, Path(folder)).run()
    say(f"\n{report.facts['device']}, torch {report.facts['torch']}, medians of {args.repeats}\n\n{report.table()}")
    if report.windows:
        say(f"\n{gpu_profile.table(report.windows)}")
    if "transformers" in report.notes:
        theirs, ratio = report.notes["transformers"].values()
        say(f"\ntransformers generate_batch: {_number(theirs, 'tok/s')}, ours {ratio:.1f} times that")
    say(f"\n{time.perf_counter() - started_s:.0f} s in total")
    report.write()
    broken = [str(check) for check in report.checks if not check.is_held] + report.failures
    if broken:
        sys.exit("not correct: " + "; ".join(broken))


if __name__ == "__main__":
    main()
