"""The prefix tree: finds cached blocks by content.

Reads reference counts; only the pool changes them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from quire.core.cache.block import KVCacheBlock, StateSlot, WindowBlock
from quire.core.cache.context import Digest, TokenChain, hash_block_tokens, root_key
from quire.core.events import Cleared, Published, Removed, TreeChange
from quire.core.values import TOKEN_BYTES, Level

_tokens = attrgetter("tokens")
_MAX_BUCKET = 256


class HasTokens(Protocol):
    @property
    def tokens(self) -> bytes:
        """Packed tokens."""


B = TypeVar("B", bound=HasTokens)


class SortedBlocks(Generic[B]):
    """Blocks sorted by their packed tokens, without duplicates.

    Stored in buckets: the root of a busy server has a child per conversation, and inserting into one long list would
    move many entries each time.
    """

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: list[list[B]] = []

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[B]:
        for bucket in self._buckets:
            yield from bucket

    def neighbours(self, tokens: bytes) -> tuple[B | None, B | None]:
        """The last block before `tokens` and the first at or after it.

        One of them has the longest common prefix.
        """
        if not self._buckets:
            return None, None
        b, i = self._locate(tokens)
        bucket = self._buckets[b]
        before = bucket[i - 1] if i else self._buckets[b - 1][-1] if b else None
        after = bucket[i] if i < len(bucket) else None
        return before, after

    def get(self, tokens: bytes) -> B | None:
        """The block with exactly these tokens."""
        if self._buckets and (first := self._buckets[0][0]).tokens == tokens:
            return first  # most nodes have one child
        after = self.neighbours(tokens)[1]
        return after if after is not None and after.tokens == tokens else None

    def add(self, block: B) -> None:
        if not self._buckets:
            self._buckets.append([block])
            return
        b, i = self._locate(block.tokens)
        bucket = self._buckets[b]
        bucket.insert(i, block)
        if len(bucket) > _MAX_BUCKET:
            half = len(bucket) // 2
            self._buckets.insert(b + 1, bucket[half:])
            del bucket[half:]

    def replace(self, old: B, new: B) -> None:
        """Replace `old` by `new`, which has the same tokens."""
        b, i = self._find(old)
        self._buckets[b][i] = new

    def remove(self, block: B) -> None:
        b, i = self._find(block)
        bucket = self._buckets[b]
        del bucket[i]
        if not bucket:
            del self._buckets[b]

    def _find(self, block: B) -> tuple[int, int]:
        if self._buckets and self._buckets[0][0] is block:
            return 0, 0  # most nodes have one child
        if self._buckets:
            b, i = self._locate(block.tokens)
            bucket = self._buckets[b]
            if i < len(bucket) and bucket[i] is block:
                return b, i
        raise KeyError(f"{block!r} is not among these children")

    def _locate(self, tokens: bytes) -> tuple[int, int]:
        """Bucket and index at which these tokens are stored or would be inserted."""
        buckets = self._buckets
        b = 0 if len(buckets) == 1 else min(bisect_left(buckets, tokens, key=_last_tokens), len(buckets) - 1)
        return b, bisect_left(buckets[b], tokens, key=_tokens)


def _last_tokens(bucket: Sequence[HasTokens]) -> bytes:
    return bucket[-1].tokens


def common_run(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two packed token strings share."""
    n = min(len(a), len(b))
    difference = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


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
            if indexed.twins is None:
                indexed.twins = []
            indexed.twins.append(block)
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
            assert indexed.twins is not None
            indexed.twins.remove(block)
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
                for twin in block.twins or ():
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
        assert block.twins
        assert block.parent_key is not None
        twin, *others = block.twins
        twin.twins = others or None
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
                for member in (block, *(block.twins or ())):
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
        block.key = block.parent_key = block.twins = block.last_child = None
        block.tokens = b""
        block.is_reused = False
