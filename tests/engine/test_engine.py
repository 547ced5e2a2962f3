"""The engine loop: failures end single requests, repeated failures end the engine, nothing leaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.backends.base import Capacity, TokenMasks
from quire.backends.fake import FakeRunner, run_alone
from quire.core.check import check_scheduler
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Policy
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import FinishReason, PackedPrompt, SamplingParams
from quire.engine import engine as engine_module
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import MAX_FAILED_STEPS, BrokenRunner, Engine
from quire.engine.generation import EngineOutput, GenerationRequest, PinPrefix
from quire.errors import InvalidRequest

CAPACITY = Capacity(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=100, vocab_size=50)
GREEDY = SamplingParams(temperature=0, max_tokens=10)


class FaultyRunner(FakeRunner):
    """A runner that fails at configured points."""

    def __init__(self, capacity: Capacity = CAPACITY) -> None:
        super().__init__(capacity)
        self.in_forward: Callable[[StepPlan], None] = lambda _: None
        self.reach: Callable[[str], None] = lambda _: None  # gets the name of each place
        self.change: Callable[[StepPlan, StepResult], StepResult] = lambda _, result: result
        self._plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> None:
        self.in_forward(plan)
        self.reach("forward")
        super().forward(plan)
        self._plans.append(plan)

    def sample(self, masks: TokenMasks | None) -> None:
        self.reach("sample")
        super().sample(masks)
        try:
            self.reach("after")
        except BaseException:  # as on a GPU, the samples have been stored already, and there is no result
            self._results.pop()
            self._plans.pop()
            raise

    def collect(self) -> StepResult:
        plan, result = self._plans.pop(0), super().collect()
        self.reach("collect")
        return self.change(plan, result)

    def abandon(self) -> None:
        if self._forwarded is not None:
            self._plans.pop()
        super().abandon()


def make(runner: FakeRunner, **settings: int) -> Engine:
    return Engine(runner, make_scheduler(runner, EngineConfig(**settings)))  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[int, list[EngineOutput]]:
    outputs: dict[int, list[EngineOutput]] = defaultdict(list)
    for _ in range(500):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs[output.request_id].append(output)
        check_scheduler(engine.scheduler)
    assert not engine.has_work
    assert engine.scheduler.cache.stats().num_in_use == 0
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def alone(prompt: list[int], sampling: SamplingParams = GREEDY, num_tokens: int = 10) -> list[int]:
    return run_alone(prompt, sampling, num_tokens, block_size=4, vocab_size=50)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("has_overlap", [False, True])
def test_answers_are_those_of_each_request_alone(is_late: bool, has_overlap: bool) -> None:
    engine = make(FakeRunner(replace(CAPACITY, has_overlap=has_overlap), is_late=is_late))
    prompts = {i: [i, i + 1, i + 2] * (i + 1) for i in range(1, 8)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, GenerationRequest.of(prompt, GREEDY))
    outputs = drain(engine)
    for request_id, prompt in prompts.items():
        assert tokens(outputs[request_id]) == alone(prompt)
        assert outputs[request_id][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize("place", ["forward", "sample", "collect"])
def test_a_step_that_raises_ends_its_requests_and_no_others(place: str, has_overlap: bool) -> None:
    runner = FaultyRunner(replace(CAPACITY, has_overlap=has_overlap))
    engine = make(runner)
    engine.add(1, GenerationRequest.of([1, 2, 3], GREEDY))
    engine.add(2, GenerationRequest.of([4, 5, 6], GREEDY))
    num_calls = 0
    is_mended = False

    def fail(where: str) -> None:
        nonlocal num_calls
        num_calls += where == place
        if where == place and num_calls >= 4 and not is_mended:
            raise RuntimeError("device lost")

    runner.reach = fail
    outputs = drain(engine)
    for request_id in (1, 2):
        last = outputs[request_id][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert "device lost" in (last.error or "")
        assert tokens(outputs[request_id]) == alone([1, 2, 3] if request_id == 1 else [4, 5, 6])[:3]
    is_mended = True
    engine.add(3, GenerationRequest.of([7, 8, 9], GREEDY))
    assert tokens(drain(engine)[3]) == alone([7, 8, 9])


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize("place", ["forward", "sample", "after"])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_step_that_runs_out_of_memory_once_ends_no_request(num_requests: int, place: str, has_overlap: bool) -> None:
    """Requests share a prefix, so that steps with copies of blocks are repeated too."""
    num_calls = 0

    def fail(where: str) -> None:
        nonlocal num_calls
        num_calls += where == place
        if where == place and num_calls == at:
            raise MemoryError

    for at in range(1, 11):
        runner, num_calls = FaultyRunner(replace(CAPACITY, has_overlap=has_overlap)), 0
        runner.reach = fail
        engine = make(runner)
        prompts = {i: [1, 2, 3, 4, 5, 6, i] for i in range(num_requests)}
        for request_id, prompt in prompts.items():
            engine.add(request_id, GenerationRequest.of(prompt, GREEDY))
        outputs = drain(engine)
        assert num_calls > at
        for request_id, prompt in prompts.items():
            assert tokens(outputs[request_id]) == alone(prompt)


@pytest.mark.parametrize("has_overlap", [False, True])
def test_a_request_that_makes_its_step_raise_ends_alone(has_overlap: bool) -> None:
    runner = FaultyRunner(replace(CAPACITY, has_overlap=has_overlap))
    engine = make(runner)
    bad = 2

    def fail(plan: StepPlan) -> None:
        if any(piece.request_id == bad and piece.start >= 7 for piece in plan.slices):
            raise RuntimeError("no such row")

    runner.in_forward = fail
    for request_id in range(4):
        engine.add(request_id, GenerationRequest.of([request_id + 1] * 5, GREEDY))
    outputs = drain(engine)
    assert outputs[bad][-1].error == "the step failed: RuntimeError: no such row"
    assert tokens(outputs[bad]) == alone([bad + 1] * 5)[:3]
    for request_id in {0, 1, 3}:
        assert tokens(outputs[request_id]) == alone([request_id + 1] * 5)


def test_a_repetition_that_takes_long_ends_the_part_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sends nothing for long is killed, with all requests."""
    monkeypatch.setattr(engine_module, "MAX_REPEAT_S", -1.0)
    runner = FaultyRunner()
    engine = make(runner)

    def fail(plan: StepPlan) -> None:
        if any(piece.request_id == 2 and piece.start >= 7 for piece in plan.slices):
            raise RuntimeError("no such row")

    runner.in_forward = fail
    for request_id in range(4):
        engine.add(request_id, GenerationRequest.of([request_id + 1] * 5, GREEDY))
    outputs = drain(engine)
    assert [outputs[request_id][-1].error is None for request_id in range(4)] == [True, True, False, False]


