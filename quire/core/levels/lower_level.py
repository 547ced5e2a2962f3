"""Index of the content that a level below the device stores, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.core.cache.context import BLOCKS_PER_BATCH, KVCacheBlock, StateSlot, TokenChain, WindowBlock
from quire.core.cache.prefix import PrefixHit, SortedBlocks, common_run
from quire.core.memory import Held, Memory, cached_window
from quire.core.step import Content, MemoryKind
from quire.core.values import TOKEN_BYTES, Level

NS_PER_S = 1_000_000_000
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
        self.num_evictions = 0
        self.num_added = 0  # pieces, so far
        self._pieces: tuple[OrderedDict[bytes, Stored], ...] = (OrderedDict(), OrderedDict(), OrderedDict())  # by kind
        self._blocks: dict[bytes, SortedBlocks[Stored]] = {}  # parent key -> blocks after it
        self._states: dict[bytes, dict[bytes, Stored]] = {}  # parent key -> tokens after it -> state

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

    def count(self, kind: MemoryKind) -> int:
        return len(self._pieces[kind])

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

    def blocks_after(self, parent_key: bytes) -> SortedBlocks[Stored] | None:
        return self._blocks.get(parent_key)

    def states_after(self, parent_key: bytes) -> Mapping[bytes, Stored]:
        return self._states.get(parent_key, {})

    # Changes

    def add(self, content: Content) -> Stored | None:
        """Record stored content. Returns None if its key is taken."""
        if self.has_key(content):
            return None
        stored = Stored(content, self.level)
        self._pieces[content.kind][content.key] = stored
        self.num_bytes += self.sizes[content.kind]
        self.num_added += 1
        if content.kind is MemoryKind.BLOCK:
            self._blocks.setdefault(content.parent_key, SortedBlocks()).add(stored)
        elif content.kind is MemoryKind.STATE:
            self._states.setdefault(content.parent_key, {})[content.tokens] = stored
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
        if content.kind is MemoryKind.BLOCK:
            siblings = self._blocks[content.parent_key]
            siblings.remove(stored)
            if not siblings:
                del self._blocks[content.parent_key]
        elif content.kind is MemoryKind.STATE:
            states = self._states[content.parent_key]
            del states[content.tokens]
            if not states:
                del self._states[content.parent_key]
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
        self._blocks.clear()
        self._states.clear()
        self.num_bytes = 0
        if self.on_change is not None:
            for content in contents:
                self.on_change(self.level, content, False)


class Reach(NamedTuple):
    """What a request could continue from once these pieces are loaded."""

    start: int  # number of tokens that are not computed again
    blocks: tuple[Stored, ...]  # that follow the blocks of the hit, in order; the last may be a partial one
    windows: tuple[tuple[Stored, int], ...] = ()  # with the numbers of their blocks
    state: Stored | None = None
    kept: Held = Held()  # what it needs besides, and the device has: not to be evicted while the rest is loaded

    @property
    def pieces(self) -> tuple[Stored, ...]:
        state = () if self.state is None else (self.state,)
        return (*self.blocks, *[stored for stored, _ in self.windows], *state)

    def first_pieces(self, number: int, block_size: int, num_cached: int) -> Reach:
        """The first pieces alone. `num_cached`: blocks of the hit."""
        if number >= len(self.pieces):
            return self
        blocks = self.blocks[:number]
        end = (num_cached + len(blocks)) * block_size
        return Reach(min(end, self.start), blocks, self.windows[: max(number - len(self.blocks), 0)])

    @property
    def source(self) -> Level:
        """The slowest level that has a piece."""
        return Level.DISK if any(stored.level is Level.DISK for stored in self.pieces) else Level.HOST


class _Windows(NamedTuple):
    """Window blocks that a token sees."""

    stored: list[tuple[Stored, int]]  # to be loaded, with the numbers of their blocks
    cached: list[WindowBlock]
    missing: int | None = None  # number of a block whose window block is neither on the device nor below


class _Position(NamedTuple):
    """A position to continue from, and the state there: to be loaded or on the device. Both None: no layer has one."""

    start: int
    stored: Stored | None = None
    cached: StateSlot | None = None


class LevelSearch:
    """Searches the levels, the fastest first.

    `is_used`: pieces for which it returns False are not found.
    """

    def __init__(
        self,
        levels: Sequence[LowerLevel],
        memory: Memory,
        is_used: Callable[[Stored], bool] | None = None,
    ) -> None:
        self._levels = levels
        self._is_used = is_used
        self._block_size = memory.tree.block_size
        self._memory = memory

    def find(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """The reach of the levels for a hit of at most `limit` tokens. None if it is not longer than the hit."""
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
            return Reach(end, tuple(blocks)) if end > hit.num_tokens else None
        return self._continue(chain, hit, blocks, max(end, hit.num_tokens))

    def _find(self, kind: MemoryKind, key: bytes, parent_key: bytes, tokens: bytes) -> Stored | None:
        for level in self._levels:
            found = level.find(kind, key, parent_key, tokens)
            if found is not None and self._accepts(found):
                return found
        return None

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
            children = level.blocks_after(parent_key)
            for neighbour in () if children is None or not wanted else children.neighbours(wanted):
                if neighbour is None or not self._accepts(neighbour):
                    continue
                if (run := common_run(neighbour.tokens, wanted)) > longest:
                    best, longest = neighbour, run
        return best, longest

    # Models with windows or states

    def _continue(self, chain: TokenChain, hit: PrefixHit, blocks: Sequence[Stored], end: int) -> Reach | None:
        """The last position up to `end` at which blocks, window blocks and a state exist on the device or below."""
        blocked = end  # no position after this has all of its window blocks
        for position in self._positions(chain, hit, end):
            if position.start <= hit.start:
                return None
            if position.start > blocked:
                continue
            windows = self._windows_before(chain, hit, blocks, position.start)
            if windows.missing is not None:
                blocked = windows.missing * self._block_size
                continue
            num_needed = -(-position.start // self._block_size) - len(hit.blocks)
            needed = blocks[:num_needed] if position.start > hit.num_tokens else ()
            return Reach(
                position.start,
                tuple(needed),
                tuple(windows.stored),
                position.stored,
                Held((), tuple(windows.cached), () if position.cached is None else (position.cached,)),
            )
        return None

    def _positions(self, chain: TokenChain, hit: PrefixHit, end: int) -> Iterator[_Position]:
        """Positions to continue from, last first."""
        size, states = self._block_size, self._memory.states
        if not states.is_used:
            yield _Position(end)
            yield from map(_Position, range((end - 1) // size * size, 0, -size))
            return
        for number in range(end // size, -1, -1):
            key = chain.parent_key(number)
            cached = states.pool.at(key) if number <= len(hit.blocks) else {}
            below = [stored for level in self._levels if (stored := level.states_after(key))]
            if not cached and not below:
                continue
            longest = min(end - number * size, size - 1)
            run = chain.run(number * size, number * size + longest)
            for length in range(longest, -1, -1):
                tokens = run[: length * TOKEN_BYTES]
                if (state := cached.get(tokens)) is not None and states.may_hold(state):
                    yield _Position(number * size + length, None, state)
                elif states.may_hold():
                    found = (stored[tokens] for stored in below if tokens in stored)
                    first = next(filter(self._accepts, found), None)
                    if first is not None:
                        yield _Position(number * size + length, first)

    def _windows_before(self, chain: TokenChain, hit: PrefixHit, blocks: Sequence[Stored], position: int) -> _Windows:
        """Find the window blocks that a token at `position` sees."""
        windows = _Windows([], [])
        if not self._memory.windows.is_used:
            return windows
        for number in range(self._memory.windows.first_block(position), -(-position // self._block_size)):
            node = self._node(hit, number, position)
            if node is not None:
                if (cached := cached_window(node)) is not None:
                    windows.cached.append(cached)
                    continue
                assert node.parent_key is not None
                key = node.key if node.key is not None else chain.key_of(node.parent_key, node.tokens)
                stored = self._find(MemoryKind.WINDOW, key, node.parent_key, node.tokens)
            else:
                content = blocks[number - len(hit.blocks)].content
                stored = self._find(MemoryKind.WINDOW, content.key, content.parent_key, content.tokens)
            if stored is None:
                return windows._replace(missing=number)
            windows.stored.append((stored, number))
        return windows

    def _node(self, hit: PrefixHit, number: int, position: int) -> KVCacheBlock | None:
        """The cached block with this number, if it needs no load."""
        if number < len(hit.blocks):
            return hit.blocks[number]
        return hit.tail if position <= hit.num_tokens else None
