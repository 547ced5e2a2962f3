"""The pools of the three kinds of memory. Only this module changes reference counts.

Eviction is lazy in all of them: what is released keeps its content, and can be found, until `take` needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from quire.core.cache.block import NULL_BLOCK_ID, FreeKVCacheBlockQueue, KVCacheBlock, Linked, StateSlot, WindowBlock
from quire.core.cache.prefix import PrefixTree
from quire.core.events import Evicted, Observer, ignore
from quire.errors import InvalidRequest, OutOfBlocks

B = TypeVar("B", bound=Linked)


@dataclass(frozen=True, slots=True)
class PoolStats:
    num_blocks: int  # blocks that can be allocated
    num_free: int  # including cached blocks
    num_cached: int  # free, with content that can be matched until the block is taken
    num_in_use: int  # held by requests or pins
    num_evictions: int


@dataclass(frozen=True, slots=True)
class StateStats:
    num_slots: int  # slots that can be allocated
    num_free: int  # without content
    num_cached: int  # snapshots that no request or pin holds
    num_in_use: int  # live states of requests, and snapshots held by requests or pins
    num_snapshots: int  # held or not
    num_evictions: int


class Pool(Generic[B]):
    """Allocates and shares the blocks of one kind. The first one is never allocated."""

    def __init__(self, blocks: list[B]) -> None:
        self.blocks = blocks
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.free = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self.lists = [self.free]  # of free blocks
        self.num_cached = 0  # free, with content
        self.num_shared = 0  # with two or more references
        self.num_evictions = 0
        self.num_releases = 0  # grows with each released block; callers compare it to detect that memory was freed
        self.on_eviction: Callable[[B], None] | None = None  # called before a block loses its content
        self.changed: set[int] | None = None  # ids of changed blocks, emptied by a BlockMap; None: not recorded
        # Attributes, because calls of the list's methods are faster than of methods that call them.
        self._pop: Callable[[], B] = self.free.pop_front  # removes the block that is taken next from the free ones
        self._unlink: Callable[[B], None] = self.free.remove  # removes a block from the free ones

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can return, including cached ones."""
        return len(self.free)

    def stats(self) -> PoolStats:
        num_free = self.num_free
        return PoolStats(self.num_usable, num_free, self.num_cached, self.num_usable - num_free, self.num_evictions)

    def take(self, count: int) -> list[B]:
        """Allocate `count` blocks of undefined content, or raise `OutOfBlocks` and allocate none."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count = } blocks requested, {self.num_free} are free")
        taken, pop = [], self._pop
        for _ in range(count):
            block = pop()
            if block.parent_key is not None:
                self._evict(block)
            block.ref_count = 1
            taken.append(block)
        self._note(taken)
        return taken

    def share(self, blocks: Sequence[B]) -> None:
        """Add one reference to each block. Free blocks are not free any more."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
                if block.parent_key is not None:
                    self.num_cached -= 1
            elif block.ref_count == 1:
                self.num_shared += 1
            block.ref_count += 1
        self._note(blocks)

    def release(self, blocks: Sequence[B]) -> None:
        """Drop one reference of each block."""
        self.num_releases += len(blocks)
        for block in blocks:
            assert block.ref_count > 0, f"{block!r} released without a reference"
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
            elif block.ref_count == 0 and block.parent_key is None:
                self.free.prepend(block)
            elif block.ref_count == 0:
                self.num_cached += 1
                self._keep(block)

    def _note(self, blocks: Sequence[B]) -> None:
        if self.changed is not None:
            self.changed.update([block.block_id for block in blocks])

    def _keep(self, block: B) -> None:
        """Add a cached block to the free ones."""

    def _evict(self, block: B) -> None:
        """Drop the content of a cached block that is not among the free ones any more."""
        if self.on_eviction is not None:
            self.on_eviction(block)
        self.num_cached -= 1
        self.num_evictions += 1
        self._lose(block)

    def _lose(self, block: B) -> None:
        """Forget the content of a block."""

    def _lose_cached(self, block: B) -> None:
        """Forget the content of a block that cannot be found any more."""
        self._move_first(block)
        self._lose(block)

    def _move_first(self, block: B) -> None:
        """If a block is free, take it first from now on: its content is lost."""
        if block.ref_count == 0:
            self._unlink(block)
            self.num_cached -= 1
            self.free.prepend(block)
            self._note((block,))


