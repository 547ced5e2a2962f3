"""Tests of every backend with floating-point arithmetic: its distributions equal a reference, however a prompt runs.

A test module subclasses `Contract` and has a fixture `pair`: a reference, and a rig with the same weights. The tests
run prompts whole, in chunks, in a batch, on shared and forked blocks, preempted, and with masks, seeds and logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import pytest
from torch import Tensor

from quire.backends.sampling import BROKEN
from tests.backends.torch.rig import Answer, Rig, same_rows

HEAD = 70  # tokens: two full blocks and a tail
VOCAB = 160  # of the small models


class HasLogprobs(Protocol):
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Return [len(tokens), V]: row i predicts the token after position i."""


Pair = tuple[HasLogprobs, Rig]


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


class Alternating:
    """A grammar that allows even and odd tokens in turn."""

    def __init__(self, num_tokens: int) -> None:
        self._place = 0
        self._num_tokens = num_tokens

    @property
    def family(self) -> object:
        return self

    def mask(self) -> bytes:
        return bytes([0b01010101 if self._place % 2 == 0 else 0b10101010]) * (VOCAB // 8)

    def consume(self, token: int) -> bool:
        assert token % 2 == self._place % 2
        self._place += 1
        return self._place == self._num_tokens

    def forced(self) -> Sequence[int]:
        return ()

    def num_valid(self, tokens: Sequence[int]) -> int:  # noqa: ARG002
        return 0

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        raise NotImplementedError(drafts)


@pytest.mark.sweep("class")
class Contract:
    bound = 3e-5  # of log-probabilities in fp32, over a few layers and two libraries

    def check(self, reference: HasLogprobs, prompt: list[int], *answers: Answer) -> None:
        for answer in answers:
            assert answer.error is None
            expected = reference.logprobs([*prompt, *answer.tokens])
            assert same_rows(answer, expected, len(prompt)) < self.bound

    def test_one_request(self, pair: Pair) -> None:
        reference, rig = pair
        rig.reset()
        prompt = random_prompt(1, HEAD)
        self.check(reference, prompt, rig.answer(prompt, 12))

    @pytest.mark.parametrize("chunk", [1, 7, 32])
    def test_in_chunks(self, pair: Pair, chunk: int) -> None:
        reference, rig = pair
        rig.reset(max_chunk_tokens=chunk)
        prompt = random_prompt(2, HEAD)
        self.check(reference, prompt, rig.answer(prompt, 4))

    @pytest.mark.sweep("test")
    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_batch_of_all_lengths(self, pair: Pair, overlap: bool) -> None:
        """Prompts in progress and decodes in one step. With a step in flight, decodes continue from the last sample."""
        reference, rig = pair
        rig.reset(max_chunk_tokens=16, max_num_batched_tokens=40, overlap=overlap and has_overlap(rig))
        prompts = [random_prompt(10 + length, length) for length in (1, 2, 31, 32, 33, 64, 100, 5)]
        ids = [rig.start(prompt, 6 + i) for i, prompt in enumerate(prompts)]
        answers = rig.run(*ids)
        for prompt, request_id in zip(prompts, ids, strict=True):
            self.check(reference, prompt, answers[request_id])

    def test_through_shared_and_forked_blocks(self, pair: Pair) -> None:
        reference, rig = pair
        rig.reset()
        head = random_prompt(3, HEAD)
        first, second = [*head, 5, 6, 7], [*head, 8, 9]
        self.check(reference, first, rig.answer(first, 8))
        shared = rig.answer(second, 8)
        assert shared.num_cached_tokens == HEAD  # two full blocks and, by a copy, the tail
        assert rig.num_copies == 1
        self.check(reference, second, shared)

    def test_samples_of_one_prompt_are_forks(self, pair: Pair) -> None:
        reference, rig = pair
        rig.reset()
        prompt = random_prompt(4, HEAD)
        first = rig.start(prompt, 8, temperature=1.0, seed=7)
        others = [rig.start(prompt, 8, parent=first, temperature=1.0, seed=7, sample_index=i) for i in (1, 2)]
        answers = rig.run(first, *others)
        assert rig.num_computed < 2 * HEAD
        assert rig.num_copies == 2
        assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
        self.check(reference, prompt, *answers.values())

    def test_after_preemption(self, pair: Pair) -> None:
        reference, rig = pair
        rig.reset(num_blocks=14)  # four requests cannot all grow to four blocks
        prompts = [random_prompt(20 + i, 60) for i in range(4)]
        ids = [rig.start(prompt, 46) for prompt in prompts]
        requests = [rig.engine.scheduler.requests.get(request_id) for request_id in ids]
        answers = rig.run(*ids)
        assert any(request is not None and request.num_preemptions for request in requests)
        for prompt, request_id in zip(prompts, ids, strict=True):
            self.check(reference, prompt, answers[request_id])

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_drafts_change_no_answer(self, pair: Pair, overlap: bool, temperature: float) -> None:
        """Drafts that are right, wrong and right up to some token, beside requests without drafts."""
        reference, rig = pair
        whole = rig.engine.runner.capacity()
        if not whole.max_drafts or (whole.num_states and not (overlap and has_overlap(rig))):
            pytest.skip("the backend does not verify drafts, or has no state to return to")
        prompts = [random_prompt(40 + length, length) for length in (5, 40, 33, 64)]
        sampling: list[dict[str, Any]] = [
            {"temperature": temperature, "seed": number} for number in range(len(prompts))
        ]
        rig.reset()
        alone = [rig.answer(prompt, 24, **one).tokens for prompt, one in zip(prompts, sampling, strict=True)]
        rig.reset(overlap=overlap and has_overlap(rig))
        ids = [rig.start(prompt, 24, **one) for prompt, one in zip(prompts, sampling, strict=True)]
        known = dict(zip(ids, alone, strict=True))
        answers = {request_id: Answer() for request_id in ids}
        rng = Random(7)
        while rig.engine.has_work:
            for request in rig.engine.scheduler.running:
                coming = known[request.request_id][request.num_output_tokens :][: rng.choice((0, 1, 2, 3))]
                request.draft = [*coming, *[rng.randrange(VOCAB)] * rng.randrange(2)]
                request.is_held = True
            rig.step(answers)
        assert rig.engine.scheduler.num_accepted > 20
        assert rig.engine.scheduler.num_accepted < rig.engine.scheduler.num_drafted
        for prompt, request_id in zip(prompts, ids, strict=True):
            assert answers[request_id].tokens == known[request_id]
            self.check(reference, prompt, answers[request_id])

    def test_prompt_logprobs(self, pair: Pair) -> None:
        reference, rig = pair
        rig.reset(max_chunk_tokens=16)
        prompt = random_prompt(5, HEAD)
        answer = rig.answer(prompt, 2, prompt_logprobs=VOCAB)
        assert sorted(answer.prompt_rows) == list(range(1, HEAD))
        expected = reference.logprobs(prompt)
        for position, row in answer.prompt_rows.items():
            assert float((row - expected[position - 1]).abs().max()) < self.bound

    @pytest.mark.parametrize("overlap", [False, True])
    def test_masks_restrict_only_their_own_request(self, pair: Pair, overlap: bool) -> None:
        reference, rig = pair
        rig.reset(overlap=overlap and has_overlap(rig))
        prompts = [random_prompt(30 + i, 20 + i) for i in range(3)]
        ids = [
            rig.start(prompt, 8, matcher=Alternating(8) if number != 1 else None, temperature=1.0, seed=number + 3)
            for number, prompt in enumerate(prompts)
        ]
        answers = rig.run(*ids)
        for number, (prompt, request_id) in enumerate(zip(prompts, ids, strict=True)):
            tokens = answers[request_id].tokens
            assert len(tokens) == 8
            assert ([token % 2 for token in tokens] == [0, 1] * 4) == (number != 1)
            self.check(reference, prompt, answers[request_id])

    def test_a_seed_gives_the_same_answer_in_company(self, pair: Pair) -> None:
        """The random numbers are the same, and the distributions so close that no draw falls between them."""
        _, rig = pair
        rig.reset(enable_prefix_caching=False)
        settings: dict[str, Any] = {
            "temperature": 1.2,
            "top_p": 0.95,
            "top_k": 50,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
        }
        prompts = [random_prompt(40 + i, 12 + 9 * i) for i in range(4)]
        alone = [rig.answer(prompt, 10, seed=11 + i, **settings).tokens for i, prompt in enumerate(prompts)]
        ids = [rig.start(prompt, 10, seed=11 + i, **settings) for i, prompt in enumerate(prompts)]
        answers = rig.run(*ids)
        assert [answers[request_id].tokens for request_id in ids] == alone


POISONED = 50  # a token whose embedding is not finite
NEVER: dict[str, Any] = {"logit_bias": {POISONED: -100.0}}  # keeps it out of answers


def sound_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 40) for _ in range(length)]


def check_poisoned(rig: Rig, check: Callable[[list[int], Answer], None], **settings: Any) -> None:
    """Every context with that token fails, complete or not, and no other does."""
    for place in (0, 20, 59):
        good, bad = sound_prompt(11, 50), sound_prompt(12, 60)
        bad[place] = POISONED
        rig.reset(max_chunk_tokens=16, num_blocks=12, **settings)
        ids = rig.start(good, 4, **NEVER), rig.start(bad, 4, **NEVER), rig.start(sound_prompt(13, 9), 4, **NEVER)
        answers = rig.run(*ids)
        assert answers[ids[1]].error == BROKEN
        assert answers[ids[1]].tokens == []
        check(good, answers[ids[0]])
        for number in range(4):  # uses all blocks of the small pool
            prompt = sound_prompt(20 + number, 60)
            check(prompt, rig.answer(prompt, 4, **NEVER))


def has_overlap(rig: Rig) -> bool:
    """Whether the runner accepts a step before the last one is collected."""
    return rig.engine.runner.capacity().has_overlap or rig.config.backend == "torch"
