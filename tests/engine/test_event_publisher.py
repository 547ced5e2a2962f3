"""KV events over real sockets: batches, replay, slow subscribers, and caches that are not announced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from quire.backends.fake import FakeRunner
from quire.core.cache import hash_block_tokens, pack_tokens
from quire.core.kv_cache import KVCacheManager
from quire.core.values import Level
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.worker import event_publisher
from quire.engine.worker.event_publisher import EventPublisher, ReplayBuffer
from quire.engine.worker.kv_events import KvEventsConfig
from tests.engine import vllm_events as vllm
from tests.engine.serving import CAPACITY
from tests.engine.subscriber import Subscriber, routed
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.anyio

ANY = "tcp://127.0.0.1:0"
BOTH = KvEventsConfig(ANY, ANY, "kv@here@model")
SIZE = 4


@contextmanager
def publishing(config: KvEventsConfig = BOTH) -> Iterator[tuple[EventPublisher, KVCacheManager]]:
    """A publisher that follows a cache."""
    cache = KVCacheManager(50, SIZE)
    with closing(EventPublisher(config)) as publisher:
        publisher.start(cache)
        yield publisher, cache


def announce(publisher: EventPublisher, cache: KVCacheManager, first: int) -> None:
    """Announce one block in a batch of its own."""
    assert publisher.events is not None
    tokens, root = pack_tokens(range(first, first + SIZE)), cache.tree.root("")
    publisher.events.stored(Level.DEVICE, hash_block_tokens(root, tokens), root, tokens)
    publisher.flush()


def test_messages_are_topic_number_and_payload() -> None:
    with publishing() as (publisher, cache), Subscriber(publisher.endpoint, topic="kv@") as subscriber:
        subscriber.join(lambda: publisher.start(cache))
        for first in (0, 100, 200):
            announce(publisher, cache, first)
        publisher.flush()  # nothing has changed: no batch
        subscriber.receive_upto(publisher._next_number - 1)
        router = routed(subscriber.batches, SIZE)
        assert sorted(tokens for _, tokens in router.device.values()) == [
            tuple(range(first, first + SIZE)) for first in (0, 100, 200)
        ]
        assert subscriber.topics == {b"kv@here@model"}


def test_replay_sends_the_requested_batches_and_an_end() -> None:
    with publishing() as (publisher, cache):
        for first in range(10):
            announce(publisher, cache, 100 * first)
        with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            everything = subscriber.replay()
            assert len(everything) == 11  # with the clear at the start
            assert len(routed(everything, SIZE).device) == 10
            start = everything[0][0]
            assert subscriber.replay(start + 7) == everything[7:]
            assert subscriber.replay(start + 11) == []
            assert subscriber.replay(2**64 - 1) == []
            assert subscriber.topics == {b"kv@here@model"}


def test_a_req_socket_gets_the_first_batch() -> None:
    """vLLM's example uses REQ, which accepts one answer for each request."""
    with publishing() as (publisher, _), zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.RCVTIMEO, int(HANG_S * 1000))
        assert publisher.replay_endpoint is not None
        asking.connect(publisher.replay_endpoint)
        asking.send((0).to_bytes(8, "big"))
        topic, number, payload = asking.recv_multipart()
        assert (topic, len(number)) == (b"kv@here@model", 8)
        assert [type(event).__name__ for event in vllm.decode(payload).events] == ["AllBlocksCleared"]
        asking.setsockopt(zmq.LINGER, 0)


def test_invalid_replay_requests_are_ignored() -> None:
    with publishing() as (publisher, _), Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        assert subscriber._replay is not None
        for frames in ([b""], [b"", b"1"], [b"", b"\0" * 9], [b"\0" * 8], [b"", b"\0" * 8, b""]):
            subscriber._replay.send_multipart(frames)
        assert len(subscriber.replay()) == 1


def test_the_buffer_is_limited_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "MAX_BATCHES", 3)
    monkeypatch.setattr(event_publisher, "MAX_BATCH_BYTES", 100)
    buffer = ReplayBuffer()
    for number in range(5):
        buffer.append(number, b"x" * 10)
    assert [number for number, _ in buffer.since(0)] == [2, 3, 4]
    buffer.append(5, b"x" * 85)
    assert [number for number, _ in buffer.since(0)] == [4, 5]
    buffer.append(6, b"x" * 101)
    assert buffer.since(0) == []
    buffer.append(7, b"x")
    assert buffer.since(7) == [(7, b"x")]


