"""`quire bench`: measure batching, shared prefixes, drafts and priorities with a real model on this machine.

All but the last are measured in this process, fairness between priorities over HTTP, on a `quire serve` process:

1. Idle: HIGH requests, one at a time, on an idle server.
2. Backlog: the same beside a constant backlog of LOW requests. Shows the cost of LOW work to HIGH requests over time.
3. Saturated: a constant backlog of both tiers. Shows whether LOW gets its guaranteed share.
4. Resumed: a second server with a small KV pool. A HIGH request preempts a LOW one and evicts its cached blocks. When
   LOW has resumed, the next HIGH request needs its memory. Shows that HIGH does not wait until LOW has caught up.

The clients share the machine with the server and must be cheap: one HTTP request has many prompts, and one thread reads
it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import typer

from quire.bench.driver import run_bench
from quire.bench.http_load import HttpStream, RefusedRequest
from quire.bench.report import (
    HIGH_ANSWER,
    HIGH_PROMPT,
    MAX_BACKLOG,
    NUM_IDLE,
    PARTS,
    SENTENCES,
    BacklogReport,
    BenchConfig,
    BenchReport,
    DraftsReport,
    FairnessReport,
    Latency,
    PrefixReport,
    Progress,
    ResumedReport,
    Sample,
    SaturatedReport,
    Setup,
    SpeedupReport,
    Stage,
    backlog_report,
    backlog_size,
    fairness_report,
    latency,
    resumed_report,
    saturated_report,
)
from quire.cli import options, terminal
from quire.cli.chat import locate
from quire.cli.server_client import PATIENT, ServerClient, ServerError, ServerProcess, check_installed, serving
from quire.cli.terminal import echo
from quire.core.values import Priority
from quire.errors import InvalidRequest, MissingExtra, QuireError
from quire.version import __version__
from quire.weights.hub import DEFAULT_MODEL

_DEFAULT = BenchConfig()
_FIELDS = {
    *("clients", "rounds", "prompt_tokens", "output_tokens", "seconds", "max_num_seqs"),
    *("backend", "precision", "quantize", "kv_cache_dtype", "device", "dtype", "load_format", "threads"),
}
PLOT_NAME = "speedup.png"


@options.takes(compute=options.compute_by_default)
def bench(
    model: Annotated[
        str | None,
        typer.Option(help="A name from `quire models`, a folder or a .gguf file; by default the default model."),
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option(help="Numbers of concurrent clients; by default 1,2,4,8,16.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each part.")] = _DEFAULT.rounds,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = _DEFAULT.prompt_tokens,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = _DEFAULT.output_tokens,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Part to measure: {', '.join(PARTS)}; repeatable, by default all.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Fairness: seconds of HIGH requests beside a LOW backlog.")
    ] = _DEFAULT.seconds,
    max_num_seqs: Annotated[
        int, typer.Option(help="Fairness: maximum number of requests in one step of the server.")
    ] = _DEFAULT.max_num_seqs,
    threads: options.ThreadsOption = None,
    *,
    compute: options.Settings,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Write report.json, report.md and, with matplotlib, {PLOT_NAME} into this folder."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = _DEFAULT.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure a model: concurrent clients, a shared prefix, drafts, fairness among priorities."""
    facts = {"quire": __version__, "command": shlex.join(["quire", *sys.argv[1:]]), "machine": machine_facts()}
    with options.options_named(_FIELDS, is_bare=True):
        config = BenchConfig(
            parts=_parts(only),
            clients=_clients(clients),
            rounds=rounds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seconds=seconds,
            max_num_seqs=max_num_seqs,
            seed=seed,
        )
    if out is not None:
        _prepare(out)
    with options.options_named(_FIELDS, is_bare=True):
        report = _run(model, config, {**compute, "threads": threads})
    document = document_of(report, facts)
    if as_json:
        echo(json.dumps(document, indent=2))
    else:
        _print(report)
    if out is not None:
        write_report(out, report, document)
    for problem in report.not_held:
        echo(f"not met: {problem}", err=True)
    if report.not_held:
        raise typer.Exit(1)


# Options


