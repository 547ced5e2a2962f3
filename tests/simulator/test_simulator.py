"""Tests of the simulator on small traces whose results can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.core.values import Priority
from quire.errors import InvalidRequest
from quire.sim.simulator import MACHINES, Outcome, SimConfig, SimReport, StepTime, percentile, simulate
from quire.sim.traces import SCENARIOS, TraceRequest, mixed

SECOND = StepTime(base_ms=1000, token_us=0, context_us=0)


def test_one_request_takes_a_step_a_token() -> None:
    report = simulate([TraceRequest(3.0, 10, 4)], SimConfig(), SECOND)
    (record,) = report.records
    assert (record.wait_s, record.ttft_s, record.finish_s, record.num_outputs) == (0.0, 1.0, 7.0, 4)
    assert report.num_steps == 4
    assert report.makespan_s == 7.0
    assert report.output_tokens_per_s == pytest.approx(4 / 7)


def test_step_time_counts_tokens_and_context() -> None:
    slow = StepTime(base_ms=0, token_us=1_000_000, context_us=0)
    assert simulate([TraceRequest(0, 10, 2)], SimConfig(), slow).makespan_s == 11.0
    reading = StepTime(base_ms=1000, token_us=0, context_us=1_000_000)
    assert simulate([TraceRequest(0, 10, 2)], SimConfig(), reading).makespan_s == 2 + 10 + 11


def test_a_request_that_arrives_during_a_step_waits_for_the_next_plan() -> None:
    report = simulate([TraceRequest(0, 10, 10), TraceRequest(0.5, 10, 1)], SimConfig(), SECOND)
    second = report.records[1]
    # Step 2 is planned when step 1 starts, at 0 s. Step 3 is planned when step 2 starts, at 1 s, and ends at 3 s.
    assert second.wait_s == 0.5
    assert second.ttft_s == 2.5


def test_equal_names_share_a_prefix_and_answers_can_be_continued() -> None:
    first = TraceRequest(0, 100, 50, shared=(("system", 100),), output="answer")
    second = TraceRequest(1000, 200, 1, shared=(("system", 100), ("answer", 50)))
    report = simulate([first, second], SimConfig(), SECOND)
    assert report.cache.num_hit_tokens == 149  # all but the answer's last token, which has no KV
    assert simulate([first, second], SimConfig(enable_prefix_caching=False), SECOND).cache.num_hit_tokens == 0


def p95_ttft_s(report: SimReport, priority: Priority, tenant: str = "") -> float:
    found = percentile([one.ttft_s for one in report.tier(priority) if one.tenant == tenant and one.ttft_s], 0.95)
    assert found is not None
    return found


def test_a_low_backlog_does_not_delay_high_under_fair() -> None:
    """Uses the step times of a CPU. HIGH requests alone have a TTFT of at most 0.3 s on that machine."""
    machine = MACHINES["cpu-smollm2-135m"]
    trace = SCENARIOS["backlog"](150, 5.0, 1)
    config = SimConfig(num_blocks=4096, has_costly_rows=machine.has_costly_rows)
    fair, aging = (
        simulate(trace, replace(config, scheduling_policy=name), machine.step_time) for name in ("fair", "aging")
    )
    alone = simulate([one for one in trace if one.priority is Priority.HIGH], config, machine.step_time)
    assert p95_ttft_s(fair, Priority.HIGH) < 3 * p95_ttft_s(alone, Priority.HIGH)
    assert p95_ttft_s(aging, Priority.HIGH) > 50 * p95_ttft_s(alone, Priority.HIGH)
    assert fair.output_tokens_per_s > 0.9 * aging.output_tokens_per_s


def test_low_is_served_while_high_saturates_the_machine_and_tenants_share_a_tier() -> None:
    step_time = MACHINES["h200-llama3-8b"].step_time
    config = SimConfig(num_blocks=4096, max_num_seqs=16)
    trace = SCENARIOS["saturated"](300, 40.0, 1)
    fair, fcfs = (simulate(trace, replace(config, scheduling_policy=name), step_time) for name in ("fair", "fcfs"))
    assert p95_ttft_s(fair, Priority.LOW) < p95_ttft_s(fcfs, Priority.LOW) / 2
    trace = SCENARIOS["tenants"](300, 40.0, 1)
    fair, fcfs = (simulate(trace, replace(config, scheduling_policy=name), step_time) for name in ("fair", "fcfs"))
    person = (p95_ttft_s(report, Priority.NORMAL, "person") for report in (fair, fcfs))
    assert next(person) < next(person) / 5


def test_a_disconnected_client_cancels_its_waiting_or_running_request() -> None:
    trace = [TraceRequest(0, 10, 100, cancel_after_s=5.0), TraceRequest(0, 10, 100, cancel_after_s=0.0)]
    report = simulate(trace, SimConfig(max_num_seqs=1), SECOND)
    assert [record.outcome for record in report.records] == [Outcome.LEFT, Outcome.LEFT]
    assert report.records[0].num_outputs in (4, 5)
    assert report.records[1].num_outputs == 0
    assert report.makespan_s < 10


def test_requests_that_cannot_fit_are_refused_and_counted() -> None:
    report = simulate([TraceRequest(0, 10_000, 1), TraceRequest(0, 10, 1)], SimConfig(num_blocks=10), SECOND)
    assert [record.outcome for record in report.records] == [Outcome.TOO_LONG, Outcome.FINISHED]
    assert report.records[1].finish_s == 1.0
    limited = simulate([TraceRequest(0, 64, 5)], SimConfig(max_model_len=50), SECOND)
    assert [record.outcome for record in limited.records] == [Outcome.TOO_LONG]
    full = simulate([TraceRequest(0, 10, 9)] * 3, SimConfig(max_num_seqs=1, max_waiting=1), SECOND)
    assert [record.outcome for record in full.records] == [Outcome.FINISHED, Outcome.QUEUE_FULL, Outcome.QUEUE_FULL]


def test_an_answer_cut_by_the_context_is_reported_as_cut() -> None:
    report = simulate([TraceRequest(0, 100, 500)], SimConfig(num_blocks=5), SECOND)
    (record,) = report.records
    assert (record.outcome, record.num_outputs) == (Outcome.CUT, 28)


def test_tpot_excludes_the_first_token() -> None:
    (record,) = simulate([TraceRequest(0, 10, 4)], SimConfig(), SECOND).records
    assert record.tpot_s == 1.0
    (record,) = simulate([TraceRequest(0, 10, 1)], SimConfig(), SECOND).records
    assert record.tpot_s is None


def test_a_smaller_pool_has_fewer_hits_and_answers_every_request() -> None:
    trace = mixed(150, 20.0, 0)
    small, large = (
        simulate(trace, SimConfig(num_blocks=blocks), MACHINES["h200-llama3-8b"].step_time) for blocks in (300, 4096)
    )
    assert small.cache.hit_rate < large.cache.hit_rate
    assert small.num_preemptions > large.num_preemptions == 0
    for report in (small, large):
        assert [record.num_outputs for record in report.records] == [request.output_tokens for request in trace]
        assert len(report.timeline) <= 4000
        assert report.cache.num_free == report.cache.num_blocks


def test_progress_ends_at_the_number_of_requests() -> None:
    seen: list[int] = []
    simulate(mixed(50, 20.0, 0), SimConfig(), MACHINES["h200-qwen3-0.6b"].step_time, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 50


@pytest.mark.parametrize(
    ("times", "message"),
    [((-1, 1, 1), "base_ms = -1"), ((1, float("nan"), 1), "token_us = nan"), ((0, 0, 1), "no time")],
)
def test_impossible_step_times_are_refused(times: tuple[float, float, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StepTime(*times)


def test_percentiles_are_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([1, 2], 0.5) == 1
    assert percentile(list(range(1, 101)), 0.5) == 50
    assert percentile(list(range(1, 101)), 0.95) == 95
