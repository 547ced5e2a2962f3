"""Block I/O of the MLX runner. Copies are made in the call, in the runner's thread, when no step is running.

Blocks are read with a gather and written with a scatter. No view of a pool is kept: the scatter of the next step is
done in place only if nothing else refers to the pool's memory (decision 0036).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from quire.backends.base import Copied, MemorySizes, PendingCopy
from quire.backends.block_io import MAX_EXPORTS, check_pieces, cpu_pieces_per_step
from quire.backends.mlx.paged_cache import KVStore
from quire.core.step import MemoryRef

LAYOUT = 1  # version of the bytes of a block; raise it when their meaning changes
GROUP = 32  # blocks that are gathered together: MLX needs memory for them


class Run(Protocol):
    """Calls a function in the runner's thread, after all steps enqueued so far have been computed."""

    def __call__(self, function: Callable[..., None], *args: Any) -> None: ...


class MlxBlockIO:
    def __init__(self, store: KVStore, layout: str, weight_bytes: int, run: Run) -> None:
        self._store = store
        self._run = run
        self.sizes = MemorySizes(sum(array.nbytes // store.num_blocks for array in store.stored_arrays))
        self.layout = layout
        self.is_host_memory = True
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = cpu_pieces_per_step(self.sizes, weight_bytes)

    def allocate(self, num_bytes: int) -> memoryview:
        return np.zeros(num_bytes, np.uint8).data

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self._check(pieces, buffers, is_export=True)
        if pieces:
            self._run(self._export, [ref.index for ref in pieces], buffers)
        return Copied()

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self._check(pieces, buffers, is_export=False)
        if pieces:
            self._run(self._import, [ref.index for ref in pieces], buffers)
        return Copied()

    def _check(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview], *, is_export: bool) -> None:
        check_pieces(pieces, buffers, self.sizes, (self._store.num_blocks, 0, 0), is_export=is_export)

    # In the runner's thread

    def _export(self, blocks: list[int], buffers: Sequence[memoryview]) -> None:
        for first in range(0, len(blocks), GROUP):
            index = mx.array(blocks[first : first + GROUP], dtype=mx.int32)
            targets = [np.frombuffer(buffer, np.uint8) for buffer in buffers[first : first + GROUP]]
            contents = [_as_bytes(pool[index]) for pool in self._store.stored_arrays]
            mx.eval(contents)
            at = 0
            for content in contents:
                rows = np.array(content, copy=False)  # [blocks, bytes]
                for target, row in zip(targets, rows, strict=True):
                    target[at : at + len(row)] = row
                at += rows.shape[1]

    def _import(self, blocks: list[int], buffers: Sequence[memoryview]) -> None:
        for first in range(0, len(blocks), GROUP):
            index = mx.array(blocks[first : first + GROUP], dtype=mx.int32)
            sources = [np.frombuffer(buffer, np.uint8) for buffer in buffers[first : first + GROUP]]
            at = 0
            for layer in self._store.stored_layers:
                size = layer.keys_pool[0].nbytes
                layer.keys_pool[index] = _from_bytes(sources, at, at + size, layer.keys_pool)
                at += size
                size = layer.values_pool[0].nbytes
                layer.values_pool[index] = _from_bytes(sources, at, at + size, layer.values_pool)
                at += size
            mx.eval(self._store.arrays)


def _as_bytes(blocks: mx.array) -> mx.array:
    return blocks.reshape(len(blocks), -1).view(mx.uint8)


def _from_bytes(sources: Sequence[NDArray[np.uint8]], first: int, last: int, pool: mx.array) -> mx.array:
    """Return a part of each buffer as blocks of a pool."""
    rows = mx.array(np.stack([source[first:last] for source in sources]))
    return rows.view(pool.dtype).reshape(len(sources), *pool.shape[1:])