def _clients(given: list[str] | None) -> tuple[int, ...]:
    if given is None:
        return _DEFAULT.clients
    words = [word.strip() for one in given for word in one.split(",")]
    for word in words:
        if not word.isdecimal() or len(word) > 6:
            raise InvalidRequest(f"clients: {word!r} of {','.join(given)!r} is not a whole number")
    return tuple(int(word) for word in words)


def _parts(given: list[str] | None) -> tuple[str, ...]:
    for part in given or ():
        if part not in PARTS:
            raise InvalidRequest(f"--only {part!r} is not one of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if not given or part in given)


def _prepare(out: Path) -> None:
    """Refuse outputs that could not be written, before the run."""
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"--out {out} is a file, not a folder")
    out.mkdir(parents=True, exist_ok=True)


# Running


def _run(model: str | None, config: BenchConfig, settings: dict[str, Any]) -> BenchReport:
    """Run the parts. The model in this process is closed before the server starts: memory may not hold two."""
    from quire.engine.composition import EngineConfig

    begun_s = time.perf_counter()
    EngineConfig(max_num_seqs=config.max_num_seqs, **settings)  # refuses settings that cannot work
    if "fairness" in config.parts:
        check_installed()
        locate(model)  # downloaded here if needed, not by the server
    with _progress() as progress:
        report = None if config.parts == ("fairness",) else _run_here(model, config, settings, progress)
        if "fairness" in config.parts:
            found = measure_fairness(model or DEFAULT_MODEL, config, settings, progress)
            report = report or BenchReport(found.setup, config, 0.0, None, None, None)
            report = replace(report, fairness=found.report)
    assert report is not None  # a configuration has at least one part
    return replace(report, duration_s=time.perf_counter() - begun_s)


def _run_here(model: str | None, config: BenchConfig, settings: dict[str, Any], progress: Progress) -> BenchReport:
    from quire.engine.llm import LLM

    progress(Stage("loading the model", 0, 1))
    with LLM(model, max_num_seqs=max(64, *config.clients), **settings) as llm:
        return run_bench(llm, config, progress)


@contextmanager
def _progress() -> Iterator[Progress]:
    """The expected duration on stderr, and a progress bar if that is a terminal."""
    is_told = False
    with terminal.progress_bar("", "count", "passed", total=1) as update:

        def show(stage: Stage) -> None:
            nonlocal is_told
            if stage.expected_s is not None and not is_told:
                is_told = True
                echo(f"This takes about {_duration(stage.expected_s)}.", err=True)
            update(completed=stage.num_done, total=stage.num_stages, description=stage.what)

        yield show


def _duration(seconds: float) -> str:
    return f"{max(5, round(seconds / 5) * 5)} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def machine_facts() -> dict[str, Any]:
    """Facts that the figures depend on. A load above 0 means that other programs used the machine before the run."""
    from quire.cli.doctor import read_cpu

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": read_cpu()[0],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


# Results


def document_of(report: BenchReport, facts: dict[str, Any]) -> dict[str, Any]:
    """The report as plain values: ratios under `speedup`, the measurements behind them under `throughput`."""
    values = asdict(report)
    values["throughput"] = values["speedup"]
    values["speedup"] = None if report.speedup is None else {str(k): v for k, v in report.speedup.ratios.items()}
    return {**facts, **values, "not_held": list(report.not_held)}


def write_report(out: Path, report: BenchReport, document: dict[str, Any]) -> None:
    drawn = [part for part in (report.speedup, report.prefix, report.fairness) if part is not None]
    has_plot = bool(drawn) and find_spec("matplotlib") is not None
    (out / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(report, document, has_plot=has_plot), encoding="utf-8")
    if has_plot:
        from quire.cli.plots import draw_bench

        draw_bench(drawn, _title(report), out / PLOT_NAME)
        echo(f"Wrote report.json, report.md and {PLOT_NAME} to {out}", err=True)
    else:
        why = f", but no {PLOT_NAME}: {MissingExtra.of('it', 'matplotlib')}" if drawn else ""
        echo(f"Wrote report.json and report.md to {out}{why}", err=True)


def _title(report: BenchReport) -> str:
    setup = report.setup
    where = f"threads: {setup.num_threads}" if setup.device == "cpu" else setup.device
    return f"{setup.model} in {setup.dtype} with {setup.backend}, {where}"


