"""`quire sim`: the scheduler on a trace, with modelled step times instead of a device."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options, sim_replicas, sim_states, terminal
from quire.cli.terminal import echo
from quire.core.policy import POLICIES
from quire.core.values import Priority
from quire.errors import InvalidRequest, MissingExtra
from quire.sim.cluster import ROUTERS
from quire.sim.scenarios import SCENARIOS
from quire.sim.simulator import MACHINES, Machine, Outcome, RequestRecord, SimConfig, SimReport, percentile, simulate
from quire.sim.traces import TraceRequest, read_trace
from quire.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT = SimConfig()
_Trace = Annotated[
    str | None, typer.Argument(help="A recorded trace, JSON lines (docs/simulator.md); - is standard input.")
]
_SchedulingPolicy = Annotated[
    list[str] | None, typer.Option(help=f"Scheduling policy: {', '.join(POLICIES)}; repeatable, by default all.")
]
_NumBlocks = Annotated[
    list[int] | None, typer.Option(help="Number of blocks of the KV cache; repeatable, by default 512 and 4096.")
]
_Machine = Annotated[str, typer.Option(help=f"Machine and model whose step times are used: {', '.join(MACHINES)}.")]
_Scenario = Annotated[
    str | None, typer.Option(help=f"Synthetic trace: {', '.join(SCENARIOS)} (mixed); docs/simulator.md.")
]
_MaxNumBatchedTokens = Annotated[int, typer.Option(help="Maximum number of tokens in one step.")]
_MaxChunkTokens = Annotated[int, typer.Option(help="Maximum number of prompt tokens of one request in one step.")]
_MaxMixedTokens = Annotated[
    int | None, typer.Option(help="Maximum prompt tokens in a step beside every 64 answers; default: no limit.")
]
_Acceptance = Annotated[
    float | None, typer.Option(help="Drafts: probability that a guessed token is right; by default there are none.")
]
_DraftShare = Annotated[
    float | None, typer.Option(help="Drafts: probability that the text after a token is guessed (1.0).")
]
_SYNTHETIC = {"scenario": "mixed", "requests": 600, "rate": 20.0, "seed": 0}
DEFAULT_BLOCKS = (512, 4096)
MAX_BLOCKS = 10_000_000  # the simulator has an object for each
PLOT_SUFFIXES = (".png", ".svg")

OLD_OPTIONS = {  # older names, still accepted
    "--policy": "--scheduling-policy",
    "--blocks": "--num-blocks",
    "--cache": "--enable-prefix-caching",
    "--no-cache": "--no-enable-prefix-caching",
}


def sim(
    trace: _Trace = None,
    scheduling_policy: _SchedulingPolicy = None,
    num_blocks: _NumBlocks = None,
    machine: _Machine = "h200-llama3-8b",
    base_ms: Annotated[float | None, typer.Option(help="Fixed time of a step, in place of the machine's.")] = None,
    token_us: Annotated[float | None, typer.Option(help="Time per computed token, in place of the machine's.")] = None,
    context_us: Annotated[float | None, typer.Option(help="Time per read KV token, in place of the machine's.")] = None,
    kv_bytes: Annotated[int | None, typer.Option(help="KV bytes per token, in place of the machine's.")] = None,
    scenario: _Scenario = None,
    requests: Annotated[int | None, typer.Option(help="Synthetic trace: number of requests (600).")] = None,
    rate: Annotated[float | None, typer.Option(help="Synthetic trace: requests per second (20).")] = None,
    seed: Annotated[int | None, typer.Option(help="Synthetic trace: random seed (0).")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.")] = _DEFAULT.block_size,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of running requests.")] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: _MaxNumBatchedTokens = _DEFAULT.max_num_batched_tokens,
    max_chunk_tokens: _MaxChunkTokens = _DEFAULT.max_chunk_tokens,
    max_mixed_tokens: _MaxMixedTokens = None,
    max_waiting: Annotated[int, typer.Option(help="Maximum number of waiting requests.")] = _DEFAULT.max_waiting,
    patience: options.PatienceOption = None,
    normal_share: options.NormalShareOption = None,
    low_share: options.LowShareOption = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of equal prefixes.")] = True,
    acceptance: _Acceptance = None,
    draft_share: _DraftShare = None,
    states: sim_states.StatesOption = None,
    places: sim_states.PlacesOption = None,
    state_bytes: sim_states.StateBytesOption = None,
    window: sim_states.WindowOption = None,
    num_window_blocks: sim_states.WindowBlocksOption = None,
    replicas: sim_replicas.ReplicasOption = None,
    router: sim_replicas.RouterOption = None,
    report_interval: sim_replicas.ReportOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of the comparison to this .png or .svg file.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the scheduler on a trace and compare policies and cache sizes: throughput, waits, hits, preemptions."""
    _check_outputs(trace, plot, save_trace, is_plotted=not states and not replicas)
    device = _machine(machine, base_ms, token_us, context_us, kv_bytes, state_bytes)
    base = SimConfig(
        patience=patience,
        normal_share=normal_share,
        low_share=low_share,
        has_costly_rows=device.has_costly_rows,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=max_chunk_tokens,
        max_mixed_tokens=max_mixed_tokens,
        max_waiting=max_waiting,
        enable_prefix_caching=enable_prefix_caching,
    )
    base = _with_drafts(sim_states.with_windows(base, window, num_window_blocks), acceptance, draft_share)
    defaults = sim_states.DEFAULT_BLOCKS if states else sim_replicas.DEFAULT_BLOCKS if replicas else ()
    if defaults:
        scheduling_policy, num_blocks = scheduling_policy or ["fair"], num_blocks or [*defaults]
    configs = sim_states.state_configs(_configs(base, scheduling_policy, num_blocks), states, places)
    _check_configs(configs)
    sim_replicas.check_options(replicas, router, report_interval, configs)
    synthetic = {"scenario": scenario, "requests": requests, "rate": rate, "seed": seed}
    todo = _trace(trace, {name: value for name, value in synthetic.items() if value is not None})
    _save(todo, save_trace)
    if replicas:
        _compare_routers(trace, todo, configs[0], (machine, device), (replicas, router, report_interval), as_json)
        return
    reports = _run_all(todo, configs, device)
    _print(trace, todo, machine, device, reports, as_json=as_json)
    _draw(reports, f"{len(todo):,} requests of {trace or 'a synthetic trace'} on {machine}", plot)


