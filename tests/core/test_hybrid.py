"""Window blocks and recurrent states: what a hit needs, what a running request holds, what stays in the cache."""

from __future__ import annotations

import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, run_alone
from quire.core.cache.context import KVCacheBlock, WindowBlock
from quire.core.cache.prefix import StatePool, StopReason, WindowPool
from quire.core.kv_cache import KVCacheManager
from quire.core.memory import ALL_PLACES, Place, cached_window, place_points
from quire.core.policy import Fair
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.values import FinishReason, SamplingParams
from quire.errors import InvalidRequest, OutOfBlocks
from tests.core.helpers import Rig

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class HybridRig(Rig):
    """A scheduler with windows or states on a fake runner that models them."""

    def __init__(
        self,
        *,
        window: int = 0,
        num_window_blocks: int = 0,
        num_states: int = 0,
        num_blocks: int = 200,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_chunk_tokens: int = 256,
        num_live_states: int = 2,
        places: frozenset[Place] = ALL_PLACES,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
        self.window, self.has_states = window, num_states > 0
        self.cache = KVCacheManager(
            num_blocks,
            block_size,
            observe=self.events.append,
            window=window,
            num_window_blocks=num_window_blocks,
            num_states=num_states,
            num_live_states=num_live_states,
            places=places,
        )
        self.scheduler = Scheduler(
            self.cache,
            Fair(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_chunk_tokens=max_chunk_tokens,
            observe=self.events.append,
        )
        capacity = Capacity(
            num_blocks,
            block_size,
            max_num_seqs,
            self.scheduler.max_model_len,
            vocab_size=1000,
            window=window,
            num_window_blocks=num_window_blocks,
            num_states=num_states,
        )
        self.runner = FakeRunner(capacity, is_late=True)

    def answer(self, request: Request) -> list[int]:
        """Run a request to its end, and compare its answer with the same request alone."""
        prompt, count = [*request.tokens], request.sampling.max_tokens or 0
        self.scheduler.add(request, 0)
        while self.scheduler.has_work:
            self.step()
        alone = run_alone(
            prompt,
            request.sampling,
            count,
            block_size=4,
            vocab_size=1000,
            window=self.window,
            has_states=self.has_states,
        )
        assert request.output == alone
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


def test_a_second_request_needs_only_the_window_before_its_start() -> None:
    rig = HybridRig(window=8, num_window_blocks=12, max_chunk_tokens=16)
    rig.answer(ask(1, range(60)))
    request = ask(2, range(60))
    rig.answer(request)
    assert request.num_cached_tokens == 59


def test_lost_window_blocks_are_computed_again_and_keys_are_not_written_twice() -> None:
    rig = HybridRig(window=8, num_window_blocks=12, max_chunk_tokens=16)
    rig.answer(ask(1, range(60)))
    for first in (200, 300, 400):
        rig.answer(ask(first, range(first, first + 60)))  # they take all window blocks, and leave the KV blocks
    request = ask(3, range(60))
    rig.answer(request)  # the fake runner fails if a position that is not written has other content
    assert request.num_cached_tokens < 59
    explanation = request.cache_explanation
    assert explanation is not None
    assert explanation.reason is StopReason.NO_WINDOW
    assert (explanation.num_kv_tokens, explanation.stopped_at) == (59, request.num_cached_tokens)


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


def test_the_same_prompt_again_computes_one_token() -> None:
    rig = HybridRig(num_states=20)
    rig.answer(ask(1, range(50)))
    request = ask(2, range(50))
    rig.answer(request)
    assert request.num_cached_tokens == 49


@pytest.mark.parametrize("num_live_states", [1, 2])
def test_the_next_turn_continues_after_the_answer(num_live_states: int) -> None:
    rig = HybridRig(num_states=20, num_live_states=num_live_states)
    answer = rig.answer(ask(1, range(50)))
    request = ask(2, [*range(50), *answer, *range(700, 720)])
    rig.answer(request)
    assert request.num_cached_tokens == 50 + len(answer) - 1  # the last token of an answer is never computed


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


def test_siblings_wait_for_one_computation() -> None:
    rig = HybridRig(num_states=40, max_num_seqs=8, max_chunk_tokens=16)
    requests = [ask(number, range(100)) for number in range(8)]
    rig.scheduler.add(requests[0], 0)
    num_computed = 0
    for number in range(200):
        if number in range(1, 8):
            rig.scheduler.add(requests[number], 0)  # one after the other, while the first is being computed
        plan = rig.step()
        if plan.is_empty:
            break
        num_computed += sum(piece.length for piece in plan.slices if piece.start < 100)
    assert num_computed == 100 + 7
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}


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


def test_pins_keep_a_state() -> None:
    rig = HybridRig(num_states=12)
    rig.answer(ask(1, range(50), boundaries=(40,)))
    assert rig.cache.pin("pin", range(50), "", 10**18) == 48
    for number in range(2, 12):
        rig.answer(ask(number, range(100 * number, 100 * number + 50)))
    request = ask(99, range(50))
    rig.answer(request)
    assert request.num_cached_tokens == 40
    rig.cache.pins.clear()


def test_clear_forgets_states_and_windows() -> None:
    rig = HybridRig(window=8, num_window_blocks=80, num_states=20)
    rig.answer(ask(1, range(50)))
    rig.cache.clear()
    stats = rig.cache.stats()
    assert stats.states is not None
    assert stats.windows is not None
    assert (stats.states.num_snapshots, stats.windows.num_cached) == (0, 0)
    request = ask(2, range(50))
    rig.answer(request)
    assert request.num_cached_tokens == 0


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
    node.twins = twins
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
