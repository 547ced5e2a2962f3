"""Tests that the block map equals a full count after any operations and any size of update."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request
from quire.engine.worker.block_map import BlockMap, BlockState, CellRun, HeldRun, held_ranges
from tests.core.helpers import Rig, compute, make_request, pin_tokens
from tests.core.test_machine import CacheMachine

FREE, CACHED, IN_USE, SHARED, PINNED = BlockState


def counted(cache: KVCacheManager, tables: list[list[int]]) -> list[BlockState]:
    """State of each block, computed from block tables and pins without reference counts."""
    holders = Counter(block_id for table in tables for block_id in table)
    pinned = {block.block_id for pin in cache.pins for block in pin.held.blocks}
    cached = {block.block_id for block in cache.pool.free if block.is_published}
    states = []
    for block_id in range(1, len(cache.pool.blocks)):
        if holders[block_id]:
            states.append(SHARED if holders[block_id] > 1 else IN_USE)
        else:
            states.append(PINNED if block_id in pinned else CACHED if block_id in cached else FREE)
    return states


def expand(block_map: BlockMap) -> list[tuple[int, ...]]:
    return [tuple(run[1:]) for run in block_map.runs() for _ in range(run.num_cells)]


def held_blocks(block_map: BlockMap, max_blocks: int) -> dict[int, int]:
    """Block id -> number of holders."""
    runs = block_map.held_runs(max_blocks)
    found = {block_id: run.num_holders for run in runs for block_id in range(run.first, run.first + run.num_blocks)}
    assert len(found) == sum(run.num_blocks for run in runs)
    return found


def cells(states: list[BlockState], size: int) -> list[tuple[int, ...]]:
    parts = [Counter(states[start : start + size]) for start in range(0, len(states), size)]
    return [(part[CACHED], part[IN_USE], part[SHARED], part[PINNED]) for part in parts]


class MapMachine(CacheMachine):
    """Eleven blocks in cells of three, updated three at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.map = BlockMap(self.cache, 4)

    @invariant()
    def the_map_is_correct(self) -> None:
        while self.map.num_pending:
            before = self.map.num_pending
            self.map.update(3)
            assert self.map.num_pending == max(before - 3, 0)
        tables = [request.block_table for request in self.requests]
        tables += [[copy.source] for copy in self.copies]
        states = counted(self.cache, tables)
        assert self.map.blocks_per_cell == 3
        assert expand(self.map) == cells(states, 3)
        assert self.map.totals == tuple(states.count(state) for state in BlockState)
        holders = Counter(block_id for table in tables for block_id in table)
        assert self.map.max_holders == max(holders.values(), default=0)
        held = {block_id: holders[block_id] for block_id, state in enumerate(states, 1) if state >= IN_USE}
        assert held_blocks(self.map, 100) == held
        if len(held) > 2:  # more than there is room for: shared blocks only
            shared = {block_id for block_id, count in held.items() if count > 1}
            found = held_blocks(self.map, 2)
            assert found.keys() <= shared
            assert len(found) == min(len(shared), 2)


TestMapMachine = MapMachine.TestCase
TestMapMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_runs_are_short_and_in_order() -> None:
    cache = KVCacheManager(17, 4)
    first, second = make_request(1, 20), make_request(2, 20)
    compute(cache, first)
    compute(cache, second)
    block_map = BlockMap(cache, 100)
    block_map.update(100)
    # The last token of a prompt is never taken from the cache, so the last block is not shared.
    assert block_map.runs() == (CellRun(4, 0, 0, 1, 0), CellRun(2, 0, 1, 0, 0), CellRun(10, 0, 0, 0, 0))
    assert block_map.held_runs(6) == (HeldRun(1, 4, 2), HeldRun(5, 2, 1))
    assert block_map.held_runs(5) == (HeldRun(1, 4, 2),)
    cache.release(first)
    cache.release(second)
    pin_tokens(cache, "mine", list(range(8)), "", 10)
    block_map.update(100)
    runs = (CellRun(2, 0, 0, 0, 1), CellRun(2, 1, 0, 0, 0), CellRun(1, 0, 0, 0, 0), CellRun(1, 1, 0, 0, 0))
    assert block_map.runs() == (*runs, CellRun(10, 0, 0, 0, 0))  # one of the two twins stays cached
    assert block_map.totals == (11, 3, 0, 0, 2)
    assert block_map.held_runs(100) == (HeldRun(1, 2, 0),)
    cache.clear()
    block_map.update(100)
    assert block_map.runs() == (CellRun(16, 0, 0, 0, 0),)


def test_a_large_pool_has_cells_of_several_blocks() -> None:
    block_map = BlockMap(KVCacheManager(100_001, 4), 2000)
    block_map.update(100_000)
    assert (block_map.blocks_per_cell, block_map.runs()) == (50, (CellRun(2000, 0, 0, 0, 0),))


def test_a_closed_map_records_no_changes() -> None:
    cache = KVCacheManager(17, 4)
    block_map = BlockMap(cache, 10)
    block_map.close()
    compute(cache, make_request(1, 20))
    assert cache.pool.changed is None


def test_held_ranges_are_the_blocks_of_requests() -> None:
    rig = Rig(num_blocks=33, block_size=4)
    first = rig.add(1, range(10), max_tokens=8)
    rig.step()
    rig.step()
    second = Request(2, [*range(8), 99, 98], parent=None)
    rig.scheduler.add(second, rig.now_ns)
    rig.step()
    for request in (first, second):
        ranges = held_ranges(rig.scheduler, [request.request_id])
        assert [b for start, size in ranges for b in range(start, start + size)] == sorted(request.block_table)
    together = held_ranges(rig.scheduler, [1, 2, 77])
    assert sum(size for _, size in together) == len({*first.block_table, *second.block_table})
    assert len(together) <= 2  # neighbouring blocks form one range
    pin_tokens(rig.cache, "mine", list(range(8)), "", 10)
    rig.run()
    assert held_ranges(rig.scheduler, [1, 2]) == ()
