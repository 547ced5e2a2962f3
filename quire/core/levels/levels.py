"""Levels below the device: host memory and disk.

The prefix tree describes the device only. Content of lower levels is found by the same chain keys, after a match on the
device has ended. A prefix that is found there is loaded into new blocks and published in the tree; then it is a prefix
hit like any other. Content on disk is first read into host buffers. Meanwhile nothing is held on the device: when the
read ends, the search is repeated, and what was read counts as content of host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from quire.core.cache.context import TokenChain
from quire.core.cache.prefix import PrefixHit
from quire.core.levels.level_search import LevelSearch, Reach
from quire.core.levels.loads import Loaded, PrefixLoad, PrefixLoads
from quire.core.levels.lower_level import NS_PER_S, LowerLevel, Stored
from quire.core.levels.reads import READY_NS, UNLIMITED, PrefixRead, PrefixReads, ReadState, reads_of
from quire.core.levels.saves import SaveLimits, Saves
from quire.core.memory import Memory
from quire.core.request import Request
from quire.core.step import Content, Load, MemoryKind, Transfers
from quire.core.values import Level

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


class EndedWait(NamedTuple):
    """A load or read for which no request should wait any longer."""

    load_id: int
    is_late: bool  # else the cache was cleared


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

    def _start_reads(self) -> list[PrefixRead]:
        """Start the reads for which there are buffers."""
        started = self.reads.start_queued()
        for read in started:
            read.deadline_ns = self._deadline_ns(())
        return started

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

    def expire(self, now_ns: int) -> list[EndedWait]:
        """End waits for loads and reads that are late, or of no use since the cache was cleared.

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
        ended = [EndedWait(load.load_id, load.is_late) for load in late]
        for read in self.reads:
            if read.state is ReadState.READING and not read.is_late and read.deadline_ns <= now_ns:
                read.is_late = True
                self._num_late[Level.DISK] += 1
                self._counts[Level.DISK].num_failed_loads += 1
        for read in list(self.reads):
            if read.is_abandoned or not self._is_over(read):
                continue
            ended.append(EndedWait(read.load_id, not read.is_void))
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
        return saves, loads, drops, reads_of(self._start_reads()), self.reads.pop_dropped()

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
