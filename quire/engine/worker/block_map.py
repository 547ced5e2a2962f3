"""Overview of block states for display, with neighbouring blocks grouped into cells.

Updates are incremental and process a bounded number of blocks per call: the pool of a large GPU has 100,000 blocks, and
drawing the map must not delay the engine loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from itertools import groupby, islice
from typing import NamedTuple

from quire.core.cache import NULL_BLOCK_ID, KVCacheBlock
from quire.core.kv_cache import KVCacheManager
from quire.core.scheduler import Scheduler

FIRST_BLOCK = NULL_BLOCK_ID + 1


class BlockState(IntEnum):
    """Display state of a block. Each block has exactly one."""

    FREE = 0  # content undefined
    CACHED = 1  # held by no request; can be matched until it is taken
    IN_USE = 2  # held by one request
    SHARED = 3  # held by two or more requests
    PINNED = 4  # held by pins only


_FREE, _CACHED, _IN_USE, _SHARED, _PINNED = BlockState  # module globals: a map reads them 100,000 times


class CellRun(NamedTuple):
    """A run of consecutive cells with equal counts.

    The other blocks of each cell are free. The last cell of a map may hold fewer blocks.
    """

    num_cells: int
    num_cached: int
    num_in_use: int
    num_shared: int
    num_pinned: int


class HeldRun(NamedTuple):
    """Consecutive blocks with the same number of holders. Blocks without holders are kept by pins."""

    first: int
    num_blocks: int
    num_holders: int


def state_of(block: KVCacheBlock, num_pins: int) -> BlockState:
    """Display state of a block. `num_pins` of its references are pins."""
    num_holders = block.ref_count - num_pins
    if num_holders > 1:
        return _SHARED
    if num_holders == 1:
        return _IN_USE
    if num_pins:
        return _PINNED
    return _FREE if block.parent_key is None else _CACHED


class BlockMap:
    """Block states by cell. The pool records changed blocks from construction until `close`."""

    def __init__(self, cache: KVCacheManager, max_cells: int, min_per_cell: int = 1) -> None:
        self._cache = cache
        self.max_cells = max_cells
        self.min_per_cell = min_per_cell
        self.num_blocks = cache.pool.num_usable
        self.blocks_per_cell = max(-(-self.num_blocks // max_cells), min_per_cell)
        num_cells = -(-self.num_blocks // self.blocks_per_cell)
        self._states = bytearray(len(cache.pool.blocks))
        self._holders = [0] * len(cache.pool.blocks)
        self._counts = [[0] * len(BlockState) for _ in range(num_cells)]  # of free blocks: less than at the start
        self._by_holders = Counter({0: len(self._holders)})  # number of blocks by their number of holders
        self._held: set[int] = set()  # blocks that a request holds or a pin keeps
        self._shared: set[int] = set()
        self._next = FIRST_BLOCK  # first block of the initial scan that has not been read yet
        cache.pool.changed = set()

    def close(self) -> None:
        self._cache.pool.changed = None

    @property
    def num_pending(self) -> int:
        """Number of blocks that were not read yet or have changed since."""
        return len(self._cache.pool.blocks) - self._next + len(self._cache.pool.changed or ())

    @property
    def max_holders(self) -> int:
        """Largest number of requests that hold one block."""
        return max((holders for holders, count in self._by_holders.items() if count), default=0)

    @property
    def totals(self) -> tuple[int, ...]:
        """Number of blocks, indexed by BlockState. Blocks that were not read yet count as free."""
        free, *others = map(sum, zip(*self._counts, strict=True))
        return (self.num_blocks + free, *others)

    def runs(self) -> tuple[CellRun, ...]:
        return tuple(CellRun(len(list(cells)), *counts[_CACHED:]) for counts, cells in groupby(self._counts))

    def held_runs(self, max_blocks: int) -> tuple[HeldRun, ...]:
        """Blocks that a request holds or a pin keeps, in order. If there are more than `max_blocks`: shared ones only.

        Cells do not show this: in a pool of 100,000 blocks a cell has 50, so a prefix that eight requests share would
        be a part of one cell.
        """
        chosen = self._held if len(self._held) <= max_blocks else set(islice(self._shared, max_blocks))
        return tuple(HeldRun(first, count, num_holders) for first, count, num_holders in _runs(chosen, self._holders))

    def update(self, max_blocks: int) -> None:
        """Read at most `max_blocks` blocks, changed blocks first."""
        changed = self._cache.pool.changed
        assert changed is not None, "another map was made, or this one is closed"
        todo = list(islice(changed, max_blocks))
        changed.difference_update(todo)
        end = min(self._next + max_blocks - len(todo), len(self._states))
        todo += range(self._next, end)
        self._next = end
        self._look(todo)

    def _look(self, block_ids: list[int]) -> None:
        blocks, states, holders = self._cache.pool.blocks, self._states, self._holders
        pinned = self._cache.pins.holders
        for block_id in block_ids:
            block = blocks[block_id]
            num_pins = pinned.get(block_id, 0)
            old, new = states[block_id], state_of(block, num_pins)
            num_holders = block.ref_count - num_pins
            if num_holders != holders[block_id]:
                self._by_holders[holders[block_id]] -= 1
                self._by_holders[num_holders] += 1
                holders[block_id] = num_holders
            if old != new:
                counts = self._counts[(block_id - FIRST_BLOCK) // self.blocks_per_cell]
                counts[old] -= 1
                counts[new] += 1
                states[block_id] = new
                self._sort(block_id, new)

    def _sort(self, block_id: int, state: BlockState) -> None:
        for blocks, is_in in ((self._held, state >= _IN_USE), (self._shared, state == _SHARED)):
            if is_in:
                blocks.add(block_id)
            else:
                blocks.discard(block_id)


def held_ranges(scheduler: Scheduler, request_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Blocks held by these requests, as sorted (first, count) ranges.

    A request that is not running holds none.
    """
    held: set[int] = set()
    for request_id in request_ids:
        request = scheduler.requests.get(request_id)
        if request is not None:
            held.update(request.block_table)
    return tuple((first, count) for first, count, _ in _runs(held))


def _runs(block_ids: set[int], values: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """Consecutive blocks with equal values, in order: the first one, their number and the value."""
    runs: list[tuple[int, int, int]] = []
    for block_id in sorted(block_ids):
        value = 0 if values is None else values[block_id]
        first, count, last = runs[-1] if runs else (FIRST_BLOCK, 0, value)
        if count and first + count == block_id and last == value:
            runs[-1] = first, count + 1, value
        else:
            runs.append((block_id, 1, value))
    return runs
