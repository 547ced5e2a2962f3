"""Tests of the waiting queue."""

from random import Random

import pytest

from quire.core.cache import KeyedHeap
from quire.core.policy import Aging, WaitingQueue
from quire.errors import QueueFull
from tests.core.helpers import make_request


def test_a_heap_gives_its_items_in_order_and_forgets_those_that_were_removed() -> None:
    random, heap = Random(5), KeyedHeap[int, int]()
    keys: dict[int, int] = {}
    for _ in range(5_000):
        item = random.randrange(20)
        if item in keys and random.random() < 0.5:
            heap.remove(item)
            del keys[item]
        else:
            keys[item] = random.randrange(100)
            heap.push(keys[item], item)
        assert (set(heap), len(heap)) == (set(keys), len(keys))
        if keys:
            assert heap.first()[0] == min(keys.values()) == keys[heap.first()[1]]
    assert len(heap._heap) < 60


def test_the_limit_applies_to_arrivals_only() -> None:
    queue = WaitingQueue(Aging().make_lane, max_requests=1)
    queue.check_room()
    queue.push(make_request(1, 3))
    with pytest.raises(QueueFull, match="1 requests are waiting"):
        queue.check_room()
    queue.push(make_request(2, 3))  # a preempted request is always queued
    assert len(queue) == 2
    assert queue.num_tokens == 6
