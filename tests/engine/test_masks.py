"""Matchers in the engine, on the fake backend: a matcher sees exactly its request's committed tokens."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from random import Random

import pytest

from quire.backends.base import Capacity, TokenMasks
from quire.backends.fake import FakeRunner, Fold, choose_token, digest
from quire.core.step import StepPlan, StepResult
from quire.core.values import FinishReason, SamplingParams
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.engine.masks import GrammarFailed, GrammarMasks
from tests.engine.test_engine import drain
from tests.engine.test_engine import tokens as tokens_of

VOCAB_SIZE = 200
BLOCK_SIZE = 4
EOS = 0


class Toy:
    """Allows tokens derived from a digest of the answer. Complete after `length` tokens; sometimes earlier."""

    def __init__(self, seed: int, length: int, *, fails_at: int | None = None) -> None:
        self.seed = seed
        self.length = length
        self.fails_at = fails_at
        self.tokens: list[int] = []
        self.threads: set[str] = set()
        self.family: object = self

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        state = digest(self.seed, *tokens)
        found = {1 + digest(state, i) % (VOCAB_SIZE - 1) for i in range(1 + state % 5)}
        return found | ({EOS} if state % 7 == 0 and tokens else set())

    def mask(self) -> bytes:
        self.threads.add(threading.current_thread().name)
        if len(self.tokens) == self.fails_at:
            raise GrammarFailed("too many states")
        bits = bytearray(-(-VOCAB_SIZE // 8))
        for token in self.allowed(self.tokens):
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def consume(self, token: int) -> bool:
        assert token in self.allowed(self.tokens), f"{token} after {self.tokens}"
        self.tokens.append(token)
        return len(self.tokens) >= self.length

    def forced(self) -> Sequence[int]:
        return ()

    def num_valid(self, tokens: Sequence[int]) -> int:
        del tokens
        return 0

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        raise NotImplementedError(drafts)


class Looking(Toy):
    """A toy that looks ahead. Its forced tokens are guesses, of which some are wrong."""

    def forced(self) -> Sequence[int]:
        ahead = list(self.tokens)
        while len(ahead) < len(self.tokens) + 5:
            ahead.append(max(self.allowed(ahead)))
        return ahead[len(self.tokens) :]

    def num_valid(self, tokens: Sequence[int]) -> int:
        ahead = list(self.tokens)
        for number, token in enumerate(tokens):
            if token == EOS or token not in self.allowed(ahead) or len(ahead) >= self.length:
                return number
            ahead.append(token)
        return len(tokens)

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        before = self.tokens
        masks = []
        for count in range(len(drafts) + 1):
            self.tokens = [*before, *drafts[:count]]
            masks.append(self.mask())
        self.tokens = before
        return b"".join(masks)


class Endless(Toy):
    def allowed(self, tokens: Sequence[int]) -> set[int]:
        del tokens
        return {7, 8}


def alone(prompt: Sequence[int], sampling: SamplingParams, toy: Toy, max_tokens: int) -> tuple[list[int], FinishReason]:
    """The answer of the request when it runs alone."""
    fold = Fold(BLOCK_SIZE)
    history = list(prompt)
    for position, token in enumerate(prompt):
        fold.read((fold.entry(token, position),))
    while True:
        answer = history[len(prompt) :]
        token = choose_token(fold.value(), sampling, history, VOCAB_SIZE)
        allowed = toy.allowed(answer)
        while token not in allowed:
            token = (token + 1) % VOCAB_SIZE
        fold.read((fold.entry(token, len(history)),))
        history.append(token)
        if token == EOS or len(answer) + 1 == toy.length:
            return history[len(prompt) :], FinishReason.STOP
        if len(answer) + 1 == max_tokens:
            return history[len(prompt) :], FinishReason.LENGTH


def make(
    *,
    num_blocks: int = 60,
    has_overlap: bool = True,
    is_late: bool = False,
    max_chunk: int = 512,
    max_num_seqs: int = 8,
    max_drafts: int = 0,
) -> Engine:
    capacity = Capacity(num_blocks, BLOCK_SIZE, max_num_seqs, 200, VOCAB_SIZE, has_overlap, max_drafts=max_drafts)
    runner = FakeRunner(capacity, is_late=is_late)
    config = EngineConfig(max_chunk_tokens=max_chunk)
    return Engine(runner, make_scheduler(runner, config), has_drafts=max_drafts > 0)


MODES = [(True, False), (True, True), (False, False)]


@pytest.mark.parametrize(("has_overlap", "is_late"), MODES)
@pytest.mark.parametrize("max_drafts", [0, 7])
@pytest.mark.parametrize("seed", range(12))
def test_answers_do_not_depend_on_batching(seed: int, max_drafts: int, has_overlap: bool, is_late: bool) -> None:
    """With preemptions, chunks, cancellations and requests without a grammar; with and without drafts."""
    rng = Random(seed)
    engine = make(
        num_blocks=rng.choice((18, 30, 80)),
        has_overlap=has_overlap,
        is_late=is_late,
        max_chunk=5,
        max_num_seqs=32 if max_drafts else 8,
        max_drafts=max_drafts,
    )
    wanted: dict[int, tuple[list[int], FinishReason]] = {}
    outputs: dict[int, list[EngineOutput]] = defaultdict(list)
    cancelled: set[int] = set()
    toys: dict[int, Toy] = {}
    for request_id in range(1, 15):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 25)
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)), seed=request_id, max_tokens=max_tokens, stop_token_ids=(EOS,)
        )
        toy = (Looking if max_drafts else Toy)(request_id, rng.randrange(1, 30))
        has_toy = rng.random() < 0.7
        engine.add(request_id, GenerationRequest.of(prompt, sampling), matcher=toy if has_toy else None)
        if has_toy:
            toys[request_id] = toy
            wanted[request_id] = alone(prompt, sampling, toy, max_tokens)
        for _ in range(rng.randrange(4)):
            for output in engine.step():
                outputs[output.request_id].append(output)
        if rng.random() < 0.1:
            cancelled.add(request_id)
            engine.cancel(request_id)
    for request_id, found in drain(engine).items():
        outputs[request_id] += found
    for request_id, (tokens, reason) in wanted.items():
        found_tokens = tokens_of(outputs[request_id])
        if request_id in cancelled:
            assert found_tokens == tokens[: len(found_tokens)]
            continue
        assert found_tokens == tokens
        assert outputs[request_id][-1].finish_reason is reason
    assert not engine._masking.entries  # no matchers of finished requests are left
    assert bool(engine.scheduler.num_accepted) == bool(max_drafts)
    assert not engine.speculation.active


@pytest.mark.parametrize(("has_overlap", "is_late"), MODES)
def test_a_matcher_that_fails_ends_its_own_request(has_overlap: bool, is_late: bool) -> None:
    engine = make(has_overlap=has_overlap, is_late=is_late)
    sampling = SamplingParams(seed=3, max_tokens=12, stop_token_ids=())
    toys = {1: Toy(1, 9), 2: Endless(2, 9, fails_at=4), 3: Toy(3, 9)}
    for number, toy in toys.items():
        engine.add(number, GenerationRequest.of([5, 6, number], sampling), matcher=toy)
    outputs = drain(engine)
    assert outputs[2][-1].finish_reason is FinishReason.ERROR
    assert outputs[2][-1].error == "grammar: too many states"
    assert len(tokens_of(outputs[2])) == 4
    for number in (1, 3):
        wanted, _ = alone([5, 6, number], sampling, toys[number], 12)
        assert tokens_of(outputs[number])[: len(wanted)] == wanted[: len(tokens_of(outputs[number]))]
        assert outputs[number][-1].finish_reason is FinishReason.STOP


def test_a_token_that_the_matcher_refuses_ends_only_its_request() -> None:
    class Refusing(Toy):
        def consume(self, token: int) -> bool:
            del token
            raise RuntimeError("a bug")

    engine = make()
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(max_tokens=5)), matcher=Refusing(1, 9))
    engine.add(2, GenerationRequest.of([1, 2], SamplingParams(max_tokens=5)))
    outputs = drain(engine)
    assert (outputs[1][-1].finish_reason, outputs[1][-1].error) == (FinishReason.ERROR, "grammar: a bug")
    assert tokens_of(outputs[1]) == []
    assert len(tokens_of(outputs[2])) == 5


def test_a_grammar_that_completes_at_max_tokens_ends_with_stop() -> None:
    engine = make()
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(seed=1, max_tokens=3)), matcher=Toy(2, 3))
    (*_, last) = drain(engine)[1]
    assert last.finish_reason is FinishReason.STOP
    assert last.tokens


def test_masks_work_after_a_failed_step() -> None:
    """A step that raises ends its requests; later requests are served with masks."""

    class Failing(FakeRunner):
        is_failing = True

        def sample(self, masks: TokenMasks | None) -> None:
            if self.is_failing:
                raise RuntimeError("sampling failed")
            super().sample(masks)

    runner = Failing(Capacity(60, BLOCK_SIZE, 8, 200, VOCAB_SIZE))
    engine = Engine(runner, make_scheduler(runner, EngineConfig()))
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(max_tokens=3)), matcher=Toy(1, 9))
    outputs = drain(engine)
    assert outputs[1][-1].error == "the step failed: RuntimeError: sampling failed"
    runner.is_failing = False
    engine.add(2, GenerationRequest.of([1, 2], SamplingParams(max_tokens=3)), matcher=Toy(1, 2))
    assert drain(engine)[2][-1].finish_reason is FinishReason.STOP


class Watched(FakeRunner):
    """Records the order of its calls."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.calls: list[str] = []

    def forward(self, plan: StepPlan) -> None:
        self.calls.append("forward")
        super().forward(plan)

    def sample(self, masks: TokenMasks | None) -> None:
        self.calls.append("sample with masks" if masks else "sample")
        super().sample(masks)

    def collect(self) -> StepResult:
        self.calls.append("collect")
        return super().collect()