SPEEDUP_HEADS = ("clients", "tok/s", "ratio", "lowest", "highest", "decode tok/s", "decode ratio", "TTFT ms")
LEFT_HEADS = ("phase",)
HIGH_HEADS = ("phase", "HIGH", "TTFT ms p50", "p95", "max", "p95/idle", "tok/s", "/idle")


def _speedup_rows(speedup: SpeedupReport) -> list[list[str]]:
    best = speedup.baseline
    ttft_ms = min(one.ttft_ms for one in speedup.measurements if one.clients == 1)
    rows = [["1", f"{best.tokens_per_s:.1f}", "1.00", "", "", f"{best.decode_tokens_per_s:.1f}", "1.00"]]
    rows[0].append(f"{ttft_ms:.0f}")
    for level in speedup.levels:
        ratios = [f"{ratio:.2f}" for ratio in (level.ratio, level.ratio_min, level.ratio_max)]
        decode = "-" if level.decode_tokens_per_s is None else f"{level.decode_tokens_per_s:.1f}"
        decode_ratio = "-" if level.decode_ratio is None else f"{level.decode_ratio:.2f}"
        row = [str(level.clients), f"{level.tokens_per_s:.1f}", *ratios, decode, decode_ratio, f"{level.ttft_ms:.0f}"]
        rows.append(row)
    return rows


def _speedup_text(report: BenchReport, speedup: SpeedupReport) -> str:
    best, config = speedup.baseline, report.config
    tried = ", ".join(f"{rate:.1f} with {number}" for number, rate in best.best_by_threads.items())
    num_singles = sum(one.clients == 1 for one in speedup.measurements)
    typical = ", ".join(f"{level.ratio_to_median:.2f} at {level.clients}" for level in speedup.levels)
    return (
        f"Output tokens per second, prompts included: {config.prompt_tokens} tokens in, {config.output_tokens} out,"
        f" greedy, all arriving together; medians over rounds: {config.rounds}. One at a time is the best of"
        f" {num_singles} single requests measured before, between and after the batches"
        f" (best by threads: {tried}), so that the ratios are lower bounds;"
        f" against the median single request they are {typical}."
        f" Tokens found in the prefix cache: {speedup.num_cached_tokens}."
    )


def _prefix_text(prefix: PrefixReport) -> str:
    one, least, most = prefix.siblings, prefix.ref_count_min, prefix.ref_count_max
    counts = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"A head of {prefix.head_tokens} tokens: first token after {prefix.ttft_cold_ms:.0f} ms cold,"
        f" {prefix.ttft_hit_ms:.0f} ms when it is cached ({prefix.ratio:.1f} times sooner),"
        f" {prefix.ttft_live_ms:.0f} ms while the first request still decodes; medians of {prefix.repeats}."
        f" While both run they share {prefix.shared_blocks} blocks, each with ref count {counts};"
        f" copies: {prefix.copies}. {_held(prefix.is_held)}\n"
        f"{one.num_requests} requests with one new prompt of {one.prompt_tokens} tokens, arriving together, computed"
        f" {one.prefill_tokens:,} prompt tokens instead of {one.prefill_tokens_unshared:,}; the last of them had its"
        f" first token after {one.ttft_max_ms:.0f} ms. Blocks copied, as each computes its last token:"
        f" {one.copies}. {_held(one.is_held)}"
    )


def _drafts_text(drafts: DraftsReport | None) -> str:
    if drafts is None:
        return "Drafts are off: this backend verifies none for this model."
    share = "-" if drafts.acceptance is None else f"{drafts.acceptance:.0%}"
    return (
        f"An answer that repeats its prompt, one at a time: {drafts.tokens_per_s:.1f} tok/s with drafts,"
        f" {drafts.tokens_per_s_without:.1f} without ({drafts.ratio:.2f} times, {drafts.ratio_min:.2f} to"
        f" {drafts.ratio_max:.2f}); medians over rounds: {drafts.rounds}."
        f" Accepted: {drafts.draft_tokens_accepted} of {drafts.draft_tokens} draft tokens ({share}),"
        f" {drafts.tokens_per_step:.2f} tokens per step, {drafts.steps} steps instead of {drafts.steps_without}."
        f" The answers are {'equal' if drafts.is_equal else 'DIFFERENT'}."
    )