def test_a_slow_subscriber_loses_batches_and_gets_them_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "MAX_QUEUED", 50)
    num_batches, payload = 3000, b"x" * 20_000  # 60 MB: more than the system's buffers of a connection
    with (
        publishing() as (publisher, cache),
        Subscriber(publisher.endpoint, publisher.replay_endpoint, max_queued=1) as subscriber,
    ):
        subscriber.join(lambda: publisher.start(cache))
        start = publisher._next_number
        for _ in range(num_batches):
            publisher._publish(payload)  # returns although nobody reads

        def has_gap() -> bool:
            """Read what has arrived. The last batches may be among the lost ones: only a further one shows the gap."""
            publisher._publish(payload)
            while subscriber.poll(20):
                subscriber.receive()
            numbers = [number for number, _ in subscriber.batches]
            return numbers[-1] - numbers[0] >= len(numbers)

        eventually(has_gap, "a gap in the sequence numbers")
        numbers = {number for number, _ in subscriber.batches}
        missed = next(number for number in range(start, start + num_batches) if number not in numbers)
        assert [number for number, _ in subscriber.replay(missed)] == [*range(missed, publisher._next_number)]


def test_a_client_that_asks_for_replays_without_reading_does_not_stop_others() -> None:
    with publishing() as (publisher, _):
        for _ in range(3000):
            publisher._publish(b"x" * 10_000)
        assert publisher.replay_endpoint is not None
        with (
            Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
            zmq.Context() as context,
            context.socket(zmq.DEALER) as greedy,
        ):
            greedy.setsockopt(zmq.LINGER, 0)
            greedy.setsockopt(zmq.RCVHWM, 1)
            greedy.connect(publisher.replay_endpoint)
            for _ in range(10):  # the queue for one client holds about three answers
                greedy.send_multipart([b"", b"\0" * 8])
            assert len(subscriber.replay()) == 3001
            subscriber.join(lambda: publisher._publish(b"x"))


def test_numbers_continue_above_those_of_an_earlier_worker() -> None:
    """A subscriber that stays connected must not take the batches of a new worker for old ones."""
    with publishing() as (publisher, cache):
        config = KvEventsConfig(publisher.endpoint, None, "kv")
        subscriber = Subscriber(publisher.endpoint)
        subscriber.join(lambda: publisher.start(cache))
        announce(publisher, cache, 0)
        subscriber.receive_upto(publisher._next_number - 1)
    with subscriber, publishing(config) as (publisher, cache):
        last = subscriber.batches[-1][0]
        blocks = iter(range(0, 10**6, SIZE))
        while subscriber.batches[-1][0] == last:
            announce(publisher, cache, next(blocks))
            if subscriber.poll(50):
                subscriber.receive()
        assert subscriber.batches[-1][0] > last


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (KVCacheManager(10, SIZE, num_states=9), "the model has layers with a window or a recurrent state"),
        (KVCacheManager(10, SIZE, window=8, num_window_blocks=9), "the model has layers with a window or a recurrent"),
        (KVCacheManager(10, SIZE, is_caching=False), "the prefix cache is off"),
    ],
)
def test_caches_that_routers_would_overrate_are_not_announced(cache: KVCacheManager, reason: str) -> None:
    with closing(EventPublisher(BOTH)) as publisher:
        status = publisher.start(cache)
        assert (status.silent_because or "").startswith(reason)
        assert cache.tree.on_change is None
        publisher.flush()
        with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            ((_, payload),) = subscriber.replay()
            assert vllm.decode(payload).events == [vllm.AllBlocksCleared()]


def test_a_worker_without_a_publisher_keeps_no_changes() -> None:
    runner = FakeRunner(CAPACITY)
    scheduler = make_scheduler(runner, EngineConfig())
    assert scheduler.cache.tree.on_change is None
    script = "import sys, quire.engine.worker.client, quire.engine.worker.worker\nassert 'zmq' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True)
