"""The worker's end of the socket: orders in, news out. Never waits for a reader."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time

import msgspec

from quire.engine.worker.protocol import (
    MAX_UNSENT,
    FrameReader,
    FrameWriter,
    FromWorker,
    Refused,
    ToWorker,
    pack,
    to_worker,
)

log = logging.getLogger(__name__)


class Gone(Exception):
    """The other side closed its end, or has stopped reading."""


class Channel:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        peer.setblocking(False)
        self._reader = FrameReader()
        self._writer = FrameWriter(peer)
        self._bell: tuple[socket.socket, socket.socket] | None = None

    def wake(self) -> None:
        """Ends the sleep in `receive`, or the next one. For other threads, once `receive` knows of them."""
        assert self._bell is not None
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            self._bell[1].send(b"!")

    def expect_wake(self) -> None:
        if self._bell is None:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)

    def send(self, message: FromWorker) -> None:
        try:
            self._writer.send(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None
        if self._writer.num_unsent > MAX_UNSENT:
            raise Gone

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        """All that has arrived. Where nothing has, sleeps until something does, or so long; None: until `wake`."""
        messages: list[ToWorker] = []
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if messages:
                left_s = 0.0
            writing = [self._peer] if self._writer.num_unsent else []
            reading = [self._peer] if self._bell is None else [self._peer, self._bell[0]]
            readable, writable, _ = select.select(reading, writing, [], left_s)
            if writable:
                self._flush()
            if self._bell is not None and self._bell[0] in readable:
                self._bell[0].recv(4096)
                until_s = 0.0
            if self._peer in readable:
                messages += [message for frame in self._read() if (message := self._decode(frame)) is not None]
            elif left_s == 0.0:
                return messages

    def _read(self) -> list[bytes]:
        try:
            data = self._peer.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            raise Gone from None
        if not data:
            raise Gone
        return self._reader.feed(data)

    def _decode(self, frame: bytes) -> ToWorker | None:
        """A message that is none of ours ends the request it speaks of, and nobody else's."""
        try:
            message: ToWorker = to_worker.decode(frame)
            return message
        except msgspec.DecodeError as error:
            log.error("a message could not be read: %s", error)
            found = msgspec.msgpack.decode(frame)
            ids = found.get("request_ids") if isinstance(found, dict) else None
            if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
                self.send(Refused(tuple(ids), "InvalidRequest", str(error)))
            return None

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None
