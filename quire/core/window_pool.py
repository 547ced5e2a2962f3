"""The pool of window blocks: keys and values of the layers with a sliding window.

A request holds window blocks only for the tokens that its next token can see. Those behind the window are released
while it runs. A released block keeps its content as long as the KV block of the same tokens is in the prefix tree
and no other request takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from quire.core.block import NULL_BLOCK_ID, FreeKVCacheBlockQueue, KVCacheBlock, Linked
from quire.errors import InvalidRequest, OutOfBlocks


@dataclass(frozen=True, slots=True)
class WindowStats:
    num_blocks: int  # window blocks that can be allocated
    num_free: int  # including cached blocks
    num_cached: int  # free, with content that can be matched until the block is taken
    num_in_use: int  # held by requests or pins
    num_evictions: int


class WindowBlock(Linked):
    """One block of window memory. If `node` is set, it holds the tokens of that node of the prefix tree."""

    __slots__ = ("is_kept", "node")

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.node: KVCacheBlock | None = None
        self.is_kept = False  # while free: in the list that is taken last

    def __repr__(self) -> str:
        return f"<window block {self.block_id} ref_count={self.ref_count} node={self.node!r}>"


class WindowPool:
    """Allocates, shares and releases window blocks.

    Free blocks are taken in this order: blocks without content; blocks that were released behind the window of a
    running request; blocks that lie before a position where another request is expected to continue. Each group is in
    order of release.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidRequest(f"num_window_blocks = {num_blocks} is less than 2")
        self.blocks = [WindowBlock(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self._passed: FreeKVCacheBlockQueue[WindowBlock] = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self._kept: FreeKVCacheBlockQueue[WindowBlock] = FreeKVCacheBlockQueue(())
        self.num_cached = 0
        self.num_releases = 0
        self.num_evictions = 0
        self.on_eviction: Callable[[WindowBlock], None] | None = None  # called before a block loses its content

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._passed) + len(self._kept)

    def stats(self) -> WindowStats:
        return WindowStats(
            num_blocks=self.num_usable,
            num_free=self.num_free,
            num_cached=self.num_cached,
            num_in_use=self.num_usable - self.num_free,
            num_evictions=self.num_evictions,
        )

    def free(self) -> Iterator[WindowBlock]:
        """All free blocks, in the order in which they are taken."""
        return chain(self._passed, self._kept)

    def take(self, count: int) -> list[WindowBlock]:
        """Allocate `count` blocks of undefined content, or raise `OutOfBlocks` and allocate none."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count = } window blocks requested, {self.num_free} are free")
        taken = []
        for _ in range(count):
            block = (self._passed or self._kept).pop_front()
            if block.node is not None:
                if self.on_eviction is not None:
                    self.on_eviction(block)
                block.node.window = None
                block.node = None
                self.num_cached -= 1
                self.num_evictions += 1
            block.ref_count = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[WindowBlock]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
                self.num_cached -= block.node is not None
            block.ref_count += 1

    def release(self, blocks: Sequence[WindowBlock], *, is_kept: bool) -> None:
        """Drop one reference of each block. `is_kept`: another request is expected to continue after them."""
        self.num_releases += len(blocks)
        for block in blocks:
            assert block.ref_count > 0, f"{block!r} released without a reference"
            block.ref_count -= 1
            if block.ref_count:
                continue
            block.is_kept = is_kept and block.node is not None
            if block.node is None:
                self._passed.prepend(block)
            else:
                self.num_cached += 1
                (self._kept if block.is_kept else self._passed).append(block)

    def attach(self, block: WindowBlock, node: KVCacheBlock) -> None:
        """Record that a held block has the tokens of a published KV block, which has no window block yet."""
        assert block.ref_count > 0, f"{block!r} attached without a reference"
        assert block.node is None, f"{block!r} attached twice"
        assert node.window is None, f"{block!r} attached to {node!r}"
        block.node, node.window = node, block

    def detach(self, node: KVCacheBlock) -> None:
        """Forget the content of a node's window block: the node left the tree, or has other tokens now."""
        block = node.window
        if block is None:
            return
        node.window = block.node = None
        if block.ref_count == 0:
            self.num_cached -= 1
            self._unlink(block)
            block.is_kept = False
            self._passed.prepend(block)

    def _unlink(self, block: WindowBlock) -> None:
        (self._kept if block.is_kept else self._passed).remove(block)
