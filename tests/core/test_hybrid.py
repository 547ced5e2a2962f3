"""Window blocks and recurrent states: what a hit needs, what a running request holds, what stays in the cache."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.cache import KVCacheBlock, StatePool, StopReason, WindowBlock, WindowPool
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.lower_level import cached_window
from quire.core.memory import ALL_PLACES, place_points
from quire.core.request import Request
from quire.core.values import SamplingParams
from quire.errors import InvalidRequest, OutOfBlocks
from tests.core.helpers import Rig

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class HybridRig(Rig):
    """A scheduler with windows or states on a fake runner that models them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 200, "max_num_seqs": 4, "max_num_batched_tokens": 512, **options})

    def answer(self, request: Request) -> list[int]:
        """Run a request to its end, and compare its answer with the same request alone."""
        prompt = [*request.tokens]
        self.scheduler.add(request, 0)
        while self.scheduler.has_work:
            self.step()
        assert request.output == self.output_alone(prompt, request.sampling)
        return request.output

    def peak_windows(self, request: Request) -> int:
        """Run a request, and return the largest number of window blocks in use."""
        pool, most = self.cache.memory.windows.pool, 0
        self.scheduler.add(request, 0)
        while self.scheduler.has_work:
            self.step()
            most = max(most, pool.num_usable - pool.num_free)
        return most


def ask(number: int, prompt: list[int] | range, **options: object) -> Request:
    return Request(number, prompt, GREEDY, **options)  # type: ignore[arg-type]


# Windows


def test_a_long_context_holds_only_its_window() -> None:
    rig = HybridRig(window=8, num_window_blocks=100, max_chunk_tokens=8)
    assert rig.peak_windows(ask(1, range(120))) <= (8 - 1 + 8) // 4 + 2


def test_a_window_pool_too_small_for_one_chunk_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"num_window_blocks = 5 is less than .*max_chunk_tokens = 256"):
        HybridRig(window=8, num_window_blocks=5)


def test_window_blocks_behind_a_request_are_taken_first() -> None:
    pool = WindowPool(6)
    cache = KVCacheManager(8, 4)
    nodes = cache.pool.take(3)
    for node in nodes:
        node.parent_key = b"published"
    blocks = pool.take(3)
    for block, node in zip(blocks, nodes, strict=True):
        pool.attach(block, node)
    pool.release(blocks[:1], is_kept=True)
    pool.release(blocks[1:], is_kept=False)
    assert [block.block_id for block in pool.take(5)] == [4, 5, 2, 3, 1]
    with pytest.raises(OutOfBlocks):
        pool.take(1)


# States


def test_other_users_continue_after_the_same_system_text() -> None:
    rig = HybridRig(num_states=20)
    rig.answer(ask(1, [*range(40), *range(100, 120)], boundaries=(40,)))
    request = ask(2, [*range(40), *range(200, 220)], boundaries=(40,))
    rig.answer(request)
    assert request.num_cached_tokens == 40


def test_a_branch_leaves_a_state_for_the_third_request() -> None:
    rig = HybridRig(num_states=20)
    rig.answer(ask(1, [*range(40), *range(100, 120)]))
    second, third = (ask(number, [*range(40), *range(100 * number, 100 * number + 20)]) for number in (2, 3))
    rig.answer(second)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 0)
    assert second.cache_explanation is not None
    assert second.cache_explanation.reason is StopReason.NO_STATE
    assert second.cache_explanation.num_kv_tokens == 40
    rig.answer(third)
    assert third.num_cached_tokens == 40


def test_without_a_place_no_state_is_stored() -> None:
    rig = HybridRig(num_states=20, places=frozenset())
    rig.answer(ask(1, range(50), boundaries=(20,)))
    stats = rig.cache.stats().states
    assert stats is not None
    assert stats.num_snapshots == 0


def test_too_few_states_for_the_requests_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"num_states = 8 is less than 9.*max_num_seqs = 4"):
        HybridRig(num_states=8)


def test_with_states_for_the_requests_only_everything_still_runs() -> None:
    rig = HybridRig(num_states=9)
    for number in range(3):
        rig.answer(ask(number, range(50)))
    assert rig.cache.stats().num_hit_tokens == 0  # all slots are reserved for requests that may start


# Eviction of states


def fill(pool: StatePool, *costs: int) -> list[bytes]:
    names = [bytes([number]) for number in range(len(costs))]
    for name, cost in zip(names, costs, strict=True):
        slot = pool.take(1)[0]
        pool.publish(slot, name, b"", cost)
        pool.release((slot,))
    return names


def test_the_state_that_saves_least_is_evicted_first() -> None:
    pool = StatePool(4)
    fill(pool, 500, 20, 3000)
    pool.take(1)
    assert not pool.at(b"\x01")
    pool.take(1)
    assert not pool.at(b"\x00")
    assert pool.at(b"\x02")


def test_a_costly_state_that_nobody_uses_is_evicted_in_the_end() -> None:
    pool = StatePool(3)
    fill(pool, 1000)
    for number in range(10, 40):
        slot = pool.take(1)[0]
        pool.publish(slot, bytes([number]), b"", 100)
        pool.release((slot,))
        if not pool.at(b"\x00"):
            break
    else:
        pytest.fail("the evictor never gave up the most costly state")
    assert number > 15  # it outlived several that save little


def test_use_renews_a_state() -> None:
    pool = StatePool(3)
    fill(pool, 100, 100)
    pool.take(1)  # evicts one of two equal states, and advances the clock
    kept = b"\x00" if pool.at(b"\x00") else b"\x01"
    slot = pool.at(kept)[b""]
    score = slot.score
    pool.touch(slot)
    assert slot.score > score


def test_a_request_that_computes_shared_blocks_again_leaves_them_in_the_tree() -> None:
    """It ends before it has passed the keys and values that it shares: it has computed nothing of its own."""
    rig = HybridRig(num_states=40, max_chunk_tokens=2)
    rig.answer(ask(1, range(17)))
    rig.cache.memory.states.pool.evict_unused()
    request = ask(2, range(17))
    rig.scheduler.add(request, 0)
    plan = rig.step()
    assert (plan.slices[0].start, plan.slices[0].kv_start) == (0, 16)
    rig.scheduler.cancel(2)
    assert rig.cache.match(ask(3, range(17))).num_tokens == 16


def test_a_window_of_any_block_with_the_same_tokens_is_found() -> None:
    node, *twins = map(KVCacheBlock, range(3))
    own, other = map(WindowBlock, range(2))
    assert cached_window(node) is None
    node.twins = tuple(twins)
    assert cached_window(node) is None
    twins[1].window = other
    assert cached_window(node) is other
    node.window = own
    assert cached_window(node) is own


# Placement


@pytest.mark.parametrize(
    ("num_tokens", "start", "num_kv", "boundaries", "expected"),
    [
        (6000, 0, 0, (), [5999]),
        (6000, 0, 0, (400, 5990), [400, 5990]),  # the end of the prompt is too close to the start of the answer
        (6000, 5000, 5600, (400,), [5600, 5999]),
        (6000, 5990, 5990, (), []),
        (5, 0, 0, (), [4]),
        (1, 0, 0, (), []),
    ],
)
def test_points(num_tokens: int, start: int, num_kv: int, boundaries: tuple[int, ...], expected: list[int]) -> None:
    assert place_points(num_tokens, start, num_kv, boundaries, ALL_PLACES, 16) == expected
