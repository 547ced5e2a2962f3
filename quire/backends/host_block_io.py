"""Block I/O of runners whose memory is ordinary host memory: every copy is made in the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.backends.base import Copied, MemorySizes, PendingCopy
from quire.backends.block_io import MAX_EXPORTS, Counts, check_pieces, cpu_pieces_per_step
from quire.core.step import MemoryRef

Bytes = NDArray[np.uint8]
Pools = tuple[Sequence[Bytes], Sequence[Bytes], Sequence[Bytes]]  # by kind


class _Part(NamedTuple):
    """A part of a buffer: a piece in layers that lie side by side."""

    pool: Bytes  # [layers, pieces, bytes]
    first: int
    last: int


class HostBlockIO:
    """`pools` has the pools of each kind of memory in the order of a buffer, as views [layers, pieces, bytes]."""

    def __init__(self, pools: Pools, counts: Counts, layout: str, weight_bytes: int) -> None:
        self._parts = tuple(_divide(some) for some in pools)
        self.sizes = MemorySizes(*(parts[-1].last if parts else 0 for parts in self._parts))
        self.layout = layout
        self.is_host_memory = True
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = cpu_pieces_per_step(self.sizes, weight_bytes)
        self._counts = counts

    def allocate(self, num_bytes: int) -> memoryview:
        return np.zeros(num_bytes, np.uint8).data

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=True)
        for (kind, index), buffer in zip(pieces, buffers, strict=True):
            flat = np.frombuffer(buffer, np.uint8)
            for pool, first, last in self._parts[kind]:
                flat[first:last].reshape(len(pool), -1)[:] = pool[:, index]
        return Copied()

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=False)
        for (kind, index), buffer in zip(pieces, buffers, strict=True):
            flat = np.frombuffer(buffer, np.uint8)
            for pool, first, last in self._parts[kind]:
                pool[:, index] = flat[first:last].reshape(len(pool), -1)
        return Copied()


def _divide(pools: Sequence[Bytes]) -> list[_Part]:
    parts, at = [], 0
    for pool in pools:
        size = pool.shape[0] * pool.shape[2]
        parts.append(_Part(pool, at, at + size))
        at += size
    return parts
