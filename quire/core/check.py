"""Checks of the core's invariants: block ownership, the prefix tree, and all counters.

`check_scheduler` checks all of them in one call; the world simulation calls it after every event. `audit` does the same
in slices of bounded work, for an idle worker. Both change nothing. Invariants are assertions, as in the rest of the
core: `python -O` switches them off.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import TypeVar

from quire.core.cache import NULL_BLOCK_ID, KVCacheBlock, Linked, Pool, PrefixTree, StatePool, StateSlot, WindowBlock
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
# `_state` of a waiting request
_IDLE: tuple[object, ...] = (RequestState.WAITING, None, [], 0, 0, 0, 0, [], (), [], None)


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
    try:
        yield from _audit(scheduler, roots, max_blocks)
    except AssertionError as error:
        raise InvariantViolation(str(error)) from None


def _audit(scheduler: Scheduler, roots: Container[bytes] | None, max_blocks: int) -> Iterator[None]:
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
    yield from audit_cache(cache, holders, roots, max_blocks)
    if cache.memory.is_hybrid:
        check_hybrid(scheduler, cache.memory)
        yield
    yield from check_levels(scheduler, cache.levels, max_blocks)


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
        raise AssertionError(f"a held block id is not below {len(holders)}") from None


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
        num_promised = promised.get((request.request_id, request.epoch), 0)
        assert request.num_in_flight == num_promised, f"{num_promised} samples of {request!r} are in plans in flight"
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
                assert tables[block_id] == 1, f"block {block_id} is written, and held by {tables[block_id]} requests"
            num_seen += len(piece)
            if num_seen >= size:
                num_seen = 0
                yield
    rows = sorted(batch_indices)
    assert rows == list(range(scheduler.running.max_num_seqs)), f"batch rows are not each free or held once: {rows}"
    order = [(request.urgency, request.sequence) for request in running]
    assert order == sorted(order), f"running requests are out of order: {order}"


def _check_running(request: Request, scheduler: Scheduler) -> None:
    """Check the state and the counters of a running request."""
    block_size = scheduler.cache.block_size
    assert request.state is RequestState.RUNNING, f"{request!r} is in the running set"
    counts = [0, request.num_computed, request.num_planned, request.num_tokens, request.token_limit]
    assert counts == sorted(counts), f"{request!r} has counts out of order"
    num_covered = len(request.block_table) * block_size
    assert num_covered >= request.num_planned, f"{request!r} has a block table shorter than its planned tokens"
    num_full = max(request.num_computed, request.kv_start) // block_size
    assert request.num_published <= num_full, f"{request!r} published blocks it has not computed"


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
        follows = block.parent_key is None or parent_key in (None, block.parent_key)
        assert follows, f"{request!r} holds {block!r} but not the block that it follows"
        parent_key = block.key if block.key is not None else b"nothing follows"
    return parent_key


def _check_waiting(scheduler: Scheduler, size: int) -> Iterator[None]:
    """Check that waiting requests hold nothing, and that each live request either runs or waits."""
    num_tokens = 0
    for piece in _slices(scheduler.waiting, size):
        busy = [(request, state) for request, state in zip(piece, map(_state, piece), strict=True) if state != _IDLE]
        assert not busy, f"waiting requests have the state or the counts of a running one: {busy}"
        num_tokens += sum(map(len, map(_tokens, piece)))
        _check_alive(scheduler, piece)
        yield
    assert scheduler.waiting.num_tokens == num_tokens, f"{num_tokens} tokens wait, the queue counts differently"
    _check_alive(scheduler, scheduler.running.requests)  # each id maps to one request, so none is counted twice
    num_found, num_alive = len(scheduler.running) + len(scheduler.waiting), len(scheduler.requests)
    assert num_found == num_alive, f"{num_found} requests run or wait, and {num_alive} are alive"


def _check_alive(scheduler: Scheduler, requests: list[Request]) -> None:
    known = list(map(scheduler.requests.get, map(_request_id, requests)))
    assert known == requests, f"requests in the sets differ from the live requests of the same ids: {requests}, {known}"


# The cache


def audit_cache(
    cache: KVCacheManager, holders: list[int], roots: Container[bytes] | None = None, size: int = sys.maxsize
) -> Iterator[None]:
    """Check pool, tree and pins. Raises `AssertionError` if an invariant is broken.

    `holders`: references to each block, without pins; pins are added here.
    """
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
    for unused in _slices(islice(pool.unused(), len(holders)), size):  # a corrupt list may have a cycle
        for block in unused:
            is_free[block.block_id] = 1
            is_linked = block.next_free is None or block.next_free.prev_free is block
            assert is_linked, f"the free list is corrupt: the successor of {block!r} does not link back to it"
        yield
    assert is_free.count(1) == pool.num_free, f"{is_free.count(1)} blocks are free, the pool counts {pool.num_free}"
    assert holders[NULL_BLOCK_ID] + is_free[NULL_BLOCK_ID] == 0, "the null block was allocated"
    num_cached = num_published = num_shared = 0
    for start in range(NULL_BLOCK_ID + 1, len(holders), size):
        piece = slice(start, start + size)
        for block, num_holders, is_in_list in zip(pool.blocks[piece], holders[piece], is_free[piece], strict=True):
            ref_count = block.ref_count
            assert ref_count == num_holders, f"{block!r} has {num_holders} holders"
            assert (ref_count == 0) == is_in_list, f"{block!r} is {'' if is_in_list else 'not '}free"
            if ref_count > 1:
                num_shared += 1
            if block.parent_key is not None:
                num_published += 1
                if ref_count == 0:
                    num_cached += 1
            check_content(block)
        yield
    assert pool.num_cached == num_cached, f"{num_cached} blocks are cached, the pool counts {pool.num_cached}"
    assert pool.num_shared == num_shared, f"{num_shared} blocks are shared, the pool counts {pool.num_shared}"
    return num_published


def _check_pins(pins: PinBoard, holders: list[int], size: int) -> Iterator[None]:
    """Check the counts of the pin board, and add the pinned blocks to `holders`."""
    pinned = [0] * len(holders)
    for piece in _slices(map(_block_id, chain.from_iterable(pin.held.blocks for pin in pins)), size):
        for block_id in piece:
            holders[block_id] += 1
            pinned[block_id] += 1
        yield
    for entries in _slices(pins.holders.items(), size):
        for block_id, num_pins in entries:
            assert pinned[block_id] == num_pins > 0, f"{pinned[block_id]} pins of block {block_id}, not {num_pins}"
        yield
    num_pinned = len(pinned) - pinned.count(0)
    assert num_pinned == pins.num_blocks <= pins.max_blocks, f"{num_pinned} pinned blocks, not {pins.num_blocks}"
    num_blocks = dict.fromkeys(pins.owners, 0)
    for pin in pins:
        num_blocks[pin.owner] = num_blocks.get(pin.owner, 0) + len(pin.held.blocks)
    counted = {name: owner.num_blocks for name, owner in pins.owners.items()}
    assert counted == num_blocks, f"owners hold {num_blocks} blocks through their pins, the board counts {counted}"
    assert sum(len(owner.pins) for owner in pins.owners.values()) == len(pins), "owners have other pins than the board"


def _check_published(block: KVCacheBlock, tree: PrefixTree) -> None:
    if block.parent_key is None:
        is_empty = block.key is None and not block.tokens and not block.twins and block.last_child is None
        assert is_empty, f"{block!r} is not published but has content"
        return
    if block.key is None:
        assert 0 < block.num_tokens < tree.block_size, f"{block!r} is a tail of {block.num_tokens} tokens"
        return
    assert block.num_tokens == tree.block_size, f"{block!r} is a full block of {block.num_tokens} tokens"
    indexed = tree.find(block.key)
    if indexed is not block:
        assert indexed is not None, f"{block!r} is published but not in the index"
        assert block in indexed.twins, f"{block!r} is not in the index, and no twin of {indexed!r}"
        is_same = (indexed.tokens, indexed.parent_key) == (block.tokens, block.parent_key)
        assert is_same, f"{block!r} and its twin {indexed!r} differ"
    assert block.ref_count or not tree.is_redundant(block), f"{block!r} is cached, and so is a block with its content"
    child = block.last_child
    if child is not None:
        is_child = child.parent_key == block.key and child.key is not None and tree.find(child.key) is child
        assert is_child, f"{block!r} has {child!r} as its last child, which is not a full block after it"


def _check_tree(tree: PrefixTree, num_published: int, roots: Container[bytes] | None, size: int) -> Iterator[None]:
    """Check that every block is reachable once, in sorted order, with the key of its content."""
    num_reached = num_full = 0
    pause = size
    find, digest = tree.find, tree.digest
    for parent_key, children in tree.positions():
        is_reachable = roots is None or parent_key in roots or find(parent_key) is not None
        assert is_reachable, f"{list(children)} follow a block that is not in the tree"
        previous = b""
        for block in children:
            is_in_place = block.parent_key == parent_key and previous < block.tokens
            assert is_in_place, f"{block!r} is misplaced among its siblings"
            previous = block.tokens
            num_reached += 1 + len(block.twins)
            if block.key is not None:
                num_full += 1
                assert block.key == digest(parent_key, previous), f"{block!r} has a key that does not match its content"
                assert find(block.key) is block, f"{block!r} is among the children but not in the index"
            if num_reached >= pause:
                pause = num_reached + size
                yield
    assert num_reached == num_published, f"{num_published} blocks are published, the tree reaches {num_reached}"
    assert num_full == len(tree), f"{len(tree)} blocks are in the index, the tree reaches {num_full}"


def check_hybrid(scheduler: Scheduler, memory: Memory) -> None:
    """Check window blocks and states. O(blocks + states + requests)."""
    held = [pin.held for pin in scheduler.cache.pins]
    held += [load.held for load in scheduler.cache.levels.loads.values()]
    tables = _check_window_tables(scheduler) if memory.windows.is_used else Counter()
    tables.update(copy.source for plan in scheduler.in_flight for copy in plan.window_copies)
    tables.update(block.block_id for one in held for block in one.windows)
    _check_whole_pool(memory.windows.pool, tables, _check_window)
    for node in scheduler.cache.pool.blocks:
        assert node.window is None or node.window.node is node, f"the window block of {node!r} is not attached to it"
    slots = _check_states(scheduler) if memory.states.is_used else Counter()
    slots.update(slot.block_id for one in held for slot in one.states)
    pool = memory.states.pool
    _check_whole_pool(pool, slots, partial(_check_snapshot, pool=pool))
    num_published = sum(slot.is_published for slot in pool.blocks)
    assert pool.num_snapshots == num_published, f"{num_published} snapshots, the pool counts {pool.num_snapshots}"


def _check_whole_pool(pool: Pool[B], held: Counter[int], check_content: Callable[[B], None]) -> None:
    _exhaust(_check_pool(pool, [held[block.block_id] for block in pool.blocks], sys.maxsize, check_content))


def _check_window(block: WindowBlock) -> None:
    node = block.node
    is_attached = node is None or (node.window is block and node.parent_key is not None)
    assert is_attached, f"{block!r} is attached to a block that is not in the tree or has another"
    parent_key = None if node is None else node.parent_key
    assert block.parent_key == parent_key, f"{block!r} does not follow the same block as its node"


def _check_snapshot(slot: StateSlot, pool: StatePool) -> None:
    is_found = slot.parent_key is None or pool.at(slot.parent_key).get(slot.run) is slot
    assert is_found, f"{slot!r} is published but not in the index"


def _check_window_tables(scheduler: Scheduler) -> Counter[int]:
    """Check the window tables of running requests, and count the holders of each block."""
    size, windows = scheduler.cache.block_size, scheduler.cache.memory.windows
    holders: Counter[int] = Counter()
    writers: Counter[int] = Counter()
    for request in scheduler.running:
        table, num_passed = request.window_table, request.num_windows_passed
        assert not any(table[:num_passed]), f"{request!r} has a window table with passed blocks: {table}"
        assert all(table[num_passed:]), f"{request!r} has a window table with gaps: {table}"
        first = windows.first_block(request.num_planned)
        assert num_passed <= first, f"{request!r} released window blocks that its next token sees"
        assert len(table) * size >= request.num_planned, (
            f"{request!r} has a window table shorter than its planned tokens"
        )
        holders.update(table[num_passed:])
        writers.update(table[max(request.num_planned // size, num_passed) :])
    for block_id in writers:
        assert holders[block_id] == 1, f"window block {block_id} is written, and held by {holders[block_id]} requests"
    return holders


def _check_states(scheduler: Scheduler) -> Counter[int]:
    """Check the states of running requests, and count the holders of each slot."""
    holders: Counter[int] = Counter()
    num_live = scheduler.cache.memory.states.num_live
    for request in scheduler.running:
        live = request.live_states
        is_complete = len(live) == num_live and not any(slot.is_published for slot in live)
        assert is_complete, f"{request!r} has live states {live}"
        holders.update(slot.block_id for slot in (*live, *request.snapshots))
        slot = request.state_slot
        position = 0 if slot is None else slot.position
        assert position == request.num_planned, f"{request!r} continues from {slot!r}"
        assert slot is None or slot in (*live, *request.snapshots), f"{request!r} does not hold {slot!r}"
    return holders


def check_levels(scheduler: Scheduler, levels: Levels, size: int) -> Iterator[None]:
    """Check loads, reads and stored content. Yields after every `size` stored pieces."""
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
    in_use = [buffers[kind] for kind in MemoryKind]
    assert in_use == levels.num_buffers, f"{levels.num_buffers} buffers are counted for reads of {in_use}"
    is_within = all(number <= limit for number, limit in zip(in_use, levels.max_buffers, strict=True))
    assert is_within, f"reads use {in_use} buffers, of {levels.max_buffers}"
    for level in levels.levels:
        yield from _check_level(level, loading, size)
        num_pending = Counter(content.kind for content, to in levels.saves.pending.items() if level.level in to)
        is_reserved = [num_pending[kind] for kind in MemoryKind] == level.num_reserved
        assert is_reserved, f"{level.level} reserves {level.num_reserved} slots for saves of {num_pending}"
    for request in scheduler.waiting.load_waiters:
        load_id = scheduler.waiting.load_waiters.group_of(request)
        awaited = levels.loads.get(load_id) or levels.reads.get(load_id)
        is_ready = isinstance(awaited, PrefixRead) and awaited.state is ReadState.READY
        will_end = awaited is not None and not awaited.is_abandoned and not is_ready
        assert will_end, f"{request!r} waits for {awaited!r}, whose end it will not be told"
    yield


def _check_level(level: LowerLevel, loading: Mapping[int, int], size: int) -> Iterator[None]:
    """Check the bytes of a level, and the loads that its pieces count. `loading`: loads in flight by id of a piece."""
    num_bytes = 0
    for number, stored in enumerate(level, 1):
        num_bytes += level.sizes[stored.content.kind]
        assert stored.num_loads == loading.get(id(stored), 0), f"{stored!r} counts {stored.num_loads} loads"
        if number % size == 0:
            yield
    assert level.num_bytes == num_bytes, f"{level.level} counts {level.num_bytes} bytes, and stores {num_bytes}"
    if level.limits is None:
        return
    for kind in MemoryKind:
        num_used = len(level.pieces(kind)) + level.num_reserved[kind]
        assert num_used <= level.limits[kind], f"{level.level} has {num_used} {kind.name}, of {level.limits}"
