"""Finds cached blocks by what they contain. Reads reference counts, and leaves changing them to the pool."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quire.core.block import TOKEN_BYTES, KVCacheBlock
from quire.core.chain import Digest, TokenChain, hash_block_tokens, root_key
from quire.core.children import SortedBlocks


def common_run(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed runs share."""
    n = min(len(a), len(b))
    difference = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


class PrefixHit(NamedTuple):
    """Cached content a request can use. It dies at the next change of pool or tree: use it at once, never store it."""

    blocks: tuple[KVCacheBlock, ...]  # full blocks, to be shared
    tail: KVCacheBlock | None  # the block that matches in part
    num_tail_tokens: int
    is_adoptable: bool  # nobody holds the tail and all of it matches: go on in place instead of copying
    num_tokens: int
    is_fork: bool = False  # these are a running parent's own blocks

    def without_tail(self) -> PrefixHit:
        return PrefixHit(self.blocks, None, 0, False, self.num_tokens - self.num_tail_tokens, self.is_fork)


NO_HIT = PrefixHit((), None, 0, False, 0)


class StopReason(StrEnum):
    """Why a match went no further."""

    COMPLETE = "complete"  # all that may be reused is
    DIVERGED = "diverged"  # something else is cached from this token on
    EVICTED = "evicted"  # a full block was here, and was taken for newer content
    TOO_SHORT = "too_short"  # the rest does not fill a block, and no cached tail begins with it
    IN_FLIGHT = "in_flight"  # a running request is computing it now
    NOT_FOUND = "not_found"  # nothing cached goes on from here
    OFF = "off"  # the cache is switched off, or the request needs every prompt position computed


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    num_tokens: int  # matched
    num_blocks: int  # full ones among them
    stopped_at: int  # the first token that is not reused
    reason: StopReason


class Inserted(NamedTuple):
    is_published: bool
    superseded: KVCacheBlock | None  # a free block whose content the new one has too: no longer in the tree


