"""The content that a level below the device stores, and the search for what continues a prefix hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from quire.core.cache import (
    BLOCKS_PER_BATCH,
    FROM_ZERO,
    Continuation,
    KVCacheBlock,
    PrefixHit,
    PrefixTree,
    SortedBlocks,
    TokenChain,
    WindowBlock,
    common_run,
)
from quire.core.memory import Held, Memory
from quire.core.request import Context
from quire.core.step import Content, MemoryKind
from quire.core.values import NS_PER_S, TOKEN_BYTES, Level

PieceSizes = tuple[int, int, int]  # bytes of a block, of a window block and of a state
PieceCounts = tuple[int, int, int]  # numbers of them


class LevelSpeed(NamedTuple):
    """Measured speed of loads."""

    latency_ns: int  # of a load of nothing
    bytes_per_s: int

    def load_ns(self, num_bytes: int) -> int:
        return self.latency_ns + num_bytes * NS_PER_S // self.bytes_per_s


LevelObserver = Callable[[Level, Content, bool], None]  # with new content (True), or content that is gone


class Stored:
    """One piece of content in a lower level."""

    __slots__ = ("content", "level", "num_loads", "tokens")

    def __init__(self, content: Content, level: Level) -> None:
        self.content = content
        self.level = level
        self.tokens = content.tokens
        self.num_loads = 0  # in flight; while there are any, the content is not evicted

    def __repr__(self) -> str:
        return f"<{self.content.kind.name.lower()} of {len(self.tokens)} bytes of tokens in {self.level}>"


class LowerLevel:
    """Content of one level, least recently used first.

    With `limits`, the level evicts to stay within them: each kind of memory has slots of its own, as on the device.
    Without, the store of the level evicts to stay within `store_bytes`, and reports what is lost. Two contents with the
    same key (a collision) are not both stored.
    """

    def __init__(
        self,
        level: Level,
        sizes: PieceSizes,
        limits: PieceCounts | None = None,
        *,
        store_bytes: int | None = None,
        buffers: PieceCounts | None = None,
    ) -> None:
        self.level = level
        self.sizes = sizes
        self.limits = limits
        self.store_bytes = store_bytes  # None: not known
        self.buffers = buffers  # of a disk: host buffers that it is read into; None: not limited
        self.speed: LevelSpeed | None = None  # None: not measured, loads always pay
        self.is_filled = True  # False: loads are always slower than computing, so nothing is saved
        self.num_bytes = 0
        self.num_reserved = [0, 0, 0]  # saves in flight of each kind
        self.on_change: LevelObserver | None = None
        # Counters since the start: see `LevelStats`. `num_added`: pieces
        self.num_loads = self.num_loaded_tokens = self.num_loaded_bytes = self.num_failed_loads = 0
        self.num_saves = self.num_failed_saves = self.num_evictions = self.num_added = 0
        self._pieces: tuple[OrderedDict[bytes, Stored], ...] = (OrderedDict(), OrderedDict(), OrderedDict())  # by kind
        self._after: dict[tuple[MemoryKind, bytes], SortedBlocks[Stored]] = {}  # blocks and states, by their parent key

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Stored]:
        for pieces in self._pieces:
            yield from pieces.values()

    @property
    def max_bytes(self) -> int | None:
        if self.limits is None:
            return self.store_bytes
        return sum(size * limit for size, limit in zip(self.sizes, self.limits, strict=True))

    # Queries

    def pieces(self, kind: MemoryKind) -> OrderedDict[bytes, Stored]:
        """All pieces of a kind, by their keys, least recently used first. Not to be changed."""
        return self._pieces[kind]

    def find(self, kind: MemoryKind, key: bytes, parent_key: bytes, tokens: bytes) -> Stored | None:
        found = self._pieces[kind].get(key)
        if found is None or found.tokens != tokens or found.content.parent_key != parent_key:
            return None
        return found

    def __contains__(self, content: Content) -> bool:
        return self.find(*content) is not None

    def has_key(self, content: Content) -> bool:
        """Whether content with this key is stored: this one, or one whose key collides."""
        return content.key in self._pieces[content.kind]

    def after(self, kind: MemoryKind, parent_key: bytes) -> SortedBlocks[Stored] | None:
        """The blocks or the states after the full block with this key."""
        return self._after.get((kind, parent_key))

    # Changes

    def add(self, content: Content) -> Stored | None:
        """Record stored content. Returns None if its key is taken."""
        if self.has_key(content):
            return None
        stored = Stored(content, self.level)
        self._pieces[content.kind][content.key] = stored
        self.num_bytes += self.sizes[content.kind]
        self.num_added += 1
        if content.kind is not MemoryKind.WINDOW:
            self._after.setdefault((content.kind, content.parent_key), SortedBlocks()).add(stored)
        if self.on_change is not None:
            self.on_change(self.level, content, True)
        return stored

    def touch(self, content: Content) -> None:
        """Record a use of content, if it is stored."""
        if content in self:
            self._pieces[content.kind].move_to_end(content.key)

    def touch_block(self, key: bytes, tokens: bytes) -> bool:
        """Record a use of a full block. Returns False if it is not stored."""
        blocks = self._pieces[MemoryKind.BLOCK]
        stored = blocks.get(key)
        if stored is None or stored.tokens != tokens:
            return False
        blocks.move_to_end(key)
        return True

    def remove(self, content: Content) -> bool:
        """Forget content. Returns False if it is not stored."""
        stored = self.find(*content)
        if stored is None:
            return False
        del self._pieces[content.kind][content.key]
        self.num_bytes -= self.sizes[content.kind]
        if content.kind is not MemoryKind.WINDOW:
            siblings = self._after[content.kind, content.parent_key]
            siblings.remove(stored)
            if not siblings:
                del self._after[content.kind, content.parent_key]
        if self.on_change is not None:
            self.on_change(self.level, content, False)
        return True

    def reserve(self, kind: MemoryKind) -> tuple[bool, Content | None]:
        """Reserve a slot for a save. Returns whether there is one, and the content that was evicted for it."""
        evicted = None
        if self.limits is not None and len(self._pieces[kind]) + self.num_reserved[kind] >= self.limits[kind]:
            evicted = next((one.content for one in self._pieces[kind].values() if not one.num_loads), None)
            if evicted is None:
                return False, None
            self.remove(evicted)
            self.num_evictions += 1
        self.num_reserved[kind] += 1
        return True, evicted

    def clear(self) -> None:
        contents = [stored.content for stored in self]
        for pieces in self._pieces:
            pieces.clear()
        self._after.clear()
        self.num_bytes = 0
        if self.on_change is not None:
            for content in contents:
                self.on_change(self.level, content, False)


class Reach(NamedTuple):
    """What a request could continue from once these pieces are loaded."""

    start: int  # number of tokens that are not computed again
    blocks: tuple[Stored, ...] = ()  # that follow the blocks of the hit, in order; the last may be a partial one
    windows: tuple[tuple[Stored, int], ...] = ()  # with the numbers of their blocks
    states: tuple[Stored, ...] = ()  # one or none
    kept: Held = Held()  # what it needs besides, and the device has: not to be evicted while the rest is loaded

    @property
    def pieces(self) -> tuple[Stored, ...]:
        return (*self.blocks, *[stored for stored, _ in self.windows], *self.states)

    def first_pieces(self, number: int, block_size: int, num_cached: int) -> Reach:
        """The first pieces alone. `num_cached`: blocks of the hit."""
        if number >= len(self.pieces):
            return self
        blocks = self.blocks[:number]
        end = (num_cached + len(blocks)) * block_size
        windows = self.windows[: max(number - len(self.blocks), 0)]
        return Reach(min(end, self.start), blocks, windows, kept=Held(self.kept.blocks))

    @property
    def source(self) -> Level:
        """The slowest level that has a piece."""
        return Level.DISK if any(stored.level is Level.DISK for stored in self.pieces) else Level.HOST


WindowAt = Callable[[int], WindowBlock | None]  # block number -> the window block with its tokens, on the device


def cached_window(node: KVCacheBlock) -> WindowBlock | None:
    """The window block of a node, or of a twin with the same tokens."""
    if node.window is not None:
        return node.window
    return next((twin.window for twin in node.twins if twin.window is not None), None)


def content_of(tree: PrefixTree, node: KVCacheBlock, kind: MemoryKind = MemoryKind.BLOCK) -> Content:
    """The content of a published node. The key of a partial block is not stored, but computed."""
    assert node.parent_key is not None
    key = node.key if node.key is not None else tree.digest(node.parent_key, node.tokens)
    return Content(kind, key, node.parent_key, node.tokens)


class Search:
    """Finds from where a request can continue, with what the device has and what these levels have.

    Cached keys and values of full attention are not enough. To continue after token t, a model with windows also needs
    their keys and values for the last `window` tokens before t, and one with recurrent states needs the state after
    exactly t tokens. A search finds the largest t for which all of them exist.

    `levels`: the fastest first; without any, only the device is searched. `is_used`: pieces of levels for which it
    returns False are not found.
    """

    def __init__(
        self, memory: Memory, levels: Sequence[LowerLevel] = (), is_used: Callable[[Stored], bool] | None = None
    ) -> None:
        self._levels = levels
        self._is_used = is_used
        self._block_size = memory.tree.block_size
        self._memory = memory

    def continue_hit(self, chain: TokenChain, hit: PrefixHit, parent: Context | None = None) -> PrefixHit:
        """Add to a hit where a request can continue. `parent`: the request whose blocks a fork shares."""
        if not self._memory.is_hybrid:
            return hit
        reach = self._continue(chain, hit, (), hit.num_tokens, 0, self._window_at(hit, parent))
        if reach is None:
            return hit._replace(continuation=FROM_ZERO)
        cached, start = reach.kept.windows, reach.start
        num_full = start // self._block_size - self._memory.windows.first_block(start)
        tail = cached[-1] if start % self._block_size and cached else None
        is_adoptable = start == hit.num_tokens and hit.is_adoptable and tail is not None and tail.ref_count == 0
        state = reach.kept.states[0] if reach.kept.states else None
        return hit._replace(continuation=Continuation(start, state, cached[:num_full], tail, is_adoptable))

    def find(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """How far the levels extend a hit of at most `limit` tokens. None if not at all."""
        size, num_cached = self._block_size, len(hit.blocks)
        if hit.start >= limit or hit.is_fork:  # the blocks of a fork may not be in the tree
            return None
        blocks = self._full_blocks(chain, num_cached, limit // size)
        number = num_cached + len(blocks)
        end = number * size
        tail, num_tail = self._tail(chain.parent_key(number), chain.run(end, min(limit, end + size)))
        if tail is not None and end + num_tail > hit.num_tokens:
            blocks.append(tail)
            end += num_tail
        if not self._memory.is_hybrid:
            return Reach(end, tuple(blocks), kept=Held(hit.blocks)) if end > hit.num_tokens else None
        return self._continue(chain, hit, blocks, max(end, hit.num_tokens), hit.start, self._window_at(hit, None))

    def _accepts(self, stored: Stored) -> bool:
        return self._is_used is None or self._is_used(stored)

    def _full_blocks(self, chain: TokenChain, first: int, last: int) -> list[Stored]:
        """The stored blocks from number `first` on, up to the first that is missing."""
        blocks: list[Stored] = []
        tables, is_used = [level.pieces(MemoryKind.BLOCK) for level in self._levels], self._is_used
        number, parent_key = first, chain.parent_key(first)
        while number < last:
            # Keys are computed in batches, but only one if nothing is stored.
            count = min(last - number, BLOCKS_PER_BATCH if blocks else 1)
            for key, tokens in chain.entries(number, number + count):
                for table in tables:
                    stored = table.get(key)
                    if stored is None or stored.tokens != tokens or stored.content.parent_key != parent_key:
                        continue
                    if is_used is None or is_used(stored):
                        blocks.append(stored)
                        break
                else:
                    return blocks
                parent_key = key
            number += count
        return blocks

    def _tail(self, parent_key: bytes, wanted: bytes) -> tuple[Stored | None, int]:
        """The stored block with the longest common prefix with `wanted`, and the length of that prefix in tokens."""
        best, longest = None, 0
        for level in self._levels:
            children = level.after(MemoryKind.BLOCK, parent_key)
            for neighbour in () if children is None or not wanted else children.neighbours(wanted):
                if neighbour is None or not self._accepts(neighbour):
                    continue
                if (run := common_run(neighbour.tokens, wanted)) > longest:
                    best, longest = neighbour, run
        return best, longest

    # Models with windows or states

    def _continue(
        self, chain: TokenChain, hit: PrefixHit, blocks: Sequence[Stored], end: int, floor: int, window_at: WindowAt
    ) -> Reach | None:
        """The last position after `floor` and up to `end` at which blocks, window blocks and a state exist."""
        size, blocked = self._block_size, end  # no position after `blocked` has all of its window blocks
        for reach in self._positions(chain, hit, end):
            if reach.start <= floor:
                return None
            if reach.start > blocked:
                continue
            needed = blocks[: -(-reach.start // size) - len(hit.blocks)] if reach.start > hit.num_tokens else ()
            stored, cached, missing = self._windows_before(hit, blocks, reach.start, window_at)
            if missing is None:
                nodes = hit.blocks if hit.tail is None or needed else (*hit.blocks, hit.tail)
                kept = Held(nodes, tuple(cached), reach.kept.states)
                return reach._replace(blocks=tuple(needed), windows=tuple(stored), kept=kept)
            blocked = missing * size
        return None

    def _positions(self, chain: TokenChain, hit: PrefixHit, end: int) -> Iterator[Reach]:
        """Positions to continue from, last first, with the state there."""
        size, states = self._block_size, self._memory.states
        if not states.is_used:
            yield Reach(end)
            yield from map(Reach, range((end - 1) // size * size, 0, -size))
            return
        for number in range(end // size, -1, -1):
            key = chain.parent_key(number)
            # The blocks of a running parent may not be in the tree, and other content may have the same key.
            is_cached = number <= len(hit.blocks) and (not number or hit.blocks[number - 1].key == key)
            cached = states.pool.at(key) if is_cached else {}
            below = [table for level in self._levels if (table := level.after(MemoryKind.STATE, key)) is not None]
            if not cached and not below:
                continue
            longest = min(end - number * size, size - 1)
            run = chain.run(number * size, number * size + longest)
            for length in range(longest, -1, -1):
                position, tokens = number * size + length, run[: length * TOKEN_BYTES]
                if (state := cached.get(tokens)) is not None and states.may_hold(state):
                    yield Reach(position, kept=Held(states=(state,)))
                elif below and states.may_hold():
                    found = (stored for table in below if (stored := table.get(tokens)) is not None)
                    if (first := next(filter(self._accepts, found), None)) is not None:
                        yield Reach(position, states=(first,))

    def _window_at(self, hit: PrefixHit, parent: Context | None) -> WindowAt:
        if parent is not None and self._memory.windows.is_used:
            blocks, table = self._memory.windows.pool.blocks, parent.window_table
            return lambda number: blocks[table[number]] if number < len(table) and table[number] else None
        return lambda number: cached_window(self._node(hit, number))

    @staticmethod
    def _node(hit: PrefixHit, number: int) -> KVCacheBlock:
        block = hit.blocks[number] if number < len(hit.blocks) else hit.tail
        assert block is not None
        return block

    def _windows_before(
        self, hit: PrefixHit, blocks: Sequence[Stored], position: int, window_at: WindowAt
    ) -> tuple[list[tuple[Stored, int]], list[WindowBlock], int | None]:
        """The window blocks that a token at `position` sees.

        Returns those to be loaded, with the numbers of their blocks, those on the device, and the number of a block
        whose window block is neither there nor below.
        """
        stored: list[tuple[Stored, int]] = []
        cached: list[WindowBlock] = []
        if not self._memory.windows.is_used:
            return stored, cached, None
        for number in range(self._memory.windows.first_block(position), -(-position // self._block_size)):
            is_cached = number < len(hit.blocks) or position <= hit.num_tokens  # its block needs no load
            if is_cached and (window := window_at(number)) is not None:
                cached.append(window)
                continue
            block = self._node(hit, number) if is_cached else blocks[number - len(hit.blocks)]
            if (found := self._stored_window(block)) is None:
                return stored, cached, number
            stored.append((found, number))
        return stored, cached, None

    def _stored_window(self, block: KVCacheBlock | Stored) -> Stored | None:
        """The window block of the same tokens in a level."""
        if not self._levels:
            return None
        content = block.content if isinstance(block, Stored) else content_of(self._memory.tree, block)
        for level in self._levels:
            found = level.find(MemoryKind.WINDOW, content.key, content.parent_key, content.tokens)
            if found is not None and self._accepts(found):
                return found
        return None
