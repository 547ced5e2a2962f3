"""Loads of prefixes from host memory: memory of the device for the copies, and publication of the loaded blocks.

Content on disk is read into host buffers first (`reads.py`). So a load copies within the machine: it always ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from quire.core.cache.block import KVCacheBlock, Linked, StateSlot, WindowBlock
from quire.core.cache.pool import Pool
from quire.core.cache.prefix import PrefixHit
from quire.core.levels.level_search import Reach
from quire.core.memory import Held, Memory
from quire.core.step import Content, Load, MemoryRef
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


class PrefixLoads:
    """Loads in flight."""

    def __init__(self, memory: Memory, load_ids: count[int]) -> None:
        self._load_ids = load_ids
        self._memory = memory
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
            next(self._load_ids),
            deadline_ns,
            num_tokens=num_tokens,
            reach=reach,
            prefix=prefix,
            blocks=[],
            windows=memory.windows.pool.take(len(reach.windows)),
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
        del self._loads[load.load_id]
        for stored in load.reach.pieces:
            stored.num_loads -= 1  # also of content that was cleared in the meantime, and is not indexed any more
            if self._by_content.get(stored.content) is load:
                del self._by_content[stored.content]
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

    def clear(self) -> None:
        """Let the loads in flight end without effect: the cache was cleared."""
        for load in self._loads.values():
            load.is_void = True
        self._by_content.clear()
