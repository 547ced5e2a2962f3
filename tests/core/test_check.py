"""Tests that the audit finds every violation, in one call or in slices, and that slices are bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.core.cache import KVCacheBlock, Linked
from quire.core.check import audit, check_scheduler
from quire.core.levels.levels import PrefixLoad
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.values import Level, SamplingParams
from quire.errors import InvariantViolation
from tests.core.helpers import Rig, pin_tokens
from tests.core.level_rig import TieredRig

NUM_BLOCKS = 400
SLICE = 8


def busy() -> Scheduler:
    """A scheduler with cached content, overlapping pins, twins, a step in flight, running and waiting requests."""
    rig = Rig(num_blocks=NUM_BLOCKS, max_num_seqs=3)
    for number, first in enumerate(range(0, 1000, 100)):  # ten finished requests: ten children of the root
        rig.add(number, range(first, first + 50), max_tokens=2)
    rig.run()
    cache = rig.scheduler.cache
    for number, first in enumerate(range(0, 500, 100)):
        assert pin_tokens(cache, f"owner-{number % 2}/{number}", list(range(first, first + 40)), "", 10**18)
        assert pin_tokens(cache, f"other/{number}", list(range(first, first + 20)), "", 10**18)
    computed_again = SamplingParams(max_tokens=20, prompt_logprobs=0)  # computed without the cache: makes twins
    rig.scheduler.add(Request(100, range(50), computed_again), rig.now_ns)
    for number, first in enumerate((0, 150, 250, 350)):
        rig.add(101 + number, range(first, first + 70), max_tokens=20)
    for _ in range(3):
        rig.step()
    rig.scheduler.schedule(rig.now_ns)  # stays in flight
    scheduler = rig.scheduler
    assert len(scheduler.running) == 3
    assert len(scheduler.waiting) == 2
    assert scheduler.in_flight
    assert any(block.twins for block in scheduler.cache.pool.blocks)
    return scheduler


def in_slices(scheduler: Scheduler, size: int = SLICE) -> int:
    """Run an audit to its end. Returns the number of slices."""
    return sum(1 for _ in audit(scheduler, max_blocks=size))


def cached(scheduler: Scheduler) -> list[KVCacheBlock]:
    return [block for block in scheduler.cache.pool.unused() if block.key is not None]


def swap_children(scheduler: Scheduler) -> None:
    """Swap two of the ten children of the root."""
    _, children = max(scheduler.cache.tree.positions(), key=lambda position: len(list(position[1])))
    blocks = children._blocks  # type: ignore[attr-defined]
    blocks[-1], blocks[-2] = blocks[-2], blocks[-1]


def break_ring(scheduler: Scheduler) -> None:
    """Make a cycle in the free list."""
    *_, before, last = scheduler.cache.pool.free
    last.next_free = before


def break_link(scheduler: Scheduler) -> None:
    *_, before, last = scheduler.cache.pool.free
    last.prev_free = before.prev_free


def lose_free_block(scheduler: Scheduler) -> None:
    scheduler.cache.pool.free.pop_front()


def free_used_block(scheduler: Scheduler) -> None:
    pool = scheduler.cache.pool
    pool.free.append(pool.blocks[scheduler.running.requests[-1].block_table[-1]])


def forget_request(scheduler: Scheduler) -> None:
    del scheduler._requests[next(iter(scheduler.waiting)).request_id]


def replace_request(scheduler: Scheduler) -> None:
    """Replace a waiting request by another one with the same id."""
    waiting = next(iter(scheduler.waiting))
    scheduler._requests[waiting.request_id] = Request(waiting.request_id, waiting.tokens)


def hold_null_block(scheduler: Scheduler) -> None:
    scheduler.running.requests[-1].block_table[-1] = 0


def hold_unknown_block(scheduler: Scheduler) -> None:
    scheduler.running.requests[-1].block_table[-1] = NUM_BLOCKS


def share_written_block(scheduler: Scheduler) -> None:
    first, *_, last = scheduler.running.requests
    last.block_table[-1] = first.block_table[-1]


def damage(name: str, value: Any) -> Callable[[Scheduler], None]:
    """Set an attribute of the cached block with the highest id, which is checked last."""

    def apply(scheduler: Scheduler) -> None:
        setattr(max(cached(scheduler), key=lambda block: block.block_id), name, value)

    return apply


def damage_twin(name: str, value: Any) -> Callable[[Scheduler], None]:
    def apply(scheduler: Scheduler) -> None:
        indexed = next(block for block in reversed(scheduler.cache.pool.blocks) if block.twins)
        setattr(indexed.twins[-1], name, value)

    return apply


def lose_twin(scheduler: Scheduler) -> None:
    next(block for block in reversed(scheduler.cache.pool.blocks) if block.twins).twins = ()


def unindex(scheduler: Scheduler) -> None:
    tree = scheduler.cache.tree
    del tree._index[next(reversed(tree._index))]


def set_running(name: str, value: Any) -> Callable[[Scheduler], None]:
    def apply(scheduler: Scheduler) -> None:
        setattr(scheduler.running.requests[-1], name, value)

    return apply


def set_waiting(name: str, value: Any) -> Callable[[Scheduler], None]:
    def apply(scheduler: Scheduler) -> None:
        setattr(list(scheduler.waiting)[-1], name, value)

    return apply


def miscount(path: str) -> Callable[[Scheduler], None]:
    *names, last = path.split(".")

    def apply(scheduler: Scheduler) -> None:
        owner: Any = scheduler
        for name in names:
            owner = getattr(owner, name)
        setattr(owner, last, getattr(owner, last) + 1)

    return apply


def miscount_pinned_block(scheduler: Scheduler) -> None:
    holders = scheduler.cache.pins.holders
    holders[next(reversed(holders))] += 1


def forget_pinned_block(scheduler: Scheduler) -> None:
    holders = scheduler.cache.pins.holders
    del holders[next(reversed(holders))]


def miscount_owner(scheduler: Scheduler) -> None:
    scheduler.cache.pins.owners["other"].num_blocks += 1


def forget_pin(scheduler: Scheduler) -> None:
    pins = scheduler.cache.pins
    del pins._pins[next(reversed(pins._pins))]


def duplicate_batch_index(scheduler: Scheduler) -> None:
    first, *_, last = scheduler.running.requests
    last.batch_index = first.batch_index


VIOLATIONS: dict[str, Callable[[Scheduler], None]] = {
    "reference count": damage("ref_count", 1),
    "tokens that do not match the key": damage("tokens", bytes(16)),
    "key that is not in the index": damage("key", b"?" * 16),
    "too few tokens": damage("tokens", bytes(4)),
    "unknown parent": damage("parent_key", b"?" * 16),
    "content without a parent": damage("parent_key", None),
    "index": unindex,
    "twin with other tokens": damage_twin("tokens", bytes(16)),
    "twin with another parent": damage_twin("parent_key", b"?" * 16),
    "twin missing from the list of twins": lose_twin,
    "order of siblings": swap_children,
    "cycle in the free list": break_ring,
    "wrong backward link in the free list": break_link,
    "length of the free list": miscount("cache.pool.free._len"),
    "free block missing from the free list": lose_free_block,
    "block in use in the free list": free_used_block,
    "number of cached blocks": miscount("cache.pool.num_cached"),
    "number of shared blocks": miscount("cache.pool.num_shared"),
    "null block": hold_null_block,
    "block that does not exist": hold_unknown_block,
    "two writers of a block": share_written_block,
    "pin count of a block": miscount_pinned_block,
    "pinned block that is not counted": forget_pinned_block,
    "removed pin that still holds its blocks": forget_pin,
    "block count of a pin owner": miscount_owner,
    "too many pinned blocks": lambda scheduler: setattr(scheduler.cache.pins, "max_blocks", 1),
    "state of a running request": set_running("state", RequestState.WAITING),
    "counts of a running request": set_running("num_computed", 10**6),
    "table that is too short": set_running("block_table", []),
    "too many published blocks": set_running("num_published", 10**6),
    "samples in flight": set_running("num_in_flight", 2),
    "duplicate batch_index": duplicate_batch_index,
    "order of running requests": set_running("urgency", -(10**9)),
    "waiting request with a batch row": set_waiting("batch_index", 1),
    "waiting request with blocks": set_waiting("block_table", [5]),
    "token count of the waiting queue": miscount("waiting.num_tokens"),
    "waiting request that is not live": forget_request,
    "two requests with the same id": replace_request,
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_is_found_in_one_call_and_in_slices(violation: str) -> None:
    scheduler = busy()
    check_scheduler(scheduler)
    assert in_slices(scheduler) > 2 * NUM_BLOCKS // SLICE
    VIOLATIONS[violation](scheduler)
    with pytest.raises(InvariantViolation):
        check_scheduler(scheduler)
    with pytest.raises(InvariantViolation):
        in_slices(scheduler)


def test_a_running_audit_finds_a_violation_in_the_unchecked_part() -> None:
    scheduler = busy()
    num_slices = in_slices(scheduler)
    slices = audit(scheduler, max_blocks=SLICE)
    for _ in range(num_slices // 2):
        next(slices)
    _, children = list(scheduler.cache.tree.positions())[-1]
    (block, *_) = children
    block.tokens = bytes(len(block.tokens))
    with pytest.raises(InvariantViolation):
        list(slices)


def count_blocks(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Record the ids of all blocks of which an attribute is read. The caller empties the set."""
    touched: set[int] = set()
    slots = {name: owner.__dict__[name] for owner in (Linked, KVCacheBlock) for name in owner.__slots__}
    block_id = slots["block_id"]

    def watch(descriptor: Any) -> property:
        def read(block: KVCacheBlock) -> Any:
            touched.add(block_id.__get__(block))
            return descriptor.__get__(block)

        return property(read, descriptor.__set__)

    for name, descriptor in slots.items():
        monkeypatch.setattr(KVCacheBlock, name, watch(descriptor), raising=False)
    return touched


