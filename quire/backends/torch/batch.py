"""A step plan as tensors: built once per step, read by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.kv_store import Context, KVStore, LayerShape, Slots
from quire.backends.torch.state_store import Segment, find_segments
from quire.core.step import SeqSlice

MAX_QUERIES = 512  # query rows of one attention call, which bounds the size of its mask
MIN_BUCKET = 3  # contexts of up to 2 ** MIN_BUCKET blocks are attended together, longer ones by powers of two


class MaskKey(NamedTuple):
    """What a mask depends on beside the queries."""

    pool_window: int  # of a layer that uses window blocks, 0 of one that keeps its whole context
    window: int  # of the layer's attention


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences attended in one call: many with one query each, or one with many queries."""

    first: int  # rows of the batch: [first, last)
    last: int
    num_seqs: int
    num_queries: int  # per sequence
    contexts: Mapping[LayerShape, Context]  # keys and values, padded to the longest sequence
    masks: Mapping[MaskKey, Tensor | None]  # added to the scores; None: no key is masked
    is_causal: bool  # the queries are the whole context, so the kernel's causal mask is enough


@dataclass(frozen=True, slots=True)
class Batch:
    slices: tuple[SeqSlice, ...]  # in the order of their rows
    order: tuple[int, ...]  # index of each in the plan
    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slot_rows: Slots
    groups: tuple[AttentionGroup, ...]
    last_rows: tuple[int, ...]  # row of the last token of each slice
    segments: tuple[Segment, ...] = ()  # in the order of their rows; empty: the model has no states


def build_batch(slices: Sequence[SeqSlice], store: KVStore, windows: Sequence[int], last_samples: Tensor) -> Batch:
    """Build a batch: decodes grouped by context length, then the prompts. Indexes `last_samples` by batch index.

    `windows`: of all layers of the model.
    """
    order = sorted(range(len(slices)), key=lambda index: _bucket(slices[index], store.block_size))
    ordered = tuple(slices[index] for index in order)
    num_decodes = sum(piece.length == 1 for piece in ordered)
    builder = _Builder(
        store, tuple(dict.fromkeys(windows[index] for index, shape in store.shapes.items() if not shape.window))
    )
    first = 0
    while first < num_decodes:
        bucket = _bucket(ordered[first], store.block_size)
        last = first + 1
        while last < num_decodes and _bucket(ordered[last], store.block_size) == bucket:
            last += 1
        builder.add_decodes(ordered[first:last])
        first = last
    for piece in ordered[num_decodes:]:
        builder.add_prompt(piece)
    return builder.build(ordered, tuple(order), last_samples)


