"""Window tables of requests: which window blocks a request holds, and when it releases them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.block import NULL_BLOCK_ID, KVCacheBlock
from quire.core.continuation import Continuation
from quire.core.request import Request
from quire.core.step import BlockCopy
from quire.core.window_pool import WindowBlock, WindowPool
from quire.errors import InvalidRequest


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

    def growth(self, request: Request, upto: int) -> int:
        """Number of new blocks that a running request needs to compute up to `upto`."""
        return -(-upto // self._block_size) - len(request.window_table)

    def debt(self, request: Request) -> int:
        """Number of blocks that a running request may still need in addition to those it holds.

        Two chunks: one in flight, whose window is not released yet, and the next.
        """
        num_new = 2 * min(max(len(request.tokens) - request.num_computed, 1), self._max_chunk_tokens)
        num_held = len(request.window_table) - request.num_windows_passed
        return max(min(self._peak(num_new), -(-request.token_limit // self._block_size)) - num_held, 0)

    def needed(self, request: Request, continuation: Continuation) -> int:
        """Number of free blocks that a request needs to start: those it takes, and cached ones that it will hold."""
        num_new = min(len(request.tokens) - continuation.start, self._max_chunk_tokens)
        num_most = min(self._peak(num_new), -(-len(request.tokens) // self._block_size) + 1)
        return num_most - sum(block.ref_count > 0 for block in continuation.windows)

    # Verbs

    def start(self, request: Request, continuation: Continuation) -> list[BlockCopy]:
        """Start the window table of a request from a continuation."""
        pool, table = self.pool, [NULL_BLOCK_ID] * (continuation.start // self._block_size)
        first = len(table) - len(continuation.windows)
        pool.share(continuation.windows)
        table[first:] = [block.block_id for block in continuation.windows]
        request.num_windows_passed, request.num_windows_published = first, len(table)
        request.window_table = table
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

    def grow(self, request: Request, upto: int) -> None:
        num_new = self.growth(request, upto)
        if num_new > 0:
            request.window_table.extend([block.block_id for block in self.pool.take(num_new)])

    def settle(self, copies: Sequence[BlockCopy]) -> None:
        """Release the sources of copies whose step is done."""
        self.pool.release([self.pool.blocks[copy.source] for copy in copies], is_kept=True)

    def publish(self, request: Request) -> None:
        """Attach computed window blocks to the KV blocks of the same tokens, where these are in the tree."""
        num_full = request.num_computed // self._block_size
        for number in range(request.num_windows_published, -(-request.num_computed // self._block_size)):
            node = self._kv_blocks[request.block_table[number]]
            block = self.pool.blocks[request.window_table[number]]
            is_filled = node.num_tokens <= request.num_computed - number * self._block_size
            if node.is_published and is_filled and node.window is None and block.node is None and block.block_id:
                self.pool.attach(block, node)
        request.num_windows_published = max(num_full, request.num_windows_published)

    def release_passed(self, request: Request) -> None:
        """Release the blocks that no later token sees. Those that a token at one of its points sees are taken last."""
        first = request.num_windows_passed
        last = min(self.first_block(request.num_computed), len(request.window_table))
        if last <= first:
            return
        table = request.window_table
        for number in range(first, last):
            block = self.pool.blocks[table[number]]
            table[number] = NULL_BLOCK_ID
            if block.block_id != NULL_BLOCK_ID:
                self.pool.release((block,), is_kept=any(self._is_seen(number, point) for point in request.points))
        request.num_windows_passed = last

    def _is_seen(self, number: int, point: int) -> bool:
        """Whether a token at position `point` sees the block."""
        return self.first_block(point) <= number < -(-point // self._block_size)

    def release(self, request: Request) -> None:
        table = request.window_table[request.num_windows_passed :]
        request.window_table = []
        request.num_windows_passed = request.num_windows_published = 0
        self.pool.release(self.blocks(table), is_kept=True)

    def blocks(self, table: Sequence[int]) -> list[WindowBlock]:
        return [self.pool.blocks[block_id] for block_id in table if block_id != NULL_BLOCK_ID]
