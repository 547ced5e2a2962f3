from random import Random

import pytest

from quire.core.policy import Aging
from quire.core.request import Priority
from quire.core.waiting import WaitingQueue
from quire.errors import InvalidRequest, QueueFull
from tests.core.helpers import NS, make_request


def test_order_is_the_policy_key_then_arrival_through_any_cancels() -> None:
    random = Random(5)
    policy = Aging(patience_s=2)
    queue = WaitingQueue(policy, max_requests=10_000)
    alive = []
    for sequence in range(2_000):
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
    popped = []
    while (head := queue.head()) is not None:
        popped.append(head)
        queue.remove(head)
    assert popped == sorted(alive, key=lambda r: (policy.key(r), r.sequence))
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_cancelled_entries_do_not_pile_up() -> None:
    queue = WaitingQueue(Aging(), max_requests=10)
    first = make_request(0, 1)
    queue.push(first)
    for request_id in range(1, 5_000):
        request = make_request(request_id, 1)
        request.sequence = request_id
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 50
    assert queue.head() is first


def test_the_bound_is_for_arrivals() -> None:
    queue = WaitingQueue(Aging(), max_requests=1)
    queue.check_room()
    queue.push(make_request(1, 3))
    with pytest.raises(QueueFull, match="1 requests wait already"):
        queue.check_room()
    queue.push(make_request(2, 3))  # preempted work always finds its way back
    assert len(queue) == 2
    assert queue.num_tokens == 6


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_requests = 0"):
        WaitingQueue(Aging(), max_requests=0)
