"""Blocks of cached memory, their keys, the prefix tree that finds them by content, and the pools of the three kinds.

Blocks of a kind are linked in a free list, which is also the eviction order. A chain key is a hash that identifies a
block by its tokens and all tokens before it.

Only the pools change reference counts. Eviction is lazy in all of them: what is released keeps its content, and can be
found, until `take` needs the memory.

In this order: blocks and their free list, chain keys, ordered containers, what a match finds, the tree, the pools.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from quire.core.events import Cleared, Published, Removed, TreeChange
from quire.core.values import TOKEN_BYTES, Level
from quire.errors import InvalidRequest, OutOfBlocks

BLOCK_SIZE = 32  # tokens
MAX_BLOCK_SIZE = 256
EMPTY_SLOT = 0  # the state before the first token: read, never written
NULL_BLOCK_ID = 0  # never allocated: padding in a runner's block tables may point here
KEY_BYTES = 16
BLOCKS_PER_BATCH = 64  # blocks packed at a time during a match; those after the first miss are not needed yet
Digest = Callable[[bytes, bytes], bytes]


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
        for start in range(0, count, BLOCKS_PER_BATCH):
            end = min(count, start + BLOCKS_PER_BATCH)
            self.block(end - 1)
            yield self._blocks[start:end]

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


_tokens = attrgetter("tokens")


class HasTokens(Protocol):
    @property
    def tokens(self) -> bytes:
        """Packed tokens."""


B = TypeVar("B", bound=HasTokens)
K = TypeVar("K")
T = TypeVar("T")


class SortedBlocks(Generic[B]):
    """Blocks sorted by their packed tokens, without duplicates."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: list[B] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __iter__(self) -> Iterator[B]:
        return iter(self._blocks)

    def neighbours(self, tokens: bytes) -> tuple[B | None, B | None]:
        """The last block before `tokens` and the first at or after it.

        One of them has the longest common prefix.
        """
        i = self._index(tokens)
        return self._blocks[i - 1] if i else None, self._blocks[i] if i < len(self._blocks) else None

    def get(self, tokens: bytes) -> B | None:
        """The block with exactly these tokens."""
        if self._blocks and self._blocks[0].tokens == tokens:
            return self._blocks[0]  # most nodes have one child
        after = self.neighbours(tokens)[1]
        return after if after is not None and after.tokens == tokens else None

    def add(self, block: B) -> None:
        self._blocks.insert(self._index(block.tokens), block)

    def replace(self, old: B, new: B) -> None:
        """Replace `old` by `new`, which has the same tokens."""
        i = self._index(old.tokens)
        assert self._blocks[i] is old, f"{old!r} is not among these children"
        self._blocks[i] = new

    def remove(self, block: B) -> None:
        i = 0 if self._blocks[0] is block else self._index(block.tokens)  # most nodes have one child
        assert self._blocks[i] is block, f"{block!r} is not among these children"
        del self._blocks[i]

    def _index(self, tokens: bytes) -> int:
        """Index at which these tokens are stored or would be inserted."""
        return bisect_left(self._blocks, tokens, key=_tokens)


def common_run(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two packed token strings share."""
    n = min(len(a), len(b))
    difference = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


class KeyedHeap(Generic[K, T]):
    """Items ordered by their keys. Every operation is O(log n); of equal keys, the one that was pushed first is first.

    A heap entry that is not valid any more, because its item was removed or has another key, is deleted when it reaches
    the top, or when half of the heap consists of such entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, T]] = []
        self._live: dict[T, int] = {}  # item -> number of its valid entry
        self._num_pushes = 0  # unique, so entries never compare items

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        """In no particular order."""
        return iter(self._live)

    def push(self, key: K, item: T) -> None:
        """Add an item, or change its key."""
        self._num_pushes += 1
        self._live[item] = self._num_pushes
        heappush(self._heap, (key, self._num_pushes, item))
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def first(self) -> tuple[K, T]:
        """The smallest key and its item. The heap must not be empty."""
        while not self._is_live(self._heap[0]):
            heappop(self._heap)
        key, _, item = self._heap[0]
        return key, item

    def remove(self, item: T) -> None:
        del self._live[item]

    def _is_live(self, entry: tuple[K, int, T]) -> bool:
        return self._live.get(entry[2]) == entry[1]


