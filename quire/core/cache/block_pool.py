"""The block pool. Only this module changes reference counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.core.cache.block import NULL_BLOCK_ID, FreeKVCacheBlockQueue, KVCacheBlock
from quire.core.cache.prefix import PrefixTree
from quire.core.events import Evicted, Observer, ignore
from quire.errors import InvalidRequest, OutOfBlocks


@dataclass(frozen=True, slots=True)
class PoolStats:
    num_blocks: int  # blocks that can be allocated
    num_free: int  # including cached blocks
    num_cached: int  # free, with content that can be matched until the block is taken
    num_in_use: int  # held by requests or pins
    num_shared: int  # with two or more references
    num_evictions: int


class BlockPool:
    """Allocates, shares and releases blocks, and publishes their content in the prefix tree.

    Eviction is lazy: a released block keeps its content and stays in the tree until `take` needs it. A published block
    is released to the back of the free list, an unpublished one to the front. The blocks of a request are released tail
    first. So the block at the front is always the least valuable one.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree, observe: Observer = ignore) -> None:
        if num_blocks < 2:
            raise InvalidRequest(f"num_blocks = {num_blocks} is less than 2: block {NULL_BLOCK_ID} is never allocated")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.free = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self._tree = tree
        self._observe = observe
        self._num_cached = 0
        self._num_shared = 0
        self.num_evictions = 0
        self.on_eviction: Callable[[KVCacheBlock], None] | None = None  # called before a block loses its content
        self.num_releases = 0  # grows with each released block; callers compare it to detect that memory was freed
        self.changed: set[int] | None = None  # ids of changed blocks, emptied by a BlockMap; None: not recorded

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_shared(self) -> int:
        return self._num_shared

    def stats(self) -> PoolStats:
        num_free = len(self.free)
        return PoolStats(
            num_blocks=self.num_usable,
            num_free=num_free,
            num_cached=self._num_cached,
            num_in_use=self.num_usable - num_free,
            num_shared=self._num_shared,
            num_evictions=self.num_evictions,
        )

    def take(self, count: int) -> list[KVCacheBlock]:
        """Allocate `count` blocks of undefined content, or raise `OutOfBlocks` and allocate none."""
        if count > len(self.free):
            raise OutOfBlocks(f"{count = } blocks requested, {len(self.free)} are free")
        taken = []
        for _ in range(count):
            block = self.free.pop_front()
            if block.parent_key is not None:
                self._evict(block)
            block.ref_count = 1
            taken.append(block)
        self._note(taken)
        return taken

    def share(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block. Free blocks leave the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self.free.remove(block)
                if block.parent_key is not None:
                    self._num_cached -= 1
            elif block.ref_count == 1:
                self._num_shared += 1
            block.ref_count += 1
        self._note(blocks)

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
                self._num_shared -= 1
            elif num_left == 0:
                if block.parent_key is not None and self._tree.is_redundant(block):
                    self._tree.remove(block)  # a twin has the same content; one cached copy is enough
                if block.parent_key is None:
                    self.free.prepend(block)
                else:
                    cached.append(block)
        self._num_cached += len(cached)
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
            self._lose_content(self._tree.remove(block))
        inserted = self._tree.insert(block, parent_key, key, tokens)
        if inserted.superseded is not None:
            self._lose_content((inserted.superseded,))

    def evict_unused(self) -> int:
        """Evict the content of all free blocks. Returns the number of evicted blocks."""
        num_before = self._num_cached
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
        self._num_cached = 0
        if self.changed is not None:
            self.changed.update(range(NULL_BLOCK_ID + 1, len(self.blocks)))

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        if self.changed is not None:
            self.changed.update([block.block_id for block in blocks])

    def _evict(self, block: KVCacheBlock) -> None:
        """Drop the content of a cached block that has just left the free list."""
        if self.on_eviction is not None:
            self.on_eviction(block)
        num_tokens = block.num_tokens
        key = block.key
        self._num_cached -= 1
        self.num_evictions += 1
        descendants = self._tree.remove(block)
        if key is not None and self._tree.find(key) is None:
            self._tree.remember(key)
        if descendants:
            self._lose_content(descendants)
        if self._observe is not ignore:  # this is a hot path
            self._observe(Evicted(block.block_id, num_tokens, len(descendants)))

    def _lose_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Move blocks that just left the tree, if they are free, to the front of the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._num_cached -= 1
                self.free.remove(block)
                self.free.prepend(block)
                self._note((block,))
