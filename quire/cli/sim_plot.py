"""The plot of `quire sim --plot`: time to first token of each tier, and use of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.values import Priority
from quire.errors import MissingExtra
from quire.sim.simulator import SimReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(reports: Sequence[SimReport], title: str, path: Path) -> None:
    """Write a .png or .svg file: a column for each tier, then the machine. A run has the same colour in all of them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra.of("--plot", "matplotlib") from None
    tiers = [priority for priority in Priority if any(report.tier(priority) for report in reports)]
    figure = Figure(figsize=(11, 9), layout="constrained")
    figure.suptitle(title)
    halves = figure.subfigures(2, 1, height_ratios=(1, 2), squeeze=False)[:, 0]
    panels: list[Axes] = list(halves[0].subplots(1, len(tiers), sharey=True, sharex=True, squeeze=False)[0])
    waiting, in_use = halves[1].subplots(2, 1, sharex=True)
    for index, report in enumerate(reports):
        colour = f"C{index % 10}"
        style = ("-", "--", ":")[index // 10 % 3]
        name = f"{report.config.scheduling_policy}, {report.config.num_blocks:,} blocks"
        for panel, priority in zip(panels, tiers, strict=True):
            _draw_ttft(panel, report, priority, f"{colour}{style}")
        times = [sample.time_s for sample in report.timeline]
        counts = [sample.num_waiting for sample in report.timeline]
        shares = [sample.num_blocks_in_use / report.cache.num_blocks for sample in report.timeline]
        waiting.plot(times, counts, f"{colour}{style}", drawstyle="steps-post", label=name)
        in_use.plot(times, shares, f"{colour}{style}", drawstyle="steps-post")
    for panel, priority in zip(panels, tiers, strict=True):
        panel.set(title=f"Time to first token, {priority.name}", xlabel="seconds", xscale="log", ylim=(0, 1.03))
    panels[0].set_ylabel("share of requests")
    waiting.set(title="Requests waiting", ylabel="requests")
    waiting.set_ylim(bottom=0, top=max(1.0, waiting.get_ylim()[1]))
    in_use.set(title="Pool in use", xlabel="seconds", ylabel="share of blocks", ylim=(0, 1.05))
    for axes in (*panels, waiting, in_use):
        axes.grid(alpha=0.3)
    figure.legend(*waiting.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def _draw_ttft(axes: Axes, report: SimReport, priority: Priority, style: str) -> None:
    values = sorted(record.ttft_s for record in report.tier(priority) if record.ttft_s is not None)
    if values:
        shares = [rank / len(values) for rank in range(len(values) + 1)]
        axes.plot([values[0], *values], shares, style, drawstyle="steps-post")
