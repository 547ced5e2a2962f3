"""Block I/O of the fake runner: the integers of its memory as words of 8 bytes.

A runner that executes late also copies late: after the steps that were enqueued before, and not before `is_done` was
called once or more. Until then an exported buffer and the targets of an import hold poison, so that a caller who uses
them too early gets wrong content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random

from quire.backends.base import Capacity, Copied, MemorySizes, PendingCopy
from quire.backends.block_io import MAX_EXPORTS, check_pieces, counts_of, layout_text
from quire.core.step import MemoryKind, MemoryRef

POISON = -1  # content of memory that has not been written; digests are never negative
WORD_BYTES = 8
PIECES_PER_STEP = 4  # few, so that tests reach the limit
MAX_POLLS = 3  # calls of `is_done` before a late copy is done


class FakeMemory:
    """The pools, with a digest for each position, and one for each state."""

    def __init__(self, capacity: Capacity) -> None:
        size = capacity.block_size
        self.blocks = [[POISON] * size for _ in range(capacity.num_blocks)]
        self.window_blocks = [[POISON] * size for _ in range(capacity.num_window_blocks)]
        self.states = [POISON] * capacity.num_states
        if self.states:
            self.states[0] = 0  # the empty state

    def read(self, ref: MemoryRef) -> bytes:
        if ref.kind is MemoryKind.STATE:
            return struct.pack("<q", self.states[ref.index])
        words = self._pool(ref.kind)[ref.index]
        return struct.pack(f"<{len(words)}q", *words)

    def write(self, ref: MemoryRef, content: bytes | memoryview) -> None:
        words = struct.unpack(f"<{len(content) // WORD_BYTES}q", content)
        if ref.kind is MemoryKind.STATE:
            (self.states[ref.index],) = words
        else:
            self._pool(ref.kind)[ref.index][:] = words

    def _pool(self, kind: MemoryKind) -> list[list[int]]:
        return self.window_blocks if kind is MemoryKind.WINDOW else self.blocks


class _Progress(Enum):
    ENQUEUED = "the steps before it have not run"
    STARTED = "running"
    DONE = "done"


class LateCopy:
    """Copies that were enqueued. The runner calls `start` once the steps before them have run."""

    def __init__(
        self,
        memory: FakeMemory,
        pieces: Sequence[MemoryRef],
        buffers: Sequence[memoryview],
        *,
        is_export: bool,
        num_polls: int,
    ) -> None:
        self.pieces = tuple(pieces)
        self.is_export = is_export
        self._memory = memory
        self._buffers = tuple(buffers)
        self._num_polls = num_polls
        self._progress = _Progress.ENQUEUED
        self._contents: list[bytes] = []  # read when the copies started
        if is_export:
            for buffer in buffers:
                buffer.cast("B")[:] = _poison(buffer.nbytes)

    @property
    def is_pending(self) -> bool:
        return self._progress is not _Progress.DONE

    def start(self) -> None:
        self._progress = _Progress.STARTED
        if self.is_export:
            self._contents = [self._memory.read(ref) for ref in self.pieces]
            return
        for ref, buffer in zip(self.pieces, self._buffers, strict=True):
            self._memory.write(ref, _poison(buffer.nbytes))

    def is_done(self) -> bool:
        if self._progress is _Progress.STARTED:
            self._num_polls -= 1
            if self._num_polls <= 0:
                self._finish()
        return self._progress is _Progress.DONE

    def join_steps(self) -> bool:
        return False  # a late copy is not ordered with steps

    def _finish(self) -> None:
        self._progress = _Progress.DONE
        if self.is_export:
            for buffer, content in zip(self._buffers, self._contents, strict=True):
                buffer.cast("B")[:] = content
        else:
            for ref, buffer in zip(self.pieces, self._buffers, strict=True):
                self._memory.write(ref, buffer)


class FakeBlockIO:
    """`enqueue` is None if the runner executes steps at once; otherwise it takes late copies."""

    def __init__(
        self, memory: FakeMemory, capacity: Capacity, enqueue: Callable[[LateCopy], None] | None, seed: int = 0
    ) -> None:
        block = WORD_BYTES * capacity.block_size
        has_windows, has_states = capacity.num_window_blocks > 0, capacity.num_states > 0
        self.sizes = MemorySizes(block, block * has_windows, WORD_BYTES * has_states)
        self.layout = layout_text(
            "fake",
            1,
            block_size=capacity.block_size,
            window=capacity.window if has_windows else 0,
            states=int(has_states),
        )
        self.is_host_memory = False
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = PIECES_PER_STEP
        self._memory = memory
        self._counts = counts_of(capacity)
        self._enqueue = enqueue
        self._random = Random(seed)

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        return self._copy(pieces, buffers, is_export=True)

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        return self._copy(pieces, buffers, is_export=False)

    def _copy(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview], *, is_export: bool) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=is_export)
        num_polls = 0 if self._enqueue is None else self._random.randint(1, MAX_POLLS)
        copy = LateCopy(self._memory, pieces, buffers, is_export=is_export, num_polls=num_polls)
        if self._enqueue is None:
            copy.start()
            copy.is_done()
            return Copied()
        self._enqueue(copy)
        return copy


def _poison(num_bytes: int) -> bytes:
    return struct.pack("<q", POISON) * (num_bytes // WORD_BYTES)
