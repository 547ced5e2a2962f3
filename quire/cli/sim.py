"""`quire sim`: the scheduler on a trace, with modelled step times instead of a device.

Compares policies and cache sizes. With --states: how many tokens are reused, by the number of recurrent states and
where they are stored. With --replicas: ways to route requests to several replicas of a model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from typer import Argument, Option

from quire.cli import options
from quire.cli.terminal import echo, progress_bar, show, table
from quire.core.memory import ALL_PLACES, Place
from quire.core.policy import POLICIES, SETTINGS
from quire.core.values import Priority
from quire.errors import InvalidRequest, MissingExtra
from quire.sim.cluster import REPORT_S, ROUTERS, ClusterReport, simulate_cluster
from quire.sim.simulator import (
    MACHINES,
    Machine,
    Outcome,
    RequestRecord,
    SimConfig,
    SimReport,
    StepTime,
    percentile,
    simulate,
)
from quire.sim.traces import SCENARIOS, TraceRequest, read_trace
from quire.version import __version__

T = TypeVar("T")
_DEFAULT = SimConfig()
_SYNTHETIC = {"scenario": "mixed", "requests": 600, "rate": 20.0, "seed": 0}
DEFAULT_BLOCKS = (512, 4096)
STATES_BLOCKS = (65_536,)  # with states: prompts of agents are long
REPLICAS_BLOCKS = (2_048,)
MAX_BLOCKS = 10_000_000  # the simulator has an object for each, and for each state
MAX_STATES = 1_000_000
MAX_INTERVAL = 10_000_000
PLOT_SUFFIXES = (".png", ".svg")
EVERY = "every-"
DEFAULT_PLACES = (",".join(Place), *Place, f"{EVERY}1024")
WHOLE = "one machine"  # a single replica with the memory and the rows of all

_named = partial(
    options.options_named,
    {
        "max_requests",
        "scenario",
        "requests",
        "rate",
        *(one.name for kind in (SimConfig, StepTime) for one in fields(kind)),
    },
    {"max_requests": "max_waiting", "num_states": "states"},
)


# Groups of options


def _machine(
    machine: Annotated[
        str, Option(help=f"Machine and model whose step times are used: {', '.join(MACHINES)}.")
    ] = "h200-llama3-8b",
    base_ms: Annotated[float | None, Option(help="Fixed time of a step, in place of the machine's.")] = None,
    token_us: Annotated[float | None, Option(help="Time per computed token, in place of the machine's.")] = None,
    context_us: Annotated[float | None, Option(help="Time per read KV token, in place of the machine's.")] = None,
    kv_bytes: Annotated[int | None, Option(min=1, help="KV bytes per token, in place of the machine's.")] = None,
) -> tuple[str, Machine]:
    if machine not in MACHINES:
        raise InvalidRequest(f"--machine {machine!r} is not one of {', '.join(MACHINES)}")
    known = MACHINES[machine]
    times = {"base_ms": base_ms, "token_us": token_us, "context_us": context_us}
    with _named():
        step_time = replace(known.step_time, **{key: value for key, value in times.items() if value is not None})
    return machine, replace(known, step_time=step_time, kv_bytes=kv_bytes or known.kv_bytes)


def _synthetic(
    scenario: Annotated[
        str | None, Option(help=f"Synthetic trace: {', '.join(SCENARIOS)} (mixed); docs/simulator.md.")
    ] = None,
    requests: Annotated[int | None, Option(help="Synthetic trace: number of requests (600).")] = None,
    rate: Annotated[float | None, Option(help="Synthetic trace: requests per second (20).")] = None,
    seed: Annotated[int | None, Option(help="Synthetic trace: random seed (0).")] = None,
) -> options.Settings:
    return {name: value for name, value in locals().items() if value is not None}


def _scheduler(
    block_size: Annotated[int, Option(help="Tokens in a block of the KV cache.")] = _DEFAULT.block_size,
    max_num_seqs: Annotated[int, Option(help="Maximum number of running requests.")] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, Option(help="Maximum number of tokens in one step.")
    ] = _DEFAULT.max_num_batched_tokens,
    max_chunk_tokens: Annotated[
        int, Option(help="Maximum number of prompt tokens of one request in one step.")
    ] = _DEFAULT.max_chunk_tokens,
    max_mixed_tokens: Annotated[
        int | None, Option(help="Maximum prompt tokens in a step beside every 64 answers; default: no limit.")
    ] = None,
    max_waiting: Annotated[int, Option(help="Maximum number of waiting requests.")] = _DEFAULT.max_waiting,
    patience: options.PatienceOption = None,
    normal_share: options.NormalShareOption = None,
    low_share: options.LowShareOption = None,
    enable_prefix_caching: Annotated[bool, Option(help="Reuse the KV cache of equal prefixes.")] = True,
) -> SimConfig:
    given: options.Settings = {**locals()}
    with _named():
        return SimConfig(**given)


class _States(NamedTuple):
    counts: list[int]
    places: list[str] | None
    num_bytes: int | None
    windows: options.Settings  # fields of SimConfig


def _states(
    states: Annotated[
        list[int] | None,
        Option(
            min=2,  # one is the empty state
            max=MAX_STATES,
            help="Number of recurrent states in memory; repeatable. Compares how many tokens are reused.",
        ),
    ] = None,
    places: Annotated[
        list[str] | None,
        Option(
            help="Where states are stored: prompt, answer, message, branch, every-N (tokens), with commas between them;"
            " repeatable, by default all four, each alone, and every-1024."
        ),
    ] = None,
    state_bytes: Annotated[
        int | None, Option(min=1, help="Bytes of a recurrent state, in place of the machine's.")
    ] = None,
    window: Annotated[
        int | None, Option(help="Tokens that the layers with a window see; needs --num-window-blocks.")
    ] = None,
    num_window_blocks: Annotated[
        int | None,
        Option(
            min=2,
            max=MAX_STATES,
            help="Number of blocks for layers with a window; needs --window. Without both, all layers are whole.",
        ),
    ] = None,
) -> _States:
    if (window is None) != (num_window_blocks is None):
        raise InvalidRequest("--window and --num-window-blocks must be given together")
    if places and not states:
        raise InvalidRequest("--places needs --states")
    windows = {} if window is None else {"window": window, "num_window_blocks": num_window_blocks}
    return _States(states or [], places, state_bytes, windows)


class _Cluster(NamedTuple):
    replicas: list[int]
    routers: list[str]
    report_s: float


def _cluster(
    replicas: Annotated[
        list[int] | None,
        Option(
            min=1,
            max=1000,
            help="Number of replicas behind a router, each with the given blocks; repeatable. Compares routers.",
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        Option(help=f"With --replicas, how requests are routed: {', '.join(ROUTERS)}; repeatable, by default all."),
    ] = None,
    report_interval: Annotated[
        float | None,
        Option(
            min=0.001,
            max=3600,
            help=f"With --replicas, seconds between two reports of a replica to the router ({REPORT_S}).",
        ),
    ] = None,
) -> _Cluster:
    for option, value in (("--router", router), ("--report-interval", report_interval)):
        if value and not replicas:
            raise InvalidRequest(f"{option} needs --replicas")
    for name in router or ():
        if name not in ROUTERS:
            raise InvalidRequest(f"--router {name!r} is not one of {', '.join(ROUTERS)}")
    names = [*dict.fromkeys(router or ROUTERS)]
    return _Cluster([*dict.fromkeys(replicas or ())], names, report_interval or REPORT_S)


# The command


@options.takes(machine=_machine, synthetic=_synthetic, scheduler=_scheduler, states=_states, cluster=_cluster)
def sim(
    trace: Annotated[
        str | None, Argument(help="A recorded trace, JSON lines (docs/simulator.md); - is standard input.")
    ] = None,
    scheduling_policy: Annotated[
        list[str] | None, Option(help=f"Scheduling policy: {', '.join(POLICIES)}; repeatable, by default all.")
    ] = None,
    num_blocks: Annotated[
        list[int] | None,
        Option(min=2, max=MAX_BLOCKS, help="Number of blocks of the KV cache; repeatable, by default 512 and 4096."),
    ] = None,
    *,
    machine: tuple[str, Machine],
    synthetic: options.Settings,
    scheduler: SimConfig,
    states: _States,
    cluster: _Cluster,
    plot: Annotated[Path | None, Option(help="Write a plot of the comparison to this .png or .svg file.")] = None,
    save_trace: Annotated[Path | None, Option(help="Write the trace to this file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the scheduler on a trace and compare policies and cache sizes: throughput, waits, hits, preemptions."""
    _check_outputs(trace, plot, save_trace, is_plotted=not states.counts and not cluster.replicas)
    name, device = machine
    device = replace(device, state_bytes=states.num_bytes or device.state_bytes)
    base = replace(scheduler, has_costly_rows=device.has_costly_rows, **states.windows)
    if states.counts or cluster.replicas:
        scheduling_policy = scheduling_policy or ["fair"]
        num_blocks = num_blocks or [*(STATES_BLOCKS if states.counts else REPLICAS_BLOCKS)]
    configs = _with_states(_configs(base, scheduling_policy, num_blocks), states)
    _check_configs(configs)
    if cluster.replicas and len(configs) > 1:
        raise InvalidRequest("--replicas needs one --scheduling-policy and one --num-blocks, and no --states")
    todo = _trace(trace, synthetic)
    if save_trace is not None:
        save_trace.write_text("".join(f"{request.as_line()}\n" for request in todo), encoding="utf-8")
        echo(f"Wrote {save_trace}", err=True)
    span_s = todo[-1].arrival_s - todo[0].arrival_s
    document = {
        "quire": __version__,
        "trace": {"from": trace or "synthetic", "requests": len(todo), "span_s": span_s},
        "machine": {
            "name": name,
            **asdict(device.step_time),
            "kv_bytes": device.kv_bytes,
            "state_bytes": device.state_bytes,
        },
    }
    title = f"{len(todo):,} requests over {span_s:,.1f} s on {name}. Times in seconds.\n"
    if cluster.replicas:
        _compare_routers(todo, configs[0], device, cluster, None if as_json else title, document)
        return
    step_time = device.step_time
    runs = {_name(config): partial(simulate, todo, config, step_time) for config in configs}
    reports = _run_all(todo, runs)
    if as_json:
        echo(json.dumps(document | _figures(device, reports), indent=2))
    else:
        _print_tables(title, device, reports)
    if plot is not None:
        from quire.cli.plots import draw_sim

        draw_sim(reports, f"{len(todo):,} requests of {trace or 'a synthetic trace'} on {name}", plot)
        echo(f"Wrote {plot}", err=True)