def test_a_step_is_forwarded_before_the_tokens_its_masks_need_are_collected() -> None:
    runner = Watched(Capacity(60, BLOCK_SIZE, 8, 200, VOCAB_SIZE))
    engine = Engine(runner, make_scheduler(runner, EngineConfig()))
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(max_tokens=3)), matcher=Toy(1, 9))
    drain(engine)
    masked = ["forward", "collect", "sample with masks"]
    assert runner.calls == ["forward", "sample with masks", *masked, *masked, "collect"]
    runner.calls.clear()
    engine.add(2, GenerationRequest.of([1, 2], SamplingParams(max_tokens=3)))
    drain(engine)
    plain = ["forward", "sample", "collect"]
    assert runner.calls == ["forward", "sample", *plain, *plain, "collect"]


@pytest.mark.parametrize("has_overlap", [True, False])
def test_a_few_masks_use_no_other_thread(has_overlap: bool) -> None:
    toy = Toy(1, 9)
    engine = make(has_overlap=has_overlap)
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(max_tokens=3)), matcher=toy)
    drain(engine)
    assert toy.threads == {threading.current_thread().name}


def test_a_grammar_with_slow_masks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr("quire.engine.masks.time.thread_time", lambda: next(times) * 0.15)
    engine = make()
    engine.add(1, GenerationRequest.of([1, 2], SamplingParams(max_tokens=20)), matcher=Toy(1, 30))
    (*_, last) = drain(engine)[1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "grammar is too complex: its tokens take more than 20 ms to choose"


def test_a_family_of_matchers_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.masks.usable_cores", lambda: 4)
    masking, engine = GrammarMasks(), make(num_blocks=100)
    toys = {number: Toy(number, 9) for number in range(1, 9)}
    for number, toy in toys.items():
        engine.add(number, GenerationRequest.of([1, number], SamplingParams(max_tokens=3)))
        toy.family = "odd" if number % 2 else f"even {number % 4}"
        masking.add(number, toy)
    assert len(masking.compute(engine.scheduler.schedule(0)).by_batch_index) == len(toys)
    masking.close()
    for family in ("odd", "even 0", "even 2"):
        rows = [toy for toy in toys.values() if toy.family == family]
        assert rows
        assert len(set.union(*(toy.threads for toy in rows))) == 1