class BlockPool(Pool[KVCacheBlock]):
    """KV blocks. Publishes their content in the prefix tree, where it stays until `take` needs the block.

    A published block is released to the back of the free list, an unpublished one to the front. The blocks of a request
    are released tail first. So the block at the front is always the least valuable one.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree, observe: Observer = ignore) -> None:
        if num_blocks < 2:
            raise InvalidRequest(f"num_blocks = {num_blocks} is less than 2: block {NULL_BLOCK_ID} is never allocated")
        super().__init__([KVCacheBlock(block_id) for block_id in range(num_blocks)])
        self._tree = tree
        self._observe = observe

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference of each block.

        Pass blocks in table order; they are released tail first.
        """
        self.num_releases += len(blocks)
        cached: list[KVCacheBlock] = []
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block!r} released without a reference"
            block.ref_count = num_left = block.ref_count - 1
            if num_left == 1:
                self.num_shared -= 1
            elif num_left == 0:
                if block.parent_key is not None and self._tree.is_redundant(block):
                    self._tree.remove(block)  # a twin has the same content; one cached copy is enough
                if block.parent_key is None:
                    self.free.prepend(block)
                else:
                    cached.append(block)
        self.num_cached += len(cached)
        self.free.extend(cached)
        self._note(blocks)

    def fork(self, source: KVCacheBlock) -> KVCacheBlock:
        """Allocate a block to copy `source` into.

        Also holds `source`, until the copy is done (`settle`).
        """
        self.share((source,))
        return self.take(1)[0]

    def publish(self, block: KVCacheBlock, parent_key: bytes, key: bytes | None, tokens: bytes) -> None:
        """Insert the content of a held block into the tree, in place of its previous content.

        A tail is not inserted if the tree already contains it, alone or as part of a longer one. A full block is not
        inserted if its key collides with other content.
        """
        assert block.ref_count > 0, f"{block!r} published without a reference"
        if block.parent_key is not None:
            for lost in self._tree.remove(block):
                self._move_first(lost)
        superseded = self._tree.insert(block, parent_key, key, tokens)
        if superseded is not None:
            self._move_first(superseded)

    def evict_unused(self) -> int:
        """Evict the content of all free blocks. Returns the number of evicted blocks."""
        num_before = self.num_cached
        for block in list(self.free):
            if block.parent_key is not None:
                self.free.remove(block)
                self._evict(block)
                self.free.prepend(block)
                self._note((block,))
        return num_before

    def clear(self) -> None:
        """Unpublish the content of all blocks, including held ones. References do not change."""
        self._tree.clear()
        self.num_cached = 0
        if self.changed is not None:
            self.changed.update(range(NULL_BLOCK_ID + 1, len(self.blocks)))

    def _evict(self, block: KVCacheBlock) -> None:
        if self.on_eviction is not None:
            self.on_eviction(block)
        num_tokens = block.num_tokens
        key = block.key
        self.num_cached -= 1
        self.num_evictions += 1
        descendants = self._tree.remove(block)
        if key is not None and self._tree.find(key) is None:
            self._tree.remember(key)
        for lost in descendants:
            self._move_first(lost)
        if self._observe is not ignore:  # this is a hot path
            self._observe(Evicted(block.block_id, num_tokens, len(descendants)))


class WindowPool(Pool[WindowBlock]):
    """Window blocks. Their content is found by the node of the prefix tree with the same tokens.

    Free blocks are taken in this order: blocks without content; blocks that were released behind the window of a
    running request; blocks that lie before a position where another request is expected to continue. Each group is in
    order of release.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__([WindowBlock(block_id) for block_id in range(num_blocks)])
        self.kept: FreeKVCacheBlockQueue[WindowBlock] = FreeKVCacheBlockQueue(())  # taken after those of `free`
        self.lists.append(self.kept)
        self._pop, self._unlink = self._pop_front, self._unlink_window

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.kept)

    def _pop_front(self) -> WindowBlock:
        return (self.free or self.kept).pop_front()

    def release(self, blocks: Sequence[WindowBlock], *, is_kept: bool = True) -> None:
        """Drop one reference of each block. `is_kept`: another request is expected to continue after them."""
        for block in blocks:
            block.is_kept = is_kept and block.node is not None
        super().release(blocks)

    def attach(self, block: WindowBlock, node: KVCacheBlock) -> None:
        """Record that a held block has the tokens of a published KV block, which has no window block yet."""
        assert block.ref_count > 0, f"{block!r} attached without a reference"
        assert block.node is None, f"{block!r} attached twice"
        assert node.window is None, f"{block!r} attached to {node!r}"
        block.node, node.window, block.parent_key = node, block, node.parent_key

    def detach(self, node: KVCacheBlock) -> None:
        """Forget the content of a node's window block: the node left the tree, or has other tokens now."""
        if node.window is not None:
            self._lose_cached(node.window)

    def _keep(self, block: WindowBlock) -> None:
        (self.kept if block.is_kept else self.free).append(block)

    def _unlink_window(self, block: WindowBlock) -> None:
        (self.kept if block.is_kept else self.free).remove(block)

    def _lose(self, block: WindowBlock) -> None:
        assert block.node is not None
        block.node.window = block.node = block.parent_key = None
        block.is_kept = False


