"""A subscriber of KV events over real sockets, as a router is one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self

import zmq

from tests.engine.vllm_events import Router
from tests.waiting import HANG_S

END = b"\xff" * 8
Batches = list[tuple[int, bytes]]  # sequence number, payload


class Subscriber:
    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", max_queued: int = 0
    ) -> None:
        """`max_queued`: batches that are received before they are read; 0: any number, so that none is lost."""
        self._context = zmq.Context()
        self._events = self._socket(zmq.SUB, max_queued)
        self._events.connect(endpoint)
        self._events.subscribe(topic)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replay = self._socket(zmq.DEALER, 0)
            self._replay.connect(replay_endpoint)
        self.batches: Batches = []
        self.topics: set[bytes] = set()

    def _socket(self, kind: int, max_queued: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, int(HANG_S * 1000))
        made.setsockopt(zmq.RCVHWM, max_queued)
        if max_queued:
            made.setsockopt(zmq.RCVBUF, 1 << 16)  # bytes in the system's buffer of the connection
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> None:
        """Wait for the next batch."""
        topic, number, payload = self._events.recv_multipart()
        assert len(number) == 8
        self.topics.add(topic)
        self.batches.append((int.from_bytes(number, "big"), payload))

    def receive_upto(self, number: int) -> None:
        while not self.batches or self.batches[-1][0] < number:
            self.receive()

    def join(self, announce: Callable[[], object]) -> None:
        """Cause events until one arrives: a subscription takes effect at some moment after the call."""
        while not self.batches:
            announce()
            if self.poll(50):
                self.receive()

    def poll(self, timeout_ms: int) -> bool:
        """Whether a batch has arrived, or arrives in time."""
        return bool(self._events.poll(timeout_ms))

    def replay(self, first: int = 0) -> Batches:
        """Request the batches from a sequence number on."""
        assert self._replay is not None
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        return self.read_replay()

    def read_replay(self) -> Batches:
        assert self._replay is not None
        found: Batches = []
        while True:
            delimiter, topic, number, payload = self._replay.recv_multipart()
            assert delimiter == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return found
            self.topics.add(topic)
            found.append((int.from_bytes(number, "big"), payload))


def free_ports(count: int) -> list[int]:
    """Consecutive ports that nothing uses, below those that the system gives to connections and to port 0."""
    first = 20_000 + os.getpid() % 6_000
    while True:
        ports = [*range(first, first + count)]
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
        first += count


def routed(batches: Batches, block_size: int) -> Router:
    """A router that received these batches, which must be consecutive."""
    numbers = [number for number, _ in batches]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    router = Router(block_size)
    for _, payload in batches:
        router.take(payload)
    return router
