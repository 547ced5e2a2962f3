"""Chooses the content that is saved to lower levels.

    evicted from the device     to host memory; to disk if it was used twice, or after regrets (`Saves.note_regret`)
    used a second time, pinned  to disk, a few blocks per step
    the rest                    to disk, while nothing runs, as much as the disk can hold: also what host memory has

A save costs a copy on the device and, for a disk, processor time. So a server that is always busy does not write
content that was used once to disk: at a hit rate of zero, nothing is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from quire.core.cache.context import KVCacheBlock, Linked, StateSlot, WindowBlock
from quire.core.levels.lower_level import LowerLevel, content_of
from quire.core.memory import Memory
from quire.core.step import Content, MemoryKind, MemoryRef, Save
from quire.core.values import Level

USED_PER_STEP = 2  # blocks that were used again, saved in one step
MAX_USED = 4096  # of them that wait
CREDIT_PER_REGRET = 64  # blocks that are written to disk for each prefix that was evicted and wanted again
MAX_CREDIT = 4096
MAX_VISITED = 2000  # blocks that an idle search looks at in one call


class SaveLimits(NamedTuple):
    max_bytes: int = 0  # of one plan; a piece that does not fit is not saved
    idle_bytes: int = 0  # of one plan while nothing runs
    max_pending: int = 0  # saves in flight
    max_writes: int = 0  # of them, those that wait to be written to disk


NO_SAVES = SaveLimits()


_Piece = tuple[Content, MemoryRef | None]  # content, and where it is on the device; None: it is in host memory


class Saves:
    """Saves of the next plan, and those in flight."""

    def __init__(self, memory: Memory, levels: Sequence[LowerLevel], *, limits: SaveLimits) -> None:
        self._memory = memory
        self._tree = memory.tree
        self._levels = {level.level: level for level in levels}
        self._max_bytes, self._idle_bytes, self._max_pending, self._max_writes = limits
        self._chosen: deque[Save] = deque()
        self._num_chosen_bytes = 0
        self._drops: list[Content] = []
        self.pending: dict[Content, set[Level]] = {}  # saves in flight, with the levels that they have not reached yet
        self._used: deque[tuple[KVCacheBlock, bytes]] = deque()
        self._credit = 0  # evicted blocks that may be written to disk
        self._walk: Iterator[Sequence[_Piece]] | None = None  # over cached content, while idle
        self._walk_state: tuple[int, ...] = ()
        self._num_walked_bytes = 0
        self._unvisited: deque[_Piece] = deque()  # pieces that the walk has reached
        self._done_state: tuple[int, ...] = ()  # no cached content is unsaved since then
        self.num_skipped = 0  # evicted pieces that were not saved because a plan or the level was full
        if levels:
            memory.blocks.on_eviction = self._note_eviction
            memory.windows.pool.on_eviction = self._note_window_eviction
            memory.states.pool.on_eviction = self._note_state_eviction

    @property
    def has_chosen(self) -> bool:
        """Whether the next plan has saves, or content to drop."""
        return bool(self._chosen or self._drops)

    @property
    def _is_disk_filled(self) -> bool:
        disk = self._levels.get(Level.DISK)
        return disk is not None and disk.is_filled

    # What happened

    def note_use(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Record that cached blocks were used again or pinned."""
        if not self._is_disk_filled:
            return
        for block in blocks:
            if not block.is_reused and block.key is not None and len(self._used) < MAX_USED:
                block.is_reused = True
                self._used.append((block, block.key))

    def note_regret(self) -> None:
        """Record that a request would have used content that was evicted and not saved."""
        self._credit = min(self._credit + CREDIT_PER_REGRET, MAX_CREDIT)

    def _note_eviction(self, block: KVCacheBlock) -> None:
        """Save a block that is about to lose its content, with the window block and the states that it takes along."""
        if not self._memory.groups and block.key is not None and self._is_stored(block, block.key):
            return
        if self._save_node(block, self._wanted(block), is_evicted=True):
            self._credit = max(self._credit - 1, 0)

    def _is_stored(self, block: KVCacheBlock, key: bytes) -> bool:
        """Whether a full block needs no save. A short cut for the usual case: a prompt may evict hundreds of blocks."""
        host, disk = self._levels.get(Level.HOST), self._levels.get(Level.DISK)
        if host is not None and host.is_filled and not host.touch_block(key, block.tokens):
            return False
        return (
            disk is None
            or not disk.is_filled
            or not (block.is_reused or self._credit > 0)
            or disk.touch_block(key, block.tokens)
        )

    def _note_window_eviction(self, window: WindowBlock) -> None:
        node = window.node
        if window.is_kept and node is not None and node.parent_key is not None:
            self._choose(self._piece(MemoryKind.WINDOW, node, window), self._wanted(node), is_evicted=True)

    def _note_state_eviction(self, slot: StateSlot) -> None:
        assert slot.parent_key is not None
        self._choose(self._state_piece(slot), self._wanted(self._tree.find(slot.parent_key)), is_evicted=True)

    def _wanted(self, node: KVCacheBlock | None) -> tuple[Level, ...]:
        """The levels to which evicted content of a node is saved. None: the root.

        A window block or a state is of no use on a disk that does not have the block. So both go there if the block
        does: because it was used again, because evicted content was wanted again, or while nothing ran.
        """
        disk = self._levels.get(Level.DISK)
        is_to_disk = disk is not None and self._credit > 0
        if disk is not None and node is not None and not is_to_disk:
            is_to_disk = node.is_reused or disk.has_key(content_of(self._tree, node))
        return tuple(
            name for name, level in self._levels.items() if level.is_filled and (name is Level.HOST or is_to_disk)
        )

    # Choosing

    def _piece(self, kind: MemoryKind, node: KVCacheBlock, block: Linked) -> _Piece:
        """The content of a node that is in this block."""
        return content_of(self._tree, node, kind), MemoryRef(kind, block.block_id)

    def _state_piece(self, slot: StateSlot) -> _Piece:
        assert slot.parent_key is not None
        key = self._tree.digest(slot.parent_key, slot.run)
        content = Content(MemoryKind.STATE, key, slot.parent_key, slot.run)
        return content, MemoryRef(MemoryKind.STATE, slot.block_id)

    def _pieces(self, block: KVCacheBlock) -> list[_Piece]:
        """The content of a node: its block, its window block, and the states after it. Empty if it is not published."""
        if block.parent_key is None:
            return []
        pieces = [self._piece(MemoryKind.BLOCK, block, block)]
        window = block.window
        if window is not None and (window.is_kept or window.ref_count):
            pieces.append(self._piece(MemoryKind.WINDOW, block, window))
        if block.key is not None:
            pieces += map(self._state_piece, self._memory.states.pool.at(block.key).values())
        return pieces

    def _save_node(self, block: KVCacheBlock, levels: tuple[Level, ...], *, is_evicted: bool = False) -> bool:
        """Choose everything that a node has. Returns whether its block was chosen."""
        chosen = [self._choose(piece, levels, is_evicted=is_evicted) for piece in self._pieces(block)]
        return bool(chosen) and chosen[0]

    def _choose(self, piece: _Piece, wanted: Iterable[Level], *, is_evicted: bool = False) -> bool:
        """Add a save to the next plan, to those levels that do not have the content. Returns False if there are none.

        `is_evicted`: the content is lost otherwise. If the plan or the level is full, it displaces what was evicted
        before it in this plan. The pool evicts the least valuable content first, and the last block of a prefix before
        the first one, without which the others cannot be found.
        """
        content, source = piece
        levels: list[Level] = []
        for level in wanted:
            self._levels[level].touch(content)
            is_known = level in self.pending.get(content, ()) or self._levels[level].has_key(content)
            if not is_known and not (level is Level.DISK and self._has_backlog()):
                levels.append(level)
        if not levels:
            return False
        num_bytes = self._levels[levels[0]].sizes[content.kind]
        while self._is_full(num_bytes, self._max_bytes):
            if not is_evicted or not self._chosen:
                self.num_skipped += 1
                return False
            self._cancel(self._chosen.popleft())
        levels = [level for level in levels if self._reserve(self._levels[level], content.kind, is_evicted=is_evicted)]
        if not levels:
            self.num_skipped += 1
            return False
        self._num_chosen_bytes += num_bytes
        self.pending.setdefault(content, set()).update(levels)
        self._chosen.append(Save(content, source, tuple(levels)))
        return True

    def _reserve(self, level: LowerLevel, kind: MemoryKind, *, is_evicted: bool) -> bool:
        """Make room in a level. Returns False if it is full of content that is being loaded or saved."""
        has_room, dropped = level.reserve(kind)
        while not has_room and is_evicted and self._chosen and (level.limits is None or level.limits[kind]):
            self._cancel(self._chosen.popleft())
            has_room, dropped = level.reserve(kind)
        if dropped is not None:
            self._drops.append(dropped)
        return has_room

    def _is_full(self, num_bytes: int, max_bytes: int) -> bool:
        """Whether the next plan has no room for a piece. One piece always fits."""
        is_over = self._num_chosen_bytes > 0 and self._num_chosen_bytes + num_bytes > max_bytes
        return is_over or len(self.pending) >= self._max_pending

    def _has_backlog(self) -> bool:
        """Whether so much waits to be written to disk that more is not chosen."""
        return sum(self._levels[Level.DISK].num_reserved) >= self._max_writes

    def _cancel(self, save: Save) -> None:
        """Take a save out of the next plan."""
        for level in save.levels:
            self._end(save.content, level)
        self._num_chosen_bytes -= self._levels[save.levels[0]].sizes[save.content.kind]
        self.num_skipped += 1

    def _end(self, content: Content, level: Level) -> None:
        """Remove a save that is pending, and the room that is reserved for it."""
        levels = self.pending[content]
        levels.remove(level)
        if not levels:
            del self.pending[content]
        self._levels[level].num_reserved[content.kind] -= 1

    def drop(self, content: Content) -> None:
        """Tell host memory that content is not used any more."""
        self._drops.append(content)

    # Plans

    def pop_plan(self) -> tuple[tuple[Save, ...], tuple[Content, ...]]:
        """The saves of the next plan, and the content to drop from host memory before they are made."""
        for _ in range(min(USED_PER_STEP, len(self._used))):
            if self._has_backlog():
                break
            block, key = self._used.popleft()
            if block.key == key:
                self._save_node(block, (Level.DISK,))
        saves, drops = tuple(self._chosen), tuple(self._drops)
        if saves or drops:
            self._chosen.clear()
            self._drops.clear()
            self._num_chosen_bytes = 0
        return saves, drops

    def choose_idle(self, pinned: Iterable[KVCacheBlock] = ()) -> None:
        """Choose unsaved content for the disk until a plan is full. Call it while idle.

        Pinned content is first, then the most recently used, then that of host memory, and only as much as the disk can
        hold. Every piece is tried once: a save that failed, because the disk is full, would fail again.
        """
        if not self.has_unsaved:
            return
        if self._walk is None or self._walk_state != self._state():
            self._walk, self._walk_state, self._num_walked_bytes = self._cached(pinned), self._state(), 0
            self._unvisited.clear()
        disk = self._levels[Level.DISK]
        max_bytes = min(self._idle_bytes, self._max_bytes)
        for _ in range(MAX_VISITED):
            if self._unvisited:
                if self._has_backlog() or self._is_full(disk.sizes[self._unvisited[0][0].kind], max_bytes):
                    return
                self._choose(self._unvisited.popleft(), (Level.DISK,))
                continue
            pieces = next(self._walk, None)
            if pieces is not None:
                self._unvisited.extend(pieces)
                self._num_walked_bytes += sum(disk.sizes[content.kind] for content, _ in pieces)
            if pieces is None or (disk.store_bytes is not None and self._num_walked_bytes > disk.store_bytes):
                self._unvisited.clear()
                self._walk, self._done_state = None, self._walk_state
                return

    def _state(self) -> tuple[int, ...]:
        """Changes with the cached content and with the free list, over which the walk goes."""
        blocks, windows, states = self._memory.pools
        counts = [blocks.num_releases, blocks.num_evictions, blocks.num_free]
        counts += [windows.num_releases, windows.num_evictions, windows.num_free, states.num_evictions]
        if Level.HOST in self._levels:
            counts.append(self._levels[Level.HOST].num_added)
        return tuple(counts)

    @property
    def has_unsaved(self) -> bool:
        """Whether `choose_idle` may find something."""
        return self._is_disk_filled and self._done_state != self._state()

    def _cached(self, pinned: Iterable[KVCacheBlock]) -> Iterator[Sequence[_Piece]]:
        """All cached content, the most valuable first."""
        yield from map(self._pieces, [*pinned])
        yield from map(self._pieces, self._memory.blocks.free.backwards())
        disk, host = self._levels[Level.DISK], self._levels.get(Level.HOST)
        if host is None:
            return
        for stored in [one for kind in MemoryKind for one in reversed(host.pieces(kind).values())]:
            is_known = disk.has_key(stored.content) or stored.content in self.pending
            yield () if is_known or stored.content not in host else ((stored.content, None),)

    def finish(self, content: Content, level: Level, *, is_saved: bool) -> None:
        """End a save to one level, unless the cache was cleared in the meantime."""
        if level not in self.pending.get(content, ()):
            return
        self._end(content, level)
        stored = self._levels[level]
        stored.num_saves += is_saved
        stored.num_failed_saves += not is_saved
        if is_saved:
            stored.add(content)

    def clear(self) -> None:
        self._chosen.clear()
        self._drops.clear()
        self._num_chosen_bytes = 0
        self.pending.clear()
        self._used.clear()
        self._unvisited.clear()
        self._walk, self._credit = None, 0
        for level in self._levels.values():
            level.num_reserved = [0, 0, 0]
