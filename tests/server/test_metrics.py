"""The exposition, read back with Prometheus's parser, and the dashboard docs/grafana.json, which uses its series."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from quire.backends.base import Capacity, RunnerFacts
from quire.core.cache import PoolStats, StateStats
from quire.core.kv_cache import CacheStats
from quire.core.values import FinishReason, Priority
from quire.engine.generation import EngineOutput
from quire.engine.worker.protocol import Ready, Stats, Stepped, TierStats
from quire.server.admin import _take_metrics
from quire.server.errors import ApiError, Kind
from quire.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, REASONS, VLLM, Exposition, Metrics, RequestRecord
from tests.server.rig import FAKE, serving

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
READY = Ready(
    capacity=Capacity(num_blocks=65, block_size=32, max_num_seqs=8, max_model_len=2048, vocab_size=100),
    max_model_len=1024,
    facts=RunnerFacts("torch 2", "cpu", "float32", 2),
    timings_s={},
)
CACHE = CacheStats(
    num_blocks=64,
    num_free=40,
    num_cached=30,
    num_in_use=24,
    num_shared=5,
    num_evictions=7,
    num_pins=1,
    num_pinned=3,
    num_queried_tokens=1000,
    num_hit_tokens=600,
    num_recovered_tokens=0,
    num_partial_hits=0,
    num_adoptions=0,
    num_twins=0,
    num_collisions=0,
)
STATS = Stats(
    cache=CACHE,
    num_running=4,
    num_waiting=3,
    tiers=(TierStats(0, 0, 0.0), TierStats(2, 500, 1.5), TierStats(1, 900, 30.0)),
    num_preemptions=2,
    num_steps=50,
    num_violations=0,
)
RECORD = RequestRecord(
    id="req_1",
    endpoint="/v1/chat/completions",
    model="m",
    key="alice",
    tier="normal",
    num_samples=1,
    finished_at=1000.0,
    is_streaming=True,
    num_prompts=1,
    n=1,
    max_tokens=64,
    prompt_tokens=120,
    cached_tokens=96,
    completion_tokens=21,
    cache_reason="diverged",
    cache_source="disk",
    queued_s=0.5,
    ttft_s=0.7,
    prefill_s=0.2,
    decode_s=2.0,
    duration_s=2.75,
    tokens_per_s=10.0,
    finish="stop",
    error=None,
)


def worker(num_restarts: int, *, is_moving: bool, facts: Ready | None = READY) -> Any:
    return SimpleNamespace(num_restarts=num_restarts, is_moving=is_moving, facts=facts, replica_statuses=())


def text(metrics: Metrics, stats: Stats | None = STATS, *, num_restarts: int = 0, is_moving: bool = True) -> str:
    metrics.take(stats, worker(num_restarts, is_moving=is_moving))
    return generate_latest(metrics.exposition).decode()


def families(exposition: str) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(exposition))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def value(exposition: str, name: str, **labels: str) -> float:
    wanted = {"model_name": "m", "engine": "0", **labels}
    (found,) = [
        sample.value
        for family in families(exposition).values()
        for sample in family.samples
        if sample.name == name and sample.labels == wanted
    ]
    return found


def output(num_tokens: int) -> EngineOutput:
    return EngineOutput(1, tuple(range(num_tokens)), FinishReason.STOP, 0, None, (), None, None)


def test_gauges_show_the_workers_stats() -> None:
    found = text(Metrics("m"))
    assert value(found, "quire:num_requests_running") == 4
    assert value(found, "quire:num_requests_waiting") == 3
    assert value(found, "quire:kv_cache_usage_perc") == 24 / 64
    states = {
        state: value(found, "quire:kv_blocks", state=state)
        for state in ("free", "cached", "in_use", "shared", "pinned")
    }
    assert states == {"free": 10, "cached": 30, "in_use": 24, "shared": 5, "pinned": 3}
    assert states["free"] + states["cached"] + states["in_use"] == CACHE.num_blocks
    assert value(found, "quire:queue_age_seconds", tier="low") == 30.0
    assert value(found, "quire:queue_requests", tier="normal") == 2
    assert value(found, "quire:queue_tokens", tier="normal") == 500
    assert value(found, "quire:engine_moving") == 1
    labels = families(found)["quire:cache_config_info"].samples[0].labels
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["max_model_len"]) == ("32", "64", "1024")


def test_window_blocks_and_states_are_shown_if_the_model_has_them() -> None:
    found = text(Metrics("m"))
    assert "quire:window_blocks{" not in found
    assert "quire:recurrent_states{" not in found
    cache = replace(
        CACHE,
        num_recomputed_tokens=70,
        windows=PoolStats(num_blocks=20, num_free=15, num_cached=9, num_in_use=5, num_evictions=4),
        states=StateStats(num_slots=12, num_free=2, num_cached=7, num_in_use=3, num_snapshots=8, num_evictions=6),
    )
    found = text(Metrics("m"), msgspec.structs.replace(STATS, cache=cache))
    states = ("free", "cached", "in_use")
    assert [value(found, "quire:window_blocks", state=state) for state in states] == [6, 9, 5]
    assert [value(found, "quire:recurrent_states", state=state) for state in states] == [2, 7, 3]
    assert value(found, "quire:window_evictions_total") == 4
    assert value(found, "quire:state_evictions_total") == 6
    assert value(found, "quire:prefix_cache_recomputed_total") == 70


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_a_model_that_is_unloaded_while_its_worker_is_asked_keeps_its_last_figures(is_unloaded: bool) -> None:
    """The unloading has taken them, and the answer may be older."""
    taken: list[object] = []
    model: Any = SimpleNamespace()

    async def stats() -> Stats:
        if is_unloaded:
            model.service = None
        return STATS

    model.service = SimpleNamespace(client=SimpleNamespace(stats=stats))
    model.metrics = SimpleNamespace(take_model_state=lambda _: None, take=lambda found, _: taken.append(found))
    asyncio.run(_take_metrics(model))
    assert taken == ([] if is_unloaded else [STATS])


def test_a_silent_worker_leaves_the_last_known_figures() -> None:
    metrics = Metrics("m")
    text(metrics)
    found = text(metrics, None, is_moving=False)
    assert value(found, "quire:num_requests_running") == 4
    assert value(found, "quire:engine_moving") == 0


def test_steps_and_tokens() -> None:
    metrics = Metrics("m")
    metrics.stepped(Stepped((output(1), output(1)), num_tokens=130, took_s=0.03))
    metrics.stepped(Stepped((output(2),), num_tokens=1, took_s=0.01))
    metrics.stepped(Stepped(()))  # a heartbeat
    metrics.tokens(0.5, 1)
    metrics.tokens(0.1, 3)
    found = text(metrics)
    assert value(found, "quire:generation_tokens_total") == 4
    assert value(found, "quire:iteration_tokens_total_count") == 2
    assert value(found, "quire:iteration_tokens_total_sum") == 131
    assert [*metrics.num_tokens] == [127, 4]  # of prompts and of answers
    assert value(found, "quire:iteration_tokens_total_bucket", le="1.0") == 1
    assert value(found, "quire:step_seconds_sum") == pytest.approx(0.04)
    assert value(found, "quire:inter_token_latency_seconds_count") == 4
    assert value(found, "quire:inter_token_latency_seconds_sum") == pytest.approx(0.8)
    assert value(found, "quire:inter_token_latency_seconds_bucket", le="0.15") == 3
    assert value(found, "quire:inter_token_latency_seconds_bucket", le="0.5") == 4
    assert value(found, "quire:inter_token_latency_seconds_bucket", le="+Inf") == 4


def test_a_finished_request() -> None:
    metrics = Metrics("m")
    metrics.started(Priority.LOW, 0.5)
    metrics.finished(RECORD)
    found = text(metrics)
    assert value(found, "quire:request_queue_time_seconds_sum") == 0.5
    assert value(found, "quire:queue_wait_seconds_count", tier="low") == 1
    assert value(found, "quire:queue_wait_seconds_count", tier="high") == 0
    assert value(found, "quire:prompt_tokens_total") == 120
    assert value(found, "quire:prompt_tokens_cached_total") == 96
    assert value(found, "quire:request_success_total", finished_reason="stop") == 1
    sums = {
        "time_to_first_token_seconds": 0.7,
        "e2e_request_latency_seconds": 2.75,
        "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.2,
        "request_time_per_output_token_seconds": 0.1,
        "request_prompt_tokens": 120,
        "request_generation_tokens": 21,
        "request_params_n": 1,
        "request_params_max_tokens": 64,
    }
    for name, total in sums.items():
        assert value(found, f"quire:{name}_sum") == pytest.approx(total), name
        assert value(found, f"quire:{name}_count") == 1, name


def test_parallel_answers_do_not_lower_the_time_per_token() -> None:
    metrics = Metrics("m")
    metrics.finished(msgspec.structs.replace(RECORD, num_samples=4, completion_tokens=84))
    assert value(text(metrics), "quire:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_a_request_that_never_started() -> None:
    metrics = Metrics("m")
    never = msgspec.structs.replace(
        RECORD, queued_s=None, ttft_s=None, prefill_s=None, decode_s=None, completion_tokens=0, max_tokens=None
    )
    metrics.finished(msgspec.structs.replace(never, finish="cancelled"))
    found = text(metrics)
    assert value(found, "quire:request_success_total", finished_reason="abort") == 1
    assert value(found, "quire:time_to_first_token_seconds_count") == 0
    assert value(found, "quire:request_inference_time_seconds_count") == 0
    assert value(found, "quire:request_params_max_tokens_count") == 0


def test_no_request_can_make_a_new_series() -> None:
    metrics = Metrics("m")
    before = len(re.findall(r"^[^#]", text(metrics), re.MULTILINE))
    for number in range(100):
        metrics.rejected(f"invented {number}")
        metrics.finished(msgspec.structs.replace(RECORD, finish=f"invented {number}", model=f"invented {number}"))
    found = text(metrics)
    assert len(re.findall(r"^[^#]", found, re.MULTILINE)) == before
    assert "invented" not in found
    assert value(found, "quire:requests_rejected_total", reason="other") == 100
    assert value(found, "quire:request_success_total", finished_reason="other") == 100


def test_every_kind_of_error_is_a_reason() -> None:
    metrics = Metrics("m")
    for kind in Kind:
        metrics.rejected(ApiError(kind, "text").reason)
    found = text(metrics)
    assert value(found, "quire:requests_rejected_total", reason="other") == 0
    assert all(value(found, "quire:requests_rejected_total", reason=kind.name.lower()) == 1 for kind in Kind)


def test_every_reason_in_the_sources_is_known() -> None:
    sources = (Path(__file__).parents[2] / "quire/server").rglob("*.py")
    named = {reason for path in sources for reason in re.findall(r'\breason="(\w+)"', path.read_text())}
    assert "queue_timeout" in named
    assert named <= REASONS


def test_counts_survive_the_worker() -> None:
    metrics = Metrics("m")

    def preemptions(num: int, num_restarts: int, num_steps: int) -> float:
        stats = msgspec.structs.replace(STATS, num_preemptions=num, num_steps=num_steps)
        return value(text(metrics, stats, num_restarts=num_restarts), "quire:num_preemptions_total")

    assert preemptions(2, 0, 50) == 2
    assert preemptions(5, 0, 60) == 5
    assert value(text(metrics, None, num_restarts=1), "quire:num_preemptions_total") == 5
    assert preemptions(0, 1, 3) == 5
    assert preemptions(4, 1, 70) == 9
    assert preemptions(6, 2, 90) == 15  # a third worker that has done more than the second
    assert preemptions(1, 2, 10) == 16  # fewer steps: a new worker, even with the same number of restarts
    found = text(metrics, None, num_restarts=3)
    assert value(found, "quire:worker_restarts_total") == 3
    assert value(found, "quire:kv_evictions_total") == 7 * 4


def test_the_mirror_exports_the_same_under_vllms_names() -> None:
    metrics = Metrics("m", exposition=Exposition("vllm"))
    metrics.finished(RECORD)
    metrics.tokens(0.02, 1)
    found = families(text(metrics))
    theirs = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert theirs == VLLM
    for name in theirs:
        ours, mirrored = found[f"quire:{name}"], found[f"vllm:{name}"]
        assert mirrored.type == ours.type
        assert [(one.name.removeprefix("vllm:"), one.labels, one.value) for one in mirrored.samples] == [
            (one.name.removeprefix("quire:"), one.labels, one.value) for one in ours.samples
        ]
    assert "vllm:" not in text(Metrics("m"))


@pytest.mark.parametrize("name", ['a"b\\c\nd', "\ud800", "模型", ""])
def test_a_model_may_have_any_name(name: str) -> None:
    found = families(text(Metrics(name)))
    labels = found["quire:num_requests_running"].samples[0].labels
    assert labels["model_name"] == name.encode("utf-8", "backslashreplace").decode()


def test_the_docs_and_the_output_have_the_same_names() -> None:
    exposed = set(re.findall(r"^# TYPE (\S+) ", text(Metrics("m", exposition=Exposition("vllm"))), re.MULTILINE))
    ours = {name for name in exposed if name.startswith("quire:")}
    page = PAGE.read_text()
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"quire:[a-z0-9_]+", page)}
    assert named == ours
    marked = {name.removeprefix("quire:") for name in re.findall(r"`(quire:\w+)` †", page)}
    assert marked == {name.removeprefix("vllm:") for name in exposed if name.startswith("vllm:")}


BOARD = Path(__file__).parents[2] / "docs/grafana.json"
COMMON = {"model_name", "engine"}
SELECTOR = re.compile(r"quire:(\w+)(?:\{([^}]*)\})?")


def board() -> dict[str, Any]:
    found = json.loads(BOARD.read_text())
    assert isinstance(found, dict)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def labels_of(series: str) -> set[str] | None:
    """The labels of a series besides the common ones; None if there is no such series."""
    known = {name: set(spec.labels) for name, spec in GAUGES.items()}
    known |= {f"{name}_total": set(spec.labels) for name, spec in COUNTERS.items()}
    for name, spec in HISTOGRAMS.items():
        known |= {f"{name}_{part}": set(spec.labels) for part in ("sum", "count")}
        known[f"{name}_bucket"] = {*spec.labels, "le"}
    return known.get(series)


def problems(expression: str) -> Iterator[str]:
    found = SELECTOR.findall(expression)
    if not found:
        yield f"{expression}: asks for nothing"
    grouped = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",") if label
    }
    for series, matchers in found:
        labels = labels_of(series)
        if labels is None:
            yield f"{series}: there is no such series"
            continue
        used = grouped | set(re.findall(r"(\w+)=", matchers))
        yield from (f"{series}: has no label {label}" for label in used - labels - COMMON)
        if 'model_name=~"$model_name"' not in matchers:
            yield f"{series}: of all models, whatever is chosen"
        is_counted = series.endswith(("_total", "_sum", "_count", "_bucket"))
        is_rated = re.search(rf"(rate|increase)\(quire:{series}\b", expression) is not None
        if is_counted != is_rated:
            yield f"{series}: a rate of a gauge, or a counter without one"
    if "histogram_quantile" in expression and "le" not in grouped:
        yield f"{expression}: a quantile over buckets that were added up"


def test_every_expression_uses_existing_series() -> None:
    assert len(expressions()) >= 40
    assert [problem for expression in expressions() for problem in problems(expression)] == []


def test_grafana_can_import_it() -> None:
    found = board()
    assert found["title"] == "quire"
    assert found["schemaVersion"] >= 36  # since this version, data sources are objects
    assert "id" not in found  # Grafana assigns one
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_a_server_exports_every_series(default_model: Path) -> None:
    """Every series of every panel, with the labels that select it, is in the first scrape."""
    del default_model  # is here now
    with serving(*FAKE) as server:
        assert server.chat().status == 200
        page = server.get("/metrics")
        assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(page.body.decode())
    samples = [sample for family in families for sample in family.samples]
    assert samples
    for expression in expressions():
        for series, matchers in SELECTOR.findall(expression):
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
            assert any(one.name == f"quire:{series}" and wanted.items() <= one.labels.items() for one in samples), (
                series
            )
