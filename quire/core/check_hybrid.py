"""Checks of window blocks and recurrent states: holders, free lists, attachments, writers."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from quire.core.block import NULL_BLOCK_ID
from quire.core.hybrid import HybridMemory
from quire.core.scheduler import Scheduler
from quire.core.state_memory import StateMemory
from quire.core.state_pool import EMPTY_SLOT
from quire.core.window_memory import WindowMemory
from quire.errors import InvariantViolation


def check_hybrid(scheduler: Scheduler, hybrid: HybridMemory) -> None:
    """Raise `InvariantViolation` if an invariant is broken. O(blocks + states + requests)."""
    if hybrid.windows is not None:
        _check_windows(scheduler, hybrid.windows)
    if hybrid.states is not None:
        _check_states(scheduler, hybrid.states)
    for request in scheduler.waiting:
        if request.window_table or request.live_states or request.snapshots or request.state_slot is not None:
            _fail(f"{request!r} waits and holds window blocks or states")


def _check_windows(scheduler: Scheduler, windows: WindowMemory) -> None:
    pool = windows.pool
    holders = _check_window_tables(scheduler, windows)
    for plan in scheduler.in_flight:
        holders.update(copy.source for copy in plan.window_copies)
    for pin in scheduler.cache.pins:
        holders.update(block.block_id for block in pin.windows)
    if scheduler.cache.tiers is not None:
        for load in scheduler.cache.tiers.loads:
            holders.update(block.block_id for block in load.held_windows)
    free = list(pool.free())
    free_ids = {block.block_id for block in free}
    if len(free) != len(free_ids) or pool.num_free != len(free):
        _fail(f"the free lists of window blocks are corrupt: {len(free)} entries, {len(free_ids)} blocks")
    if holders[NULL_BLOCK_ID] or NULL_BLOCK_ID in free_ids:
        _fail("the null window block was allocated")
    for block in pool.blocks[NULL_BLOCK_ID + 1 :]:
        if block.ref_count != holders[block.block_id]:
            _fail(f"{block!r} has {holders[block.block_id]} holders")
        if (block.ref_count == 0) != (block.block_id in free_ids):
            _fail(f"{block!r} is free and held, or neither")
        if block.node is not None and (block.node.window is not block or not block.node.is_published):
            _fail(f"{block!r} is attached to a block that is not in the tree or has another")
    num_cached = sum(block.node is not None for block in free)
    if pool.num_cached != num_cached:
        _fail(f"{num_cached} window blocks are cached, the pool counts {pool.num_cached}")
    for node in scheduler.cache.pool.blocks:
        if node.window is not None and node.window.node is not node:
            _fail(f"{node!r} has a window block that is not attached to it")


def _check_window_tables(scheduler: Scheduler, windows: WindowMemory) -> Counter[int]:
    """Check the window tables of running requests, and count the holders of each block."""
    size = scheduler.cache.block_size
    holders: Counter[int] = Counter()
    writers: Counter[int] = Counter()
    for request in scheduler.running:
        table, num_passed = request.window_table, request.num_windows_passed
        if any(table[:num_passed]) or not all(table[num_passed:]):
            _fail(f"{request!r} has a window table with gaps: {table}")
        if num_passed > windows.first_block(request.num_planned):
            _fail(f"{request!r} released window blocks that its next token sees")
        if len(table) * size < request.num_planned:
            _fail(f"{request!r} has a window table shorter than its planned tokens")
        holders.update(table[num_passed:])
        writers.update(table[max(request.num_planned // size, num_passed) :])
    for block_id in writers:
        if holders[block_id] != 1:
            _fail(f"window block {block_id} is written by one request and held by {holders[block_id]}")
    return holders


def _check_states(scheduler: Scheduler, states: StateMemory) -> None:
    pool = states.pool
    holders: Counter[int] = Counter()
    for request in scheduler.running:
        live = [slot.slot_id for slot in request.live_states]
        if len(live) != states.num_live or any(slot.is_published for slot in request.live_states):
            _fail(f"{request!r} has live states {request.live_states}")
        holders.update(live)
        holders.update(slot.slot_id for slot in request.snapshots)
        slot = request.state_slot
        if slot is None:
            if request.num_planned:
                _fail(f"{request!r} has computed tokens and no state")
        elif slot.position != request.num_planned or slot not in (*request.live_states, *request.snapshots):
            _fail(f"{request!r} continues from {slot!r}")
    for pin in scheduler.cache.pins:
        holders.update([] if pin.state is None else [pin.state.slot_id])
    if scheduler.cache.tiers is not None:
        holders.update(slot.slot_id for load in scheduler.cache.tiers.loads for slot in load.held_states)
    num_cached = num_published = 0
    for slot in pool.slots[EMPTY_SLOT + 1 :]:
        if slot.ref_count != holders[slot.slot_id]:
            _fail(f"{slot!r} has {holders[slot.slot_id]} holders")
        if slot.parent_key is not None:
            num_published += 1
            num_cached += slot.ref_count == 0
            if (pool.at(slot.parent_key) or {}).get(slot.run) is not slot:
                _fail(f"{slot!r} is published but not in the index")
    num_free = sum(slot.ref_count == 0 for slot in pool.slots[EMPTY_SLOT + 1 :]) - num_cached
    counted = pool.num_cached, pool.num_snapshots, pool.num_available
    if counted != (num_cached, num_published, num_cached + num_free):
        _fail(f"states are counted wrong: {counted}, {num_cached} cached, {num_published} published, {num_free} free")
    if holders[EMPTY_SLOT]:
        _fail("the empty state was allocated")


def _fail(message: str) -> NoReturn:
    raise InvariantViolation(message)
