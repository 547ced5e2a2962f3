"""The pools of a model's memory: layers, each divided into blocks, and recurrent states.

A block of a layer is [2, K, block size, D]: keys, then values, of all KV heads. Storing a batch, gathering a context
and copying a block are therefore one operation each. Layers of the same shape lie in one tensor.

In FP8, a block holds codes, and a second pool of the same shape without D holds the scale of each key and value
(`quire.backends.torch.kv_store`).

There are two pools of blocks. Layers that keep their whole context use the blocks of `SeqSlice.block_table`. Layers
with a window use those of `SeqSlice.window_table`, if the store has window blocks; without them, all layers keep their
whole context.

The state of a recurrent layer after some token is the last inputs of its causal convolution, and for a delta net also
one matrix per head. A slot holds one state in all layers that have one. Slot 0 is the empty state: it is read at the
start of a context and never written.

Keys and values in FP8: the key or value of one token and head is stored as e4m3 codes with one scale, in bf16. The
scale maps the largest number to the largest code, so the number that matters most is nearly exact. The kernels do the
same (`kernels/fp8_kv.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.core.step import BlockCopy, SeqSlice

# D head size

LARGEST = 448.0  # of the codes
TINY = 2.0**-90  # vectors of smaller numbers are stored as 0


def encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., D] in uint8 and scales [..] in bf16; codes 0 and scale NaN for vectors that are not finite."""
    vectors = vectors.float()
    peaks = vectors.abs().amax(-1)
    is_stored = (peaks >= TINY) & peaks.isfinite()
    scales = (peaks * (1 / LARGEST)).bfloat16()
    inverse = torch.where(is_stored, 1 / scales.float(), 0.0)
    codes = (vectors * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(~is_stored[..., None], 0)
    return codes, scales.masked_fill_(peaks < TINY, 0.0).masked_fill_(~peaks.isfinite(), float("nan"))


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the vectors of codes [.., D] and scales [..] into `out` [.., D]."""
    torch.mul(codes.view(torch.float8_e4m3fn).float(), scales.float()[..., None], out=out)


# K kv heads, D head size

PURGED = 64  # blocks per operation: a long context has thousands


class LayerShape(NamedTuple):
    """Shape of the keys, and of the values, of one token in a layer, and the pool of its blocks."""

    num_kv_heads: int
    head_size: int
    window: int = 0  # of a layer that uses window blocks; 0: the layer keeps its whole context


class Slots(NamedTuple):
    """Where the keys and values of a batch are stored."""

    rows: Mapping[LayerShape, Tensor]  # [tokens * 2K]: rows of the layers of each shape viewed as [.., D]
    # The tokens that are stored in layers with whole contexts: others have keys there already. None: all.
    kept: Tensor | None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros, because masked values are multiplied by 0, and 0 times NaN in stale memory would be NaN.

    On a CPU the operating system zeroes pages when they are first written, so a pool of gigabytes takes no memory until
    it is used. `torch.zeros` would write them all.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Context:
    """Keys and values of one attention group in layers of one shape, gathered from their blocks.

    All groups share one buffer, which every `read` overwrites.
    """

    heads: Mapping[int, Tensor]  # by layer: the store viewed as [.., block size * D]
    rows: Tensor
    out: Tensor  # [rows, block size * D]
    keys: Tensor  # [B, K, L, D]
    values: Tensor  # [B, K, L, D]
    scales: Mapping[int, Tensor]  # in FP8, by layer: the scales viewed as [.., block size]

    def read(self, layer: int) -> None:
        if not self.scales:
            torch.index_select(self.heads[layer], 0, self.rows, out=self.out)
            return
        scales = self.scales[layer].index_select(0, self.rows)  # [rows, block size]
        codes = self.heads[layer].index_select(0, self.rows).view(*scales.shape, -1)
        decode(codes, scales, self.out.view(codes.shape))


class MemoryFacts(TypedDict):
    """Fields of `RunnerFacts`."""

    kv_bytes: int
    window_bytes: int
    state_bytes: int


class KVStore:
    def __init__(
        self,
        kv_spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_window_blocks: int = 0,
        num_states: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks if kv_spec.window else 0
        self.has_states = kv_spec.has_states  # some layers have a recurrent state instead of keys and values
        self.block_size = block_size
        self.dtype = dtype  # of keys and values when they are read
        self.is_fp8 = kv_spec.is_fp8
        self.device = device
        # By index of the layer. Layers without attention are absent.
        self.shapes = {
            index: self._shape(layer) for index, layer in enumerate(kv_spec.layers) if isinstance(layer, LayerKV)
        }
        self.windows = tuple(dict.fromkeys(shape.window for shape in self.shapes.values() if shape.window))
        sharers = {
            index: layer.shared_with
            for index, layer in enumerate(kv_spec.layers)
            if isinstance(layer, LayerKV) and layer.shared_with is not None
        }
        self.shapes |= {index: self.shapes[owner] for index, owner in sharers.items()}
        owners = {index: shape for index, shape in self.shapes.items() if index not in sharers}
        stored = torch.uint8 if self.is_fp8 else dtype
        self.pools: Mapping[LayerShape, Tensor] = {  # [layers of the shape, blocks, 2, K, block size, D]
            shape: zeros(self._pool_shape(shape, list(owners.values()).count(shape)), stored, device)
            for shape in dict.fromkeys(owners.values())
        }
        self.scale_pools: Mapping[LayerShape, Tensor] = {  # [layers of the shape, blocks, 2, K, block size]
            shape: zeros(tuple(pool.shape[:-1]), torch.bfloat16, device)
            for shape, pool in self.pools.items()
            if self.is_fp8
        }
        self.layers = _divide_pools(self.pools, owners, sharers)
        self.scales = _divide_pools(self.scale_pools, owners, sharers)  # empty unless in FP8
        self._slots = {index: layer.view(-1, layer.shape[-1]) for index, layer in self.layers.items()}
        self._heads = {index: layer.view(-1, block_size * layer.shape[-1]) for index, layer in self.layers.items()}
        self._scale_heads = {index: scales.view(-1, block_size) for index, scales in self.scales.items()}
        self._workspace = torch.empty(0, dtype=dtype, device=device)
        self.num_states = num_states if kv_spec.has_states else 0
        recurrent = {index: layer for index, layer in enumerate(kv_spec.layers) if isinstance(layer, LayerState)}
        self.conv: dict[int, Tensor] = {  # by index of the layer: [slots, rows, channels], the oldest row first
            index: zeros((num_states, layer.num_rows, layer.num_channels), dtype, device)
            for index, layer in recurrent.items()
        }
        self.matrices: dict[int, Tensor] = {  # [slots, heads, key size, value size]; absent if the layer has none
            index: zeros((num_states, layer.num_heads, layer.key_size, layer.value_size), torch.float32, device)
            for index, layer in recurrent.items()
            if layer.num_heads
        }

    def _shape(self, layer: LayerKV) -> LayerShape:
        return LayerShape(layer.num_kv_heads, layer.head_size, layer.window if self.num_window_blocks else 0)

    def _pool_shape(self, shape: LayerShape, num_layers: int) -> tuple[int, ...]:
        num_blocks = self.num_window_blocks if shape.window else self.num_blocks
        return num_layers, num_blocks, 2, shape.num_kv_heads, self.block_size, shape.head_size

    def all_pools(self) -> list[tuple[LayerShape, Tensor]]:
        """Return the pools [layers, blocks, ..] of everything that blocks hold, each with the shape of its layers."""
        return [*self.pools.items(), *self.scale_pools.items()]

    @property
    def kv_dtype(self) -> str:
        """The type in which keys and values are stored."""
        return "fp8" if self.is_fp8 else str(self.dtype).removeprefix("torch.")

    def facts(self) -> MemoryFacts:
        state_bytes = sum(pool.nbytes for pool in self.state_pools())
        return {
            "kv_bytes": sum(pool.nbytes for _, pool in self.all_pools()) + state_bytes,
            "window_bytes": sum(pool.nbytes for shape, pool in self.all_pools() if shape.window),
            "state_bytes": state_bytes,
        }

    def store(self, layer: int, kv: Tensor, slots: Slots) -> None:
        """Write keys and values kv [T, 2K, D]."""
        shape = self.shapes[layer]
        if slots.kept is not None and not shape.window:
            kv = kv[slots.kept]
        vectors, rows = kv.reshape(-1, shape.head_size), slots.rows[shape]
        if self.is_fp8:
            vectors, scales = encode(vectors)
            self.scales[layer].view(-1).index_copy_(0, rows, scales)
        self._slots[layer].index_copy_(0, rows, vectors)

    def contexts(self, tables: Tensor, num_keys: int, window: int = 0) -> Mapping[LayerShape, Context]:
        """Return buffers for the first `num_keys` keys and values of block tables [B, blocks], read layer by layer.

        `window`: of the layers that are read through these tables; 0: the layers with whole contexts.
        """
        return {shape: self._context(shape, tables, num_keys) for shape in self.pools if shape.window == window}

    def _context(self, shape: LayerShape, tables: Tensor, num_keys: int) -> Context:
        rows = self._head_rows(shape, tables)
        size = rows.numel() * self.block_size * shape.head_size
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size + size // 4, dtype=self.dtype, device=self.device)
        out = self._workspace[:size].view(-1, self.block_size * shape.head_size)
        whole = out.view(2, len(tables), shape.num_kv_heads, -1, shape.head_size)
        keys, values = whole[0, :, :, :num_keys], whole[1, :, :, :num_keys]
        return Context(self._heads, rows, out, keys, values, self._scale_heads)

    def copy(self, copies: Sequence[BlockCopy], *, is_window: bool = False) -> None:
        """Copy whole blocks in every layer of a pool. No block is both source and destination."""
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self.device)
        destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
        for layer in self.layers_of(is_window=is_window):
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def purge(self, piece: SeqSlice) -> None:
        """Set values that a slice wrote and that are not finite to 0, so that no other request reads them.

        Blocks behind its window are left as they are: other requests may use these already.
        """
        pools = self.scale_pools if self.is_fp8 else self.pools  # codes are always finite
        for shape, pool in pools.items():
            for layer in pool:
                _purge(layer, piece.window_table if shape.window else piece.block_table)
        for pool in self.state_pools():
            _purge(pool, [slot for slot in (*(one.slot for one in piece.snapshots), piece.state_target) if slot])

    def state_pools(self) -> list[Tensor]:
        """Return the pools [slots, ...] of recurrent states, layer by layer."""
        found = [(self.conv[index], self.matrices.get(index)) for index in self.conv]
        return [pool for pools in found for pool in pools if pool is not None]

    def layers_of(self, *, is_window: bool) -> list[Tensor]:
        """Return the tensors [blocks, ..] of all layers that store something in one kind of blocks."""
        pools = [pool for shape, pool in self.all_pools() if bool(shape.window) == is_window]
        return [layer for pool in pools for layer in pool]

    def slots(self, blocks: Tensor, window_blocks: Tensor | None, offsets: Tensor, kept: Tensor | None = None) -> Slots:
        """Return the slots at `offsets` [T] of `blocks` [T], and of `window_blocks` [T] in the layers with a window."""
        rows = {}
        for shape in self.pools:
            if shape.window:
                assert window_blocks is not None
                rows[shape] = self._slot_rows(shape, window_blocks, offsets)
            elif kept is not None:
                rows[shape] = self._slot_rows(shape, blocks[kept], offsets[kept])
            else:
                rows[shape] = self._slot_rows(shape, blocks, offsets)
        return Slots(rows, kept)

    def _slot_rows(self, shape: LayerShape, blocks: Tensor, offsets: Tensor) -> Tensor:
        heads = torch.arange(2 * shape.num_kv_heads, device=self.device)
        at = (blocks[:, None] * (2 * shape.num_kv_heads) + heads) * self.block_size + offsets[:, None]
        return at.flatten()

    def _head_rows(self, shape: LayerShape, tables: Tensor) -> Tensor:
        """Return rows of a layer viewed as [.., block size * D], in the order [2, B, K, blocks]."""
        num_kv_heads = shape.num_kv_heads
        heads = torch.arange(2 * num_kv_heads, device=self.device).view(2, 1, num_kv_heads, 1)
        return (tables[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()


def _divide_pools(
    pools: Mapping[LayerShape, Tensor], owners: Mapping[int, LayerShape], sharers: Mapping[int, int]
) -> dict[int, Tensor]:
    """Return the part of each layer. Layers of one shape lie in the order of the model; `sharers` have another's."""
    unused = {shape: iter(pool) for shape, pool in pools.items()}
    layers = {index: next(unused[shape]) for index, shape in owners.items() if shape in unused}
    return layers | {index: layers[owner] for index, owner in sharers.items() if owner in layers}


def _purge(pool: Tensor, rows: Sequence[int]) -> None:
    whole = torch.tensor(sorted(set(rows)), dtype=torch.int64, device=pool.device)
    for index in whole.split(PURGED):  # type: ignore[no-untyped-call]
        clean = pool.index_select(0, index).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        pool.index_copy_(0, index, clean)
