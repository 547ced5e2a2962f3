"""Drafts in an engine with the fake runner: no answer changes, and steps are saved where text repeats."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, run_alone
from quire.core.check import check_scheduler
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Policy
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan
from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.engine import NUM_MISSES, NUM_SKIPPED, Drafter, Engine, Guess
from quire.engine.generation import GenerationRequest, Predicted
from quire.errors import InvalidRequest

BLOCK_SIZE, VOCAB_SIZE = 4, 50


def make(*, has_overlap: bool, num_states: int = 0, max_num_seqs: int = 32) -> Engine:
    capacity = Capacity(
        200, BLOCK_SIZE, max_num_seqs, 400, VOCAB_SIZE, has_overlap=has_overlap, max_drafts=7, num_states=num_states
    )
    cache = KVCacheManager(200, BLOCK_SIZE, num_states=num_states, num_live_states=capacity.num_live_states)
    scheduler = Scheduler(cache, Policy(), max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=400)
    return Engine(FakeRunner(capacity, is_late=has_overlap), scheduler, has_drafts=True)


def run(engine: Engine) -> tuple[dict[int, list[int]], dict[int, Predicted | None], int]:
    """Run all requests. Returns their tokens, what was predicted, and the number of steps."""
    tokens: dict[int, list[int]] = {}
    predicted: dict[int, Predicted | None] = {}
    num_steps = 0
    plans = engine.on_plan
    assert plans is None
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            predicted[output.request_id] = output.predicted
        check_scheduler(engine.scheduler)
        num_steps += 1
    return tokens, predicted, num_steps


def alone(prompt: Sequence[int], num_tokens: int, *, has_states: bool = False) -> list[int]:
    greedy = SamplingParams(temperature=0)
    return run_alone(prompt, greedy, num_tokens, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, has_states=has_states)


@pytest.mark.parametrize("num_states", [0, 70])
@pytest.mark.parametrize("has_overlap", [False, True])
def test_a_prediction_saves_steps_and_changes_nothing(has_overlap: bool, num_states: int) -> None:
    if num_states and not has_overlap:
        pytest.skip("one state per request cannot be rolled back")
    engine = make(has_overlap=has_overlap, num_states=num_states)
    prompt = [3, 1, 4, 1, 5, 9]
    expected = alone(prompt, 60, has_states=num_states > 0)
    wrong = [*expected[:20], 1, 2, 3, *expected[23:]]
    engine.add(
        1, GenerationRequest.of(prompt, SamplingParams(temperature=0, max_tokens=60), prediction=PackedPrompt.of(wrong))
    )
    tokens, predicted, num_steps = run(engine)
    assert tokens[1] == expected
    found = predicted[1]
    assert found is not None
    assert found.num_right > 40
    assert 0 < found.num_wrong < 15
    assert num_steps < 40
    assert engine.scheduler.num_accepted == found.num_right


def test_a_prediction_outside_the_vocabulary_is_refused() -> None:
    """A tokenizer may have more tokens than the model. As drafts, they would make the step of all requests fail."""
    engine = make(has_overlap=False)
    prediction = PackedPrompt.of([1, VOCAB_SIZE])
    with pytest.raises(InvalidRequest, match="prediction: token id 50 is outside the vocabulary of 50"):
        engine.add(1, GenerationRequest.of([1, 2], SamplingParams(temperature=0, max_tokens=6), prediction=prediction))
    assert not engine.has_work


def test_every_call_plans_a_step_while_drafts_are_verified() -> None:
    """The call that collects a step with drafts also plans the next one, so that the device does not wait for it."""
    engine = make(has_overlap=True)
    prompt = [3, 1, 4, 1, 5, 9]
    expected = alone(prompt, 60)
    plans: list[StepPlan] = []
    engine.on_plan = plans.append
    engine.add(
        1,
        GenerationRequest.of(
            prompt, SamplingParams(temperature=0, max_tokens=60), prediction=PackedPrompt.of(expected)
        ),
    )
    num_calls = 0
    while engine.has_work:
        engine.step()
        num_calls += 1
    assert len(plans) == num_calls
    assert [plan.is_empty for plan in plans] == [False] * (num_calls - 1) + [True]
    assert num_calls < 12


def test_requests_without_drafts_go_on_beside_one_that_is_held() -> None:
    engine = make(has_overlap=True)
    prompts = [[number, 1, 4, 1, 5, 9] for number in range(4)]
    expected = alone(prompts[0], 40)
    plain = SamplingParams(temperature=0, max_tokens=40)
    engine.add(0, GenerationRequest.of(prompts[0], plain, prediction=PackedPrompt.of(expected)))
    for number, prompt in enumerate(prompts[1:], 1):
        engine.add(number, GenerationRequest.of(prompt, plain))
    widths: list[tuple[int, bool]] = []
    engine.on_plan = lambda plan: widths.append((len(plan.slices), len(engine.scheduler.in_flight) > 1))
    while engine.has_work:
        engine.step()
        check_scheduler(engine.scheduler)
    assert (3, True) in widths  # planned while the drafts of the other were in flight


def test_a_wait_in_vain_is_a_failure_and_ends() -> None:
    """Text that repeats and never goes on as before: longer matches are demanded, and steps overlap again."""
    engine = make(has_overlap=True)
    cycle = [6, 7, 8, 9]
    prompt = [number for turn in range(10, 40) for number in (*cycle, turn)]
    engine.add(1, GenerationRequest.of([*prompt, *cycle], SamplingParams(temperature=0, max_tokens=40)))
    entry = engine.speculation._entries[1]
    request = entry.request
    engine.step()
    held: list[bool] = []
    for number in range(12):  # as if the answer repeated the cycle, but not what follows it
        entry.request.tokens.extend([*cycle, 100 + number, *cycle])
        request.num_in_flight = 1
        engine.speculation.update([1], 1, None, engine._masking)
        held.append(request.is_held)
        request.tokens.append(200 + number)  # not what was guessed
        request.num_in_flight = 0
        engine.speculation.update([1], 1, None, engine._masking)
        assert not request.is_held
    assert held[:2] == [True, True]
    assert not held[-1]


def test_text_that_repeats_nothing_is_looked_up_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(has_overlap=False)
    engine.add(1, GenerationRequest.of([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=300)))
    entry = engine.speculation._entries[1]
    looked_up: list[int] = []
    guess = Drafter.guess

    def counted(drafter: Drafter, tokens: array[int], num_prompt_tokens: int, most: int) -> Guess:
        looked_up.append(len(tokens))
        return guess(drafter, tokens, num_prompt_tokens, most)

    monkeypatch.setattr(Drafter, "guess", counted)

    def arrive(tokens: Sequence[int]) -> list[bool]:
        found: list[bool] = []
        for token in tokens:
            entry.request.tokens.append(token)
            engine.speculation.update([1], 1, None, engine._masking)
            found.append(bool(entry.request.draft))
        return found

    assert not any(arrive(range(100, 180)))
    assert len(looked_up) == NUM_MISSES + (80 - NUM_MISSES) // (NUM_SKIPPED + 1)
    found = arrive([1, 2, 3, 4, 5, 6, 7])  # repeats the prompt: found a few tokens late
    assert any(found[3:])
    assert all(found[found.index(True) :])  # and then at every token


def test_requests_that_have_no_drafts() -> None:
    engine = make(has_overlap=True)
    prompt = [3, 1, 4, 1, 5, 9]
    prediction = PackedPrompt.of(alone(prompt, 20))
    plain = SamplingParams(temperature=0, max_tokens=20)
    for number, sampling in enumerate((replace(plain, repetition_penalty=1.1), replace(plain, prompt_logprobs=0))):
        engine.add(number, GenerationRequest.of(prompt, sampling, prediction=prediction))
    run(engine)
    assert engine.scheduler.num_drafted == 0


def test_no_drafts_in_a_large_batch() -> None:
    engine = make(has_overlap=True, max_num_seqs=64)
    prompts = [[number, 1, 4, 1, 5, 9] for number in range(48)]
    for number, prompt in enumerate(prompts):
        prediction = PackedPrompt.of(alone(prompt, 40))
        engine.add(
            number, GenerationRequest.of(prompt, SamplingParams(temperature=0, max_tokens=40), prediction=prediction)
        )
    run(engine)
    # The first step of a request may have drafts: at that time few requests run.
    assert engine.scheduler.num_drafted < 48 * 8
