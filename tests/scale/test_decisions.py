"""What a cluster decides, without a cluster: the number of replicas, settings, and sums of figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from quire.core.kv_cache import CacheStats
from quire.engine.worker.protocol import Stats, TierStats
from quire.errors import InvalidRequest
from quire.scale.cluster_client import add_stats, counters_of
from quire.scale.config import (
    Autoscale,
    Figures,
    ModelDeployment,
    QueuePolicy,
    Resources,
    equal_share,
    parse_deployment,
    wanted_replicas,
)
from quire.server.metrics import Metrics

IDLE = Figures(0.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("current", "figures", "wanted"),
    [
        (1, [IDLE], 1),
        (1, [Figures(3.0, 100.0, 1.0)], 2),  # one waits too long
        (1, [Figures(1.0, 100.0, 1.0)], 1),
        (1, [Figures(0.5, 45_000.0, 1.0)], 5),  # as many as the waiting tokens need
        (2, [Figures(0.5, 9_000.0, 1.0), Figures(0.5, 9_000.0, 1.0)], 2),
        (3, [IDLE, IDLE, IDLE], 2),
        (3, [Figures(0.0, 0.0, 0.9)] * 3, 3),  # two would be too busy
        (3, [Figures(0.1, 10.0, 0.0)] * 3, 3),  # something waits
        (2, [], 1),
        (2, [Figures(3.0, 100.0, 1.0)], 2),  # one waits too long, but the second replica still loads
        (2, [Figures(3.0, 45_000.0, 1.0)], 5),
        (2, [Figures(3.0, 100.0, 1.0)] * 2, 3),
    ],
)
def test_how_many_replicas_are_wanted(current: int, figures: list[Figures], wanted: int) -> None:
    assert wanted_replicas(current, figures, queue_age_s=2.0, waiting_tokens=10_000) == wanted


@pytest.mark.parametrize(("figures", "wanted"), [(Figures(9.0, 900_000.0, 1.0), 3), (IDLE, 1), (Figures(0, 0, 1), 2)])
def test_the_policy_reads_the_last_figures_and_keeps_the_bounds(figures: Figures, wanted: int) -> None:
    series = {
        name: {"r": [SimpleNamespace(timestamp=1.0, value=5.0), SimpleNamespace(timestamp=2.0, value=value)]}
        for name, value in figures._asdict().items()
    }
    context = SimpleNamespace(
        target_num_replicas=2,
        running_replicas=["r", "just started"],
        raw_metrics=series,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
    )
    assert QueuePolicy(queue_age_s=2.0, waiting_tokens=10_000)(context) == (wanted, {})


@pytest.mark.parametrize(
    ("machines", "num_replicas", "share"),
    [
        ([2.0], 1, 2.0),
        ([2.0], 2, 1.0),
        ([2.0], 4, 0.5),
        ([2.0], 3, 0.6666),
        ([8.0, 8.0, 8.0], 2, 8.0),  # a replica runs on one machine
        ([8.0, 8.0, 8.0], 4, 4.0),
        ([64.0, 4.0], 2, 32.0),
        ([64.0, 4.0], 17, 4.0),
        ([0.0, 16.0], 3, 5.0),  # a head without CPUs
        ([0.0], 3, 1.0),
    ],
)
def test_an_equal_share_of_the_cpus(machines: list[float], num_replicas: int, share: float) -> None:
    assert equal_share(machines, num_replicas) == share


def test_settings_of_a_model_and_of_all() -> None:
    default = parse_deployment({"replicas": 2, "resources": {"gpus": 1, "memory": "2G"}})
    assert default == ModelDeployment(2, None, Resources(gpus=1, memory=2 << 30))
    assert parse_deployment({}, default) == default
    scaled = parse_deployment({"autoscale": {"min": 1, "max": 4, "queue-age": 1}}, default)
    assert (scaled.autoscale, scaled.max_replicas) == (Autoscale(1, 4, queue_age=1), 4)
    assert parse_deployment({"replicas": 3}, scaled).autoscale is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"replicas": True}, "replicas = True is not a whole number"),
        ({"autoscale": [1, 2]}, r"autoscale = \[1, 2\] is not a mapping"),
        ({"autoscale": {"maximum": 2}}, "autoscale.maximum: there is no such field"),
        ({"autoscale": {"queue_age": 0}}, "autoscale.queue_age = 0 is not a number above 0"),
        ({"resources": {"cpus": "two"}}, "resources.cpus = 'two' is not a number above 0"),
        ({"resources": {"gpus": -1}}, "resources.gpus = -1 is not a number of at least 0"),
        ({"resources": {"custom": ["a"]}}, r"resources.custom = \['a'\] is not a mapping of names to amounts"),
        ({"resources": {"custom": None}}, "resources.custom = None is not a mapping"),
        ({"resources": {"custom": {"GPU": 1}}}, "resources.custom.GPU: use resources.gpus"),
        ({"resources": {"custom": {"object_store_memory": 1}}}, "Ray does not accept such a name"),
        ({"resources": {"custom": {1: 1}}}, "resources.custom.1: Ray does not accept such a name"),
        ({"resources": {"custom": {"fast": "1"}}}, "resources.custom.fast = '1' is not a number above 0"),
        ({"resources": {"memory": "2 apples"}}, "resources.memory = '2 apples'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        parse_deployment(given)


def stats(**counts: int) -> Stats:
    cache = replace(CacheStats(), **counts)  # type: ignore[arg-type]
    return Stats(cache, 1, 2, (TierStats(1, 10, 0.5),) * 3, 4, 5, 0)


def test_figures_are_added_and_counts_of_replicas_that_left_stay() -> None:
    one, other = stats(num_blocks=10, num_hit_tokens=7), stats(num_blocks=20, num_hit_tokens=5)
    both = add_stats([one, other])
    assert (both.cache.num_blocks, both.cache.num_hit_tokens) == (30, 12)
    assert (both.num_running, both.num_waiting, both.num_steps) == (2, 4, 10)
    assert both.tiers[0] == TierStats(2, 20, 0.5)
    left = add_stats([counters_of(one), other])
    assert (left.cache.num_blocks, left.cache.num_hit_tokens, left.num_running, left.num_steps) == (20, 12, 1, 10)


def test_the_metrics_of_a_cluster_count_once() -> None:
    """A replica that left is in the sum: its counts must not be added again, as those of a new worker are."""
    metrics = Metrics("m")

    def cluster(num_restarts: int) -> Any:
        status = SimpleNamespace(name="r", num_requests=0, num_routed=1, num_blocks=4, num_free_blocks=4)
        status.num_queried_tokens = status.num_hit_tokens = 3
        return SimpleNamespace(num_restarts=num_restarts, is_moving=True, facts=None, replica_statuses=(status,))

    metrics.take(stats(), cluster(0))
    metrics.take(stats(), cluster(1))
    text = generate_latest(metrics.exposition).decode()
    assert 'quire:num_preemptions_total{engine="0",model_name="m"} 4.0' in text
    assert 'quire:worker_restarts_total{engine="0",model_name="m"} 1.0' in text
    assert 'quire:replica_requests_routed_total{engine="0",model_name="m",replica="r"} 1.0' in text
    left: Any = SimpleNamespace(num_restarts=1, is_moving=True, facts=None, replica_statuses=())
    metrics.take(stats(), left)
    assert 'replica="r"' not in generate_latest(metrics.exposition).decode()
