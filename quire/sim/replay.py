"""Compares a trace replayed on a live server with its simulation.

Fits step times to the server and computes the figures of both. Knows nothing of HTTP: `quire/cli/replay_client.py`
sends the requests and measures the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

from quire.core.values import Priority
from quire.errors import InvalidRequest
from quire.sim.simulator import Outcome, SimConfig, SimReport, StepTime, percentile
from quire.sim.traces import TraceRequest


class Ending(StrEnum):
    FINISHED = "finished"
    LEFT = "left"  # the client disconnected, as specified by the trace
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Served:
    """One request to a live server, as seen by the client.

    `due_s`, `sent_s` and `end_s` count from the start of the replay, `ttft_s` counts from `sent_s`.
    """

    priority: Priority
    due_s: float
    sent_s: float
    end_s: float
    ending: Ending
    ttft_s: float | None = None
    num_outputs: int = 0
    num_prompt_tokens: int = 0  # this and the next field: from the server's `usage`; 0 if it has none
    num_cached_tokens: int = 0
    problem: str = ""

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.sent_s if self.ending is Ending.FINISHED else None

    @property
    def late_s(self) -> float:
        return self.sent_s - self.due_s


def prepare(trace: Sequence[TraceRequest], *, speed: float, max_requests: int | None) -> list[TraceRequest]:
    """Take the first `max_requests` of a trace, start it at time 0 and play it `speed` times as fast.

    `cancel_after_s` does not change.
    """
    if not 1e-3 <= speed <= 1e3:
        raise InvalidRequest(f"{speed = } is not from 0.001 to 1000")
    if max_requests is not None and max_requests < 1:
        raise InvalidRequest(f"{max_requests = } is less than 1")
    start_s = trace[0].arrival_s
    return [replace(one, arrival_s=(one.arrival_s - start_s) / speed) for one in trace[:max_requests]]


# Step times of a live server


@dataclass(frozen=True, slots=True)
class Probe:
    """Equal requests sent at once to an idle server, and the time until the last of them was answered."""

    num_steps: int
    num_tokens: int
    num_context: int  # KV tokens read, summed over all steps
    took_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    step_time: StepTime
    overhead_s: float  # time of a request outside the engine
    worst: float  # largest relative error of all probes


def probe_work(prompt: int, outputs: int, num_requests: int, config: SimConfig) -> tuple[int, int, int]:
    """Steps, tokens and context tokens of a probe: the prompt in chunks, then one token per step."""
    chunk = min(config.max_chunk_tokens, config.max_num_batched_tokens // num_requests)
    ends = [*range(chunk, prompt, chunk), prompt]
    context = sum(ends) + sum(range(prompt + 1, prompt + outputs))
    return len(ends) + outputs - 1, num_requests * (prompt + outputs - 1), num_requests * context


def fit(probes: Sequence[Probe]) -> Fit:
    """Fit step times by least squares over relative errors, without negative values.

    A fit to noisy measurements could otherwise find that additional tokens save time.
    """
    rows = [(1.0, one.num_steps, one.num_tokens, one.num_context) for one in probes]
    times = [one.took_s for one in probes]
    scaled = [[value / took_s for value in row] for row, took_s in zip(rows, times, strict=True)]
    best: tuple[float, list[float]] | None = None
    for columns in _choices(len(rows[0])):
        found = _least_squares([[row[column] for column in columns] for row in scaled])
        if found is None or min(found) < 0:
            continue
        whole = [0.0] * len(rows[0])
        for column, value in zip(columns, found, strict=True):
            whole[column] = value
        if not whole[1] and not whole[2]:  # a step of no duration is not plausible
            continue
        error = sum((_dot(row, whole) - 1) ** 2 for row in scaled)
        if best is None or error < best[0]:
            best = error, whole
    if best is None:
        raise InvalidRequest(f"step times cannot be fitted to {len(probes)} probes: {times}")
    overhead_s, base_s, token_s, context_s = best[1]
    worst = max(abs(_dot(row, best[1]) - 1) for row in scaled)
    return Fit(StepTime(base_s * 1e3, token_s * 1e6, context_s * 1e6), overhead_s, worst)


def _choices(num_columns: int) -> Iterator[tuple[int, ...]]:
    """All non-empty subsets of columns: the unknowns that are not zero."""
    for size in range(1, num_columns + 1):
        yield from combinations(range(num_columns), size)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve rows * x = 1 by the normal equations. Returns None if the solution is not unique."""
    size = len(rows[0])
    norms = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(size)]
    if not all(norms):
        return None
    rows = [[value / norm for value, norm in zip(row, norms, strict=True)] for row in rows]
    matrix = [
        [*(sum(row[i] * row[j] for row in rows) for j in range(size)), sum(row[i] for row in rows)] for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                share = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - share * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / norms[i] for i in range(size)]


