"""Levels below the device: host memory and disk. Reads, loads and saves of prefixes.

The prefix tree describes the device only. Content of lower levels is found by the same chain keys, after a match on the
device has ended. A prefix that is found there is loaded into new blocks and published in the tree; then it is a prefix
hit like any other. Content on disk is first read into host buffers. Meanwhile nothing is held on the device: when the
read ends, the search is repeated, and what was read counts as content of host memory. So a load copies within the
machine: it always ends. A read is in one of three states:

    queued     holds nothing, until there are buffers for it
    reading    holds buffers, until its deadline has passed and the store reports its end
    ready      holds buffers, until they are copied to the device or nothing needs them

A read that never ends holds its buffers for ever, and nothing else. Their number is limited (`LowerLevel.buffers`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count, takewhile
from typing import Any, NamedTuple

from quire.core.cache import KVCacheBlock, Linked, Pool, PrefixHit, StateSlot, TokenChain, WindowBlock
from quire.core.levels.lower_level import LowerLevel, PieceCounts, Reach, Search, Stored, content_of
from quire.core.memory import Held, Memory
from quire.core.request import Request, RequestState
from quire.core.step import NO_TRANSFERS, Content, Load, MemoryKind, MemoryRef, Read, Save, Transfers
from quire.core.values import NS_PER_S, TOKEN_BYTES, Level

PARTS = 4  # a read takes at most this part of the buffers, so that others are read while it is copied
READY_NS = 1_000_000_000  # content that was read is dropped after this, if it could not be copied to the device
UNLIMITED: PieceCounts = (1 << 30, 1 << 30, 1 << 30)
GROUPS = (16, 64)  # blocks of a load that are taken at a time: first, and later
MIN_TIMEOUT_NS = 2_000_000_000  # a load is given up after this, or after TIMEOUT_FACTOR times its expected duration
TIMEOUT_FACTOR = 10
LEARNED_PIECES = 4  # a load of at least this many shows the speed of its level
RETRY_NS = 60_000_000_000  # after this long without a load, one is made although it may not pay
USED_PER_STEP = 2  # blocks that were used again, saved in one step
MAX_USED = 4096  # of them that wait
CREDIT_PER_REGRET = 64  # blocks that are written to disk for each prefix that was evicted and wanted again
MAX_CREDIT = 4096
MAX_VISITED = 2000  # blocks that an idle search looks at in one call
_Piece = tuple[Content, MemoryRef | None]  # content, and where it is on the device; None: it is in host memory


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


@dataclass(slots=True)
class PrefixRead(Transfer):
    """Pieces that are read together. The deadline of one that is ready: when it is dropped, 0 if it has just ended."""

    users: list[Request]  # that began it or have waited for it
    pieces: dict[Content, Stored] = field(default_factory=dict)  # but those that failed or are copied to the device
    kinds: Counter[MemoryKind] = field(default_factory=Counter)  # of the pieces, when it began
    state: ReadState = ReadState.QUEUED
    is_alone: bool = False  # no other read was in flight when it began

    @property
    def is_wanted(self) -> bool:
        """Whether a waiting request may still use it."""
        return not self.is_void and any(user.state is RequestState.WAITING for user in self.users)


@dataclass(slots=True)
class PrefixLoad(Transfer):
    """A prefix that is copied to the device. It holds its blocks, and those before them, until the copies are done."""

    num_tokens: int  # that the load adds to the hit
    reach: Reach
    read_ids: list[int]  # of each piece: the read that brought it to a buffer; 0: it is in the host level
    blocks: list[KVCacheBlock]
    windows: list[WindowBlock]
    states: list[StateSlot]

    @property
    def nodes(self) -> tuple[KVCacheBlock, ...]:
        """All blocks of the prefix, from the root."""
        return (*self.reach.kept.blocks, *self.blocks)

    @property
    def held(self) -> Held:
        kept = self.reach.kept
        return Held(self.nodes, (*kept.windows, *self.windows), (*kept.states, *self.states))

    def copies(self, first: int, targets: Iterable[Linked]) -> list[Load]:
        """The copies of the pieces from this one on to these targets."""
        return [
            Load(self.load_id, one.content, one.level, MemoryRef(one.content.kind, target.block_id), read_id)
            for one, target, read_id in zip(self.reach.pieces[first:], targets, self.read_ids[first:], strict=False)
        ]


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


def _shortage(pool: Pool[Any], num_new: int, kept: Sequence[Linked]) -> int:
    """Number of blocks that a load lacks if it takes new ones and holds others, which may be free."""
    return num_new + [block.ref_count for block in kept].count(0) - pool.num_free


def _forget(table: dict[Content, Any], content: Content, transfer: Transfer) -> None:
    if table.get(content) is transfer:
        del table[content]


class Levels:
    """The levels below the device: stored content, reads, loads and saves. There may be none."""

    def __init__(self, memory: Memory, levels: Sequence[LowerLevel], limits: SaveLimits) -> None:
        self.levels = tuple(levels)  # the fastest first
        self._by_level = {level.level: level for level in levels}
        self._memory = memory
        self._block_size = memory.tree.block_size
        # The first finds everything, the second only what is in host memory.
        self._searches = Search(memory, self.levels), Search(memory, self.levels, self._is_in_host_memory)
        self.saves = Saves(memory, levels, limits=limits)
        self.ns_per_token: int | None = None  # measured duration of computing a prompt token; None: unknown
        self._load_ids = count(1)
        # Reads and loads in the order of their start, and by content those for which a request can wait
        self.reads: dict[int, PrefixRead] = {}
        self.loads: dict[int, PrefixLoad] = {}
        self._reading: dict[Content, PrefixRead] = {}
        self._loading: dict[Content, PrefixLoad] = {}
        self.max_buffers = next((level.buffers for level in levels if level.buffers is not None), UNLIMITED)
        self.num_buffers = [0, 0, 0]  # in use, of each kind
        self.groups = GROUPS
        # Called with the first pieces of a load while memory for the others is taken, which takes milliseconds. The
        # plan has the others, at least one. Not called if content must be saved before it is overwritten.
        self.on_loads: Callable[[tuple[Load, ...]], None] | None = None
        self._new_loads: list[Load] = []
        self._dropped_reads: list[int] = []
        self._num_late: Counter[Level] = Counter()  # in flight after their deadline: reads of the disk, loads from host
        self._now_ns = 0
        self._last_begin_ns = 0  # start of the last load, or of this process

    # Whether a load pays

    def find(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """How far the levels extend a hit; None if not at all."""
        return self._searches[0].find(chain, limit, hit) if self.levels else None

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

    def _is_ready(self, stored: Stored) -> bool:
        read = self._reading.get(stored.content)
        return read is not None and read.state is ReadState.READY

    def _is_in_host_memory(self, stored: Stored) -> bool:
        """Whether a load of this piece needs no read."""
        return stored.level is not Level.DISK or self._is_ready(stored)

    def unread(self, reach: Reach) -> list[Stored]:
        return [stored for stored in reach.pieces if not self._is_in_host_memory(stored)]

    def _pays(self, hit: PrefixHit, reach: Reach) -> bool:
        """Whether a load is faster than computing its tokens. False for a level that is late.

        Loads and computations in flight are not considered: a request waits behind others in either case. A load is
        also tried if there was none for a while, because a disk that was slow may be fast again.
        """
        missing = [stored for stored in reach.pieces if not self._is_ready(stored)]
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

    def shortage(self, reach: Reach) -> int:
        """Number of free blocks that a load lacks; window blocks and states count too."""
        memory, kept = self._memory, reach.kept
        missing = [_shortage(memory.blocks, len(reach.blocks), kept.blocks)]
        if reach.windows:
            missing.append(_shortage(memory.windows.pool, len(reach.windows), kept.windows))
        if reach.states and not memory.states.may_hold():
            missing.append(1)
        return max(missing)

    def bring(self, request: Request, hit: PrefixHit, reach: Reach) -> Transfer:
        """Start what brings a reach closer to the device, unless it is in flight. Returns what to wait for.

        What is in host memory is copied to the device, what is on disk is read. `shortage` must not be positive.
        """
        first = reach.pieces[0].content
        load = self._loading.get(first)
        if load is not None and not load.is_abandoned and not load.is_void:
            return load
        num_ready = sum(1 for _ in takewhile(self._is_in_host_memory, reach.pieces))
        self._read(self.unread(reach), request)
        if not num_ready:
            return self._reading[first]
        part = reach.first_pieces(num_ready, self._block_size, len(hit.blocks))
        return self._load(hit, part, is_part=part is not reach)

    # Reads

    def _read(self, pieces: Iterable[Stored], request: Request) -> None:
        """Queue reads of pieces on disk for a request, and let it use those that are queued or in flight already."""
        new: list[Stored] = []
        part: PrefixRead | None = None
        for stored in pieces:
            kind = stored.content.kind
            if (read := self._reading.get(stored.content)) is not None:
                if request not in read.users:
                    read.users.append(request)
                continue
            if part is None or part.kinds[kind] >= max(self.max_buffers[kind] // PARTS, 1):
                part = PrefixRead([request], load_id=next(self._load_ids))
                self.reads[part.load_id] = part
            part.pieces[stored.content] = stored
            part.kinds[kind] += 1
            self._reading[stored.content] = part
            new.append(stored)
        for stored in reversed(new):  # the first block of a prefix is evicted last
            self._by_level[stored.level].touch(stored.content)

    def _start_reads(self) -> list[PrefixRead]:
        """Start the reads for which there are buffers, in order."""
        started: list[PrefixRead] = []
        is_alone = not any(read.state is ReadState.READING for read in self.reads.values())
        for read in self.reads.values():
            if read.state is not ReadState.QUEUED:
                continue
            if any(self.num_buffers[kind] + number > self.max_buffers[kind] for kind, number in read.kinds.items()):
                break
            self._count_buffers(read.kinds, 1)
            read.state, read.is_alone = ReadState.READING, is_alone
            is_alone = False
            started.append(read)
        for read in started:
            read.deadline_ns = self._deadline_ns(())
        return started

    def _count_buffers(self, kinds: Counter[MemoryKind], sign: int) -> None:
        for kind, number in kinds.items():
            self.num_buffers[kind] += sign * number

    def finish_read(self, read: PrefixRead, failures: Collection[Content], read_ns: int) -> None:
        """End a read in flight. What was read is ready, unless nothing needs it. Failed pieces are forgotten."""
        if read.is_alone and not failures and read_ns:
            self._learn_speed(read.pieces.values(), read_ns)
        self._num_late[Level.DISK] -= read.is_late
        failed = [read.pieces[content] for content in failures if content in read.pieces]
        for stored in () if read.is_void else failed:
            self._by_level[stored.level].num_failed_loads += 1
            self._by_level[stored.level].remove(stored.content)
        if read.is_abandoned:
            del self.reads[read.load_id]
            self._count_buffers(read.kinds, -1)
            return
        read.state, read.deadline_ns = ReadState.READY, 0
        for stored in failed:
            self.num_buffers[stored.content.kind] -= 1
            _forget(self._reading, stored.content, read)
            self._remove_piece(read, stored)

    def _remove_piece(self, read: PrefixRead, stored: Stored) -> None:
        del read.pieces[stored.content]
        if not read.pieces:
            del self.reads[read.load_id]

    def _take_read(self, stored: Stored) -> int:
        """Remove a piece that is copied to the device now from its read, and return the read's number.

        Its buffer is in use until the load ends.
        """
        read = self._reading.pop(stored.content)
        self._remove_piece(read, stored)
        return read.load_id

    def _drop_read(self, read: PrefixRead) -> None:
        """Drop what was read or is queued. A read in flight is abandoned: it holds its buffers until it ends."""
        for content in read.pieces:
            _forget(self._reading, content, read)
        if read.state is ReadState.READING:
            read.is_abandoned = True
        else:
            del self.reads[read.load_id]
        if read.state is ReadState.READY:
            self._count_buffers(Counter(content.kind for content in read.pieces), -1)
        if read.state is not ReadState.QUEUED:
            self._dropped_reads.append(read.load_id)

    def _learn_speed(self, pieces: Collection[Stored], took_ns: int) -> None:
        """Adjust the speed of the disk to a read: files may be in the page cache, or on a busy disk."""
        level = self._by_level[Level.DISK]
        num_bytes = self._num_bytes(pieces)[Level.DISK]
        if level.speed is not None and num_bytes >= LEARNED_PIECES * level.sizes[MemoryKind.BLOCK]:
            seen = num_bytes * NS_PER_S // max(took_ns - level.speed.latency_ns, 1)
            level.speed = level.speed._replace(bytes_per_s=max((3 * level.speed.bytes_per_s + seen) // 4, 1))

    def _awaited_reads(self) -> list[PrefixRead]:
        """The reads in flight that are waited for."""
        return [read for read in self.reads.values() if read.state is ReadState.READING and not read.is_abandoned]

    @property
    def last_deadline_ns(self) -> int:
        """When all reads in flight that are waited for are late. 0: there are none."""
        return max((read.deadline_ns for read in self._awaited_reads()), default=0)

    def _deadline_ns(self, pieces: Iterable[Stored]) -> int:
        """When copies of these pieces that begin now are late. They are expected to be made after those in flight."""
        self._last_begin_ns = self._now_ns
        num_bytes = self._num_bytes(pieces)
        for read in self._awaited_reads():
            num_bytes += self._num_bytes(read.pieces.values())
        for load in self.loads.values():
            num_bytes += self._num_bytes(load.reach.pieces)
        return self._now_ns + max(MIN_TIMEOUT_NS, TIMEOUT_FACTOR * self._load_ns(num_bytes))

    # Loads

    def _load(self, hit: PrefixHit, reach: Reach, *, is_part: bool) -> PrefixLoad:
        """Start a load of pieces in host memory.

        `is_part`: the request will need more than this reach. A part of a hybrid's memory saves no tokens by itself.
        """
        memory, deadline_ns = self._memory, self._deadline_ns(reach.pieces)
        memory.share(reach.kept)  # before blocks are taken, because taking may evict them
        read_ids = [self._take_read(stored) if stored.level is Level.DISK else 0 for stored in reach.pieces]
        for stored in reach.pieces:
            stored.num_loads += 1  # also before: what is evicted may be saved, and displace them
        states = memory.states.pool.take(len(reach.states))
        for state in states:
            state.position = reach.start
        load = PrefixLoad(
            load_id=next(self._load_ids),
            deadline_ns=deadline_ns,
            num_tokens=0 if is_part and memory.is_hybrid else reach.start - hit.start,
            reach=reach,
            read_ids=read_ids,
            blocks=[],
            windows=memory.windows.pool.take(len(reach.windows)),
            states=states,
        )
        self.loads[load.load_id] = load
        self._loading.update((stored.content, load) for stored in reach.pieces)
        self._take_blocks(load)
        self._new_loads += load.copies(len(reach.blocks), (*load.windows, *load.states))
        for stored in reversed(reach.pieces):
            self._by_level[stored.level].touch(stored.content)
        return load

    def _take_blocks(self, load: PrefixLoad) -> None:
        """Take the blocks of a load in groups: taking hundreds evicts as many, which takes a few milliseconds."""
        num_blocks = len(load.reach.blocks)
        new: list[Load] = []
        while (first := len(load.blocks)) < num_blocks:
            load.blocks += self._memory.blocks.take(min(self.groups[first > 0], num_blocks - first))
            new += load.copies(first, load.blocks[first:])
            is_last = len(load.blocks) == num_blocks
            if self.on_loads is not None and not is_last and not self.saves.has_chosen:
                self.on_loads(tuple(new))
                new.clear()
        self._new_loads += new

    def finish(self, load: PrefixLoad, failures: Collection[Content]) -> tuple[int, bool]:
        """End a load: publish what was loaded, up to the first failure, and release it. Failed pieces are forgotten.

        A released block goes to the end of the free list, so that it is still there when a waiter starts. Returns the
        number of tokens whose keys and values were published, and whether everything was.
        """
        del self.loads[load.load_id]
        for stored in load.reach.pieces:
            stored.num_loads -= 1  # also of content that was cleared in the meantime, and is not indexed any more
            _forget(self._loading, stored.content, load)
        loaded = (0, False) if load.is_void else self._publish(load, failures)
        self._memory.release(load.held)
        self._num_late[Level.HOST] -= load.is_late
        for stored, read_id in zip(load.reach.pieces, load.read_ids, strict=True):
            level, kind = self._by_level[stored.level], stored.content.kind
            self.num_buffers[kind] -= read_id > 0
            if stored.content in failures:
                level.num_failed_loads += 1
                if level.remove(stored.content) and stored.level is Level.HOST:
                    self.saves.drop(stored.content)
            else:
                level.num_loaded_bytes += level.sizes[kind]
        level = self._by_level[load.reach.source]
        level.num_loads += 1
        level.num_loaded_tokens += loaded[0]
        return loaded

    def _publish(self, load: PrefixLoad, failures: Collection[Content]) -> tuple[int, bool]:
        num_blocks = self._publish_blocks(load, failures)
        num_pieces = num_blocks + self._publish_windows(load, failures) + self._publish_states(load, failures)
        if num_pieces == len(load.reach.pieces):
            return load.num_tokens, True
        end = (len(load.reach.kept.blocks) + num_blocks) * self._block_size
        num_unloaded = load.reach.start - min(end, load.reach.start)
        return max(load.num_tokens - num_unloaded, 0) if num_blocks else 0, False

    def _publish_blocks(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        prefix = load.reach.kept.blocks
        parent_key = prefix[-1].key if prefix else None
        for number, (stored, block) in enumerate(zip(load.reach.blocks, load.blocks, strict=True)):
            content = stored.content
            is_first = not prefix and not number
            if content in failures or (content.parent_key != parent_key and not is_first):
                return number  # damaged, or the block before it could not be published
            is_full = len(content.tokens) == self._block_size * TOKEN_BYTES
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

    def _publish_states(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        for stored, slot in zip(load.reach.states, load.states, strict=True):
            num_full, parent_key = slot.position // self._block_size, stored.content.parent_key
            if stored.content in failures or (num_full and load.nodes[num_full - 1].key != parent_key):
                return 0  # damaged, or the block before it could not be published
            self._memory.states.pool.publish(slot, parent_key, stored.tokens, load.num_tokens)
        return len(load.states)

    def expire(self, now_ns: int) -> list[Transfer]:
        """End waits for loads and reads that are late, or of no use since the cache was cleared. Returns these.

        They stay in flight, because copies cannot be recalled. If the disk is late, queued reads are given up too. What
        was read is dropped if no request needs it, or none could use it for a while.
        """
        self._now_ns = now_ns
        self._last_begin_ns = self._last_begin_ns or now_ns
        ended: list[Transfer] = []
        for load in self.loads.values():
            if not load.is_abandoned and (load.is_void or load.deadline_ns <= now_ns):
                load.is_abandoned, load.is_late = True, not load.is_void
                self._num_late[Level.HOST] += load.is_late
                self._by_level[load.reach.source].num_failed_loads += load.is_late
                ended.append(load)
        for read in self.reads.values():
            if read.state is ReadState.READING and not read.is_late and read.deadline_ns <= now_ns:
                read.is_late = True
                self._num_late[Level.DISK] += 1
                self._by_level[Level.DISK].num_failed_loads += 1
        for read in list(self.reads.values()):
            if not read.is_abandoned and self._is_over(read):
                ended.append(read)
                self._drop_read(read)
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
            self._by_level[level].num_evictions += self._by_level[level].remove(content)

    def pop_plan(self) -> Transfers:
        """Saves, loads and reads of the next plan, and content to drop from host memory before them."""
        if not self.levels:
            return NO_TRANSFERS
        saves, drops = self.saves.pop_plan()
        reads = [Read(read.load_id, content, Level.DISK) for read in self._start_reads() for content in read.pieces]
        transfers = saves, tuple(self._new_loads), drops, tuple(reads), tuple(self._dropped_reads)
        self._new_loads, self._dropped_reads = [], []
        return transfers

    def clear(self) -> None:
        """Forget everything. Loads in flight end without effect."""
        for level in self.levels:
            level.clear()
        for transfer in (*self.reads.values(), *self.loads.values()):
            transfer.is_void = True
        self._reading.clear()
        self._loading.clear()
        self.saves.clear()

    def stats(self) -> tuple[LevelStats, ...]:
        return tuple(
            LevelStats(
                level=level.level,
                num_pieces=len(level),
                num_bytes=level.num_bytes,
                max_bytes=level.max_bytes,
                num_loads=level.num_loads,
                num_loaded_tokens=level.num_loaded_tokens,
                num_loaded_bytes=level.num_loaded_bytes,
                num_failed_loads=level.num_failed_loads,
                num_saves=level.num_saves,
                num_failed_saves=level.num_failed_saves,
                num_evictions=level.num_evictions,
                break_even_tokens=self.break_even(level),
            )
            for level in self.levels
        )


class SaveLimits(NamedTuple):
    max_bytes: int = 0  # of one plan; a piece that does not fit is not saved
    idle_bytes: int = 0  # of one plan while nothing runs
    max_pending: int = 0  # saves in flight
    max_writes: int = 0  # of them, those that wait to be written to disk


NO_SAVES = SaveLimits()


class Saves:
    """Chooses the content that is saved to lower levels: saves of the next plan, and those in flight.

        evicted from the device     to host memory; to disk if it was used twice, or after regrets (`note_regret`)
        used a second time, pinned  to disk, a few blocks per step
        the rest                    to disk, while nothing runs, as much as the disk can hold: also what host memory has

    A save costs a copy on the device and, for a disk, processor time. So a server that is always busy does not write
    content that was used once to disk: at a hit rate of zero, nothing is written.
    """

    def __init__(self, memory: Memory, levels: Sequence[LowerLevel], *, limits: SaveLimits) -> None:
        self._memory = memory
        self._tree = memory.tree
        self._levels = {level.level: level for level in levels}
        self._max_bytes, self._idle_bytes, self._max_pending, self._max_writes = limits
        self._chosen: deque[Save] = deque()
        self._num_chosen_bytes = 0
        self._drops: list[Content] = []
        self.pending: dict[Content, set[Level]] = {}  # saves in flight, with the levels that they have not reached yet
        self._used: deque[tuple[KVCacheBlock, bytes]] = deque()
        self._credit = 0  # evicted blocks that may be written to disk
        self._walk: Iterator[Sequence[_Piece]] | None = None  # over cached content, while idle
        self._walk_state: tuple[int, ...] = ()
        self._num_walked_bytes = 0
        self._unvisited: deque[_Piece] = deque()  # pieces that the walk has reached
        self._done_state: tuple[int, ...] = ()  # no cached content is unsaved since then
        self.num_skipped = 0  # evicted pieces that were not saved because a plan or the level was full
        if levels:
            memory.blocks.on_eviction = self._note_eviction
            memory.windows.pool.on_eviction = self._note_window_eviction
            memory.states.pool.on_eviction = self._note_state_eviction

    @property
    def has_chosen(self) -> bool:
        """Whether the next plan has saves, or content to drop."""
        return bool(self._chosen or self._drops)

    @property
    def _is_disk_filled(self) -> bool:
        disk = self._levels.get(Level.DISK)
        return disk is not None and disk.is_filled

    # What happened

    def note_use(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Record that cached blocks were used again or pinned."""
        if not self._is_disk_filled:
            return
        for block in blocks:
            if not block.is_reused and block.key is not None and len(self._used) < MAX_USED:
                block.is_reused = True
                self._used.append((block, block.key))

    def note_regret(self) -> None:
        """Record that a request would have used content that was evicted and not saved."""
        self._credit = min(self._credit + CREDIT_PER_REGRET, MAX_CREDIT)

    def _note_eviction(self, block: KVCacheBlock) -> None:
        """Save a block that is about to lose its content, with the window block and the states that it takes along."""
        if not self._memory.groups and block.key is not None and self._is_stored(block, block.key):
            return
        if self._save_node(block, self._wanted(block), is_evicted=True):
            self._credit = max(self._credit - 1, 0)

    def _is_stored(self, block: KVCacheBlock, key: bytes) -> bool:
        """Whether a full block needs no save. A short cut for the usual case: a prompt may evict hundreds of blocks."""
        host, disk = self._levels.get(Level.HOST), self._levels.get(Level.DISK)
        if host is not None and host.is_filled and not host.touch_block(key, block.tokens):
            return False
        return (
            disk is None
            or not disk.is_filled
            or not (block.is_reused or self._credit > 0)
            or disk.touch_block(key, block.tokens)
        )

    def _note_window_eviction(self, window: WindowBlock) -> None:
        node = window.node
        if window.is_kept and node is not None and node.parent_key is not None:
            self._choose(self._piece(MemoryKind.WINDOW, node, window), self._wanted(node), is_evicted=True)

    def _note_state_eviction(self, slot: StateSlot) -> None:
        assert slot.parent_key is not None
        self._choose(self._state_piece(slot), self._wanted(self._tree.find(slot.parent_key)), is_evicted=True)

    def _wanted(self, node: KVCacheBlock | None) -> tuple[Level, ...]:
        """The levels to which evicted content of a node is saved. None: the root.

        A window block or a state is of no use on a disk that does not have the block. So both go there if the block
        does: because it was used again, because evicted content was wanted again, or while nothing ran.
        """
        disk = self._levels.get(Level.DISK)
        is_to_disk = disk is not None and self._credit > 0
        if disk is not None and node is not None and not is_to_disk:
            is_to_disk = node.is_reused or disk.has_key(content_of(self._tree, node))
        return tuple(
            name for name, level in self._levels.items() if level.is_filled and (name is Level.HOST or is_to_disk)
        )

    # Choosing

    def _piece(self, kind: MemoryKind, node: KVCacheBlock, block: Linked) -> _Piece:
        """The content of a node that is in this block."""
        return content_of(self._tree, node, kind), MemoryRef(kind, block.block_id)

    def _state_piece(self, slot: StateSlot) -> _Piece:
        assert slot.parent_key is not None
        key = self._tree.digest(slot.parent_key, slot.run)
        content = Content(MemoryKind.STATE, key, slot.parent_key, slot.run)
        return content, MemoryRef(MemoryKind.STATE, slot.block_id)

    def _pieces(self, block: KVCacheBlock) -> list[_Piece]:
        """The content of a node: its block, its window block, and the states after it. Empty if it is not published."""
        if block.parent_key is None:
            return []
        pieces = [self._piece(MemoryKind.BLOCK, block, block)]
        window = block.window
        if window is not None and (window.is_kept or window.ref_count):
            pieces.append(self._piece(MemoryKind.WINDOW, block, window))
        if block.key is not None:
            pieces += map(self._state_piece, self._memory.states.pool.at(block.key).values())
        return pieces

    def _save_node(self, block: KVCacheBlock, levels: tuple[Level, ...], *, is_evicted: bool = False) -> bool:
        """Choose everything that a node has. Returns whether its block was chosen."""
        chosen = [self._choose(piece, levels, is_evicted=is_evicted) for piece in self._pieces(block)]
        return bool(chosen) and chosen[0]

    def _choose(self, piece: _Piece, wanted: Iterable[Level], *, is_evicted: bool = False) -> bool:
        """Add a save to the next plan, to those levels that do not have the content. Returns False if there are none.

        `is_evicted`: the content is lost otherwise. If the plan or the level is full, it displaces what was evicted
        before it in this plan. The pool evicts the least valuable content first, and the last block of a prefix before
        the first one, without which the others cannot be found.
        """
        content, source = piece
        levels: list[Level] = []
        for level in wanted:
            self._levels[level].touch(content)
            is_known = level in self.pending.get(content, ()) or self._levels[level].has_key(content)
            if not is_known and not (level is Level.DISK and self._has_backlog()):
                levels.append(level)
        if not levels:
            return False
        num_bytes = self._levels[levels[0]].sizes[content.kind]
        while self._is_full(num_bytes, self._max_bytes):
            if not is_evicted or not self._chosen:
                self.num_skipped += 1
                return False
            self._cancel(self._chosen.popleft())
        levels = [level for level in levels if self._reserve(self._levels[level], content.kind, is_evicted=is_evicted)]
        if not levels:
            self.num_skipped += 1
            return False
        self._num_chosen_bytes += num_bytes
        self.pending.setdefault(content, set()).update(levels)
        self._chosen.append(Save(content, source, tuple(levels)))
        return True

    def _reserve(self, level: LowerLevel, kind: MemoryKind, *, is_evicted: bool) -> bool:
        """Make room in a level. Returns False if it is full of content that is being loaded or saved."""
        has_room, dropped = level.reserve(kind)
        while not has_room and is_evicted and self._chosen and (level.limits is None or level.limits[kind]):
            self._cancel(self._chosen.popleft())
            has_room, dropped = level.reserve(kind)
        if dropped is not None:
            self._drops.append(dropped)
        return has_room

    def _is_full(self, num_bytes: int, max_bytes: int) -> bool:
        """Whether the next plan has no room for a piece. One piece always fits."""
        is_over = self._num_chosen_bytes > 0 and self._num_chosen_bytes + num_bytes > max_bytes
        return is_over or len(self.pending) >= self._max_pending

    def _has_backlog(self) -> bool:
        """Whether so much waits to be written to disk that more is not chosen."""
        return sum(self._levels[Level.DISK].num_reserved) >= self._max_writes

    def _cancel(self, save: Save) -> None:
        """Take a save out of the next plan."""
        for level in save.levels:
            self._end(save.content, level)
        self._num_chosen_bytes -= self._levels[save.levels[0]].sizes[save.content.kind]
        self.num_skipped += 1

    def _end(self, content: Content, level: Level) -> None:
        """Remove a save that is pending, and the room that is reserved for it."""
        levels = self.pending[content]
        levels.remove(level)
        if not levels:
            del self.pending[content]
        self._levels[level].num_reserved[content.kind] -= 1

    def drop(self, content: Content) -> None:
        """Tell host memory that content is not used any more."""
        self._drops.append(content)

    # Plans

    def pop_plan(self) -> tuple[tuple[Save, ...], tuple[Content, ...]]:
        """The saves of the next plan, and the content to drop from host memory before they are made."""
        for _ in range(min(USED_PER_STEP, len(self._used))):
            if self._has_backlog():
                break
            block, key = self._used.popleft()
            if block.key == key:
                self._save_node(block, (Level.DISK,))
        saves, drops = tuple(self._chosen), tuple(self._drops)
        if saves or drops:
            self._chosen.clear()
            self._drops.clear()
            self._num_chosen_bytes = 0
        return saves, drops

    def choose_idle(self, pinned: Iterable[KVCacheBlock] = ()) -> None:
        """Choose unsaved content for the disk until a plan is full. Call it while idle.

        Pinned content is first, then the most recently used, then that of host memory, and only as much as the disk can
        hold. Every piece is tried once: a save that failed, because the disk is full, would fail again.
        """
        if not self.has_unsaved:
            return
        if self._walk is None or self._walk_state != self._state():
            self._walk, self._walk_state, self._num_walked_bytes = self._cached(pinned), self._state(), 0
            self._unvisited.clear()
        disk = self._levels[Level.DISK]
        max_bytes = min(self._idle_bytes, self._max_bytes)
        for _ in range(MAX_VISITED):
            if self._unvisited:
                if self._has_backlog() or self._is_full(disk.sizes[self._unvisited[0][0].kind], max_bytes):
                    return
                self._choose(self._unvisited.popleft(), (Level.DISK,))
                continue
            pieces = next(self._walk, None)
            if pieces is not None:
                self._unvisited.extend(pieces)
                self._num_walked_bytes += sum(disk.sizes[content.kind] for content, _ in pieces)
            if pieces is None or (disk.store_bytes is not None and self._num_walked_bytes > disk.store_bytes):
                self._unvisited.clear()
                self._walk, self._done_state = None, self._walk_state
                return

    def _state(self) -> tuple[int, ...]:
        """Changes with the cached content and with the free list, over which the walk goes."""
        blocks, windows, states = self._memory.pools
        counts = [blocks.num_releases, blocks.num_evictions, blocks.num_free]
        counts += [windows.num_releases, windows.num_evictions, windows.num_free, states.num_evictions]
        if Level.HOST in self._levels:
            counts.append(self._levels[Level.HOST].num_added)
        return tuple(counts)

    @property
    def has_unsaved(self) -> bool:
        """Whether `choose_idle` may find something."""
        return self._is_disk_filled and self._done_state != self._state()

    def _cached(self, pinned: Iterable[KVCacheBlock]) -> Iterator[Sequence[_Piece]]:
        """All cached content, the most valuable first."""
        yield from map(self._pieces, [*pinned])
        yield from map(self._pieces, self._memory.blocks.free.backwards())
        disk, host = self._levels[Level.DISK], self._levels.get(Level.HOST)
        if host is None:
            return
        for stored in [one for kind in MemoryKind for one in reversed(host.pieces(kind).values())]:
            is_known = disk.has_key(stored.content) or stored.content in self.pending
            yield () if is_known or stored.content not in host else ((stored.content, None),)

    def finish(self, content: Content, level: Level, *, is_saved: bool) -> None:
        """End a save to one level, unless the cache was cleared in the meantime."""
        if level not in self.pending.get(content, ()):
            return
        self._end(content, level)
        stored = self._levels[level]
        stored.num_saves += is_saved
        stored.num_failed_saves += not is_saved
        if is_saved:
            stored.add(content)

    def clear(self) -> None:
        self._chosen.clear()
        self._drops.clear()
        self._num_chosen_bytes = 0
        self.pending.clear()
        self._used.clear()
        self._unvisited.clear()
        self._walk, self._credit = None, 0
        for level in self._levels.values():
            level.num_reserved = [0, 0, 0]
