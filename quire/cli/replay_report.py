"""The output of `quire replay`: the figures of a server and of the simulator, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quire.cli import terminal
from quire.cli.server_client import printable
from quire.core.values import Priority
from quire.sim.replay import Ending, Figures, Fit, Served, measured_part, predicted_part
from quire.sim.simulator import SimReport, percentile
from quire.sim.traces import TraceRequest
from quire.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

LATE_S = 0.1  # later requests show a limit of this machine, not of the server
MAX_PROBLEMS = 3  # printed


@dataclass(frozen=True, slots=True)
class Replayed:
    url: str
    model: str
    trace: Sequence[TraceRequest]
    served: list[Served]
    num_made_up: int  # answers that were received too late for a prompt that contains them
    live: Figures
    report: SimReport
    fit: Fit
    simulated: Figures


def described(trace: Sequence[TraceRequest]) -> str:
    tiers = Counter(one.priority for one in trace)
    named = ", ".join(f"{tiers[priority]:,} {priority.name}" for priority in Priority if tiers[priority])
    num_in, num_out = sum(one.prompt_tokens for one in trace), sum(one.output_tokens for one in trace)
    span_s = trace[-1].arrival_s
    return f"{len(trace):,} requests ({named}) over {span_s:,.1f} s: {num_in:,} tokens in, {num_out:,} out"


def document(source: str, speed: float, result: Replayed) -> dict[str, Any]:
    tiers = {
        tier.name: {
            "live": asdict(measured_part([one for one in result.served if one.priority is tier])),
            "simulated": asdict(predicted_part(result.report, result.fit.overhead_s, tier)),
        }
        for tier in Priority
        if any(one.priority is tier for one in result.served)
    }
    return {
        "quire": __version__,
        "server": result.url,
        "model": result.model,
        "trace": {"from": source, "requests": len(result.trace), "span_s": result.trace[-1].arrival_s, "speed": speed},
        "scheduling": asdict(result.report.config),
        "step_time": asdict(result.fit.step_time),
        "overhead_s": result.fit.overhead_s,
        "fit_worst_error": result.fit.worst,
        "late_s": {"p95": _late(result.served, 0.95), "max": _late(result.served, 1.0)},
        "answers_made_up": result.num_made_up,
        "problems": _problems(result.served),
        "live": asdict(result.live),
        "simulated": asdict(result.simulated),
        "tiers": tiers,
    }


def _late(served: Sequence[Served], share: float) -> float:
    return max(0.0, percentile([one.late_s for one in served], share) or 0.0)


def _problems(served: Sequence[Served]) -> dict[str, int]:
    return dict(Counter(one.problem for one in served if one.problem).most_common(MAX_PROBLEMS))


def print_report(result: Replayed) -> None:
    console = terminal.console(100)
    console.print(f"{described(result.trace)}\nto {printable(result.model)} on {result.url}\n")
    console.print(_table(result))
    for line in _remarks(result):
        console.print(line)


def _table(result: Replayed) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "live", "simulated", "live / simulated"):
        table.add_column(column, justify="right" if column else "left")
    for name, live, simulated in _rows(result):
        ratio = f"{live / simulated:.2f}" if live is not None and simulated else "-"
        table.add_row(name, _number(live), _number(simulated), ratio)
    return table


def _rows(result: Replayed) -> Iterator[tuple[str, float | None, float | None]]:
    live, simulated = result.live, result.simulated
    for ending in Ending:
        if live.endings[ending] or simulated.endings[ending]:
            yield f"requests {ending}", live.endings[ending], simulated.endings[ending]
    for name, mine, theirs in (
        ("TTFT", live.ttft_s, simulated.ttft_s),
        ("whole answer", live.e2e_s, simulated.e2e_s),
    ):
        for share in ("p50", "p95", "p99"):
            yield f"{name} {share}, s", getattr(mine, share), getattr(theirs, share)
    yield "answer tokens / s", live.output_tokens_per_s, simulated.output_tokens_per_s
    yield "first arrival to last end, s", live.makespan_s, simulated.makespan_s
    yield "hit rate", live.hit_rate, simulated.hit_rate
    yield "preemptions", live.num_preemptions, simulated.num_preemptions
    yield "steps", live.num_steps, simulated.num_steps


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _remarks(result: Replayed) -> Iterator[str]:
    """The fitted step times, and deviations from the trace."""
    step, found = result.fit.step_time, result.fit
    base, token, context = (_short(value) for value in (step.base_ms, step.token_us, step.context_us))
    yield (
        f"\nA step of the server takes {base} ms + {token} us per token + {context} us per token of context, and"
        f" a request {_short(found.overhead_s * 1000)} ms outside the engine (fitted within {found.worst:.0%})."
    )
    late_s = _late(result.served, 0.95)
    if late_s > LATE_S:
        yield f"This machine sent requests late, 5 % by more than {late_s:.2f} s: the load was lower than in the trace."
    if result.num_made_up:
        yield (
            f"{result.num_made_up:,} answers were received too late for a prompt that contains them: the prompt has"
            " made-up text in their place, and fewer cached tokens than the simulator assumes."
        )
    for problem, count in _problems(result.served).items():
        yield f"{count:,} times: {problem}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