def _print(
    path: str | None,
    trace: Sequence[TraceRequest],
    name: str,
    machine: Machine,
    reports: Sequence[SimReport],
    *,
    as_json: bool,
) -> None:
    if as_json:
        echo(json.dumps(_document(path, trace, name, machine, reports), indent=2))
    else:
        _print_table(trace, name, machine, reports)


def _compare_routers(
    path: str | None,
    trace: Sequence[TraceRequest],
    config: SimConfig,
    machine: tuple[str, Machine],
    cluster: tuple[list[int], list[str] | None, float | None],
    as_json: bool,
) -> None:
    """Run the trace with each router and number of replicas, and print the result."""
    name, device = machine
    replicas, routers, report_s = cluster
    num_runs = len({*replicas}) * (1 + len({*(routers or ROUTERS)}))
    with progress_bar(num_runs * len(trace)) as show:
        reports = sim_replicas.run(trace, config, device, replicas, routers, report_s, show)
    if as_json:
        head = {"quire": __version__, "trace": _trace_facts(path, trace), "machine": _machine_facts(name, device)}
        echo(json.dumps(head | sim_replicas.document(config, reports), indent=2))
        return
    console = terminal.console()
    console.print(f"{len(trace):,} requests over {_span_s(trace):,.1f} s on {name}. Times in seconds.\n")
    console.print(sim_replicas.table(reports))


def _save(trace: Sequence[TraceRequest], path: Path | None) -> None:
    if path is None:
        return
    path.write_text("".join(f"{request.as_line()}\n" for request in trace), encoding="utf-8")
    echo(f"Wrote {path}", err=True)


