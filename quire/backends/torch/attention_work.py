"""Divides the attention of a step into items of about equal work. Plain numpy, independent of any GPU.

A decode reads its whole context for one query row. With many sequences there is one program for each sequence and KV
head, and the card is full. With few sequences, a long context would occupy a handful of programs while the rest of the
card is idle, so contexts are split along their length and the parts are merged afterwards. The length of a part is
chosen so that about `target` programs share all keys. docs/gpu.md explains it with a picture.

Decodes whose block tables start with the same blocks (siblings of one prompt) read that prefix once: their rows
together form one item over the shared blocks, and each row has its own items for the rest. Groups may be nested: all
rows share a system prompt, and some of them a longer prefix.

Layers that use window blocks have items of their own: they cover only the blocks within the window, and no siblings,
because requests that share a prefix need not share window blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

MIN_CHUNK = 128  # keys: a shorter item costs more to start than to run
ENOUGH = 0.6  # fraction of the target from which the idle time is shorter than a merge
MIN_SIBLINGS = 4  # rows that share a prefix: with fewer, reading it once does not pay
MIN_SHARED = 128  # keys that they share beyond an enclosing group
MIN_DRAFT_KEYS = 1024  # that drafts share: reading fewer for each draft takes less time than dividing them on the host
PART_KEYS = 16  # keys read in the time of writing and merging one part: 2 * G, for G query heads per KV head
MAX_LEVELS = 3  # nested groups of a row: each adds a part to merge
PIECE = 64  # blocks compared at a time


ITEM_FIELDS = 6
NO_ITEMS: Ints = np.zeros((0, ITEM_FIELDS), np.int32)


class Prompt(NamedTuple):
    """Rows of one sequence, more than one."""

    first_row: int
    length: int
    start: int  # position of the first row
    batch_index: int


class Work(NamedTuple):
    """Attention of the layers of one pool: numpy arrays, or tensors on the device."""

    first_parts: Any  # [T + 1]: index of each row's first part; a row without parts has all keys in one item
    narrow: Any  # [items, ITEM_FIELDS]: one row each
    wide: Any  # [items, ITEM_FIELDS]

    @property
    def num_merged(self) -> int:
        """Number of rows up to the last one that has parts."""
        if not self.first_parts[-1:].any():
            return 0
        return int(np.searchsorted(self.first_parts, self.first_parts[-1]))


NO_WORK = Work(np.zeros(0, np.int32), NO_ITEMS, NO_ITEMS)


class Sizes(NamedTuple):
    """Limits for dividing the work."""

    num_kv_heads: int
    block_size: int
    rows_per_item: int  # tokens of a wide item
    target: int  # programs that fill the card if each has one row
    wide_target: int  # programs that fill the card if each has many rows
    max_parts: int  # at least MAX_LEVELS + 1 per sequence


class Siblings(NamedTuple):
    """Decodes at rows [first, last) whose keys [low, high) are in the same blocks and are read once for all of them."""

    first: int
    last: int
    low: int  # `high` of the enclosing group, 0 if there is none
    high: int


class Grouping(NamedTuple):
    """All groups of siblings in a step, and the order of rows in which they are adjacent."""

    order: NDArray[np.int64]  # [rows]: index of each row in the given arrays
    siblings: tuple[Siblings, ...]  # an enclosing group before the groups inside it
    shared: Ints  # [rows], as given: keys that each decode reads together with others


def max_wide_tiles(num_rows: int, sizes: Sizes) -> int:
    """Return the largest number of tiles that the siblings among `num_rows` decodes make.

    It is half the rows, because `find_siblings` refuses groups that would exceed it. Groups that are not nested never
    do if an item holds at least MIN_SIBLINGS rows: they make at most one tile for every MIN_SIBLINGS rows.
    """
    return num_rows // 2 if sizes.rows_per_item > 1 else 0


def find_siblings(tables: Ints, batch_indices: Ints, starts: Ints, sizes: Sizes) -> Grouping | None:
    """Return the groups of decodes for which reading a shared prefix once pays, or None if there are none.

    Only full blocks before the position of a row count. The result stays correct while the tables only grow and
    positions do not decrease.
    """
    candidates = _candidates(tables[batch_indices, 0])
    if not len(candidates):  # the common case
        return None
    num_full = starts // sizes.block_size
    order = _sort(tables, batch_indices, num_full, candidates)
    common = _common_runs(tables, batch_indices[order], num_full[order])
    siblings = _choose((common * sizes.block_size).tolist(), sizes.rows_per_item, max_wide_tiles(len(starts), sizes))
    if not siblings:
        return None
    shared = np.zeros_like(starts)
    for group in siblings:
        shared[order[group.first : group.last]] = group.high
    is_other = np.ones(len(starts), np.bool_)
    is_other[order] = False
    return Grouping(np.concatenate((order, np.flatnonzero(is_other))), siblings, shared)


def group_drafts(batch_indices: Sequence[int], starts: Sequence[int], sizes: Sizes) -> tuple[Siblings, ...]:
    """Return the groups of decodes of one request, which are drafts, for which reading the context once pays.

    The decodes of a request are adjacent and in order. Prefixes that requests share are not considered.
    """
    groups: list[Siblings] = []
    first = 0
    for last in range(1, len(starts) + 1):
        if last < len(starts) and batch_indices[last] == batch_indices[first]:
            continue
        high = starts[first] // sizes.block_size * sizes.block_size
        if high >= MIN_DRAFT_KEYS and last - first >= MIN_SIBLINGS <= sizes.rows_per_item:
            groups.append(Siblings(first, last, 0, high))
        first = last
    return tuple(groups)


def _candidates(first_blocks: Ints) -> NDArray[np.int64]:
    """Return the indices of decodes whose first block at least MIN_SIBLINGS decodes have."""
    order = np.argsort(first_blocks, kind="stable")
    ordered = first_blocks[order]
    same = np.flatnonzero(ordered[MIN_SIBLINGS - 1 :] == ordered[: 1 - MIN_SIBLINGS])
    if not len(same):
        return same
    is_candidate = np.zeros(len(order), np.bool_)
    for offset in range(MIN_SIBLINGS):
        is_candidate[same + offset] = True
    return order[is_candidate]


def _sort(tables: Ints, batch_indices: Ints, num_full: Ints, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the candidates in an order in which tables with any common prefix are adjacent."""
    rows = zip(batch_indices[candidates].tolist(), num_full[candidates].tolist(), strict=True)
    prefixes = [tables[batch_index, :length].tobytes() for batch_index, length in rows]  # bytes are compared fastest
    return candidates[sorted(range(len(prefixes)), key=prefixes.__getitem__)]