# Configurations and traces


def _check_outputs(trace: str | None, plot: Path | None, save_trace: Path | None, *, is_plotted: bool) -> None:
    """Refuse outputs that could not be written, before the run."""
    if plot is not None and not is_plotted:
        raise InvalidRequest("--plot cannot be combined with --states or --replicas")
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot {plot} does not end in {' or '.join(PLOT_SUFFIXES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise MissingExtra.of("--plot", "matplotlib")
    if save_trace is not None and trace is not None and save_trace.exists() and save_trace.samefile(trace):
        raise InvalidRequest(f"--save-trace {save_trace} is the trace itself")


def _configs(base: SimConfig, policies: list[str] | None, blocks: list[int] | None) -> list[SimConfig]:
    """A configuration for each policy and cache size."""
    names, sizes = dict.fromkeys(policies or POLICIES), dict.fromkeys(blocks or DEFAULT_BLOCKS)
    for setting, policy in SETTINGS.items():
        if getattr(base, setting) is not None and policy not in names:
            raise InvalidRequest(f"{options.option_name(setting)} is for --scheduling-policy {policy} only")
    unused: dict[str, dict[str, Any]] = {
        name: {setting: None for setting, policy in SETTINGS.items() if policy != name} for name in names
    }
    return [
        replace(base, scheduling_policy=name, num_blocks=size, **unused[name]) for name, size in product(names, sizes)
    ]


def _parse_places(given: str) -> tuple[tuple[Place, ...], int]:
    """The rules of one `--places`: where states are stored, and the interval of every-N."""
    places, interval = set(), 0
    for name in given.split(","):
        number = name.removeprefix(EVERY)
        if name in list(Place):
            places.add(Place(name))
        elif number.isdecimal() and 1 <= int(number) <= MAX_INTERVAL:
            interval = int(number)
        else:
            known = ", ".join(Place)
            raise InvalidRequest(f"--places {given!r}: {name!r} is not one of {known} or {EVERY}N (1 to 10000000)")
    return tuple(place for place in Place if place in places), interval


def _rules(config: SimConfig) -> str:
    """The placement rules of a configuration, as `--places` accepts them."""
    names = [place.value for place in Place if place in config.places]
    return ",".join([*names, *([f"{EVERY}{config.interval}"] if config.interval else [])])


def _with_states(configs: Sequence[SimConfig], states: _States) -> list[SimConfig]:
    """Each configuration without recurrent states, then with each set of rules and each number of states."""
    rules = list(dict.fromkeys(map(_parse_places, states.places or DEFAULT_PLACES)))
    found = []
    for config in configs:
        found.append(config)
        for (places, interval), count in product(rules, dict.fromkeys(states.counts)):
            found.append(replace(config, num_states=count, places=places, interval=interval))
    return found


def _check_configs(configs: Sequence[SimConfig]) -> None:
    """Refuse configurations that cannot work, before the run."""
    with _named():
        for config in configs:
            # A small pool is faster to make. Window blocks are checked against the longest context that fits.
            checked = config if config.num_window_blocks else replace(config, num_blocks=2)
            checked.make_scheduler(lambda _event: None)


def _trace(path: str | None, synthetic: options.Settings) -> list[TraceRequest]:
    if path is not None:
        if synthetic:
            raise InvalidRequest(f"--{next(iter(synthetic))} is for a synthetic trace, and {path} was given")
        return read_trace(path)
    given: options.Settings = {**_SYNTHETIC, **synthetic}
    with _named():
        if given["scenario"] not in SCENARIOS:
            raise InvalidRequest(f"scenario = {given['scenario']!r} is not one of {', '.join(SCENARIOS)}")
        return SCENARIOS[given["scenario"]](given["requests"], given["rate"], given["seed"])


# Policies, cache sizes and states


def _run_all(trace: Sequence[TraceRequest], runs: Mapping[str, Callable[..., T]]) -> list[T]:
    """The reports of runs of a trace, by their names, with a progress bar."""
    reports: list[T] = []
    with progress_bar("", "count", "left", total=len(runs) * len(trace)) as update:
        for name, run in runs.items():

            def advance(done: int, name: str = name) -> None:
                update(completed=len(reports) * len(trace) + done, description=name)

            reports.append(run(progress=advance))
    return reports


def _name(config: SimConfig) -> str:
    states = f", {config.num_states:,} states, {_rules(config)}" if config.num_states else ""
    return f"{config.scheduling_policy}, {config.num_blocks:,} blocks{states}"


def summary(report: SimReport) -> dict[str, Any]:
    """The figures of one run, as plain values."""
    timeline = report.timeline
    tenants: dict[str, list[RequestRecord]] = {}  # of a tier, if the trace has tenants
    for record in report.records:
        if record.tenant:
            tenants.setdefault(f"{record.priority.name} {record.tenant}", []).append(record)
    return {
        "policy": report.config.scheduling_policy,
        "blocks": report.config.num_blocks,
        "output_tokens_per_s": report.output_tokens_per_s,
        "makespan_s": report.makespan_s,
        "steps": report.num_steps,
        "hit_rate": report.cache.hit_rate,
        "preemptions": report.num_preemptions,
        "peak_running": max((sample.num_running for sample in timeline), default=0),
        "peak_waiting": max((sample.num_waiting for sample in timeline), default=0),
        "peak_blocks_in_use": max((sample.num_blocks_in_use for sample in timeline), default=0),
        "tiers": {priority.name: _group(report.tier(priority)) for priority in Priority if report.tier(priority)},
        "tenants": {name: _group(records) for name, records in sorted(tenants.items())},
        "cache": asdict(report.cache),
    }


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
        figures |= _percentiles(name, values)
        figures[f"{name}_max"] = max((value for value in values if value is not None), default=None)
    return figures


def _percentiles(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"{name}_p50": percentile(known, 0.5), f"{name}_p95": percentile(known, 0.95)}


def _with_reference(reports: Sequence[SimReport]) -> Iterator[tuple[SimReport, SimReport]]:
    """Each report, with that of the same configuration without recurrent states."""
    reference = reports[0]
    for report in reports:
        if not report.config.num_states:
            reference = report
        yield report, reference


def _state_figures(report: SimReport, reference: SimReport, machine: Machine) -> dict[str, Any]:
    """The figures of one run that concern states, as plain values."""
    states = report.cache.states
    return {
        "num_states": report.config.num_states,
        "places": _rules(report.config) if report.config.num_states else None,
        "state_bytes": report.config.num_states * machine.state_bytes,
        "hit_tokens": report.cache.num_hit_tokens,
        # as a share of those of a model without recurrent states
        "reused_share": report.cache.num_hit_tokens / max(reference.cache.num_hit_tokens, 1),
        "recomputed_tokens": report.cache.num_recomputed_tokens,
        "state_evictions": 0 if states is None else states.num_evictions,
        **_percentiles("ttft_s", (record.ttft_s for record in report.records)),
    }


def _figures(machine: Machine, reports: Sequence[SimReport]) -> dict[str, Any]:
    config = asdict(reports[0].config)
    by_run = ("scheduling_policy", "num_blocks", "num_states", "places", "interval")
    has_states = any(report.config.num_states for report in reports)
    return {
        "config": {key: value for key, value in config.items() if key not in by_run},
        "runs": [
            summary(report) | (_state_figures(report, reference, machine) if has_states else {})
            for report, reference in _with_reference(reports)
        ],
    }


def _print_tables(title: str, machine: Machine, reports: Sequence[SimReport]) -> None:
    """Print tables that fit 80 columns."""
    if any(report.config.num_states for report in reports):
        states = ("\nplaces", "\nstates", "\nGB", "hit\ntokens", "\nreused", "computed\nagain", "\nevicted")
        rows = _state_rows(machine, reports)
        shown = table((*states, "TTFT\np50", "TTFT\np95"), rows, texts=("\nplaces",), gap=1)
    else:
        heads = ("\npolicy", "\nblocks", "KV\nGiB", "out\ntok/s", "\nhits", "pre-\nempted", "\ntier", "re-\nquests")
        times = ("wait\np95", "TTFT\np50", "TTFT\np95", "ms/tok\np95")
        rows = _tier_rows(machine, reports)
        shown = table((*heads, *times), rows, texts=("\npolicy", "\ntier"), gap=1)
    show(title, shown, *(line for report in reports for line in _remarks(report)))


def _tier_rows(machine: Machine, reports: Sequence[SimReport]) -> Iterator[Sequence[str]]:
    """A row for each run and tier; figures of the whole run are in its first row."""
    for report in reports:
        config = report.config
        gib = config.num_blocks * config.block_size * machine.kv_bytes / 2**30
        whole = [
            config.scheduling_policy,
            f"{config.num_blocks:,}",
            f"{gib:.3g}",
            f"{report.output_tokens_per_s:,.0f}",
            f"{report.cache.hit_rate:.0%}",
            f"{report.num_preemptions:,}",
        ]
        figures = summary(report)
        for name, tier in (figures["tiers"] | figures["tenants"]).items():
            times = [tier[key] for key in ("wait_s_p95", "ttft_s_p50", "ttft_s_p95")]
            pace = "-" if tier["tpot_s_p95"] is None else f"{tier['tpot_s_p95'] * 1000:.1f}"
            yield (*whole, name, f"{tier['requests']:,}", *map(_seconds, times), pace)
            whole = [""] * len(whole)
        yield ()


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _state_rows(machine: Machine, reports: Sequence[SimReport]) -> Iterator[Sequence[str]]:
    for report, reference in _with_reference(reports):
        figures = _state_figures(report, reference, machine)
        first = [f"{report.config.num_blocks:,} blocks, no states", "-", "-"]
        if report is not reference:
            name = "all" if {*report.config.places} == ALL_PLACES and not report.config.interval else figures["places"]
            gb = f"{figures['state_bytes'] / 1e9:.1f}" if machine.state_bytes else "-"
            first = [name, f"{report.config.num_states:,}", gb]
        elif report is not reports[0]:
            yield ()
        times = [figures["ttft_s_p50"], figures["ttft_s_p95"]]
        yield (
            *first,
            f"{figures['hit_tokens']:,}",
            f"{figures['reused_share']:.1%}",
            f"{figures['recomputed_tokens']:,}",
            f"{figures['state_evictions']:,}",
            *("-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}" for value in times),
        )


def _remarks(report: SimReport) -> Iterator[str]:
    """Requests without a complete answer, which the figures do not include."""
    run = f"{report.config.scheduling_policy}, {report.config.num_blocks:,} blocks"
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


# Replicas


def _compare_routers(
    trace: Sequence[TraceRequest],
    config: SimConfig,
    machine: Machine,
    cluster: _Cluster,
    title: str | None,
    document: dict[str, Any],
) -> None:
    """Run the trace with each router and number of replicas. Print a table, or without a title the document."""
    runs = [figures for count in cluster.replicas for figures in _run_cluster(trace, config, machine, count, cluster)]
    if title is None:
        echo(json.dumps(document | {"config": asdict(config), "runs": runs}, indent=2))
        return
    heads = ("re-\nplicas", "\nrouter", "out\ntok/s", "hits of\none machine", "imbal-\nance", "TTFT\np50", "TTFT\np95")
    show(title, table((*heads, "index\nMB"), _router_rows(runs), texts=("\nrouter",), gap=1))


def _run_cluster(
    trace: Sequence[TraceRequest], config: SimConfig, machine: Machine, count: int, cluster: _Cluster
) -> list[dict[str, Any]]:
    """The figures of one machine with the memory of all replicas, and of each router."""
    whole_config = replace(
        config,
        num_blocks=(config.num_blocks - 1) * count + 1,
        max_num_seqs=config.max_num_seqs * count,
        max_num_batched_tokens=config.max_num_batched_tokens * count,
    )
    whole = partial(simulate_cluster, trace, whole_config, machine.step_time, 1, "round-robin")
    runs: dict[str, Callable[..., ClusterReport]] = {f"{count} replicas, {WHOLE}": whole}
    for name in cluster.routers:
        runs[f"{count} replicas, {name}"] = partial(
            simulate_cluster, trace, config, machine.step_time, count, name, report_s=cluster.report_s
        )
    reports = _run_all(trace, runs)
    reports[0] = replace(reports[0], router=WHOLE, num_replicas=count)
    hits = reports[0].hit_tokens
    return [
        {
            "replicas": report.num_replicas,
            "router": report.router,
            "output_tokens_per_s": report.output_tokens_per_s,
            "hit_tokens": report.hit_tokens,
            "hits_of_one_machine": report.hit_tokens / hits if hits else None,
            "imbalance": report.imbalance,
            "requests_by_replica": list(report.num_requests),
            **_percentiles("ttft_s", (record.ttft_s for record in report.records)),
            "preemptions": report.num_preemptions,
            "index_bytes": report.index_bytes,
        }
        for report in reports
    ]


def _router_rows(runs: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for number, run in enumerate(runs):
        if number and run["router"] == WHOLE:
            yield ()
        hits = run["hits_of_one_machine"]
        yield (
            f"{run['replicas']:,}",
            run["router"],
            f"{run['output_tokens_per_s']:,.0f}",
            "-" if hits is None else f"{hits:.1%}",
            "-" if run["router"] == WHOLE else f"{run['imbalance']:.2f}",
            *("-" if run[key] is None else f"{run[key]:.3f}" for key in ("ttft_s_p50", "ttft_s_p95")),
            f"{run['index_bytes'] / 1e6:.1f}" if run["index_bytes"] else "-",
        )