def test_the_work_of_a_slice_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = busy()
    touched = count_blocks(monkeypatch)
    num_touched = []
    for _ in audit(scheduler, max_blocks=SLICE):
        num_touched.append(len(touched))
        touched.clear()
    # A slice reads its blocks, and possibly the neighbour, twin or parent of each.
    assert max(num_touched) <= 2 * SLICE + 2
    assert sum(num_touched) > 2 * NUM_BLOCKS


def test_an_audit_of_a_long_queue_is_sliced_by_requests() -> None:
    rig = Rig(max_waiting=1000)
    for number in range(500):
        rig.add(number, [number], max_tokens=1)
    assert in_slices(rig.scheduler, 10) >= 500 // 10
    set_waiting("num_planned", 1)(rig.scheduler)
    with pytest.raises(InvariantViolation, match="waiting requests have the state"):
        in_slices(rig.scheduler, 10)


def test_an_empty_scheduler_passes() -> None:
    rig = Rig(num_blocks=2)
    check_scheduler(rig.scheduler)
    assert in_slices(rig.scheduler, 1) >= 1
    rig.scheduler.add(Request(1, [1], SamplingParams(max_tokens=1)), 0)
    check_scheduler(rig.scheduler)


# Levels below the device


def tiered() -> TieredRig:
    """A rig with content in two levels, a load with a waiter, and saves in flight."""
    rig = TieredRig(host_bytes=10_000, has_disk=True, window=6, num_window_blocks=80, num_states=40)
    for first in range(0, 500, 100):
        rig.compute(range(first, first + 17))
    rig.idle()
    rig.evict()
    rig.compute(range(500, 517))
    rig.cache.evict_unused()
    rig.wait_for_load(range(21))
    assert rig.store.saving
    return rig