def _dot(row: Sequence[float], values: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, values, strict=True))


# Figures of the replay and of the simulation


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a whole run or of one tier."""

    num_requests: int
    endings: dict[str, int]
    ttft_s: Spread
    e2e_s: Spread  # of finished requests
    output_tokens_per_s: float  # from the first arrival to the last end
    makespan_s: float
    hit_rate: float | None = None  # this and the following for whole runs only; None: unknown
    num_preemptions: int | None = None
    num_steps: int | None = None


def measured(served: Sequence[Served], *, num_preemptions: int | None, num_steps: int | None) -> Figures:
    with_usage = [one for one in served if one.num_prompt_tokens]
    num_queried = sum(one.num_prompt_tokens - 1 for one in with_usage)  # the last token is always computed
    num_cached = sum(one.num_cached_tokens for one in with_usage)
    return replace(
        measured_part(served),
        hit_rate=num_cached / num_queried if num_queried else None,
        num_preemptions=num_preemptions,
        num_steps=num_steps,
    )


def measured_part(served: Sequence[Served]) -> Figures:
    makespan_s = max((one.end_s for one in served), default=0.0)
    num_outputs = sum(one.num_outputs for one in served)
    return Figures(
        num_requests=len(served),
        endings=_counted(one.ending for one in served),
        ttft_s=_spread(one.ttft_s for one in served),
        e2e_s=_spread(one.e2e_s for one in served),
        output_tokens_per_s=num_outputs / makespan_s if makespan_s else 0.0,
        makespan_s=makespan_s,
    )


_ENDINGS = {
    Outcome.FINISHED: Ending.FINISHED,
    Outcome.CUT: Ending.FINISHED,
    Outcome.LEFT: Ending.LEFT,
    Outcome.TOO_LONG: Ending.REFUSED,
    Outcome.QUEUE_FULL: Ending.REFUSED,
}


def predicted(report: SimReport, overhead_s: float) -> Figures:
    """Figures of a simulation as a client would measure them.

    Each request spends `overhead_s` outside the engine.
    """
    whole = predicted_part(report, overhead_s)
    return replace(
        whole, hit_rate=report.cache.hit_rate, num_preemptions=report.num_preemptions, num_steps=report.num_steps
    )


def predicted_part(report: SimReport, overhead_s: float, tier: Priority | None = None) -> Figures:
    records = report.records if tier is None else report.tier(tier)
    makespan_s = report.makespan_s + overhead_s
    return Figures(
        num_requests=len(records),
        endings=_counted(_ENDINGS[one.outcome] for one in records),
        ttft_s=_spread(None if one.ttft_s is None else one.ttft_s + overhead_s for one in records),
        e2e_s=_spread(None if one.finish_s is None else one.finish_s - one.arrival_s + overhead_s for one in records),
        output_tokens_per_s=sum(one.num_outputs for one in records) / makespan_s if makespan_s else 0.0,
        makespan_s=makespan_s,
    )


def _counted(endings: Iterable[Ending]) -> dict[str, int]:
    counts = Counter(endings)
    return {ending.value: counts[ending] for ending in Ending}


def _spread(values: Iterable[float | None]) -> Spread:
    known = [value for value in values if value is not None]
    return Spread(percentile(known, 0.5), percentile(known, 0.95), percentile(known, 0.99))