def _draw(reports: Sequence[SimReport], title: str, plot: Path | None) -> None:
    if plot is None:
        return
    from quire.cli.sim_plot import draw

    draw(reports, title, plot)
    echo(f"Wrote {plot}", err=True)


# Options


def _check_outputs(trace: str | None, plot: Path | None, save_trace: Path | None, *, is_plotted: bool) -> None:
    """Refuse outputs that could not be written, before the run."""
    if plot is not None and not is_plotted:
        raise InvalidRequest("--plot cannot be combined with --states or --replicas")
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot {plot} does not end in {' or '.join(PLOT_SUFFIXES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise MissingExtra.of("--plot", "matplotlib")
    for option, path in (("--plot", plot), ("--save-trace", save_trace)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
            raise InvalidRequest(f"{option} {path} {problem}")
    if save_trace is not None and trace is not None and save_trace.exists() and save_trace.samefile(trace):
        raise InvalidRequest(f"--save-trace {save_trace} is the trace itself")


def _machine(
    name: str,
    base_ms: float | None,
    token_us: float | None,
    context_us: float | None,
    kv_bytes: int | None,
    state_bytes: int | None,
) -> Machine:
    if name not in MACHINES:
        raise InvalidRequest(f"--machine {name!r} is not one of {', '.join(MACHINES)}")
    for option, size in (("--kv-bytes", kv_bytes), ("--state-bytes", state_bytes)):
        if size is not None and size < 1:
            raise InvalidRequest(f"{option} {size} is less than 1")
    known = MACHINES[name]
    times = {"base_ms": base_ms, "token_us": token_us, "context_us": context_us}
    with _options_named():
        step_time = replace(known.step_time, **{key: value for key, value in times.items() if value is not None})
    return replace(
        known,
        step_time=step_time,
        kv_bytes=kv_bytes or known.kv_bytes,
        state_bytes=state_bytes or known.state_bytes,
    )


def _with_drafts(base: SimConfig, acceptance: float | None, draft_share: float | None) -> SimConfig:
    if draft_share is not None and acceptance is None:
        raise InvalidRequest(f"--draft-share {draft_share} needs --acceptance")
    with _options_named():
        return replace(base, acceptance=acceptance, draft_share=1.0 if draft_share is None else draft_share)


def _configs(base: SimConfig, policies: list[str] | None, blocks: list[int] | None) -> list[SimConfig]:
    """A configuration for each policy and cache size."""
    names, sizes = dict.fromkeys(policies or POLICIES), dict.fromkeys(blocks or DEFAULT_BLOCKS)
    own = {"aging": ("patience",), "fair": ("normal_share", "low_share")}  # settings of one policy
    with _options_named():
        for policy, fields in own.items():
            for field in fields:
                if getattr(base, field) is not None and policy not in names:
                    raise InvalidRequest(f"{field} is for --scheduling-policy {policy} only")
    for size in sizes:
        if not 2 <= size <= MAX_BLOCKS:
            raise InvalidRequest(f"--num-blocks {size} is not from 2 to {MAX_BLOCKS} (one block is never used)")
    configs = []
    for name, size in product(names, sizes):
        config = replace(base, scheduling_policy=name, num_blocks=size)
        if name != "aging":
            config = replace(config, patience=None)
        if name != "fair":
            config = replace(config, normal_share=None, low_share=None)
        configs.append(config)
    return configs


def _check_configs(configs: Sequence[SimConfig]) -> None:
    """Refuse configurations that cannot work, before the run."""
    with _options_named():
        for config in configs:
            # A small pool is faster to make. Window blocks are checked against the longest context that fits.
            checked = config if config.num_window_blocks else replace(config, num_blocks=2)
            checked.make_scheduler(lambda _event: None)


def _trace(path: str | None, synthetic: dict[str, Any]) -> list[TraceRequest]:
    if path is None:
        given = {**_SYNTHETIC, **synthetic}
        with _options_named():
            if given["scenario"] not in SCENARIOS:
                raise InvalidRequest(f"scenario = {given['scenario']!r} is not one of {', '.join(SCENARIOS)}")
            return SCENARIOS[given["scenario"]](given["requests"], given["rate"], given["seed"])
    if synthetic:
        raise InvalidRequest(f"--{next(iter(synthetic))} is for a synthetic trace, and {path} was given")
    return read_trace(path)


@contextmanager
def _options_named() -> Iterator[None]:
    """Replace field names in errors by option names."""
    names = {"max_requests": "max_waiting", "num_states": "states"}
    try:
        yield
    except InvalidRequest as error:
        field, rest = str(error).split(" ", 1)
        raise InvalidRequest(f"--{names.get(field, field).replace('_', '-')} {rest}") from None


# Running


def _run_all(trace: Sequence[TraceRequest], configs: Sequence[SimConfig], machine: Machine) -> list[SimReport]:
    reports = []
    with progress_bar(len(configs) * len(trace)) as show:
        for number, config in enumerate(configs):
            name = f"{config.scheduling_policy}, {config.num_blocks:,} blocks"
            if config.num_states:
                name += f", {config.num_states:,} states, {sim_states.name_rules(config)}"
            advance = _advance(show, number * len(trace), name)
            reports.append(simulate(trace, config, machine.step_time, advance))
    return reports


def _advance(show: Callable[[int, str], None], base: int, name: str) -> Callable[[int], None]:
    return lambda done: show(base + done, name)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr if that is a terminal; the result on stdout can be piped."""
    if not sys.stderr.isatty():
        yield lambda _done, _name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, name: bar.update(task, completed=done, description=name)


# Results


def summary(report: SimReport) -> dict[str, Any]:
    """The figures of one run, as plain values."""
    timeline = report.timeline
    return {
        "policy": report.config.scheduling_policy,
        "blocks": report.config.num_blocks,
        "output_tokens_per_s": report.output_tokens_per_s,
        "makespan_s": report.makespan_s,
        "steps": report.num_steps,
        "hit_rate": report.cache.hit_rate,
        "preemptions": report.num_preemptions,
        "draft_tokens": report.num_drafted,
        "draft_tokens_accepted": report.num_accepted,
        "peak_running": max((sample.num_running for sample in timeline), default=0),
        "peak_waiting": max((sample.num_waiting for sample in timeline), default=0),
        "peak_blocks_in_use": max((sample.num_blocks_in_use for sample in timeline), default=0),
        "tiers": {priority.name: _group(report.tier(priority)) for priority in Priority if report.tier(priority)},
        "tenants": {name: _group(records) for name, records in _tenants(report).items()},
        "cache": asdict(report.cache),
    }


def _tenants(report: SimReport) -> dict[str, list[RequestRecord]]:
    """The records of each tenant of a tier, if the trace has tenants."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in report.records:
        if record.tenant:
            groups.setdefault(f"{record.priority.name} {record.tenant}", []).append(record)
    return dict(sorted(groups.items()))


def _group(records: Sequence[RequestRecord]) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": len(records)}
    figures |= {outcome.name.lower(): 0 for outcome in Outcome}
    figures |= Counter(record.outcome.name.lower() for record in records)
    spans = {
        "ttft_s": [record.ttft_s for record in records],
        "wait_s": [record.wait_s for record in records],
        "tpot_s": [record.tpot_s for record in records],
        "total_s": [None if one.finish_s is None else one.finish_s - one.arrival_s for one in records],
    }
    for name, values in spans.items():
        known = [value for value in values if value is not None]
        figures[f"{name}_p50"] = percentile(known, 0.5)
        figures[f"{name}_p95"] = percentile(known, 0.95)
        figures[f"{name}_max"] = max(known, default=None)
    return figures


def _document(
    path: str | None, trace: Sequence[TraceRequest], name: str, machine: Machine, reports: Sequence[SimReport]
) -> dict[str, Any]:
    config = asdict(reports[0].config)
    by_run = ("scheduling_policy", "num_blocks", "num_states", "places", "interval")
    runs = [summary(report) for report in reports]
    if any(report.config.num_states for report in reports):
        for run, (report, reference) in zip(runs, sim_states.with_reference(reports), strict=True):
            run |= sim_states.state_figures(report, reference, machine)
    return {
        "quire": __version__,
        "trace": _trace_facts(path, trace),
        "machine": _machine_facts(name, machine),
        "config": {key: value for key, value in config.items() if key not in by_run},
        "runs": runs,
    }


def _trace_facts(path: str | None, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    return {"from": path or "synthetic", "requests": len(trace), "span_s": _span_s(trace)}


def _machine_facts(name: str, machine: Machine) -> dict[str, Any]:
    sizes = {"kv_bytes": machine.kv_bytes, "state_bytes": machine.state_bytes}
    return {"name": name, **asdict(machine.step_time), **sizes}


def _span_s(trace: Sequence[TraceRequest]) -> float:
    return trace[-1].arrival_s - trace[0].arrival_s


def _print_table(trace: Sequence[TraceRequest], name: str, machine: Machine, reports: Sequence[SimReport]) -> None:
    console = terminal.console()
    console.print(f"{len(trace):,} requests over {_span_s(trace):,.1f} s on {name}. Times in seconds.\n")
    has_states = any(report.config.num_states for report in reports)
    console.print(sim_states.state_table(machine, reports) if has_states else _table(machine, reports))
    for report in reports:
        for line in _remarks(report):
            console.print(line)


def _table(machine: Machine, reports: Sequence[SimReport]) -> Table:
    """A row for each run and tier; figures of the whole run are in its first row. Fits 80 columns."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("\npolicy", "\nblocks", "KV\nGiB", "out\ntok/s", "\nhits", "pre-\nempted", "\ntier", "re-\nquests"):
        table.add_column(column, justify="left" if column in ("\npolicy", "\ntier") else "right")
    for column in ("wait\np95", "TTFT\np50", "TTFT\np95", "ms/tok\np95"):
        table.add_column(column, justify="right")
    for report in reports:
        config = report.config
        gib = config.num_blocks * config.block_size * machine.kv_bytes / 2**30
        whole = [config.scheduling_policy, f"{config.num_blocks:,}", f"{gib:.3g}", f"{report.output_tokens_per_s:,.0f}"]
        whole += [f"{report.cache.hit_rate:.0%}", f"{report.num_preemptions:,}"]
        figures = summary(report)
        for tier_name, tier in (figures["tiers"] | figures["tenants"]).items():
            times = [tier[key] for key in ("wait_s_p95", "ttft_s_p50", "ttft_s_p95")]
            pace = "-" if tier["tpot_s_p95"] is None else f"{tier['tpot_s_p95'] * 1000:.1f}"
            table.add_row(*whole, tier_name, f"{tier['requests']:,}", *map(_seconds, times), pace)
            whole = [""] * len(whole)
        table.add_row()
    return table


def _remarks(report: SimReport) -> Iterator[str]:
    """Drafts that were right, and requests without a complete answer, which the figures do not include."""
    run = f"{report.config.scheduling_policy}, {report.config.num_blocks:,} blocks"
    if report.config.acceptance is not None:
        share = report.num_accepted / report.num_drafted if report.num_drafted else 0.0
        yield f"{run}: {report.num_accepted:,} of {report.num_drafted:,} draft tokens were right ({share:.0%})"
    texts = {
        Outcome.CUT: "cut at the end of the context: the pool is too small for them",
        Outcome.LEFT: "not answered in full: the client disconnected (waits and TTFT include those that were admitted)",
        Outcome.TOO_LONG: "refused: too long for the pool",
        Outcome.QUEUE_FULL: "refused: the queue was full",
    }
    for priority in Priority:
        outcomes = Counter(record.outcome for record in report.tier(priority))
        for outcome, text in texts.items():
            if outcomes[outcome]:
                yield f"{run}: {outcomes[outcome]:,} of {len(report.tier(priority)):,} {priority.name} {text}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
