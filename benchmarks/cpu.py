"""Compares quire with llama.cpp on this machine's CPU: in one run, alternating, each measurement in its own process.

    python benchmarks/cpu.py --out cpu.json         # everything; the first run builds llama.cpp, which takes 15 minutes
    python benchmarks/cpu.py --only decode,prefill --clients 1,16 --rounds 5
    python benchmarks/cpu.py --model olmoe --only decode,prefill    # routed experts: random weights, shape of OLMoE
    python benchmarks/cpu.py --model qwen3.5-0.8b --only decode     # recurrent states: random weights, shape of Qwen3.5
    python benchmarks/cpu.py --quick --no-llama     # a smoke run

The speed of a shared machine varies, so single times mean little: in each round all contenders do the same work one
after the other, ratios are taken within a round, and the table has the medians. llama.cpp runs the model as shipped and
in the formats it is fastest with, converted from that file; flash attention, batch sizes and the rest are its defaults.

decode: tokens per second of all clients together, 128 tokens read and 64 written, as in `llama-batched-bench`.
prefill: one prompt. prefix: the first token of a second request with the same long prefix. start: from the start of a
process, in Python, to its first token. precision: distance from fp32 of the shipped file (see tests/precision.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import cpu_child
import cpu_olmoe
import cpu_peer
import cpu_qwen35
from cpu_child import Task
from cpu_peer import AS_SHIPPED, FORMATS

from quire import __version__
from quire.backends.machine import usable_cores
from quire.weights.hub import resolve

STAGES = ("decode", "prefill", "prefix", "start", "precision")
CLIENTS = (1, 4, 8, 16, 32)
LIMIT_S = 900.0  # per measurement
QUIET = 0.05  # share of the machine for other processes, above which the figures are not reliable
OURS = "quire"


@dataclass(frozen=True, slots=True)
class Scale:
    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    prefills: tuple[int, ...]
    head_tokens: int
    windows: tuple[int, ...]  # of the text used for precision
    num_chats: int
    decode_bars: Mapping[
        int, tuple[float | None, float | None]
    ]  # by number of clients: its best format, and as shipped
    prefill_bar: float | None


DECODE_BARS: dict[int, tuple[float | None, float | None]] = {1: (1.3, None), 16: (1.5, 3.0)}
# Of models with random weights, for which "as shipped" is the only format.
RANDOM_BARS: dict[int, tuple[float | None, float | None]] = {1: (1.0, None), 16: (1.3, None)}
RANDOM_MODELS = {one.NAME: one for one in (cpu_olmoe, cpu_qwen35)}
FULL = Scale(CLIENTS, 128, 64, (128, 512, 2048), 1024, (512, 1024), 10, DECODE_BARS, prefill_bar=1.2)
QUICK = Scale((1, 4), 16, 8, (64,), 64, (64,), 2, {}, prefill_bar=None)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a figure of a workload, and the required ratio to the others."""

    name: str
    unit: str
    path: tuple[str, ...]  # path of the figure within the findings
    best_bar: float | None = None
    shipped_bar: float | None = None

    @property
    def is_more_better(self) -> bool:
        return self.unit == "tok/s"

    def read(self, findings: dict[str, Any]) -> float:
        value: Any = findings
        for key in self.path:
            value = value[key]
        return float(value) / (1e6 if self.unit == "MB" else 1)


@dataclass(frozen=True, slots=True)
class Workload:
    task: dict[str, Any]  # fields of a `Task` except the model
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.rows[0].name


