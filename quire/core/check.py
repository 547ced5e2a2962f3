"""Checks of the core's invariants: block ownership, the prefix tree, and all counters.

`check_scheduler` checks all of them in one call; the world simulation calls it after every event. `audit` does the same
in slices of bounded work, for an idle worker. Both change nothing.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import NoReturn, TypeVar

from quire.core.cache.context import NULL_BLOCK_ID, KVCacheBlock, Linked, StateSlot, WindowBlock
from quire.core.cache.prefix import Pool, PrefixTree, StatePool
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.levels import Levels, PrefixRead, ReadState
from quire.core.levels.lower_level import LowerLevel
from quire.core.memory import Memory, PinBoard
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.step import MemoryKind
from quire.errors import InvariantViolation

T = TypeVar("T")
B = TypeVar("B", bound=Linked)

_state = attrgetter(
    "state",
    "batch_index",
    "block_table",
    "num_computed",
    "num_planned",
    "num_in_flight",
    "num_published",
    "window_table",
    "live_states",
    "snapshots",
    "state_slot",
)
_tokens, _request_id = attrgetter("tokens"), attrgetter("request_id")
_block_id, _block_table = attrgetter("block_id"), attrgetter("block_table")
_IDLE: tuple[object, ...]  # `_state` of a waiting request
_IDLE = (RequestState.WAITING, None, [], 0, 0, 0, 0, [], (), [], None)


def check_scheduler(scheduler: Scheduler, roots: Container[bytes] | None = None) -> None:
    """Raise `InvariantViolation` if any invariant is broken. O(blocks + requests).

    If `roots` holds the root keys of all salts in use, also checks that every chain in the tree starts at one of them.
    """
    _exhaust(audit(scheduler, roots))


def audit(
    scheduler: Scheduler, roots: Container[bytes] | None = None, *, max_blocks: int = sys.maxsize
) -> Iterator[None]:
    """`check_scheduler` in slices: yields after every `max_blocks` blocks, or as many requests.

    The scheduler must not change before the audit ends: after any change, drop the audit and start a new one.
    """
    cache = scheduler.cache
    holders = [0] * len(cache.pool.blocks)  # references to each block counted so far
    for piece in _slices(chain.from_iterable(map(_block_table, scheduler.running.requests)), max_blocks):
        _count(holders, piece)
        yield
    yield from _check_running_set(scheduler, holders, max_blocks)
    yield from _check_waiting(scheduler, max_blocks)
    for plan in scheduler.in_flight:
        _count(holders, [copy.source for copy in plan.copies])
    _count(holders, [block.block_id for load in cache.levels.loads.values() for block in load.nodes])
    yield from _check_cache(cache, holders, roots, max_blocks)
    if cache.memory.is_hybrid:
        check_hybrid(scheduler, cache.memory)
        yield
    yield from check_levels(scheduler, cache.levels, max_blocks)


def check_cache(cache: KVCacheManager, held: Iterable[int], roots: Container[bytes] | None = None) -> None:
    """Check pool, tree and pins.

    `held`: ids of the blocks that are held by others than pins, one entry per reference.
    """
    holders = [0] * len(cache.pool.blocks)
    _count(holders, held)
    _exhaust(_check_cache(cache, holders, roots, sys.maxsize))


def _exhaust(slices: Iterator[None]) -> None:
    deque(slices, maxlen=0)


def _slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    piece = list(islice(iterator, size))
    while piece:
        yield piece
        piece = list(islice(iterator, size)) if len(piece) == size else []


def _count(holders: list[int], block_ids: Iterable[int]) -> None:
    try:
        for block_id in block_ids:
            holders[block_id] += 1
    except IndexError:
        _fail(f"a held block id is not below {len(holders)}")


# Requests


def _check_running_set(scheduler: Scheduler, tables: Sequence[int], size: int) -> Iterator[None]:
    """Check all running requests. `tables`: how often each block occurs in block tables."""
    promised: dict[tuple[int, int], int] = {}  # a plain dict: creating a Counter takes longer than the rest of this
    for plan in scheduler.in_flight:
        for sequence in plan.slices:
            if sequence.wants_token:
                owner = sequence.request_id, sequence.epoch
                promised[owner] = promised.get(owner, 0) + sequence.num_sampled
    running = scheduler.running.requests
    batch_indices = list(scheduler.running.free_batch_indices)
    num_seen = 0
    for request in running:
        _check_running(request, scheduler)
        if request.num_in_flight != promised.get((request.request_id, request.epoch), 0):
            _fail(f"{request!r} counts {request.num_in_flight} samples in flight; the plans in flight differ")
        assert request.batch_index is not None
        batch_indices.append(request.batch_index)
        # Tokens before `kv_start` may be computed again, but their blocks are not written.
        first_written = max(request.num_computed, request.kv_start) // scheduler.cache.block_size
        table = request.block_table
        parent_key: bytes | None = None
        for start in range(0, len(table), size):
            piece = table[start : start + size]
            parent_key = _check_table(request, piece, parent_key, scheduler.cache)
            for block_id in piece[max(first_written - start, 0) :]:
                if tables[block_id] != 1:
                    _fail(f"block {block_id} is written by one request and held by {tables[block_id]}")
            num_seen += len(piece)
            if num_seen >= size:
                num_seen = 0
                yield
    if sorted(batch_indices) != list(range(scheduler.running.max_num_seqs)):
        _fail(f"batch rows are not each free or held once: {sorted(batch_indices)}")
    order = [(request.urgency, request.sequence) for request in running]
    if order != sorted(order):
        _fail(f"running requests are out of order: {order}")


def _check_running(request: Request, scheduler: Scheduler) -> None:
    """Check the state and the counters of a running request."""
    block_size = scheduler.cache.block_size
    if request.state is not RequestState.RUNNING or request.batch_index is None:
        _fail(f"{request!r} is in the running set")
    if not 0 <= request.num_computed <= request.num_planned <= request.num_tokens <= request.token_limit:
        _fail(f"{request!r} has counts out of order")
    if len(request.block_table) * block_size < request.num_planned:
        _fail(f"{request!r} has a block table shorter than its planned tokens")
    if request.num_published > max(request.num_computed, request.kv_start) // block_size:
        _fail(f"{request!r} published blocks it has not computed")


def _check_table(
    request: Request, table: Sequence[int], parent_key: bytes | None, cache: KVCacheManager
) -> bytes | None:
    """Check a part of a block table, and return the key of its last block.

    Each published block must follow the block before it, or a twin of that block. `parent_key` is the key of the block
    before this part.
    """
    blocks = cache.pool.blocks
    for block_id in table:
        block = blocks[block_id]
        if block.parent_key is not None and parent_key not in (None, block.parent_key):
            _fail(f"{request!r} holds {block!r} but not the block that it follows")
        parent_key = block.key if block.key is not None else b"nothing follows"
    return parent_key


def _check_waiting(scheduler: Scheduler, size: int) -> Iterator[None]:
    """Check that waiting requests hold nothing, and that each live request either runs or waits."""
    num_tokens = 0
    for piece in _slices(scheduler.waiting, size):
        if list(map(_state, piece)) != [_IDLE] * len(piece):
            busy = [(request, _state(request)) for request in piece if _state(request) != _IDLE]
            _fail(f"waiting requests have the state or the counts of a running one: {busy}")
        num_tokens += sum(map(len, map(_tokens, piece)))
        _check_alive(scheduler, piece)
        yield
    if scheduler.waiting.num_tokens != num_tokens:
        _fail(f"the queue counts {scheduler.waiting.num_tokens} tokens, its requests have {num_tokens}")
    _check_alive(scheduler, scheduler.running.requests)  # each id maps to one request, so none is counted twice
    num_found = len(scheduler.running) + len(scheduler.waiting)
    if num_found != len(scheduler.requests):
        _fail(f"{num_found} requests run or wait, and {len(scheduler.requests)} are alive")


def _check_alive(scheduler: Scheduler, requests: list[Request]) -> None:
    known = list(map(scheduler.requests.get, map(_request_id, requests)))
    if known != requests:
        _fail(f"requests in the sets differ from the live requests of the same ids: {requests} and {known}")


# The cache


def _check_cache(
    cache: KVCacheManager, holders: list[int], roots: Container[bytes] | None, size: int
) -> Iterator[None]:
    """Check pool, tree and pins.

    `holders`: references to each block, without pins; pins are added here.
    """
    if cache.pins or cache.pins.holders or cache.pins.owners:
        yield from _check_pins(cache.pins, holders, size)
    check_content = partial(_check_published, tree=cache.tree)
    num_published = yield from _check_pool(cache.pool, holders, size, check_content)
    num_published += cache.pool.blocks[NULL_BLOCK_ID].is_published  # an error, found when the tree is counted
    yield from _check_tree(cache.tree, num_published, roots, size)


def _check_pool(
    pool: Pool[B], holders: Sequence[int], size: int, check_content: Callable[[B], None]
) -> Generator[None, None, int]:
    """Check references, free lists and counters of a pool. Returns the number of blocks with content."""
    is_free = bytearray(len(holders))
    yield from _mark_free(pool, is_free, size)
    if is_free[NULL_BLOCK_ID] or holders[NULL_BLOCK_ID]:
        _fail(f"the null block was allocated: {pool.blocks[NULL_BLOCK_ID]!r}")
    num_cached = num_published = num_shared = 0
    for start in range(NULL_BLOCK_ID + 1, len(holders), size):
        piece = slice(start, start + size)
        for block, num_holders, is_in_list in zip(pool.blocks[piece], holders[piece], is_free[piece], strict=True):
            ref_count = block.ref_count
            if ref_count != num_holders:
                _fail(f"{block!r} has {num_holders} holders")
            if (ref_count == 0) != is_in_list:
                _fail(f"{block!r} is {'' if is_in_list else 'not '}in the free list")
            if ref_count > 1:
                num_shared += 1
            if block.parent_key is not None:
                num_published += 1
                if ref_count == 0:
                    num_cached += 1
            check_content(block)
        yield
    if (pool.num_cached, pool.num_shared) != (num_cached, num_shared):
        _fail(f"{pool.stats()} counts wrong: cached {num_cached}, shared {num_shared}")
    return num_published


def _check_pins(pins: PinBoard, holders: list[int], size: int) -> Iterator[None]:
    """Check the counters of the pin board, and add the pinned blocks to `holders`."""
    pinned = [0] * len(holders)
    num_held = 0
    for piece in _slices(map(_block_id, chain.from_iterable(pin.held.blocks for pin in pins)), size):
        for block_id in piece:
            holders[block_id] += 1
            pinned[block_id] += 1
        num_held += len(piece)
        yield
    for entries in _slices(pins.holders.items(), size):
        for block_id, num_pins in entries:
            if not num_pins or pinned[block_id] != num_pins:
                _fail(f"block {block_id} is held by {pinned[block_id]} pins; the board counts {num_pins}")
            num_held -= num_pins
        yield
    if num_held or pins.num_blocks > pins.max_blocks:
        _fail(f"pins hold {pins.num_blocks} blocks of at most {pins.max_blocks}; {num_held} are not counted")
    num_blocks = dict.fromkeys(pins.owners, 0)
    for pin in pins:
        num_blocks[pin.owner] = num_blocks.get(pin.owner, 0) + len(pin.held.blocks)
    counted = {name: owner.num_blocks for name, owner in pins.owners.items()}
    if counted != num_blocks or sum(len(owner.pins) for owner in pins.owners.values()) != len(pins):
        _fail(f"owners hold {num_blocks} blocks through their pins; the board counts {pins.owners}")


def _mark_free(pool: Pool[B], is_free: bytearray, size: int) -> Iterator[None]:
    """Walk the free lists and set `is_free`.

    Stops at the number of blocks: a corrupt list may have a cycle.
    """
    for free in pool.lists:
        num_before, num_found = is_free.count(1), 0
        for piece in _slices(islice(free, len(is_free)), size):
            for block in piece:
                is_free[block.block_id] = 1
                if block.next_free is None or block.next_free.prev_free is not block:
                    _fail(f"the free list is corrupt: the successor of {block!r} does not link back to it")
            num_found += len(piece)
            yield
        if not num_found == len(free) == is_free.count(1) - num_before:
            _fail(f"the free list is corrupt: {num_found} entries, {is_free.count(1)} blocks, length {len(free)}")
    if isinstance(pool, StatePool):  # cached snapshots are in its heap
        for slot in pool.blocks:
            if slot.is_published and not slot.ref_count:
                is_free[slot.block_id] = 1


def _check_published(block: KVCacheBlock, tree: PrefixTree) -> None:
    if block.parent_key is None:
        if block.key is not None or block.tokens or block.twins or block.last_child is not None:
            _fail(f"{block!r} is not published but has content")
        return
    if block.key is None:
        if not 0 < block.num_tokens < tree.block_size:
            _fail(f"{block!r} is published as a tail of {block.num_tokens} tokens")
        return
    if block.num_tokens != tree.block_size:
        _fail(f"{block!r} is published as a full block of {block.num_tokens} tokens")
    indexed = tree.find(block.key)
    if indexed is not block:
        if indexed is None or block not in (indexed.twins or ()):
            _fail(f"{block!r} is published but not in the index")
        if (indexed.tokens, indexed.parent_key) != (block.tokens, block.parent_key):
            _fail(f"{block!r} and its twin {indexed!r} differ")
    if block.ref_count == 0 and (indexed is not block or block.twins):
        _fail(f"{block!r} is free and cached although another block has the same content")
    child = block.last_child
    if child is not None and (child.parent_key != block.key or child.key is None or tree.find(child.key) is not child):
        _fail(f"{block!r} has {child!r} as its last child, which is not a full block after it")


def _check_tree(tree: PrefixTree, num_published: int, roots: Container[bytes] | None, size: int) -> Iterator[None]:
    """Check that every block is reachable once, in sorted order, with the key of its content."""
    num_reached = num_full = 0
    pause = size
    find, digest = tree.find, tree.digest
    for parent_key, children in tree.positions():
        if roots is not None and parent_key not in roots and find(parent_key) is None:
            _fail(f"{list(children)} follow a block that is not in the tree")
        previous = None
        for block in children:
            if block.parent_key != parent_key or (previous is not None and previous >= block.tokens):
                _fail(f"{block!r} is misplaced among its siblings")
            previous = block.tokens
            num_reached += 1 + len(block.twins or ())
            if block.key is not None:
                num_full += 1
                if block.key != digest(parent_key, previous):
                    _fail(f"{block!r} has a key that does not match its content")
                if find(block.key) is not block:
                    _fail(f"{block!r} is among the children but not in the index")
            if num_reached >= pause:
                pause = num_reached + size
                yield
    if (num_reached, num_full) != (num_published, len(tree)):
        _fail(f"tree reaches {num_reached} blocks, {num_full} full; {num_published} are published, {len(tree)} indexed")


def check_hybrid(scheduler: Scheduler, memory: Memory) -> None:
    """Raise `InvariantViolation` if an invariant is broken. O(blocks + states + requests)."""
    held = [pin.held for pin in scheduler.cache.pins]
    held += [load.held for load in scheduler.cache.levels.loads.values()]
    tables = _check_window_tables(scheduler) if memory.windows.is_used else Counter()
    tables.update(copy.source for plan in scheduler.in_flight for copy in plan.window_copies)
    tables.update(block.block_id for one in held for block in one.windows)
    _check_whole_pool(memory.windows.pool, tables, _check_window)
    for node in scheduler.cache.pool.blocks:
        if node.window is not None and node.window.node is not node:
            _fail(f"{node!r} has a window block that is not attached to it")
    slots = _check_states(scheduler) if memory.states.is_used else Counter()
    slots.update(slot.block_id for one in held for slot in one.states)
    pool = memory.states.pool
    _check_whole_pool(pool, slots, partial(_check_snapshot, pool=pool))
    num_published = sum(slot.is_published for slot in pool.blocks)
    if pool.num_snapshots != num_published:
        _fail(f"{num_published} states are published, the pool counts {pool.num_snapshots}")


def _check_whole_pool(pool: Pool[B], held: Counter[int], check_content: Callable[[B], None]) -> None:
    _exhaust(_check_pool(pool, [held[block.block_id] for block in pool.blocks], sys.maxsize, check_content))


def _check_window(block: WindowBlock) -> None:
    node = block.node
    if node is not None and (node.window is not block or node.parent_key is None):
        _fail(f"{block!r} is attached to a block that is not in the tree or has another")
    if block.parent_key != (None if node is None else node.parent_key):
        _fail(f"{block!r} does not follow the same block as its node")


def _check_snapshot(slot: StateSlot, pool: StatePool) -> None:
    if slot.parent_key is not None and pool.at(slot.parent_key).get(slot.run) is not slot:
        _fail(f"{slot!r} is published but not in the index")


def _check_window_tables(scheduler: Scheduler) -> Counter[int]:
    """Check the window tables of running requests, and count the holders of each block."""
    size, windows = scheduler.cache.block_size, scheduler.cache.memory.windows
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


def _check_states(scheduler: Scheduler) -> Counter[int]:
    """Check the states of running requests, and count the holders of each slot."""
    holders: Counter[int] = Counter()
    for request in scheduler.running:
        live = request.live_states
        if len(live) != scheduler.cache.memory.states.num_live or any(slot.is_published for slot in live):
            _fail(f"{request!r} has live states {live}")
        holders.update(slot.block_id for slot in (*live, *request.snapshots))
        slot = request.state_slot
        if slot is None:
            if request.num_planned:
                _fail(f"{request!r} has computed tokens and no state")
        elif slot.position != request.num_planned or slot not in (*live, *request.snapshots):
            _fail(f"{request!r} continues from {slot!r}")
    return holders


def check_levels(scheduler: Scheduler, levels: Levels, size: int) -> Iterator[None]:
    """Raise `InvariantViolation` if an invariant is broken. Yields after every `size` stored pieces."""
    loading: Counter[int] = Counter()  # by identity: content may be lost and saved again while it is loaded
    buffers: Counter[MemoryKind] = Counter()
    for load in levels.loads.values():
        if not load.is_void:
            loading.update(map(id, load.reach.pieces))
        for stored, read_id in zip(load.reach.pieces, load.read_ids, strict=True):
            buffers[stored.content.kind] += read_id > 0
    for read in levels.reads.values():
        if read.state is ReadState.READY:
            buffers.update(content.kind for content in read.pieces)
        elif read.state is ReadState.READING:
            buffers.update(read.kinds)
    if [buffers[kind] for kind in MemoryKind] != levels.num_buffers:
        _fail(f"{levels.num_buffers} buffers are counted for reads of {buffers}")
    if any(number > limit for number, limit in zip(levels.num_buffers, levels.max_buffers, strict=True)):
        _fail(f"reads use {levels.num_buffers} buffers, of {levels.max_buffers}")
    for level in levels.levels:
        yield from _check_level(level, loading, size)
        num_pending = Counter(content.kind for content, to in levels.saves.pending.items() if level.level in to)
        if [num_pending[kind] for kind in MemoryKind] != level.num_reserved:
            _fail(f"{level.level} reserves {level.num_reserved} slots for saves of {num_pending}")
    for request in scheduler.waiting.load_waiters:
        load_id = scheduler.waiting.load_waiters.group_of(request)
        awaited = levels.loads.get(load_id) or levels.reads.get(load_id)
        is_ready = isinstance(awaited, PrefixRead) and awaited.state is ReadState.READY
        if awaited is None or awaited.is_abandoned or is_ready:
            _fail(f"{request!r} waits for {awaited!r}, whose end it will not be told")
    yield


def _check_level(level: LowerLevel, loading: Mapping[int, int], size: int) -> Iterator[None]:
    """Check the bytes of a level, and the loads that its pieces count. `loading`: loads in flight by id of a piece."""
    num_bytes = 0
    for number, stored in enumerate(level, 1):
        num_bytes += level.sizes[stored.content.kind]
        if stored.num_loads != loading.get(id(stored), 0):
            _fail(f"{stored!r} counts {stored.num_loads} loads")
        if number % size == 0:
            yield
    if num_bytes != level.num_bytes:
        _fail(f"{level.level} counts {level.num_bytes} bytes, and stores {num_bytes}")
    for kind in MemoryKind:
        count, reserved = len(level.pieces(kind)), level.num_reserved
        if level.limits is not None and count + reserved[kind] > level.limits[kind]:
            _fail(f"{level.level} has {count} {kind.name} and {reserved} reserved, of {level.limits}")


def _fail(message: str) -> NoReturn:
    raise InvariantViolation(message)