def _high_rows(fairness: FairnessReport) -> list[list[str]]:
    backlog = fairness.backlog
    rows = [_high_row("idle", fairness.idle, None, None)]
    rows += [
        _high_row(f"backlog {round(one.begin_s, 1):g}-{round(one.end_s, 1):g} s", one.latency, one.ttft_ratio, None)
        for one in backlog.windows
    ]
    rows.append(_high_row("backlog", backlog.latency, None, backlog.decode_ratio))
    if (resumed := fairness.resumed) is not None:
        rows.append(_high_row("small pool, idle", resumed.idle, None, None))
        rows.append(_high_row("LOW resumed", resumed.latency, resumed.ttft_ratio, None))
    return rows


def _high_row(name: str, one: Latency, ttft_ratio: float | None, decode_ratio: float | None) -> list[str]:
    times = ["-" if ms is None else f"{ms:.0f}" for ms in (one.ttft_ms_p50, one.ttft_ms_p95, one.ttft_ms_max)]
    rate = "-" if one.decode_tokens_per_s is None else f"{one.decode_tokens_per_s:.1f}"
    ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (ttft_ratio, decode_ratio)]
    return [name, str(one.requests), *times, ratios[0], rate, ratios[1]]


def _fairness_text(config: BenchConfig, fairness: FairnessReport) -> str:
    backlog, both = fairness.backlog, fairness.saturated
    share = "-" if both.low_share is None else f"{both.low_share:.1%}"
    return (
        f"`quire serve` with {fairness.max_num_seqs} requests in a step, over HTTP. HIGH requests of {HIGH_PROMPT}"
        f" tokens in, {HIGH_ANSWER} out, one at a time: on the idle server, then beside at least {backlog.num_low} LOW"
        f" requests ({config.prompt_tokens} in, {config.output_tokens} out), which received"
        f" {backlog.low_tokens_per_s:.0f} tok/s, prompts included. Their TTFT p95 should be at most"
        f" {fairness.max_ttft_ratio:g} times that of the idle server in every window. tok/s: decode speed of one"
        f" request, median.\n"
        f"At least {both.num_each} HIGH and {both.num_each} LOW requests at any time, for {both.seconds:.1f} s: HIGH"
        f" received {both.high_tokens:,} tokens and LOW {both.low_tokens:,}, prompts included: a share of {share}."
        f" Its guaranteed share is {both.guaranteed_share:.1%}, and it should reach {fairness.min_low_share:.1%}."
        f"{_resumed_text(fairness)}"
        f" The client used {backlog.client_cpu:.1%} and {both.client_cpu:.1%} of a core. {_held(fairness.is_held)}"
    )


def _resumed_text(fairness: FairnessReport) -> str:
    resumed = fairness.resumed
    if resumed is None:
        return ""
    return (
        f"\nA KV pool of {resumed.pool_tokens:,} tokens, and a LOW request of {resumed.low_tokens} tokens that was"
        f" preempted, lost its cached blocks and resumed. HIGH requests of {resumed.high_tokens} tokens need its"
        " memory."
        f" Their TTFT p95 should be at most {fairness.max_ttft_ratio:g} times that on the idle server."
    )


def _held(is_held: bool) -> str:
    return "Expectation met." if is_held else "EXPECTATION NOT MET."


class _Section(NamedTuple):
    title: str
    text: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def _sections(report: BenchReport) -> Iterator[_Section]:
    """The parts that were measured."""
    if (speedup := report.speedup) is not None:
        text = _speedup_text(report, speedup)
        yield _Section("Many clients against one at a time", text, SPEEDUP_HEADS, _speedup_rows(speedup))
    if report.prefix is not None:
        yield _Section("A shared prefix", _prefix_text(report.prefix))
    if "drafts" in report.config.parts:
        yield _Section("Drafts", _drafts_text(report.drafts))
    if (fairness := report.fairness) is not None:
        text = _fairness_text(report.config, fairness)
        yield _Section("Fairness between priorities", text, HIGH_HEADS, _high_rows(fairness))


