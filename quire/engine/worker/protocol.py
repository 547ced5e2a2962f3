"""Messages between the server process and a worker: msgpack in frames over a socket pair, never pickle.

`Channel` is the worker's end of the socket. It never waits for a reader.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import deque
from struct import Struct
from typing import NamedTuple

import msgspec

from quire.backends.base import Capacity, RunnerFacts
from quire.core.block_map import BlocksView, CellRun, HeldRun
from quire.core.kv_cache import CacheStats
from quire.core.prefix import CacheExplanation
from quire.core.request import PackedPrompt, Priority, SamplingParams
from quire.engine.composition import EngineConfig
from quire.engine.engine import EngineOutput
from quire.engine.params import PinPrefix
from quire.text.grammar import Grammar

MAX_FRAME = 256 << 20  # a forged or garbled length must not allocate the machine
MAX_RUNNING_TOLD = 256  # requests, in an answer for people to look at
MAX_UNSENT = 64 << 20  # bytes; a peer that leaves this much unread is gone, or has enough to do
_HEADER = Struct("<I")

log = logging.getLogger(__name__)


class Load(msgspec.Struct, tag="load", frozen=True):
    """The first message to a worker: which model, and how."""

    path: str
    config: EngineConfig


class Add(msgspec.Struct, tag="add", frozen=True):
    """One prompt and its samples: the prompt crosses once, however many there are, and packed: that is read at once."""

    request_ids: tuple[int, ...]  # one a sample
    prompt: PackedPrompt
    sampling: SamplingParams
    priority: Priority
    salt: str
    pins: tuple[PinPrefix, ...] = ()
    grammar: Grammar | None = None
    tenant: str = ""


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    request_id: int


class Finish(msgspec.Struct, tag="finish", frozen=True):
    request_id: int
    num_output_tokens: int


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """A dry run: what would the cache give this prompt?"""

    query_id: int
    prompt: PackedPrompt
    salt: str


class GetStats(msgspec.Struct, tag="stats", frozen=True):
    query_id: int


class GetBlocks(msgspec.Struct, tag="blocks", frozen=True):
    """The map of the pool, for people to look at. The worker keeps one from now on, until `DropBlocks`."""

    query_id: int
    max_cells: int


class ViewBlocks(msgspec.Struct, tag="view_blocks", frozen=True):
    """Who holds these blocks?"""

    query_id: int
    first: int
    count: int


class FindHeld(msgspec.Struct, tag="find_held", frozen=True):
    """Which blocks do these requests hold?"""

    query_id: int
    request_ids: tuple[int, ...]


class DropBlocks(msgspec.Struct, tag="drop_blocks", frozen=True):
    """Nobody looks at the map any more."""


class ClearCache(msgspec.Struct, tag="clear", frozen=True):
    """Forget all cached content, pins included. Who runs keeps its blocks."""

    query_id: int


class PinCache(msgspec.Struct, tag="pin", frozen=True):
    """Keep what the cache has of this prefix."""

    query_id: int
    pin_id: str
    prompt: PackedPrompt
    salt: str
    ttl_s: float


class UnpinCache(msgspec.Struct, tag="unpin", frozen=True):
    query_id: int
    pin_id: str


class Loading(msgspec.Struct, tag="loading", frozen=True):
    num_done: int  # bytes of weights
    num_bytes: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    capacity: Capacity
    max_model_len: int
    facts: RunnerFacts
    timings_s: dict[str, float]  # parts of the start: "import" (the backend's libraries), "weights", "warm_up"
    step_s: float = 0.0  # what a full step is expected to take, by the steps of the warm-up

    @property
    def weight_bytes(self) -> int:
        """0 where the backend cannot say; so is `kv_bytes`."""
        return self.facts.weight_bytes

    @property
    def kv_bytes(self) -> int:
        return self.facts.kv_bytes


class Started(NamedTuple):
    """A request that waits no more. Told once: who is preempted and comes back has started before."""

    request_id: int
    waited_s: float
    num_cached_tokens: int
    cache: CacheExplanation | None


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """Said before the step that admits them: if the worker does not survive it, these may be the reason."""

    started: tuple[Started, ...]


class Stepped(msgspec.Struct, tag="stepped", frozen=True):
    """All news of one step in one message: one hand-off to the event loop, not one a token.

    Sent after every step, news or not: it is the sign of life.
    """

    outputs: tuple[EngineOutput, ...]
    started: tuple[Started, ...] = ()  # in this step; as `Begun` said
    num_tokens: int = 0  # computed in it, prompts and answers
    took_s: float = 0.0


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


class CacheAnswer(msgspec.Struct, tag="cache", frozen=True):
    """To whoever asked to clear, pin or unpin."""

    query_id: int
    num_tokens: int = 0  # held by the pin
    is_found: bool = True  # there was a pin of that name
    error: str | None = None


class TierStats(NamedTuple):
    """Who waits in one tier."""

    num_waiting: int
    num_tokens: int
    oldest_age_s: float  # the longest that one of them has waited, all its waits together; 0 where nobody does


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """How it is now, and counts since the worker began."""

    query_id: int
    cache: CacheStats
    num_running: int
    num_waiting: int
    tiers: tuple[TierStats, ...]  # HIGH, NORMAL, LOW
    num_preemptions: int
    num_steps: int
    num_violations: int  # laws of the core found broken by an audit


class Running(NamedTuple):
    """A request on the machine."""

    request_id: int
    num_computed: int  # tokens whose KV exists
    num_blocks: int  # that it holds, shared ones included


class Blocks(msgspec.Struct, tag="blocks", frozen=True):
    query_id: int
    num_blocks: int
    block_size: int
    blocks_per_cell: int
    cells: tuple[CellRun, ...]
    totals: tuple[int, ...]  # blocks, by `BlockState`
    max_holders: int  # requests that hold the block held by most
    num_pending: int  # blocks that the map does not show as they are yet: ask again
    running: tuple[Running, ...]  # most urgent first, so many at most
    held: tuple[HeldRun, ...] = ()  # blocks in use and pinned; a bounded number


class BlocksViewed(msgspec.Struct, tag="blocks_viewed", frozen=True):
    query_id: int
    view: BlocksView | None
    error: str | None = None


class HeldFound(msgspec.Struct, tag="held_found", frozen=True):
    query_id: int
    ranges: tuple[tuple[int, int], ...]  # first block, how many


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The last message of a worker that cannot go on."""

    kind: str
    message: str


Query = Explain | GetStats | GetBlocks | ViewBlocks | FindHeld | ClearCache | PinCache | UnpinCache
ToWorker = Load | Add | Cancel | Finish | DropBlocks | Query
Answer = Explained | Stats | Blocks | BlocksViewed | HeldFound | CacheAnswer
FromWorker = Loading | Ready | Begun | Stepped | Working | Refused | Answer | Failed

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
