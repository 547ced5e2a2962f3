"""Levels below the device: host memory and disk. Reads, loads and saves of prefixes.

The prefix tree describes the device only. Content of lower levels is found by the same chain keys, after a match on the
device has ended. A prefix that is found there is loaded into new blocks and published in the tree; then it is a prefix
hit like any other. Content on disk is first read into host buffers. Meanwhile nothing is held on the device: when the
read ends, the search is repeated, and what was read counts as content of host memory. So a load copies within the
machine: it always ends. A read is in one of three states:

    queued     holds nothing, until there are buffers for it
    reading    holds buffers, until its deadline has passed and the store reports its end
    ready      holds buffers, until they are copied to the device (`PrefixLoads`) or nothing needs them

A read that never ends holds its buffers for ever, and nothing else. Their number is limited (`LowerLevel.buffers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from quire.core.cache.context import KVCacheBlock, Linked, StateSlot, TokenChain, WindowBlock
from quire.core.cache.prefix import Pool, PrefixHit
from quire.core.levels.lower_level import NS_PER_S, LevelSearch, LowerLevel, PieceCounts, Reach, Stored
from quire.core.levels.saves import SaveLimits, Saves
from quire.core.memory import Held, Memory
from quire.core.request import Request, RequestState
from quire.core.step import Content, Load, MemoryKind, MemoryRef, Read, Transfers
from quire.core.values import TOKEN_BYTES, Level

PARTS = 4  # a read takes at most this part of the buffers, so that others are read while it is copied
READY_NS = 1_000_000_000  # content that was read is dropped after this, if it could not be copied to the device
UNLIMITED: PieceCounts = (1 << 30, 1 << 30, 1 << 30)


class ReadState(Enum):
    QUEUED = auto()
    READING = auto()
    READY = auto()


@dataclass(slots=True, kw_only=True)
class Transfer:
    """A read or a load. Requests wait for it as they wait for a prefix that another request computes."""

    load_id: int  # no read and no load has the same
    deadline_ns: int = 0  # after this, the requests that wait for it compute the prefix
    is_abandoned: bool = False  # in flight, and nothing waits for it any more
    is_late: bool = False  # in flight after its deadline
    is_void: bool = False  # the cache was cleared: its content must not be published


T = TypeVar("T", bound=Transfer)


class _InFlight(Generic[T]):
    """Transfers in the order of their start."""

    def __init__(self, load_ids: count[int]) -> None:
        self._load_ids = load_ids  # new numbers
        self._by_id: dict[int, T] = {}
        self._by_content: dict[Content, T] = {}  # of transfers that a request can wait for

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_id.values())

    def get(self, load_id: int) -> T | None:
        return self._by_id.get(load_id)

    def clear(self) -> None:
        """Let all end without effect: the cache was cleared."""
        for transfer in self:
            transfer.is_void = True
        self._by_content.clear()

    def _forget(self, content: Content, transfer: T) -> None:
        if self._by_content.get(content) is transfer:
            del self._by_content[content]


@dataclass(slots=True)
class PrefixRead(Transfer):
    """Pieces that are read together. The deadline of one that is ready: when it is dropped, 0 if it has just ended."""

    pieces: dict[Content, Stored]  # without those that failed, or are being copied to the device
    users: list[Request]  # that began it or have waited for it
    state: ReadState = ReadState.QUEUED
    is_alone: bool = False  # no other read was in flight when it began
    kinds: Counter[MemoryKind] = field(default_factory=Counter)  # of the pieces, when it began

    @property
    def is_wanted(self) -> bool:
        """Whether a waiting request may still use it."""
        return not self.is_void and any(user.state is RequestState.WAITING for user in self.users)


class PrefixReads(_InFlight[PrefixRead]):
    """All reads."""

    def __init__(self, limits: PieceCounts, load_ids: count[int]) -> None:
        super().__init__(load_ids)
        self.limits = limits
        self.num_buffers = [0, 0, 0]  # in use, of each kind
        self._dropped: list[int] = []

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
        read = PrefixRead(part, [request], kinds=kinds, load_id=next(self._load_ids))
        self._by_id[read.load_id] = read
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
            del self._by_id[read.load_id]
        return read.load_id

    def free(self, pieces: Iterable[Stored]) -> None:
        """Give back the buffers of pieces that were copied."""
        self._count(Counter(stored.content.kind for stored in pieces), -1)

    def finish(self, read: PrefixRead, failures: Collection[Content]) -> None:
        """Record the end of a read in flight. What was read is ready, unless nothing needs it."""
        if read.is_abandoned:
            del self._by_id[read.load_id]
            self._count(read.kinds, -1)
            return
        read.state, read.deadline_ns = ReadState.READY, 0
        failed = [content for content in failures if content in read.pieces]
        for content in failed:
            del read.pieces[content]
            self._forget(content, read)
        self._count(Counter(content.kind for content in failed), -1)
        if not read.pieces:
            del self._by_id[read.load_id]

    def drop(self, read: PrefixRead) -> None:
        """Drop what was read or is queued. A read in flight is abandoned: it holds its buffers until it ends."""
        for content in read.pieces:
            self._forget(content, read)
        if read.state is ReadState.READING:
            read.is_abandoned = True
        else:
            del self._by_id[read.load_id]
        if read.state is ReadState.READY:
            self._count(Counter(content.kind for content in read.pieces), -1)
        if read.state is not ReadState.QUEUED:
            self._dropped.append(read.load_id)

    def pop_dropped(self) -> tuple[int, ...]:
        """Reads whose buffers the store can give back, at once or when they end."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _count(self, kinds: Counter[MemoryKind], sign: int) -> None:
        for kind, number in kinds.items():
            self.num_buffers[kind] += sign * number


