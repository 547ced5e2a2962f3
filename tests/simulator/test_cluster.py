"""Several simulated replicas behind a router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.core.values import Priority
from quire.scale.routing import ReplicaLoad
from quire.sim.cluster import (
    REPORT_S,
    ROUTERS,
    ByPrefix,
    ClusterReport,
    simulate_cluster,
)
from quire.sim.simulator import MACHINES, Outcome, SimConfig, simulate
from quire.sim.traces import TraceRequest, tree

STEP_TIME = MACHINES["h200-llama3-8b"].step_time
CONFIG = SimConfig(num_blocks=1200)
TREE = tree(360, 40, 0)
FEW = TREE[:100]


def run(
    num_replicas: int, router: str, report_s: float = REPORT_S, trace: Sequence[TraceRequest] = TREE
) -> ClusterReport:
    return simulate_cluster(trace, CONFIG, STEP_TIME, num_replicas, router, report_s=report_s)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.kept("prefix")
def test_one_replica_is_the_plain_simulation(router: str) -> None:
    alone = simulate(FEW, CONFIG, STEP_TIME)
    assert run(1, router, trace=FEW).records == alone.records


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_answered_once(router: str) -> None:
    report = run(3, router, trace=FEW)
    assert {record.outcome for record in report.records} == {Outcome.FINISHED}
    assert sum(report.num_requests) == len(FEW)
    assert all(record.num_outputs == one.output_tokens for record, one in zip(report.records, FEW, strict=True))


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.kept("2")
def test_prefixes_are_found_again_as_on_one_machine_and_the_load_is_shared(num_replicas: int) -> None:
    whole = replace(CONFIG, num_blocks=num_replicas * CONFIG.num_blocks, max_num_seqs=64 * num_replicas)
    expected = simulate_cluster(TREE, whole, STEP_TIME, 1, "round-robin").hit_tokens
    report = run(num_replicas, "prefix")
    assert report.hit_tokens >= 0.95 * expected
    assert report.imbalance < 1.2
    assert run(num_replicas, "round-robin").hit_tokens < report.hit_tokens


@pytest.mark.nightly
def test_old_reports_cost_hits_but_nothing_else() -> None:
    fresh, old = run(4, "prefix", report_s=0.1), run(4, "prefix", report_s=60)
    assert old.hit_tokens < fresh.hit_tokens
    assert {record.outcome for record in old.records} == {Outcome.FINISHED}


def test_salts_share_nothing() -> None:
    shared = (("system", 640),)
    trace = [
        TraceRequest(2.0 * number, 700, 10, shared, salt="ab"[number % 2], session=f"user {number}")
        for number in range(8)
    ]
    report = simulate_cluster(trace, CONFIG, STEP_TIME, 2, "prefix")
    assert [record.num_hit_tokens > 600 for record in report.records] == [False, False] + [True] * 6
    assert sorted(report.num_requests) == [4, 4]


def test_an_index_of_few_blocks_still_routes() -> None:
    router = ByPrefix(max_blocks=10)
    chosen = [router(number, one, [ReplicaLoad()] * 2) for number, one in enumerate(TREE[:20])]
    assert {*chosen} == {0, 1}


def test_high_requests_avoid_each_other_and_not_the_backlog() -> None:
    backlog = [TraceRequest(0.0, 400, 200, priority=Priority.LOW) for _ in range(40)]
    urgent = [TraceRequest(1.0, 400, 20, priority=Priority.HIGH) for _ in range(8)]
    report = simulate_cluster([*backlog, *urgent], replace(CONFIG, max_num_seqs=8), STEP_TIME, 4, "prefix")
    waits = [record.wait_s for record in report.tier(Priority.HIGH)]
    assert max(wait for wait in waits if wait is not None) < 0.1


def test_prefixes_of_another_block_size_are_found() -> None:
    small = replace(CONFIG, block_size=16, num_blocks=2400)
    assert simulate_cluster(FEW, small, STEP_TIME, 2, "prefix").index_bytes > 0
    hits = [simulate_cluster(FEW, small, STEP_TIME, 2, name).hit_tokens for name in ("prefix", "round-robin")]
    assert hits[0] > hits[1]