def first_load(rig: TieredRig) -> PrefixLoad:
    return next(iter(rig.levels.loads.values()))


def release_state(rig: TieredRig) -> None:
    first_load(rig).states[0].ref_count = 0


def release_window(rig: TieredRig) -> None:
    first_load(rig).windows[0].ref_count = 0


def count_load(rig: TieredRig) -> None:
    next(iter(rig.level(Level.DISK))).num_loads += 1


def abandon_load(rig: TieredRig) -> None:
    first_load(rig).is_abandoned = True


def forget_load(rig: TieredRig) -> None:
    """End a load without its waiters."""
    load = first_load(rig)
    rig.levels.finish(load, ())


TIER_VIOLATIONS: dict[str, Callable[[TieredRig], None]] = {
    "a block of a load is not held": lambda rig: rig.cache.pool.release(first_load(rig).blocks[:1]),
    "a window block of a load is not held": release_window,
    "the state of a load is not held": release_state,
    "a piece counts a load too many": count_load,
    "bytes of a tier": lambda rig: setattr(rig.level(Level.DISK), "num_bytes", 7),
    "reserved slots": lambda rig: rig.level(Level.HOST).num_reserved.__setitem__(0, 10),
    "a budget is exceeded": lambda rig: setattr(rig.level(Level.HOST), "limits", (2, 2, 2)),
    "buffers of reads": lambda rig: rig.levels.num_buffers.__setitem__(0, 1),
    "a request waits for an abandoned load": abandon_load,
    "a request waits for a load that has ended": forget_load,
}


@pytest.mark.parametrize("violation", TIER_VIOLATIONS)
def test_a_violation_in_tiers_is_found(violation: str) -> None:
    rig = tiered()
    check_scheduler(rig.scheduler)
    TIER_VIOLATIONS[violation](rig)
    with pytest.raises(InvariantViolation):
        check_scheduler(rig.scheduler)
    with pytest.raises(InvariantViolation):
        in_slices(rig.scheduler)


def test_an_audit_of_tiers_is_sliced_by_stored_pieces() -> None:
    rig = tiered()
    num_pieces = sum(map(len, rig.levels.levels))
    assert num_pieces > 50
    assert in_slices(rig.scheduler, size=1) - in_slices(rig.scheduler, size=10**6) > num_pieces