def test_one_failed_row_ends_one_request() -> None:
    runner = FaultyRunner()
    engine = make(runner)
    for request_id in (1, 2, 3):
        engine.add(request_id, GenerationRequest.of([request_id] * 5, GREEDY))

    def fail_two(plan: StepPlan, result: StepResult) -> StepResult:
        rows = [i for i, piece in enumerate(plan.slices) if piece.request_id == 2 and piece.start == 7]
        return result._replace(failures=dict.fromkeys(rows, "NaN"))

    runner.change = fail_two
    outputs = drain(engine)
    assert outputs[2][-1].error == "NaN"
    assert tokens(outputs[2]) == alone([2] * 5)[:3]
    assert tokens(outputs[1]) == alone([1] * 5)
    assert tokens(outputs[3]) == alone([3] * 5)


def test_poisoned_content_is_not_found_again() -> None:
    runner = FaultyRunner()
    engine = make(runner)
    prompt = list(range(1, 30))
    engine.add(1, GenerationRequest.of(prompt, GREEDY))
    drain(engine)
    engine.add(2, GenerationRequest.of(prompt, GREEDY))
    runner.change = lambda _, result: result._replace(failures={0: "NaN"}, is_poisoned=True)
    assert drain(engine)[2][-1].num_cached_tokens > 0
    runner.change = lambda _, result: result
    engine.add(3, GenerationRequest.of(prompt, GREEDY))
    assert drain(engine)[3][-1].num_cached_tokens == 0


def test_a_runner_that_keeps_failing_ends_the_engine() -> None:
    runner = FaultyRunner(replace(CAPACITY, has_overlap=False))
    engine = make(runner)

    def fail(_: StepPlan) -> None:
        raise RuntimeError("device lost")

    runner.in_forward = fail
    for request_id in range(1, MAX_FAILED_STEPS):
        engine.add(request_id, GenerationRequest.of([1, 2], GREEDY))
        (output,) = engine.step()
        assert output.finish_reason is FinishReason.ERROR
    engine.add(9, GenerationRequest.of([1, 2], GREEDY))
    with pytest.raises(BrokenRunner, match="device lost"):
        engine.step()
    check_scheduler(engine.scheduler)  # the engine can still be used: nothing is held
    assert not engine.has_work
    runner.in_forward = lambda _: None
    engine.add(10, GenerationRequest.of([1, 2], GREEDY))
    assert tokens(drain(engine)[10]) == alone([1, 2])
    runner.in_forward = fail  # the count starts again
    engine.add(11, GenerationRequest.of([1, 2], GREEDY))
    assert engine.step()[0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        ([1, 50], GREEDY, "prompt: token id 50 is outside the vocabulary of 50"),
        ([1], SamplingParams(logit_bias={77: 1.0}), "logit_bias: token id 77"),
        ([1], SamplingParams(stop_token_ids=(99,)), "stop_token_ids: token id 99"),
        ([], GREEDY, "prompt has no tokens"),
    ],
)
def test_requests_that_would_break_a_batch_are_refused(
    prompt: list[int], sampling: SamplingParams, problem: str
) -> None:
    engine = make(FakeRunner(CAPACITY))
    with pytest.raises(InvalidRequest, match=problem):
        engine.add(1, GenerationRequest.of(prompt, sampling))
    assert not engine.has_work