def _bucket(piece: SeqSlice, block_size: int) -> int:
    """Sort key: decodes before prompts, and decodes by the power of two that holds their context."""
    if piece.length > 1:
        return 1000
    return max((piece.start // block_size).bit_length(), MIN_BUCKET)


class _Builder:
    def __init__(self, store: KVStore, windows: tuple[int, ...]) -> None:
        self._store = store
        self._windows = windows
        self._device = store.device
        self._num_rows = 0
        self._positions: list[Tensor] = []
        self._blocks: list[Tensor] = []  # block of each token
        self._window_blocks: list[Tensor] = []  # the same, of the layers that use window blocks
        self._groups: list[AttentionGroup] = []

    def add_decodes(self, pieces: Sequence[SeqSlice]) -> None:
        starts = [piece.start for piece in pieces]
        positions = torch.tensor(starts, device=self._device)
        self._positions.append(positions)
        tables = self._tables([piece.block_table for piece in pieces], [0] * len(pieces), starts)
        self._blocks.append(self._blocks_at(tables, positions))
        num_keys = max(starts) + 1
        is_even = min(starts) == max(starts)
        contexts = dict(self._store.contexts(tables, num_keys))
        masks: dict[MaskKey, Tensor | None] = {}
        for window in self._windows:
            is_plain = is_even and (not window or num_keys <= window)
            mask = None if is_plain else self._mask(positions[:, None], self._keys(0, num_keys), window)[:, None, None]
            masks[MaskKey(0, window)] = mask  # [B, 1, 1, L]
        if self._store.windows:
            self._add_windows(pieces, positions, contexts, masks)
        self._add_group(len(pieces), 1, contexts, masks, is_causal=False)

    def _add_windows(
        self,
        pieces: Sequence[SeqSlice],
        positions: Tensor,
        contexts: dict[LayerShape, Context],
        masks: dict[MaskKey, Tensor | None],
    ) -> None:
        """Add the contexts and masks of layers that use window blocks.

        The keys of a row begin at its first block within the window.
        """
        size = self._store.block_size
        starts = [piece.start for piece in pieces]
        window_tables = [piece.window_table for piece in pieces]
        blocks = [table[start // size] for table, start in zip(window_tables, starts, strict=True)]
        self._window_blocks.append(torch.tensor(blocks, device=self._device))
        for window in self._store.windows:
            firsts = [self._first_block(start, window) for start in starts]
            num_keys = max(start + 1 - first * size for start, first in zip(starts, firsts, strict=True))
            tables = self._tables(window_tables, firsts, starts)
            contexts |= self._store.contexts(tables, num_keys, window)
            mask = None
            if min(starts) < max(starts) or firsts[0] * size <= starts[0] - window:
                keys = torch.tensor(firsts, device=self._device)[:, None] * size + self._keys(0, num_keys)
                mask = self._mask(positions[:, None], keys, window)[:, None, None]
            masks[MaskKey(window, window)] = mask

    def add_prompt(self, piece: SeqSlice) -> None:
        """Add a prompt in parts of at most MAX_QUERIES. All its keys are stored before any part is attended."""
        size = self._store.block_size
        end = piece.start + piece.length
        num_blocks = -(-end // size)
        table = torch.tensor(piece.block_table[:num_blocks], device=self._device)
        positions = torch.arange(piece.start, end, device=self._device)
        self._positions.append(positions)
        self._blocks.append(table[positions // size])
        window_table = table
        if self._store.windows:
            window_table = torch.tensor(piece.window_table[:num_blocks], device=self._device)
            self._window_blocks.append(window_table[positions // size])
        for start in range(piece.start, end, MAX_QUERIES):
            stop = min(start + MAX_QUERIES, end)
            queries = positions[start - piece.start : stop - piece.start, None]
            masks: dict[MaskKey, Tensor | None] = {}
            contexts = dict(self._store.contexts(table[None, : -(-stop // size)], stop))
            for window in self._windows:
                is_plain = start == 0 and (not window or stop <= window)
                mask = None if is_plain else self._mask(queries, self._keys(0, stop), window)[None, None]
                masks[MaskKey(0, window)] = mask  # [1, 1, Q, L]
            for window in self._store.windows:
                first = self._first_block(start, window)
                num_keys = stop - first * size
                contexts |= self._store.contexts(window_table[None, first : -(-stop // size)], num_keys, window)
                is_plain = start == 0 and stop <= window
                mask = None if is_plain else self._mask(queries, self._keys(first * size, num_keys), window)[None, None]
                masks[MaskKey(window, window)] = mask
            self._add_group(1, stop - start, contexts, masks, is_causal=start == 0)

    def build(self, ordered: tuple[SeqSlice, ...], order: tuple[int, ...], last_samples: Tensor) -> Batch:
        positions = _join(self._positions)
        offsets = positions % self._store.block_size
        last_rows, row = [], -1
        for piece in ordered:
            row += piece.length
            last_rows.append(row)
        window_blocks = _join(self._window_blocks) if self._window_blocks else None
        return Batch(
            slices=ordered,
            order=order,
            tokens=self._tokens(ordered, last_rows, last_samples),
            positions=positions,
            slot_rows=self._store.slots(_join(self._blocks), window_blocks, offsets, self._kept(ordered)),
            groups=tuple(self._groups),
            last_rows=tuple(last_rows),
            segments=find_segments(ordered) if self._store.has_states else (),
        )

    def _kept(self, ordered: Sequence[SeqSlice]) -> Tensor | None:
        """Return the rows that are stored in layers with whole contexts, or None for all rows."""
        if all(piece.kv_start <= piece.start for piece in ordered):
            return None
        kept: list[int] = []
        row = 0
        for piece in ordered:
            num_shared = min(max(piece.kv_start - piece.start, 0), piece.length)
            kept += range(row + num_shared, row + piece.length)
            row += piece.length
        return torch.tensor(kept, dtype=torch.int64, device=self._device)

    def _first_block(self, position: int, window: int) -> int:
        """Return the first block that a query at this position reads."""
        return max(position + 1 - window, 0) // self._store.block_size

    def _tables(self, tables: Sequence[Sequence[int]], firsts: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return [B, blocks]: of each table the blocks from `firsts` to the one of its position, then null blocks."""
        ends = [position // self._store.block_size + 1 for position in positions]
        width = max(end - first for first, end in zip(firsts, ends, strict=True))
        padded: list[int] = []
        for table, first, end in zip(tables, firsts, ends, strict=True):
            padded += table[first:end]
            padded += [0] * (width - end + first)  # the null block: its content is masked
        return torch.tensor(padded, device=self._device).view(len(tables), width)

    def _blocks_at(self, tables: Tensor, places: Tensor) -> Tensor:
        return tables.gather(1, (places // self._store.block_size)[:, None])[:, 0]

    def _tokens(self, ordered: Sequence[SeqSlice], last_rows: Sequence[int], last_samples: Tensor) -> Tensor:
        known: list[int] = []
        for piece in ordered:
            known += piece.tokens or (0,)
        tokens = torch.tensor(known, device=self._device)
        unknown = [(row, piece.batch_index) for row, piece in zip(last_rows, ordered, strict=True) if not piece.tokens]
        if unknown:
            rows, batch_indices = torch.tensor(unknown, device=self._device).unbind(1)
            tokens[rows] = last_samples[batch_indices]
        return tokens

    def _keys(self, first: int, num_keys: int) -> Tensor:
        return torch.arange(first, first + num_keys, device=self._device)

    def _mask(self, queries: Tensor, keys: Tensor, window: int) -> Tensor:
        """Return the additive mask of queries at positions [N, 1]: -inf for later keys and beyond the window."""
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._store.dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _add_group(
        self,
        num_seqs: int,
        num_queries: int,
        contexts: Mapping[LayerShape, Context],
        masks: Mapping[MaskKey, Tensor | None],
        *,
        is_causal: bool,
    ) -> None:
        first = self._num_rows
        self._num_rows += num_seqs * num_queries
        self._groups.append(AttentionGroup(first, self._num_rows, num_seqs, num_queries, contexts, masks, is_causal))


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
