"""Where keys and values live: one tensor a layer, cut into blocks.

A block of a layer is [2, K, block size, D]: keys, then values, of all KV heads. So storing a batch, gathering a context
and copying a block are one operation each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.step import BlockCopy
from quire.errors import InvalidRequest
from quire.weights.spec import ModelSpec

# K kv heads, D head size


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """What one block costs over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * block_size * dtype.itemsize


def blocks_in(budget_bytes: int, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks a memory budget holds, the null block included."""
    num_blocks = budget_bytes // block_bytes(spec, block_size, dtype)
    if num_blocks < 2:
        needed = 2 * block_bytes(spec, block_size, dtype)
        raise InvalidRequest(
            f"kv_bytes = {budget_bytes:,} is less than the {needed:,} that two blocks of {block_size} tokens take"
        )
    return num_blocks


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
        # Zeros, not empty: what a mask hides is multiplied by 0, and 0 times the NaN of stale memory is NaN.
        # On a CPU the pages are only taken when something is written.
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_size)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self._slots = [layer.view(-1, spec.head_size) for layer in self.layers]
        self._heads = [layer.view(-1, block_size * spec.head_size) for layer in self.layers]
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def store(self, layer: int, kv: Tensor, rows: Tensor) -> None:
        """Write keys and values kv [T, 2K, D]. `rows` [T * 2K]: see `slot_rows`."""
        self._slots[layer].index_copy_(0, rows, kv.reshape(-1, self.head_size))

    def gather(self, layer: int, rows: Tensor, num_seqs: int) -> Tensor:
        """Contexts as [2, B, K, L, D]. `rows`: see `head_rows`. The result lives until the next gather."""
        size = rows.numel() * self.block_size * self.head_size
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size + size // 4, dtype=self.dtype, device=self.device)
        out = self._workspace[:size].view(-1, self.block_size * self.head_size)
        torch.index_select(self._heads[layer], 0, rows, out=out)
        return out.view(2, num_seqs, self.num_kv_heads, -1, self.head_size)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in every layer. No block is both source and destination."""
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self.device)
        destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def purge(self, blocks: Sequence[int]) -> None:
        """Replace what is not a finite number: such a value would reach whoever takes the block next."""
        index = torch.tensor(sorted(set(blocks)), device=self.device)
        for layer in self.layers:
            clean = layer.index_select(0, index).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            layer.index_copy_(0, index, clean)

    def slot_rows(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """For tokens at `offsets` [T] of `blocks` [T]: rows of the store seen as [.., D], in the order of `store`."""
        heads = torch.arange(2 * self.num_kv_heads, device=self.device)
        return ((blocks[:, None] * (2 * self.num_kv_heads) + heads) * self.block_size + offsets[:, None]).flatten()

    def head_rows(self, tables: Tensor) -> Tensor:
        """For block tables [B, blocks]: rows of the store seen as [.., block size * D], in the order of `gather`."""
        num_kv_heads = self.num_kv_heads
        heads = torch.arange(2 * num_kv_heads, device=self.device).view(2, 1, num_kv_heads, 1)
        return (tables[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()
