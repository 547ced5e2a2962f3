"""Messages between a client and its worker: msgpack in frames over a socket pair, never pickle.

`Channel` is the worker's end of the socket. Sending never blocks.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Annotated, NamedTuple

import msgspec

from quire.backends.base import Capacity, RunnerFacts
from quire.core.cache import CacheExplanation
from quire.core.kv_cache import CacheStats
from quire.core.levels.levels import LevelStats
from quire.core.values import PackedPrompt
from quire.engine.composition import EngineConfig
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.engine.worker.block_map import CellRun, HeldRun
from quire.engine.worker.kv_events import CacheReport, KvEventsConfig, KvEventsStatus

MAX_FRAME = 256 << 20  # a corrupt length must not exhaust memory
MAX_RUNNING_LISTED = 256  # requests in `Blocks`
MAX_UNSENT = 64 << 20  # bytes; a peer that leaves this much unread has stopped or is overloaded
_HEADER = Struct("<I")

log = logging.getLogger(__name__)


class Load(msgspec.Struct, tag="load", frozen=True):
    """The first message to a worker: the model and its settings."""

    path: str
    config: EngineConfig
    kv_events: KvEventsConfig | None = None  # None: the worker sends no events
    chain_secret: bytes = b""  # of the chain keys, if it is shared by replicas; empty: the worker's own
    reports_cache: bool = False  # for a router: see `CacheReport`


class Add(msgspec.Struct, tag="add", frozen=True):
    """A request, and the names of its samples."""

    request_ids: tuple[int, ...]
    request: GenerationRequest


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    request_id: int


class Finish(msgspec.Struct, tag="finish", frozen=True):
    request_id: int
    num_output_tokens: int


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """How much of this prompt is cached? Changes nothing."""

    prompt: PackedPrompt
    salt: str


class GetStats(msgspec.Struct, tag="stats", frozen=True):
    """The figures of the worker."""


class GetBlocks(msgspec.Struct, tag="blocks", frozen=True):
    """Get the block map, for display. The worker maintains it as long as it is asked for."""

    max_cells: int
    min_per_cell: int = 1  # blocks; maps with the same number of blocks per cell can be joined


class FindHeld(msgspec.Struct, tag="find_held", frozen=True):
    """Which blocks do these requests hold? Answered with pairs of a first block and a count."""

    request_ids: tuple[int, ...]


class ClearCache(msgspec.Struct, tag="clear", frozen=True):
    """Drop all cached content, pins included. Running requests keep their blocks."""


Query = Explain | GetStats | GetBlocks | FindHeld | ClearCache


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A query, which is answered by `Answered` or `Refused` with the same id."""

    query_id: int
    query: Query


class Loading(msgspec.Struct, tag="loading", frozen=True):
    num_done: int  # bytes of weights
    num_bytes: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    capacity: Capacity
    max_model_len: int
    facts: RunnerFacts
    timings_s: dict[str, float]  # durations of the start: "import" (the backend's libraries), "weights", "warm_up"
    levels: tuple[LevelStats, ...] = ()  # of the cache, below the device
    kv_events: KvEventsStatus | None = None  # the sockets that were bound
    chain_secret: bytes = b""  # only for a client that asked for reports of the cache
    fingerprint: str = ""  # of the model and its settings, from a replica
    system_fingerprint: str = ""  # empty: not known yet, `Fingerprinted` follows


class Fingerprinted(msgspec.Struct, tag="fingerprinted", frozen=True):
    """Sent after `Ready` if the files of the model are large and their digest was not known."""

    system_fingerprint: str


class Started(NamedTuple):
    """A request that left the queue. Sent once, not again when it resumes after a preemption."""

    request_id: int
    waited_s: float
    num_cached_tokens: int
    cache: CacheExplanation | None


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """Sent before the step that admits these requests: if the worker dies in it, they may be the cause."""

    started: tuple[Started, ...]


class Stepped(msgspec.Struct, tag="stepped", frozen=True):
    """The outputs of one step, in one message instead of one per token.

    Sent after every step, even without outputs, because the watchdog expects messages. A step that computed nothing
    and in which no read or copy began or ended sends none: a worker that only has such steps is stuck.
    """

    outputs: tuple[EngineOutput, ...]
    num_tokens: int = 0  # computed in the step, prompts and answers
    took_s: float = 0.0
    # Requests with one new token and nothing else to report, and their tokens. Most outputs are of this kind: two lists
    # of integers are encoded and decoded much faster than an `EngineOutput` for each.
    request_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) + sum(len(output.tokens) for output in self.outputs)


def stepped(outputs: Sequence[EngineOutput], num_tokens: int, took_s: float) -> Stepped:
    others: list[EngineOutput] = []
    request_ids: list[int] = []
    token_ids: list[int] = []
    for output in outputs:
        request_id, tokens, reason, _, cache, logprobs, prompt_logprobs, error, predicted = output
        is_plain = reason is None and cache is None and not logprobs and prompt_logprobs is None and error is None
        if is_plain and len(tokens) == 1 and predicted is None:
            request_ids.append(request_id)
            token_ids.append(tokens[0])
        else:
            others.append(output)
    return Stepped(tuple(others), num_tokens, took_s, tuple(request_ids), tuple(token_ids))


