"""A step plan as passes: the rows of a forward pass, where their keys are stored, and which keys they attend to.

A pass is either flat or dense. A flat pass holds all tokens of the step, each as a row of its own [T, 1], so that one
forward pass serves prompts and decodes of any length, and rotary offsets are an array with one position per row. Its
attention is computed by `attention.py`. A dense pass holds sequences of one length [B, L]. Its cache returns the same
arrays as mlx-lm's own, for models that compute attention themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import mlx.core as mx
import numpy as np

from quire.core.step import SeqSlice

# T tokens of a pass, B sequences of a group, Q queries of a sequence, L keys, W blocks of a table

MIN_BUCKET = 3  # contexts of up to 2 ** MIN_BUCKET blocks are attended together, longer ones by powers of two


class BatchMode(StrEnum):
    """How a model's steps are divided into forward passes, fastest first."""

    FLAT = "flat"  # one pass for the whole step
    DENSE = "dense"  # a pass for decodes of similar length, and one for each prompt
    SINGLE = "single"  # a pass for each request


@dataclass(frozen=True, slots=True)
class View:
    """The blocks that a group reads in layers with a certain window, and which of their keys count."""

    tables: mx.array  # [B, W]
    num_keys: int  # leading keys of the gathered blocks that are used
    mask: mx.array | str | None  # bool [B, 1, Q, L]; "causal"; None: no key is masked


@dataclass
class Group:
    """Sequences attended in one call: many with one query each, or one with many queries."""

    first: int  # rows of the pass: [first, last)
    last: int
    starts: tuple[int, ...]  # per sequence: position of its first query
    num_queries: int  # per sequence
    tables: tuple[Sequence[int], ...]  # per sequence, as long as its context needs
    block_size: int
    _views: dict[int, View] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        """Length of the longest context."""
        return max(self.starts) + self.num_queries

    @cached_property
    def lengths(self) -> mx.array:
        """Number of keys of each sequence [B], for groups with one query per sequence."""
        return mx.array([start + 1 for start in self.starts], dtype=mx.int32)

    def view(self, window: int) -> View:
        """Return what a layer reads. `window`: number of keys that a query sees, itself included; 0: all."""
        if window >= self.num_tokens:
            window = 0
        if window not in self._views:
            self._views[window] = self._view(window)
        return self._views[window]

    def mask(self, window: int) -> mx.array:
        """Return the mask over the whole context, as a model that computes attention itself uses it [B, 1, Q, L]."""
        width = max(len(table) for table in self.tables)
        return self._mask([0] * self.num_seqs, width * self.block_size, window)

    def _view(self, window: int) -> View:
        """View of the blocks from the first one in the window on. Tables are padded at the end."""
        size = self.block_size
        firsts = [max(start + 1 - window, 0) // size if window else 0 for start in self.starts]
        parts = [table[first:] for table, first in zip(self.tables, firsts, strict=True)]
        width = max(len(part) for part in parts)
        padded = [[*part, *[0] * (width - len(part))] for part in parts]  # the null block: its content is masked
        tables = mx.array(padded, dtype=mx.int32)
        if not window and min(self.starts) == max(self.starts):
            return View(tables, self.num_tokens, "causal" if self.num_queries > 1 else None)
        return View(tables, width * size, self._mask([first * size for first in firsts], width * size, window))

    def _mask(self, first_keys: Sequence[int], num_keys: int, window: int) -> mx.array:
        """Return which of `num_keys` keys each query sees [B, 1, Q, L]. `first_keys` [B]: position of the first one."""
        queries = np.array(self.starts)[:, None, None] + np.arange(self.num_queries)[:, None]  # [B, Q, 1]
        keys = np.array(first_keys)[:, None, None] + np.arange(num_keys)  # [B, 1, L]
        seen = keys <= queries
        if window:
            seen &= keys > queries - window
        return mx.array(seen[:, None])


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass."""

    is_flat: bool
    tokens: mx.array  # [T, 1] if flat, else [B, L]
    offset: mx.array | int  # position of the first token of each row, as rotary embeddings take it
    blocks: mx.array  # [T]: block of each token
    slots: mx.array  # [T]: place in that block
    groups: tuple[Group, ...]  # one if dense
    last_rows: dict[int, int]  # row of the last token of each slice, by its index in the plan


def build_passes(
    slices: Sequence[SeqSlice], size: int, max_gathered: int, last_samples: mx.array, mode: BatchMode
) -> tuple[Pass, ...]:
    """Divide a plan. `last_samples` is indexed by batch index.

    `size`: of a block. `max_gathered`: keys that a group of several sequences gathers, padding included.
    """
    order = sorted(range(len(slices)), key=lambda index: _bucket(slices[index], size))
    together: list[list[int]] = []  # indices of each group
    width = 0  # blocks of the last group's longest sequence
    for index in order:
        is_decode = slices[index].length == 1 and mode is not BatchMode.SINGLE
        num_blocks = slices[index].start // size + 1
        width = max(width, num_blocks)
        if (
            is_decode
            and together
            and _bucket(slices[together[-1][0]], size) == _bucket(slices[index], size)
            and (len(together[-1]) + 1) * width * size <= max_gathered
        ):
            together[-1].append(index)
        else:
            together.append([index])
            width = num_blocks
    if mode is BatchMode.FLAT:
        return (_build(slices, together, size, last_samples, is_flat=True),)
    return tuple(_build(slices, [indices], size, last_samples, is_flat=False) for indices in together)


def _bucket(piece: SeqSlice, block_size: int) -> int:
    """Sort key: decodes before prompts, and decodes by the power of two that holds their context."""
    if piece.length > 1:
        return 1000
    return max((piece.start // block_size).bit_length(), MIN_BUCKET)


def _build(
    slices: Sequence[SeqSlice], together: list[list[int]], block_size: int, last_samples: mx.array, *, is_flat: bool
) -> Pass:
    known: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    last_rows: dict[int, int] = {}
    unknown: list[tuple[int, int]] = []  # row, batch index
    groups: list[Group] = []
    for indices in together:
        first, tables = len(known), []
        for index in indices:
            piece = slices[index]
            end = piece.start + piece.length
            if not piece.tokens:
                unknown.append((len(known), piece.batch_index))
            known.extend(piece.tokens or (0,))
            positions.extend(range(piece.start, end))
            table = piece.block_table[: -(-end // block_size)]
            blocks.extend(table[position // block_size] for position in range(piece.start, end))
            tables.append(table)
            last_rows[index] = len(known) - 1
        firsts = tuple(slices[index].start for index in indices)
        groups.append(Group(first, len(known), firsts, slices[indices[0]].length, tuple(tables), block_size))
    tokens = mx.array(known, dtype=mx.int32)
    if unknown:
        rows, batch_indices = mx.array(unknown, dtype=mx.int32).T
        tokens[rows] = last_samples[batch_indices]
    starts = positions if is_flat else list(groups[0].starts)
    offset = starts[0] if len(starts) == 1 and not is_flat else mx.array(starts, dtype=mx.int32)
    return Pass(
        is_flat=is_flat,
        tokens=tokens[:, None] if is_flat else tokens.reshape(groups[0].num_seqs, -1),
        offset=offset,
        blocks=mx.array(blocks, dtype=mx.int32),
        slots=mx.array([position % block_size for position in positions], dtype=mx.int32),
        groups=tuple(groups),
        last_rows=last_rows,
    )