def _print(report: BenchReport) -> None:
    """Print tables that fit 80 columns."""
    terminal.show(_title(report), file_width=80)
    for section in _sections(report):
        terminal.show(f"\n{section.title}\n")
        if section.rows:
            terminal.show(terminal.table(section.heads, section.rows, texts=LEFT_HEADS), "", file_width=80)
        terminal.show(section.text, file_width=80)


def markdown(report: BenchReport, document: dict[str, Any], *, has_plot: bool) -> str:
    machine, setup = document["machine"], report.setup
    lines = [f"# quire bench: {setup.model}", "", f"    {document['command']}", ""]
    lines += [f"![Throughput, time to first token, fairness]({PLOT_NAME})", ""] if has_plot else []
    lines += ["| | |", "|---|---|"]
    facts = {
        "date": machine["date"],
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "load before the run": machine["load_average_before"],
        "device": setup.device,
        "backend": f"{setup.backend}, {setup.dtype}, threads: {setup.num_threads}",
        "KV pool": f"{setup.num_blocks:,} blocks of {setup.block_size} tokens",
        "quire": f"{document['quire']}, Python {machine['python']}",
        "duration": _duration(report.duration_s),
    }
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    for section in _sections(report):
        lines += ["", f"## {section.title}", ""]
        if section.rows:
            rule = ["---" if head in LEFT_HEADS else "---:" for head in section.heads]
            lines += [*(f"| {' | '.join(cells)} |" for cells in (section.heads, rule, *section.rows)), ""]
        lines.append(section.text.replace("\n", "\n\n"))
    if report.not_held:
        lines += ["", "## Expectations not met", "", *(f"- {problem}" for problem in report.not_held)]
    return "\n".join(lines) + "\n"


class Shape(NamedTuple):
    """Tokens of a request: of the prompt, and of the answer, which is never shorter."""

    prompt_tokens: int
    output_tokens: int


HIGH_SHAPE = Shape(HIGH_PROMPT, HIGH_ANSWER)
NUM_WARM_UP = 3
MAX_PAUSE_S = 0.2  # between two HIGH requests, so that they arrive at any point of a step
GRACE_S = 30.0  # time for a HIGH request that is running when its phase ends
SETTLE_SHARE = 0.25  # of a saturated phase passes before tokens are counted: the first requests start together
POLL_S = 0.05
PHASES = ("starting a server", "idle", "HIGH beside a LOW backlog", "both tiers saturated", "HIGH behind a resumed LOW")
# The last phase: tokens of the KV pool, and requests of which two do not fit.
POOL_TOKENS = 1088
LARGE_HIGH, LARGE_LOW = Shape(960, 2), Shape(640, 400)
NUM_RESUMED = 3


@dataclass(frozen=True, slots=True)
class Fairness:
    setup: Setup
    report: FairnessReport


def measure_fairness(model: str, config: BenchConfig, settings: Mapping[str, Any], progress: Progress) -> Fairness:
    """Start a server with this model and these engine settings, measure it and stop it."""

    def tell(phase: int) -> None:
        expected_s = None if phase == 0 else 1.7 * config.seconds + NUM_IDLE
        progress(Stage(f"fairness: {PHASES[phase]}", phase, len(PHASES), expected_s))

    tell(0)
    with serving(model, _options(config, settings)) as process:
        visit = _Measurement(process, config)
        tell(1)
        visit.high_requests(is_over=lambda number, _: number >= NUM_WARM_UP)
        idle = latency(visit.high_requests(is_over=lambda number, _: number >= NUM_IDLE))
        tell(2)
        backlog = visit.backlog(backlog_size(config, idle), idle)
        tell(3)
        saturated = visit.saturated()
        token_bytes = visit.token_bytes()
    resumed = None
    if token_bytes and visit.max_model_len >= POOL_TOKENS:
        tell(4)
        pool = {"max_model_len": POOL_TOKENS, "kv_memory": (POOL_TOKENS + visit.setup.block_size) * token_bytes}
        with serving(model, _options(config, {**settings, **pool})) as process:
            resumed = _Measurement(process, config).resumed()
    return Fairness(visit.setup, fairness_report(config.max_num_seqs, idle, backlog, saturated, resumed))


