"""Reads of stored content into host buffers. A prefix on disk is read before memory of the device is taken for it.

    queued     holds nothing, until there are buffers for it
    reading    holds buffers, until its deadline has passed and the store reports its end
    ready      holds buffers, until they are copied to the device (`PrefixLoads`) or nothing needs them

A read that never ends holds its buffers for ever, and nothing else. Their number is limited (`LowerLevel.buffers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from quire.core.levels.lower_level import PieceCounts, Stored
from quire.core.request import Request, RequestState
from quire.core.step import Content, MemoryKind, Read
from quire.core.values import Level

PARTS = 4  # a read takes at most this part of the buffers, so that others are read while it is copied
READY_NS = 1_000_000_000  # content that was read is dropped after this, if it could not be copied to the device
UNLIMITED: PieceCounts = (1 << 30, 1 << 30, 1 << 30)


class ReadState(Enum):
    QUEUED = auto()
    READING = auto()
    READY = auto()


@dataclass(slots=True)
class PrefixRead:
    """Pieces that are read together."""

    load_id: int  # no load has the same
    pieces: dict[Content, Stored]  # without those that failed, or are being copied to the device
    users: list[Request]  # that began it or have waited for it
    state: ReadState = ReadState.QUEUED
    deadline_ns: int = 0  # of a read in flight; of one that is ready: when it is dropped, 0 if it has just ended
    is_alone: bool = False  # no other read was in flight when it began
    is_abandoned: bool = False  # in flight, and nothing waits for it any more
    is_late: bool = False  # in flight after its deadline
    is_void: bool = False  # the cache was cleared
    kinds: Counter[MemoryKind] = field(default_factory=Counter)  # of the pieces, when it began

    @property
    def is_wanted(self) -> bool:
        """Whether a waiting request may still use it."""
        return not self.is_void and any(user.state is RequestState.WAITING for user in self.users)


class PrefixReads:
    """All reads, in the order of their start. `load_ids`: new numbers, which loads use too."""

    def __init__(self, limits: PieceCounts, load_ids: count[int]) -> None:
        self.limits = limits
        self.num_buffers = [0, 0, 0]  # in use, of each kind
        self._load_ids = load_ids
        self._reads: dict[int, PrefixRead] = {}
        self._by_content: dict[Content, PrefixRead] = {}
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[PrefixRead]:
        return iter(self._reads.values())

    def get(self, load_id: int) -> PrefixRead | None:
        return self._reads.get(load_id)

    @property
    def last_deadline_ns(self) -> int:
        """When all reads in flight that are waited for are late. 0: there are none."""
        deadlines = (read.deadline_ns for read in self if read.state is ReadState.READING and not read.is_abandoned)
        return max(deadlines, default=0)

    def find(self, content: Content) -> PrefixRead | None:
        """The read of this content that a request can wait for, or that is ready."""
        return self._by_content.get(content)

    def is_ready(self, stored: Stored) -> bool:
        read = self._by_content.get(stored.content)
        return read is not None and read.state is ReadState.READY

    def begin(self, pieces: Iterable[Stored], request: Request) -> list[Stored]:
        """Queue reads of these pieces for a request, and let it use those that are queued or in flight already.

        Returns the pieces that are new.
        """
        new: list[Stored] = []
        part: dict[Content, Stored] = {}
        kinds: Counter[MemoryKind] = Counter()
        for stored in pieces:
            content = stored.content
            read = self._by_content.get(content)
            if read is not None:
                if request not in read.users:
                    read.users.append(request)
                continue
            if kinds[content.kind] >= max(self.limits[content.kind] // PARTS, 1):
                self._queue(part, kinds, request)
                part, kinds = {}, Counter()
            part[content] = stored
            kinds[content.kind] += 1
            new.append(stored)
        if part:
            self._queue(part, kinds, request)
        return new

    def _queue(self, part: dict[Content, Stored], kinds: Counter[MemoryKind], request: Request) -> None:
        read = PrefixRead(next(self._load_ids), part, [request], kinds=kinds)
        self._reads[read.load_id] = read
        self._by_content.update(dict.fromkeys(part, read))

    def start_queued(self) -> list[PrefixRead]:
        """Start the reads for which there are buffers, in order."""
        started: list[PrefixRead] = []
        is_alone = not any(read.state is ReadState.READING for read in self)
        for read in self:
            if read.state is not ReadState.QUEUED:
                continue
            if any(self.num_buffers[kind] + number > self.limits[kind] for kind, number in read.kinds.items()):
                break
            self._count(read.kinds, 1)
            read.state, read.is_alone = ReadState.READING, is_alone
            is_alone = False
            started.append(read)
        return started

    def take(self, stored: Stored) -> int:
        """Remove a piece that is copied to the device now from its read, and return the read's number.

        Its buffer is in use until `free`.
        """
        read = self._by_content.pop(stored.content)
        del read.pieces[stored.content]
        if not read.pieces:
            del self._reads[read.load_id]
        return read.load_id

    def free(self, pieces: Iterable[Stored]) -> None:
        """Give back the buffers of pieces that were copied."""
        self._count(Counter(stored.content.kind for stored in pieces), -1)

    def finish(self, read: PrefixRead, failures: Collection[Content]) -> None:
        """Record the end of a read in flight. What was read is ready, unless nothing needs it."""
        if read.is_abandoned:
            del self._reads[read.load_id]
            self._count(read.kinds, -1)
            return
        read.state, read.deadline_ns = ReadState.READY, 0
        failed = [content for content in failures if content in read.pieces]
        for content in failed:
            del read.pieces[content]
            self._forget(content, read)
        self._count(Counter(content.kind for content in failed), -1)
        if not read.pieces:
            del self._reads[read.load_id]

    def drop(self, read: PrefixRead) -> None:
        """Drop what was read or is queued. A read in flight is abandoned: it holds its buffers until it ends."""
        for content in read.pieces:
            self._forget(content, read)
        if read.state is ReadState.READING:
            read.is_abandoned = True
        else:
            del self._reads[read.load_id]
        if read.state is ReadState.READY:
            self._count(Counter(content.kind for content in read.pieces), -1)
        if read.state is not ReadState.QUEUED:
            self._dropped.append(read.load_id)

    def pop_dropped(self) -> tuple[int, ...]:
        """Reads whose buffers the store can give back, at once or when they end."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def clear(self) -> None:
        for read in self:
            read.is_void = True
        self._by_content.clear()

    def _forget(self, content: Content, read: PrefixRead) -> None:
        if self._by_content.get(content) is read:
            del self._by_content[content]

    def _count(self, kinds: Counter[MemoryKind], sign: int) -> None:
        for kind, number in kinds.items():
            self.num_buffers[kind] += sign * number


def reads_of(reads: Sequence[PrefixRead]) -> tuple[Read, ...]:
    """The reads as a plan has them."""
    return tuple(Read(read.load_id, content, Level.DISK) for read in reads for content in read.pieces)
