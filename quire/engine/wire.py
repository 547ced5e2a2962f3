"""What the server's process and a worker say to each other: msgpack in frames, over a socket pair. Never pickle."""

from __future__ import annotations

import socket
from collections import deque
from struct import Struct

import msgspec

from quire.backends.base import Capacity
from quire.core.kv_cache import CacheStats
from quire.core.prefix import CacheExplanation
from quire.core.request import Priority, SamplingParams
from quire.engine.build import EngineConfig
from quire.engine.engine import EngineOutput

MAX_FRAME = 256 << 20  # a forged or garbled length must not allocate the machine
MAX_UNSENT = 64 << 20  # bytes; a peer that leaves this much unread is gone, or has enough to do
_HEADER = Struct("<I")


class Load(msgspec.Struct, tag="load", frozen=True):
    """The first message to a worker: which model, and how."""

    path: str
    config: EngineConfig


class Add(msgspec.Struct, tag="add", frozen=True):
    """One prompt and its samples: the prompt crosses once, however many there are."""

    request_ids: tuple[int, ...]  # one a sample
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: Priority
    salt: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    request_id: int


class Finish(msgspec.Struct, tag="finish", frozen=True):
    request_id: int
    num_output_tokens: int


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """A dry run: what would the cache give this prompt?"""

    query_id: int
    prompt: tuple[int, ...]
    salt: str


class GetStats(msgspec.Struct, tag="stats", frozen=True):
    query_id: int


class Loading(msgspec.Struct, tag="loading", frozen=True):
    num_done: int  # bytes of weights
    num_bytes: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    capacity: Capacity
    max_context: int


class Stepped(msgspec.Struct, tag="stepped", frozen=True):
    """All news of one step in one message: one hand-off to the event loop, not one a token."""

    outputs: tuple[EngineOutput, ...]


class Working(msgspec.Struct, tag="working", frozen=True):
    """A sign of life before something long: nothing else may come for so many seconds."""

    limit_s: float


class Refused(msgspec.Struct, tag="refused", frozen=True):
    request_ids: tuple[int, ...]
    kind: str  # the name of an error of `quire.errors`
    message: str


class Explained(msgspec.Struct, tag="explained", frozen=True):
    query_id: int
    explanation: CacheExplanation | None
    error: str | None = None


class Stats(msgspec.Struct, tag="stats", frozen=True):
    query_id: int
    cache: CacheStats
    num_running: int
    num_waiting: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The last message of a worker that cannot go on."""

    kind: str
    message: str


ToWorker = Load | Add | Cancel | Finish | Explain | GetStats
FromWorker = Loading | Ready | Stepped | Working | Refused | Explained | Stats | Failed

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker) -> bytes:
    data = _encoder.encode(message)
    return _HEADER.pack(len(data)) + data


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            end = start + _HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return frames


class FrameWriter:
    """Sends what the socket takes now and keeps the rest: whoever writes never waits for whoever reads."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0

    @property
    def num_unsent(self) -> int:
        return self._num_unsent

    def send(self, frame: bytes) -> None:
        self._num_unsent += len(frame)
        self._unsent.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._peer.send(self._unsent[0])
            except BlockingIOError:
                return
            self._num_unsent -= num_sent
            if num_sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][num_sent:]