GROUPS = (16, 64)  # blocks of a load that are taken at a time: first, and later


@dataclass(slots=True)
class PrefixLoad(Transfer):
    """A prefix that is copied to the device. It holds its blocks, and those before them, until the copies are done."""

    num_tokens: int  # that the load adds to the hit
    reach: Reach
    prefix: tuple[KVCacheBlock, ...]  # cached blocks that the loaded ones follow
    blocks: list[KVCacheBlock]
    windows: list[WindowBlock]
    state: StateSlot | None
    source: Level  # the slowest level that its content comes from
    read_ids: tuple[int, ...]  # of each piece: the read that brought it to a buffer; 0: it is in the host level

    @property
    def nodes(self) -> tuple[KVCacheBlock, ...]:
        """All blocks of the prefix, from the root."""
        return (*self.prefix, *self.blocks)

    @property
    def states(self) -> tuple[StateSlot, ...]:
        return () if self.state is None else (self.state,)

    @property
    def held(self) -> Held:
        kept = self.reach.kept
        return Held(self.nodes, (*kept.windows, *self.windows), (*kept.states, *self.states))

    def loads_of_blocks(self, first: int) -> list[Load]:
        """The copies of the blocks from this one on, in the order of the context."""
        return self._loads(first, self.blocks[first:])

    def loads_of_others(self) -> list[Load]:
        """The copies of window blocks and of a state."""
        return self._loads(len(self.reach.blocks), (*self.windows, *self.states))

    def _loads(self, first: int, targets: Sequence[Linked]) -> list[Load]:
        return [
            Load(self.load_id, one.content, one.level, MemoryRef(one.content.kind, target.block_id), read_id)
            for one, target, read_id in zip(self.reach.pieces[first:], targets, self.read_ids[first:], strict=False)
        ]


class Loaded(NamedTuple):
    """Result of a load."""

    num_tokens: int  # whose keys and values were published
    is_whole: bool


def _shortage(pool: Pool[Any], num_new: int, kept: Sequence[Linked]) -> int:
    """Number of blocks that a load lacks if it takes new ones and holds others, which may be free."""
    return num_new + [block.ref_count for block in kept].count(0) - pool.num_free


