"""Blocks, and the context of a request: its tokens, their chain keys, and the memory of keys, values and states.

Blocks of the three kinds of memory are linked in a free list, which is also the eviction order.

A chain key is a hash that identifies a block by its tokens and all tokens before it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
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
        self.twins: tuple[KVCacheBlock, ...] = ()  # on the indexed block: other blocks with the same content
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
        if block.next_free is not None or after is None:
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


KEY_BYTES = 16
BLOCKS_PER_BATCH = 64  # blocks packed at a time during a match; those after the first miss are not needed yet

Digest = Callable[[bytes, bytes], bytes]

_blank = blake2b(digest_size=KEY_BYTES)  # copying it is faster than creating a new one


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack tokens as big-endian 32-bit words, so that comparing bytes compares tokens in order."""
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The tokens of `pack_tokens`."""
    words = array("I", packed)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def root_key(secret: bytes, salt: str) -> bytes:
    """Parent key of the first block for one salt.

    Without the secret, keys and collisions cannot be computed.
    """
    return blake2b(salt.encode(), digest_size=KEY_BYTES, key=secret, person=b"quire root").digest()


def hash_block_tokens(parent_key: bytes, tokens: bytes) -> bytes:
    """Chain key of a block. The same tokens after a different parent have a different key."""
    state = _blank.copy()
    state.update(parent_key)
    state.update(tokens)
    return state.digest()


class TokenChain:
    """Chain keys of one request's blocks. Each is computed once, on first use."""

    __slots__ = ("_block_size", "_blocks", "_digest", "_keys", "_tokens", "root")

    def __init__(self, root: bytes, tokens: array[int], block_size: int, digest: Digest) -> None:
        self.root = root
        self._tokens = tokens  # by reference; it only grows at the end
        self._block_size = block_size
        self._digest = digest
        self._blocks: list[bytes] = []  # packed tokens of the first full blocks
        self._keys: list[bytes] = []  # chain keys of the first full blocks, of fewer or as many

    def key(self, index: int) -> bytes:
        """Chain key of full block `index`. All of its tokens must be known."""
        keys = self._keys
        if len(keys) <= index:
            self.block(index)
            digest = self._digest
            key = keys[-1] if keys else self.root
            for block in self._blocks[len(keys) : index + 1]:
                key = digest(key, block)
                keys.append(key)
        return keys[index]

    def parent_key(self, index: int) -> bytes:
        return self.key(index - 1) if index else self.root

    def block(self, index: int) -> bytes:
        """Packed tokens of full block `index`."""
        if len(self._blocks) <= index:
            self._pack(index + 1)
        return self._blocks[index]

    def entries(self, start: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """Chain keys and packed tokens of the full blocks [start, stop)."""
        self.key(stop - 1)
        self.block(stop - 1)
        return zip(self._keys[start:stop], self._blocks[start:stop], strict=True)

    def blocks(self, count: int) -> Iterator[bytes]:
        """Packed tokens of the first `count` blocks, packed as the iterator advances."""
        return chain.from_iterable(self._batches(count))

    def _batches(self, count: int) -> Iterator[list[bytes]]:
        start = 0
        while start < count:
            end = min(count, start + BLOCKS_PER_BATCH)
            self.block(end - 1)
            yield self._blocks[start:end]
            start = end

    def learn(self, keys: Sequence[bytes]) -> None:
        """Take the keys of the first blocks from cached blocks with the same content: they are not computed."""
        self._keys += keys[len(self._keys) :]

    def num_common(self, other: TokenChain, known: int, most: int) -> int:
        """Number of leading full blocks that two chains share, at most `most`.

        The caller knows that they share the first `known` blocks. Compares tokens, which is much faster than hashing
        them. A chain that waits until the other one is computed finds the keys in the blocks that it then matches.
        """
        size, ours, theirs = self._block_size, self._tokens, other._tokens
        while known < most:
            middle = (known + most + 1) // 2
            if ours[known * size : middle * size] == theirs[known * size : middle * size]:
                known = middle
            else:
                most = middle - 1
        return known

    def run(self, start: int, stop: int) -> bytes:
        """Packed tokens [start, stop)."""
        return pack_tokens(self._tokens[start:stop])

    def _pack(self, count: int) -> None:
        size = self._block_size * TOKEN_BYTES
        packed = self.run(len(self._blocks) * self._block_size, count * self._block_size)
        self._blocks += [packed[i : i + size] for i in range(0, len(packed), size)]


class Context:
    """Tokens, and the memory of three kinds that belongs to them.

    Token positions:

        [0, num_computed)               KV exists and is committed: shared blocks first, then its own
        [num_computed, num_planned)     in a step that is in flight
        [num_planned, num_tokens)       to be planned; the last one may be a sample that is still in flight
    """

    __slots__ = (
        "block_table",
        "boundaries",
        "chain",
        "kv_start",
        "live_states",
        "next_point",
        "num_computed",
        "num_in_flight",
        "num_planned",
        "num_published",
        "num_windows_passed",
        "num_windows_published",
        "parent",
        "points",
        "salt",
        "snapshots",
        "state_base",
        "state_slot",
        "state_start",
        "token_limit",
        "tokens",
        "window_table",
    )

    def __init__(self, tokens: array[int], salt: str, boundaries: tuple[int, ...], parent: Self | None) -> None:
        # All known tokens: the prompt, then the samples. Append-only. An array, so that no object per token is created.
        self.tokens = tokens
        self.salt = salt  # contexts with different salts share nothing
        self.boundaries = boundaries  # positions in the prompt where messages start, ascending
        self.parent = parent  # a request whose blocks to share while it runs (n > 1, branches)
        self.token_limit = 0  # prompt and output together
        self.chain: TokenChain | None = None  # chain keys of its blocks

        self.block_table: list[int] = []  # append-only while held, replaced (never cleared) on release
        self.kv_start = 0  # the KV of tokens before it was cached: it is not written again if they are computed again
        self.num_computed = self.num_planned = 0
        self.num_in_flight = 0  # samples of steps that are not committed yet
        self.num_published = 0  # leading full blocks passed to the tree

        # In a model with windows or recurrent states
        self.points: list[int] = []  # positions where others are expected to continue, ascending
        self.next_point = 0  # index of the first that is not planned yet
        self.window_table: list[int] = []  # window blocks by block number; 0 behind the window
        self.num_windows_passed = 0  # leading entries that are 0
        self.num_windows_published = 0  # leading entries passed to the tree
        self.live_states: tuple[StateSlot, ...] = ()  # its own slots, written in turn
        self.state_slot: StateSlot | None = None  # has the state after `num_planned` tokens; None: the empty state
        self.snapshots: list[StateSlot] = []  # held besides: snapshots it reads, and those it writes
        self.state_start = self.state_base = 0  # positions of the state it continued from; of the last snapshot

    @property
    def num_tokens(self) -> int:
        """Known tokens plus samples in flight."""
        return len(self.tokens) + self.num_in_flight