def _options(config: BenchConfig, settings: Mapping[str, Any]) -> list[str]:
    """Options of `quire serve`, with limits high enough that no request of this part is refused."""
    found = {**settings, "max_num_seqs": config.max_num_seqs}
    options: list[str] = []
    for name, value in found.items():
        if value is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    most = 2 * max(MAX_BACKLOG, 4 * config.max_num_seqs)
    most_tokens = most * max(config.prompt_tokens, HIGH_PROMPT)
    options += ["--max-queue", str(most), "--max-queued-tokens", str(most_tokens)]
    longest_s = 10 * config.seconds + 600
    return [*options, "--queue-timeout", f"{longest_s:.0f}", "--drain", "1", "--log-level", "warning"]


class _Measurement:
    """Measures one server."""

    def __init__(self, process: ServerProcess, config: BenchConfig) -> None:
        self._config = config
        self._server = ServerClient(process.url, None, PATIENT)
        self._server.wait_until_ready()
        version = self._server.get("/version")
        tokens = self._server.post("/tokenize", {"prompt": " ".join(SENTENCES)})
        try:
            scheduling = version["scheduling"]
            self.setup = Setup(
                model=version["model"],
                backend=version["backend"],
                device=version["device"],
                dtype=version["dtype"],
                num_threads=process.num_threads,
                block_size=scheduling["block_size"],
                num_blocks=scheduling["num_blocks"],
                max_num_seqs=scheduling["max_num_seqs"],
                max_num_batched_tokens=scheduling["max_num_batched_tokens"],
            )
            self.max_model_len = max_model_len = scheduling["max_model_len"]
            token_ids = tokens["tokens"]
        except (KeyError, TypeError):
            raise self._server.malformed("a malformed version or list of tokens", (version, tokens)) from None
        self._low_shape = Shape(config.prompt_tokens, config.output_tokens)
        longest = max(sum(self._low_shape), sum(HIGH_SHAPE))
        if longest > max_model_len:
            raise InvalidRequest(f"fairness needs {longest} tokens of context, and the model has {max_model_len}")
        self._client = StreamClient(self._server, self.setup.model, token_ids, config.seed)
        self._random = Random(config.seed)

    def token_bytes(self) -> int:
        """Bytes of the KV cache for one token; 0: not known."""
        (model,) = [one for one in self._server.get("/v1/watch?once=true")["models"] if one["name"] == self.setup.model]
        return -(-int(model["engine"]["kv_bytes"]) // (self.setup.num_blocks * self.setup.block_size))

    def resumed(self) -> ResumedReport:
        """Send large HIGH requests on the idle server, and then each behind a LOW request that has just resumed."""
        idle = [self._high_request(time.perf_counter(), None, LARGE_HIGH) for _ in range(NUM_RESUMED)]
        high = [self._behind_resumed() for _ in range(NUM_RESUMED)]
        pool_tokens = (self.setup.num_blocks - 1) * self.setup.block_size
        return resumed_report(pool_tokens, LARGE_HIGH.prompt_tokens, LARGE_LOW.prompt_tokens, idle, high)

    def _behind_resumed(self) -> Sample:
        low = Load(self._client, Priority.LOW, LARGE_LOW, 1)
        with _running(low):
            self._wait_for(lambda _: low.num_tokens > 0, low.check)
            self._high_request(time.perf_counter(), None, LARGE_HIGH)  # preempts it, and evicts its blocks
            self._wait_for_running()
            sample = self._high_request(time.perf_counter(), None, LARGE_HIGH)
        self._wait_for(lambda num_requests: num_requests == 0)
        return sample

    def _wait_for_running(self) -> None:
        give_up_s = time.perf_counter() + GRACE_S
        while not self._server.get("/v1/cache/stats")["num_running"]:
            if time.perf_counter() > give_up_s:
                raise ServerError(f"{self._server.url} did not resume a preempted request")
            time.sleep(POLL_S)

    def high_requests(
        self,
        is_over: Callable[[int, float], bool],
        limit_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Sample, ...]:
        """Send requests one after another, with pauses of random length, until `is_over`.

        `is_over` gets the number of requests and the seconds since the start. After `limit_s` seconds a running request
        is cancelled.
        """
        begun_s = time.perf_counter()
        samples: list[Sample] = []
        while not is_over(len(samples), time.perf_counter() - begun_s):
            left_s = None if limit_s is None else begun_s + limit_s - time.perf_counter()
            samples.append(self._high_request(begun_s, left_s))
            check()
            time.sleep(self._random.uniform(0, MAX_PAUSE_S))
        return tuple(samples)

    def _high_request(self, phase_s: float, left_s: float | None, shape: Shape = HIGH_SHAPE) -> Sample:
        stream = Stream(self._client, self._client.body(Priority.HIGH, shape))
        times_s: list[float] = []

        def take(new: NewTokens) -> None:
            times_s.extend([time.perf_counter()] * new.num_tokens)

        timer = None if left_s is None else threading.Timer(max(0.0, left_s), stream.cut)
        if timer is not None:
            timer.start()
        begun_s = time.perf_counter()
        try:
            stream.read(take)
        finally:
            if timer is not None:
                timer.cancel()
        first_s = times_s[0] if times_s else time.perf_counter()
        decode_s = times_s[-1] - first_s if times_s else 0.0
        return Sample(begun_s - phase_s, first_s - begun_s, len(times_s), decode_s)

    def backlog(self, num_low: int, idle: Latency) -> BacklogReport:
        config = self._config
        low = Load(self._client, Priority.LOW, self._low_shape, num_low)
        with _running(low):
            self._wait_for(lambda num_requests: num_requests > num_low - MAX_PROMPTS, low.check)
            clock, before = _Clock(), low.num_tokens
            high = self.high_requests(
                is_over=lambda _, passed_s: passed_s >= config.seconds,
                limit_s=config.seconds + GRACE_S,
                check=low.check,
            )
            low_tokens, passed_s, client_cpu = low.num_tokens - before, clock.passed_s, clock.cpu
        self._wait_for(lambda num_requests: num_requests == 0)
        return backlog_report(config.seconds, num_low, idle, high, low_tokens / passed_s, client_cpu)

    def saturated(self) -> SaturatedReport:
        num_each, seconds = 2 * self._config.max_num_seqs, self._config.seconds / 2
        high, low = (Load(self._client, tier, HIGH_SHAPE, num_each) for tier in (Priority.HIGH, Priority.LOW))
        with _running(high, low):
            self._sleep(seconds * SETTLE_SHARE, high, low)
            clock, before = _Clock(), (high.num_tokens, low.num_tokens)
            self._sleep(seconds, high, low)
            high_tokens, low_tokens = high.num_tokens - before[0], low.num_tokens - before[1]
            passed_s, client_cpu = clock.passed_s, clock.cpu
        return saturated_report(passed_s, num_each, high_tokens, low_tokens, client_cpu)

    def _sleep(self, seconds: float, *loads: Load) -> None:
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 1.0))
            for load in loads:
                load.check()

    def _wait_for(self, is_reached: Callable[[int], bool], check: Callable[[], None] = lambda: None) -> None:
        """Wait until the number of requests of the server satisfies `is_reached`."""
        give_up_s = time.perf_counter() + GRACE_S
        while True:
            stats = self._server.get("/v1/cache/stats")
            num_requests = stats["num_running"] + stats["num_waiting"]
            if is_reached(num_requests):
                return
            if time.perf_counter() > give_up_s:
                raise ServerError(f"{self._server.url} has {num_requests} requests, not the number that was sent")
            check()
            time.sleep(POLL_S)


