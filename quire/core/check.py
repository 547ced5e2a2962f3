"""The laws of the core, checked from outside: who holds what, what is findable, and that every count agrees.

The simulator calls this after every event. A server may call it when idle: it reads everything and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NoReturn

from quire.core.block import NULL_BLOCK_ID, KVCacheBlock
from quire.core.kv_cache import KVCacheManager
from quire.core.prefix import PrefixTree
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.errors import InvariantViolation

_state = attrgetter("state", "slot", "block_table", "num_computed", "num_planned", "num_in_flight", "num_published")
_tokens, _request_id = attrgetter("tokens"), attrgetter("request_id")
_IDLE: tuple[object, ...] = (RequestState.WAITING, None, [], 0, 0, 0, 0)  # of a request that waits


def check_scheduler(scheduler: Scheduler, roots: Container[bytes] | None = None) -> None:
    """Raise `InvariantViolation` if any law is broken. O(blocks + requests).

    With the roots of all salts in use, it also checks that every chain in the tree begins at one of them.
    """
    cache = scheduler.cache
    running, waiting = list(scheduler.running), list(scheduler.waiting)  # once: this runs after every event of a world
    held = list(chain.from_iterable([request.block_table for request in running]))
    tables = Counter(held)
    for plan in scheduler.in_flight:
        held += [copy.source for copy in plan.copies]
    for pin in cache.pins:
        held += [block.block_id for block in pin.blocks]
    check_cache(cache, Counter(held), roots)

    _check_running_set(scheduler, running, tables)
    if list(map(_state, waiting)) != [_IDLE] * len(waiting):
        busy = [(request, _state(request)) for request in waiting if _state(request) != _IDLE]
        _fail(f"waiting but not idle, or with counts of a running request: {busy}")
    num_tokens = sum(map(len, map(_tokens, waiting)))
    if scheduler.waiting.num_tokens != num_tokens:
        _fail(f"the queue counts {scheduler.waiting.num_tokens} tokens of {num_tokens}")
    alive = [*map(_request_id, running), *map(_request_id, waiting)]
    if len(alive) != len(scheduler.alive) or set(alive) != set(scheduler.alive):
        _fail(f"requests are not each running or waiting: {sorted(alive)} against {sorted(scheduler.alive)}")


def _check_running_set(scheduler: Scheduler, running: Sequence[Request], tables: Counter[int]) -> None:
    """`tables`: how often each block stands in one."""
    cache = scheduler.cache
    promised = Counter(
        [(piece.request_id, piece.epoch) for plan in scheduler.in_flight for piece in plan.slices if piece.wants_token]
    )
    slots = list(scheduler.running.free_slots)
    writers: list[int] = []
    for request in running:
        _check_running(request, cache)
        if request.num_in_flight != promised.get((request.request_id, request.epoch), 0):
            _fail(f"{request!r} has samples in flight that are not its own")
        assert request.slot is not None
        slots.append(request.slot)
        writers += request.block_table[request.num_computed // cache.block_size :]
    for block_id in writers:
        if tables[block_id] != 1:
            _fail(f"block {block_id} is written by one request and held by {tables[block_id]}")
    if sorted(slots) != list(range(scheduler.running.max_seqs)):
        _fail(f"slots are not each free or held once: {sorted(slots)}")
    order = [(request.urgency, request.sequence) for request in running]
    if order != sorted(order):
        _fail(f"running requests are out of order: {order}")


def check_cache(cache: KVCacheManager, holders: Counter[int], roots: Container[bytes] | None = None) -> None:
    """The pool and the tree, given how often each block is held."""
    pool, tree = cache.pool, cache.tree
    free = [block.block_id for block in pool.free]
    is_free = set(free)
    if len(free) != len(pool.free) or len(is_free) != len(free):
        _fail(f"the free list is corrupt: {free}")
    if NULL_BLOCK_ID in is_free or NULL_BLOCK_ID in holders:
        _fail("the null block was handed out")
    num_cached = num_shared = 0
    num_published = int(pool.blocks[NULL_BLOCK_ID].parent_key is not None)  # then the tree will not reach it
    num_holders = holders.get
    for block in islice(pool.blocks, NULL_BLOCK_ID + 1, None):
        ref_count = block.ref_count
        if ref_count != num_holders(block.block_id, 0):
            _fail(f"{block!r} has {holders[block.block_id]} holders")
        if (ref_count == 0) != (block.block_id in is_free):
            _fail(f"{block!r} is {'not ' if ref_count == 0 else ''}in the free list")
        if ref_count > 1:
            num_shared += 1
        if block.parent_key is not None:
            num_published += 1
            if ref_count == 0:
                num_cached += 1
            _check_published(block, tree)
        elif block.key is not None or block.tokens or block.twins:
            _fail(f"{block!r} is not published but says what it contains")
    stats = pool.stats()
    if (stats.num_cached, stats.num_shared) != (num_cached, num_shared):
        _fail(f"{stats} counts wrong: cached {num_cached}, shared {num_shared}")
    pinned = {block.block_id for pin in cache.pins for block in pin.blocks}
    if cache.pins.num_blocks != len(pinned) or len(pinned) > cache.pins.max_blocks:
        _fail(f"pins hold {cache.pins.num_blocks} blocks of at most {cache.pins.max_blocks}")
    _check_tree(tree, num_published, roots)


def _check_published(block: KVCacheBlock, tree: PrefixTree) -> None:
    if block.ref_count == 0 and tree.is_redundant(block):
        _fail(f"{block!r} is free and remembered though its content stands elsewhere")
    assert block.parent_key is not None
    if block.key is None:
        if not 0 < block.num_tokens < tree.block_size:
            _fail(f"{block!r} is a tail of {block.num_tokens} tokens")
        return
    if block.num_tokens != tree.block_size:
        _fail(f"{block!r} is full with {block.num_tokens} tokens")
    standing = tree.standing(block.key)
    if standing is None or (standing is not block and block not in (standing.twins or ())):
        _fail(f"{block!r} is published but not at its position")
    if (standing.tokens, standing.parent_key) != (block.tokens, block.parent_key):
        _fail(f"{block!r} and its twin {standing!r} differ")


def _check_tree(tree: PrefixTree, num_published: int, roots: Container[bytes] | None) -> None:
    """Every position is reachable, in order, once, and named after its content."""
    num_reached = num_full = 0
    for parent_key, children in tree.positions():
        if tree.standing(parent_key) is None and roots is not None and parent_key not in roots:
            _fail(f"{list(children)} follow a position that is not there")
        previous = None
        for block in children:
            if block.parent_key != parent_key or (previous is not None and previous >= block.tokens):
                _fail(f"{block!r} is misplaced among its siblings")
            previous = block.tokens
            num_reached += 1 + len(block.twins or ())
            if block.key is not None:
                num_full += 1
                if block.key != tree.digest(parent_key, block.tokens):
                    _fail(f"{block!r} has a key that is not of its content")
                if tree.standing(block.key) is not block:
                    _fail(f"{block!r} stands among the children but not in the index")
    if (num_reached, num_full) != (num_published, len(tree)):
        _fail(f"tree reaches {num_reached} blocks, {num_full} full; {num_published} are published, {len(tree)} indexed")


def _check_running(request: Request, cache: KVCacheManager) -> None:
    if request.state is not RequestState.RUNNING or request.slot is None:
        _fail(f"{request!r} is among the running")
    if not 0 <= request.num_computed <= request.num_planned <= request.num_tokens <= request.token_limit:
        _fail(f"{request!r} has counts out of order")
    if len(request.block_table) * cache.block_size < request.num_planned:
        _fail(f"{request!r} has a table that does not cover its plan")
    if request.num_published > request.num_computed // cache.block_size:
        _fail(f"{request!r} published blocks it has not computed")
    # Who holds a position holds a twin of every position before it.
    parent_key = None
    for block_id in request.block_table:
        block = cache.pool.blocks[block_id]
        if block.parent_key is not None and parent_key not in (None, block.parent_key):
            _fail(f"{request!r} holds {block!r} but not what it follows")
        parent_key = block.key if block.key is not None else b"nothing follows"


def _fail(message: str) -> NoReturn:
    raise InvariantViolation(message)
