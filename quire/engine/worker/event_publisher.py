"""Publishes KV cache events over ZMQ, and sends missed batches again.

The engine's thread sends and never waits: a subscriber that reads too slowly loses batches. It notices that by their
sequence numbers and can request them from the replay socket, which has a thread of its own, so that requests are
answered during a long step and while the worker sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import closing, suppress

import zmq

from quire.core.kv_cache import KVCacheManager
from quire.engine.worker.kv_events import (
    CacheEvents,
    KvEventsConfig,
    KvEventsStatus,
    cannot_listen,
    parse_endpoint,
    start_payload,
)

MAX_BATCHES = 10_000  # kept for replay
MAX_BATCH_BYTES = 64 << 20  # of all of them
MAX_QUEUED = 10_000  # batches for one subscriber that it has not read yet
SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # sequence number after the last batch of a replay

log = logging.getLogger(__name__)


class EventPublisher:
    """The sockets of one worker: PUB for events, and ROUTER for replay if it has an endpoint.

    Messages are (topic, sequence number, payload). Only the engine's thread calls methods.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        """Bind both sockets. Raises InvalidRequest, naming the setting, if that is not possible."""
        self.events: CacheEvents | None = None  # None: nothing is announced
        self._topic = config.topic.encode()
        self._kept = ReplayBuffer()
        # Sequence numbers start at the time in microseconds. A worker sends less than one batch per microsecond, so the
        # numbers of a worker are above those of every worker before it at this endpoint. Dynamo ignores smaller ones.
        self._next_number = time.time_ns() // 1000
        self._has_failed = False
        self._context = zmq.Context()
        self._replay: threading.Thread | None = None
        try:
            self._publishing = self._bind(zmq.PUB, "kv_events", config.endpoint)
            replay_endpoint = None
            if config.replay_endpoint is not None:
                answering = self._bind(zmq.ROUTER, "kv_events_replay", config.replay_endpoint)
                replay_endpoint = _bound(answering)
                self._replay = threading.Thread(target=self._answer, args=(answering,), name="replay", daemon=True)
                self._replay.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint, self.replay_endpoint = _bound(self._publishing), replay_endpoint

    def _bind(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.SNDHWM, MAX_BATCHES + 1)  # a whole replay with its end
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of a lost message if a client does not read
        made.setsockopt(zmq.IPV6, ":" in parse_endpoint(name, endpoint).host)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            raise cannot_listen(name, endpoint, error.strerror) from None
        return made

    def start(self, cache: KVCacheManager) -> KvEventsStatus:
        """Announce what is cached: nothing on the device, what earlier processes left on disk. Then announce changes.

        In a model with windows or recurrent states, a request may reuse less than the cached blocks. Routers do not
        know that, so such a model announces nothing.
        """
        silent_because = None
        if cache.memory.is_hybrid:
            silent_because = "the model has layers with a window or a recurrent state"
        elif not cache.is_caching:
            silent_because = "the prefix cache is off"
        else:
            self.events = CacheEvents(cache.tree.root(""), cache.block_size)
            self.events.follow(cache)
        self._publish(start_payload(time.time()))
        return KvEventsStatus(self.endpoint, self.replay_endpoint, self._topic.decode(), silent_because)

    def flush(self) -> None:
        """Send the events since the last call as one batch. Called between steps."""
        if self.events is not None and (payload := self.events.pop(time.time())) is not None:
            self._publish(payload)

    def close(self) -> None:
        self._publishing.close()
        self._context.term()  # ends the thread, whose socket must be closed by the thread itself
        if self._replay is not None:
            self._replay.join()

    def _publish(self, payload: bytes) -> None:
        number = self._next_number.to_bytes(SEQUENCE_BYTES, "big")
        self._kept.append(self._next_number, payload)
        self._next_number += 1
        try:
            self._publishing.send_multipart((self._topic, number, payload), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if not self._has_failed:
                log.error("KV events could not be sent: %s", error)
            self._has_failed = True

    def _answer(self, answering: zmq.Socket[bytes]) -> None:
        """Answer replay requests until the context is terminated."""
        with closing(answering), suppress(zmq.ContextTerminated):
            while True:
                frames = answering.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == SEQUENCE_BYTES:
                    self._send_again(answering, frames[0], int.from_bytes(frames[2], "big"))
                else:
                    log.warning("a replay request of KV events has %d frames; it is ignored", len(frames))

    def _send_again(self, answering: zmq.Socket[bytes], client: bytes, first: int) -> None:
        try:
            for number, payload in self._kept.since(first):
                message = (client, b"", self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload)
                answering.send_multipart(message, zmq.DONTWAIT)
            answering.send_multipart((client, b"", b"", END, b""), zmq.DONTWAIT)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:  # it has disconnected, or asks again without reading
            log.warning("a replay of KV events was not completed: %s", error)


class ReplayBuffer:
    """The last batches, within limits of their number and size. Shared by two threads."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def append(self, number: int, payload: bytes) -> None:
        with self._lock:
            self._batches.append((number, payload))
            self._num_bytes += len(payload)
            while len(self._batches) > MAX_BATCHES or self._num_bytes > MAX_BATCH_BYTES:
                self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from sequence number `first` on, as far as they are kept."""
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= first]


def _bound(made: zmq.Socket[bytes]) -> str:
    """The address of a socket, with the port that was chosen for port 0."""
    return made.getsockopt_string(zmq.LAST_ENDPOINT)
