"""Benchmark of concurrent clients, compared with one client at a time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from quire.bench.driver import Bench
from quire.bench.report import (
    Baseline,
    Level,
    Measurement,
    SpeedupReport,
)


def measure_speedup(bench: Bench) -> SpeedupReport:
    """Measure each batch between two single streams, so that both see the same machine state."""
    config, threads = bench.config, bench.threads
    singles: list[Measurement] = []
    batches: list[Measurement] = []
    for number in range(config.rounds):
        name = f"round {number + 1} of {config.rounds}"
        for num_threads in threads.choices:
            bench.begin_stage(f"{name}: one at a time")
            singles.append(bench.measure(1, number, num_threads))
        for clients in config.batches:
            bench.begin_stage(f"{name}: {clients} clients")
            batches.append(bench.measure(clients, number, threads.default))
            bench.begin_stage(f"{name}: one at a time")
            singles.append(bench.measure(1, number, _best(singles).num_threads))
    baseline = _baseline(singles)
    levels = tuple(
        _level([one for one in batches if one.clients == clients], baseline) for clients in bench.config.batches
    )
    num_cached = sum(one.num_cached_tokens for one in (*singles, *batches))
    return SpeedupReport(baseline, levels, (*singles, *batches), num_cached, num_cached == 0)


def _best(singles: Sequence[Measurement]) -> Measurement:
    return max(singles, key=lambda one: one.tokens_per_s)


def _baseline(singles: Sequence[Measurement]) -> Baseline:
    best = _best(singles)
    by_threads: dict[int, float] = {}
    for one in singles:
        by_threads[one.num_threads] = max(one.tokens_per_s, by_threads.get(one.num_threads, 0.0))
    return Baseline(
        tokens_per_s=best.tokens_per_s,
        decode_tokens_per_s=max(one.decode_tokens_per_s or 0.0 for one in singles),
        median_tokens_per_s=median(one.tokens_per_s for one in singles if one.num_threads == best.num_threads),
        num_threads=best.num_threads,
        best_by_threads=by_threads,
    )


def _level(measurements: Sequence[Measurement], baseline: Baseline) -> Level:
    rates = [one.tokens_per_s for one in measurements]
    rate = median(rates)
    decoding = [one.decode_tokens_per_s for one in measurements if one.decode_tokens_per_s is not None]
    decode_rate = median(decoding) if decoding else None
    return Level(
        clients=measurements[0].clients,
        tokens_per_s=rate,
        decode_tokens_per_s=decode_rate,
        ttft_ms=median(one.ttft_ms for one in measurements),
        ratio=rate / baseline.tokens_per_s,
        ratio_min=min(rates) / baseline.tokens_per_s,
        ratio_max=max(rates) / baseline.tokens_per_s,
        decode_ratio=None if decode_rate is None else decode_rate / baseline.decode_tokens_per_s,
        ratio_to_median=rate / baseline.median_tokens_per_s,
    )
