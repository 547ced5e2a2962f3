"""The GPU's runner end to end, on small models that `transformers` judges: chunks, siblings, graphs, lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.backends.torch import cuda
from quire.core.step import SeqSlice
from tests.backends.torch.families import Reference
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.rig import same_rows

TOLERANCE = 2e-4  # of log-probabilities, fp32


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3", "gemma3", "phi3", "mistral with a window"])
def test_families_agree_with_transformers(name: str, tmp_path: Path) -> None:
    reference = Reference(name, tmp_path)
    rig = FusedRig(tmp_path)
    tokens = prompt(45)
    answer = rig.answer(tokens, 4)
    expected = reference.logprobs(tokens + answer.tokens)
    assert same_rows(answer, expected, len(tokens)) < TOLERANCE


def test_company_chunks_and_overlap_change_nothing(llama: Reference) -> None:
    rig = FusedRig(llama.path)
    rig.reset(overlap=True, max_step_tokens=40, max_chunk_tokens=24)
    prompts = [prompt(length, length) for length in (3, 33, 70)]
    ids = [rig.start(tokens, 5) for tokens in prompts]
    answers = rig.run(*ids)
    for request_id, tokens in zip(ids, prompts, strict=True):
        answer = answers[request_id]
        expected = llama.logprobs(tokens + answer.tokens)
        assert same_rows(answer, expected, len(tokens)) < TOLERANCE
        assert answer.tokens == [int(row.argmax()) for row in answer.rows]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_siblings_read_their_head_once(llama: Reference, has_graphs: bool) -> None:
    rig = FusedRig(llama.path)
    if has_graphs:
        while rig.runner.prepare():
            pass
    head = prompt(160)
    first = rig.answer([*head, 5], 1)
    assert not first.num_cached_tokens
    ids = [rig.start(head + prompt(4, seed), 20 if has_graphs else 4, logprobs=160) for seed in range(5)]
    answers = rig.run(*ids)
    for seed, request_id in enumerate(ids):
        answer, tokens = answers[request_id], head + prompt(4, seed)
        assert answer.num_cached_tokens == len(head)
        assert same_rows(answer, llama.logprobs(tokens + answer.tokens), len(tokens)) < TOLERANCE


def test_graphs_pad_without_touching_anything(llama: Reference) -> None:
    """Three decodes in a graph of four: the answers are the same, and only the requests' own blocks are written."""
    rig = FusedRig(llama.path)
    while rig.runner.prepare():
        pass
    rig.reset(overlap=True)
    prompts = [prompt(length, length) for length in (20, 31, 64)]
    ids = [rig.start(tokens, 6, temperature=0.0) for tokens in prompts]
    answers = rig.run(*ids)
    for request_id, tokens in zip(ids, prompts, strict=True):
        expected = llama.logprobs(tokens + answers[request_id].tokens)
        assert same_rows(answers[request_id], expected, len(tokens)) < TOLERANCE
    assert not rig.runner.store.pool[:, 0].any()  # the null block
    assert int((rig.runner.store.pool[0].flatten(1).abs().sum(1) > 0).sum()) <= 6


def test_a_step_that_does_not_fit_runs_in_halves(llama: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = FusedRig(llama.path)
    whole = cuda.CudaRunner._pass
    tried: list[int] = []

    def scarce(self: cuda.CudaRunner, slices: tuple[SeqSlice, ...], indices: tuple[int, ...]) -> object:
        num_tokens = sum(piece.length for piece in slices)
        tried.append(num_tokens)
        if num_tokens > 60:
            raise torch.OutOfMemoryError
        return whole(self, slices, indices)

    monkeypatch.setattr(cuda.CudaRunner, "_pass", scarce)
    prompts = [prompt(length, length) for length in (50, 51)]
    ids = [rig.start(tokens, 3) for tokens in prompts]
    answers = rig.run(*ids)
    assert tried[:3] == [101, 50, 51]
    for request_id, tokens in zip(ids, prompts, strict=True):
        answer = answers[request_id]
        assert same_rows(answer, llama.logprobs(tokens + answer.tokens), len(tokens)) < TOLERANCE
    alone = rig.answer(tokens := prompt(110, 7), 2, prompt_logprobs=160)  # one prompt is cut along its length
    assert same_rows(alone, llama.logprobs(tokens + alone.tokens), len(tokens)) < TOLERANCE
    assert sorted(alone.prompt_rows) == list(range(1, 110))
    ids = [rig.start(prompt(130, 8), 2), rig.start(prompt(20, 9), 2)]  # half of 130 is too much; the other fits
    answers = rig.run(*ids)
    assert answers[ids[0]].error == cuda.NO_MEMORY
    assert answers[ids[1]].error is None
    assert len(answers[ids[1]].tokens) == 2


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, which is the interpreter's arithmetic
def test_what_is_not_a_number_ends_its_request_alone(llama: Reference) -> None:
    rig = FusedRig(llama.path)
    with torch.inference_mode():
        rig.runner.model.embedding[7] = float("nan")
    ids = [rig.start([7, *prompt(40, 1)], 3), rig.start(prompt(40, 2), 3)]
    answers = rig.run(*ids)
    assert answers[ids[0]].error == cuda.BROKEN
    assert answers[ids[1]].error is None
    assert torch.isfinite(rig.runner.store.pool).all()
