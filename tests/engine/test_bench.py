"""What the benchmark reports that is no time: shares, copies, orders, and that it refuses what it cannot measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.request import Priority, SamplingParams
from quire.core.step import StepPlan
from quire.engine.bench.report import BenchConfig, BenchReport, Stage
from quire.engine.bench.run import run_bench
from quire.engine.llm import LLM
from quire.errors import InvalidRequest

SMALL = BenchConfig(clients=(1, 2, 4), rounds=2, prompt_tokens=20, output_tokens=8, patience_s=0.5)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, backend="torch", device="cpu", num_threads=1, num_blocks=256) as llm:
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
    assert list(speedup.ratios) == [2, 4]
    for level in speedup.levels:
        rates = [one.tokens_per_s for one in speedup.measurements if one.clients == level.clients]
        assert level.ratio == pytest.approx(sum(rates) / 2 / max(singles))
        assert level.ratio_min <= level.ratio <= level.ratio_max
        assert level.ratio <= level.ratio_to_median
    assert all(one.num_output_tokens == one.clients * 8 for one in speedup.measurements)
    assert speedup.num_cached_tokens == 0
    assert speedup.is_held


def test_the_single_stream_is_tried_with_one_thread_and_with_all(llm: LLM) -> None:
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


def test_a_second_request_shares_the_head_in_place(report: BenchReport) -> None:
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
    assert siblings.prefill_tokens == 1024 + 7  # the last token of a prompt is everyone's own
    assert siblings.prefill_tokens_unshared == 8 * 1024
    assert siblings.copies == 7  # and so is the block it lies in
    assert siblings.is_held


def test_tiers_are_served_in_order_and_within_the_bound(report: BenchReport) -> None:
    fairness = report.fairness
    assert fairness is not None
    assert fairness.bound_s == pytest.approx(1.0)
    flood, stream = fairness.flood, fairness.stream
    assert (flood.num_low_waiting, flood.num_high) == (8, 4)
    assert flood.num_overtakes == 32  # every HIGH before every LOW that was waiting
    assert flood.num_out_of_order == 0
    assert flood.num_preemptions == 4
    assert {name: tier.requests for name, tier in flood.tiers.items()} == {"HIGH": 4, "LOW": 12}
    assert flood.tiers["HIGH"].wait_s_max <= flood.tiers["LOW"].wait_s_max
    assert stream.low_wait_s is not None
    assert stream.low_wait_s > 0.95  # it did wait: HIGH ones came all the time
    assert stream.num_high_ahead > 0
    assert stream.num_late_overtakes == 0
    assert stream.first_late_high_s is not None
    assert stream.first_late_high_s >= stream.low_wait_s - 0.001
    assert fairness.is_held
    assert report.not_held == ()


def test_the_report_is_plain_values(report: BenchReport) -> None:
    document: dict[str, Any] = json.loads(json.dumps(asdict(report)))
    assert document["setup"]["model"] == "tiny"
    assert document["setup"]["dtype"] == "float32"
    assert document["setup"]["num_threads"] == 1
    assert document["config"]["clients"] == [1, 2, 4]
    assert document["prefix"]["copies"] == 0
    assert document["fairness"]["is_held"] is True


def test_what_does_not_hold_is_said(report: BenchReport) -> None:
    assert report.prefix is not None
    assert report.fairness is not None
    assert report.speedup is not None
    bad = replace(
        report,
        speedup=replace(report.speedup, num_cached_tokens=5, is_held=False),
        prefix=replace(report.prefix, copies=3, is_held=False, siblings=replace(report.prefix.siblings, is_held=False)),
        fairness=replace(report.fairness, is_held=False, stream=replace(report.fairness.stream, low_wait_s=None)),
    )
    assert [line.split(":")[0] for line in bad.not_held] == ["speedup", "prefix", "siblings", "fairness"]
    assert "3 copies" in bad.not_held[1]
    assert "never began" in bad.not_held[3]


def test_a_cache_that_is_off_is_found_out(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu", num_threads=1, num_blocks=512, is_caching=False) as llm:
        report = run_bench(llm, replace(SMALL, parts=("prefix",), rounds=1))
    assert report.prefix is not None
    assert not report.prefix.is_held
    assert report.prefix.shared_blocks == 0
    assert report.prefix.siblings.prefill_tokens == 8 * 1024
    assert len(report.not_held) == 2


def test_parts_can_be_chosen_and_progress_is_told(llm: LLM) -> None:
    stages: list[Stage] = []
    report = run_bench(llm, replace(SMALL, parts=("prefix",), rounds=1, head_tokens=64), stages.append)
    assert report.speedup is None
    assert report.fairness is None
    assert [stage.what for stage in stages] == ["warming up", "prefix, 1 of 1", "prefix, 8 siblings"]
    assert [stage.num_done for stage in stages] == [0, 1, 2]
    assert {stage.num_stages for stage in stages} == {3}
    assert stages[0].expected_s is None
    assert stages[1].expected_s is not None


def test_the_engine_is_left_as_it_was(llm: LLM, report: BenchReport) -> None:
    assert report.duration_s > 0
    assert not llm.engine.has_work
    assert llm.engine.on_plan is None
    assert llm.cache_stats().num_cached == 0
    plans: list[StepPlan] = []
    llm.engine.on_plan = plans.append
    try:
        run_bench(llm, replace(SMALL, parts=("fairness",)))
        assert llm.engine.on_plan is not None
    finally:
        llm.engine.on_plan = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": (1,)}, "clients = (1,) has no number above 1"),
        ({"clients": (0, 2)}, "clients = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"output_tokens": 1}, "output_tokens = 1"),
        ({"parts": ("speed",)}, "parts: 'speed'"),
        ({"patience_s": 0.0}, "patience_s = 0.0"),
    ],
)
def test_a_config_that_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("(", r"\(").replace(")", r"\)")):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": (2, 100)}, "clients = 100 is more than max_seqs = 64"),
        ({"prompt_tokens": 5000}, "speedup needs 5008 tokens of context, and the model has 4096"),
        ({"head_tokens": 1000}, "head_tokens = 1000 is not a multiple of"),
        ({"clients": (64,), "prompt_tokens": 200}, "num_blocks = 256 is too few"),
        ({"num_slots": 65}, "num_slots = 65 is more than max_seqs = 64"),
    ],
)
def test_what_would_not_run_undisturbed_is_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run_bench(llm, replace(SMALL, **changes))


def test_an_engine_with_other_work_is_refused(llm: LLM) -> None:
    request_id = llm.next_id()
    llm.engine.add(request_id, [1, 2, 3], SamplingParams(max_tokens=4), priority=Priority.LOW)
    try:
        with pytest.raises(InvalidRequest, match="needs it alone"):
            run_bench(llm, SMALL)
    finally:
        llm.engine.cancel(request_id)
