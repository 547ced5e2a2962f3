"""Compares quire with llama.cpp on this machine's CPU: in one run, alternating, each measurement in its own process.

    python benchmarks/cpu.py                        # everything; the first run builds llama.cpp, which takes 15 minutes
    python benchmarks/cpu.py --only decode,prefill --clients 1,16 --rounds 5
    python benchmarks/cpu.py --model olmoe --only decode,prefill    # routed experts: random weights, shape of OLMoE
    python benchmarks/cpu.py --model qwen3.5-0.8b --only decode     # recurrent states: random weights, shape of Qwen3.5
    python benchmarks/cpu.py --only decode --clients 1,8 --no-llama --busy 2    # beside two CPU-bound processes
    python benchmarks/cpu.py --quick --no-llama     # a smoke run

The speed of a shared machine varies, so single times mean little: in each round all contenders do the same work one
after the other, ratios are taken within a round, and the table has the medians. llama.cpp runs the model as shipped and
in the formats it is fastest with, converted from that file; flash attention, batch sizes and the rest are its defaults.

decode: tokens per second of all clients together, 128 tokens read and 64 written, as in `llama-batched-bench`.
prefill: one prompt. prefix: the first token of a second request with the same long prefix. start: from the start of a
process, in Python, to its first token. precision: distance from fp32 of the shipped file (see tests/precision.py).

With `--busy` every measurement is repeated beside so many CPU-bound processes. Under a fair scheduler, T threads beside
N of them on T cores get T / (T + N) of the machine if their work is well divided, and batching pays if 8 clients
together get more tokens per second than one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cpu_task
import harness
from cpu_random import OLMOE, SHAPES
from cpu_task import Task
from harness import QUIET, Others, Stages, number, ratio, say

from quire.backends.machine import usable_cores
from quire.weights.hub import cache_dir, resolve

STAGES = ("decode", "prefill", "prefix", "start", "precision")
LIMIT_S = 900.0  # per measurement
OURS, AS_SHIPPED, BUSY = "quire", "as shipped", "quire, busy"
FORMATS = (AS_SHIPPED, "Q4_0", "Q8_0")
FOLDER = Path(__file__).parent

Bars = Mapping[int, tuple[float | None, float | None]]  # by number of clients: against its best format, and as shipped


@dataclass(frozen=True, slots=True)
class Scale:
    clients: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompt_tokens: int = 128
    output_tokens: int = 64
    prefills: tuple[int, ...] = (128, 512, 2048)
    head_tokens: int = 1024
    windows: tuple[int, ...] = (512, 1024)  # of the text used for precision
    num_chats: int = 10
    decode_bars: Bars = field(default_factory=lambda: {1: (1.3, None), 16: (1.5, 3.0)})
    prefill_bar: float | None = 1.2


FULL = Scale()
QUICK = Scale((1, 4), 16, 8, (64,), 64, (64,), 2, {}, prefill_bar=None)
# Of models with random weights, for which "as shipped" is the only format.
RANDOM_BARS: Bars = {1: (1.0, None), 16: (1.3, None)}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a figure of a workload, and the required ratio to the others."""

    name: str
    unit: str
    key: str  # of the figure in the findings
    best_bar: float | None = None
    shipped_bar: float | None = None

    def read(self, findings: dict[str, Any]) -> float:
        return float(findings[self.key]) / (1e6 if self.unit == "MB" else 1)

    def times(self, ours: float, theirs: float) -> float:
        """Return how many times better ours is."""
        return ours / theirs if self.unit == "tok/s" else theirs / ours


@dataclass(frozen=True, slots=True)
class Workload:
    task: dict[str, Any]  # fields of a `Task` except the model
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.rows[0].name


