"""Replicas on a real Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scale.rig import Cluster, deployed

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def cluster(default_model: Path) -> Iterator[Cluster]:
    del default_model  # is here now
    with deployed({"num_blocks": 400}) as cluster:
        yield cluster


def test_a_conversation_stays_with_its_replica(cluster: Cluster) -> None:
    answer = cluster.chat(QUESTION, temperature=0, max_tokens=16, ignore_eos=False).json
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    for _ in range(4):
        again = cluster.chat(QUESTION, temperature=0, max_tokens=16, ignore_eos=False).json
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert sorted(one["num_routed"] for one in cluster.replicas()) == [0, 5]