def test_the_tokens_of_a_packed_prompt_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, outside = PackedPrompt.of([1, 2, 3] * 10), PackedPrompt.of([1, 50])

    def refuse(*_: object) -> None:
        raise AssertionError("all tokens were checked again")

    monkeypatch.setattr("quire.core.request.check_tokens", refuse)
    engine = Engine(FakeRunner(CAPACITY), Scheduler(KVCacheManager(40, 4, digest=refuse), Policy()))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="prompt: token id 50 is outside the vocabulary of 50"):
        engine.add(1, GenerationRequest.of(outside, GREEDY))
    engine.add(1, GenerationRequest.of(packed, GREEDY))
    assert engine.has_work


@pytest.mark.parametrize("has_overlap", [False, True])
def test_pins_are_set_when_the_prompt_is_computed(has_overlap: bool) -> None:
    engine = make(FakeRunner(replace(CAPACITY, has_overlap=has_overlap)), max_chunk_tokens=8)
    pins = engine.scheduler.cache.pins
    engine.add(
        1, GenerationRequest.of(list(range(20)), GREEDY, pins=(PinPrefix("head", 9, 60.0), PinPrefix("all", 20, 60.0)))
    )
    seen: list[EngineOutput] = []
    while not seen:
        assert len(pins) == 0
        seen = engine.step()
    assert (len(pins), pins.num_blocks) == (2, 5)  # the head's two full blocks are among the five of all
    while engine.has_work:
        engine.step()
    check_scheduler(engine.scheduler)
    assert engine.scheduler.cache.stats().num_in_use == 5


@pytest.mark.parametrize("end", ["cancel", "finish", "fail"])
def test_a_request_that_ends_before_its_prompt_is_computed_pins_nothing(end: str) -> None:
    runner = FaultyRunner(replace(CAPACITY, has_overlap=False))
    engine = make(runner, max_chunk_tokens=8)
    engine.add(1, GenerationRequest.of(list(range(20)), GREEDY, pins=(PinPrefix("all", 20, 60.0),)))
    assert engine.step() == []
    if end == "cancel":
        engine.cancel(1)
    elif end == "finish":
        engine.finish(1, 0)
    else:
        runner.change = lambda _, result: result._replace(failures={0: "NaN"})
        assert engine.step()[0].error == "NaN"
        runner.change = lambda _, result: result
    engine.add(1, GenerationRequest.of(list(range(20)), GREEDY))  # the same id, and no pins
    drain(engine)
    assert len(engine.scheduler.cache.pins) == 0


def sizes(capacity: Capacity, config: EngineConfig) -> tuple[int, int, int]:
    scheduler = make_scheduler(FakeRunner(capacity), config)
    planner = scheduler.planner
    return scheduler.running.max_num_seqs, planner.max_num_batched_tokens, planner.max_chunk_tokens


def test_unset_sizes_are_those_of_the_runner() -> None:
    """Settings override the runner's sizes. A step always has room for one token of every sequence."""
    capacity = replace(CAPACITY, max_num_seqs=100, max_num_batched_tokens=5000, max_chunk_tokens=3000)
    assert sizes(capacity, EngineConfig()) == (100, 5000, 3000)
    assert sizes(capacity, EngineConfig(max_num_batched_tokens=400, max_chunk_tokens=30)) == (100, 400, 30)
    assert sizes(capacity, EngineConfig(max_num_batched_tokens=7)) == (100, 100, 3000)
    unnamed = EngineConfig().backend_options()
    assert unnamed.max_num_seqs is unnamed.max_num_batched_tokens is unnamed.max_chunk_tokens is None
    assert EngineConfig(max_num_seqs=9, max_num_batched_tokens=90).backend_options().max_num_seqs == 9


@pytest.mark.parametrize(
    ("given", "is_server", "expected"), [(None, True, 7), (None, False, None), (3, True, 3), (3, False, 3)]
)
def test_only_servers_use_the_backends_limit_of_prompts(
    given: int | None, is_server: bool, expected: int | None
) -> None:
    runner = FakeRunner(replace(CAPACITY, max_mixed_tokens=7))
    scheduler = make_scheduler(runner, EngineConfig(max_mixed_tokens=given), is_server=is_server)
    assert scheduler.planner.max_mixed_tokens == expected
