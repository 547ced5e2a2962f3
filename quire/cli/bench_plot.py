"""The plot of `quire bench --out`: throughput by clients, time to first token, HIGH requests beside LOW ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.report import BenchReport, FairnessReport, PrefixReport, SpeedupReport
from quire.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawn(report: BenchReport) -> list[SpeedupReport | PrefixReport | FairnessReport]:
    """Return the parts that have a panel."""
    return [part for part in (report.speedup, report.prefix, report.fairness) if part is not None]


def draw(report: BenchReport, title: str, path: Path) -> None:
    """Write a .png or .svg file, by its name, with a panel for each part that was measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra.of("the plot", "matplotlib") from None
    parts = drawn(report)
    figure = Figure(figsize=(max(8, 1 + 4 * len(parts)), 4.5), layout="constrained")
    figure.suptitle(title)
    panels: list[Axes] = list(figure.subplots(1, len(parts), squeeze=False)[0])
    for axes, part in zip(panels, parts, strict=True):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if isinstance(part, SpeedupReport):
            _draw_speedup(axes, part)
        elif isinstance(part, PrefixReport):
            _draw_prefix(axes, part)
        else:
            _draw_fairness(axes, part)
    figure.savefig(path)


def _draw_speedup(axes: Axes, speedup: SpeedupReport) -> None:
    """Bars are medians, whiskers the range of all rounds, the line is one stream alone."""
    names = ["1", *(str(level.clients) for level in speedup.levels)]
    best = speedup.baseline.tokens_per_s
    rates = [best, *(level.tokens_per_s for level in speedup.levels)]
    below = [0.0, *(level.tokens_per_s - level.ratio_min * best for level in speedup.levels)]
    above = [0.0, *(level.ratio_max * best - level.tokens_per_s for level in speedup.levels)]
    whiskers = [[max(0.0, size) for size in sizes] for sizes in (below, above)]  # rounding may give negative sizes
    bars = axes.bar(names, rates, yerr=whiskers, capsize=3, color=["C7", *["C0"] * len(speedup.levels)])
    axes.bar_label(bars, ["best", *(f"{level.ratio:.2f}x" for level in speedup.levels)], padding=2)
    axes.axhline(best, color="C7", linestyle="--", linewidth=1)
    axes.set(title="Throughput", xlabel="clients at once", ylabel="output tokens per second")
    axes.margins(y=0.12)


def _draw_prefix(axes: Axes, prefix: PrefixReport) -> None:
    times = {"cold": prefix.ttft_cold_ms, "while shared": prefix.ttft_live_ms, "cached": prefix.ttft_hit_ms}
    bars = axes.bar(list(times), list(times.values()), color=["C7", "C1", "C2"])
    axes.bar_label(bars, [f"{value:.0f} ms" for value in times.values()], padding=2)
    axes.set(title=f"First token, head of {prefix.head_tokens:,}: {prefix.ratio:.0f}x", ylabel="milliseconds")
    axes.margins(y=0.12)


def _draw_fairness(axes: Axes, fairness: FairnessReport) -> None:
    """95th percentile of the time to first token of HIGH requests; the line is the promised limit."""
    windows = fairness.backlog.windows
    names = ["idle", *(f"{round(one.begin_s, 1):g}-{round(one.end_s, 1):g} s" for one in windows)]
    heights = [one.ttft_ms_p95 or 0.0 for one in (fairness.idle, *(window.latency for window in windows))]
    labels = ["idle", *("-" if one.ttft_ratio is None else f"{one.ttft_ratio:.2f}x" for one in windows)]
    bars = axes.bar(names, heights, color=["C7", *["C4"] * len(windows)])
    axes.bar_label(bars, labels, padding=2)
    bound = fairness.max_ttft_ratio
    axes.axhline(bound * heights[0], color="C3", linestyle="--", linewidth=1, label=f"{bound:g} times idle")
    share = fairness.saturated.low_share
    under = "" if share is None else f"LOW under constant HIGH load: {share:.1%} of all tokens"
    axes.set(title="First token of HIGH, p95, beside LOW", xlabel=under, ylabel="milliseconds")
    axes.margins(y=0.12)
    axes.legend(loc="best")
