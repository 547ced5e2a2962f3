"""`quire sim --states`: how many tokens are reused, by the number of recurrent states and where they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.core.memory.hybrid import ALL_PLACES, Place
from quire.errors import InvalidRequest
from quire.sim.simulator import Machine, SimConfig, SimReport, percentile

if TYPE_CHECKING:
    from rich.table import Table

StatesOption = Annotated[
    list[int] | None,
    typer.Option(help="Number of recurrent states in memory; repeatable. Compares how many tokens are reused."),
]
PlacesOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Where states are stored: prompt, answer, message, branch, every-N (tokens), with commas between them;"
        " repeatable, by default all four, each alone, and every-1024."
    ),
]
StateBytesOption = Annotated[int | None, typer.Option(help="Bytes of a recurrent state, in place of the machine's.")]
WindowOption = Annotated[
    int | None, typer.Option(help="Tokens that the layers with a window see; needs --num-window-blocks.")
]
WindowBlocksOption = Annotated[
    int | None,
    typer.Option(help="Number of blocks for layers with a window; needs --window. Without both, all layers are whole."),
]

EVERY = "every-"
DEFAULT_PLACES = (",".join(Place), *Place, f"{EVERY}1024")
DEFAULT_BLOCKS = (65_536,)  # with states: prompts of agents are long
MAX_STATES = 1_000_000  # the simulator has an object for each
MAX_INTERVAL = 10_000_000


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The rules of one `--places`."""

    places: tuple[Place, ...]
    interval: int = 0

    @classmethod
    def parse(cls, given: str) -> PlacementRules:
        places, interval = set(), 0
        for name in given.split(","):
            if name in list(Place):
                places.add(Place(name))
            elif name.removeprefix(EVERY).isdecimal() and 1 <= int(name.removeprefix(EVERY)) <= MAX_INTERVAL:
                interval = int(name.removeprefix(EVERY))
            else:
                known = ", ".join(Place)
                raise InvalidRequest(f"--places {given!r}: {name!r} is not one of {known} or {EVERY}N (1 to 10000000)")
        return cls(tuple(place for place in Place if place in places), interval)


def name_rules(config: SimConfig) -> str:
    """The rules of a configuration, as `--places` accepts them."""
    names = [place.value for place in Place if place in config.places]
    return ",".join([*names, *([f"{EVERY}{config.interval}"] if config.interval else [])])


def state_configs(
    configs: Sequence[SimConfig], states: Sequence[int] | None, places: Sequence[str] | None
) -> list[SimConfig]:
    """Each configuration without recurrent states, then with each set of rules and each number of states."""
    if not states:
        if places:
            raise InvalidRequest("--places needs --states")
        return list(configs)
    for count in states:
        if not 2 <= count <= MAX_STATES:
            raise InvalidRequest(f"--states {count} is not from 2 to {MAX_STATES} (one is the empty state)")
    rules = list(dict.fromkeys(map(PlacementRules.parse, places or DEFAULT_PLACES)))
    found = []
    for config in configs:
        found.append(config)
        for rule, count in product(rules, dict.fromkeys(states)):
            found.append(replace(config, num_states=count, places=rule.places, interval=rule.interval))
    return found


def with_windows(config: SimConfig, window: int | None, num_window_blocks: int | None) -> SimConfig:
    """The configuration with the two options, which are given together or not at all."""
    if (window is None) != (num_window_blocks is None):
        raise InvalidRequest("--window and --num-window-blocks must be given together")
    if window is None or num_window_blocks is None:
        return config
    if not 2 <= num_window_blocks <= MAX_STATES:
        raise InvalidRequest(f"--num-window-blocks {num_window_blocks} is not from 2 to {MAX_STATES}")
    return replace(config, window=window, num_window_blocks=num_window_blocks)


# Results


def with_reference(reports: Sequence[SimReport]) -> Iterator[tuple[SimReport, SimReport]]:
    """Each report, with that of the same configuration without recurrent states."""
    reference = reports[0]
    for report in reports:
        if not report.config.num_states:
            reference = report
        yield report, reference


def reused_share(report: SimReport, reference: SimReport) -> float:
    """Hit tokens as a share of those of a model without recurrent states."""
    return report.cache.num_hit_tokens / max(reference.cache.num_hit_tokens, 1)


def state_figures(report: SimReport, reference: SimReport, machine: Machine) -> dict[str, Any]:
    """The figures of one run that concern states, as plain values."""
    ttfts = [record.ttft_s for record in report.records if record.ttft_s is not None]
    states = report.cache.states
    return {
        "num_states": report.config.num_states,
        "places": name_rules(report.config) if report.config.num_states else None,
        "state_bytes": report.config.num_states * machine.state_bytes,
        "hit_tokens": report.cache.num_hit_tokens,
        "reused_share": reused_share(report, reference),
        "recomputed_tokens": report.cache.num_recomputed_tokens,
        "state_evictions": 0 if states is None else states.num_evictions,
        "ttft_s_p50": percentile(ttfts, 0.5),
        "ttft_s_p95": percentile(ttfts, 0.95),
    }


def state_table(machine: Machine, reports: Sequence[SimReport]) -> Table:
    """A row for each run. Fits 80 columns."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    columns = ("\nplaces", "\nstates", "\nGB", "hit\ntokens", "\nreused", "computed\nagain", "\nevicted")
    for column in (*columns, "TTFT\np50", "TTFT\np95"):
        table.add_column(column, justify="left" if column == "\nplaces" else "right")
    for report, reference in with_reference(reports):
        figures = state_figures(report, reference, machine)
        if report is reference:
            if report is not reports[0]:
                table.add_row()
            first = [f"{report.config.num_blocks:,} blocks, no states", "-", "-"]
        else:
            name = "all" if {*report.config.places} == ALL_PLACES and not report.config.interval else figures["places"]
            gb = f"{figures['state_bytes'] / 1e9:.1f}" if machine.state_bytes else "-"
            first = [name, f"{report.config.num_states:,}", gb]
        times = [figures["ttft_s_p50"], figures["ttft_s_p95"]]
        table.add_row(
            *first,
            f"{figures['hit_tokens']:,}",
            f"{figures['reused_share']:.1%}",
            f"{figures['recomputed_tokens']:,}",
            f"{figures['state_evictions']:,}",
            *("-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}" for value in times),
        )
    return table
