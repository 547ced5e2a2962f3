"""Divides the attention of a step into items of about equal work. Plain numpy, independent of any GPU.

A decode reads its whole context for one query row. With many sequences there is one program for each sequence and KV
head, and the card is full. With few sequences, a long context would occupy a handful of programs while the rest of the
card is idle, so contexts are split along their length and the parts are merged afterwards. docs/gpu.md explains it with
a picture.

The bits of a result must not depend on the division. Contexts are therefore cut into pieces at fixed positions, and the
result is that of adding one piece after another, from left to right. Only the first item of a row may cover several
pieces: the sum of some in the middle would round differently.

Decodes whose block tables start with the same blocks (siblings of one prompt) read that prefix once: their rows
together form one item over the shared blocks, and each row has its own items for the rest. Groups may be nested: all
rows share a system prompt, and some of them a longer prefix.

Layers that use window blocks have items of their own: they cover only the blocks within the window, and no siblings,
because requests that share a prefix need not share window blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

PIECE = 128  # keys: a multiple of the tiles of keys, below which an item costs more to start than to run
PIECES = 64  # pieces of that length; the keys before a longer one are 32 to 64 times as many
MAX_KEYS = 2**24
ENOUGH = 0.6  # fraction of the target from which the idle time is shorter than a merge
SPARE = 512  # items beyond one for each tile and program: contexts that would need more are split less
MIN_SIBLINGS = 4  # rows that share a prefix: with fewer, reading it once does not pay
MIN_DRAFT_KEYS = 1024  # that drafts share: reading fewer for each draft takes less time than dividing them on the host
PART_KEYS = 16  # keys read in the time of writing and merging one part: 2 * G, for G query heads per KV head
COMPARED = 64  # blocks at a time

# First row, number of rows, batch index of the block table, first key, last key + 1, index of the part, and of a row's first
# narrow item the number of parts that it goes on from, and the index of the first of them.
ITEM_FIELDS = 8
NO_ITEMS: Ints = np.zeros((0, ITEM_FIELDS), np.int32)


@cache
def _starts(piece: int) -> Ints:
    """Return the first keys of all pieces."""
    keys = np.arange(0, MAX_KEYS, piece, dtype=np.int32)
    return keys[(keys & -keys) * PIECES >= keys]


def _floor(keys: Any) -> Any:
    """Return the first key of the piece that holds each key."""
    return _starts(PIECE)[_starts(PIECE).searchsorted(keys, "right") - 1]


class Prompt(NamedTuple):
    """Rows of one sequence, more than one."""

    first_row: int
    length: int
    start: int  # position of the first row
    batch_index: int


class Work(NamedTuple):
    """Attention of the layers of one pool: numpy arrays, or tensors on the device."""

    # [2 T + 1]: index of the first part that each row shares with its siblings, and of its first own part. A row
    # without own parts has all other keys in one item.
    first_parts: Any
    narrow: Any  # [items, ITEM_FIELDS]: one row each
    wide: Any  # [items, ITEM_FIELDS]

    @property
    def num_merged(self) -> int:
        """Number of rows up to the last one that has own parts."""
        split = np.flatnonzero(np.diff(self.first_parts)[1::2])
        return int(split[-1]) + 1 if len(split) else 0


NO_WORK = Work(np.zeros(0, np.int32), NO_ITEMS, NO_ITEMS)


class Sizes(NamedTuple):
    """Limits for dividing the work."""

    num_kv_heads: int
    block_size: int
    rows_per_item: int  # tokens of a wide item
    target: int  # programs that fill the card if each has one row
    wide_target: int  # programs that fill the card if each has many rows
    max_parts: int  # at least 4 per sequence


class Siblings(NamedTuple):
    """Decodes at rows [first, last) whose keys [low, high) are in the same blocks and are read once for all of them.

    Both are boundaries of pieces.
    """

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
    siblings = _choose(_floor(common * sizes.block_size).tolist(), max_wide_tiles(len(starts), sizes), sizes)
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
        high = int(_floor(starts[first]))
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
    """Return how many leading blocks each row has in common with the next. Most differ early."""
    limits = np.minimum(num_full[:-1], num_full[1:])
    common = limits.copy()
    equal = np.arange(len(limits))  # pairs without a difference up to here
    for first in range(0, int(limits.max()), COMPARED):
        equal = equal[limits[equal] > first]
        here, following = (tables[batch_indices[equal + offset], first : first + COMPARED] for offset in (0, 1))
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


def _choose(common: list[int], tiles_left: int, sizes: Sizes) -> tuple[Siblings, ...]:
    """Return the groups that pay, given how many keys each row has in common with the next.

    A group reads its keys once per tile. Without it, each group inside it would read them once per tile, and each other
    row once. It pays if the keys that it saves exceed the cost of its parts. If it does not pay, the groups inside it
    read its keys too. A group inside another has one part per piece, for which there must be room.
    """
    chosen: list[Siblings] = []
    pending = [(_ranges(common), 0)]
    parts_left = min(sizes.max_parts // 4, SPARE * 3 // 2)  # of groups inside others; so there are at most SPARE items
    while pending:
        group, low = pending.pop()
        num_rows = group.last - group.first
        num_tiles = -(-num_rows // sizes.rows_per_item)
        counts = [one.last - one.first for one in group.inside]
        num_readers = num_rows - sum(counts) + sum(-(-count // sizes.rows_per_item) for count in counts)
        num_keys = group.high - low
        num_parts = num_rows * (int(np.diff(_starts(PIECE).searchsorted((low, group.high)))[0]) if low else 1)
        is_paid = (num_readers - num_tiles) * num_keys >= num_parts * PART_KEYS
        if is_paid and num_keys and num_tiles <= tiles_left and num_parts * (low > 0) <= parts_left:
            chosen.append(Siblings(group.first, group.last, low, group.high))
            tiles_left -= num_tiles
            parts_left -= num_parts * (low > 0)
            low = group.high
        pending += [(one, low) for one in reversed(group.inside)]
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

    With a window, items begin with the first piece within it, and there must be no siblings.
    """
    num_decodes = len(starts)
    if num_decodes == num_rows == 1:
        return _plan_decode(int(starts[0]), int(batch_indices[0]), sizes, window)
    counts = np.zeros((num_rows, 2), np.int32)  # parts of each row: shared ones, and its own
    wide = NO_ITEMS
    if siblings or prompts:
        tiles, num_shared = _tiles(siblings, prompts, batch_indices, sizes, window)
        wide, num_parts = _cut(tiles, num_shared, sizes.wide_target, sizes.max_parts // 2, sizes)
        wide[:, 5] += np.repeat(_add_parts(counts, tiles, num_parts, num_shared), num_parts)
    decodes = np.ones((num_decodes, 5), np.int32)
    decodes[:, 0], decodes[:, 2], decodes[:, 4] = np.arange(num_decodes), batch_indices, starts + 1
    decodes[:, 3] = _first_keys(starts, window)
    for group in siblings:
        decodes[group.first : group.last, 3] = group.high
    narrow, num_parts = _cut(decodes, 0, sizes.target, sizes.max_parts - int(counts.sum()), sizes)
    counts[:num_decodes, 1] = np.where(num_parts > 1, num_parts, 0)
    first_parts = np.zeros(2 * num_rows + 1, np.int32)
    np.cumsum(counts, out=first_parts[1:])
    is_first = narrow[:, 5] == 0
    narrow[is_first, 6], narrow[is_first, 7] = counts[narrow[is_first, 0], 0], first_parts[2 * narrow[is_first, 0]]
    # Longest first: they determine the total time.
    return Work(first_parts, *(items[np.argsort(items[:, 3] - items[:, 4], kind="stable")] for items in (narrow, wide)))


def _first_keys(starts: Any, window: int) -> Any:
    """Return the first key of the first piece that a row at each position reads."""
    return _floor(np.maximum(starts + 1 - window, 0)) if window else starts * 0


def _plan_decode(start: int, batch_index: int, sizes: Sizes, window: int) -> Work:
    """Like `plan_work`, for one row. The answer of a lone request waits for this, so it takes few operations."""
    pieces, end = _starts(PIECE), start + 1
    low = int(_first_keys(start, window))
    cut = low + _chunk(end - low, 1, sizes.num_kv_heads, sizes.target)
    first, last = pieces.searchsorted((cut, end)).tolist()
    bounds = [low, *pieces[first:last].tolist(), end]
    while len(bounds) - 1 > sizes.max_parts:
        del bounds[1]
    num_parts = len(bounds) - 1
    items = [0, 1, batch_index, 0, 0, 0, 0, 0] * num_parts
    items[3::8], items[4::8], items[5::8] = bounds[:-1], bounds[1:], range(num_parts)
    first_parts = np.array([0, 0, num_parts if num_parts > 1 else 0], np.int32)
    return Work(first_parts, np.array(items, np.int32).reshape(-1, ITEM_FIELDS), NO_ITEMS)


def _chunk(num_keys: int, num_rows: int, num_kv_heads: int, target: int) -> int:
    """Return the keys per item with which about `target` programs share all keys.

    If there are nearly enough programs without splitting, only contexts of twice the average are split: merging the
    parts would cost more than the better balance gains.
    """
    chunk = -(-num_keys * num_kv_heads // target)
    if num_rows * num_kv_heads >= ENOUGH * target:
        chunk = max(chunk, 2 * num_keys // num_rows)
    return max(-(-chunk // PIECE) * PIECE, PIECE)


def _tiles(
    siblings: Sequence[Siblings], prompts: Sequence[Prompt], batch_indices: Ints, sizes: Sizes, window: int
) -> tuple[Ints, int]:
    """Return groups of rows and the keys they see: [tiles, (first row, rows, batch index, first key, last key + 1)].

    Those of siblings come first; the number of these is returned too.
    """
    rows_per_item = sizes.rows_per_item
    tiles: list[tuple[int, int, int, int, int]] = []
    for group in siblings:
        batch_index = int(batch_indices[group.first])
        tiles += [
            (row, min(rows_per_item, group.last - row), batch_index, group.low, group.high)
            for row in range(group.first, group.last, rows_per_item)
        ]
    num_shared = len(tiles)
    for prompt in prompts:
        for offset in range(0, prompt.length, rows_per_item):
            num_rows = min(rows_per_item, prompt.length - offset)
            start = prompt.start + offset
            low = int(_first_keys(start, window))
            tiles.append((prompt.first_row + offset, num_rows, prompt.batch_index, low, start + num_rows))
    return np.array(tiles, np.int32).reshape(-1, 5), num_shared


def _add_parts(counts: Ints, tiles: Ints, num_items: NDArray[np.int64], num_shared: int) -> Ints:
    """Add the parts of all tiles to the counts of their rows. Return the index of each tile's first part.

    All rows of a tile are in the same enclosing groups, so they have the same number of parts before it.
    """
    first_parts = np.zeros(len(tiles), np.int32)
    for tile, ((row, num_rows, _, _, _), count) in enumerate(zip(tiles.tolist(), num_items.tolist(), strict=True)):
        if tile < num_shared:
            first_parts[tile] = counts[row, 0]
            counts[row : row + num_rows, 0] += count
        elif count > 1:
            counts[row : row + num_rows, 1] = count
    return first_parts


def _cut(tiles: Ints, num_shared: int, target: int, max_parts: int, sizes: Sizes) -> tuple[Ints, NDArray[np.int64]]:
    """Cut tiles into items of whole pieces. Return the items of each tile in order, and their number per tile.

    Only the first item of a tile has more than one piece, and that of a group inside another has not either: it has
    parts before it. The first `num_shared` tiles are of siblings, and have parts even if they are not cut.
    """
    pieces = _starts(PIECE)
    lows, highs = tiles[:, 3], tiles[:, 4]
    firsts, lasts = pieces.searchsorted(lows, "right"), pieces.searchsorted(highs)  # starts within each tile
    chunk = _chunk(int((highs - lows).sum()), len(tiles), sizes.num_kv_heads, target) if len(tiles) else PIECE
    is_shared = np.arange(len(tiles)) < num_shared
    while True:  # lengthen the items until there is room for all
        cuts = np.clip(pieces.searchsorted(lows + chunk), firsts, np.where(is_shared & (lows > 0), firsts, lasts))
        counts = lasts - cuts + 1
        num_parts = int((tiles[:, 1] * counts * (is_shared | (counts > 1))).sum())
        if num_parts <= max_parts and counts.sum() <= len(tiles) + target // sizes.num_kv_heads + 1 + SPARE:
            break
        chunk *= 2
    which = np.repeat(np.arange(len(tiles)), counts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = cuts[which] + part  # of the start after the item
    items = np.zeros((len(which), ITEM_FIELDS), np.int32)
    items[:, :3] = tiles[which, :3]
    items[:, 3] = np.where(part == 0, lows[which], pieces[at - 1])
    items[:, 4] = np.where(part == counts[which] - 1, highs[which], pieces[at])
    items[:, 5] = part
    return items, counts
