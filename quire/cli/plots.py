"""Plots of `quire bench --out` and `quire sim --plot`, which import this only if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire.bench.report import FairnessReport, PrefixReport, SpeedupReport
from quire.core.values import Priority
from quire.sim.simulator import SimReport


def draw_bench(parts: Sequence[SpeedupReport | PrefixReport | FairnessReport], title: str, path: Path) -> None:
    """Write a .png or .svg file, by its name, with a panel for each part."""
    figure = Figure(figsize=(max(8, 1 + 4 * len(parts)), 4.5), layout="constrained")
    figure.suptitle(title)
    panels: list[Axes] = list(figure.subplots(1, len(parts), squeeze=False)[0])
    for axes, part in zip(panels, parts, strict=True):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
        if isinstance(part, SpeedupReport):
            _draw_speedup(axes, part)
        elif isinstance(part, PrefixReport):
            times = {"cold": part.ttft_cold_ms, "while shared": part.ttft_live_ms, "cached": part.ttft_hit_ms}
            bars = axes.bar(list(times), list(times.values()), color=["C7", "C1", "C2"])
            axes.bar_label(bars, [f"{value:.0f} ms" for value in times.values()], padding=2)
            axes.set(title=f"First token, head of {part.head_tokens:,}: {part.ratio:.0f}x", ylabel="milliseconds")
        else:
            _draw_fairness(axes, part)
    figure.savefig(path)


def _draw_speedup(axes: Axes, speedup: SpeedupReport) -> None:
    """Bars are medians, whiskers the range of all rounds, the line is one stream alone."""
    best = speedup.baseline.tokens_per_s
    levels = speedup.levels
    below = [0.0, *(max(0.0, level.tokens_per_s - level.ratio_min * best) for level in levels)]  # rounding
    above = [0.0, *(max(0.0, level.ratio_max * best - level.tokens_per_s) for level in levels)]
    bars = axes.bar(
        ["1", *(str(level.clients) for level in levels)],
        [best, *(level.tokens_per_s for level in levels)],
        yerr=[below, above],
        capsize=3,
        color=["C7", *["C0"] * len(levels)],
    )
    axes.bar_label(bars, ["best", *(f"{level.ratio:.2f}x" for level in levels)], padding=2)
    axes.axhline(best, color="C7", linestyle="--", linewidth=1)
    axes.set(title="Throughput", xlabel="clients at once", ylabel="output tokens per second")


def _draw_fairness(axes: Axes, fairness: FairnessReport) -> None:
    """95th percentile of the time to first token of HIGH requests; the line is the promised limit."""
    windows = fairness.backlog.windows
    bound = fairness.max_ttft_ratio
    names = ["idle", *(f"{round(one.begin_s, 1):g}-{round(one.end_s, 1):g} s" for one in windows)]
    heights = [one.ttft_ms_p95 or 0.0 for one in (fairness.idle, *(window.latency for window in windows))]
    bars = axes.bar(names, heights, color=["C7", *["C4"] * len(windows)])
    axes.bar_label(bars, ["idle", *(f"{one.ttft_ratio or 0.0:.2f}x" for one in windows)], padding=2)
    axes.axhline(bound * heights[0], color="C3", linestyle="--", linewidth=1, label=f"{bound:g} times idle")
    share = fairness.saturated.low_share
    under = "" if share is None else f"LOW under constant HIGH load: {share:.1%} of all tokens"
    axes.set(title="First token of HIGH, p95, beside LOW", xlabel=under, ylabel="milliseconds")
    axes.legend(loc="best")


# quire sim


def draw_sim(reports: Sequence[SimReport], title: str, path: Path) -> None:
    """Write a .png or .svg file: a column for each tier, then the machine. A run has the same colour in all of them."""
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