class Continuation(NamedTuple):
    """Memory to continue from. Valid only until the next change of pools or tree: do not store it."""

    start: int  # number of tokens that are not computed again
    state: StateSlot | None = None  # after these tokens
    windows: tuple[WindowBlock, ...] = ()  # full blocks before `start` that a window reaches, to be shared
    window_tail: WindowBlock | None = None  # holds the tokens from the last block boundary to `start`, to be copied
    is_window_adoptable: bool = False  # the window tail is continued in place instead of copied


FROM_ZERO = Continuation(0)


class PrefixHit(NamedTuple):
    """Cached content that a request can use.

    Valid only until the next change of pool or tree: do not store it.
    """

    blocks: tuple[KVCacheBlock, ...]  # full blocks, to be shared
    tail: KVCacheBlock | None  # the block after them, which matches in part
    num_tail_tokens: int
    is_adoptable: bool  # the tail is free and matches completely: it is continued in place instead of copied
    num_tokens: int  # whose keys and values exist
    is_fork: bool = False  # the blocks belong to a running parent
    continuation: Continuation | None = None  # in a model with windows or states: from where it is computed again

    @property
    def start(self) -> int:
        """Number of tokens that are not computed again."""
        return self.num_tokens if self.continuation is None else self.continuation.start

    def without_tail(self) -> PrefixHit:
        """The same hit up to its last full block. The continuation is dropped: it may lie in the tail."""
        return PrefixHit(self.blocks, None, 0, False, self.num_tokens - self.num_tail_tokens, self.is_fork)


NO_HIT = PrefixHit((), None, 0, False, 0)


class StopReason(StrEnum):
    """Why a match ended where it did."""

    COMPLETE = "complete"  # all reusable tokens were reused
    DIVERGED = "diverged"  # the cached content differs from this token on
    EVICTED = "evicted"  # a matching full block was evicted
    TOO_SHORT = "too_short"  # the rest does not fill a block, and no cached tail starts with it
    IN_FLIGHT = "in_flight"  # a running request is computing the next block
    NOT_FOUND = "not_found"  # no cached content follows this prefix
    NO_STATE = "no_state"  # keys and values are cached further, but the last recurrent state is here
    LOAD_FAILED = "load_failed"  # the rest is stored in a lower level, but could not be loaded, or not in time
    NOT_LOADED = "not_loaded"  # the rest is stored in a lower level, but computing it is faster, or memory is short
    NO_WINDOW = "no_window"  # keys and values are cached further, but not those of the layers with a window
    OFF = "off"  # the cache is disabled, or the request needs every prompt position computed


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    num_tokens: int  # matched tokens
    num_blocks: int  # matched full blocks
    stopped_at: int  # position of the first token that is not reused
    reason: StopReason
    num_kv_tokens: int = 0  # tokens whose keys and values were found, if more than `num_tokens`
    source: Level | None = None  # the slowest level that the matched tokens come from; None: none were matched
    num_loaded_tokens: int = 0  # of the matched ones, those loaded from a lower level


