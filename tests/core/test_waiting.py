"""Tests of the waiting queue."""

from random import Random

import pytest

from quire.core.policy import Aging, ArrivalLane, WaitingQueue
from quire.core.request import Request
from quire.core.values import Priority
from quire.errors import QueueFull
from tests.core.helpers import NS, make_request


def test_order_is_by_key_across_tiers_and_by_arrival_within_a_tier() -> None:
    random = Random(5)
    policy = Aging(patience_s=2)
    queue = WaitingQueue(policy.make_lane, max_requests=10_000)
    alive: list[Request] = []
    for sequence in range(800):
        request = make_request(sequence, 1)
        request.sequence = sequence
        request.enqueued_ns = random.randint(0, 5) * NS
        request.priority = random.choice(list(Priority))
        queue.push(request)
        alive.append(request)
        if random.random() < 0.5:
            gone = alive.pop(random.randrange(len(alive)))
            queue.remove(gone)
            assert gone not in queue
    while (first := queue.head()) is not None:
        key, head = first
        lanes = {tier: [r for r in alive if r.priority is tier] for tier in Priority}
        smallest = {tier: min((policy.key(r), r.sequence) for r in lane) for tier, lane in lanes.items() if lane}
        tier = min(smallest, key=lambda tier: smallest[tier])
        assert (key, head) == (smallest[tier], lanes[tier][0])
        queue.remove(head)
        alive.remove(head)
    assert not alive
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_cancelled_entries_are_removed_from_the_heaps() -> None:
    queue = WaitingQueue(Aging().make_lane, max_requests=10)
    first = make_request(0, 1)
    queue.push(first)
    for request_id in range(1, 5_000):
        request = make_request(request_id, 1)
        request.sequence = request_id
        queue.push(request)
        queue.remove(request)
    lane = queue._lanes[first.priority]
    assert isinstance(lane, ArrivalLane)
    assert len(lane._by_key._heap) < 50
    assert len(lane._by_arrival._heap) < 50
    head = queue.head()
    assert head is not None
    assert head[1] is first


def test_the_limit_applies_to_arrivals_only() -> None:
    queue = WaitingQueue(Aging().make_lane, max_requests=1)
    queue.check_room()
    queue.push(make_request(1, 3))
    with pytest.raises(QueueFull, match="1 requests are waiting"):
        queue.check_room()
    queue.push(make_request(2, 3))  # a preempted request is always queued
    assert len(queue) == 2
    assert queue.num_tokens == 6


def test_load_waiters_wait_in_groups() -> None:
    queue = WaitingQueue(Aging(patience_s=2).make_lane, max_requests=10)
    first, second, third = (make_request(number, 3) for number in range(3))
    for sequence, request in enumerate((first, second, third)):
        request.sequence = sequence
        queue.push(request)
    queue.park_for_load(first, load_id=7)
    queue.park_for_load(third, load_id=7)
    queue.park_for_load(second, load_id=8)
    assert (len(queue), queue.num_tokens, queue.head()) == (3, 9, None)
    assert list(queue.load_waiters) == [first, third, second]
    assert set(queue) == {first, second, third}
    assert queue.load_waiters.group_of(third) == 7
    assert queue.num_prefix_waiters(first) == 3
    assert queue.num_ready(Priority.NORMAL) == 0
    queue.remove(first)
    assert first not in queue.load_waiters
    assert (len(queue), queue.num_tokens, queue.num_prefix_waiters(second)) == (2, 6, 2)
    assert queue.unpark_load(7) == [third]
    assert queue.unpark_load(7) == []
    assert queue.head() == ((third.enqueued_ns + 2 * NS, 2), third)
    assert third not in queue.load_waiters
    queue.remove(second)
    assert queue.unpark_load(8) == []
    assert (len(queue.load_waiters), queue.num_prefix_waiters(second)) == (0, 0)
