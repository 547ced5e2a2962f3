"""The KV pool: one tensor, divided into layers, each divided into blocks.

A block of a layer is [2, K, block size, D]: keys, then values, of all KV heads. Storing a batch, gathering a context
and copying a block are therefore one operation each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import BlockCopy
from quire.weights.spec import ModelSpec

# K kv heads, D head size

PURGED = 64  # blocks per operation: a long context has thousands


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * block_size * dtype.itemsize


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
    """Keys and values of one attention group, gathered from their blocks.

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
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = spec.num_kv_heads
        self.head_size = spec.head_size
        self.dtype = dtype
        self.device = device
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_size)
        self.pool = _zeros(shape, dtype, device)
        self.layers = list(self.pool)
        self._slots = [layer.view(-1, spec.head_size) for layer in self.layers]
        self._heads = [layer.view(-1, block_size * spec.head_size) for layer in self.layers]
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def store(self, layer: int, kv: Tensor, rows: Tensor) -> None:
        """Write keys and values kv [T, 2K, D]. `rows` [T * 2K]: see `slot_rows`."""
        self._slots[layer].index_copy_(0, rows, kv.reshape(-1, self.head_size))

    def context(self, tables: Tensor, num_keys: int) -> Context:
        """Return a buffer for the first `num_keys` keys and values of block tables [B, blocks], read layer by layer."""
        rows = self._head_rows(tables)
        size = rows.numel() * self.block_size * self.head_size
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size + size // 4, dtype=self.dtype, device=self.device)
        out = self._workspace[:size].view(-1, self.block_size * self.head_size)
        whole = out.view(2, len(tables), self.num_kv_heads, -1, self.head_size)
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

    def slot_rows(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return rows of the store viewed as [.., D], in the order of `store`, for `offsets` [T] of `blocks` [T]."""
        heads = torch.arange(2 * self.num_kv_heads, device=self.device)
        return ((blocks[:, None] * (2 * self.num_kv_heads) + heads) * self.block_size + offsets[:, None]).flatten()

    def _head_rows(self, tables: Tensor) -> Tensor:
        """Return rows of the store viewed as [.., block size * D], in the order [2, B, K, blocks]."""
        num_kv_heads = self.num_kv_heads
        heads = torch.arange(2 * num_kv_heads, device=self.device).view(2, 1, num_kv_heads, 1)
        return (tables[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()
