"""Loads of prefixes from host memory: memory of the device for the copies, and publication of the loaded blocks.

Content on disk is read into host buffers first (`reads.py`). So a load copies within the machine: it always ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from quire.core.cache.block import KVCacheBlock, StateSlot, WindowBlock
from quire.core.cache.block_pool import BlockPool
from quire.core.cache.prefix import PrefixHit, PrefixTree
from quire.core.levels.level_search import Reach
from quire.core.memory.hybrid import HybridMemory
from quire.core.step import Content, Load, MemoryKind, MemoryRef
from quire.core.values import TOKEN_BYTES, Level

GROUPS = (16, 64)  # blocks of a load that are taken at a time: first, and later


@dataclass(slots=True)
class PrefixLoad:
    """A prefix that is copied to the device. It holds its blocks, and those before them, until the copies are done.

    Requests wait for it as they wait for a prefix that another request computes.
    """

    load_id: int
    deadline_ns: int  # after this, the requests that wait for it compute the prefix
    num_tokens: int  # that the load adds to the hit
    reach: Reach
    prefix: tuple[KVCacheBlock, ...]  # cached blocks that the loaded ones follow
    blocks: list[KVCacheBlock]
    windows: list[WindowBlock]
    state: StateSlot | None
    source: Level  # the slowest level that its content comes from
    read_ids: tuple[int, ...]  # of each piece: the read that brought it to a buffer; 0: it is in the host level
    is_abandoned: bool = False  # nothing waits for it any more
    is_late: bool = False  # it was abandoned because of its deadline
    is_void: bool = False  # the cache was cleared: its content must not be published

    @property
    def nodes(self) -> tuple[KVCacheBlock, ...]:
        """All blocks of the prefix, from the root."""
        return (*self.prefix, *self.blocks)

    @property
    def held_windows(self) -> tuple[WindowBlock, ...]:
        return (*self.reach.kept_windows, *self.windows)

    @property
    def held_states(self) -> tuple[StateSlot, ...]:
        return tuple(slot for slot in (self.reach.kept_state, self.state) if slot is not None)

    def loads_of_blocks(self, first: int) -> Iterator[Load]:
        """The copies of the blocks from this one on, in the order of the context."""
        load_id, block_kind = self.load_id, MemoryKind.BLOCK
        pieces = zip(self.reach.blocks[first:], self.blocks[first:], self.read_ids[first:], strict=False)
        for stored, block, read_id in pieces:
            yield Load(load_id, stored.content, stored.level, MemoryRef(block_kind, block.block_id), read_id)

    def loads_of_others(self) -> Iterator[Load]:
        """The copies of window blocks and of a state."""
        targets = [MemoryRef(MemoryKind.WINDOW, window.block_id) for window in self.windows]
        if self.state is not None:
            targets.append(MemoryRef(MemoryKind.STATE, self.state.slot_id))
        first = len(self.reach.blocks)
        pieces = zip(self.reach.pieces[first:], targets, self.read_ids[first:], strict=True)
        for stored, target, read_id in pieces:
            yield Load(self.load_id, stored.content, stored.level, target, read_id)


class Loaded(NamedTuple):
    """Result of a load."""

    num_tokens: int  # whose keys and values were published
    is_whole: bool


class PrefixLoads:
    """Loads in flight."""

    def __init__(
        self, tree: PrefixTree, pool: BlockPool, hybrid: HybridMemory | None, load_ids: count[int] | None = None
    ) -> None:
        self._load_ids = load_ids or count(1)
        self._tree = tree
        self._pool = pool
        self._windows = None if hybrid is None else hybrid.windows
        self._states = None if hybrid is None else hybrid.states
        self._loads: dict[int, PrefixLoad] = {}
        self._by_content: dict[Content, PrefixLoad] = {}
        self.groups = GROUPS

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[PrefixLoad]:
        return iter(self._loads.values())

    def get(self, load_id: int) -> PrefixLoad | None:
        return self._loads.get(load_id)

    def find(self, reach: Reach) -> PrefixLoad | None:
        """A load that already brings the first piece of this reach, for which a request can wait."""
        load = self._by_content.get(reach.pieces[0].content)
        return None if load is None or load.is_abandoned or load.is_void else load

    def shortage(self, hit: PrefixHit, reach: Reach) -> int:
        """Number of free blocks that a load lacks; window blocks and states count too."""
        prefix = self._prefix(hit, reach)
        num_revived = [block.ref_count for block in prefix].count(0)
        missing = len(reach.blocks) + num_revived - self._pool.num_free
        if self._windows is not None and reach.windows:
            num_revived = [block.ref_count for block in reach.kept_windows].count(0)
            missing = max(missing, len(reach.windows) + num_revived - self._windows.pool.num_free)
        if reach.state is not None and self._states is not None and not self._states.may_hold():
            missing = max(missing, 1)
        return missing

    def begin(
        self, hit: PrefixHit, reach: Reach, deadline_ns: int, *, num_tokens: int, read_ids: Sequence[int]
    ) -> PrefixLoad:
        """Take memory for a load, except for its blocks. `shortage` must not be positive."""
        prefix = self._prefix(hit, reach)
        self._pool.share(prefix)  # before blocks are taken, because taking may evict them
        if self._windows is not None:
            self._windows.pool.share(reach.kept_windows)
        if self._states is not None and reach.kept_state is not None:
            self._states.pool.share(reach.kept_state)
        for stored in reach.pieces:
            stored.num_loads += 1  # also before: what is evicted may be saved, and displace them
        state = None
        if reach.state is not None and self._states is not None:
            state = self._states.pool.take()
            state.position = reach.start
        load = PrefixLoad(
            next(self._load_ids),
            deadline_ns,
            num_tokens=num_tokens,
            reach=reach,
            prefix=prefix,
            blocks=[],
            windows=[] if self._windows is None else self._windows.pool.take(len(reach.windows)),
            state=state,
            source=reach.source,
            read_ids=tuple(read_ids),
        )
        self._loads[load.load_id] = load
        for stored in reach.pieces:
            self._by_content[stored.content] = load
        return load

    def take_blocks(self, load: PrefixLoad) -> Iterator[int]:
        """Take the blocks of a load in groups. Yields the number of blocks before each group, after it is taken.

        Taking hundreds of blocks evicts as many, which takes a few milliseconds.
        """
        num_blocks = len(load.reach.blocks)
        while (first := len(load.blocks)) < num_blocks:
            size = self.groups[first > 0]
            load.blocks += self._pool.take(min(size, num_blocks - first))
            yield first

    @staticmethod
    def _prefix(hit: PrefixHit, reach: Reach) -> tuple[KVCacheBlock, ...]:
        """Blocks of a hit that a load holds: the tail only if no other block takes its place."""
        return hit.blocks if hit.tail is None or reach.blocks else (*hit.blocks, hit.tail)

    def finish(self, load: PrefixLoad, failures: Collection[Content]) -> Loaded:
        """Publish what was loaded, up to the first failure, and release it.

        A released block goes to the end of the free list, so that it is still there when a waiter starts.
        """
        del self._loads[load.load_id]
        for stored in load.reach.pieces:
            stored.num_loads -= 1  # also of content that was cleared in the meantime, and is not indexed any more
            if self._by_content.get(stored.content) is load:
                del self._by_content[stored.content]
        loaded = Loaded(0, False) if load.is_void else self._publish(load, failures)
        self._pool.release((*load.prefix, *load.blocks))
        if self._windows is not None:
            self._windows.pool.release(load.held_windows, is_kept=True)
        if self._states is not None:
            for slot in load.held_states:
                self._states.pool.release(slot)
        return loaded

    def _publish(self, load: PrefixLoad, failures: Collection[Content]) -> Loaded:
        num_blocks = self._publish_blocks(load, failures)
        num_pieces = num_blocks + self._publish_windows(load, failures) + self._publish_state(load, failures)
        if num_pieces == len(load.reach.pieces):
            return Loaded(load.num_tokens, True)
        end = (len(load.prefix) + num_blocks) * self._tree.block_size
        num_unloaded = load.reach.start - min(end, load.reach.start)
        return Loaded(max(load.num_tokens - num_unloaded, 0) if num_blocks else 0, False)

    def _publish_blocks(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        parent_key = load.prefix[-1].key if load.prefix else None
        for number, (stored, block) in enumerate(zip(load.reach.blocks, load.blocks, strict=True)):
            content = stored.content
            is_first = not load.prefix and not number
            if content in failures or (content.parent_key != parent_key and not is_first):
                return number  # damaged, or the block before it could not be published
            is_full = len(content.tokens) == self._tree.block_size * TOKEN_BYTES
            self._pool.publish(block, content.parent_key, content.key if is_full else None, content.tokens)
            parent_key = block.key
        return len(load.blocks)

    def _publish_windows(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        num_loaded = 0
        for (stored, number), window in zip(load.reach.windows, load.windows, strict=True):
            assert self._windows is not None
            node = load.nodes[number]
            is_same = (node.parent_key, node.tokens) == (stored.content.parent_key, stored.tokens)
            if stored.content not in failures and is_same:
                if node.window is None:  # otherwise a request has computed it in the meantime
                    self._windows.pool.attach(window, node)
                num_loaded += 1
        return num_loaded

    def _publish_state(self, load: PrefixLoad, failures: Collection[Content]) -> int:
        stored, slot = load.reach.state, load.state
        if stored is None or slot is None or stored.content in failures:
            return 0
        num_full = slot.position // self._tree.block_size
        if num_full and load.nodes[num_full - 1].key != stored.content.parent_key:
            return 0  # the block before it could not be published
        assert self._states is not None
        self._states.pool.publish(slot, stored.content.parent_key, stored.tokens, load.num_tokens)
        return 1

    def clear(self) -> None:
        """Let the loads in flight end without effect: the cache was cleared."""
        for load in self._loads.values():
            load.is_void = True
        self._by_content.clear()
