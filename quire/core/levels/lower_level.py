"""Index of the content that a level below the device stores, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from quire.core.cache.prefix import SortedBlocks
from quire.core.step import Content, MemoryKind
from quire.core.values import Level

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
