"""Loads from levels below the device: when they are made, what waits for them, what they bring, how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.core.admission import MAX_LOAD_WAITS
from quire.core.cache import CacheExplanation, StopReason
from quire.core.check import check_scheduler
from quire.core.levels.levels import MIN_TIMEOUT_NS, READY_NS
from quire.core.levels.lower_level import LevelSpeed
from quire.core.request import Request
from quire.core.step import Load, MemoryKind
from quire.core.values import Level, Priority
from tests.core.helpers import shape
from tests.core.level_rig import SIZES, UNLIMITED, TieredRig

# A prompt of 17 tokens: 16 of them, four blocks, can be reused. An answer of 4 fills the fifth block.
PROMPT = range(100, 117)
OTHER = range(300, 317)
BLOCK, WINDOW, STATE = MemoryKind.BLOCK, MemoryKind.WINDOW, MemoryKind.STATE


def host_rig(**options: Any) -> TieredRig:
    return TieredRig(host_bytes=UNLIMITED, **options)


def with_prefix(prompt: Sequence[int] = PROMPT, **options: Any) -> TieredRig:
    """A rig whose host memory has the prefix of a prompt, which the device has not."""
    rig = host_rig(**options)
    rig.compute(prompt)
    rig.evict()
    return rig


def explanation_of(request: Request) -> CacheExplanation:
    assert request.cache_explanation is not None
    return request.cache_explanation


def is_loading(rig: TieredRig, request: Request) -> bool:
    return request in rig.scheduler.waiting.load_waiters


def check_nothing_is_held(rig: TieredRig) -> None:
    """Without requests and pins, all memory is free."""
    assert not rig.scheduler.has_work
    check_scheduler(rig.scheduler)
    assert rig.cache.pool.num_free == rig.cache.pool.num_usable
    for pool in rig.cache.memory.pools[1:]:
        assert pool.num_free == pool.num_usable
    assert not any(sum(level.num_reserved) for level in rig.levels.levels)


# A load


def test_an_evicted_prefix_is_saved_to_host_memory_and_loaded_on_its_next_use() -> None:
    rig = host_rig()
    first = rig.compute(PROMPT)
    rig.cache.evict_unused()
    plan = rig.step()
    tokens = [*PROMPT, *first.output]
    assert [save.content for save in plan.saves] == rig.contents(tokens, (4, 3, 2, 1, 0))  # in order of eviction
    assert {save.levels for save in plan.saves} == {(Level.HOST,)}
    assert len(rig.level(Level.HOST)) == 0, "the copies are not made yet"
    rig.finish_saves()
    assert len(rig.level(Level.HOST)) == 5

    again = rig.arrive(PROMPT)
    plan = rig.step()
    assert plan.is_empty
    assert [load.content for load in plan.loads] == rig.contents(PROMPT, range(4))
    assert {load.level for load in plan.loads} == {Level.HOST}
    assert is_loading(rig, again)
    rig.finish_loads()
    plan = rig.step()
    assert shape(plan) == [(again.request_id, 16, 1)]
    assert not plan.loads
    rig.run()
    rig.check_answer(again)
    assert explanation_of(again) == CacheExplanation(16, 4, 16, StopReason.COMPLETE, 0, Level.HOST, 16)
    assert rig.levels.stats()[0].num_loaded_tokens == 16
    check_nothing_is_held(rig)


def test_the_first_pieces_of_a_load_are_reported_while_memory_for_the_others_is_taken() -> None:
    rig = with_prefix()
    rig.levels.groups = (1, 2)
    early: list[Load] = []
    num_free: list[int] = []

    def start(loads: tuple[Load, ...]) -> None:
        early.extend(loads)
        num_free.append(rig.cache.pool.num_free)

    rig.levels.on_loads = start
    rig.add(9, PROMPT)
    before = rig.cache.pool.num_free
    plan = rig.step()
    assert num_free == [before - 1, before - 3]
    assert [load.content for load in (*early, *plan.loads)] == rig.contents([*PROMPT], range(4))
    assert len(plan.loads) == 1, "the plan ends the load"
    targets = [load.target for load in (*early, *plan.loads)]
    assert len({*targets}) == 4
    assert {load.load_id for load in (*early, *plan.loads)} == {plan.loads[0].load_id}


def test_no_piece_is_loaded_before_the_content_that_it_overwrites_is_saved() -> None:
    rig = with_prefix(num_blocks=7)
    rig.levels.groups = (1, 1)
    early: list[Load] = []
    rig.levels.on_loads = early.extend
    rig.compute(OTHER)
    rig.add(9, PROMPT)
    plan = rig.step()
    overwritten = {save.source for save in plan.saves}
    assert len(early) == 1, "one block was empty"
    assert early[0].target not in overwritten
    assert {load.target for load in plan.loads} <= overwritten
    assert len(plan.loads) == 3


def test_a_longer_tail_replaces_the_one_on_the_device() -> None:
    rig = host_rig()
    rig.compute(PROMPT[:15], max_tokens=1)
    rig.evict()
    slow(rig, Level.HOST, 10**9)
    rig.compute([*PROMPT[:13], 7], max_tokens=1)  # computed: the device has one token of the tail
    slow(rig, Level.HOST, 0)
    request = rig.wait_for_load(PROMPT)
    ((pieces),) = rig.store.loading.values()
    assert [load.content for load in pieces] == [rig.content(PROMPT[:15], 3)]
    rig.run()
    rig.check_answer(request)
    assert request.num_cached_tokens == 15
    check_nothing_is_held(rig)


# Windows and states


@pytest.mark.parametrize(("window", "num_states"), [(6, 0), (0, 40), (6, 40)], ids=["windows", "states", "both"])
def test_window_blocks_and_a_state_are_loaded_with_the_blocks(window: int, num_states: int) -> None:
    rig = host_rig(window=window, num_window_blocks=80 if window else 0, num_states=num_states)
    first = rig.compute(PROMPT)
    rig.evict()
    turn = [*PROMPT, *first.output, 1, 2, 3]  # the next turn of the conversation
    request = rig.wait_for_load(turn)
    ((pieces),) = rig.store.loading.values()
    kinds = [load.content.kind for load in pieces]
    assert kinds.count(BLOCK) == 5
    assert kinds.count(WINDOW) == (2 if window else 0)  # a token at position 20 sees positions 15 to 20
    assert kinds.count(STATE) == (1 if num_states else 0)
    rig.run()
    rig.check_answer(request)
    assert (request.num_cached_tokens, explanation_of(request).num_loaded_tokens) == (20, 20)
    check_nothing_is_held(rig)


def test_a_load_holds_the_window_blocks_on_the_device_that_the_request_needs_too() -> None:
    rig = host_rig(window=12, num_window_blocks=80)
    first = rig.compute(PROMPT)
    taken = rig.cache.pool.take(rig.cache.pool.num_free - 4)  # evicts the fifth block and its window block
    rig.cache.pool.release(taken)
    rig.step()
    rig.finish_saves()
    rig.wait_for_load([*PROMPT, *first.output, 1, 2])
    (load,) = rig.levels.loads.values()
    assert [stored.content.kind for stored in load.reach.pieces] == [BLOCK, WINDOW]
    assert [block.ref_count for block in load.reach.kept.windows] == [1, 1]
    assert [block.node for block in load.reach.kept.windows] == [*load.nodes[2:4]]
    rig.run()
    check_nothing_is_held(rig)


# Loads that fail, or take too long


def test_the_pieces_before_a_failed_one_are_used_and_the_rest_is_computed() -> None:
    rig = with_prefix()
    request = rig.wait_for_load(PROMPT)
    damaged = rig.content(PROMPT, 2)
    rig.finish_loads([damaged])
    plan = rig.step()
    assert shape(plan) == [(request.request_id, 8, 9)]
    assert not plan.loads
    rig.run()
    rig.check_answer(request)
    assert explanation_of(request) == CacheExplanation(8, 2, 8, StopReason.LOAD_FAILED, 0, Level.HOST, 8)
    assert damaged not in rig.level(Level.HOST)
    assert rig.content(PROMPT, 3) in rig.level(Level.HOST)
    host = rig.levels.stats()[0]
    assert (host.num_loaded_tokens, host.num_failed_loads) == (8, 1)
    check_nothing_is_held(rig)


def test_waiters_of_a_late_load_compute_and_its_end_is_harmless() -> None:
    rig = with_prefix()
    request = rig.wait_for_load(PROMPT)
    rig.now_ns += MIN_TIMEOUT_NS - 1
    assert rig.step().is_empty
    rig.now_ns += 1
    plan = rig.step()
    assert shape(plan) == [(request.request_id, 0, 17)]
    assert not plan.loads
    rig.finish_loads()  # publishes what the request has computed in the meantime
    rig.run()
    rig.check_answer(request)
    assert explanation_of(request) == CacheExplanation(0, 0, 0, StopReason.LOAD_FAILED)
    assert rig.levels.stats()[0].num_failed_loads == 1
    check_nothing_is_held(rig)


def test_nothing_is_loaded_from_a_tier_that_does_not_answer() -> None:
    rig = TieredRig(has_disk=True)
    for prompt in (PROMPT, OTHER):
        rig.compute(prompt)
    rig.idle()
    rig.evict()
    late = rig.wait_for_load(PROMPT)
    rig.now_ns += MIN_TIMEOUT_NS
    rig.step()
    num_free = rig.cache.pool.num_free
    for prompt in (PROMPT, OTHER):  # each would hold more blocks that may never come back
        request = rig.arrive([*prompt, 7])
        assert not rig.step().loads
        assert explanation_of(request).reason in (StopReason.NOT_LOADED, StopReason.COMPLETE)
        assert rig.scheduler.explain(rig.request(OTHER)).num_loaded_tokens == 0
    assert rig.cache.pool.num_free < num_free
    rig.finish_loads()
    rig.run()
    rig.check_answer(late)
    rig.evict()
    rig.wait_for_load(OTHER)  # it answers again
    rig.run()
    check_nothing_is_held(rig)


def test_a_slow_load_gets_ten_times_its_expected_duration() -> None:
    rig = with_prefix()
    rig.level(Level.HOST).speed = LevelSpeed(latency_ns=MIN_TIMEOUT_NS, bytes_per_s=10**9)
    rig.wait_for_load(PROMPT)
    rig.now_ns += 10 * MIN_TIMEOUT_NS - 1
    assert rig.step().is_empty
    rig.now_ns += 1_000
    assert not rig.step().is_empty


def test_a_request_waits_for_two_loads_and_then_computes() -> None:
    rig = with_prefix()
    request = rig.arrive(PROMPT)
    for _ in range(MAX_LOAD_WAITS):
        assert rig.step().loads
        rig.finish_loads()
        rig.cache.evict_unused()  # memory is short: others took the blocks before it could start
    plan = rig.step()
    assert not plan.loads
    assert shape(plan) == [(request.request_id, 0, 17)]
    rig.run()
    rig.check_answer(request)
    assert explanation_of(request) == CacheExplanation(0, 0, 0, StopReason.NOT_LOADED)


# Reads of the disk


def with_disk(**options: Any) -> TieredRig:
    """A rig whose disk has the prefixes of two prompts, which the device has not."""
    rig = TieredRig(has_disk=True, **options)
    for prompt in (PROMPT, OTHER):
        rig.compute(prompt)
    rig.idle()
    rig.evict()
    return rig


def read_shapes(rig: TieredRig) -> list[tuple[str, int]]:
    return [(read.state.name, len(read.pieces)) for read in rig.levels.reads.values()]


def test_a_request_computes_if_its_read_never_ends() -> None:
    rig = with_disk()
    request = rig.wait_for_load(PROMPT)
    rig.now_ns += MIN_TIMEOUT_NS
    assert shape(rig.step()) == [(request.request_id, 0, 17)]
    rig.run_without_loads()
    rig.check_answer(request)
    assert explanation_of(request).reason is StopReason.LOAD_FAILED
    assert not rig.scheduler.has_work
    check_nothing_is_held(rig)
    assert rig.levels.num_buffers == [4, 0, 0]
    rig.finish_reads()
    assert rig.levels.num_buffers == [0, 0, 0]
    assert not rig.store.buffers


def test_what_was_read_is_dropped_if_there_is_no_room_for_it_for_a_while() -> None:
    rig = with_disk(num_blocks=13)
    request = rig.wait_for_load(PROMPT)
    rig.arrive(range(500, 540), max_tokens=8, priority=Priority.HIGH)  # takes all but two blocks, for some steps
    rig.step()
    rig.finish_reads()
    rig.step()
    assert read_shapes(rig) == [("READY", 4)]
    rig.now_ns += READY_NS
    rig.step()
    assert read_shapes(rig) == []
    assert not rig.store.buffers
    rig.run()
    rig.check_answer(request)
    assert request.num_cached_tokens == 16, "it was read again"


def test_a_late_copy_is_not_waited_for_again() -> None:
    rig = with_disk()
    late = rig.wait_for_load(PROMPT)
    rig.finish_reads()
    assert len(rig.step().loads) == 4
    rig.now_ns += MIN_TIMEOUT_NS
    assert shape(rig.step()) == [(late.request_id, 0, 17)]
    rig.run_without_loads()
    rig.evict()
    again = rig.wait_for_load(PROMPT)
    assert len(rig.store.reading) == 1, "it is read again"
    rig.run()
    for request in (late, again):
        rig.check_answer(request)
    check_nothing_is_held(rig)


def test_a_load_leaves_room_for_a_request_of_a_higher_tier() -> None:
    """Otherwise loads of several requests, one after the other, could keep it waiting."""
    rig = with_disk(num_blocks=9)
    request = rig.arrive(PROMPT)
    high = rig.arrive(range(500, 520), max_tokens=2, priority=Priority.HIGH)  # five of the eight blocks
    loads = rig.scheduler.loads
    assert not loads.park(request, rig.cache.match(request), 0)
    rig.scheduler.cancel(high.request_id)
    assert loads.park(request, rig.cache.match(request), 0)


# Whether a load pays


def slow(rig: TieredRig, level: Level, latency_ns: int) -> None:
    """Loads take this long, whatever their size; computing a token takes a microsecond."""
    rig.levels.ns_per_token = 1_000
    rig.level(level).speed = LevelSpeed(latency_ns, bytes_per_s=10**15)


def test_a_load_that_takes_longer_than_computing_is_not_made() -> None:
    rig = with_prefix()
    slow(rig, Level.HOST, 9_000)
    assert rig.levels.stats()[0].break_even_tokens == 9
    found = rig.scheduler.explain(rig.request(PROMPT[:9]))
    assert found == CacheExplanation(0, 0, 0, StopReason.NOT_LOADED)
    request = rig.arrive(PROMPT[:9])
    plan = rig.step()
    assert not plan.loads
    assert shape(plan) == [(request.request_id, 0, 9)]
    assert explanation_of(request).reason is StopReason.NOT_LOADED
    rig.run()
    assert rig.scheduler.explain(rig.request(PROMPT)).reason is StopReason.NOT_LOADED, "8 tokens are on the device"
    rig.evict()
    rig.wait_for_load(PROMPT)


def test_the_fast_part_is_loaded_if_the_slow_part_does_not_pay() -> None:
    rig = TieredRig(host_bytes=20, has_disk=True)
    rig.compute(PROMPT)
    rig.idle()
    rig.evict()  # host memory has room for the first two blocks; the disk has all
    assert set(rig.store.stored[Level.HOST]) == set(rig.contents(PROMPT, (0, 1)))
    slow(rig, Level.DISK, 20_000)
    found = rig.scheduler.explain(rig.request(PROMPT))
    assert (found.num_tokens, found.num_loaded_tokens, found.source) == (8, 8, Level.HOST)
    request = rig.wait_for_load(PROMPT)
    rig.run()
    rig.check_answer(request)
    assert explanation_of(request) == CacheExplanation(8, 2, 8, StopReason.NOT_LOADED, 0, Level.HOST, 8)


def test_break_even() -> None:
    rig = TieredRig(host_bytes=UNLIMITED)
    host = rig.level(Level.HOST)
    assert rig.levels.break_even(host) == 0, "not measured: loads always pay"
    rig.levels.ns_per_token = 100
    host.speed = LevelSpeed(latency_ns=1_000, bytes_per_s=40_000_000)  # 50 ns for the two bytes of a token
    assert rig.levels.break_even(host) == 20
    host.speed = LevelSpeed(latency_ns=1_000, bytes_per_s=20_000_000)
    assert rig.levels.break_even(host) is None


# Memory


def test_a_request_that_preempts_starts_at_once() -> None:
    rig = with_prefix(num_blocks=13)
    low = rig.arrive(range(500, 532), max_tokens=8, priority=Priority.LOW)  # 8 blocks now, 10 in the end
    rig.step()
    high = rig.arrive(PROMPT, priority=Priority.HIGH)
    plan = rig.step()
    assert low.num_preemptions == 1
    assert not plan.loads
    assert shape(plan) == [(high.request_id, 0, 17)]
    assert explanation_of(high).reason is StopReason.NOT_LOADED
    rig.run()
    rig.check_answer(high)
    rig.check_answer(low)


# Clearing


def test_a_load_that_ends_after_a_clear_publishes_nothing() -> None:
    rig = with_prefix()
    request = rig.wait_for_load(PROMPT)
    rig.cache.clear()
    rig.scheduler.cancel(request.request_id)
    rig.finish_loads()
    assert len(rig.cache.tree) == 0
    assert rig.levels.stats()[0].num_loaded_tokens == 0
    check_nothing_is_held(rig)


def test_a_late_load_that_is_cleared_does_not_stop_later_ones() -> None:
    rig = with_prefix()
    rig.wait_for_load(PROMPT)
    rig.now_ns += MIN_TIMEOUT_NS
    rig.step()
    rig.cache.clear()
    rig.store.clear()
    rig.run()
    rig.compute(OTHER)
    rig.evict()
    rig.wait_for_load(OTHER)


# Restarts


def test_a_restart_finds_what_was_on_disk() -> None:
    rig = TieredRig(has_disk=True)
    first = rig.compute(PROMPT, max_tokens=3)  # four blocks and three tokens
    rig.idle()
    again = rig.restarted()
    turn = [*PROMPT, *first.output, 1, 2]
    found = again.scheduler.explain(again.request(turn))
    assert found == CacheExplanation(19, 4, 19, StopReason.NOT_FOUND, 0, Level.DISK, 19)
    request = again.compute(turn)
    assert explanation_of(request) == found
    assert again.levels.stats()[1].num_loaded_tokens == 19


@pytest.mark.parametrize(("window", "num_states"), [(6, 0), (0, 40), (6, 40)], ids=["windows", "states", "both"])
def test_a_restart_finds_window_blocks_and_states(window: int, num_states: int) -> None:
    rig = TieredRig(has_disk=True, window=window, num_window_blocks=80 if window else 0, num_states=num_states)
    first = rig.compute(PROMPT, max_tokens=3)
    rig.idle()
    again = rig.restarted()
    request = again.compute([*PROMPT, *first.output, 1, 2])
    assert explanation_of(request).num_loaded_tokens == 19
    check_nothing_is_held(again)


# Explanations and counters


def test_a_prefix_from_two_loads_names_the_slower_tier() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True)
    rig.compute(PROMPT)
    rig.idle()
    rig.evict()
    host = rig.level(Level.HOST)
    host.remove(rig.content(PROMPT, 0))
    rig.arrive(PROMPT[:5])  # the load of one block, from disk
    request = rig.arrive(PROMPT)  # waits for it, and then for three from host memory
    rig.run()
    assert [level.num_loads for level in rig.levels.stats()] == [1, 1]
    found = explanation_of(request)
    assert (found.source, found.num_loaded_tokens) == (Level.DISK, 16)


def test_a_waiter_is_not_told_that_others_tokens_were_loaded_for_it() -> None:
    rig = with_prefix()
    rig.compute(PROMPT[:4])  # the device has one block
    rig.arrive(PROMPT)  # loads three
    request = rig.arrive([*PROMPT[:12], 7, 8])  # uses two of them
    rig.run()
    found = explanation_of(request)
    assert (found.num_tokens, found.num_loaded_tokens) == (12, 8)


def test_counters() -> None:
    rig = TieredRig(host_bytes=40, has_disk=True)
    rig.compute(PROMPT)
    rig.evict()
    host, disk = rig.cache.stats().levels
    assert (host.level, host.num_pieces, host.num_bytes, host.max_bytes) == ("host", 4, 40, 4 * sum(SIZES))
    assert (host.num_saves, host.num_failed_saves, host.num_evictions) == (4, 0, 0)
    assert rig.levels.saves.num_skipped == 1, "host memory has room for four of five blocks"
    assert (disk.level, disk.num_pieces, disk.max_bytes, disk.num_saves) == ("disk", 0, None, 0)
    rig.compute(PROMPT)
    host, disk = rig.cache.stats().levels
    assert (host.num_loads, host.num_loaded_tokens, host.num_loaded_bytes) == (1, 16, 40)
    assert disk.num_saves == 4, "used twice"
    rig.levels.lose(Level.DISK, rig.contents(PROMPT, (0, 1)))
    rig.levels.lose(Level.DISK, rig.contents(OTHER, (0,)))
    assert (rig.levels.stats()[1].num_evictions, rig.levels.stats()[1].num_pieces) == (2, 2)
    stats = rig.cache.stats()
    assert stats.num_hit_tokens == 16
