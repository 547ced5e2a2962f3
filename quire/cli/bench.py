"""`quire bench`: measure batching, shared prefixes, drafts and priorities with a real model in this process."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from quire.bench.driver import (
    HIGH_SHAPE,
    LARGE_HIGH,
    LARGE_LOW,
    POOL_TOKENS,
    measure_fairness,
    measure_resumed,
    run_bench,
    setup_of,
)
from quire.bench.report import (
    MAX_BACKLOG,
    MAX_SECONDS,
    PARTS,
    BenchConfig,
    BenchReport,
    DraftsReport,
    FairnessReport,
    Latency,
    PrefixReport,
    SpeedupReport,
    unfair,
)
from quire.cli import options
from quire.cli.chat import locate
from quire.cli.terminal import echo, progress_bar, show, table
from quire.errors import InvalidRequest, MissingExtra
from quire.version import __version__

_DEFAULT = BenchConfig()
_FIELDS = {
    *("clients", "max_num_seqs"),
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
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each part.")] = _DEFAULT.rounds,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = _DEFAULT.prompt_tokens,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = _DEFAULT.output_tokens,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Part to measure: {', '.join(PARTS)}; repeatable, by default all.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=1, max=MAX_SECONDS, help="Fairness: seconds of HIGH requests beside a LOW backlog."),
    ] = _DEFAULT.seconds,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Fairness: maximum number of requests in one step.")
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
    with options.options_named(_FIELDS):
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
        out.mkdir(parents=True, exist_ok=True)
    with options.options_named(_FIELDS):
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
    words = [word.strip() for word in ",".join(given).split(",")]
    for word in words:
        if not re.fullmatch(r"[1-9][0-9]{0,5}", word):
            raise InvalidRequest(f"--clients {word!r} of {','.join(given)!r} is not a whole number of at least 1")
    return tuple(map(int, words))


def _parts(given: list[str] | None) -> tuple[str, ...]:
    for part in given or ():
        if part not in PARTS:
            raise InvalidRequest(f"--only {part!r} is not one of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if not given or part in given)


# Running


def _run(model: str | None, config: BenchConfig, settings: dict[str, Any]) -> BenchReport:
    """Run the parts. Each engine is closed before the next one starts: memory may not hold two."""
    from quire.engine.composition import EngineConfig
    from quire.engine.llm import LLM

    begun_s = time.perf_counter()
    EngineConfig(max_num_seqs=config.max_num_seqs, **settings)  # refuses settings that cannot work
    path = locate(model)
    report = None
    with progress_bar("", "passed") as update:

        def progress(what: str) -> None:
            update(description=what)

        progress("loading the model")
        if config.parts != ("fairness",):
            with LLM(path, max_num_seqs=max(64, *config.clients), **settings) as llm:
                report = run_bench(llm, config, progress)
        if "fairness" in config.parts:
            settings = {**settings, "max_num_seqs": config.max_num_seqs}
            with LLM(path, max_waiting=4 * (MAX_BACKLOG + config.max_num_seqs), **settings) as llm:
                fairness = measure_fairness(llm, config, progress)
            report = report or BenchReport(setup_of(llm), config, 0.0, None, None, None)
            if llm.max_model_len >= POOL_TOKENS:
                progress("fairness: HIGH behind a resumed LOW")
                num_blocks = POOL_TOKENS // report.setup.block_size + 1
                with LLM(path, max_model_len=POOL_TOKENS, num_blocks=num_blocks, **settings) as llm:
                    fairness = replace(fairness, resumed=measure_resumed(llm, config.seed))
            report = replace(report, fairness=fairness)
    assert report is not None  # a configuration has at least one part
    return replace(report, duration_s=time.perf_counter() - begun_s)


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
    if report.speedup is not None:
        values["speedup"] = {str(level.clients): level.ratio for level in report.speedup.levels}
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
        rows.append(
            [str(level.clients), f"{level.tokens_per_s:.1f}", *ratios, decode, decode_ratio, f"{level.ttft_ms:.0f}"]
        )
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


def _prefix_text(prefix: PrefixReport, rounds: int) -> str:
    one, least, most = prefix.siblings, prefix.ref_count_min, prefix.ref_count_max
    counts = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"A head of {prefix.head_tokens} tokens: first token after {prefix.ttft_cold_ms:.0f} ms cold,"
        f" {prefix.ttft_hit_ms:.0f} ms when it is cached ({prefix.ratio:.1f} times sooner),"
        f" {prefix.ttft_live_ms:.0f} ms while the first request still decodes; medians of {rounds}."
        f" While both run they share {prefix.shared_blocks} blocks, each with ref count {counts};"
        f" copies: {prefix.copies}. {_held(prefix.is_held)}\n"
        f"{one.num_requests} requests with one new prompt of {one.prompt_tokens} tokens, arriving together, computed"
        f" {one.prefill_tokens:,} prompt tokens instead of {one.prefill_tokens_unshared:,}; the last of them had its"
        f" first token after {one.ttft_max_ms:.0f} ms. Blocks copied, as each computes its last token:"
        f" {one.copies}. {_held(one.is_held)}"
    )


def _drafts_text(drafts: DraftsReport | None, rounds: int) -> str:
    if drafts is None:
        return "Drafts are off: this backend verifies none for this model."
    share = "-" if drafts.acceptance is None else f"{drafts.acceptance:.0%}"
    return (
        f"An answer that repeats its prompt, one at a time: {drafts.tokens_per_s:.1f} tok/s with drafts,"
        f" {drafts.tokens_per_s_without:.1f} without ({drafts.ratio:.2f} times, {drafts.ratio_min:.2f} to"
        f" {drafts.ratio_max:.2f}); medians over rounds: {rounds}."
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
        f"An engine with {config.max_num_seqs} requests in a step. HIGH requests ({HIGH_SHAPE.prompt_tokens} tokens in,"
        f" {HIGH_SHAPE.output_tokens} out), one at a time: alone, then beside at least {backlog.num_low} LOW requests"
        f" ({config.prompt_tokens} in, {config.output_tokens} out), which received"
        f" {backlog.low_tokens_per_s:.0f} tok/s, prompts included. Their TTFT p95 should be at most"
        f" {fairness.max_ttft_ratio:g} times that of the idle engine in every window. tok/s: decode speed of one"
        f" request, median.\n"
        f"At least {both.num_each} HIGH and {both.num_each} LOW requests at any time, for {config.seconds / 2:.1f} s:"
        f" HIGH received {both.high_tokens:,} tokens and LOW {both.low_tokens:,}, prompts included: a share of {share}."
        f" Its guaranteed share is {both.guaranteed_share:.1%}, and it should reach {fairness.min_low_share:.1%}."
        f"{_resumed_text(fairness)} {_held(not list(unfair(fairness)))}"
    )


def _resumed_text(fairness: FairnessReport) -> str:
    if fairness.resumed is None:
        return ""
    return (
        f"\nA KV pool of {fairness.resumed.pool_tokens:,} tokens, and a LOW request of {LARGE_LOW.prompt_tokens} tokens"
        f" that was preempted, lost its cached blocks and resumed. HIGH requests of {LARGE_HIGH.prompt_tokens} tokens"
        f" need its memory. Their TTFT p95 should be at most {fairness.max_ttft_ratio:g} times that on the idle engine."
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
        yield _Section("A shared prefix", _prefix_text(report.prefix, report.config.rounds))
    if "drafts" in report.config.parts:
        yield _Section("Drafts", _drafts_text(report.drafts, report.config.rounds))
    if (fairness := report.fairness) is not None:
        text = _fairness_text(report.config, fairness)
        yield _Section("Fairness between priorities", text, HIGH_HEADS, _high_rows(fairness))


def _print(report: BenchReport) -> None:
    """Print tables that fit 80 columns."""
    show(_title(report), file_width=80)
    for section in _sections(report):
        show(f"\n{section.title}\n")
        if section.rows:
            show(table(section.heads, section.rows, texts=LEFT_HEADS), "", file_width=80)
        show(section.text, file_width=80)


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
        "duration": f"{report.duration_s:.0f} s",
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