def workloads(scale: Scale, stages: Sequence[str]) -> list[Workload]:
    found = []
    if "decode" in stages:
        found += [_decode(scale, number) for number in scale.clients]
    if "prefill" in stages:
        for length in scale.prefills:
            task = {"kind": "prefill", "prompt_tokens": length, "output_tokens": 0, "repeats": max(1, 1536 // length)}
            row = Row(f"prefill of {length:,}", "tok/s", ("value",), scale.prefill_bar)
            found.append(Workload(task, (row,)))
    if "prefix" in stages:
        task = {"kind": "prefix", "prompt_tokens": scale.head_tokens, "output_tokens": 0, "repeats": 5}
        head = f"first token, head of {scale.head_tokens:,}"
        rows = Row(f"{head}, cached", "ms", ("value",)), Row(f"{head}, new", "ms", ("cold_ms",))
        found.append(Workload(task, rows))
    if "start" in stages:
        task = {"kind": "start", "prompt_tokens": 32, "output_tokens": 0}
        found.append(Workload(task, (Row("process start to first token", "ms", ("value",)),)))
    return found


def _decode(scale: Scale, num_clients: int) -> Workload:
    task = {
        "kind": "decode",
        "num_clients": num_clients,
        "prompt_tokens": scale.prompt_tokens,
        "output_tokens": scale.output_tokens,
    }
    best_bar, shipped_bar = scale.decode_bars.get(num_clients, (None, None))
    row = Row(f"decode, {num_clients} client{'s' * (num_clients > 1)}", "tok/s", ("value",), best_bar, shipped_bar)
    per_cpu = Row(f"{row.name}, per CPU second", "tok/s", ("tokens_per_cpu_s",))  # for machines with other users
    rows = (row, per_cpu, Row(f"peak memory, {num_clients} clients", "MB", ("memory", "peak_bytes")))
    is_weighed = num_clients == max((one for one in scale.clients if one <= 16), default=0)
    return Workload(task, rows if is_weighed else rows[:2])


# The contenders


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    python: Path
    script: Path
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, task: dict[str, Any], num_threads: int) -> dict[str, Any]:
        """Return the findings of its process. The time of `start` is measured here, from before the process exists."""
        whole = Task(**{"model": str(self.model), "num_threads": num_threads, "settings": self.settings, **task})
        others = Others()
        started_s = time.perf_counter()
        command = [str(self.python), str(self.script), json.dumps(asdict(whole))]
        findings: dict[str, Any] = {}
        with TemporaryFile("w+") as problems:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, text=True)
            limit = threading.Timer(LIMIT_S, child.kill)
            limit.start()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    message = json.loads(line) if line.startswith("{") else {}
                    if message.get("event") == cpu_child.FIRST_TOKEN:
                        findings["value"] = 1e3 * (time.perf_counter() - started_s)
                    findings = {**message.get("findings", {}), **findings}
                child.wait()
            finally:
                limit.cancel()
                child.kill()
            problems.seek(0)
            if child.returncode or not findings:
                raise RuntimeError(f"the process ended with {child.returncode}\n{problems.read()[-2000:]}")
        return {**findings, "others": others.share()}


