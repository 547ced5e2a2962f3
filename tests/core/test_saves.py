"""Saves to levels below the device: what is chosen, when, in which order, and what has to make room."""

from __future__ import annotations

import pytest

from quire.core.admission import MAX_LOAD_WAITS
from quire.core.levels.levels import CREDIT_PER_REGRET, USED_PER_STEP, SaveLimits
from quire.core.request import Request
from quire.core.step import Content, MemoryKind, StepPlan
from quire.core.values import Level, Priority
from tests.core.helpers import pin_tokens
from tests.core.level_rig import PLENTY, SIZES, UNLIMITED, TieredRig

PROMPT = range(100, 117)  # with an answer of 4 tokens: five full blocks
OTHER = range(300, 317)
THIRD = range(500, 517)
BLOCK, WINDOW, STATE = MemoryKind.BLOCK, MemoryKind.WINDOW, MemoryKind.STATE


def saved(plan: StepPlan, level: Level) -> list[Content]:
    return [save.content for save in plan.saves if level in save.levels]


def all_tokens(request: Request) -> list[int]:
    return [*request.tokens]


def has_unsaved(rig: TieredRig) -> bool:
    return rig.levels.saves.has_unsaved


# To disk, while requests run


@pytest.mark.parametrize(
    ("window", "num_states"), [(0, 0), (6, 0), (0, 12), (6, 12)], ids=["plain", "windows", "states", "both"]
)
def test_nothing_is_written_to_disk_while_busy_at_a_hit_rate_of_zero(window: int, num_states: int) -> None:
    rig = TieredRig(
        has_disk=True,
        num_blocks=30,
        max_chunk_tokens=16,
        window=window,
        num_window_blocks=24 if window else 0,
        num_states=num_states,
    )
    for number in range(20):
        rig.arrive(range(1000 + 20 * number, 1017 + 20 * number))
        plan = rig.step()
        assert not plan.saves
    rig.run()
    stats = rig.cache.stats()
    assert stats.num_evictions > 20
    assert stats.levels[0].num_saves == 0


def test_content_that_is_used_a_second_time_is_written_to_disk_a_few_blocks_per_step() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    rig.arrive(PROMPT)
    assert saved(rig.step(), Level.DISK) == rig.contents(PROMPT, range(USED_PER_STEP)), "the first blocks first"
    assert saved(rig.step(), Level.DISK) == rig.contents(PROMPT, range(USED_PER_STEP, 2 * USED_PER_STEP))
    rig.run()
    rig.compute(PROMPT)
    assert rig.levels.stats()[0].num_saves == 4, "it is written once"


def test_pinned_content_is_written_to_disk() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    assert pin_tokens(rig.cache, "pin", PROMPT, "", 10**18) == 16
    rig.arrive(OTHER)
    assert saved(rig.step(), Level.DISK) == rig.contents(PROMPT, range(USED_PER_STEP))


def test_a_resumed_request_does_not_use_its_content_a_second_time() -> None:
    rig = TieredRig(has_disk=True, num_blocks=13)
    low = rig.arrive(range(500, 532), max_tokens=8, priority=Priority.LOW)
    rig.step()
    rig.arrive(PROMPT, priority=Priority.HIGH)
    rig.run()
    assert low.num_preemptions == 1
    assert rig.cache.stats().num_recovered_tokens > 0
    assert rig.levels.stats()[0].num_saves == 0


def test_evicted_content_that_was_used_twice_is_written_to_disk() -> None:
    rig = TieredRig(has_disk=True, limits=PLENTY._replace(max_pending=0, max_writes=100))
    rig.compute(PROMPT)
    rig.compute(PROMPT)  # nothing can be saved now
    rig.compute(OTHER)
    rig.levels.saves._max_pending = 100
    rig.cache.evict_unused()
    assert saved(rig.step(), Level.DISK) == rig.contents(PROMPT, (3, 2, 1, 0))