class PrefixTree:
    """A tree whose nodes are the pool's own blocks.

    Two requests may fill identical blocks at the same time. Both are kept, because block tables are append-only: the
    first stands in the index, the others are its twins, and when it leaves a twin takes its place. The position dies
    with its last twin. Full blocks are found by chain key; a partial tail, or the matching part of a full block, by
    bisection among the sorted children of the position before it.
    """

    def __init__(
        self, block_size: int, *, secret: bytes = b"", max_ghosts: int = 4096, digest: Digest = hash_block_tokens
    ) -> None:
        self.block_size = block_size
        self._secret = secret
        self.digest = digest
        self._max_ghosts = max_ghosts
        self._index: dict[bytes, KVCacheBlock] = {}  # chain key -> standing full block
        self._children: dict[bytes, SortedBlocks] = {}  # position -> what follows it; roots of salts included
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # keys evicted lately, oldest first
        self.num_twins = 0  # made so far
        self.num_collisions = 0

    # Queries

    def __len__(self) -> int:
        """Positions of full blocks."""
        return len(self._index)

    def root(self, salt: str) -> bytes:
        return root_key(self._secret, salt)

    def chain(self, tokens: array[int], salt: str) -> TokenChain:
        return TokenChain(self.root(salt), tokens, self.block_size, self.digest)

    def standing(self, key: bytes) -> KVCacheBlock | None:
        return self._index.get(key)

    def positions(self) -> Iterable[tuple[bytes, Iterable[KVCacheBlock]]]:
        """Every position that something follows, with what follows it in the order of tokens."""
        return self._children.items()

    def match(self, chain: TokenChain, limit: int) -> PrefixHit:
        """The longest cached prefix of at most `limit` tokens."""
        blocks: list[KVCacheBlock] = []
        index, parent = self._index, chain.root
        for key, tokens in chain.full_blocks(limit // self.block_size):
            block = index.get(key)
            if block is None or block.parent_key != parent or block.tokens != tokens:
                break  # a key that is there with other tokens is a collision, and a miss
            blocks.append(block)
            parent = key
        start = len(blocks) * self.block_size
        tail, run = self._longest_run(parent, chain.run(start, min(limit, start + self.block_size)))
        if tail is None:
            return PrefixHit(tuple(blocks), None, 0, False, start)
        is_adoptable = tail.key is None and tail.ref_count == 0 and run == tail.num_tokens
        return PrefixHit(tuple(blocks), tail, run, is_adoptable, start + run)

    def explain(
        self, chain: TokenChain, limit: int, hit: PrefixHit, is_in_flight: Callable[[int], bool]
    ) -> CacheExplanation:
        """Why a hit goes no further. Sees only what lies under the chain's own salt.

        `is_in_flight` is asked whether someone is computing full block number i of this chain.
        """
        num_blocks = len(hit.blocks)
        wants_block = limit >= (num_blocks + 1) * self.block_size
        parent = chain.parent_key(num_blocks)
        if hit.num_tokens == limit:
            reason = StopReason.COMPLETE if limit else StopReason.TOO_SHORT
        elif wants_block and is_in_flight(num_blocks):
            reason = StopReason.IN_FLIGHT
        elif wants_block and chain.key(num_blocks) in self._ghosts:
            reason = StopReason.EVICTED
        elif self._goes_on(parent, hit):
            reason = StopReason.DIVERGED
        else:
            reason = StopReason.NOT_FOUND if wants_block else StopReason.TOO_SHORT
        return CacheExplanation(hit.num_tokens, num_blocks, hit.num_tokens, reason)

    def _goes_on(self, parent: bytes, hit: PrefixHit) -> bool:
        """Whether other content is cached beyond the point where the match ended."""
        if hit.tail is not None:
            return hit.num_tail_tokens < hit.tail.num_tokens
        return bool(hit.blocks) and parent in self._children

    def _longest_run(self, parent: bytes, wanted: bytes) -> tuple[KVCacheBlock | None, int]:
        """The child that begins most like `wanted`, and how many tokens they share."""
        children = self._children.get(parent)
        if children is None or not wanted:
            return None, 0
        best, longest = None, 0
        for neighbour in children.neighbours(wanted):
            if neighbour is not None and (run := common_run(neighbour.tokens, wanted)) > longest:
                best, longest = neighbour, run
        # Of those that share the run, the tail that ends with it could be continued in place.
        whole = children.get(wanted[: longest * TOKEN_BYTES]) if longest else None
        return (whole if whole is not None and whole.ref_count == 0 else best), longest

    def is_redundant(self, block: KVCacheBlock) -> bool:
        """Whether the tree has the content of this published block in another block too."""
        return block.key is not None and (bool(block.twins) or self._index[block.key] is not block)

    # Changes; the pool calls these

    def insert(self, block: KVCacheBlock, parent_key: bytes, key: bytes | None, tokens: bytes) -> Inserted:
        """Make the content of an unpublished block findable; `key` is None for a partial tail."""
        if key is not None and (standing := self._index.get(key)) is not None:
            if standing.tokens != tokens or standing.parent_key != parent_key:
                self.num_collisions += 1
                return Inserted(False, None)
            block.key, block.parent_key, block.tokens = key, parent_key, tokens
            if standing.twins is None:
                standing.twins = []
            standing.twins.append(block)
            self.num_twins += 1
            if standing.ref_count:
                return Inserted(True, None)
            self._stand_in(standing, key)
            return Inserted(True, standing)  # nobody holds it, and one copy is enough to remember
        children = self._children.get(parent_key)
        superseded = None
        if children is None:
            children = self._children[parent_key] = SortedBlocks()
        else:
            before, after = children.neighbours(tokens)
            if key is None and after is not None and after.tokens.startswith(tokens):
                return Inserted(False, None)  # the tree has this tail already, in the same words or as part of more
            if before is not None and before.key is None and before.ref_count == 0 and tokens.startswith(before.tokens):
                superseded = before
                children.remove(before)
                self._unpublish(before)
        block.key, block.parent_key, block.tokens = key, parent_key, tokens
        children.add(block)
        if key is not None:
            self._index[key] = block
            self._ghosts.pop(key, None)
        return Inserted(True, superseded)

    def remove(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """Take a block out of the tree. Returns the blocks that became unreachable with it, itself not included."""
        key = block.key
        if key is None:
            self._leave_parent(block)
            self._unpublish(block)
            return []
        standing = self._index[key]
        if standing is not block:
            assert standing.twins is not None
            standing.twins.remove(block)
            self._unpublish(block)
            return []
        if block.twins:
            self._stand_in(block, key)
            return []
        del self._index[key]
        self._leave_parent(block)
        self._unpublish(block)
        return self._drop_descendants(key) if key in self._children else []

    def remember(self, key: bytes) -> None:
        """Keep an evicted key for a while, so that `explain` can tell an eviction from content never seen."""
        self._ghosts[key] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, ghosts included. Blocks in use stay in use, unpublished."""
        for children in self._children.values():
            for block in children:
                for twin in block.twins or ():
                    self._unpublish(twin)
                self._unpublish(block)
        self._index.clear()
        self._children.clear()
        self._ghosts.clear()

    def _stand_in(self, block: KVCacheBlock, key: bytes) -> None:
        """Let a twin take the block's place; what follows the position stays."""
        assert block.twins
        assert block.parent_key is not None
        heir, *others = block.twins
        heir.twins = others or None
        self._index[key] = heir
        self._children[block.parent_key].replace(block, heir)
        self._unpublish(block)

    def _leave_parent(self, block: KVCacheBlock) -> None:
        assert block.parent_key is not None
        siblings = self._children[block.parent_key]
        siblings.remove(block)
        if not siblings:
            del self._children[block.parent_key]

    def _drop_descendants(self, key: bytes) -> list[KVCacheBlock]:
        dropped: list[KVCacheBlock] = []
        dying = [key]
        while dying:
            for block in self._children.pop(dying.pop(), ()):
                if block.key is not None:
                    del self._index[block.key]
                    self.remember(block.key)
                    dying.append(block.key)
                for member in (block, *(block.twins or ())):
                    self._unpublish(member)
                    dropped.append(member)
        return dropped

    @staticmethod
    def _unpublish(block: KVCacheBlock) -> None:
        block.key = block.parent_key = block.twins = None
        block.tokens = b""
