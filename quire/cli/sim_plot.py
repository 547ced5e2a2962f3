"""The picture of `quire sim --plot`: how long each tier waited for its first token, and how full the machine was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.request import Priority
from quire.engine.simulate import SimReport
from quire.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Priority.HIGH: "tab:red", Priority.NORMAL: "tab:blue", Priority.LOW: "tab:green"}
STYLES = ("-", "--", ":", "-.")


def draw(reports: Sequence[SimReport], path: Path) -> None:
    """Write a .png or .svg file, by its name."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot needs matplotlib: pip install 'quire[plot]'") from None
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes: list[Axes] = list(figure.subplots(3, 1))
    for index, report in enumerate(reports):
        style = STYLES[index % len(STYLES)]
        name = f"{report.config.policy}, {report.config.num_blocks:,} blocks"
        _draw_ttft(axes[0], report, name, style)
        times = [sample.time_s for sample in report.timeline]
        axes[1].plot(times, [sample.num_waiting for sample in report.timeline], style, label=name)
        shares = [sample.num_blocks_in_use / report.cache.num_blocks for sample in report.timeline]
        axes[2].plot(times, shares, style, label=name)
    axes[0].set(title="Time to first token", xlabel="seconds", ylabel="share of requests", xscale="log")
    axes[1].set(title="Requests waiting", xlabel="seconds", ylabel="requests")
    axes[2].set(title="Pool in use", xlabel="seconds", ylabel="share of blocks", ylim=(0, 1.05))
    for one in axes:
        one.grid(alpha=0.3)
        if one.lines:
            one.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def _draw_ttft(axes: Axes, report: SimReport, name: str, style: str) -> None:
    for priority, colour in COLOURS.items():
        values = sorted(record.ttft_s for record in report.tier(priority) if record.ttft_s is not None)
        if values:
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.plot(values, shares, style, color=colour, label=f"{priority.name}: {name}")
