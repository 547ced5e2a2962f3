"""A hypothesis state machine for the engine: any order of calls and faults of the backend, all invariants after each.

Every answer is compared with the same request run alone. A request ends once, with its answer, an error of a step that
failed, or a cancel; at the end nothing is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, run_alone
from quire.core.check import check_scheduler
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Aging, Fair, Policy
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import FinishReason, Priority, SamplingParams
from quire.engine.engine import Engine
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.errors import ContextTooLong, QueueFull
from tests.core.helpers import pin_tokens

BLOCK_SIZE, VOCAB_SIZE, MAX_WAITING = 4, 4, 6
SALTS = ("", "other")
POLICIES = (Fair, lambda: Aging(0.01), Policy)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 2),
    max_tokens=st.integers(1, 9),
    stop_token_ids=st.sampled_from(((), (0,))),
)


class FaultyRunner(FakeRunner):
    """Raises in one call of `forward` or `collect` when told to."""

    fails_in = ""
    is_well = True  # a step was collected since the last failure

    def forward(self, plan: StepPlan) -> None:
        self._fail_in("forward")
        super().forward(plan)

    def collect(self) -> StepResult:
        result = super().collect()  # what was enqueued is gone even if it cannot be read
        self._fail_in("collect")
        self.is_well = True
        return result

    def _fail_in(self, place: str) -> None:
        if self.fails_in == place:
            self.fails_in, self.is_well = "", False
            raise RuntimeError("injected")


@dataclass
class Expected:
    tokens: list[int]
    delivered: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Expected] = {}
        self.next_id = 1
        self.now_ns = 0

    @initialize(
        has_overlap=st.booleans(),
        is_late=st.booleans(),
        num_blocks=st.sampled_from((8, 12, 30)),
        max_num_seqs=st.sampled_from((1, 2, 4)),
        chunk=st.sampled_from((2, 5, 64)),
        policy=st.sampled_from(POLICIES),
    )
    def begin(
        self, has_overlap: bool, is_late: bool, num_blocks: int, max_num_seqs: int, chunk: int, policy: type[Fair]
    ) -> None:
        self.max_model_len = min(40, (num_blocks - 1) * BLOCK_SIZE)
        capacity = Capacity(num_blocks, BLOCK_SIZE, max_num_seqs, self.max_model_len, VOCAB_SIZE, has_overlap)
        self.runner = FaultyRunner(capacity, is_late=is_late)
        scheduler = Scheduler(
            KVCacheManager(num_blocks, BLOCK_SIZE),
            policy(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + 8,
            max_chunk_tokens=chunk,
            max_model_len=self.max_model_len,
            max_waiting=MAX_WAITING,
        )
        self.engine = Engine(self.runner, scheduler, clock=lambda: self.now_ns)

    @rule(
        prompt=prompts, sampling=samplings, priority=st.sampled_from(list(Priority)), salt=st.sampled_from(SALTS),
        tenant=st.sampled_from(("a", "b")), siblings=st.sampled_from((0, 0, 0, 1, 2)),
    )  # fmt: skip
    def add(
        self, prompt: list[int], sampling: SamplingParams, priority: Priority, salt: str, tenant: str, siblings: int
    ) -> None:
        """Add a request, and further samples of its prompt, which share the blocks of the first."""
        parent_id = None
        for index in range(siblings + 1):
            number = self.next_id
            self.next_id += 1
            own = SamplingParams(
                temperature=sampling.temperature, seed=sampling.seed, sample_index=index,
                max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids,
            )  # fmt: skip
            try:
                self.engine.add(
                    number,
                    GenerationRequest.of(prompt, own, priority=priority, salt=salt, tenant=tenant),
                    parent_id=parent_id,
                )
            except ContextTooLong:
                assert len(prompt) >= self.max_model_len
                return
            except QueueFull:
                assert len(self.engine.scheduler.waiting) >= MAX_WAITING
                return
            self.live[number] = Expected(self._alone(prompt, own))
            parent_id = parent_id or number

    def _alone(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        limit = min(sampling.max_tokens or 0, self.max_model_len - len(prompt))
        tokens = run_alone(prompt, sampling, limit, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        ends = [place + 1 for place, token in enumerate(tokens) if token in sampling.stop_token_ids]
        return tokens[: min(ends, default=limit)]

    @rule(count=st.integers(1, 6), tick_ns=st.sampled_from((0, 1_000, 10**8, 10**10)))
    def step(self, count: int, tick_ns: int) -> None:
        for _ in range(count):
            self.now_ns += tick_ns
            self._take(self.engine.step())

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            expected = self.live[output.request_id]  # else it has ended before
            expected.delivered += output.tokens
            whole = expected.tokens
            assert expected.delivered == whole[: len(expected.delivered)]
            if output.finish_reason is FinishReason.ERROR:
                assert "injected" in (output.error or "")
            else:
                assert (output.finish_reason is not None) == (len(expected.delivered) == len(whole))
            if output.finish_reason is not None:
                del self.live[output.request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.cancel(number)
        del self.live[number]
        assert not self.engine.cancel(number)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """End an answer at a stop string that was found above the engine."""
        number = data.draw(st.sampled_from(sorted(self.live)))
        keep = data.draw(st.integers(0, len(self.live[number].delivered)))
        assert self.engine.finish(number, keep)
        del self.live[number]

    @precondition(lambda self: self.runner.is_well)  # three failures in a row would end the engine
    @rule(place=st.sampled_from(("forward", "collect")))
    def fail_once(self, place: str) -> None:
        self.runner.fails_in = place
        self.step(2, 1_000)
        self.runner.fails_in = ""

    @rule(prefix=prompts, salt=st.sampled_from(SALTS), name=st.sampled_from("ab"), ttl_s=st.sampled_from((1e-6, 9.0)))
    def pin(self, prefix: list[int], salt: str, name: str, ttl_s: float) -> None:
        deadline_ns = self.engine.clock() + int(ttl_s * 1e9)
        assert pin_tokens(self.engine.scheduler.cache, name, prefix, salt, deadline_ns) <= len(prefix)

    @rule()
    def clear(self) -> None:
        self.engine.clear_cache()

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "engine"):  # not before `begin`
            check_scheduler(self.engine.scheduler)
            assert set(self.live) == set(self.engine.scheduler.requests)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2_000):
            if not self.engine.has_work:
                break
            self.step(1, 10**6)
        assert not self.engine.has_work, "requests do not end"
        assert not self.live, "a request was lost"
        cache = self.engine.scheduler.cache
        cache.pins.clear()
        assert cache.pool.num_free == cache.pool.num_usable, "blocks leaked"
        self.engine.close()


LIMITS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = LIMITS


@pytest.mark.nightly
class TestForLonger(TestEngineMachine):  # type: ignore[misc, valid-type]
    settings = settings(LIMITS, max_examples=2_000, stateful_step_count=100)
