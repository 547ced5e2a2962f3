"""Every family has the distributions of `transformers`: prefill, decode, chunked, shared, forked, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.runner import TorchRunner
from tests.backends.contract import HEAD, POISONED, Contract, check_poisoned, random_prompt
from tests.backends.torch.families import FAMILIES, Reference
from tests.backends.torch.rig import Answer, Rig, same_rows

BOUND = 3e-5  # of log-probabilities in fp32, over a few layers and two libraries


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


class TestTorch(Contract):
    bound = BOUND


@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gemma3"])
def test_prompts_longer_than_one_call_of_attention(name: str, tmp_path: Path) -> None:
    """From position 512 on, queries are attended separately, and contexts fall into other groups."""
    reference = Reference(name, tmp_path, max_position_embeddings=2048)
    rig = Rig(tmp_path, max_chunk_tokens=2048, num_blocks=200)
    long, short = random_prompt(6, 1100), random_prompt(7, 40)
    ids = rig.start(short, 12), rig.start(long, 6, prompt_logprobs=160), rig.start(random_prompt(8, 300), 12)
    answers = rig.run(*ids)
    check(reference, short, answers[ids[0]])
    check(reference, long, answers[ids[1]])
    check(reference, random_prompt(8, 300), answers[ids[2]])
    assert sorted(answers[ids[1]].prompt_rows) == list(range(1, 1100))
    assert not answers[ids[0]].prompt_rows
    expected = reference.logprobs(long)
    for position, row in answers[ids[1]].prompt_rows.items():
        assert float((row - expected[position - 1]).abs().max()) < BOUND
    rig.engine.close()


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    reference = Reference("llama", tmp_path)
    rig = Rig(tmp_path, block_size=block_size, num_blocks=1000)
    prompt = random_prompt(9, HEAD)
    check(reference, prompt, rig.answer(prompt, 5), rig.answer(prompt, 5))
    rig.engine.close()


def test_nan_fails_only_its_own_request(tmp_path: Path) -> None:
    reference = Reference("llama", tmp_path)
    rig = Rig(tmp_path, num_blocks=12)
    runner = rig.engine.runner
    assert isinstance(runner, TorchRunner)
    with torch.inference_mode():
        assert isinstance(runner.model, DecoderModel)
        runner.model.embedding[POISONED] = float("nan")
    check_poisoned(rig, lambda prompt, answer: check(reference, prompt, answer))
    rig.engine.close()
