"""Divides the attention of a step into items of about equal work. Plain numpy, independent of any GPU.

A decode reads its whole context for one query row. With many sequences there is one program for each sequence and KV
head, and the card is full. With few sequences, a long context would occupy a handful of programs while the rest of the
card is idle, so contexts are split along their length and the parts are merged afterwards. The length of a part is
chosen so that about `target` programs share all keys. docs/gpu.md explains it with a picture.

Decodes whose block tables start with the same blocks (siblings of one prompt) read that prefix once: their rows
together form one item over the shared blocks, and each row has its own items for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

MIN_CHUNK = 128  # keys: a shorter item costs more to start than to run
ENOUGH = 0.6  # fraction of the target from which the idle time is shorter than a merge
MIN_SIBLINGS = 4  # rows that share a prefix: with fewer, reading it once does not pay
MIN_SHARED = 128  # keys of such a prefix
PIECE = 64  # blocks compared at a time


NO_ITEMS: Ints = np.zeros((0, 6), np.int32)


class Prompt(NamedTuple):
    """Rows of one sequence, more than one."""

    first_row: int
    length: int
    start: int  # position of the first row
    batch_index: int


class Work(NamedTuple):
    narrow: Ints  # [items, ITEM_FIELDS]: one row each
    wide: Ints  # [items, ITEM_FIELDS]
    first_parts: Ints  # [T + 1]: index of each row's first part; a row without parts has all keys in one item

    @property
    def num_merged(self) -> int:
        """Number of rows up to the last one that has parts."""
        return int(np.searchsorted(self.first_parts, self.first_parts[-1]))


class Sizes(NamedTuple):
    """Limits for dividing the work."""

    num_kv_heads: int
    block_size: int
    rows_per_item: int  # tokens of a wide item
    target: int  # programs that fill the card if each has one row
    wide_target: int  # programs that fill the card if each has many rows
    max_parts: int  # at least two per sequence


class Siblings(NamedTuple):
    """Decodes at rows [first, last) whose first `shared` keys are in the same blocks."""

    first: int
    last: int
    shared: int


def order_decodes(first_blocks: Ints) -> NDArray[np.int64] | None:
    """Return an order that puts decodes with the same first block side by side, or None if all first blocks differ."""
    order = np.argsort(first_blocks, kind="stable")
    ordered = first_blocks[order]
    return order if bool((ordered[1:] == ordered[:-1]).any()) else None


def find_siblings(tables: Ints, batch_indices: Ints, starts: Ints, block_size: int) -> list[Siblings]:
    """Return groups of decodes that share a prefix, given rows in the order of `order_decodes` and their positions."""
    first_blocks = tables[batch_indices, 0]
    bounds = np.flatnonzero(np.diff(first_blocks)) + 1
    edges = [0, *bounds.tolist(), len(batch_indices)]
    found = []
    for first, last in itertools.pairwise(edges):
        if last - first < MIN_SIBLINGS:
            continue
        width = int(starts[first:last].min()) // block_size  # full blocks before the position of every row
        shared = _num_common(tables, batch_indices[first:last], width) * block_size
        if shared >= MIN_SHARED:
            found.append(Siblings(first, last, shared))
    return found


def _num_common(tables: Ints, batch_indices: Ints, width: int) -> int:
    """Return the number of leading blocks that all tables share. Compares in pieces, because most differ early."""
    for first in range(0, width, PIECE):
        rows = tables[batch_indices, first : min(first + PIECE, width)]
        is_same = (rows == rows[0]).all(0)
        if not is_same.all():
            return first + int(is_same.argmin())
    return width


def plan_work(
    starts: Ints,
    batch_indices: Ints,
    siblings: Sequence[Siblings],
    prompts: Sequence[Prompt],
    num_rows: int,
    sizes: Sizes,
) -> Work:
    """Divide decodes at rows [0, len(starts)), at these positions, and then the prompts. `num_rows` counts all rows."""
    if not siblings and not prompts:
        return _plan_decodes(starts, batch_indices, sizes)
    num_decodes = len(starts)
    shared = np.zeros(num_decodes, np.int32)
    for group in siblings:
        shared[group.first : group.last] = group.shared
    own = starts + 1 - shared
    chunk = _chunk(int(own.sum()), num_decodes, sizes.num_kv_heads, sizes.target)
    tiles = _tiles(siblings, prompts, batch_indices, sizes.rows_per_item)
    wide_chunk = _chunk(int(tiles[:, 4].sum()), len(tiles), sizes.num_kv_heads, sizes.wide_target)
    while True:  # lengthen the items until the parts to be merged fit
        num_chunks = -(-own // chunk)
        wide_chunks = -(-tiles[:, 4] // wide_chunk)
        counts = np.ones(num_rows, np.int32)
        counts[:num_decodes] = num_chunks
        _add_wide(counts, tiles, wide_chunks, num_decodes)
        first_parts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(np.where(counts > 1, counts, 0), out=first_parts[1:])
        if first_parts[-1] <= sizes.max_parts:
            break
        chunk, wide_chunk = 2 * chunk, 2 * wide_chunk
    narrow = _cut(
        np.stack(
            [np.arange(num_decodes, dtype=np.int32), np.ones_like(batch_indices), batch_indices, shared, starts + 1], 1
        ),
        num_chunks,
        counts[:num_decodes] - num_chunks,
    )
    wide = _cut(tiles, wide_chunks, np.zeros(len(tiles), np.int32))
    return Work(narrow, wide, first_parts)


def _plan_decodes(starts: Ints, batch_indices: Ints, sizes: Sizes) -> Work:
    """Like `plan_work`, for the common step: only decodes, and no shared prefixes."""
    num_keys = starts + 1
    chunk = _chunk(int(num_keys.sum()), len(starts), sizes.num_kv_heads, sizes.target)
    num_chunks = -(-num_keys // chunk)
    while int(num_chunks.sum()) > sizes.max_parts:
        chunk *= 2
        num_chunks = -(-num_keys // chunk)
    rows = np.zeros((len(starts), 5), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = np.arange(len(starts)), 1, batch_indices, num_keys
    first_parts = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(np.where(num_chunks > 1, num_chunks, 0), out=first_parts[1:])
    return Work(_cut(rows, num_chunks, np.zeros_like(batch_indices)), NO_ITEMS, first_parts)


def _chunk(num_keys: int, num_rows: int, num_kv_heads: int, target: int) -> int:
    """Return the keys per item with which about `target` programs share all keys.

    If there are nearly enough programs without splitting, only contexts of twice the average are split: merging the
    parts would cost more than the better balance gains.
    """
    chunk = -(-num_keys * num_kv_heads // target)
    if num_rows * num_kv_heads >= ENOUGH * target:
        chunk = max(chunk, 2 * num_keys // num_rows)
    return max(-(-chunk // MIN_CHUNK) * MIN_CHUNK, MIN_CHUNK)


def _tiles(siblings: Sequence[Siblings], prompts: Sequence[Prompt], batch_indices: Ints, rows_per_item: int) -> Ints:
    """Return groups of rows and the keys they see: [tiles, (first row, rows, batch index, first key, last key + 1)]."""
    tiles: list[tuple[int, int, int, int, int]] = []
    for group in siblings:
        batch_index = int(batch_indices[group.first])
        tiles += [
            (row, min(rows_per_item, group.last - row), batch_index, 0, group.shared)
            for row in range(group.first, group.last, rows_per_item)
        ]
    for prompt in prompts:
        for offset in range(0, prompt.length, rows_per_item):
            num_rows = min(rows_per_item, prompt.length - offset)
            tiles.append((prompt.first_row + offset, num_rows, prompt.batch_index, 0, prompt.start + offset + num_rows))
    return np.array(tiles, np.int32).reshape(-1, 5)


def _add_wide(counts: Ints, tiles: Ints, wide_chunks: Ints, num_decodes: int) -> None:
    """Add to `counts` the parts that each row has in shared prefixes."""
    for (row, num_rows, _, _, _), num_chunks in zip(tiles.tolist(), wide_chunks.tolist(), strict=True):
        if row < num_decodes:
            counts[row : row + num_rows] += num_chunks
        else:
            counts[row : row + num_rows] = num_chunks


def _cut(tiles: Ints, num_chunks: Ints, first_part: Ints) -> Ints:
    """Split every tile into `num_chunks` items along its keys, longest first: they determine the total time."""
    which = np.repeat(np.arange(len(tiles)), num_chunks)
    part = np.arange(len(which)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    low, high = tiles[:, 3], tiles[:, 4]
    even = -(-(high - low) // np.maximum(num_chunks, 1))
    size = -(-even // MIN_CHUNK) * MIN_CHUNK  # whole tiles of keys
    items = np.empty((len(which), 6), np.int32)
    items[:, :3] = tiles[which, :3]
    items[:, 3] = low[which] + part * size[which]
    items[:, 4] = np.minimum(items[:, 3] + size[which], high[which])
    items[:, 5] = first_part[which] + part
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")]
