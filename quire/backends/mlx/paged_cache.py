"""The KV pools, the cache objects that replace mlx-lm's own, and block I/O.

A layer has two pools, [blocks, block size, KV heads, head size]: keys and values. A step writes them with a scatter
that MLX does in place, because nothing else refers to the array by then (decision 0036). A context is read through its
block table, so shared, forked and chunked contexts need no special case.

Block I/O copies in the call, in the runner's thread, when no step is running. No view of a pool is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.backends.base import Copied, MemorySizes, PendingCopy
from quire.backends.block_io import MAX_EXPORTS, check_pieces, cpu_pieces_per_step
from quire.backends.mlx.batch import Pass
from quire.backends.mlx.paged_decode import Attention, Shape
from quire.core.step import BlockCopy, MemoryRef
from quire.errors import InvariantViolation

# N blocks, K KV heads, D head size, T tokens of a pass

GATHER_BYTES = 256 << 20  # of keys and values that are gathered together in a layer; more rows are another group
PURGED = 64  # blocks per operation: a long context has thousands


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer stores for each token. MLA models store keys and values of different sizes."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    window: int  # number of keys that a query sees, itself included; 0: all
    is_unused: bool = False  # the layer uses the keys and values of another one, and stores nothing
    num_query_heads: int = 0  # 0: the model computes attention itself

    @property
    def token_bytes(self) -> int:
        return self.num_heads * (self.key_size + self.value_size) * self.dtype.size

    def attention(self, block_size: int) -> Shape:
        """Return what the paged-decode kernel is compiled for."""
        heads = self.num_query_heads, self.num_heads
        return Shape(*heads, self.key_size, self.value_size, block_size, self.dtype)


class Unpageable(Exception):
    """A model uses its cache in a way that this kind of pass does not support."""


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """The kernel that decodes use, in the layers of the shape for which it was checked and measured."""

    attend: Attention
    shape: Shape
    least_rows: int  # fewer sequences are attended faster by gather + SDPA


class LayerCache:
    """The pools of one layer, as mlx-lm's models use a cache: `offset`, `make_mask`, `update_and_fetch`."""

    def __init__(self, shape: LayerShape, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        sizes = (shape.key_size, shape.value_size)
        self.pools = [mx.zeros((num_blocks, block_size, shape.num_heads, size), shape.dtype) for size in sizes]
        self.step: Pass | None = None
        self.kernel: DecodeKernel | None = None  # None: contexts are gathered
        self.num_query_heads = 0  # seen in the last flat pass

    @property
    def running(self) -> Pass:
        if self.step is None:
            raise InvariantViolation("a layer of the cache is used outside a forward pass")
        return self.step

    @property
    def offset(self) -> mx.array | int:
        return self.running.offset

    def make_mask(self, num_queries: int, *, return_array: bool = False, window_size: int | None = None) -> object:
        """Return a mask for the layers that share this layer's window."""
        del num_queries
        step, window = self.running, window_size or self.shape.window
        if not step.is_flat:
            return step.groups[0].mask(window)
        if return_array:
            raise Unpageable("the model reads the attention mask")
        return PagedMask(window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[object, object]:
        """Store keys and values [B, K, L, D] of the pass. Returns the whole contexts."""
        step = self.running
        for pool, new in zip(self.pools, (keys, values), strict=True):
            pool[step.blocks, step.slots] = _rows(new, pool.dtype)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[object, object]:
        step = self.running
        if step.is_flat:
            context = PagedContext(self)
            return context, context
        return self.read(step.groups[0].view(0).tables)

    def read(self, tables: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of tables [B, W] as [B, K, W * block size, D]."""
        num_seqs, width = tables.shape
        keys, values = (
            pool[tables].reshape(num_seqs, width * pool.shape[1], *pool.shape[2:]).swapaxes(1, 2) for pool in self.pools
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class PagedMask:
    """The mask of a flat pass: causal, with this window. `attend` applies it group by group."""

    window: int


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Stands for the keys, and for the values, of all rows of a flat pass."""

    layer: LayerCache

    @property
    def dtype(self) -> mx.Dtype:
        return self.layer.shape.dtype

    def astype(self, dtype: mx.Dtype) -> PagedContext:
        """Return itself. Some models ask for float32 keys; attention uses the wider type of queries and keys anyway."""
        del dtype
        return self


class KVStore:
    """The pools of all layers."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [LayerCache(shape, num_blocks, block_size) for shape in shapes]
        self.max_gathered = GATHER_BYTES // max(shape.token_bytes for shape in shapes)  # keys

    @property
    def arrays(self) -> list[mx.array]:
        return [pool for layer in self.layers for pool in layer.pools]

    @property
    def stored_layers(self) -> list[LayerCache]:
        """The layers with keys and values of their own."""
        return [layer for layer in self.layers if not layer.shape.is_unused]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def use_kernel(self, kernel: DecodeKernel) -> None:
        """Use this kernel for decodes from now on. The caller has checked it."""
        for layer in self.layers:
            if layer.shape.attention(self.block_size) == kernel.shape:
                layer.kernel = kernel

    def begin(self, step: Pass | None) -> None:
        for layer in self.layers:
            layer.step = step

    def copy(self, copies: Sequence[BlockCopy]) -> list[mx.array]:
        """Copy whole blocks in every layer. No block is both source and destination.

        Returns the contents read, which must be evaluated before the pools: a pool that is still being read would be
        copied as a whole.
        """
        if not copies:
            return []
        sources = mx.array([copy.source for copy in copies], dtype=mx.int32)
        destinations = mx.array([copy.destination for copy in copies], dtype=mx.int32)
        contents = []
        for pool in self.arrays:
            contents.append(pool[sources])
            pool[destinations] = contents[-1]
        return contents

    def purge(self, blocks: Sequence[int]) -> None:
        """Set values that are not finite to 0, so that the next request that gets the block cannot read them."""
        whole = sorted(set(blocks))
        for first in range(0, len(whole), PURGED):
            index = mx.array(whole[first : first + PURGED], dtype=mx.int32)
            for pool in self.arrays:
                found = pool[index]
                finite = mx.where(mx.isfinite(found), found, mx.zeros_like(found))
                mx.eval(finite)
                pool[index] = finite


def _rows(heads: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return [B, K, L, D] as one row per token [B * L, K, D]."""
    num_seqs, num_heads, length, size = heads.shape
    return heads.swapaxes(1, 2).reshape(num_seqs * length, num_heads, size).astype(dtype)


LAYOUT = 1  # version of the bytes of a block; raise it when their meaning changes


class MlxBlockIO:
    """`run` calls a function in the runner's thread, after all steps enqueued so far have been computed."""

    def __init__(self, store: KVStore, layout: str, weight_bytes: int, run: Callable[..., None]) -> None:
        self._store = store
        self._run = run
        self.sizes = MemorySizes(sum(layer.shape.token_bytes for layer in store.stored_layers) * store.block_size)
        self.layout = layout
        self.is_host_memory = True
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = cpu_pieces_per_step(self.sizes, weight_bytes)

    def allocate(self, num_bytes: int) -> memoryview:
        return np.zeros(num_bytes, np.uint8).data

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, (self._store.num_blocks, 0, 0), is_export=True)
        self._run(self._export, [ref.index for ref in pieces], buffers)
        return Copied()

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, (self._store.num_blocks, 0, 0), is_export=False)
        self._run(self._import, [ref.index for ref in pieces], buffers)
        return Copied()

    # In the runner's thread

    def _export(self, blocks: list[int], buffers: Sequence[memoryview]) -> None:
        for block, buffer in zip(blocks, buffers, strict=True):
            pools = [pool for layer in self._store.stored_layers for pool in layer.pools]
            contents = [pool[block].reshape(-1).view(mx.uint8) for pool in pools]
            mx.eval(contents)
            parts = [np.array(content, copy=False) for content in contents]
            np.concatenate(parts, out=np.frombuffer(buffer, np.uint8))

    def _import(self, blocks: list[int], buffers: Sequence[memoryview]) -> None:
        for block, buffer in zip(blocks, buffers, strict=True):
            whole, at = np.frombuffer(buffer, np.uint8), 0
            for layer in self._store.stored_layers:
                for pool in layer.pools:
                    size = pool.nbytes // self._store.num_blocks
                    pool[block] = mx.array(whole[at : at + size]).view(pool.dtype).reshape(pool.shape[1:])
                    at += size
            mx.eval(self._store.arrays)
