"""Blocks of the three kinds of memory, and the free list that is also the eviction order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Self, TypeVar

from quire.core.values import TOKEN_BYTES
from quire.errors import InvalidRequest

BLOCK_SIZE = 32  # tokens
MAX_BLOCK_SIZE = 256
EMPTY_SLOT = 0  # the state before the first token: read, never written
NULL_BLOCK_ID = 0  # never allocated: padding in a runner's block tables may point here


def check_block_size(block_size: int) -> int:
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise InvalidRequest(f"block_size = {block_size!r} is not a power of two from 1 to {MAX_BLOCK_SIZE}")
    return block_size


class Linked:
    """A unit of memory, and an entry of a free list, with its own links: removal from the middle is O(1)."""

    __slots__ = ("block_id", "next_free", "parent_key", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.parent_key: bytes | None = None  # key of the full blocks before its content; None: not published
        self.prev_free: Self | None = None
        self.next_free: Self | None = None

    @property
    def is_published(self) -> bool:
        """Whether its content can be found."""
        return self.parent_key is not None


class KVCacheBlock(Linked):
    """One block of KV memory and, once its content is published, one node of the prefix tree.

        ref_count 0, not published   free, content undefined     front of the free list
        ref_count 0, published       free and cached             back of the free list, can be matched until taken
        ref_count >= 1               in use, never evicted       not in the free list

    Only `BlockPool` changes `ref_count`; only `PrefixTree` changes `key`, `parent_key`, `tokens`, `twins` and
    `last_child`.
    """

    __slots__ = ("is_reused", "key", "last_child", "tokens", "twins", "window")

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.key: bytes | None = None  # chain key; only of a published full block
        self.tokens = b""  # published tokens, packed (see chain.pack_tokens)
        self.twins: list[KVCacheBlock] | None = None  # on the indexed block: other blocks with the same content
        # On the indexed block: the full block after it that was added or found last. Most blocks have one child, and a
        # match then reads this instead of the tables of the tree.
        self.last_child: KVCacheBlock | None = None
        self.window: WindowBlock | None = None  # the same tokens in the layers with a window, while they are cached
        self.is_reused = False  # a second request used the content, and a lower level was told

    @property
    def num_tokens(self) -> int:
        """Number of published tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        state = "full" if self.key else "partial" if self.is_published else "private"
        return f"<block {self.block_id} ref_count={self.ref_count} {state}>"


class WindowBlock(Linked):
    """One block of window memory. If `node` is set, it holds the tokens of that node of the prefix tree."""

    __slots__ = ("is_kept", "node")

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.node: KVCacheBlock | None = None
        self.is_kept = False  # while free: in the list that is taken last

    def __repr__(self) -> str:
        return f"<window block {self.block_id} ref_count={self.ref_count} node={self.node!r}>"


class StateSlot(Linked):
    """One slot of state memory.

    Only `StatePool` changes `ref_count` and the fields of a published snapshot.
    """

    __slots__ = ("cost", "position", "run", "score")

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.position = 0  # number of tokens that the state covers, or will cover when the step in flight is done
        self.run = b""  # packed tokens after those blocks, fewer than a block
        self.cost = 0  # tokens to compute again without it
        self.score = 0  # the snapshot with the smallest score is evicted first

    def __repr__(self) -> str:
        kind = "snapshot" if self.is_published else "private"
        return f"<state {self.block_id} at {self.position} ref_count={self.ref_count} {kind}>"


L = TypeVar("L", bound=Linked)


class FreeKVCacheBlockQueue(Generic[L]):
    """Intrusive doubly linked list with two sentinels.

    Every operation is O(1), including removal from the middle. The list order is the eviction order. A prefix hit on a
    free block removes it from the middle.
    """

    __slots__ = ("_head", "_len", "_tail")

    def __init__(self, blocks: Iterable[L]) -> None:
        self._head = Linked(-1)
        self._tail = Linked(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._len = 0
        self.extend(blocks)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[L]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block  # type: ignore[misc]
            block = block.next_free

    def backwards(self) -> Iterator[L]:
        """All blocks, the last first. The list must not change meanwhile."""
        block = self._tail.prev_free
        while block is not None and block is not self._head:
            yield block  # type: ignore[misc]
            block = block.prev_free

    def pop_front(self) -> L:
        block = self._head.next_free
        if block is None or block is self._tail:
            raise IndexError("the free list is empty")
        self.remove(block)
        return block  # type: ignore[return-value]

    def append(self, block: L) -> None:
        self.extend((block,))

    def extend(self, blocks: Iterable[Linked]) -> None:
        """Append several blocks. Faster than `append` for each."""
        before: Linked | None = self._tail.prev_free
        assert before is not None
        for block in blocks:
            if block.next_free is not None:
                raise ValueError(f"{block!r} is already in the free list")
            block.prev_free, block.next_free = before, self._tail  # whole links, in case the next block raises
            before.next_free = self._tail.prev_free = block
            self._len += 1
            before = block

    def prepend(self, block: Linked) -> None:
        after = self._head.next_free
        assert after is not None
        if block.next_free is not None:
            raise ValueError(f"{block!r} is already in the free list")
        block.prev_free, block.next_free = self._head, after
        self._head.next_free = after.prev_free = block
        self._len += 1

    def remove(self, block: Linked) -> None:
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block!r} is not in the free list")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._len -= 1