class _Clock:
    """Wall time and CPU time of this process, the client, since it was created."""

    def __init__(self) -> None:
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._wall_s

    @property
    def cpu(self) -> float:
        """CPU time in cores: 1.0 is one busy core."""
        return (time.process_time() - self._cpu_s) / self.passed_s


@contextmanager
def _running(*loads: Load) -> Iterator[None]:
    try:
        for load in loads:
            load.start()
        yield
        for load in loads:
            load.check()
    finally:
        for load in loads:
            load.stop()


MAX_PROMPTS = 64  # of one HTTP request; the limit of the server


class NewTokens(NamedTuple):
    """Tokens of one prompt of a stream that have just arrived."""

    prompt: int  # its number
    num_tokens: int
    is_finished: bool


class StreamClient:
    """Makes request bodies. No two share a prompt, and each has its own cache salt, so that nothing is cached."""

    def __init__(self, server: ServerClient, model: str, token_ids: Sequence[int], seed: int) -> None:
        self.server = server
        self._model = model
        self._token_ids = token_ids
        self._distinct = sorted(set(token_ids))
        self._random = Random(seed)
        self._numbers = count(1)
        self._lock = threading.Lock()

    def body(self, priority: Priority, shape: Shape, num_prompts: int = 1) -> dict[str, Any]:
        with self._lock:
            prompts = self._prompts(num_prompts, shape.prompt_tokens)
            number = next(self._numbers)
        return {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": shape.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "priority": priority.name.lower(),
            "cache_salt": f"bench.{number}",
        }

    def _prompts(self, num_prompts: int, length: int) -> list[list[int]]:
        """Prompts with different first tokens, if there are enough: the cache shares even a single token."""
        is_enough = num_prompts <= len(self._distinct)
        draw = self._random.sample if is_enough else self._random.choices
        firsts = draw(self._distinct, k=num_prompts)
        return [[first, *self._random.choices(self._token_ids, k=length - 1)] for first in firsts]