def test_after_a_regret_evicted_content_is_written_to_disk() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    rig.cache.evict_unused()
    assert not rig.step().saves
    rig.compute(PROMPT)  # it would have been used
    plan = rig.step()
    assert not plan.saves
    rig.cache.evict_unused()
    assert len(saved(rig.step(), Level.DISK)) == 5
    rig.finish_saves()
    credit = CREDIT_PER_REGRET - 5
    for number in range(20):
        rig.compute(range(1000 + 20 * number, 1017 + 20 * number))
        rig.cache.evict_unused()
        plan = rig.step()
        assert len(plan.saves) == min(5, credit)
        credit -= len(plan.saves)
        rig.finish_saves()
    assert credit == 0


def test_content_that_is_on_disk_uses_no_credit() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    rig.idle()
    rig.levels.saves.note_regret()
    rig.evict()  # all of it is saved already
    rig.compute(OTHER)
    rig.evict()
    for number in range(20):
        rig.compute(range(1000 + 20 * number, 1017 + 20 * number))
        rig.evict()
    assert rig.levels.stats()[0].num_saves == 5 + CREDIT_PER_REGRET


def test_content_that_could_be_loaded_is_not_regretted() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True)
    rig.compute(PROMPT)
    rig.evict()
    request = rig.arrive(PROMPT)
    request.num_load_waits, request.num_missing_copies = MAX_LOAD_WAITS, 1  # it computes nevertheless
    rig.run()
    rig.compute(OTHER)
    rig.evict()
    assert rig.levels.stats()[1].num_saves == 0


@pytest.mark.parametrize("is_saved", [True, False])
def test_window_blocks_and_states_go_to_disk_where_their_block_is(is_saved: bool) -> None:
    rig = TieredRig(has_disk=True, window=6, num_window_blocks=80, num_states=40)
    rig.compute(PROMPT)
    if is_saved:
        rig.idle()
    disk = rig.level(Level.DISK)
    for stored in [stored for stored in disk if stored.content.kind is not BLOCK]:
        disk.remove(stored.content)
    rig.cache.memory.states.pool.evict_unused()
    windows = rig.cache.memory.windows.pool
    windows.release(windows.take(windows.num_free), is_kept=False)
    kinds = {save.content.kind for save in rig.step().saves}
    assert kinds == ({WINDOW, STATE} if is_saved else set())


# To disk, while nothing runs


def test_idle_saves_start_with_the_first_blocks_of_the_most_recently_used_content() -> None:
    rig = TieredRig(has_disk=True, limits=SaveLimits(max_bytes=1000, idle_bytes=30, max_pending=100, max_writes=100))
    older, newer = all_tokens(rig.compute(PROMPT)), all_tokens(rig.compute(OTHER))
    plans = [rig.idle() for _ in range(4)]
    found = [content for plan in plans for content in saved(plan, Level.DISK)]
    assert [len(plan.saves) for plan in plans] == [3, 3, 3, 1]
    assert found == [*rig.contents(newer, range(5)), *rig.contents(older, range(5))]


def test_idle_saves_end_and_resume_after_changes() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    assert has_unsaved(rig)
    assert len(rig.idle().saves) == 5
    assert not has_unsaved(rig)
    assert not rig.idle().saves
    rig.compute(PROMPT)
    assert has_unsaved(rig)
    assert not rig.idle().saves, "nothing is new"
    assert not has_unsaved(rig)
    rig.compute(OTHER)
    assert len(rig.idle().saves) == 5


def test_content_that_reaches_host_memory_while_idle_is_saved_to_disk_too() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True)
    rig.compute(PROMPT)
    rig.cache.evict_unused()
    plan = rig.scheduler.schedule_idle()
    rig.store.start(plan)
    assert {save.levels for save in plan.saves} == {(Level.HOST,)}
    assert not rig.scheduler.schedule_idle().saves, "the copies are not made yet"
    rig.finish_saves()
    assert [save.source for save in rig.idle().saves] == [None] * 5


