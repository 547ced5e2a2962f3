"""A step plan as tensors: built once per step, read by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.kv_store import Context, KVStore, LayerShape, Slots
from quire.backends.torch.state_work import Segment, find_segments
from quire.core.step import SeqSlice

MAX_QUERIES = 512  # query rows of one attention call, which bounds the size of its mask
PROMPTS = 1000  # after all buckets of decodes
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
    full = dict.fromkeys(windows[index] for index, shape in store.shapes.items() if not shape.window)
    builder = _Builder(store, {0: tuple(full), **{window: (window,) for window in store.windows}})
    for bucket, pieces in itertools.groupby(ordered, lambda piece: _bucket(piece, store.block_size)):
        if bucket < PROMPTS:
            builder.add([_Part(piece, piece.start, piece.start + 1) for piece in pieces])
            continue
        for piece in pieces:  # in parts of at most MAX_QUERIES: all keys are stored before any part is attended
            end = piece.start + piece.length
            for start in range(piece.start, end, MAX_QUERIES):
                builder.add([_Part(piece, start, min(start + MAX_QUERIES, end))])
    device = store.device
    last_rows = tuple(end - 1 for end in itertools.accumulate(piece.length for piece in ordered))
    positions = torch.tensor([position for piece in ordered for position in _positions(piece)], device=device)
    window_blocks = _blocks(ordered, store, is_window=True) if store.windows else None
    return Batch(
        slices=ordered,
        order=tuple(order),
        tokens=_tokens(ordered, last_rows, last_samples),
        positions=positions,
        slot_rows=store.slots(
            _blocks(ordered, store, is_window=False),
            window_blocks,
            positions % store.block_size,
            _kept(ordered, device),
        ),
        groups=tuple(builder.groups),
        last_rows=last_rows,
        segments=find_segments(ordered) if store.has_states else (),
    )


def _bucket(piece: SeqSlice, block_size: int) -> int:
    """Sort key: decodes before prompts, and decodes by the power of two that holds their context."""
    if piece.length > 1:
        return PROMPTS
    return max((piece.start // block_size).bit_length(), MIN_BUCKET)


class _Part(NamedTuple):
    """Queries at positions [start, stop) of a slice."""

    piece: SeqSlice
    start: int
    stop: int


class _Builder:
    """`windows`: by the window of a pool, those of the attention in its layers. 0: layers that keep whole contexts."""

    def __init__(self, store: KVStore, windows: Mapping[int, Sequence[int]]) -> None:
        self._store = store
        self._windows = windows
        self.groups: list[AttentionGroup] = []

    def add(self, parts: Sequence[_Part]) -> None:
        """Add a group of parts with as many queries each. Keys of a pool begin at the first block in its window."""
        store, size = self._store, self._store.block_size
        starts = [part.start for part in parts]
        num_queries = parts[0].stop - parts[0].start
        is_causal = num_queries > 1 and starts[0] == 0
        is_even = is_causal or (num_queries == 1 and min(starts) == max(starts))
        contexts: dict[LayerShape, Context] = {}
        masks: dict[MaskKey, Tensor | None] = {}
        for pool, windows in self._windows.items():
            firsts = [max(start + 1 - pool, 0) // size if pool else 0 for start in starts]
            num_keys = max(part.stop - first * size for part, first in zip(parts, firsts, strict=True))
            contexts |= store.contexts(self._tables(parts, firsts, is_window=pool > 0), num_keys, pool)
            for window in windows:
                is_plain = is_even and (not window or num_keys <= window)
                mask = None if is_plain else self._mask(starts, num_queries, firsts, num_keys, window)
                masks[MaskKey(pool, window)] = mask
        first = self.groups[-1].last if self.groups else 0
        last = first + len(parts) * num_queries
        self.groups.append(AttentionGroup(first, last, len(parts), num_queries, contexts, masks, is_causal))

    def _tables(self, parts: Sequence[_Part], firsts: Sequence[int], *, is_window: bool) -> Tensor:
        """Return [B, blocks]: of each table the blocks from `firsts` to the last one of its part, then null blocks."""
        size, tables = self._store.block_size, list[list[int]]()
        for part, first in zip(parts, firsts, strict=True):
            table = part.piece.window_table if is_window else part.piece.block_table
            tables.append(list(table[first : -(-part.stop // size)]))
        width = max(map(len, tables))  # the content of the null block is masked
        return torch.tensor([table + [0] * (width - len(table)) for table in tables], device=self._store.device)

    def _mask(
        self, starts: Sequence[int], num_queries: int, firsts: Sequence[int], num_keys: int, window: int
    ) -> Tensor:
        """Return the additive mask [B, 1, Q, L]: -inf for later keys and beyond the window."""
        device = self._store.device
        queries = torch.tensor(starts, device=device)[:, None] + torch.arange(num_queries, device=device)
        first_keys = torch.tensor(firsts, device=device)[:, None] * self._store.block_size
        queries, keys = queries[:, :, None], (first_keys + torch.arange(num_keys, device=device))[:, None]
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._store.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]


def _positions(piece: SeqSlice) -> range:
    return range(piece.start, piece.start + piece.length)


def _blocks(ordered: Sequence[SeqSlice], store: KVStore, *, is_window: bool) -> Tensor:
    """Return the block of each row [T], in the layers that use window blocks or in the others."""
    size, blocks = store.block_size, list[int]()
    for piece in ordered:
        table = piece.window_table if is_window else piece.block_table
        blocks += [table[position // size] for position in _positions(piece)]
    return torch.tensor(blocks, device=store.device)


def _kept(ordered: Sequence[SeqSlice], device: torch.device) -> Tensor | None:
    """Return the rows that are stored in layers with whole contexts, or None for all rows."""
    if all(piece.kv_start <= piece.start for piece in ordered):
        return None
    is_kept = [position >= piece.kv_start for piece in ordered for position in _positions(piece)]
    return torch.tensor(is_kept, device=device).nonzero()[:, 0]


def _tokens(ordered: Sequence[SeqSlice], last_rows: Sequence[int], last_samples: Tensor) -> Tensor:
    known: list[int] = []
    for piece in ordered:
        known += piece.tokens or (0,)
    tokens = torch.tensor(known, device=last_samples.device)
    unknown = [(row, piece.batch_index) for row, piece in zip(last_rows, ordered, strict=True) if not piece.tokens]
    if unknown:
        rows, batch_indices = torch.tensor(unknown, device=last_samples.device).unbind(1)
        tokens[rows] = last_samples[batch_indices]
    return tokens
