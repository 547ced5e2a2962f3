"""`quire sim`: the real scheduler on a trace, with a model of time in place of a device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.core.policy import PATIENCE_S, POLICIES
from quire.core.request import Priority
from quire.engine.simulate import MACHINES, SimConfig, SimReport, StepTime, percentile, simulate
from quire.engine.trace import TraceRequest, read_trace, synthesize
from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT = SimConfig()
PLOT_SUFFIXES = (".png", ".svg")


def sim(
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, JSON lines (docs/simulator.md). Without: a synthetic one.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Order of service, of {', '.join(POLICIES)}; repeat to compare. [all]")
    ] = None,
    blocks: Annotated[
        list[int] | None, typer.Option(help="Blocks in the KV pool; repeat to compare. [512 and 4096]")
    ] = None,
    machine: Annotated[str, typer.Option(help=f"Step times of {', '.join(MACHINES)}.")] = "h200-llama3-8b",
    base_ms: Annotated[float | None, typer.Option(help="Time of any step, instead of the machine's.")] = None,
    token_us: Annotated[float | None, typer.Option(help="Time per token computed, instead of the machine's.")] = None,
    context_us: Annotated[float | None, typer.Option(help="Time per KV token read, instead of the machine's.")] = None,
    requests: Annotated[int, typer.Option(help="Synthetic trace: how many requests.")] = 600,
    rate: Annotated[float, typer.Option(help="Synthetic trace: requests per second.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Synthetic trace: another seed, another trace.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = _DEFAULT.block_size,
    max_seqs: Annotated[int, typer.Option(help="Most requests running at once.")] = _DEFAULT.max_seqs,
    max_step_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = _DEFAULT.max_step_tokens,
    max_chunk_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens of one request in one step.")
    ] = _DEFAULT.max_chunk_tokens,
    max_waiting: Annotated[int, typer.Option(help="Longest queue; more is refused.")] = _DEFAULT.max_waiting,
    patience: Annotated[
        float | None, typer.Option(help=f"Seconds of waiting worth one tier, under aging. [{PATIENCE_S:g}]")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Prefix reuse.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison to this .png or .svg file.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace to this file, to edit and rerun.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the real scheduler on a trace and compare policies and pool sizes: throughput, waits, hits, preemptions."""
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot {plot.name} does not end in {' or '.join(PLOT_SUFFIXES)}")
    step_time = _step_time(machine, base_ms, token_us, context_us)
    todo = read_trace(trace) if trace is not None else synthesize(requests, rate, seed=seed)
    if save_trace is not None:
        save_trace.write_text("".join(f"{request.as_line()}\n" for request in todo), encoding="utf-8")
    base = SimConfig(
        patience_s=patience,
        block_size=block_size,
        max_seqs=max_seqs,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=max_chunk_tokens,
        max_waiting=max_waiting,
        is_caching=cache,
    )
    configs = [
        replace(base, policy=one, num_blocks=size) for one, size in product(policy or POLICIES, blocks or (512, 4096))
    ]
    for config in configs:
        config.make_scheduler(lambda _event: None)  # refuse what cannot work before the first run, not after it
    reports = _run_all(todo, configs, step_time)
    if as_json:
        typer.echo(json.dumps([summary(report) for report in reports], indent=2))
    else:
        _print_table(todo, reports)
    if plot is not None:
        from quire.cli.sim_plot import draw

        draw(reports, plot)
        typer.echo(f"Wrote {plot}", err=True)


def _step_time(machine: str, base_ms: float | None, token_us: float | None, context_us: float | None) -> StepTime:
    if machine not in MACHINES:
        raise InvalidRequest(f"--machine {machine!r} is not one of {', '.join(MACHINES)}")
    given = {"base_ms": base_ms, "token_us": token_us, "context_us": context_us}
    return replace(MACHINES[machine], **{name: value for name, value in given.items() if value is not None})


def _run_all(trace: Sequence[TraceRequest], configs: Sequence[SimConfig], step_time: StepTime) -> list[SimReport]:
    reports = []
    with _progress(len(configs) * len(trace)) as advance_to:
        for number, config in enumerate(configs):
            name = f"{config.policy}, {config.num_blocks} blocks"
            base = number * len(trace)
            reports.append(
                simulate(trace, config, step_time, lambda done, base=base, name=name: advance_to(base + done, name))  # type: ignore[misc]
            )
    return reports


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr, so that the result can be piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda done, name: bar.update(task, completed=done, description=name)


def summary(report: SimReport) -> dict[str, Any]:
    """The figures of one run, as plain values."""
    tiers = {}
    for priority in Priority:
        records = report.tier(priority)
        waits = [record.wait_s for record in records if record.wait_s is not None]
        ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
        tiers[priority.name] = {
            "requests": len(records),
            "ttft_s_p50": percentile(ttfts, 0.5),
            "ttft_s_p95": percentile(ttfts, 0.95),
            "wait_s_p50": percentile(waits, 0.5),
            "wait_s_p95": percentile(waits, 0.95),
            "wait_s_max": max(waits, default=None),
        }
    return {
        "policy": report.config.policy,
        "blocks": report.config.num_blocks,
        "output_tokens_per_s": report.output_tokens_per_s,
        "makespan_s": report.makespan_s,
        "steps": report.num_steps,
        "hit_rate": report.cache.hit_rate,
        "preemptions": report.num_preemptions,
        "refused": report.num_refused,
        "tiers": tiers,
        "cache": asdict(report.cache),
    }


def _print_table(trace: Sequence[TraceRequest], reports: Sequence[SimReport]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has room
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    console.print(f"{len(trace):,} requests over {span_s:,.1f} s. Waits and times to the first token in seconds.")
    console.print(_table(reports))


def _table(reports: Sequence[SimReport]) -> Table:
    """A row per run and tier; what belongs to the whole run stands in the first of its rows."""
    from rich.table import Table

    table = Table()
    for name in ("policy", "blocks", "out tok/s", "hits", "preempted", "refused", "tier", "requests"):
        table.add_column(name, justify="left" if name in ("policy", "tier") else "right")
    for name in ("TTFT p50", "p95", "wait p50", "p95"):
        table.add_column(name, justify="right")
    for report in reports:
        whole = [report.config.policy, f"{report.config.num_blocks:,}", f"{report.output_tokens_per_s:,.0f}"]
        whole += [f"{report.cache.hit_rate:.0%}", f"{report.num_preemptions:,}", f"{report.num_refused:,}"]
        for name, tier in summary(report)["tiers"].items():
            if tier["requests"]:
                times = [tier[key] for key in ("ttft_s_p50", "ttft_s_p95", "wait_s_p50", "wait_s_p95")]
                table.add_row(*whole, name, f"{tier['requests']:,}", *map(_seconds, times))
                whole = [""] * len(whole)
        table.add_section()
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
