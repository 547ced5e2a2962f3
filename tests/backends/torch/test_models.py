"""Every family gives the distributions `transformers` gives: prefill, decode, chunked, shared, forked, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.backends.torch.families import FAMILIES, Reference
from tests.backends.torch.rig import Answer, Rig, same_rows

BOUND = 3e-5  # of log-probabilities in fp32, over a few layers and two libraries
HEAD = 70  # tokens: two full blocks and a tail


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reference, Rig]]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(request.param, folder)
    rig = Rig(folder)
    yield reference, rig
    rig.engine.close()


def check(reference: Reference, prompt: list[int], *answers: Answer) -> None:
    for answer in answers:
        assert answer.error is None
        expected = reference.logprobs([*prompt, *answer.tokens])
        assert same_rows(answer, expected, len(prompt)) < BOUND


def test_one_request(pair: tuple[Reference, Rig]) -> None:
    reference, rig = pair
    rig.reset()
    prompt = random_prompt(1, HEAD)
    check(reference, prompt, rig.answer(prompt, 12))


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_in_chunks(pair: tuple[Reference, Rig], chunk: int) -> None:
    reference, rig = pair
    rig.reset(max_chunk_tokens=chunk)
    prompt = random_prompt(2, HEAD)
    check(reference, prompt, rig.answer(prompt, 4))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_of_all_lengths(pair: tuple[Reference, Rig], overlap: bool) -> None:
    """Prompts in progress and decodes in one pass; with a step in flight, decodes go on from their own last sample."""
    reference, rig = pair
    rig.reset(max_chunk_tokens=16, max_step_tokens=40, overlap=overlap)
    prompts = [random_prompt(10 + length, length) for length in (1, 2, 31, 32, 33, 64, 100, 5)]
    ids = [rig.start(prompt, 6 + i) for i, prompt in enumerate(prompts)]
    answers = rig.run(*ids)
    for prompt, request_id in zip(prompts, ids, strict=True):
        check(reference, prompt, answers[request_id])


def test_through_shared_and_forked_blocks(pair: tuple[Reference, Rig]) -> None:
    reference, rig = pair
    rig.reset()
    head = random_prompt(3, HEAD)
    first, second = [*head, 5, 6, 7], [*head, 8, 9]
    check(reference, first, rig.answer(first, 8))
    shared = rig.answer(second, 8)
    assert shared.num_cached_tokens == HEAD  # two full blocks and, by a copy, the tail
    assert rig.num_copies == 1
    check(reference, second, shared)


def test_samples_of_one_prompt_are_forks(pair: tuple[Reference, Rig]) -> None:
    reference, rig = pair
    rig.reset()
    prompt = random_prompt(4, HEAD)
    first = rig.start(prompt, 8, temperature=1.0, seed=7)
    others = [rig.start(prompt, 8, parent=first, temperature=1.0, seed=7, sample_index=i) for i in (1, 2)]
    answers = rig.run(first, *others)
    assert rig.num_computed < 2 * HEAD
    assert rig.num_copies == 2
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
    check(reference, prompt, *answers.values())


def test_after_preemption(pair: tuple[Reference, Rig]) -> None:
    reference, rig = pair
    rig.reset(num_blocks=14)  # four requests cannot all grow
    prompts = [random_prompt(20 + i, 60) for i in range(4)]
    ids = [rig.start(prompt, 70) for prompt in prompts]
    requests = [rig.engine.scheduler.get(request_id) for request_id in ids]
    answers = rig.run(*ids)
    assert any(request is not None and request.num_preemptions for request in requests)
    for prompt, request_id in zip(prompts, ids, strict=True):
        check(reference, prompt, answers[request_id])


def test_prompt_logprobs(pair: tuple[Reference, Rig]) -> None:
    reference, rig = pair
    rig.reset(max_chunk_tokens=16)
    prompt = random_prompt(5, HEAD)
    answer = rig.answer(prompt, 2, prompt_logprobs=160)
    assert sorted(answer.prompt_rows) == list(range(1, HEAD))
    expected = reference.logprobs(prompt)
    for position, row in answer.prompt_rows.items():
        assert float((row - expected[position - 1]).abs().max()) < BOUND