def _common_runs(tables: Ints, batch_indices: Ints, num_full: Ints) -> Ints:
    """Return how many leading blocks each row has in common with the next. Compares in pieces: most differ early."""
    limits = np.minimum(num_full[:-1], num_full[1:])
    common = limits.copy()
    equal = np.arange(len(limits))  # pairs without a difference up to here
    for first in range(0, int(limits.max()), PIECE):
        equal = equal[limits[equal] > first]
        here, following = (tables[batch_indices[equal + offset], first : first + PIECE] for offset in (0, 1))
        differs = here != following
        is_different = differs.any(1)
        ended = equal[is_different]
        common[ended] = np.minimum(limits[ended], first + differs.argmax(1)[is_different])
        equal = equal[~is_different]
        if not len(equal):
            break
    return common


@dataclass(slots=True)
class _Range:
    """Adjacent rows [first, last) that share `high` keys."""

    first: int
    last: int
    high: int
    inside: list[_Range]  # ranges of at least MIN_SIBLINGS rows that share more


def _ranges(common: list[int]) -> _Range:
    """Return the tree of all ranges, given how many keys each row has in common with the next. The root has all rows.

    One pass over the rows: a range begins where `common` rises above its surroundings and ends where it falls.
    """
    root = _Range(0, len(common) + 1, 0, [])
    current = [root]  # the ranges that contain this row, the outermost first
    for row, high in enumerate([*common, 0]):
        first, inside = row, []
        while current[-1].high > high:
            ended = current.pop()
            ended.last = row + 1
            first = ended.first
            is_large = ended.last - first >= MIN_SIBLINGS
            if current[-1].high >= high:
                current[-1].inside += [ended] * is_large
            else:  # `ended` is within the range that begins below
                inside = [ended] * is_large
        if current[-1].high < high:
            current.append(_Range(first, 0, high, inside))
    return root


