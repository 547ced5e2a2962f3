"""Window blocks, which hold keys and values of the layers with a sliding window: their pool, and who holds them.

A request holds window blocks only for the tokens that its next token can see. Those behind the window are released
while it runs. A released block keeps its content as long as the KV block of the same tokens is in the prefix tree
and no other request takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from quire.core.cache.block import NULL_BLOCK_ID, FreeKVCacheBlockQueue, KVCacheBlock, WindowBlock
from quire.core.cache.context import Context
from quire.core.cache.prefix import Continuation
from quire.core.step import BlockCopy
from quire.errors import InvalidRequest, OutOfBlocks


@dataclass(frozen=True, slots=True)
class WindowStats:
    num_blocks: int  # window blocks that can be allocated
    num_free: int  # including cached blocks
    num_cached: int  # free, with content that can be matched until the block is taken
    num_in_use: int  # held by requests or pins
    num_evictions: int


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


class WindowMemory:
    """Extends, publishes and releases the window tables of requests.

    The window table has one entry per block of the context. Entries behind the window are 0.
    """

    def __init__(self, num_blocks: int, window: int, block_size: int, kv_blocks: Sequence[KVCacheBlock]) -> None:
        if window < 1:
            raise InvalidRequest(f"{window = } is less than 1")
        self.pool = WindowPool(num_blocks)
        self.window = window
        self._block_size = block_size
        self._kv_blocks = kv_blocks
        self._max_chunk_tokens = 1

    def reserve(self, max_chunk_tokens: int) -> None:
        """Check that a request that runs alone always fits."""
        self._max_chunk_tokens = max_chunk_tokens
        needed = self._peak(max_chunk_tokens)
        if needed > self.pool.num_usable:
            raise InvalidRequest(
                f"num_window_blocks = {self.pool.num_usable + 1} is less than {needed + 1}: a window of {self.window}"
                f" tokens and a chunk of max_chunk_tokens = {max_chunk_tokens} need them"
            )

    def _peak(self, num_new: int) -> int:
        """Blocks that a request holds at most while it computes `num_new` tokens, with the source of a tail copy."""
        return (self.window - 1 + num_new) // self._block_size + 3

    def first_block(self, position: int) -> int:
        """Number of the first block that a token at `position` sees."""
        return max(position - self.window + 1, 0) // self._block_size

    # Room

    def growth(self, context: Context, upto: int) -> int:
        """Number of new blocks that a running request needs to compute up to `upto`."""
        return -(-upto // self._block_size) - len(context.window_table)

    def debt(self, context: Context) -> int:
        """Number of blocks that a running request may still need in addition to those it holds.

        Two chunks: one in flight, whose window is not released yet, and the next.
        """
        num_new = 2 * min(max(len(context.tokens) - context.num_computed, 1), self._max_chunk_tokens)
        num_held = len(context.window_table) - context.num_windows_passed
        return max(min(self._peak(num_new), -(-context.token_limit // self._block_size)) - num_held, 0)

    def needed(self, context: Context, continuation: Continuation) -> int:
        """Number of free blocks that a request needs to start: those it takes, and cached ones that it will hold."""
        num_new = min(len(context.tokens) - continuation.start, self._max_chunk_tokens)
        num_most = min(self._peak(num_new), -(-len(context.tokens) // self._block_size) + 1)
        return num_most - sum(block.ref_count > 0 for block in continuation.windows)

    # Verbs

    def start(self, context: Context, continuation: Continuation) -> list[BlockCopy]:
        """Start the window table of a request from a continuation."""
        pool, table = self.pool, [NULL_BLOCK_ID] * (continuation.start // self._block_size)
        first = len(table) - len(continuation.windows)
        pool.share(continuation.windows)
        table[first:] = [block.block_id for block in continuation.windows]
        context.num_windows_passed, context.num_windows_published = first, len(table)
        context.window_table = table
        tail = continuation.window_tail
        if tail is None:
            return []
        pool.share((tail,))  # if it is copied, until the copy is done
        if continuation.is_window_adoptable:
            table.append(tail.block_id)
            return []
        (block,) = pool.take(1)
        table.append(block.block_id)
        return [BlockCopy(tail.block_id, block.block_id)]

    def grow(self, context: Context, upto: int) -> None:
        num_new = self.growth(context, upto)
        if num_new > 0:
            context.window_table.extend([block.block_id for block in self.pool.take(num_new)])

    def settle(self, copies: Sequence[BlockCopy]) -> None:
        """Release the sources of copies whose step is done."""
        self.pool.release([self.pool.blocks[copy.source] for copy in copies], is_kept=True)

    def publish(self, context: Context) -> None:
        """Attach computed window blocks to the KV blocks of the same tokens, where these are in the tree."""
        num_full = context.num_computed // self._block_size
        for number in range(context.num_windows_published, -(-context.num_computed // self._block_size)):
            node = self._kv_blocks[context.block_table[number]]
            block = self.pool.blocks[context.window_table[number]]
            is_filled = node.num_tokens <= context.num_computed - number * self._block_size
            if node.is_published and is_filled and node.window is None and block.node is None and block.block_id:
                self.pool.attach(block, node)
        context.num_windows_published = max(num_full, context.num_windows_published)

    def release_passed(self, context: Context) -> None:
        """Release the blocks that no later token sees. Those that a token at one of its points sees are taken last."""
        first = context.num_windows_passed
        last = min(self.first_block(context.num_computed), len(context.window_table))
        if last <= first:
            return
        table = context.window_table
        for number in range(first, last):
            block = self.pool.blocks[table[number]]
            table[number] = NULL_BLOCK_ID
            if block.block_id != NULL_BLOCK_ID:
                self.pool.release((block,), is_kept=any(self._is_seen(number, point) for point in context.points))
        context.num_windows_passed = last

    def _is_seen(self, number: int, point: int) -> bool:
        """Whether a token at position `point` sees the block."""
        return self.first_block(point) <= number < -(-point // self._block_size)

    def release(self, context: Context) -> None:
        table = context.window_table[context.num_windows_passed :]
        context.window_table = []
        context.num_windows_passed = context.num_windows_published = 0
        self.pool.release(self.blocks(table), is_kept=True)

    def blocks(self, table: Sequence[int]) -> list[WindowBlock]:
        return [self.pool.blocks[block_id] for block_id in table if block_id != NULL_BLOCK_ID]
