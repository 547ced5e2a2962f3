"""Computes the fairness report from client measurements. Pure: no HTTP and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from quire.bench.report import (
    BacklogReport,
    BenchConfig,
    FairnessReport,
    Latency,
    ResumedReport,
    SaturatedReport,
    Window,
)
from quire.core.policy import LOW_SHARE
from quire.sim.simulator import percentile

NUM_WINDOWS = 3  # separate windows, because a policy may fail only after some time
MAX_TTFT_RATIO = 3.0
MAX_BACKLOG = 4096
SHARE_KEPT = 0.9  # tolerance for the guaranteed share: the measurement ends in the middle of a prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one request."""

    begun_s: float  # start, from the start of its phase
    ttft_s: float  # if the request was aborted before its first token: the time until then
    num_tokens: int
    decode_s: float  # from the first token to the last


def fairness_report(
    max_num_seqs: int,
    idle: Sequence[Sample],
    backlog: BacklogReport,
    saturated: SaturatedReport,
    resumed: ResumedReport | None,
) -> FairnessReport:
    min_low_share = SHARE_KEPT * saturated.guaranteed_share
    ratios = [window.ttft_ratio for window in backlog.windows]
    if resumed is not None:
        ratios.append(resumed.ttft_ratio)
    share = saturated.low_share
    return FairnessReport(
        max_num_seqs=max_num_seqs,
        idle=latency(idle),
        backlog=backlog,
        saturated=saturated,
        resumed=resumed,
        max_ttft_ratio=MAX_TTFT_RATIO,
        min_low_share=min_low_share,
        is_held=all(ratio is not None and ratio <= MAX_TTFT_RATIO for ratio in ratios)
        and share is not None
        and share >= min_low_share,
    )


def backlog_size(config: BenchConfig, idle: Sequence[Sample]) -> int:
    """Number of LOW requests to keep outstanding.

    The oldest must have waited since the start of the phase, because a policy with aging treats an old backlog
    differently from a new one. So the backlog is larger than the number of requests that the server could answer during
    the phase if each batch row were as fast as one request alone.
    """
    rate = latency(idle).decode_tokens_per_s or 0.0
    num_answered = ceil(config.seconds * config.max_num_seqs * rate / config.output_tokens)
    return max(2 * config.max_num_seqs, min(num_answered, MAX_BACKLOG))


def latency(samples: Sequence[Sample]) -> Latency:
    ttfts_ms = [one.ttft_s * 1000 for one in samples]
    rates = [(one.num_tokens - 1) / one.decode_s for one in samples if one.num_tokens > 1 and one.decode_s > 0]
    return Latency(
        requests=len(samples),
        ttft_ms_p50=percentile(ttfts_ms, 0.5),
        ttft_ms_p95=percentile(ttfts_ms, 0.95),
        ttft_ms_max=max(ttfts_ms, default=None),
        decode_tokens_per_s=median(rates) if rates else None,
    )


def windows(samples: Sequence[Sample], seconds: float, idle: Latency) -> tuple[Window, ...]:
    """Divide the phase into equal windows. Each contains the requests that started in it."""
    parts: list[list[Sample]] = [[] for _ in range(NUM_WINDOWS)]
    for one in samples:
        parts[min(int(one.begun_s / seconds * NUM_WINDOWS), NUM_WINDOWS - 1)].append(one)
    found = []
    for number, part in enumerate(parts):
        in_part = latency(part)
        begin_s, end_s = (seconds * edge / NUM_WINDOWS for edge in (number, number + 1))
        found.append(Window(begin_s, end_s, in_part, _ratio(in_part.ttft_ms_p95, idle.ttft_ms_p95)))
    return tuple(found)


def backlog_report(
    seconds: float,
    num_low: int,
    idle: Sequence[Sample],
    high: Sequence[Sample],
    low_tokens_per_s: float,
    client_cpu: float,
) -> BacklogReport:
    before, in_all = latency(idle), latency(high)
    return BacklogReport(
        seconds=seconds,
        num_low=num_low,
        windows=windows(high, seconds, before),
        latency=in_all,
        decode_ratio=_ratio(in_all.decode_tokens_per_s, before.decode_tokens_per_s),
        low_tokens_per_s=low_tokens_per_s,
        client_cpu=client_cpu,
    )


def saturated_report(
    seconds: float, num_each: int, high_tokens: int, low_tokens: int, client_cpu: float
) -> SaturatedReport:
    total = high_tokens + low_tokens
    share = low_tokens / total if total else None
    return SaturatedReport(seconds, num_each, high_tokens, low_tokens, share, LOW_SHARE, client_cpu)


def resumed_report(
    pool_tokens: int, high_tokens: int, low_tokens: int, idle: Sequence[Sample], high: Sequence[Sample]
) -> ResumedReport:
    before, after = latency(idle), latency(high)
    ratio = _ratio(after.ttft_ms_p95, before.ttft_ms_p95)
    return ResumedReport(pool_tokens, high_tokens, low_tokens, before, after, ratio)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
