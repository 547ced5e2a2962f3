"""The KV pool: layers, each divided into blocks.

A block of a layer is [2, K, block size, D]: keys, then values, of all KV heads. Storing a batch, gathering a context
and copying a block are therefore one operation each. Layers of the same shape lie in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.kv_spec import KVSpec
from quire.core.step import BlockCopy

# K kv heads, D head size

PURGED = 64  # blocks per operation: a long context has thousands


class HeadShape(NamedTuple):
    """Shape of the keys, and of the values, of one token in a layer."""

    num_kv_heads: int
    head_size: int


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros, because masked values are multiplied by 0, and 0 times NaN in stale memory would be NaN.

    On a CPU the operating system zeroes pages when they are first written, so a pool of gigabytes takes no memory until
    it is used. `torch.zeros` would write them all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Context:
    """Keys and values of one attention group in layers of one shape, gathered from their blocks.

    All groups share one buffer, which every `read` overwrites.
    """

    heads: Sequence[Tensor]  # by layer: the store viewed as [.., block size * D]
    rows: Tensor
    out: Tensor  # [rows, block size * D]
    keys: Tensor  # [B, K, L, D]
    values: Tensor  # [B, K, L, D]

    def read(self, layer: int) -> None:
        torch.index_select(self.heads[layer], 0, self.rows, out=self.out)


class KVStore:
    def __init__(
        self, kv_spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.shapes = tuple(HeadShape(layer.num_kv_heads, layer.head_size) for layer in kv_spec.kv_layers)
        self.pools: Mapping[HeadShape, Tensor] = {  # [layers of the shape, blocks, 2, K, block size, D]
            shape: _zeros(
                (self.shapes.count(shape), num_blocks, 2, shape.num_kv_heads, block_size, shape.head_size),
                dtype,
                device,
            )
            for shape in dict.fromkeys(self.shapes)
        }
        unused = {shape: iter(pool) for shape, pool in self.pools.items()}
        self.layers = [next(unused[shape]) for shape in self.shapes]
        self._slots = [layer.view(-1, layer.shape[-1]) for layer in self.layers]
        self._heads = [layer.view(-1, block_size * layer.shape[-1]) for layer in self.layers]
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    def store(self, layer: int, kv: Tensor, rows: Mapping[HeadShape, Tensor]) -> None:
        """Write keys and values kv [T, 2K, D]. `rows`: see `slot_rows`."""
        shape = self.shapes[layer]
        self._slots[layer].index_copy_(0, rows[shape], kv.reshape(-1, shape.head_size))

    def contexts(self, tables: Tensor, num_keys: int) -> Mapping[HeadShape, Context]:
        """Return buffers for the first `num_keys` keys and values of block tables [B, blocks], read layer by layer."""
        return {shape: self._context(shape, tables, num_keys) for shape in self.pools}

    def _context(self, shape: HeadShape, tables: Tensor, num_keys: int) -> Context:
        rows = self._head_rows(shape, tables)
        size = rows.numel() * self.block_size * shape.head_size
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size + size // 4, dtype=self.dtype, device=self.device)
        out = self._workspace[:size].view(-1, self.block_size * shape.head_size)
        whole = out.view(2, len(tables), shape.num_kv_heads, -1, shape.head_size)
        return Context(self._heads, rows, out, whole[0, :, :, :num_keys], whole[1, :, :, :num_keys])

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer. No block is both source and destination."""
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self.device)
        destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def purge(self, blocks: Sequence[int]) -> None:
        """Set values that are not finite to 0, so that the next request that gets the block cannot read them."""
        whole = torch.tensor(sorted(set(blocks)), device=self.device)
        for layer in self.layers:
            for index in whole.split(PURGED):  # type: ignore[no-untyped-call]
                clean = layer.index_select(0, index).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                layer.index_copy_(0, index, clean)

    def slot_rows(self, blocks: Tensor, offsets: Tensor) -> Mapping[HeadShape, Tensor]:
        """Return rows [T * 2K] of the layers of each shape viewed as [.., D], for `offsets` [T] of `blocks` [T]."""
        rows = {}
        for shape in self.pools:
            heads = torch.arange(2 * shape.num_kv_heads, device=self.device)
            at = (blocks[:, None] * (2 * shape.num_kv_heads) + heads) * self.block_size + offsets[:, None]
            rows[shape] = at.flatten()
        return rows

    def _head_rows(self, shape: HeadShape, tables: Tensor) -> Tensor:
        """Return rows of a layer viewed as [.., block size * D], in the order [2, B, K, blocks]."""
        num_kv_heads = shape.num_kv_heads
        heads = torch.arange(2 * num_kv_heads, device=self.device).view(2, 1, num_kv_heads, 1)
        return (tables[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()