def test_no_more_of_host_memory_is_saved_than_the_disk_can_hold() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True, store_bytes=3 * SIZES[0])
    rig.compute(PROMPT)
    rig.evict()
    assert len(rig.idle().saves) == 3


def test_content_in_both_memories_counts_once_against_the_limit_of_the_disk() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True, store_bytes=10 * SIZES[0])
    other = range(300, 317)
    for prompt in (PROMPT, other):
        rig.compute(prompt)
        rig.evict()
    rig.compute(other)  # loads it again
    assert len(rig.level(Level.HOST)) == 10
    while rig.idle().saves:
        pass
    assert {stored.content for stored in rig.level(Level.DISK)} == {stored.content for stored in rig.level(Level.HOST)}


def test_idle_saves_continue_after_a_pin() -> None:
    """A pin removes blocks from the free list, in the middle of which the search may be."""
    rig = TieredRig(has_disk=True, limits=SaveLimits(max_bytes=1000, idle_bytes=20, max_pending=100, max_writes=100))
    for prompt in (PROMPT, OTHER, THIRD):
        rig.compute(prompt)
    rig.idle()  # the search has reached the second block of the last prompt
    assert pin_tokens(rig.cache, "pin", THIRD, "", 10**18) == 16
    while has_unsaved(rig):
        rig.idle()
    assert len(rig.level(Level.DISK)) == 15


def test_pinned_content_is_saved_first_while_idle() -> None:
    rig = TieredRig(has_disk=True, limits=SaveLimits(max_bytes=1000, idle_bytes=20, max_pending=100, max_writes=100))
    rig.compute(PROMPT)
    rig.compute(OTHER)
    pin_tokens(rig.cache, "pin", PROMPT, "", 10**18)
    assert saved(rig.idle(), Level.DISK)[:2] == rig.contents(PROMPT, (0, 1))


def test_idle_saves_skip_no_piece_when_a_plan_is_full() -> None:
    limits = SaveLimits(max_bytes=40, idle_bytes=40, max_pending=3, max_writes=100)
    rig = TieredRig(has_disk=True, limits=limits, window=6, num_window_blocks=80, num_states=40)
    rig.compute(PROMPT)
    rig.compute(OTHER)
    expected = TieredRig(has_disk=True, window=6, num_window_blocks=80, num_states=40)
    expected.compute(PROMPT)
    expected.compute(OTHER)
    expected.idle()
    while has_unsaved(rig):
        plan = rig.idle()
        sizes = [rig.level(Level.DISK).sizes[save.content.kind] for save in plan.saves]
        assert len(sizes) <= 3
        assert sum(sizes) <= 40
    assert set(rig.store.stored[Level.DISK]) == set(expected.store.stored[Level.DISK])
    assert {content.kind for content in rig.store.stored[Level.DISK]} == {BLOCK, WINDOW, STATE}


def test_a_failed_idle_save_is_not_repeated_until_something_changes() -> None:
    rig = TieredRig(has_disk=True)
    rig.compute(PROMPT)
    rig.store.start(rig.scheduler.schedule_idle())
    rig.finish_saves(is_saved=False)
    assert rig.levels.stats()[0].num_failed_saves == 5
    assert not has_unsaved(rig), "the disk is full: it would fail for ever"
    rig.compute(OTHER)
    assert len(rig.idle().saves) == 10


# To host memory


def test_host_memory_evicts_the_least_recently_used_content_first() -> None:
    rig = TieredRig(host_bytes=70)
    oldest = all_tokens(rig.compute(PROMPT))
    rig.evict()
    rig.compute(OTHER)
    rig.cache.evict_unused()
    plan = rig.step()
    assert list(plan.drops) == rig.contents(oldest, (4, 3, 2)), "the last blocks of a prefix first"
    rig.finish_saves()
    assert rig.store.dropped == rig.contents(oldest, (4, 3, 2)), "each is reported once"
    assert not rig.step().drops
    host = rig.levels.stats()[0]
    assert (host.num_bytes, host.num_evictions, host.num_pieces) == (70, 3, 7)