class PrefixTree:
    """A prefix tree whose nodes are the pool's blocks.

    Two requests may fill identical blocks at the same time. Both blocks are kept, because block tables are append-only:
    the first is in the index and the others are its twins. When it is removed, a twin replaces it; the node is removed
    with its last twin. A match compares tokens with the sorted children of each node, for a full block, a partial tail
    or the matching part of a full block. The index finds a full block by its chain key.
    """

    def __init__(
        self, block_size: int, *, secret: bytes = b"", max_ghosts: int = 4096, digest: Digest = hash_block_tokens
    ) -> None:
        self.block_size = block_size
        self.secret = secret
        self.digest = digest
        self._max_ghosts = max_ghosts
        self._index: dict[bytes, KVCacheBlock] = {}  # chain key -> full block
        self._children: dict[bytes, SortedBlocks[KVCacheBlock]] = {}  # chain key or root key -> blocks that follow it
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # recently evicted keys, oldest first
        self.on_removal: Callable[[KVCacheBlock], None] | None = None  # called before a block loses its content
        self.on_change: Callable[[TreeChange], None] | None = None  # set it before the first insertion
        # Keys whose children are reported to `on_change`: the root of the empty salt and, while `on_change` is set, all
        # content that follows it. So nothing below the root of a salt is reported, unless `reports_salts`.
        self._public = {self.root("")}
        self.reports_salts = False  # True: for a router of the same cluster, which knows keys and no tokens of others
        self.num_twins = 0  # inserted so far
        self.num_collisions = 0

    # Queries

    def __len__(self) -> int:
        """Number of distinct full blocks."""
        return len(self._index)

    def root(self, salt: str) -> bytes:
        return root_key(self.secret, salt)

    def chain(self, tokens: array[int], salt: str) -> TokenChain:
        return TokenChain(self.root(salt), tokens, self.block_size, self.digest)

    def find(self, key: bytes) -> KVCacheBlock | None:
        """The indexed full block of this key."""
        return self._index.get(key)

    def was_evicted(self, key: bytes) -> bool:
        """Whether the block of this key was evicted recently."""
        return key in self._ghosts

    def positions(self) -> Iterable[tuple[bytes, Iterable[KVCacheBlock]]]:
        """Each key that has children, with the children in token order."""
        return self._children.items()

    def match(self, chain: TokenChain, limit: int) -> PrefixHit:
        """The longest cached prefix of at most `limit` tokens.

        Compares tokens with the children of each block. This is faster than hashing: the blocks found have their keys.
        """
        blocks: list[KVCacheBlock] = []
        parent: KVCacheBlock | None = None
        for tokens in chain.blocks(limit // self.block_size):
            block = None if parent is None else parent.last_child
            if block is None or block.tokens != tokens:
                block = self._child(chain.root if parent is None else parent.key, tokens)
                if block is None:
                    break
                if parent is not None:
                    parent.last_child = block
            blocks.append(block)
            parent = block
        chain.learn([block.key for block in blocks if block.key is not None])
        start = len(blocks) * self.block_size
        key = chain.parent_key(len(blocks))
        tail, run = self._longest_run(key, chain.run(start, min(limit, start + self.block_size)))
        if tail is None:
            return PrefixHit(tuple(blocks), None, 0, False, start)
        is_adoptable = tail.key is None and tail.ref_count == 0 and run == tail.num_tokens
        return PrefixHit(tuple(blocks), tail, run, is_adoptable, start + run)

    def explain(self, chain: TokenChain, limit: int, hit: PrefixHit, is_in_flight: Callable[[int], bool]) -> StopReason:
        """Explain why a hit ends where it does.

        Considers only content cached with the chain's own salt. `is_in_flight(i)` returns whether a running request is
        computing full block `i` of this chain.
        """
        num_blocks = len(hit.blocks)
        wants_block = limit >= (num_blocks + 1) * self.block_size
        if hit.num_tokens == limit:
            return StopReason.COMPLETE if limit else StopReason.TOO_SHORT
        if wants_block and is_in_flight(num_blocks):
            return StopReason.IN_FLIGHT
        if wants_block and chain.key(num_blocks) in self._ghosts:
            return StopReason.EVICTED
        if self._has_other_content(chain.parent_key(num_blocks), hit):
            return StopReason.DIVERGED
        return StopReason.NOT_FOUND if wants_block else StopReason.TOO_SHORT

    def _has_other_content(self, parent: bytes, hit: PrefixHit) -> bool:
        """Whether other content is cached after the point where the match ended."""
        if hit.tail is not None:
            return hit.num_tail_tokens < hit.tail.num_tokens
        return bool(hit.blocks) and parent in self._children

    def _child(self, parent_key: bytes | None, tokens: bytes) -> KVCacheBlock | None:
        """The full block with these tokens after the block of this key."""
        children = None if parent_key is None else self._children.get(parent_key)
        block = None if children is None else children.get(tokens)
        return block if block is not None and block.key is not None else None

    def _longest_run(self, parent: bytes, wanted: bytes) -> tuple[KVCacheBlock | None, int]:
        """The child with the longest common prefix with `wanted`, and the length of that prefix in tokens."""
        children = self._children.get(parent)
        if children is None or not wanted:
            return None, 0
        best, longest = None, 0
        for neighbour in children.neighbours(wanted):
            if neighbour is not None and (run := common_run(neighbour.tokens, wanted)) > longest:
                best, longest = neighbour, run
        # Prefer a free tail that ends exactly there: it can be continued in place.
        whole = children.get(wanted[: longest * TOKEN_BYTES]) if longest else None
        return (whole if whole is not None and whole.ref_count == 0 else best), longest

    def is_redundant(self, block: KVCacheBlock) -> bool:
        """Whether another block in the tree has the content of this published block."""
        return block.key is not None and (bool(block.twins) or self._index[block.key] is not block)

    # Changes, called by the pool only

    def insert(self, block: KVCacheBlock, parent_key: bytes, key: bytes | None, tokens: bytes) -> KVCacheBlock | None:
        """Insert the content of an unpublished block. `key` is None for a partial tail.

        Returns a free block that was removed from the tree because the new block contains its content.
        """
        if key is not None and (indexed := self._index.get(key)) is not None:
            if indexed.tokens != tokens or indexed.parent_key != parent_key:
                self.num_collisions += 1
                return None
            block.key, block.parent_key, block.tokens = key, parent_key, tokens
            indexed.twins = (*indexed.twins, block)
            self.num_twins += 1
            if indexed.ref_count:
                return None
            self._promote_twin(indexed, key)
            return indexed  # the old block is free, and one cached copy is enough
        children = self._children.get(parent_key)
        superseded = None
        if children is None:
            children = self._children[parent_key] = SortedBlocks()
        else:
            before, after = children.neighbours(tokens)
            if key is None and after is not None and after.tokens.startswith(tokens):
                return None  # the tree already contains this tail, alone or as part of a longer one
            if before is not None and before.key is None and before.ref_count == 0 and tokens.startswith(before.tokens):
                superseded = before
                children.remove(before)
                self._unpublish(before)
        block.key, block.parent_key, block.tokens = key, parent_key, tokens
        children.add(block)
        if key is not None:
            self._index[key] = block
            self._ghosts.pop(key, None)
            if (parent := self._index.get(parent_key)) is not None:
                parent.last_child = block
            if self.on_change is not None and (self.reports_salts or parent_key in self._public):
                self._public.add(key)
                self.on_change(Published(key, parent_key, tokens))
        return superseded

    def remove(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """Remove a block from the tree.

        Returns the other blocks that became unreachable and were removed too.
        """
        key = block.key
        if key is None:
            self._remove_from_parent(block)
            self._unpublish(block)
            return []
        indexed = self._index[key]
        if indexed is not block:
            indexed.twins = tuple(twin for twin in indexed.twins if twin is not block)
            self._unpublish(block)
            return []
        if block.twins:
            self._promote_twin(block, key)
            return []
        del self._index[key]
        self._remove_from_parent(block)
        self._unpublish(block)
        keys = [key]
        dropped = self._drop_descendants(key, keys) if key in self._children else []
        if self.on_change is not None and key in self._public:
            self._public.difference_update(keys)
            self.on_change(Removed(tuple(reversed(keys))))
        return dropped

    def remember(self, key: bytes) -> None:
        """Keep an evicted key for a while, so that `explain` can distinguish evicted from unknown content."""
        self._ghosts[key] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def clear(self) -> None:
        """Remove everything, including evicted keys. Blocks in use stay in use, unpublished."""
        for children in self._children.values():
            for block in children:
                for twin in block.twins:
                    self._unpublish(twin)
                self._unpublish(block)
        self._index.clear()
        self._children.clear()
        self._ghosts.clear()
        self._public = {self.root("")}
        if self.on_change is not None:
            self.on_change(Cleared())

    def _promote_twin(self, block: KVCacheBlock, key: bytes) -> None:
        """Replace an indexed block by its first twin. Its children stay."""
        assert block.parent_key is not None
        twin, *others = block.twins
        twin.twins = tuple(others)
        self._index[key] = twin
        self._children[block.parent_key].replace(block, twin)
        self._unpublish(block)

    def _remove_from_parent(self, block: KVCacheBlock) -> None:
        assert block.parent_key is not None
        siblings = self._children[block.parent_key]
        siblings.remove(block)
        if not siblings:
            del self._children[block.parent_key]

    def _drop_descendants(self, key: bytes, removed: list[bytes]) -> list[KVCacheBlock]:
        """Remove all blocks after this key. Appends the keys of the full ones to `removed`, parents first."""
        dropped: list[KVCacheBlock] = []
        keys = [key]
        while keys:
            for block in self._children.pop(keys.pop(), ()):
                if block.key is not None:
                    del self._index[block.key]
                    self.remember(block.key)
                    keys.append(block.key)
                    removed.append(block.key)
                for member in (block, *block.twins):
                    self._unpublish(member)
                    dropped.append(member)
        return dropped

    def _unpublish(self, block: KVCacheBlock) -> None:
        if self.on_removal is not None:
            self.on_removal(block)
        if block.parent_key is not None:
            parent = self._index.get(block.parent_key)
            if parent is not None and parent.last_child is block:
                parent.last_child = None
        block.key = block.parent_key = block.last_child = None
        block.tokens = b""
        block.twins = ()
        block.is_reused = False


@dataclass(frozen=True, slots=True)
class PoolStats:
    num_blocks: int = 0  # blocks that can be allocated
    num_free: int = 0  # including cached blocks
    num_cached: int = 0  # free, with content that can be matched until the block is taken
    num_in_use: int = 0  # held by requests or pins
    num_evictions: int = 0


@dataclass(frozen=True, slots=True)
class StateStats:
    num_slots: int  # slots that can be allocated
    num_free: int  # without content
    num_cached: int  # snapshots that no request or pin holds
    num_in_use: int  # live states of requests, and snapshots held by requests or pins
    num_snapshots: int  # held or not
    num_evictions: int


class Pool(Generic[L]):
    """Allocates and shares the blocks of one kind. The first one is never allocated."""

    def __init__(self, blocks: list[L]) -> None:
        self.blocks = blocks
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.free = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self.num_cached = 0  # free, with content
        self.num_shared = 0  # with two or more references
        self.num_evictions = 0
        self.num_releases = 0  # grows with each released block; callers compare it to detect that memory was freed
        self.on_eviction: Callable[[L], None] | None = None  # called before a block loses its content
        self.changed: set[int] | None = None  # ids of changed blocks, emptied by a BlockMap; None: not recorded
        # Attributes, because calls of the list's methods are faster than of methods that call them.
        self._pop: Callable[[], L] = self.free.pop_front  # removes the block that is taken next from the free ones
        self._unlink: Callable[[L], None] = self.free.remove  # removes a cached block from the free ones
        self._link: Callable[[Iterable[L]], None] = self.free.extend  # adds cached blocks to the free ones

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can return, including cached ones."""
        return len(self.free)

    def unused(self) -> Iterable[L]:
        """All blocks that `take` can return, including cached ones."""
        return self.free

    def stats(self) -> PoolStats:
        num_free = self.num_free
        return PoolStats(self.num_usable, num_free, self.num_cached, self.num_usable - num_free, self.num_evictions)

    def take(self, count: int) -> list[L]:
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

    def share(self, blocks: Sequence[L]) -> None:
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

    def release(self, blocks: Sequence[L]) -> None:
        """Drop one reference of each block."""
        self.num_releases += len(blocks)
        unused = []
        for block in blocks:
            assert block.ref_count > 0, f"{block!r} released without a reference"
            block.ref_count = num_left = block.ref_count - 1
            if num_left == 1:
                self.num_shared -= 1
            elif num_left == 0:
                unused.append(block)
        self._free(unused)
        self._note(blocks)

    def _note(self, blocks: Sequence[L]) -> None:
        if self.changed is not None:
            self.changed.update([block.block_id for block in blocks])

    def _free(self, blocks: Sequence[L]) -> None:
        """Add blocks without references to the free ones: those without content are taken first."""
        cached = []
        for block in blocks:
            if block.parent_key is None:
                self.free.prepend(block)
            else:
                cached.append(block)
        self.num_cached += len(cached)
        self._link(cached)

    def _evict(self, block: L) -> None:
        """Drop the content of a cached block that is not among the free ones any more."""
        if self.on_eviction is not None:
            self.on_eviction(block)
        self.num_cached -= 1
        self.num_evictions += 1
        self._lose(block)

    def _lose(self, block: L) -> None:
        """Forget the content of a block."""

    def _lose_cached(self, block: L) -> None:
        """Forget the content of a block that cannot be found any more."""
        self._move_first(block)
        self._lose(block)

    def _move_first(self, block: L) -> None:
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

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        if num_blocks < 2:
            raise InvalidRequest(f"num_blocks = {num_blocks} is less than 2: block {NULL_BLOCK_ID} is never allocated")
        super().__init__([KVCacheBlock(block_id) for block_id in range(num_blocks)])
        self._tree = tree

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference of each block.

        Pass blocks in table order; they are released tail first.
        """
        super().release(blocks[::-1])

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
                self._unlink(block)
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

    def _free(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if self._tree.is_redundant(block):
                self._tree.remove(block)  # a twin has the same content; one cached copy is enough
        super()._free(blocks)

    def _evict(self, block: KVCacheBlock) -> None:
        if self.on_eviction is not None:
            self.on_eviction(block)
        key = block.key
        self.num_cached -= 1
        self.num_evictions += 1
        descendants = self._tree.remove(block)
        if key is not None and self._tree.find(key) is None:
            self._tree.remember(key)
        for lost in descendants:
            self._move_first(lost)


class WindowPool(Pool[WindowBlock]):
    """Window blocks. Their content is found by the node of the prefix tree with the same tokens.

    Free blocks are taken in this order: blocks without content; blocks that were released behind the window of a
    running request; blocks that lie before a position where another request is expected to continue. Each group is in
    order of release.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__([WindowBlock(block_id) for block_id in range(num_blocks)])
        self._kept: FreeKVCacheBlockQueue[WindowBlock] = FreeKVCacheBlockQueue(())  # taken after those of `free`
        self._pop, self._unlink, self._link = self._pop_window, self._unlink_window, self._link_windows

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self._kept)

    def unused(self) -> Iterable[WindowBlock]:
        return chain(self.free, self._kept)

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

    def _link_windows(self, blocks: Iterable[WindowBlock]) -> None:
        for block in blocks:
            (self._kept if block.is_kept else self.free).append(block)

    def _pop_window(self) -> WindowBlock:
        return (self.free or self._kept).pop_front()

    def _unlink_window(self, block: WindowBlock) -> None:
        (self._kept if block.is_kept else self.free).remove(block)

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
        self._cached: KeyedHeap[int, StateSlot] = KeyedHeap()  # snapshots that nothing holds, by score
        self._clock = 0  # score of the last evicted snapshot
        self.num_snapshots = 0  # published, held or not
        self._pop, self._unlink, self._link = self._pop_slot, self._cached.remove, self._link_slots

    @property
    def num_free(self) -> int:
        return len(self.free) + self.num_cached

    def unused(self) -> Iterable[StateSlot]:
        return chain(self.free, self._cached)

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
            self._link_slots((slot,))

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
            slot = self._pop_least()
            self._evict(slot)
            self.free.prepend(slot)
        return num_before

    def _pop_slot(self) -> StateSlot:
        return self.free.pop_front() if self.free else self._pop_least()

    def _pop_least(self) -> StateSlot:
        self._clock, slot = self._cached.first()
        self._unlink(slot)
        return slot

    def _lose(self, block: StateSlot) -> None:
        assert block.parent_key is not None
        runs = self._index[block.parent_key]
        del runs[block.run]
        if not runs:
            del self._index[block.parent_key]
        block.parent_key, block.run = None, b""
        self.num_snapshots -= 1

    def _link_slots(self, slots: Iterable[StateSlot]) -> None:
        for slot in slots:
            self._cached.push(slot.score, slot)