def _choose(common: list[int], per_item: int, tiles_left: int) -> tuple[Siblings, ...]:
    """Return the groups that pay, given how many keys each row has in common with the next.

    A group reads its keys once per tile. Without it, each group inside it would read them once per tile, and each other
    row once. It pays if the keys that it saves exceed the cost of one more part per row. If it does not pay, the groups
    inside it read its keys too.
    """
    chosen: list[Siblings] = []
    pending = [(_ranges(common), 0, 0)]
    while pending:
        group, low, level = pending.pop()
        num_rows = group.last - group.first
        num_tiles = -(-num_rows // per_item)
        sizes = [one.last - one.first for one in group.inside]
        num_readers = num_rows - sum(sizes) + sum(-(-size // per_item) for size in sizes)
        num_keys = group.high - low
        is_paid = (num_readers - num_tiles) * num_keys >= num_rows * PART_KEYS
        if is_paid and num_keys >= MIN_SHARED and num_tiles <= tiles_left:
            chosen.append(Siblings(group.first, group.last, low, group.high))
            tiles_left -= num_tiles
            low, level = group.high, level + 1
        if level < MAX_LEVELS:
            pending += [(one, low, level) for one in reversed(group.inside)]
    return tuple(chosen)


def plan_work(
    starts: Ints,
    batch_indices: Ints,
    siblings: Sequence[Siblings],
    prompts: Sequence[Prompt],
    num_rows: int,
    sizes: Sizes,
    window: int = 0,
) -> Work:
    """Divide decodes at rows [0, len(starts)), at these positions, and then the prompts. `num_rows` counts all rows.

    With a window, items begin with the first block within it, and there must be no siblings.
    """
    if not siblings and not prompts:
        return _plan_decodes(starts, batch_indices, sizes, window)
    num_decodes = len(starts)
    first_keys = _first_keys(starts, window, sizes.block_size)
    for group in siblings:
        first_keys[group.first : group.last] = group.high
    own = starts + 1 - first_keys
    chunk = _chunk(int(own.sum()), num_decodes, sizes.num_kv_heads, sizes.target)
    tiles = _tiles(siblings, prompts, batch_indices, sizes, window)
    num_keys = tiles[:, 4] - tiles[:, 3]
    wide_chunk = _chunk(int(num_keys.sum()), len(tiles), sizes.num_kv_heads, sizes.wide_target)
    while True:  # lengthen the items until the parts to be merged fit
        num_chunks = -(-own // chunk)
        wide_chunks = -(-num_keys // wide_chunk)
        counts = np.zeros(num_rows, np.int32)
        wide_parts = _add_wide(counts, tiles, wide_chunks)
        first_narrow = counts[:num_decodes].copy()  # a row's own parts come after those that it shares
        counts[:num_decodes] += num_chunks
        first_parts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(np.where(counts > 1, counts, 0), out=first_parts[1:])
        if first_parts[-1] <= sizes.max_parts:
            break
        chunk, wide_chunk = 2 * chunk, 2 * wide_chunk
    narrow = _cut(
        np.stack(
            [
                np.arange(num_decodes, dtype=np.int32),
                np.ones_like(batch_indices),
                batch_indices,
                first_keys,
                starts + 1,
            ],
            1,
        ),
        num_chunks,
        first_narrow,
    )
    wide = _cut(tiles, wide_chunks, wide_parts)
    return Work(first_parts, narrow, wide)


def _first_keys(starts: Ints, window: int, block_size: int) -> Ints:
    """Return the first key of the first block that a row at each position reads."""
    if not window:
        return np.zeros_like(starts)
    return np.maximum(starts + 1 - window, 0) // block_size * block_size


def _plan_decodes(starts: Ints, batch_indices: Ints, sizes: Sizes, window: int) -> Work:
    """Like `plan_work`, for the common step: only decodes, and no shared prefixes."""
    if len(starts) == 1:
        return _plan_decode(int(starts[0]), int(batch_indices[0]), sizes, window)
    ends = starts + 1
    first_keys = _first_keys(starts, window, sizes.block_size) if window else None
    num_keys = ends if first_keys is None else ends - first_keys
    chunk = _chunk(int(num_keys.sum()), len(starts), sizes.num_kv_heads, sizes.target)
    num_chunks = -(-num_keys // chunk)
    while int(num_chunks.sum()) > sizes.max_parts:
        chunk *= 2
        num_chunks = -(-num_keys // chunk)
    rows = np.zeros((len(starts), 5), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = np.arange(len(starts)), 1, batch_indices, ends
    if first_keys is not None:
        rows[:, 3] = first_keys
    first_parts = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(np.where(num_chunks > 1, num_chunks, 0), out=first_parts[1:])
    return Work(first_parts, _cut(rows, num_chunks, np.zeros_like(batch_indices)), NO_ITEMS)


def _plan_decode(start: int, batch_index: int, sizes: Sizes, window: int) -> Work:
    """Like `_plan_decodes`, for one row. The answer of a lone request waits for this, so it takes few operations."""
    end = start + 1
    first_key = max(end - window, 0) // sizes.block_size * sizes.block_size if window else 0
    num_keys = end - first_key
    chunk = _chunk(num_keys, 1, sizes.num_kv_heads, sizes.target)
    while -(-num_keys // chunk) > sizes.max_parts:
        chunk *= 2
    num_chunks = -(-num_keys // chunk)
    size = -(-num_keys // num_chunks)
    size = -(-size // MIN_CHUNK) * MIN_CHUNK
    items = [0, 1, batch_index, 0, 0, 0] * num_chunks
    items[3::6] = range(first_key, end, size)
    items[4::6] = [*range(first_key + size, end, size), end]
    items[5::6] = range(num_chunks)
    first_parts = np.array([0, num_chunks if num_chunks > 1 else 0], np.int32)
    return Work(first_parts, np.array(items, np.int32).reshape(-1, ITEM_FIELDS), NO_ITEMS)


def _chunk(num_keys: int, num_rows: int, num_kv_heads: int, target: int) -> int:
    """Return the keys per item with which about `target` programs share all keys.

    If there are nearly enough programs without splitting, only contexts of twice the average are split: merging the
    parts would cost more than the better balance gains.
    """
    chunk = -(-num_keys * num_kv_heads // target)
    if num_rows * num_kv_heads >= ENOUGH * target:
        chunk = max(chunk, 2 * num_keys // num_rows)
    return max(-(-chunk // MIN_CHUNK) * MIN_CHUNK, MIN_CHUNK)


def _tiles(
    siblings: Sequence[Siblings], prompts: Sequence[Prompt], batch_indices: Ints, sizes: Sizes, window: int
) -> Ints:
    """Return groups of rows and the keys they see: [tiles, (first row, rows, batch index, first key, last key + 1)]."""
    rows_per_item, block_size = sizes.rows_per_item, sizes.block_size
    tiles: list[tuple[int, int, int, int, int]] = []
    for group in siblings:
        batch_index = int(batch_indices[group.first])
        tiles += [
            (row, min(rows_per_item, group.last - row), batch_index, group.low, group.high)
            for row in range(group.first, group.last, rows_per_item)
        ]
    for prompt in prompts:
        for offset in range(0, prompt.length, rows_per_item):
            num_rows = min(rows_per_item, prompt.length - offset)
            start = prompt.start + offset
            low = max(start + 1 - window, 0) // block_size * block_size if window else 0
            tiles.append((prompt.first_row + offset, num_rows, prompt.batch_index, low, start + num_rows))
    return np.array(tiles, np.int32).reshape(-1, 5)


def _add_wide(counts: Ints, tiles: Ints, wide_chunks: Ints) -> Ints:
    """Add the parts of all tiles to the counts of their rows. Return the index of each tile's first part.

    All rows of a tile are in the same enclosing groups, so they have the same number of parts before it.
    """
    first_parts = np.empty(len(tiles), np.int32)
    for tile, ((row, num_rows, _, _, _), num_chunks) in enumerate(
        zip(tiles.tolist(), wide_chunks.tolist(), strict=True)
    ):
        first_parts[tile] = counts[row]
        counts[row : row + num_rows] += num_chunks
    return first_parts


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