class StatePool(Pool[StateSlot]):
    """Slots of recurrent states. A snapshot is found by its content.

    All slots have the same size, so the value of a snapshot per byte is the number of tokens it saves. The score of a
    snapshot is that number plus the score of the last evicted one, at its publication and again at each use
    (GreedyDual). So a snapshot that saves many tokens outlives several that save few, and one that is not used again
    is evicted in the end, however many tokens it saves.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__([StateSlot(slot_id) for slot_id in range(num_slots)])  # `free` has those without content
        self._index: dict[bytes, dict[bytes, StateSlot]] = {}  # parent key -> run -> snapshot
        self._heap: list[tuple[int, int, StateSlot]] = []  # (score, serial number, snapshot); may hold stale entries
        self._num_pushes = 0
        self._clock = 0  # score of the last evicted snapshot
        self.num_snapshots = 0  # published, held or not
        self._pop, self._unlink = self._pop_least, self._leave_stale

    @property
    def num_free(self) -> int:
        return len(self.free) + self.num_cached

    def state_stats(self) -> StateStats:
        return StateStats(
            num_slots=self.num_usable,
            num_free=len(self.free),
            num_cached=self.num_cached,
            num_in_use=self.num_usable - self.num_free,
            num_snapshots=self.num_snapshots,
            num_evictions=self.num_evictions,
        )

    def at(self, parent_key: bytes) -> dict[bytes, StateSlot]:
        """Snapshots between the full block with this key and the next one, by the tokens after that block."""
        return self._index.get(parent_key, {})

    def publish(self, slot: StateSlot, parent_key: bytes, run: bytes, cost: int) -> None:
        """Make a held state a snapshot. If there is one of the same tokens already, that one is kept instead."""
        assert slot.ref_count > 0, f"{slot!r} published without a reference"
        assert slot.parent_key is None, f"{slot!r} published twice"
        found = self._index.setdefault(parent_key, {})
        known = found.get(run)
        if known is not None:
            self.touch(known)
            return
        found[run] = slot
        slot.parent_key, slot.run, slot.cost = parent_key, run, max(cost, 1)
        slot.score = self._clock + slot.cost
        self.num_snapshots += 1

    def touch(self, slot: StateSlot) -> None:
        """Renew the score of a snapshot that was used."""
        slot.score = self._clock + slot.cost
        if slot.ref_count == 0:
            self._keep(slot)

    def forget(self, parent_key: bytes) -> None:
        """Drop the snapshots after a block that left the prefix tree: nothing can reach them."""
        for slot in list(self.at(parent_key).values()):
            self._lose_cached(slot)

    def clear(self) -> None:
        for key in list(self._index):
            self.forget(key)

    def evict_unused(self) -> int:
        """Evict all snapshots that no request or pin holds. Returns their number."""
        num_before = self.num_cached
        while self.num_cached:
            slot = self._least()
            self._evict(slot)
            self.free.prepend(slot)
        return num_before

    def _pop_least(self) -> StateSlot:
        return self.free.pop_front() if self.free else self._least()

    def _least(self) -> StateSlot:
        """Remove the cached snapshot with the smallest score from the heap."""
        while True:
            score, _, slot = entry = heappop(self._heap)
            if self._is_current(entry):
                self._clock = score
                return slot

    @staticmethod
    def _is_current(entry: tuple[int, int, StateSlot]) -> bool:
        score, _, slot = entry
        return slot.parent_key is not None and slot.ref_count == 0 and slot.score == score

    def _leave_stale(self, slot: StateSlot) -> None:
        """A snapshot that is shared leaves a stale entry in the heap."""

    def _lose(self, block: StateSlot) -> None:
        assert block.parent_key is not None
        runs = self._index[block.parent_key]
        del runs[block.run]
        if not runs:
            del self._index[block.parent_key]
        block.parent_key, block.run = None, b""
        self.num_snapshots -= 1

    def _keep(self, block: StateSlot) -> None:
        self._num_pushes += 1
        heappush(self._heap, (block.score, self._num_pushes, block))
        if len(self._heap) > 2 * self.num_cached + 16:
            best = {entry[2].block_id: entry for entry in self._heap if self._is_current(entry)}
            self._heap = list(best.values())
            heapify(self._heap)