def workloads(scale: Scale, stages: Sequence[str]) -> list[Workload]:
    found = [_decode(scale, count) for count in scale.clients if "decode" in stages]
    for length in scale.prefills if "prefill" in stages else ():
        task = {"kind": "prefill", "prompt_tokens": length, "output_tokens": 0, "repeats": max(1, 1536 // length)}
        found.append(Workload(task, (Row(f"prefill of {length:,}", "tok/s", "value", scale.prefill_bar),)))
    if "prefix" in stages:
        task = {"kind": "prefix", "prompt_tokens": scale.head_tokens, "output_tokens": 0, "repeats": 5}
        head = f"first token, head of {scale.head_tokens:,}"
        rows = Row(f"{head}, cached", "ms", "value"), Row(f"{head}, new", "ms", "cold_ms")
        found.append(Workload(task, rows))
    if "start" in stages:
        task = {"kind": "start", "prompt_tokens": 32, "output_tokens": 0}
        found.append(Workload(task, (Row("process start to first token", "ms", "value"),)))
    return found


def _decode(scale: Scale, num_clients: int) -> Workload:
    tokens = {"prompt_tokens": scale.prompt_tokens, "output_tokens": scale.output_tokens}
    bars = scale.decode_bars.get(num_clients, (None, None))
    row = Row(f"decode, {num_clients} client{'s' * (num_clients > 1)}", "tok/s", "value", *bars)
    rows = [row, Row(f"{row.name}, per CPU second", "tok/s", "tokens_per_cpu_s")]  # for machines with other users
    if num_clients == max((one for one in scale.clients if one <= 16), default=0):
        rows.append(Row(f"peak memory, {num_clients} clients", "MB", "peak_bytes"))
    return Workload({"kind": "decode", "num_clients": num_clients, **tokens}, tuple(rows))


# The contenders


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    python: Path
    script: Path
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    num_busy: int = 0  # CPU-bound processes beside it

    def run(self, task: dict[str, Any], num_threads: int) -> dict[str, Any]:
        """Return the findings of its process. The time of `start` is measured here, from before the process exists."""
        whole = Task(**{"model": str(self.model), "num_threads": num_threads, "settings": self.settings, **task})
        command = [str(self.python), str(self.script), json.dumps(asdict(whole))]
        findings: dict[str, Any] = {}
        others = Others()
        with harness.cpu_bound_processes(self.num_busy):
            for at_s, message in harness.child_messages(command, LIMIT_S):
                if message.get("event") == cpu_task.FIRST_TOKEN:
                    findings["value"] = 1e3 * at_s
                findings = {**message.get("findings", {}), **findings}
        return {**findings, "others": others.share()}


def contenders(args: argparse.Namespace, model: Path) -> list[Contender]:
    settings = {"backend": args.backend} | ({"precision": args.precision} if args.precision else {})
    found = [Contender(OURS, Path(sys.executable), FOLDER / "cpu_ours.py", model, settings)]
    if args.busy:
        found.append(replace(found[0], name=BUSY, num_busy=args.busy))
    if args.no_llama:
        return found
    if model.suffix != ".gguf":
        sys.exit(f"{model}: llama.cpp reads GGUF files; use --no-llama to measure quire alone")
    peer = Contender(AS_SHIPPED, args.llama or find_llama() or build_llama(), FOLDER / "cpu_llama.py", model)
    return found + [peer if name == AS_SHIPPED else converted(peer, name, args.threads) for name in args.formats]


PACKAGE = "llama-cpp-python"
BUILD_OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"  # for this machine; without image support


def llama_folder() -> Path:
    return cache_dir() / "benchmarks" / "llama.cpp"


def find_llama() -> Path | None:
    """Return the Python that can import llama.cpp, if it was built before."""
    python = llama_folder() / "venv" / "bin" / "python"
    return python if python.exists() and llama_version(python) else None


def build_llama() -> Path:
    """Build it in a venv in quire's cache. pip's output goes to a file."""
    venv, log = llama_folder() / "venv", llama_folder() / "build.log"
    llama_folder().mkdir(parents=True, exist_ok=True)
    say(f"building {PACKAGE} in {venv}: about 15 minutes on two cores; progress is in {log}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--verbose", "--no-binary", PACKAGE, PACKAGE]
    environment = {**os.environ, "CMAKE_ARGS": BUILD_OPTIONS}
    with log.open("w") as out:
        if subprocess.run(command, stdout=out, stderr=out, env=environment, check=False).returncode:
            sys.exit(f"llama.cpp could not be built, see {log}. --no-llama measures quire alone")
    return venv / "bin/python"


def llama_version(python: Path) -> str:
    script = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    return subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False).stdout.strip()


def converted(peer: Contender, file_format: str, num_threads: int) -> Contender:
    """Return the contender with its file in another format, converted once from the given file."""
    out = llama_folder() / f"{peer.model.stem}.{file_format}.gguf"
    if not out.exists():
        partial_file = out.with_suffix(".partial")
        settings = {"format": file_format, "out": str(partial_file)}
        peer.run({"kind": "quantize", "settings": settings}, num_threads)
        partial_file.rename(out)
    return replace(peer, name=file_format, model=out)


# The results


Rounds = list[dict[str, Any] | None]  # findings of each round; None if it failed


@dataclass(slots=True)
class Report:
    names: list[str]  # of the contenders, ours first
    workloads: list[Workload]
    found: dict[str, dict[str, Rounds]] = field(default_factory=dict)  # by workload and contender
    stages: Stages = field(default_factory=Stages)

    def values(self, workload: Workload, row: Row, name: str) -> list[float]:
        rounds = self.found.get(workload.name, {}).get(name, [])
        return [row.read(one) for one in rounds if one is not None]

    def times(self, workload: Workload, row: Row, name: str) -> float | None:
        """Return how many times better ours is, as the median over the rounds. Above 1: ours is better."""
        found = self.found.get(workload.name, {})
        pairs = zip(found.get(OURS, []), found.get(name, []), strict=False)
        times = [row.times(row.read(ours), row.read(theirs)) for ours, theirs in pairs if ours and theirs]
        return statistics.median(times) if times else None

    def figures(self) -> list[dict[str, Any]]:
        """Return the table as numbers."""
        return [self._figure(workload, row) for workload in self.workloads for row in workload.rows]

    def _figure(self, workload: Workload, row: Row) -> dict[str, Any]:
        times = {name: self.times(workload, row, name) for name in self.names[1:]}
        peers = [value for name, value in times.items() if value is not None and name != BUSY]
        best, shipped = min(peers, default=None), times.get(AS_SHIPPED)
        pairs = [(best, row.best_bar), (shipped, row.shipped_bar)]
        held = [value >= bar for value, bar in pairs if value is not None and bar is not None]
        medians = {}
        for name in self.names:
            values = self.values(workload, row, name)
            medians[name] = statistics.median(values) if values else None
        is_noisy = self.others(workload) > QUIET
        return {
            "what": row.name,
            "unit": row.unit,
            "medians": medians,
            "times": times,
            "times_best": best,
            "best_bar": row.best_bar,
            "shipped_bar": row.shipped_bar,
            "is_held": all(held) if held and not is_noisy else None,
            "is_noisy": is_noisy,
        }

    def others(self, *some: Workload) -> float:
        """Return the share of the machine that other processes used, in the median measurement of these workloads."""
        rounds = [one for workload in some for one in self.found.get(workload.name, {}).values()]
        shares = [one["others"] for many in rounds for one in many if one is not None]
        return statistics.median(shares) if shares else 0.0

    def table(self) -> str:
        heads = ["", *self.names, "times its best", "times as shipped", *([f"times {BUSY}"] * (BUSY in self.names))]
        return harness.table([*heads, "bars", "held"], [self._cells(figure) for figure in self.figures()])

    def _cells(self, figure: dict[str, Any]) -> list[str]:
        times = [figure["times_best"], figure["times"].get(AS_SHIPPED)]
        times += [figure["times"][BUSY]] if BUSY in self.names else []
        bars = " and ".join(f"{figure[bar]:g}" for bar in ("best_bar", "shipped_bar") if figure[bar])
        held = {None: "noisy" if bars and figure["is_noisy"] else "", True: "yes", False: "NO"}[figure["is_held"]]
        medians = [number(figure["medians"][name], figure["unit"]) for name in self.names]
        return [figure["what"], *medians, *map(ratio, times), bars, held]


# The run


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        shape = SHAPES.get(args.model)
        self.model = resolve(args.model) if shape is None else shape.find_or_write(args.model, args.layers)
        self.contenders = contenders(args, self.model)
        self.report = Report([one.name for one in self.contenders], workloads(args.scale, args.only))

    def run(self) -> Report:
        for workload in self.report.workloads:
            sides = {one.name: partial(self._measure, workload, one) for one in self.contenders}
            self.report.found[workload.name] = harness.alternate(sides, self.args.rounds)
        if "precision" in self.args.only:
            self.report.stages.attempt("precision", self._precision)
        return self.report

    def _measure(self, workload: Workload, contender: Contender, round_number: int) -> dict[str, Any] | None:
        what = f"{workload.name}, {contender.name}"
        found = self.report.stages.attempt(what, contender.run, workload.task, self.args.threads)
        if found is not None:
            row = workload.rows[0]
            value = number(row.read(found), row.unit)
            say(f"round {round_number + 1}: {what} {value}; others {found['others']:.0%}")
        return found

    def _precision(self) -> None:
        from precision import Source

        from tests.precision import Native, table

        source = Source(self.model, self.args.threads, self.args.scale.windows, self.args.scale.num_chats)
        verdicts = []
        for contender in self.contenders:
            if contender.name == BUSY:
                continue
            if contender.name == OURS:
                native = Native(self.model, self.args.precision, self.args.threads)
                verdict = source.judge(native)
                native.close()
            else:
                verdict = source.judge_written(partial(self._write_logits, contender))
            verdicts.append(replace(verdict, name=contender.name))
        say(f"\nAgainst fp32 of the shipped file:\n{table(verdicts)}")

    def _write_logits(self, contender: Contender, sequences: list[list[int]], out: Path) -> None:
        settings = {"sequences": sequences, "out": str(out)}
        task = {"kind": "logits", "prompt_tokens": max(map(len, sequences)), "settings": settings}
        contender.run(task, self.args.threads)


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--only", type=harness.names(STAGES), default=STAGES, help=f"some of {','.join(STAGES)}")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--precision", help="of the native backend; default: the backend's own")
    parser.add_argument("--model", help=f"default: quire's default model; {' or '.join(SHAPES)}: random weights")
    parser.add_argument("--layers", type=int, help=f"of a model with random weights; {OLMOE} has 8 by default")
    parser.add_argument("--clients", type=harness.numbers, help="for decode: 1,4,8,16,32")
    parser.add_argument("--formats", type=harness.names(FORMATS), help=f"for llama.cpp: some of {','.join(FORMATS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", type=int, default=0, help="also measure beside so many CPU-bound processes")
    parser.add_argument("--llama", type=Path, help="a Python with llama-cpp-python installed")
    parser.add_argument("--no-llama", action="store_true", help="measure quire alone")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small and once")
    args = parser.parse_args()
    args.scale = QUICK if args.quick else FULL
    if args.model in SHAPES:  # precision means nothing
        args.formats = (AS_SHIPPED,)
        args.only = tuple(stage for stage in args.only if stage != "precision")
        args.scale = replace(args.scale, decode_bars=RANDOM_BARS, prefill_bar=None)
    if args.clients:
        args.scale = replace(args.scale, clients=args.clients)
    args.formats = args.formats or (FORMATS[:1] if args.quick else FORMATS)
    args.rounds = 1 if args.quick else args.rounds
    return args


def main() -> None:
    args = parse()
    report = Bench(args).run()
    if report.workloads:
        say(f"\n{args.threads} threads, medians of {args.rounds} rounds\n\n{report.table()}")
    say(f"\n{harness.others_line(report.others(*report.workloads))}")
    report.stages.check()


if __name__ == "__main__":
    main()
