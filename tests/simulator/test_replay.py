"""Tests of fitted step times, figures of a replay, and traces from logs."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from quire.core.values import Priority
from quire.engine.worker.log_lines import JsonFormatter
from quire.errors import InvalidRequest, TraceError
from quire.server.observability.logs import request_fields
from quire.server.observability.metrics import RequestRecord
from quire.sim.replay import Ending, Fit, Probe, Served, Spread, fit, measured, predicted, prepare, probe_work
from quire.sim.server_log import read_log
from quire.sim.simulator import SimConfig, StepTime, simulate
from quire.sim.traces import TraceRequest, read_trace

CONFIG = SimConfig(num_blocks=500, max_num_seqs=16, max_num_batched_tokens=256, max_chunk_tokens=128)
SHAPES = [(8, 1, 1), (8, 33, 1), (512, 1, 1), (512, 33, 1), (8, 33, 8)]
STEP = StepTime(base_ms=4.0, token_us=150.0, context_us=2.5)


def probes(step: StepTime, overhead_s: float) -> list[Probe]:
    found = []
    for shape in SHAPES:
        steps, tokens, context = probe_work(*shape, CONFIG)
        took_s = overhead_s + steps * step.base_ms / 1e3 + (tokens * step.token_us + context * step.context_us) / 1e6
        found.append(Probe(steps, tokens, context, took_s))
    return found


# Fitting


def test_step_times_without_noise_are_recovered_exactly() -> None:
    found = fit(probes(STEP, 0.003))
    assert found.step_time.base_ms == pytest.approx(4.0)
    assert found.step_time.token_us == pytest.approx(150.0)
    assert found.step_time.context_us == pytest.approx(2.5)
    assert found.overhead_s == pytest.approx(0.003)
    assert found.worst == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("step", "overhead_s"),
    [(StepTime(5.0, 0.0, 0.0), 0.0), (StepTime(0.0, 900.0, 0.0), 0.0), (StepTime(1.0, 10.0, 0.0), 0.02)],
)
def test_zero_costs_are_recovered_as_zero(step: StepTime, overhead_s: float) -> None:
    found = fit(probes(step, overhead_s))
    assert found.step_time.base_ms == pytest.approx(step.base_ms, abs=1e-6)
    assert found.step_time.token_us == pytest.approx(step.token_us, abs=1e-3)
    assert found.overhead_s == pytest.approx(overhead_s, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_produces_negative_costs(seed: int) -> None:
    """The fit minimises the relative error, so its error is not much larger than the noise."""
    random = Random(seed)
    noisy = [replace(one, took_s=one.took_s * random.uniform(0.8, 1.25)) for one in probes(STEP, 0.003) * 2]
    found = fit(noisy)
    assert min(found.overhead_s, found.step_time.base_ms, found.step_time.token_us, found.step_time.context_us) >= 0
    assert found.worst <= 0.6
    assert found.step_time.token_us == pytest.approx(150.0, rel=0.8)


def test_a_fitted_step_never_takes_zero_time() -> None:
    found = fit([Probe(1, 8, 8, 0.01), Probe(33, 40, 800, 0.01)])  # 32 more steps in the same time
    assert found.step_time.base_ms + found.step_time.token_us > 0


@pytest.mark.parametrize("shape", [*SHAPES, (300, 5, 1), (1, 2, 3)])
def test_the_work_of_a_probe_matches_the_scheduler(shape: tuple[int, int, int]) -> None:
    """Sets one cost at a time, so that simulated time counts steps, tokens and context separately."""
    prompt, outputs, num_requests = shape
    trace = [TraceRequest(0.0, prompt, outputs) for _ in range(num_requests)]
    steps, tokens, context = probe_work(*shape, CONFIG)
    assert simulate(trace, CONFIG, StepTime(1.0, 0.0, 0.0)).makespan_s == pytest.approx(steps * 1e-3)
    assert simulate(trace, CONFIG, StepTime(0.0, 1.0, 0.0)).makespan_s == pytest.approx(tokens * 1e-6)
    both = simulate(trace, CONFIG, StepTime(1.0, 0.0, 1.0)).makespan_s
    assert both - steps * 1e-3 == pytest.approx(context * 1e-6)


# Figures


def served(due_s: float, ttft_s: float | None, took_s: float, ending: Ending = Ending.FINISHED) -> Served:
    return Served(
        Priority.NORMAL,
        due_s=due_s,
        sent_s=due_s + 0.5,
        end_s=due_s + 0.5 + took_s,
        ending=ending,
        ttft_s=ttft_s,
        num_outputs=10 if ttft_s else 0,
        num_prompt_tokens=100 if ending is Ending.FINISHED else 0,
        num_cached_tokens=40 if ending is Ending.FINISHED else 0,
    )


def test_measured() -> None:
    found = measured(
        [
            served(0, 0.1, 1.0),
            served(1, 0.3, 2.0),
            served(2, 0.2, 9.0, Ending.LEFT),
            served(3, None, 0, Ending.REFUSED),
        ],
        num_preemptions=3,
        num_steps=None,
    )
    assert found.endings == {"finished": 2, "left": 1, "refused": 1, "failed": 0}
    assert found.ttft_s == Spread(0.2, 0.3, 0.3)  # of all requests with a first token
    assert found.e2e_s == Spread(1.0, 2.0, 2.0)  # of finished requests only
    assert found.makespan_s == 11.5
    assert found.output_tokens_per_s == pytest.approx(30 / 11.5)
    assert found.hit_rate == 80 / 198  # the last token of a prompt is not looked up
    assert (found.num_preemptions, found.num_steps) == (3, None)


def test_measured_without_served_requests() -> None:
    found = measured([served(0, None, 0.0, Ending.REFUSED)], num_preemptions=None, num_steps=None)
    assert (found.hit_rate, found.ttft_s.p50, found.output_tokens_per_s) == (None, None, 0.0)


def test_predicted_adds_the_overhead_to_simulated_times() -> None:
    trace = [
        TraceRequest(0.0, 64, 5),
        TraceRequest(1.0, 64, 5, cancel_after_s=0.001),
        TraceRequest(2.0, 10**6, 5),  # can never fit
    ]
    report = simulate(trace, CONFIG, StepTime(10.0, 0.0, 0.0))
    found = predicted(report, 0.5)
    assert found.endings == {"finished": 1, "left": 1, "refused": 1, "failed": 0}
    assert found.ttft_s.p50 == pytest.approx(0.51)
    assert found.e2e_s.p50 == pytest.approx(0.55)
    assert found.num_steps == report.num_steps


def test_the_simulator_enforces_max_model_len() -> None:
    report = simulate([TraceRequest(0.0, 64, 5)], replace(CONFIG, max_model_len=50), STEP)
    assert predicted(report, 0.0).endings["refused"] == 1


def test_prepare() -> None:
    trace = [TraceRequest(3.0, 5, 5), TraceRequest(4.0, 5, 5, cancel_after_s=8.0), TraceRequest(9.0, 5, 5)]
    found = prepare(trace, speed=2.0, max_requests=2)
    assert [one.arrival_s for one in found] == [0.0, 0.5]
    assert found[1].cancel_after_s == 8.0  # not scaled by speed
    for wrong in ({"speed": 0.0, "max_requests": None}, {"speed": 1.0, "max_requests": 0}):
        with pytest.raises(InvalidRequest, match=r"speed = 0.0|max_requests = 0"):
            prepare(trace, **wrong)


def test_a_fit_can_be_replaced_in_parts() -> None:
    found = Fit(STEP, 0.1, 0.2)
    assert replace(found, step_time=replace(found.step_time, base_ms=1.0)).step_time == StepTime(1.0, 150.0, 2.5)


# Traces from logs

RECORD = RequestRecord(
    request_id="req_1",
    endpoint="/v1/chat/completions",
    model="m",
    key_name="alice",
    priority=Priority.HIGH,
    is_streaming=True,
    num_prompts=1,
    n=1,
    max_tokens=64,
    prompt_tokens=120,
    cached_tokens=96,
    completion_tokens=20,
    cache_reason="diverged",
    queued_s=0.0,
    ttft_s=0.1,
    prefill_s=0.1,
    decode_s=0.4,
    e2e_s=0.5,
    finish="stop",
)


def log_line(record: RequestRecord, at_s: float) -> str:
    """A log line in the format of the server."""
    entry = logging.LogRecord("quire.request", logging.INFO, "", 0, "x", None, None)
    entry.created, entry.msecs = at_s, at_s % 1 * 1000
    entry.fields = request_fields(record)
    return JsonFormatter().format(entry) + "\n"


def test_a_trace_from_a_log(tmp_path: Path) -> None:
    """A line is written when a request ends, so its arrival is that time minus the duration."""
    path = tmp_path / "server.log"
    path.write_text(
        "quire serves m at http://127.0.0.1:8000\n"
        + log_line(RECORD, 1000.5)
        + json.dumps({"logger": "quire.server", "message": "something else"})
        + "\n"
        + log_line(replace(RECORD, e2e_s=4.0, priority=Priority.LOW), 1003.0)  # arrived first
        + log_line(replace(RECORD, finish="cancelled", e2e_s=2.0, completion_tokens=3), 1004.0)
        + log_line(replace(RECORD, finish="error", error="died"), 1005.0)
    )
    found = read_log(str(path))
    assert found.num_left_out == 1
    assert found.requests == [
        TraceRequest(0.0, 120, 20, priority=Priority.LOW),
        TraceRequest(1.0, 120, 20, priority=Priority.HIGH),
        TraceRequest(3.0, 120, 64, priority=Priority.HIGH, cancel_after_s=2.0),  # would have generated up to max_tokens
    ]
    again = tmp_path / "day.jsonl"
    again.write_text("".join(f"{one.as_line()}\n" for one in found.requests))
    assert read_trace(str(again)) == found.requests


def test_samples_of_one_prompt_share_it(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(log_line(replace(RECORD, n=3, num_prompts=2, prompt_tokens=200, completion_tokens=60), 7.0))
    found = read_log(str(path)).requests
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(100, 10)] * 6
    assert len({one.shared for one in found}) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no served requests found"),
        ('{"logger": "quire.request", "message": "request"}\n', "line 1: not a request record: KeyError 'finish'"),
        (log_line(RECORD, 5.0).replace('"prompt_tokens": 120', '"prompt_tokens": -1'), "prompt_tokens = -1 is not"),
        (log_line(RECORD, 5.0).replace('"tier": "high"', '"tier": "top"'), "line 1: not a request record: KeyError"),
        (log_line(RECORD, 5.0).replace('"n": 1', '"n": 99999'), "n = 99999 is more than"),
    ],
)
def test_an_invalid_log_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(line)
    with pytest.raises(TraceError, match=message):
        read_log(str(path))
    with pytest.raises(TraceError, match="No such file"):
        read_log(str(tmp_path / "nowhere"))