class Working(msgspec.Struct, tag="working", frozen=True):
    """Announces that no other message may come for this many seconds."""

    limit_s: float


class Refused(msgspec.Struct, tag="refused", frozen=True):
    request_ids: tuple[int, ...]  # or a query's id
    kind: str  # the name of a class in `quire.errors`
    message: str


class Answered(msgspec.Struct, tag="answered", frozen=True):
    query_id: int
    result: msgspec.Raw  # decoded by the one who asked


class TierStats(NamedTuple):
    """The waiting requests of one tier."""

    num_waiting: int
    num_tokens: int
    oldest_age_s: float  # the longest total wait of one of them; 0 if none waits


class Stats(msgspec.Struct, frozen=True):
    """The current state, and counts since the worker started."""

    cache: CacheStats
    num_running: int
    num_waiting: int
    tiers: tuple[TierStats, ...]  # HIGH, NORMAL, LOW
    num_preemptions: int
    num_steps: int
    num_violations: int  # broken invariants of the core, found by audits
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # of these, right ones


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica of a model in a cluster."""

    name: str
    is_accepting: Annotated[bool, msgspec.Meta(description="False: it is being stopped, and finishes its requests.")]
    num_requests: Annotated[int, msgspec.Meta(description="Sequences that run or wait there.")]
    num_routed: Annotated[int, msgspec.Meta(description="Requests sent there so far.")]
    num_blocks: int
    num_free_blocks: Annotated[int, msgspec.Meta(description="Blocks that no request or pin holds.")]
    num_queried_tokens: int
    num_hit_tokens: Annotated[int, msgspec.Meta(description="Of the queried tokens, those found in its prefix cache.")]


class Running(NamedTuple):
    """A running request."""

    request_id: int
    num_computed: int  # tokens whose KV exists
    num_blocks: int  # held, shared ones included


class Blocks(msgspec.Struct, frozen=True):
    num_blocks: int
    block_size: int
    blocks_per_cell: int
    cells: tuple[CellRun, ...]
    totals: tuple[int, ...]  # number of blocks by `BlockState`
    max_holders: int  # the largest number of requests that share one block
    num_pending: int  # blocks that are not up to date in the map; a later query updates them
    running: tuple[Running, ...]  # most urgent first, at most MAX_RUNNING_LISTED
    held: tuple[HeldRun, ...] = ()  # blocks in use and pinned; a bounded number


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The last message of a worker that cannot continue."""

    kind: str
    message: str


ToWorker = Load | Add | Cancel | Finish | Ask
FromWorker = Loading | Ready | Fingerprinted | Begun | Stepped | Working | CacheReport | Refused | Answered | Failed

encode = msgspec.msgpack.Encoder().encode
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker) -> bytes:
    data = encode(message)
    return _HEADER.pack(len(data)) + data


class FrameReader:
    """Splits a stream of bytes into frames."""

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
    """Writes frames without blocking: bytes that the socket does not accept are buffered."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._unsent: deque[memoryview] = deque()
        self.num_unsent = 0  # bytes

    def push(self, frame: bytes) -> None:
        self.num_unsent += len(frame)
        self._unsent.append(memoryview(frame))

    def flush(self) -> bool:
        """Write what the socket accepts. Returns whether this is all."""
        while self._unsent:
            try:
                num_sent = self._peer.send(self._unsent[0])
            except BlockingIOError:
                return False
            self.num_unsent -= num_sent
            if num_sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][num_sent:]
        return True


class Channel:
    """The worker's end of the socket. Raises ConnectionError if the client has closed its end or stopped reading."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        peer.setblocking(False)
        self._reader = FrameReader()
        self._writer = FrameWriter(peer)
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def wake(self) -> None:
        """End the current or next wait in `receive`. For other threads."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            self._waker.send(b"!")

    def send(self, message: FromWorker) -> None:
        self._writer.push(pack(message))
        self._writer.flush()
        if self._writer.num_unsent > MAX_UNSENT:
            raise ConnectionError(f"{self._writer.num_unsent} bytes are waiting to be read by the client")

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        """The messages that have arrived. If there are none, wait for one, for `wake`, or for `timeout_s`."""
        messages: list[ToWorker] = []
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if messages:
                left_s = 0.0
            writing = [self._peer] if self._writer.num_unsent else []
            readable, writable, _ = select.select([self._peer, self._woken], writing, [], left_s)
            if writable:
                self._writer.flush()
            if self._woken in readable:
                self._woken.recv(4096)
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
        if not data:
            raise ConnectionError("the client has closed its end")
        return self._reader.feed(data)

    def _decode(self, frame: bytes) -> ToWorker | None:
        """Decode a message. An invalid one fails only the requests that it names."""
        try:
            return to_worker.decode(frame)
        except msgspec.DecodeError as error:
            log.error("a message could not be decoded: %s", error)
            found = msgspec.msgpack.decode(frame)
            ids = found.get("request_ids") if isinstance(found, dict) else None
            if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
                self.send(Refused(tuple(ids), "InvalidRequest", str(error)))
            return None
