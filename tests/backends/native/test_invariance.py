"""Answers do not depend on batching, to the last bit.

A request's distributions are the same alone, in any batch, in any chunks, on a cached prefix, forked, preempted, and on
any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.backends.native.runner import NativeRunner
from quire.core.values import Priority
from tests.backends.contract import random_prompt
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_models import SHAPES, check
from tests.backends.torch.families import FAMILIES
from tests.backends.torch.rig import Answer, Rig
from tests.selection import mostly_nightly

pytestmark = pytest.mark.sweep("file")
NUM_TOKENS = 10
LENGTHS = (70, 1, 33, 5, 96, 31, 64, 18)


PROMPTS = [random_prompt(length, length) for length in LENGTHS]


MODELS = (
    *("llama", "mistral with a window", "gemma3", "olmo3", "granite", "ministral3", "qwen3_moe", "olmoe"),
    *("gpt_oss", "gemma4 with experts", "gemma4 with shared layers"),
)


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    RoundedReference(request.param, folder)
    rig = Rig(folder, backend="native")
    yield rig
    rig.engine.close()


def native(rig: Rig) -> NativeRunner:
    assert isinstance(rig.engine.runner, NativeRunner)
    return rig.engine.runner


@pytest.fixture(scope="module")
def alone(rig: Rig) -> list[Answer]:
    """Answers on one thread, with the whole prompt at once and nothing cached."""
    answers = []
    native(rig).use_threads(1)
    for prompt in PROMPTS:
        rig.reset(enable_prefix_caching=False)
        answers.append(rig.answer(prompt, NUM_TOKENS, prompt_logprobs=160))
    return answers


def check_same(found: Answer, expected: Answer) -> None:
    assert found.error is None
    assert found.tokens == expected.tokens
    for one, two in zip(found.rows, expected.rows, strict=True):
        assert same_row(one, two)
    for position, row in found.prompt_rows.items():
        assert same_row(row, expected.prompt_rows[position])


def same_row(one: Tensor, two: Tensor) -> bool:
    """Compare two rows. Tokens that were not requested are NaN in both; a logprob is never 1."""
    return torch.equal(one.nan_to_num(nan=1.0), two.nan_to_num(nan=1.0))


@pytest.mark.parametrize(("size", "num_threads"), [(2, 1), (3, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1), (8, 2)])
def test_in_a_batch(rig: Rig, alone: list[Answer], size: int, num_threads: int) -> None:
    rig.reset()
    native(rig).use_threads(num_threads)
    ids = [rig.start(prompt, NUM_TOKENS) for prompt in PROMPTS[:size]]
    answers = rig.run(*ids)
    for request_id, expected in zip(ids, alone, strict=False):
        check_same(answers[request_id], expected)


@pytest.mark.parametrize(
    ("chunk", "overlap"),
    [(1, False), (2, False), (3, False), (7, False), (13, True), (16, False), (17, False), (32, False)],
)
def test_in_chunks(rig: Rig, alone: list[Answer], chunk: int, overlap: bool) -> None:
    """Alone, then with the chunks and decodes of all requests in one pass."""
    native(rig).use_threads(1)
    for number in (0, 4):
        rig.reset(max_chunk_tokens=chunk, overlap=overlap)
        check_same(rig.answer(PROMPTS[number], NUM_TOKENS, prompt_logprobs=160), alone[number])
    rig.reset(max_chunk_tokens=chunk, max_num_batched_tokens=40, overlap=overlap)
    ids = [rig.start(prompt, NUM_TOKENS, prompt_logprobs=160) for prompt in PROMPTS]
    answers = rig.run(*ids)
    for request_id, expected in zip(ids, alone, strict=True):
        check_same(answers[request_id], expected)
        assert len(answers[request_id].prompt_rows) == len(expected.prompt_rows)


def test_repeated_runs_on_two_threads(rig: Rig, alone: list[Answer]) -> None:
    """The first free thread takes the next piece of work: the order must not matter."""
    native(rig).use_threads(2)
    for _ in range(8):
        rig.reset(enable_prefix_caching=False)
        ids = [rig.start(prompt, 2) for prompt in PROMPTS]
        answers = rig.run(*ids)
        for request_id, expected in zip(ids, alone, strict=True):
            check_same(answers[request_id], Answer(expected.tokens[:2], expected.rows[:2]))


@pytest.mark.parametrize("precision", ["fast", "balanced", "exact"])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_other_settings(precision: str, block_size: int, kernels: str, tmp_path: Path) -> None:
    """Each block size and each variant has its own bits."""
    RoundedReference("mistral with a window", tmp_path)
    rig = Rig(tmp_path, backend="native", precision=precision, block_size=block_size, num_blocks=800)
    expected = []
    for prompt in PROMPTS:
        rig.reset(enable_prefix_caching=False)
        expected.append(rig.answer(prompt, 4))
    rig.reset(max_chunk_tokens=13, max_num_batched_tokens=40)
    ids = [rig.start(prompt, 4) for prompt in PROMPTS]
    answers = rig.run(*ids)
    for request_id, one in zip(ids, expected, strict=True):
        check_same(answers[request_id], one)
    assert kernels in rig.engine.runner.facts().backend
    rig.engine.close()


# Random requests


@dataclass
class RandomRequest:
    prompt: list[int]
    num_tokens: int
    sampling: dict[str, Any]
    parent: RandomRequest | None = None


def random_request(rng: Random, heads: Sequence[list[int]], requests: Sequence[RandomRequest]) -> RandomRequest:
    """Make a request, often with a prefix that others share, sometimes another sample of an earlier prompt."""
    if requests and rng.random() < 0.2:
        parent = rng.choice(requests)
        again = {**parent.sampling, "sample_index": rng.randrange(1, 100)}
        return RandomRequest(parent.prompt, rng.randrange(1, 25), again, parent)
    prompt = [rng.randrange(3, 160) for _ in range(rng.choice((1, 2, 8, 30, 60)))]
    if rng.random() < 0.6:
        head = rng.choice(heads)
        prompt = head[: rng.randrange(1, len(head) + 1)] + prompt
    sampling: dict[str, Any] = {}
    if rng.random() < 0.5:
        sampling = {"temperature": 1.0, "seed": rng.randrange(1000), "top_p": rng.choice((1.0, 0.9))}
    if rng.random() < 0.2:
        sampling["prompt_logprobs"] = 160
    if rng.random() < 0.2:
        sampling["repetition_penalty"] = 1.3
    return RandomRequest(prompt, rng.randrange(1, 25), sampling)


def run_requests(rng: Random, rig: Rig, count: int) -> dict[int, tuple[RandomRequest, Answer]]:
    """Run all requests through one engine, arriving at random steps; some are cancelled."""
    heads = [[rng.randrange(3, 160) for _ in range(rng.randrange(20, 120))] for _ in range(3)]
    requests: dict[int, RandomRequest] = {}
    answers: dict[int, Answer] = {}
    num_left = count
    while num_left or rig.engine.has_work:
        while num_left and rng.random() < 0.3:
            num_left -= 1
            one = random_request(rng, heads, list(requests.values()))
            parent = next((key for key, value in requests.items() if value is one.parent), None)
            priority = rng.choice((Priority.LOW, Priority.NORMAL, Priority.HIGH))
            request_id = rig.start(one.prompt, one.num_tokens, parent=parent, priority=priority, **one.sampling)
            requests[request_id], answers[request_id] = one, Answer()
        rig.step(answers)
        if answers and rng.random() < 0.03:
            gone = rng.choice(list(answers))
            if rig.engine.cancel(gone):
                del answers[gone]
        if rng.random() < 0.1:
            native(rig).use_threads(rng.choice((1, 2)))
    return {request_id: (requests[request_id], answer) for request_id, answer in answers.items()}


@pytest.mark.parametrize("seed", mostly_nightly(range(6), 4))
def test_random_steps(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    name, shape = rng.choice(list(FAMILIES)), {}
    if rng.random() < 0.5:
        name, shape = rng.choice(("qwen3", "gemma3")), SHAPES[rng.choice(list(SHAPES))]
    reference = RoundedReference(name, tmp_path, seed, **shape)
    rig = Rig(
        tmp_path,
        backend="native",
        precision="exact",
        block_size=rng.choice((4, 16, 32, 64)),
        num_blocks=400,
        max_waiting=100,
    )
    block_size = rig.engine.capacity.block_size
    rig.reset(
        overlap=rng.random() < 0.5,
        num_blocks=rng.choice((320, 640)) // block_size + 2,
        max_num_seqs=rng.choice((2, 5, 8)),
        max_chunk_tokens=rng.choice((5, 16, 64)),
        max_num_batched_tokens=rng.choice((16, 48, 200)),
    )
    found = run_requests(rng, rig, 16)
    assert len(found) > 8
    native(rig).use_threads(1)
    for one, answer in found.values():
        rig.reset(enable_prefix_caching=False)
        check_same(answer, rig.answer(one.prompt, one.num_tokens, **one.sampling))
    for one, answer in rng.sample(list(found.values()), 4):
        check(reference, one.prompt, answer, bound=4e-3)  # narrow models round more
    rig.engine.close()
