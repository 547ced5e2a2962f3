"""Host memory of transfers: the host tier, and the buffers for reads and writes of files."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from quire.backends.base import MemorySizes
from quire.core.levels.lower_tier import PieceCounts
from quire.core.step import Content, MemoryKind

MIN_EARLY_BYTES = 4096  # of a block; smaller ones, of models for tests, are never allocated early
MAX_CHUNK_SLOTS = 8192  # buffers of tiny models would take more memory as objects than as bytes
CHUNK_BYTES = 128 << 20  # allocated at once: pinning takes about a third of a second per gigabyte

log = logging.getLogger(__name__)
Allocate = Callable[[int], memoryview]


class Slots:
    """Buffers of one size per kind of memory.

    Each kind has its own memory, allocated in chunks: in a background thread after `allocate_all` if `is_early`,
    otherwise when they are first needed. `counts`: buffers of each kind.
    """

    def __init__(self, allocate: Allocate, sizes: MemorySizes, counts: PieceCounts, *, is_early: bool = False) -> None:
        self._allocate = allocate
        self._sizes = sizes
        self._num_left = list(counts)  # buffers that may still be allocated
        self._num_made = [0, 0, 0]
        self._free: tuple[deque[memoryview], ...] = (deque(), deque(), deque())
        self._is_closed = False
        self._is_early = is_early and sizes.block + sizes.window >= MIN_EARLY_BYTES
        self._thread: threading.Thread | None = None

    def take(self, kind: MemoryKind) -> memoryview | None:
        """Return a buffer, or None if all are in use or not allocated yet."""
        free = self._free[kind]
        if not free and not self._is_early:
            self._add_chunk(kind)
        return free.popleft() if free else None

    def put(self, kind: MemoryKind, buffer: memoryview) -> None:
        self._free[kind].append(buffer)

    def has_any(self, kind: MemoryKind) -> bool:
        """Whether there are buffers, in use or not, or there will be: it makes sense to wait for one."""
        return self._num_made[kind] > 0 or self._num_left[kind] > 0

    def allocate_all(self) -> None:
        """Start to allocate everything, if it is to be allocated early."""
        if self._is_early:
            self._thread = threading.Thread(target=self._allocate_all, name="host-cache", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Allocate nothing more. Returns when no allocation is running."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()

    def _add_chunk(self, kind: MemoryKind) -> bool:
        size = self._sizes.of(kind)
        count = min(self._num_left[kind], max(min(CHUNK_BYTES // size, MAX_CHUNK_SLOTS), 1)) if size else 0
        if not count:
            return False
        try:
            chunk = self._allocate(count * size)
        except Exception:
            log.exception("%d bytes of host memory could not be allocated", count * size)
            self._num_left[kind] = 0
            return False
        self._num_made[kind] += count  # before fewer are left: `has_any` is called by another thread
        self._num_left[kind] -= count
        self._free[kind].extend(chunk[at : at + size] for at in range(0, count * size, size))
        return True

    def _allocate_all(self) -> None:
        for kind in MemoryKind:
            while not self._is_closed and self._add_chunk(kind):
                pass


class HostPiece:
    """Content in host memory. A buffer in use is not given back before its last user has released it."""

    __slots__ = ("buffer", "is_dropped", "kind", "num_users")

    def __init__(self, kind: MemoryKind, buffer: memoryview) -> None:
        self.kind = kind
        self.buffer = buffer
        self.num_users = 0
        self.is_dropped = False


class HostStore:
    """The host tier. Which content it has is decided by the scheduler's core."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._pieces: dict[Content, HostPiece] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def make(self, kind: MemoryKind) -> HostPiece | None:
        """Take a buffer for content that is copied next. None if there is none."""
        buffer = self._slots.take(kind)
        return None if buffer is None else HostPiece(kind, buffer)

    def add(self, content: Content, piece: HostPiece) -> None:
        self.drop(content)
        self._pieces[content] = piece

    def use(self, content: Content) -> HostPiece | None:
        piece = self._pieces.get(content)
        if piece is not None:
            piece.num_users += 1
        return piece

    def release(self, piece: HostPiece) -> None:
        piece.num_users -= 1
        if piece.is_dropped and not piece.num_users:
            self._slots.put(piece.kind, piece.buffer)

    def discard(self, piece: HostPiece) -> None:
        """Give back a piece that is not stored, once nothing uses it."""
        piece.is_dropped = True
        if not piece.num_users:
            self._slots.put(piece.kind, piece.buffer)

    def drop(self, content: Content) -> None:
        piece = self._pieces.pop(content, None)
        if piece is not None:
            self.discard(piece)

    def clear(self) -> None:
        for content in list(self._pieces):
            self.drop(content)

    def close(self) -> None:
        self._slots.close()
