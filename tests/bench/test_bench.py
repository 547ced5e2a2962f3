"""Tests of benchmark results that do not depend on speed (shares, copies, arithmetic) and of refused settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.bench.driver import Load, Shape, Traffic, driven, run_bench
from quire.bench.report import (
    MAX_BACKLOG,
    BenchConfig,
    BenchReport,
    FairnessReport,
    ResumedReport,
    Sample,
    backlog_report,
    backlog_size,
    latency,
    resumed_report,
    saturated_report,
    unfair,
    windows,
)
from quire.core.values import Priority, SamplingParams
from quire.engine.generation import GenerationRequest
from quire.engine.llm import LLM
from quire.errors import InvalidRequest

SMALL = BenchConfig(clients=(1, 2, 4), rounds=2, prompt_tokens=20, output_tokens=8)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, backend="torch", device="cpu", threads=1, num_blocks=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def report(llm: LLM) -> BenchReport:
    return run_bench(llm, SMALL)


def test_the_speedup_is_measured_in_rounds_against_the_best_single_stream(report: BenchReport) -> None:
    speedup = report.speedup
    assert speedup is not None
    order = [(one.round, one.clients) for one in speedup.measurements]
    assert order.count((0, 1)) == order.count((1, 1)) == 3  # before, between and after the two batches
    assert [order.count((number, clients)) for number in (0, 1) for clients in (2, 4)] == [1, 1, 1, 1]
    singles = [one.tokens_per_s for one in speedup.measurements if one.clients == 1]
    assert speedup.baseline.tokens_per_s == max(singles)
    assert [level.clients for level in speedup.levels] == [2, 4]
    for level in speedup.levels:
        rates = [one.tokens_per_s for one in speedup.measurements if one.clients == level.clients]
        assert level.ratio == pytest.approx(sum(rates) / 2 / max(singles))
        assert level.ratio_min <= level.ratio <= level.ratio_max
        assert level.ratio <= level.ratio_to_median
    assert all(one.num_output_tokens == one.clients * 8 for one in speedup.measurements)
    assert speedup.num_cached_tokens == 0
    assert report.not_held == ()


def test_the_single_stream_is_measured_with_one_thread_and_with_all(llm: LLM) -> None:
    import torch

    torch.set_num_threads(2)
    try:
        found = run_bench(llm, replace(SMALL, parts=("speedup",), clients=(2,), rounds=1)).speedup
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert found is not None
    assert set(found.baseline.best_by_threads) == {1, 2}
    assert found.baseline.tokens_per_s == max(found.baseline.best_by_threads.values())
    assert found.baseline.best_by_threads[found.baseline.num_threads] == found.baseline.tokens_per_s
    assert all(one.num_threads == 2 for one in found.measurements if one.clients > 1)


def test_a_second_request_shares_the_head_without_copies(report: BenchReport) -> None:
    prefix = report.prefix
    assert prefix is not None
    assert (prefix.head_tokens, prefix.shared_blocks, prefix.cached_tokens) == (1024, 32, 1024)
    assert (prefix.ref_count_min, prefix.ref_count_max) == (2, 2)
    assert prefix.copies == 0
    assert prefix.is_held
    assert prefix.ratio == pytest.approx(prefix.ttft_cold_ms / prefix.ttft_hit_ms)


def test_siblings_compute_their_prompt_once(report: BenchReport) -> None:
    assert report.prefix is not None
    siblings = report.prefix.siblings
    assert siblings.num_requests == 8
    assert siblings.prefill_tokens == 1024 + 7  # each request computes the last token of the prompt itself
    assert siblings.prefill_tokens_unshared == 8 * 1024
    assert siblings.copies == 7  # and has its own copy of the block of that token
    assert siblings.is_held


def test_drafts_are_measured_against_none(llm: LLM, report: BenchReport) -> None:
    drafts = report.drafts
    assert drafts is not None
    num_tokens = SMALL.rounds * SMALL.output_tokens
    assert drafts.steps_without == num_tokens
    assert drafts.steps == num_tokens - drafts.draft_tokens_accepted
    assert 0 <= drafts.draft_tokens_accepted <= drafts.draft_tokens
    assert drafts.tokens_per_step == num_tokens / drafts.steps
    assert drafts.ratio_min <= drafts.ratio <= drafts.ratio_max
    assert drafts.is_equal
    assert llm.engine.speculation.is_on
    assert llm.engine.scheduler.policy.ledger.cost is None


def test_an_engine_without_drafts_has_no_report_of_them(tiny_model: Path) -> None:
    with LLM(tiny_model, backend="torch", device="cpu", threads=1, num_blocks=256, enable_drafts=False) as llm:
        assert run_bench(llm, replace(SMALL, parts=("drafts",))).drafts is None


def test_not_held_lists_each_failed_criterion(report: BenchReport) -> None:
    assert report.prefix is not None
    assert report.speedup is not None
    bad = replace(
        report,
        speedup=replace(report.speedup, num_cached_tokens=5),
        prefix=replace(report.prefix, copies=3, is_held=False, siblings=replace(report.prefix.siblings, is_held=False)),
        fairness=fairness(ttfts_s=(0.1, 0.31, None), low_tokens=5),
    )
    assert [line.split(":")[0] for line in bad.not_held] == ["speedup", "prefix", "siblings", "fairness", "fairness"]
    assert "3 copies" in bad.not_held[1]
    assert "is 1.00, 3.10, unknown times that of an idle engine, expected at most 3 times" in bad.not_held[3]
    assert "LOW had 0.5% of all tokens under constant HIGH load, expected at least 11.2% for LOW" in bad.not_held[4]


def test_a_disabled_cache_fails_the_prefix_criteria(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu", threads=1, num_blocks=512, enable_prefix_caching=False) as llm:
        report = run_bench(llm, replace(SMALL, parts=("prefix",), rounds=1))
    assert report.prefix is not None
    assert not report.prefix.is_held
    assert report.prefix.shared_blocks == 0
    assert report.prefix.siblings.prefill_tokens == 8 * 1024
    assert len(report.not_held) == 2


def test_parts_can_be_chosen_and_progress_is_reported(llm: LLM) -> None:
    stages: list[str] = []
    report = run_bench(llm, replace(SMALL, parts=("prefix",), rounds=1, head_tokens=64), stages.append)
    assert report.speedup is None
    assert report.fairness is None
    assert stages == ["warming up", "prefix, 1 of 1", "prefix, 8 siblings"]


def test_the_engine_is_left_unchanged(llm: LLM, report: BenchReport) -> None:
    assert report.duration_s > 0
    assert not llm.engine.has_work
    assert llm.engine.on_plan is None
    assert llm.engine.scheduler.cache.stats().num_cached == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": (2, 100)}, "clients = 100 is more than max_num_seqs = 64"),
        ({"prompt_tokens": 5000}, "speedup needs 5008 tokens of context, and the model has 4096"),
        ({"head_tokens": 1000}, "head_tokens = 1000 is not a multiple of"),
        ({"clients": (64,), "prompt_tokens": 200}, "num_blocks = 256 is too few"),
    ],
)
def test_requests_that_would_wait_or_be_preempted_are_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run_bench(llm, replace(SMALL, **changes))


def test_an_engine_with_other_work_is_refused(llm: LLM) -> None:
    request_id = llm.next_id()
    llm.engine.add(request_id, GenerationRequest.of([1, 2, 3], SamplingParams(max_tokens=4), priority=Priority.LOW))
    try:
        with pytest.raises(InvalidRequest, match="needs an idle engine"):
            run_bench(llm, SMALL)
    finally:
        llm.engine.cancel(request_id)


def test_both_tiers_have_tokens_and_a_load_never_runs_out(llm: LLM) -> None:
    loads = [Load(tier, Shape(8, 4), 6) for tier in (Priority.HIGH, Priority.LOW)]
    with driven(llm.engine, llm.next_id) as session:
        Traffic(llm, session, 0, *loads).run(lambda: min(load.num_tokens for load in loads) > 3 * 6 * 12)
        assert min(len(load.outstanding) for load in loads) == 6
        assert not any(track.num_cached_tokens for track in session.tracks.values())
    assert not llm.engine.has_work


# Arithmetic of the fairness report. The measurement itself is tested in tests/cli/test_bench.py


def sample(ttft_s: float, begun_s: float = 0.0, num_tokens: int = 11, decode_s: float = 1.0) -> Sample:
    return Sample(begun_s, ttft_s, num_tokens, decode_s)


def resumed(ttft_s: float = 1.0) -> ResumedReport:
    """Large HIGH requests take a second on the idle server."""
    return resumed_report(1024, [sample(1.0)] * 3, [sample(1.0), sample(ttft_s)])


def fairness(
    *,
    ttfts_s: tuple[float | None, ...] = (0.1, 0.2, 0.3),
    low_tokens: int = 150,
    high_tokens: int = 1000,
    resumed_s: float | None = 1.0,
) -> FairnessReport:
    """Idle requests take 100 ms. Window i of 15 s has one request that takes `ttfts_s[i]`, or none."""
    high = [sample(ttft_s, 15.0 * i) for i, ttft_s in enumerate(ttfts_s) if ttft_s is not None]
    idle = latency([sample(0.1)] * 20)
    return FairnessReport(
        idle,
        backlog_report(45.0, 8, idle, high, low_tokens_per_s=100.0),
        saturated_report(8, high_tokens, low_tokens),
        None if resumed_s is None else resumed(resumed_s),
    )


def is_fair(**changes: Any) -> bool:
    return not list(unfair(fairness(**changes)))


def test_latency_percentiles_are_nearest_rank() -> None:
    found = latency([sample(number / 1000) for number in range(20, 0, -1)])
    assert (found.requests, found.ttft_ms_p50, found.ttft_ms_p95, found.ttft_ms_max) == (20, 10.0, 19.0, 20.0)
    assert found.decode_tokens_per_s == 10.0  # the first of the 11 tokens is not counted


def test_decode_speed_is_the_median_of_requests_that_decoded() -> None:
    given = [
        sample(1, num_tokens=1),
        sample(1, num_tokens=0, decode_s=0),
        sample(1, num_tokens=5),
        sample(1, decode_s=5),
    ]
    assert latency(given).decode_tokens_per_s == 3.0  # of 4 and 2
    assert latency([sample(1, num_tokens=1)]).decode_tokens_per_s is None


def test_a_request_belongs_to_the_window_it_started_in() -> None:
    begun_s = (0.0, 14.9, 15.0, 30.0, 44.9, 45.1)
    found = windows([sample(0.2, at_s) for at_s in begun_s], 45.0, latency([sample(0.1)]))
    assert [(one.begin_s, one.end_s, one.latency.requests) for one in found] == [(0, 15, 2), (15, 30, 1), (30, 45, 3)]
    assert [one.ttft_ratio for one in found] == [2.0, 2.0, 2.0]


def test_fairness_needs_both_criteria() -> None:
    assert is_fair()
    assert is_fair(ttfts_s=(0.1, 0.1, 0.3))  # 3 times is allowed
    assert not is_fair(ttfts_s=(0.1, 0.1, 0.31))  # every window must be within the limit
    assert not is_fair(ttfts_s=(0.1, None, 0.1))  # no request started for 15 seconds
    assert not is_fair(low_tokens=100)  # 9.1 % of all tokens
    assert is_fair(resumed_s=3.0)
    assert not is_fair(resumed_s=3.1)
    assert is_fair(resumed_s=None)  # a server without room for that phase
    assert not is_fair(low_tokens=0, high_tokens=0)


def test_decode_ratio_compares_the_backlog_phase_with_the_idle_server() -> None:
    slow = [sample(0.1, decode_s=2.0), sample(0.1, decode_s=4.0)]
    found = backlog_report(45.0, 8, latency([sample(0.1)]), slow, 100.0)
    assert found.latency.decode_tokens_per_s == pytest.approx(3.75)
    assert found.decode_ratio == pytest.approx(0.375)


def test_the_backlog_lasts_longer_than_the_phase() -> None:
    config = BenchConfig(seconds=30.0, max_num_seqs=4, output_tokens=64)
    idle = latency([sample(0.1)] * 3)
    assert backlog_size(config, idle) == 19  # 30 s of 4 streams of 10 tok/s, in answers of 64
    assert backlog_size(replace(config, seconds=1), idle) == 8  # at least twice max_num_seqs
    assert backlog_size(replace(config, max_num_seqs=1000), latency([sample(0.1, decode_s=0.01)])) == MAX_BACKLOG
    assert backlog_size(replace(config, max_num_seqs=4000), latency([])) == 8000
