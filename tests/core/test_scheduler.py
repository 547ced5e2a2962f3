"""Tests of exact plans: requests, token counts and preemptions in each step. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from quire.backends.fake import run_alone
from quire.core.cache import StopReason
from quire.core.check import check_scheduler
from quire.core.events import Preempted, PrefixHitFound
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Aging
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.step import StepResult
from quire.core.values import FinishReason, Priority, SamplingParams
from quire.errors import Draining, InvalidRequest, InvariantViolation
from tests.core.helpers import NS, Rig, answer, pin_tokens, shape
from tests.sim.world import sibling

# Batching


def test_requests_join_and_leave_between_any_two_tokens() -> None:
    rig = Rig()
    first = rig.add(1, range(3), max_tokens=3)
    assert shape(rig.step()) == [(1, 0, 3)]
    second = rig.add(2, range(10, 15), max_tokens=1)
    assert shape(rig.step()) == [(1, 3, 1), (2, 0, 5)]
    assert shape(rig.step()) == [(1, 4, 1)]
    assert rig.step().is_empty
    assert [first.finish_reason, second.finish_reason] == [FinishReason.LENGTH] * 2


def test_a_long_prompt_is_chunked_while_decodes_continue() -> None:
    rig = Rig(max_num_batched_tokens=16, max_chunk_tokens=10, max_num_seqs=4)
    rig.add(1, range(4), max_tokens=20)
    rig.step()
    rig.add(2, range(100, 130))
    assert shape(rig.step()) == [(1, 4, 1), (2, 0, 10)]  # max_chunk_tokens
    rig.add(3, range(200, 230))
    assert shape(rig.step()) == [(1, 5, 1), (2, 10, 10), (3, 0, 5)]  # 16 tokens in all
    plan = rig.step()
    assert shape(plan) == [(1, 6, 1), (2, 20, 10), (3, 5, 5)]
    assert [piece.wants_token for piece in plan.slices] == [True, True, False]
    assert plan.num_tokens == 16


def test_prompts_beside_answers_are_bounded() -> None:
    rig = Rig(max_num_batched_tokens=100, max_chunk_tokens=100, max_mixed_tokens=6, max_num_seqs=4)
    rig.add(1, range(50), max_tokens=20)
    assert shape(rig.step()) == [(1, 0, 50)]  # nobody waits for a token
    rig.add(2, range(100, 110))
    rig.add(3, range(200, 210))
    assert shape(rig.step()) == [(1, 50, 1), (2, 0, 6)]
    assert shape(rig.step()) == [(1, 51, 1), (2, 6, 4), (3, 0, 3)]
    assert shape(rig.step()) == [(1, 52, 1), (2, 10, 1), (3, 3, 7)]  # its reserved token and 6 more


def test_waiting_and_running_requests_are_merged_by_key() -> None:
    rig = Rig(max_num_batched_tokens=9, max_chunk_tokens=9, max_num_seqs=4, policy=Aging(patience=10))
    rig.add(1, range(100, 130), priority=Priority.LOW)
    rig.step()
    rig.add(2, range(200, 220), priority=Priority.HIGH)
    assert shape(rig.step()) == [(2, 0, 8), (1, 9, 1)]  # HIGH's prompt first; LOW keeps its reserved token


# One step in flight


def test_the_next_step_is_planned_before_the_last_token_is_known() -> None:
    rig = Rig()
    request = rig.add(1, range(5), max_tokens=4)
    first = rig.launch()
    second = rig.launch()
    assert second.slices[0].tokens == ()  # the runner uses its last sample
    assert shape(second) == [(1, 5, 1)]
    rig.land(first)
    third = rig.launch()
    rig.land(second)
    fourth = rig.launch()
    rig.land(third)
    assert rig.launch().is_empty  # all four samples are committed or in flight
    rig.land(fourth)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output == run_alone(range(5), request.sampling, 4, block_size=4, vocab_size=1000)


def test_at_most_two_plans_are_in_flight_and_they_are_committed_in_order() -> None:
    rig = Rig()
    rig.add(1, range(5))
    first, second = rig.launch(), rig.launch()
    with pytest.raises(InvariantViolation, match="2 plans are in flight"):
        rig.scheduler.schedule(0)
    with pytest.raises(InvariantViolation, match="not the oldest"):
        rig.scheduler.commit(second, answer(second))
    with pytest.raises(InvariantViolation, match="0 results for 1 slices"):
        rig.scheduler.commit(first, StepResult(()))


# The prefix cache


def test_eight_siblings_of_one_new_prompt_cost_one_prefill() -> None:
    rig = Rig(block_size=32, num_blocks=400, max_num_batched_tokens=4096, max_chunk_tokens=512, max_num_seqs=8)
    prompt = range(1000)
    siblings = [rig.add(request_id, prompt, max_tokens=4) for request_id in range(8)]
    computed = rig.step().num_tokens
    assert len(rig.scheduler.waiting.prefix_waiters) == 7
    while rig.scheduler.has_work:
        rig.now_ns += NS // 10
        computed += rig.step().num_tokens
    assert computed == 1000 + 7 * 1 + 8 * 3  # one prefill, one token for each sibling, and the decodes
    assert [event.num_tokens for event in rig.happened(PrefixHitFound)] == [999] * 7
    assert len({tuple(sibling.output) for sibling in siblings}) == 1  # the answer does not depend on a cache hit


def test_n_samples_wait_for_a_chunked_prompt() -> None:
    rig = Rig(max_chunk_tokens=3)
    first = rig.add(1, range(20), max_tokens=1)
    rig.scheduler.add(sibling(first, 2, 1), 0)
    computed = 0
    while rig.scheduler.has_work:
        rig.now_ns += NS
        computed += rig.step().num_tokens
    assert computed == 20 + 1


def test_prompt_logprobs_are_computed_in_full_even_beside_a_parent() -> None:
    rig = Rig()
    first = Request(1, range(10), SamplingParams(prompt_logprobs=1, max_tokens=4))
    rig.scheduler.add(first, 0)
    rig.step()
    rig.scheduler.add(Request(2, range(10), first.sampling, parent=first), 0)
    assert shape(rig.step()) == [(1, 10, 1), (2, 0, 10)]


def test_explain_sees_prefixes_in_flight_and_changes_nothing() -> None:
    rig = Rig(max_chunk_tokens=8)
    rig.add(1, range(30))
    rig.step()
    probe = Request(99, range(30))
    found = rig.scheduler.explain(probe)
    assert (found.num_tokens, found.num_blocks, found.stopped_at, found.reason) == (8, 2, 8, StopReason.IN_FLIGHT)
    assert rig.scheduler.explain(Request(99, range(30), salt="other")).reason is StopReason.NOT_FOUND
    assert probe.state is RequestState.NEW


# Memory or batch rows run out


def test_waiting_high_preempts_running_low_for_a_batch_row_and_for_blocks() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=2)  # 8 blocks
    rig.add(1, range(16), priority=Priority.LOW, max_tokens=30)
    rig.step()
    rig.add(2, range(100, 124), priority=Priority.HIGH, max_tokens=2)  # needs 6 blocks, 4 are free
    assert shape(rig.step()) == [(2, 0, 24)]
    assert rig.happened(Preempted) == [Preempted(1, by_request_id=2)]


def test_later_requests_do_not_overtake_a_head_that_does_not_fit() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=4)
    rig.add(1, range(16), max_tokens=8)
    rig.step()
    rig.add(2, range(100, 124))  # does not fit next to 1
    rig.add(3, range(200, 203))  # would fit
    assert shape(rig.step()) == [(1, 16, 1)]


def test_an_admission_leaves_a_block_for_each_running_request() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=4)  # 8 blocks
    rig.add(1, range(16), priority=Priority.NORMAL, max_tokens=8)
    rig.step()
    rig.add(2, range(100, 116), priority=Priority.HIGH)  # needs all 4 free blocks: none would be left for 1
    rig.step()
    assert [request.request_id for request in rig.scheduler.running] == [2]  # so it preempts 1
    assert [event.request_id for event in rig.happened(Preempted)] == [1]
    rig = Rig(num_blocks=10, max_num_seqs=4)
    rig.add(1, range(16), max_tokens=8)
    rig.step()
    rig.add(2, range(100, 116), priority=Priority.HIGH)
    assert shape(rig.step()) == [(2, 0, 16), (1, 16, 1)]  # with one more block, both run


def test_a_step_that_preempted_admits_only_requests_that_may_preempt_the_victims() -> None:
    rig = Rig(num_blocks=17, max_num_seqs=2, policy=Aging())  # 16 blocks
    rig.add(1, range(28), max_tokens=20)
    rig.add(2, range(100, 128), max_tokens=20)
    rig.step()
    rig.add(3, [7, 8], priority=Priority.LOW)
    rig.now_ns += 15 * NS
    rig.add(4, range(200, 244), priority=Priority.HIGH, max_tokens=20)  # preempts both
    assert shape(rig.step()) == [(4, 0, 44)]  # 3 is next and would fit, but it may not preempt the victims
    assert [event.request_id for event in rig.happened(Preempted)] == [2, 1]


def test_a_batch_row_is_left_for_a_prefix_waiter() -> None:
    rig = Rig(max_num_seqs=4, max_chunk_tokens=8, num_blocks=200)
    rig.add(1, range(60), max_tokens=100)
    sibling = rig.add(2, range(60), max_tokens=100)
    for request_id in range(3, 20):
        rig.add(request_id, [500 + request_id] * 3, max_tokens=200)
    while sibling.state is RequestState.WAITING:
        rig.now_ns += NS // 100
        plan = rig.step()
        assert len(plan.slices) <= 4
    assert sibling.num_cached_tokens == 59
    assert sibling.waited_ns < NS // 5


def test_a_child_that_may_preempt_its_parent_does_not_share_its_blocks() -> None:
    """Preempting the parent would release the blocks that the child wants to share."""
    rig = Rig(num_blocks=17, max_num_seqs=4)  # 16 blocks
    parent = rig.add(1, range(30), priority=Priority.LOW, max_tokens=20)
    rig.step()
    rig.cache.clear()  # the blocks are now only in the parent's table
    child = Request(2, parent.tokens, SamplingParams(max_tokens=4), priority=Priority.HIGH, parent=parent)
    rig.scheduler.add(child, 0)
    plan = rig.step()
    assert [piece.request_id for piece in plan.slices] == [2]
    rig.run()
    assert child.finish_reason is not None


def test_high_preempts_although_the_whole_budget_is_reserved() -> None:
    rig = Rig(max_num_seqs=2, max_num_batched_tokens=2, max_chunk_tokens=8)
    for request_id in (1, 2):
        rig.add(request_id, [request_id], priority=Priority.LOW, max_tokens=30)
    rig.step()
    rig.add(3, [7, 8, 9], priority=Priority.HIGH)
    assert 3 in [piece.request_id for piece in rig.step().slices]


def test_a_request_that_needs_pinned_blocks_does_not_wait_for_running_requests() -> None:
    rig = Rig(num_blocks=33, max_num_seqs=8)  # 32 blocks, 16 pinned
    rig.add(0, range(900, 964), max_tokens=1)
    rig.run()
    assert pin_tokens(rig.cache, "system", list(range(900, 964)), "", expires_ns=10**18) == 64
    rig.add(1, [1, 2], max_tokens=100)
    rig.step()
    rig.add(2, range(80), max_tokens=1)  # 20 blocks
    assert 2 in [piece.request_id for piece in rig.step().slices]
    assert not rig.cache.pins


def test_pins_are_kept_if_freeing_a_batch_row_frees_enough_blocks() -> None:
    rig = Rig(num_blocks=33, max_num_seqs=1)
    rig.add(0, range(900, 964), max_tokens=1)
    rig.run()
    pin_tokens(rig.cache, "system", list(range(900, 964)), "", expires_ns=10**18)
    rig.add(1, range(60), priority=Priority.LOW)
    rig.step()
    rig.add(2, range(100, 140), priority=Priority.HIGH)
    rig.step()
    assert [event.request_id for event in rig.happened(Preempted)] == [1]
    assert len(rig.cache.pins) == 1


def test_a_request_does_not_wait_for_a_prefix_that_will_not_be_published() -> None:
    rig = Rig(max_chunk_tokens=8)
    rig.add(1, range(60))
    rig.step()
    rig.cache.clear()
    rig.add(2, range(60))
    assert 2 in [piece.request_id for piece in rig.step().slices]


def test_own_blocks_found_after_a_preemption_are_not_cached_tokens() -> None:
    rig = Rig(max_num_seqs=1)
    low = rig.add(1, range(20), priority=Priority.LOW)
    rig.step()
    rig.add(2, range(100, 104), priority=Priority.HIGH, max_tokens=1)
    rig.run()
    assert (low.num_preemptions, low.num_cached_tokens) == (1, 0)


def test_tokens_in_flight_take_no_budget() -> None:
    rig = Rig(max_num_batched_tokens=20, max_chunk_tokens=20, max_num_seqs=4)
    rig.add(1, range(18), max_tokens=4)
    rig.launch()
    rig.add(2, range(100, 130))
    assert shape(rig.launch()) == [(1, 18, 1), (2, 0, 19)]


def test_pins_and_low_are_kept_if_dropping_them_would_not_free_enough() -> None:
    rig = Rig(num_blocks=33, max_num_seqs=4)  # 32 blocks
    rig.add(0, range(900, 908), max_tokens=1)
    rig.run()
    pin_tokens(rig.cache, "system", list(range(900, 908)), "", expires_ns=10**18)
    rig.add(1, range(80), max_tokens=20)
    rig.add(2, range(100, 104), priority=Priority.LOW, max_tokens=20)
    rig.step()
    rig.add(3, range(200, 300))  # needs 25 blocks; 1 keeps 20 of 32 in any case
    for _ in range(3):
        rig.step()
    assert len(rig.cache.pins) == 1
    assert rig.happened(Preempted) == []


def test_a_victim_that_shares_the_hit_blocks_frees_nothing() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=4)  # 8 blocks
    rig.add(1, range(500, 507), priority=Priority.HIGH)
    rig.add(2, range(12), priority=Priority.LOW)
    rig.step()
    rig.add(3, [*range(12), *range(700, 712)], priority=Priority.HIGH)  # 3 of its 6 blocks are held by 2
    rig.step()
    assert rig.happened(Preempted) == []
    assert len(rig.scheduler.running) == 2


def test_an_admission_preempts_as_few_requests_as_possible() -> None:
    rig = Rig(num_blocks=33, max_num_seqs=8)  # 32 blocks
    for request_id in range(5):
        rig.add(request_id, range(100 * request_id, 100 * request_id + 20), priority=Priority.LOW, max_tokens=20)
    rig.step()
    rig.add(9, range(900, 940), priority=Priority.HIGH)  # 10 blocks, and one spare block per remaining request
    rig.step()
    assert [event.request_id for event in rig.happened(Preempted)] == [4, 3]


def test_pins_are_dropped_before_requests_are_preempted() -> None:
    rig = Rig(num_blocks=9, max_num_seqs=2)
    rig.add(1, range(16), max_tokens=1)
    rig.run()
    assert pin_tokens(rig.cache, "system", list(range(16)), "", expires_ns=10**18) == 16
    rig.add(2, range(100, 107), max_tokens=12)
    rig.add(3, range(200, 202), max_tokens=5)
    rig.run()
    assert not rig.cache.pins
    assert rig.happened(Preempted) == []


# End of requests


def test_an_id_in_use_is_refused() -> None:
    rig = Rig()
    request = rig.add(1, range(3))
    with pytest.raises(InvalidRequest, match="request_id = 1 is in use"):
        rig.add(1, range(3))
    rig.run()
    with pytest.raises(InvalidRequest, match="or the request was added before"):
        rig.scheduler.add(request, 0)


def test_a_late_result_is_not_given_to_a_new_request_with_an_old_id() -> None:
    rig = Rig()
    rig.add(5, range(4))
    first = rig.launch()
    rig.scheduler.cancel(5)
    again = rig.add(5, range(50, 60), max_tokens=3)
    assert rig.land(first) == []
    check_scheduler(rig.scheduler)
    rig.run()
    assert again.output == run_alone(range(50, 60), again.sampling, 3, block_size=4, vocab_size=1000)


def test_finish_truncates_the_output_at_a_stop_string() -> None:
    rig = Rig()
    request = rig.add(1, range(10), max_tokens=20)
    for _ in range(6):
        rig.step()
    answered = request.output
    with pytest.raises(InvalidRequest, match="num_output_tokens = 7 is not from 0 to 6"):
        rig.scheduler.finish(1, 7)
    assert rig.scheduler.finish(1, 4)
    assert request.output == answered[:4]
    assert request.finish_reason is FinishReason.STOP
    assert not rig.scheduler.finish(1, 4)


def test_drain_completes_current_requests_and_refuses_new_ones() -> None:
    rig = Rig(max_num_seqs=1)
    requests = [rig.add(1, range(3)), rig.add(2, range(3))]
    rig.scheduler.drain()
    with pytest.raises(Draining):
        rig.add(3, range(3))
    rig.run()
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 2
    assert not rig.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens = 7 is less than max_num_seqs = 8"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens = 0"),
        ({"max_mixed_tokens": 0}, "max_mixed_tokens = 0"),
        ({"max_waiting": 0}, "max_requests = 0"),
    ],
)
def test_impossible_limits_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Scheduler(KVCacheManager(9, 4), Aging(), **options)  # type: ignore[arg-type]


def test_max_model_len_is_limited_by_the_pool() -> None:
    assert Scheduler(KVCacheManager(9, 4), Aging(), max_model_len=10_000).max_model_len == 32
    assert Scheduler(KVCacheManager(9, 4), Aging(), max_model_len=20).max_model_len == 20