class Stream:
    """One HTTP request. `cut` may be called from any thread at any time."""

    def __init__(self, client: StreamClient, body: dict[str, Any]) -> None:
        self._server = client.server
        self._stream = HttpStream(client.server.url, "/v1/completions", body, client.server.headers())
        self.cut = self._stream.cut

    def read(self, take: Callable[[NewTokens], None]) -> None:
        """Send the request and pass on its tokens as they arrive. Returns when it has ended or is cut."""
        try:
            for chunk in self._stream.events():
                for one in chunk["choices"]:
                    is_finished = one.get("finish_reason") is not None
                    take(NewTokens(one["index"], len(one.get("token_ids") or ()), is_finished))
        except RefusedRequest as error:
            raise self._server.refusal(error.status, error.reason, error.headers, error.body) from None
        except QuireError:
            if not self._stream.is_cut:
                raise


class Load:
    """Keeps at least `num_requests` requests of one tier outstanding, from `start` to `stop`."""

    def __init__(self, client: StreamClient, priority: Priority, shape: Shape, num_requests: int) -> None:
        self._client = client
        self._priority = priority
        self._shape = shape
        self._num_requests = num_requests
        self._lock = threading.RLock()
        self._streams: dict[Stream, threading.Thread] = {}
        self._is_stopped = False
        self._problem: QuireError | None = None
        self.num_open = 0
        self.num_tokens = 0  # received; all of a prompt counts with its first token

    def start(self) -> None:
        with self._lock:
            self._refill()

    def stop(self) -> None:
        """Cut all streams. The server cancels their requests."""
        with self._lock:
            self._is_stopped = True
            running = dict(self._streams)
        for stream in running:
            stream.cut()
        for thread in running.values():
            thread.join()

    def check(self) -> None:
        """Raise the error of a stream, if there was one. The load has stopped then."""
        if self._problem is not None:
            raise self._problem

    def _refill(self) -> None:
        while self.num_open < self._num_requests and not self._is_stopped:
            num_prompts = min(MAX_PROMPTS, -(-self._num_requests // 2))
            self.num_open += num_prompts
            stream = Stream(self._client, self._client.body(self._priority, self._shape, num_prompts))
            thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
            self._streams[stream] = thread
            thread.start()

    def _run(self, stream: Stream) -> None:
        begun: set[int] = set()

        def take(new: NewTokens) -> None:
            with self._lock:
                if new.num_tokens and new.prompt not in begun:
                    begun.add(new.prompt)
                    self.num_tokens += self._shape.prompt_tokens
                self.num_tokens += new.num_tokens
                if new.is_finished:
                    self.num_open -= 1
                    self._refill()

        try:
            stream.read(take)
        except QuireError as error:
            with self._lock:
                self._problem = self._problem or error
                self._is_stopped = True
        finally:
            with self._lock:
                del self._streams[stream]
