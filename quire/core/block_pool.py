"""The block pool: the only place where reference counts change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.core.block import NULL_BLOCK_ID, FreeKVCacheBlockQueue, KVCacheBlock
from quire.core.events import Evicted, Observer, ignore
from quire.core.prefix import PrefixTree
from quire.errors import InvalidRequest, OutOfBlocks


@dataclass(frozen=True, slots=True)
class PoolStats:
    num_blocks: int  # that can be handed out
    num_free: int  # cached ones included
    num_cached: int  # free, but findable until taken
    num_in_use: int  # held by requests or kept by pins
    num_shared: int  # held more than once
    num_evictions: int


class BlockPool:
    """Hands out blocks, shares them, takes them back, and lets the prefix tree find what they contain.

    Eviction is lazy: a released block keeps its content, and stays in the tree, until `take` needs it. A released block
    goes to the back of the free list when it is published and to the front when its content is worth nothing, and a
    request's blocks are released tail first, so the front of the list is always what is missed least.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree, observe: Observer = ignore) -> None:
        if num_blocks < 2:
            raise InvalidRequest(f"num_blocks = {num_blocks} is less than 2: block {NULL_BLOCK_ID} is never handed out")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.free = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self._tree = tree
        self._observe = observe
        self._num_cached = 0
        self._num_shared = 0
        self._num_evictions = 0
        self.num_releases = 0  # a count of changes, for those who remember what did not fit
        self.changed: set[int] | None = None  # ids of blocks since someone last looked; None: nobody does

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
            num_evictions=self._num_evictions,
        )

    def take(self, count: int) -> list[KVCacheBlock]:
        """`count` blocks of undefined content from the front of the free list, or none at all."""
        if count > len(self.free):
            raise OutOfBlocks(f"{count = } blocks asked of {len(self.free)} free")
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
        """Hold blocks that have content: one more reference each, out of the free list if they lie there."""
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
        """Give up one reference each. Pass blocks in table order; they are released tail first."""
        self.num_releases += len(blocks)
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block!r} released by someone who does not hold it"
            block.ref_count -= 1
            if block.ref_count == 1:
                self._num_shared -= 1
            elif block.ref_count == 0:
                if block.parent_key is not None and self._tree.is_redundant(block):
                    self._tree.remove(block)  # a twin keeps the position; one copy is enough to remember
                if block.parent_key is None:
                    self.free.prepend(block)
                else:
                    self._num_cached += 1
                    self.free.append(block)
        self._note(blocks)

    def fork(self, source: KVCacheBlock) -> KVCacheBlock:
        """A new block to copy `source` into. Holds `source` as well, until the copy is known to be done."""
        self.share((source,))
        return self.take(1)[0]

    def publish(self, block: KVCacheBlock, parent_key: bytes, key: bytes | None, tokens: bytes) -> None:
        """Make the content of a held block findable, in place of what it was findable by before.

        Unless the tree has that tail already, alone or as part of more, or the key collides with other content.
        """
        assert block.ref_count > 0, f"{block!r} published by someone who does not hold it"
        if block.parent_key is not None:
            self._lose_content(self._tree.remove(block))
        inserted = self._tree.insert(block, parent_key, key, tokens)
        if inserted.superseded is not None:
            self._lose_content((inserted.superseded,))

    def evict_unused(self) -> int:
        """Forget all content that nobody holds. Returns how many blocks lost theirs."""
        num_before = self._num_cached
        for block in list(self.free):
            if block.parent_key is not None:
                self.free.remove(block)
                self._evict(block)
                self.free.prepend(block)
                self._note((block,))
        return num_before

    def clear(self) -> None:
        """Forget all content, of held blocks too; nobody loses a block."""
        self._tree.clear()
        self._num_cached = 0
        if self.changed is not None:
            self.changed.update(range(NULL_BLOCK_ID + 1, len(self.blocks)))

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        if self.changed is not None:
            self.changed.update([block.block_id for block in blocks])

    def _evict(self, block: KVCacheBlock) -> None:
        """Drop the content of a cached block that has just left the free list."""
        num_tokens = block.num_tokens
        key = block.key
        self._num_cached -= 1
        self._num_evictions += 1
        descendants = self._tree.remove(block)
        if key is not None and self._tree.standing(key) is None:
            self._tree.remember(key)
        if descendants:
            self._lose_content(descendants)
        if self._observe is not ignore:  # this is a hot path
            self._observe(Evicted(block.block_id, num_tokens, len(descendants)))

    def _lose_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks that just left the tree: the free ones among them are now the first to take."""
        for block in blocks:
            if block.ref_count == 0:
                self._num_cached -= 1
                self.free.remove(block)
                self.free.prepend(block)
                self._note((block,))