class Others:
    """CPU use of other processes during a measurement. It affects threads that wait for each other most."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._busy_s, self._own_s = _busy_s(), _children_s()

    def share(self) -> float:
        """Return the share of all cores, after the process has ended; 0 if the system does not report it."""
        others_s = _busy_s() - self._busy_s - (_children_s() - self._own_s)
        return max(0.0, others_s) / (time.perf_counter() - self._started_s) / (os.cpu_count() or 1)


def _busy_s() -> float:
    try:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def contenders(args: argparse.Namespace, model: Path) -> list[Contender]:
    settings = {"backend": args.backend}
    if args.precision is not None:
        settings["precision"] = args.precision
    found = [Contender(OURS, Path(sys.executable), Path(__file__).with_name("cpu_ours.py"), model, settings)]
    if args.no_llama:
        return found
    if model.suffix != ".gguf":
        sys.exit(f"{model}: llama.cpp reads GGUF files; use --no-llama to measure quire alone")
    python = args.llama or cpu_peer.find() or cpu_peer.build(say)
    for name in args.formats:
        path = cpu_peer.model_in(name, model, python, args.threads)
        found.append(Contender(name, python, cpu_peer.CHILD, path))
    return found


# The results


@dataclass(slots=True)
class Report:
    facts: dict[str, Any]
    names: list[str]  # of the contenders, ours first
    # workload -> contender -> findings of each round; None if it failed
    found: dict[str, dict[str, list[dict[str, Any] | None]]] = field(default_factory=dict)
    rows: list[tuple[Workload, Row]] = field(default_factory=list)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def median(self, workload: str, row: Row, name: str) -> float | None:
        values = [row.read(one) for one in self.found.get(workload, {}).get(name, []) if one is not None]
        return statistics.median(values) if values else None

    def ratio(self, workload: str, row: Row, name: str) -> float | None:
        """Return how many times better ours is, as the median over the rounds. Above 1: ours is better."""
        ratios = []
        found = self.found.get(workload, {})
        for ours, theirs in zip(found.get(OURS, []), found.get(name, []), strict=False):
            if ours is not None and theirs is not None:
                mine, other = row.read(ours), row.read(theirs)
                ratios.append(mine / other if row.is_more_better else other / mine)
        return statistics.median(ratios) if ratios else None

    def figures(self) -> list[dict[str, Any]]:
        """Return the table as numbers."""
        result = []
        for workload, row in self.rows:
            times = {name: self.ratio(workload.name, row, name) for name in self.names[1:]}
            known = [value for value in times.values() if value is not None]
            best, shipped = min(known, default=None), times.get(AS_SHIPPED)
            pairs = [(best, row.best_bar), (shipped, row.shipped_bar)]
            held = [value >= bar for value, bar in pairs if value is not None and bar is not None]
            is_noisy = self.others(workload.name) > QUIET
            result.append(
                {
                    "what": row.name,
                    "unit": row.unit,
                    "medians": {name: self.median(workload.name, row, name) for name in self.names},
                    "times": times,
                    "times_best": best,
                    "best_bar": row.best_bar,
                    "shipped_bar": row.shipped_bar,
                    "is_held": all(held) if held and not is_noisy else None,
                    "is_noisy": is_noisy,
                }
            )
        return result

    def others(self, *workloads: str) -> float:
        """Return the share of the machine that other processes used, in the median measurement of these workloads."""
        found = [found for name in workloads for found in self.found.get(name, {}).values()]
        shares = [one["others"] for many in found for one in many if one is not None]
        return statistics.median(shares) if shares else 0.0

    def table(self) -> str:
        has_peer = len(self.names) > 1
        heads = ["", *self.names, *(["times its best", "times as shipped", "bars", "held"] if has_peer else [])]
        lines = [heads, ["---"] * len(heads)]
        for figure in self.figures():
            cells = [figure["what"], *(_number(figure["medians"][name], figure["unit"]) for name in self.names)]
            if has_peer:
                bars = " and ".join(f"{figure[bar]:g}" for bar in ("best_bar", "shipped_bar") if figure[bar])
                held = {None: "", True: "yes", False: "NO"}[figure["is_held"]]
                held = "noisy" if bars and figure["is_noisy"] else held
                cells += [_ratio(figure["times_best"]), _ratio(figure["times"].get(AS_SHIPPED)), bars, held]
            lines.append(cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def memory_table(self) -> str:
        """Return medians in MB, for the workload that has a memory row."""
        parts = ("peak_bytes", "weight_bytes", "kv_bytes", "rest_bytes", "of_files_bytes")
        lines = [["", "peak", "weights", "KV cache", "the rest", "mapped files"], ["---"] * 6]
        for workload, row in self.rows:
            if row.path[0] == "memory":
                for name in self.names:
                    cells = (Row("", "MB", ("memory", part)) for part in parts)
                    lines.append([name, *(_number(self.median(workload.name, cell, name), "") for cell in cells)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(lines) > 2 else ""

    def write(self, path: Path | None) -> None:
        if path is not None:
            document = {
                "facts": {**self.facts, "others": self.others(*self.found)},
                "figures": self.figures(),
                "precision": self.verdicts,
                "rounds": self.found,
                "failures": self.failures,
            }
            path.write_text(json.dumps(document, indent=2) + "\n")


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 100 else f"{value:.3g} {unit}".rstrip()


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def say(text: str) -> None:
    print(text, flush=True)


# The run


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.scale: Scale = args.scale
        random = RANDOM_MODELS.get(args.model)
        layers = () if args.layers is None else (args.layers,)
        self.model = random.find_or_write(*layers) if random else resolve(args.model)
        self.contenders = contenders(args, self.model)
        self.report = Report(facts(args, self.contenders), [one.name for one in self.contenders])

    def run(self) -> Report:
        todo = workloads(self.scale, self.args.only)
        self.report.rows = [(workload, row) for workload in todo for row in workload.rows]
        for number in range(self.args.rounds):
            for workload in todo:
                self._round(number, workload)
            self.report.write(self.args.out)
        if "precision" in self.args.only:
            self._attempt("precision", self._precision)
        self.report.write(self.args.out)
        return self.report

    def _round(self, number: int, workload: Workload) -> None:
        """Run all contenders once, starting with a different one in each round: the first finds a different machine."""
        turn = number % len(self.contenders)
        for contender in [*self.contenders[turn:], *self.contenders[:turn]]:
            outcomes = self.report.found.setdefault(workload.name, {}).setdefault(contender.name, [])
            outcomes.append(None)

            def measure(contender: Contender = contender, outcomes: list[Any] = outcomes) -> None:
                outcomes[-1] = contender.run(workload.task, self.args.threads)

            self._attempt(f"{workload.name}, {contender.name}", measure)
        row = workload.rows[0]
        values = {name: found[-1] for name, found in self.report.found[workload.name].items()}
        shown = ", ".join(f"{name} {_number(row.read(one), row.unit)}" for name, one in values.items() if one)
        others = max((one["others"] for one in values.values() if one), default=0.0)
        say(f"round {number + 1}: {workload.name}: {shown}{f'; other processes used {others:.0%}' * (others > QUIET)}")

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.report.failures.append(what)
            say(f"{what}: FAILED: {error}")

    def _precision(self) -> None:
        from cpu_precision import Judge, table

        judge = Judge(self.model, self.args.threads, self.scale.windows, self.scale.num_chats)
        verdicts = []
        for contender in self.contenders:

            def write(sequences: list[list[int]], out: Path, contender: Contender = contender) -> None:
                most = max(map(len, sequences))
                settings = {"sequences": sequences, "out": str(out)}
                contender.run({"kind": "logits", "prompt_tokens": most, "settings": settings}, self.args.threads)

            verdict = judge.ours(contender.settings) if contender.name == OURS else judge.theirs(write)
            verdicts.append(replace(verdict, name=contender.name))
            self.report.verdicts[contender.name] = {**asdict(verdicts[-1]), "misses": verdict.misses}
        judge.close()
        say(f"\nAgainst fp32 of the shipped file:\n{table(verdicts)}")


def facts(args: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    peer = next((cpu_peer.version(one.python) for one in contenders if one.name != OURS), None)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quire": __version__,
        "llama_cpp_python": peer,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "python": sys.version.split()[0],
        "command": " ".join(sys.argv),
        "rounds": args.rounds,
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
    parser.add_argument("--backend", default="native")
    parser.add_argument("--precision", help="of the native backend; default: the backend's own")
    names_of_random = " or ".join(RANDOM_MODELS)
    parser.add_argument("--model", help=f"default: quire's default model; {names_of_random}: random weights")
    parser.add_argument("--layers", type=int, help=f"of a model with random weights; {cpu_olmoe.NAME} has 8 by default")
    parser.add_argument("--clients", type=lambda text: tuple(map(int, text.split(","))), help="for decode: 1,4,8,16,32")
    parser.add_argument("--formats", type=names(FORMATS), help=f"for llama.cpp: some of {','.join(FORMATS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--llama", type=Path, help="a Python with llama-cpp-python installed")
    parser.add_argument("--no-llama", action="store_true", help="measure quire alone")
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small and once")
    args = parser.parse_args()
    args.scale = QUICK if args.quick else FULL
    if args.model in RANDOM_MODELS:  # precision means nothing
        args.formats = (AS_SHIPPED,)
        args.only = tuple(stage for stage in args.only if stage != "precision")
        args.scale = replace(args.scale, decode_bars=RANDOM_BARS, prefill_bar=None)
    if args.clients:
        args.scale = replace(args.scale, clients=args.clients)
    args.formats = args.formats or (FORMATS[:1] if args.quick else FORMATS)
    args.rounds = 1 if args.quick else args.rounds
    return args


def main() -> None:
    started_s = time.perf_counter()
    args = parse()
    report = Bench(args).run()
    if report.rows:
        say(f"\n{args.threads} threads, medians of {args.rounds} rounds\n\n{report.table()}")
    if (others := report.others(*report.found)) > QUIET:
        say(f"\nOther processes used {others:.0%} of the machine: measure again when it is idle.")
    if memory := report.memory_table():
        say(f"\nMemory in MB, for the row of the peak:\n\n{memory}")
    say(f"\n{time.perf_counter() - started_s:.0f} s in total")
    if report.failures:
        sys.exit("failed: " + "; ".join(report.failures))


if __name__ == "__main__":
    main()
