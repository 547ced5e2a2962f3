"""`quire sim --replicas`: several replicas of a model behind a router, with each way to route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.errors import InvalidRequest
from quire.sim.cluster import REPORT_S, ROUTERS, ClusterReport, simulate_cluster
from quire.sim.simulator import Machine, SimConfig, percentile
from quire.sim.traces import TraceRequest

if TYPE_CHECKING:
    from rich.table import Table

ReplicasOption = Annotated[
    list[int] | None,
    typer.Option(help="Number of replicas behind a router, each with the given blocks; repeatable. Compares routers."),
]
RouterOption = Annotated[
    list[str] | None,
    typer.Option(help=f"With --replicas, how requests are routed: {', '.join(ROUTERS)}; repeatable, by default all."),
]
ReportOption = Annotated[
    float | None,
    typer.Option(help=f"With --replicas, seconds between two reports of a replica to the router ({REPORT_S})."),
]

MAX_REPLICAS = 1_000
DEFAULT_BLOCKS = (2_048,)
WHOLE = "one machine"  # a single replica with the memory and the rows of all


def check_options(
    replicas: Sequence[int] | None, routers: Sequence[str] | None, report_s: float | None, configs: Sequence[SimConfig]
) -> None:
    """Refuse options that do not fit together."""
    if not replicas:
        for option, value in (("--router", routers), ("--report-interval", report_s)):
            if value:
                raise InvalidRequest(f"{option} needs --replicas")
        return
    for count in replicas:
        if not 1 <= count <= MAX_REPLICAS:
            raise InvalidRequest(f"--replicas {count} is not from 1 to {MAX_REPLICAS}")
    for name in routers or ():
        if name not in ROUTERS:
            raise InvalidRequest(f"--router {name!r} is not one of {', '.join(ROUTERS)}")
    if report_s is not None and not 0 < report_s <= 3600:
        raise InvalidRequest(f"--report-interval {report_s} is not more than 0 and at most 3600")
    if len(configs) > 1:
        raise InvalidRequest("--replicas needs one --scheduling-policy and one --num-blocks, and no --states")


def run(
    trace: Sequence[TraceRequest],
    config: SimConfig,
    machine: Machine,
    replicas: Sequence[int],
    routers: Sequence[str] | None,
    report_s: float | None,
    show: Callable[[int, str], None],
) -> list[ClusterReport]:
    """For each number of replicas: one machine with all their memory, and each router."""
    reports: list[ClusterReport] = []
    for count in dict.fromkeys(replicas):
        whole = replace(
            config,
            num_blocks=(config.num_blocks - 1) * count + 1,
            max_num_seqs=config.max_num_seqs * count,
            max_num_batched_tokens=config.max_num_batched_tokens * count,
        )
        for name in (WHOLE, *dict.fromkeys(routers or ROUTERS)):

            def advance(done: int, name: str = name, count: int = count) -> None:
                show(len(reports) * len(trace) + done, f"{count} replicas, {name}")

            if name == WHOLE:
                report = simulate_cluster(trace, whole, machine.step_time, 1, "round-robin", progress=advance)
                report = replace(report, router=WHOLE, num_replicas=count)
            else:
                report = simulate_cluster(
                    trace, config, machine.step_time, count, name, report_s=report_s or REPORT_S, progress=advance
                )
            reports.append(report)
    return reports


def figures(report: ClusterReport, whole: ClusterReport) -> dict[str, Any]:
    """The figures of one run. `whole`: one machine with the memory of all replicas."""
    spans = [record.ttft_s for record in report.records if record.ttft_s is not None]
    return {
        "replicas": report.num_replicas,
        "router": report.router,
        "output_tokens_per_s": report.output_tokens_per_s,
        "hit_tokens": report.hit_tokens,
        "hits_of_one_machine": report.hit_tokens / whole.hit_tokens if whole.hit_tokens else None,
        "imbalance": report.imbalance,
        "requests_by_replica": list(report.num_requests),
        "ttft_s_p50": percentile(spans, 0.5),
        "ttft_s_p95": percentile(spans, 0.95),
        "preemptions": report.num_preemptions,
        "index_bytes": report.index_bytes,
    }


def all_figures(reports: Sequence[ClusterReport]) -> list[dict[str, Any]]:
    wholes = {report.num_replicas: report for report in reports if report.router == WHOLE}
    return [figures(report, wholes[report.num_replicas]) for report in reports]


def document(config: SimConfig, reports: Sequence[ClusterReport]) -> dict[str, Any]:
    return {"config": asdict(config), "runs": all_figures(reports)}


def table(reports: Sequence[ClusterReport]) -> Table:
    """A row for each run. Fits 80 columns."""
    from rich.table import Table

    found = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("re-\nplicas", "\nrouter", "out\ntok/s", "hits of\none machine", "imbal-\nance", "TTFT\np50"):
        found.add_column(column, justify="left" if column == "\nrouter" else "right")
    for column in ("TTFT\np95", "index\nMB"):
        found.add_column(column, justify="right")
    previous = None
    for run_figures in all_figures(reports):
        if previous not in (None, run_figures["replicas"]):
            found.add_row()
        previous = run_figures["replicas"]
        hits = run_figures["hits_of_one_machine"]
        is_whole = run_figures["router"] == WHOLE
        found.add_row(
            f"{previous:,}",
            run_figures["router"],
            f"{run_figures['output_tokens_per_s']:,.0f}",
            "-" if hits is None else f"{hits:.1%}",
            "-" if is_whole else f"{run_figures['imbalance']:.2f}",
            *("-" if run_figures[key] is None else f"{run_figures[key]:.3f}" for key in ("ttft_s_p50", "ttft_s_p95")),
            f"{run_figures['index_bytes'] / 1e6:.1f}" if run_figures["index_bytes"] else "-",
        )
    return found