def test_a_load_is_a_use_of_host_memory() -> None:
    rig = TieredRig(host_bytes=100)
    rig.compute(PROMPT)
    rig.evict()
    second = all_tokens(rig.compute(OTHER))
    rig.evict()
    rig.compute(PROMPT)  # loaded
    rig.compute(THIRD)
    rig.cache.evict_unused()
    assert list(rig.step().drops)[:4] == rig.contents(second, (4, 3, 2, 1))


def test_content_that_is_being_loaded_is_not_dropped() -> None:
    rig = TieredRig(host_bytes=50)
    rig.compute(PROMPT)
    rig.evict()
    request = rig.wait_for_load([*PROMPT, *rig.output_alone(PROMPT, rig.request(PROMPT).sampling), 1])
    rig.arrive(OTHER)
    while len(rig.scheduler.running) or len(rig.scheduler.waiting) > 1:
        rig.step()
    rig.cache.evict_unused()
    plan = rig.step()
    assert not plan.drops
    assert not plan.saves, "all of host memory is being loaded"
    assert rig.levels.saves.num_skipped == 5
    rig.run()
    rig.check_answer(request)
    rig.cache.evict_unused()
    assert rig.step().drops, "now it may be dropped"


@pytest.mark.parametrize("what", ["plan", "tier"])
def test_the_first_blocks_of_a_prefix_are_saved_if_there_is_no_room_for_all(what: str) -> None:
    """The others cannot be found without them."""
    limits = PLENTY._replace(max_bytes=30) if what == "plan" else PLENTY
    rig = TieredRig(host_bytes=30 if what == "tier" else UNLIMITED, limits=limits)
    rig.compute(PROMPT)
    rig.cache.evict_unused()
    assert saved(rig.step(), Level.HOST) == rig.contents(PROMPT, (2, 1, 0))
    rig.finish_saves()
    assert rig.levels.saves.num_skipped == 2
    assert len(rig.levels.saves.pending) == 0
    assert rig.compute(PROMPT).num_cached_tokens == 12


def test_the_number_of_saves_in_flight_is_limited() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, limits=PLENTY._replace(max_pending=6, max_writes=100))
    rig.compute(PROMPT)
    rig.cache.evict_unused()
    assert len(rig.step().saves) == 5
    rig.compute_without_saves(OTHER)
    rig.cache.evict_unused()
    assert saved(rig.step(), Level.HOST) == rig.contents(OTHER, (0,))
    rig.finish_saves()
    assert len(rig.levels.saves.pending) == 0


def test_a_piece_that_never_fits_displaces_nothing() -> None:
    rig = TieredRig(host_bytes=20, num_states=40)  # a state has 25 bytes
    rig.compute(PROMPT)
    rig.cache.evict_unused()
    assert saved(rig.step(), Level.HOST) == rig.contents(PROMPT, (1, 0))


def test_content_on_its_way_to_disk_is_saved_to_host_memory_when_it_is_evicted() -> None:
    rig = TieredRig(host_bytes=UNLIMITED, has_disk=True)
    rig.compute(PROMPT)
    rig.compute_without_saves(PROMPT)  # to disk, which takes long
    assert {one.level for one in rig.store.saving} == {Level.DISK}
    rig.cache.evict_unused()
    plan = rig.step()
    assert len(saved(plan, Level.HOST)) == 5
    assert all(save.levels == (Level.HOST,) for save in plan.saves if save.content in rig.contents(PROMPT, range(4)))
    rig.finish_saves()
    assert [len(level) for level in rig.levels.levels] == [5, 4]
