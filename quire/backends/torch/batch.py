"""A step plan as tensors: built once per step, read by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.backends.torch.kv_store import Context, HeadShape, KVStore
from quire.backends.torch.state_store import Segment, find_segments
from quire.core.step import SeqSlice

MAX_QUERIES = 512  # query rows of one attention call, which bounds the size of its mask
MIN_BUCKET = 3  # contexts of up to 2 ** MIN_BUCKET blocks are attended together, longer ones by powers of two


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences attended in one call: many with one query each, or one with many queries."""

    first: int  # rows of the batch: [first, last)
    last: int
    num_seqs: int
    num_queries: int  # per sequence
    contexts: Mapping[HeadShape, Context]  # keys and values, padded to the longest sequence
    masks: Mapping[int, Tensor | None]  # by window: added to the scores; None: no key is masked
    is_causal: bool  # the queries are the whole context, so the kernel's causal mask is enough


@dataclass(frozen=True, slots=True)
class Batch:
    slices: tuple[SeqSlice, ...]  # in the order of their rows
    order: tuple[int, ...]  # index of each in the plan
    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slot_rows: Mapping[HeadShape, Tensor]  # see KVStore.slot_rows
    groups: tuple[AttentionGroup, ...]
    last_rows: tuple[int, ...]  # row of the last token of each slice
    segments: tuple[Segment, ...]  # the rows of each slice between states that are stored


def build_batch(slices: Sequence[SeqSlice], store: KVStore, windows: Sequence[int], last_samples: Tensor) -> Batch:
    """Build a batch: decodes grouped by context length, then the prompts. Indexes `last_samples` by batch index."""
    order = sorted(range(len(slices)), key=lambda index: _bucket(slices[index], store.block_size))
    ordered = tuple(slices[index] for index in order)
    num_decodes = sum(piece.length == 1 for piece in ordered)
    builder = _Builder(store, tuple(dict.fromkeys(windows)))
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
        self._groups: list[AttentionGroup] = []

    def add_decodes(self, pieces: Sequence[SeqSlice]) -> None:
        size = self._store.block_size
        starts = [piece.start for piece in pieces]
        width = max(starts) // size + 1
        padded: list[int] = []
        for piece, start in zip(pieces, starts, strict=True):
            num_blocks = start // size + 1
            padded += piece.block_table[:num_blocks]
            padded += [0] * (width - num_blocks)  # the null block: its content is masked
        tables = torch.tensor(padded, device=self._device).view(len(pieces), width)
        positions = torch.tensor(starts, device=self._device)
        self._positions.append(positions)
        self._blocks.append(tables.gather(1, (positions // size)[:, None])[:, 0])
        num_keys = max(starts) + 1
        is_even = min(starts) == max(starts)
        masks: dict[int, Tensor | None] = {}
        for window in self._windows:
            if is_even and (not window or num_keys <= window):
                masks[window] = None
            else:
                masks[window] = self._mask(positions[:, None], num_keys, window)[:, None, None]  # [B, 1, 1, L]
        self._add_group(len(pieces), 1, num_keys, tables, masks, is_causal=False)

    def add_prompt(self, piece: SeqSlice) -> None:
        """Add a prompt in parts of at most MAX_QUERIES. All its keys are stored before any part is attended."""
        size = self._store.block_size
        end = piece.start + piece.length
        table = torch.tensor(piece.block_table[: -(-end // size)], device=self._device)
        positions = torch.arange(piece.start, end, device=self._device)
        self._positions.append(positions)
        self._blocks.append(table[positions // size])
        for start in range(piece.start, end, MAX_QUERIES):
            stop = min(start + MAX_QUERIES, end)
            masks: dict[int, Tensor | None] = {}
            for window in self._windows:
                is_plain = start == 0 and (not window or stop <= window)
                queries = positions[start - piece.start : stop - piece.start, None]
                masks[window] = None if is_plain else self._mask(queries, stop, window)[None, None]  # [1, 1, Q, L]
            tables = table[None, : -(-stop // size)]
            self._add_group(1, stop - start, stop, tables, masks, is_causal=start == 0)

    def build(self, ordered: tuple[SeqSlice, ...], order: tuple[int, ...], last_samples: Tensor) -> Batch:
        positions = _join(self._positions)
        offsets = positions % self._store.block_size
        last_rows, row = [], -1
        for piece in ordered:
            row += piece.length
            last_rows.append(row)
        return Batch(
            slices=ordered,
            order=order,
            tokens=self._tokens(ordered, last_rows, last_samples),
            positions=positions,
            slot_rows=self._store.slot_rows(_join(self._blocks), offsets),
            groups=tuple(self._groups),
            last_rows=tuple(last_rows),
            segments=find_segments(ordered),
        )

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

    def _mask(self, queries: Tensor, num_keys: int, window: int) -> Tensor:
        """Return the additive mask of queries at these positions [N, 1]: -inf for later keys and beyond the window."""
        keys = torch.arange(num_keys, device=self._device)
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._store.dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _add_group(
        self,
        num_seqs: int,
        num_queries: int,
        num_keys: int,
        tables: Tensor,
        masks: Mapping[int, Tensor | None],
        *,
        is_causal: bool,
    ) -> None:
        first = self._num_rows
        self._num_rows += num_seqs * num_queries
        contexts = self._store.contexts(tables, num_keys)
        self._groups.append(AttentionGroup(first, self._num_rows, num_seqs, num_queries, contexts, masks, is_causal))


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