class PrefixLoads(_InFlight[PrefixLoad]):
    """Loads in flight."""

    def __init__(self, memory: Memory, load_ids: count[int]) -> None:
        super().__init__(load_ids)
        self._memory = memory
        self.groups = GROUPS

    def find(self, reach: Reach) -> PrefixLoad | None:
        """A load that already brings the first piece of this reach, for which a request can wait."""
        load = self._by_content.get(reach.pieces[0].content)
        return None if load is None or load.is_abandoned or load.is_void else load

    def shortage(self, hit: PrefixHit, reach: Reach) -> int:
        """Number of free blocks that a load lacks; window blocks and states count too."""
        memory, kept = self._memory, reach.kept
        missing = [_shortage(memory.blocks, len(reach.blocks), self._prefix(hit, reach))]
        if reach.windows:
            missing.append(_shortage(memory.windows.pool, len(reach.windows), kept.windows))
        if reach.state is not None and not memory.states.may_hold():
            missing.append(1)
        return max(missing)

    def begin(
        self, hit: PrefixHit, reach: Reach, deadline_ns: int, *, num_tokens: int, read_ids: Sequence[int]
    ) -> PrefixLoad:
        """Take memory for a load, except for its blocks. `shortage` must not be positive."""
        prefix, memory = self._prefix(hit, reach), self._memory
        memory.share(reach.kept._replace(blocks=prefix))  # before blocks are taken, because taking may evict them
        for stored in reach.pieces:
            stored.num_loads += 1  # also before: what is evicted may be saved, and displace them
        state = None
        if reach.state is not None:
            (state,) = memory.states.pool.take(1)
            state.position = reach.start
        load = PrefixLoad(
            load_id=next(self._load_ids),
            deadline_ns=deadline_ns,
            num_tokens=num_tokens,
            reach=reach,
            prefix=prefix,
            blocks=[],
            windows=memory.windows.pool.take(len(reach.windows)),
            state=state,
            source=reach.source,
            read_ids=tuple(read_ids),
        )
        self._by_id[load.load_id] = load
        self._by_content.update((stored.content, load) for stored in reach.pieces)
        return load

    def take_blocks(self, load: PrefixLoad) -> Iterator[int]:
        """Take the blocks of a load in groups. Yields the number of blocks before each group, after it is taken.

        Taking hundreds of blocks evicts as many, which takes a few milliseconds.
        """
        num_blocks = len(load.reach.blocks)
        while (first := len(load.blocks)) < num_blocks:
            size = self.groups[first > 0]
            load.blocks += self._memory.blocks.take(min(size, num_blocks - first))
            yield first

    @staticmethod
    def _prefix(hit: PrefixHit, reach: Reach) -> tuple[KVCacheBlock, ...]:
        """Blocks of a hit that a load holds: the tail only if no other block takes its place."""
        return hit.blocks if hit.tail is None or reach.blocks else (*hit.blocks, hit.tail)

    def finish(self, load: PrefixLoad, failures: Collection[Content]) -> Loaded:
        """Publish what was loaded, up to the first failure, and release it.

        A released block goes to the end of the free list, so that it is still there when a waiter starts.
        """
        del self._by_id[load.load_id]
        for stored in load.reach.pieces:
            stored.num_loads -= 1  # also of content that was cleared in the meantime, and is not indexed any more
            self._forget(stored.content, load)
        loaded = Loaded(0, False) if load.is_void else self._publish(load, failures)
        self._memory.release(load.held)
        return loaded

    def _publish(self, load: PrefixLoad, failures: Collection[Content]) -> Loaded:
        num_blocks = self._publish_blocks(load, failures)
        num_pieces = num_blocks + self._publish_windows(load, failures) + self._publish_state(load, failures)
        if num_pieces == len(load.reach.pieces):
            return Loaded(load.num_tokens, True)
        end = (len(load.prefix) + num_blocks) * self._memory.tree.block_size
        num_unloaded = load.reach.start - min(end, load.reach.start)
        return Loaded(max(load.num_tokens - num_unloaded, 0) if num_blocks else 0, False)

    def _publish_blocks(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        parent_key = load.prefix[-1].key if load.prefix else None
        for number, (stored, block) in enumerate(zip(load.reach.blocks, load.blocks, strict=True)):
            content = stored.content
            is_first = not load.prefix and not number
            if content in failures or (content.parent_key != parent_key and not is_first):
                return number  # damaged, or the block before it could not be published
            is_full = len(content.tokens) == self._memory.tree.block_size * TOKEN_BYTES
            self._memory.blocks.publish(block, content.parent_key, content.key if is_full else None, content.tokens)
            parent_key = block.key
        return len(load.blocks)

    def _publish_windows(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        num_loaded = 0
        for (stored, number), window in zip(load.reach.windows, load.windows, strict=True):
            node = load.nodes[number]
            is_same = (node.parent_key, node.tokens) == (stored.content.parent_key, stored.tokens)
            if stored.content not in failures and is_same:
                if node.window is None:  # otherwise a request has computed it in the meantime
                    self._memory.windows.pool.attach(window, node)
                num_loaded += 1
        return num_loaded

    def _publish_state(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        stored, slot = load.reach.state, load.state
        if stored is None or slot is None or stored.content in failures:
            return 0
        num_full = slot.position // self._memory.tree.block_size
        if num_full and load.nodes[num_full - 1].key != stored.content.parent_key:
            return 0  # the block before it could not be published
        self._memory.states.pool.publish(slot, stored.content.parent_key, stored.tokens, load.num_tokens)
        return 1


MIN_TIMEOUT_NS = 2_000_000_000  # a load is given up after this, or after TIMEOUT_FACTOR times its expected duration
TIMEOUT_FACTOR = 10
LEARNED_PIECES = 4  # a load of at least this many shows the speed of its level
RETRY_NS = 60_000_000_000  # after this long without a load, one is made although it may not pay


@dataclass(frozen=True, slots=True)
class LevelStats:
    """Content of one level, and counters since the start."""

    level: str
    num_pieces: int  # blocks, window blocks and states
    num_bytes: int
    max_bytes: int | None  # of a disk, for all models that share its folder; None: not known
    num_loads: int  # prefixes
    num_loaded_tokens: int
    num_loaded_bytes: int
    num_failed_loads: int  # pieces that were damaged or missing, and loads that were late
    num_saves: int  # pieces
    num_failed_saves: int
    num_evictions: int
    break_even_tokens: int | None  # loads of fewer tokens are slower than computing them; None: never faster


@dataclass(slots=True)
class _Counts:
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_loaded_bytes: int = 0
    num_failed_loads: int = 0
    num_saves: int = 0
    num_failed_saves: int = 0
    num_lost: int = 0


class Levels:
    """The levels below the device: stored content, reads, loads and saves."""

    def __init__(self, memory: Memory, levels: Sequence[LowerLevel], limits: SaveLimits) -> None:
        self.levels = tuple(levels)  # the fastest first
        self._by_level = {level.level: level for level in levels}
        self._counts = {level.level: _Counts() for level in levels}
        self._block_size = memory.tree.block_size
        load_ids = count(1)
        buffers = next((level.buffers for level in levels if level.buffers is not None), UNLIMITED)
        self.reads = PrefixReads(buffers, load_ids)
        self.loads = PrefixLoads(memory, load_ids)
        self._is_hybrid = memory.is_hybrid
        # The first finds everything, the second only what is in host memory.
        self._searches = [LevelSearch(self.levels, memory)]
        self._searches.append(LevelSearch(self.levels, memory, self.is_in_host_memory))
        self.saves = Saves(memory, levels, limits=limits)
        self.ns_per_token: int | None = None  # measured duration of computing a prompt token; None: unknown
        # Called with the first pieces of a load while memory for the others is taken, which takes milliseconds. The
        # plan has the others, at least one. Not called if content must be saved before it is overwritten.
        self.on_loads: Callable[[tuple[Load, ...]], None] | None = None
        self._new_loads: list[Load] = []
        self._num_late: Counter[Level] = (
            Counter()
        )  # in flight after their deadline: reads of the disk, loads from host memory
        self._now_ns = 0
        self._last_begin_ns = 0  # start of the last load, or of this process

    # Whether a load pays

    def find(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """How far the levels extend a hit; None if not at all."""
        return self._searches[0].find(chain, limit, hit)

    def choose(self, chain: TokenChain, limit: int, hit: PrefixHit, *, may_read: bool = True) -> Reach | None:
        """The longest reach that is worth a load; None if computing the tokens is faster.

        If a load from all levels is slower than computing, or not `may_read`, one from host memory is considered.
        """
        for search in self._searches if may_read else self._searches[1:]:
            reach = search.find(chain, limit, hit)
            if reach is None:
                return None
            if self._pays(hit, reach):
                return reach
        return None

    def is_in_host_memory(self, stored: Stored) -> bool:
        """Whether a load of this piece needs no read."""
        return stored.level is not Level.DISK or self.reads.is_ready(stored)

    def unread(self, reach: Reach) -> list[Stored]:
        return [stored for stored in reach.pieces if not self.is_in_host_memory(stored)]

    def ready_part(self, hit: PrefixHit, reach: Reach) -> Reach | None:
        """The part of a reach that can be copied to the device now; None if its first piece must be read first."""
        number = sum(1 for _ in takewhile(self.is_in_host_memory, reach.pieces))
        return reach.first_pieces(number, self._block_size, len(hit.blocks)) if number else None

    def _pays(self, hit: PrefixHit, reach: Reach) -> bool:
        """Whether a load is faster than computing its tokens. False for a level that is late.

        Loads and computations in flight are not considered: a request waits behind others in either case. A load is
        also tried if there was none for a while, because a disk that was slow may be fast again.
        """
        missing = [stored for stored in reach.pieces if not self.reads.is_ready(stored)]
        if not missing:
            return True  # all of it was read for this
        if any(self._num_late[level] for level in {stored.level for stored in missing}):
            return False
        if self.ns_per_token is None or self._now_ns - self._last_begin_ns >= RETRY_NS:
            return True
        return self._load_ns(self._num_bytes(missing)) < (reach.start - hit.start) * self.ns_per_token

    def _load_ns(self, num_bytes: Counter[Level]) -> int:
        """Expected duration of loads of this many bytes from each level."""
        return sum(
            level.speed.load_ns(num_bytes[level.level])
            for level in self.levels
            if level.speed is not None and num_bytes[level.level]
        )

    def _num_bytes(self, pieces: Iterable[Stored]) -> Counter[Level]:
        """Number of bytes of these pieces in each level."""
        num_bytes: Counter[Level] = Counter()
        for (level, kind), number in Counter([(stored.level, stored.content.kind) for stored in pieces]).items():
            num_bytes[level] += number * self._by_level[level].sizes[kind]
        return num_bytes

    def break_even(self, level: LowerLevel) -> int | None:
        """Number of tokens from which on a load pays. None: it never does."""
        if level.speed is None or self.ns_per_token is None:
            return 0
        token_bytes = max(level.sizes[MemoryKind.BLOCK] or level.sizes[MemoryKind.WINDOW], 1) // self._block_size
        saved_ns = self.ns_per_token - level.speed.load_ns(token_bytes) + level.speed.latency_ns
        return None if saved_ns <= 0 else -(-level.speed.latency_ns // saved_ns)

    # Reads

    def read(self, pieces: Sequence[Stored], request: Request) -> None:
        """Queue reads of pieces on disk, for a request."""
        for stored in reversed(self.reads.begin(pieces, request)):  # the first block of a prefix is evicted last
            self._by_level[stored.level].touch(stored.content)

    def finish_read(self, read: PrefixRead, failures: Collection[Content], read_ns: int) -> None:
        """End a read in flight. Failed pieces are forgotten."""
        failed = [] if read.is_void else [read.pieces[content] for content in failures if content in read.pieces]
        if read.is_alone and not failures and read_ns:
            self._learn_speed(read.pieces.values(), read_ns)
        self._num_late[Level.DISK] -= read.is_late
        self.reads.finish(read, failures)
        for stored in failed:
            self._counts[stored.level].num_failed_loads += 1
            self._by_level[stored.level].remove(stored.content)

    def _learn_speed(self, pieces: Collection[Stored], took_ns: int) -> None:
        """Adjust the speed of the disk to a read: files may be in the page cache, or on a busy disk."""
        level = self._by_level[Level.DISK]
        num_bytes = self._num_bytes(pieces)[Level.DISK]
        if level.speed is not None and num_bytes >= LEARNED_PIECES * level.sizes[MemoryKind.BLOCK]:
            seen = num_bytes * NS_PER_S // max(took_ns - level.speed.latency_ns, 1)
            level.speed = level.speed._replace(bytes_per_s=max((3 * level.speed.bytes_per_s + seen) // 4, 1))

    def _deadline_ns(self, pieces: Iterable[Stored]) -> int:
        """When copies of these pieces that begin now are late. They are expected to be made after those in flight."""
        self._last_begin_ns = self._now_ns
        num_bytes = self._num_bytes(pieces)
        for read in self.reads:
            if read.state is ReadState.READING and not read.is_abandoned:
                num_bytes += self._num_bytes(read.pieces.values())
        for load in self.loads:
            num_bytes += self._num_bytes(load.reach.pieces)
        return self._now_ns + max(MIN_TIMEOUT_NS, TIMEOUT_FACTOR * self._load_ns(num_bytes))

    # Loads

    def begin(self, hit: PrefixHit, reach: Reach, *, is_part: bool = False) -> PrefixLoad:
        """Start a load of pieces in host memory. `PrefixLoads.shortage` must not be positive.

        `is_part`: the request will need more than this reach. A part of a hybrid's memory saves no tokens by itself.
        """
        num_tokens = 0 if is_part and self._is_hybrid else reach.start - hit.start
        deadline_ns = self._deadline_ns(reach.pieces)
        read_ids = [self.reads.take(stored) if stored.level is Level.DISK else 0 for stored in reach.pieces]
        load = self.loads.begin(hit, reach, deadline_ns, num_tokens=num_tokens, read_ids=read_ids)
        new: list[Load] = []
        for first in self.loads.take_blocks(load):
            new += load.loads_of_blocks(first)
            is_last = len(load.blocks) == len(reach.blocks)
            if self.on_loads is not None and not is_last and not self.saves.has_chosen:
                self.on_loads(tuple(new))
                new.clear()
        self._new_loads += new
        self._new_loads += load.loads_of_others()
        for stored in reversed(reach.pieces):
            self._by_level[stored.level].touch(stored.content)
        return load

    def finish(self, load: PrefixLoad, failures: Collection[Content]) -> Loaded:
        """End a load. Failed pieces are forgotten."""
        loaded = self.loads.finish(load, failures)
        self._num_late[Level.HOST] -= load.is_late
        self.reads.free(stored for stored, read_id in zip(load.reach.pieces, load.read_ids, strict=True) if read_id)
        for stored in load.reach.pieces:
            counts, level = self._counts[stored.level], self._by_level[stored.level]
            if stored.content in failures:
                counts.num_failed_loads += 1
                if level.remove(stored.content) and stored.level is Level.HOST:
                    self.saves.drop(stored.content)
            else:
                counts.num_loaded_bytes += level.sizes[stored.content.kind]
        counts = self._counts[load.source]
        counts.num_loads += 1
        counts.num_loaded_tokens += loaded.num_tokens
        return loaded

    def expire(self, now_ns: int) -> list[Transfer]:
        """End waits for loads and reads that are late, or of no use since the cache was cleared. Returns these.

        They stay in flight, because copies cannot be recalled. If the disk is late, queued reads are given up too. What
        was read is dropped if no request needs it, or none could use it for a while.
        """
        self._now_ns = now_ns
        self._last_begin_ns = self._last_begin_ns or now_ns
        late = [load for load in self.loads if not load.is_abandoned and (load.is_void or load.deadline_ns <= now_ns)]
        for load in late:
            load.is_abandoned = True
            load.is_late = not load.is_void
            self._num_late[Level.HOST] += load.is_late
            self._counts[load.source].num_failed_loads += load.is_late
        ended: list[Transfer] = [*late]
        for read in self.reads:
            if read.state is ReadState.READING and not read.is_late and read.deadline_ns <= now_ns:
                read.is_late = True
                self._num_late[Level.DISK] += 1
                self._counts[Level.DISK].num_failed_loads += 1
        for read in list(self.reads):
            if read.is_abandoned or not self._is_over(read):
                continue
            ended.append(read)
            self.reads.drop(read)
        return ended

    def _is_over(self, read: PrefixRead) -> bool:
        """Whether a read should be dropped."""
        if read.state is ReadState.READY:
            read.deadline_ns = read.deadline_ns or self._now_ns + READY_NS
            return not read.is_wanted or read.deadline_ns <= self._now_ns
        is_late = self._num_late[Level.DISK] > 0 if read.state is ReadState.QUEUED else read.is_late
        return not read.is_wanted or is_late

    # Content that appears and disappears

    def restore(self, level: Level, contents: Iterable[Content]) -> int:
        """Add content that an earlier process stored, oldest first. Returns the number of pieces that were added."""
        return sum(self._by_level[level].add(content) is not None for content in contents)

    def lose(self, level: Level, contents: Iterable[Content]) -> None:
        """Forget content that the store of a level evicted or found damaged."""
        for content in contents:
            if self._by_level[level].remove(content):
                self._counts[level].num_lost += 1

    def finish_save(self, content: Content, level: Level, *, is_saved: bool) -> None:
        if self.saves.finish(content, level, is_saved):
            counts = self._counts[level]
            counts.num_saves += is_saved
            counts.num_failed_saves += not is_saved

    def pop_plan(self) -> Transfers:
        """Saves, loads and reads of the next plan, and content to drop from host memory before them."""
        loads = tuple(self._new_loads)
        self._new_loads = []
        saves, drops = self.saves.pop_plan()
        started = self.reads.start_queued()
        for read in started:
            read.deadline_ns = self._deadline_ns(())
        reads = tuple(Read(read.load_id, content, Level.DISK) for read in started for content in read.pieces)
        return saves, loads, drops, reads, self.reads.pop_dropped()

    def clear(self) -> None:
        """Forget everything. Loads in flight end without effect."""
        for level in self.levels:
            level.clear()
        self.reads.clear()
        self.loads.clear()
        self.saves.clear()

    def stats(self) -> tuple[LevelStats, ...]:
        return tuple(self._stats(level) for level in self.levels)

    def _stats(self, level: LowerLevel) -> LevelStats:
        counts = self._counts[level.level]
        return LevelStats(
            level=level.level,
            num_pieces=len(level),
            num_bytes=level.num_bytes,
            max_bytes=level.max_bytes,
            num_loads=counts.num_loads,
            num_loaded_tokens=counts.num_loaded_tokens,
            num_loaded_bytes=counts.num_loaded_bytes,
            num_failed_loads=counts.num_failed_loads,
            num_saves=counts.num_saves,
            num_failed_saves=counts.num_failed_saves,
            num_evictions=level.num_evictions + counts.num_lost,
            break_even_tokens=self.break_even(level),
        )
