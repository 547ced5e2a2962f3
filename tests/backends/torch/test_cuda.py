"""The GPU runner end to end, compared with `transformers` on small models: chunks, siblings, graphs, out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.backends.sampling import BROKEN
from quire.backends.torch import attention_work, cuda, graphs, inputs
from quire.backends.torch.models.decoder import DecoderModel
from quire.core.step import SeqSlice, StepPlan
from tests.backends.torch.families import EVERY_FAMILY, MORE_FAMILIES, STATE_FAMILIES, Reference
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.rig import Answer, Rig, same_rows

TOLERANCE = 2e-4  # of log-probabilities, fp32

# Padding rows compute on any memory content. The interpreter computes in numpy, which warns about it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def small(name: str, folder: Path, **changes: Any) -> Reference:
    """Make a model of two layers, one with a window if the family has windows: the interpreter is slow."""
    config = EVERY_FAMILY[name]()
    for field in ("layer_types", "no_rope_layers"):
        if getattr(config, field, None):
            kinds = getattr(config, field)
            other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
            changes = {field: [kinds[0], other], **changes}
    if getattr(config, "num_kv_shared_layers", 0):  # both kinds, and both kinds of layers that share with them
        changes |= {"num_hidden_layers": config.num_hidden_layers, "layer_types": config.layer_types}
    return Reference(name, folder, **{"num_hidden_layers": 2, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return small("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def check(reference: Reference, tokens: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert same_rows(answer, reference.logprobs(tokens + answer.tokens), len(tokens)) < TOLERANCE


def prepare(rig: FusedRig) -> None:
    """Capture all graphs without preparing the sampler, which has its own tests."""
    with torch.inference_mode(), rig.runner._on_stream():
        while rig.runner._graphs.prepare():
            pass
    assert None not in rig.runner._graphs._graphs.values()  # all were captured


KEPT = ("llama tied", "lfm2_moe", "qwen3_5_moe", "gpt_oss", "gemma4", "gemma3", "mistral with", "olmoe", "phi3")


@pytest.mark.parametrize(
    "name", ["llama tied", "qwen2", "qwen3", "gemma3", "phi3", "mistral with a window", *MORE_FAMILIES, *STATE_FAMILIES]
)
@pytest.mark.kept(*KEPT)
def test_families_agree_with_transformers(name: str, tmp_path: Path) -> None:
    reference = small(name, tmp_path)
    tokens = prompt(35)
    check(reference, tokens, FusedRig(tmp_path).answer(tokens, 3))


def test_batching_chunks_and_overlap_change_nothing(llama: Reference) -> None:
    rig = FusedRig(llama.path)
    rig.reset(overlap=True, max_num_batched_tokens=30, max_chunk_tokens=18)
    prompts = [prompt(length, length) for length in (3, 33, 47)]
    ids = [rig.start(tokens, 4) for tokens in prompts]
    answers = rig.run(*ids)
    for request_id, tokens in zip(ids, prompts, strict=True):
        check(llama, tokens, answers[request_id])
        assert answers[request_id].tokens == [int(row.argmax()) for row in answers[request_id].rows]


def watch_siblings(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """Return a list that receives the rows, first and last key of all groups that are found."""
    found: list[list[tuple[int, int, int]]] = []

    def find_siblings(*args: Any) -> attention_work.Grouping | None:
        grouping = attention_work.find_siblings(*args)
        groups = () if grouping is None else grouping.siblings
        found.append([(group.last - group.first, group.low, group.high) for group in groups])
        return grouping

    monkeypatch.setattr(inputs, "find_siblings", find_siblings)
    return found


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("min_keys", [64, 1024])
@pytest.mark.kept("1024-True")
def test_drafts(llama: Reference, has_graphs: bool, min_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right up to some token, with a context that is read once for all of them, and without."""
    monkeypatch.setattr(attention_work, "MIN_DRAFT_KEYS", min_keys)
    monkeypatch.setattr(attention_work, "PIECE", 64)
    prompts = [prompt(40, 1), prompt(70, 2)]
    rig = FusedRig(llama.path, max_num_seqs=16)
    expected = [rig.answer(tokens, 10).tokens for tokens in prompts]
    monkeypatch.setattr(graphs, "MAX_MISSES", 1 if has_graphs else 1000)
    if has_graphs:
        monkeypatch.setattr(rig.runner._graphs, "_is_compiled", lambda: True)
    ids = [rig.start(tokens, 10) for tokens in prompts]
    answers = {request_id: Answer() for request_id in ids}
    while rig.engine.has_work:
        for number, request in enumerate(rig.engine.scheduler.running):
            done = request.num_output_tokens
            request.draft = [*expected[number][done : done + 4], 7, 7]
            request.is_held = True
        rig.step(answers)
    assert rig.engine.scheduler.num_accepted > 10
    for tokens, request_id, answer in zip(prompts, ids, expected, strict=True):
        assert answers[request_id].tokens == answer
        check(llama, tokens, answers[request_id])
    kinds = {(kind.size, kind.is_wide) for kind in rig.runner._graphs._graphs}
    assert ((16, min_keys == 64) in kinds) == has_graphs


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.kept("True")
def test_nested_siblings_and_strangers(llama: Reference, has_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine requests with one head, four of which share more, one that shares a single block, and one that shares none.

    They end at different times, so that groups lose members while others run.
    """
    monkeypatch.setattr(attention_work, "PIECE", 64)
    found = watch_siblings(monkeypatch)
    rig = FusedRig(llama.path, max_num_seqs=16)
    monkeypatch.setattr(graphs, "MAX_MISSES", 2 if has_graphs else 1000)
    if has_graphs:
        monkeypatch.setattr(rig.runner._graphs, "_is_compiled", lambda: True)
    head, more = prompt(64), prompt(64, 99)
    rig.answer([*head, *more, 5], 1)
    prompts = [head + more + prompt(4, seed) for seed in range(4)] + [head + prompt(4, seed) for seed in range(4, 9)]
    prompts += [head[:32] + prompt(4, 9), prompt(20, 10)]
    ids = [rig.start(tokens, 8 - number % 4) for number, tokens in enumerate(prompts)]
    answers = rig.run(*ids)
    assert {(9, 0, 64), (4, 64, 128)} in [set(groups) for groups in found]
    assert len({str(groups) for groups in found}) > 2
    for tokens, request_id in zip(prompts, ids, strict=True):
        check(llama, tokens, answers[request_id])
    assert any(kind.is_wide for kind in rig.runner._graphs._graphs) == has_graphs


def test_graphs_pad_without_touching_anything(llama: Reference) -> None:
    """Three decodes in a graph of four: the answers are the same, and only the requests' own blocks are written."""
    rig = FusedRig(llama.path, max_num_seqs=4)
    prepare(rig)
    rig.reset(overlap=True)
    prompts = [prompt(length, length) for length in (20, 31, 35)]
    ids = [rig.start(tokens, 4) for tokens in prompts]
    answers = rig.run(*ids)
    for request_id, tokens in zip(ids, prompts, strict=True):
        check(llama, tokens, answers[request_id])
    assert not any(pool[:, 0].any() for pool in rig.runner.store.pools.values())  # the null block
    assert int((rig.runner.store.layers[0].flatten(1).abs().sum(1) > 0).sum()) <= 5


# Sampling options, compared with the CPU runner

WISHES: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.7},
    {"temperature": 2.0, "seed": 7, "top_k": 9, "min_p": 0.05, "logprobs": None},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 2.0, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 100.0, 8: 99.0}, "frequency_penalty": 2.0},
]


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.kept("True")
def test_samples_equal_those_of_the_reference(llama: Reference, has_graphs: bool) -> None:
    """With a step in flight, the last tokens and their penalties are only on the device."""
    judge, rig = Rig(llama.path, device="cpu"), FusedRig(llama.path)
    if has_graphs:
        prepare(rig)
    unknown: list[int] = []
    found: list[dict[int, Answer]] = []
    for one, overlap in ((judge, False), (rig, True)):
        one.reset(overlap=overlap)
        count = one.engine.on_plan

        def watch(plan: StepPlan, count: Any = count) -> None:
            count(plan)
            unknown.append(sum(not piece.tokens for piece in plan.slices))

        one.engine.on_plan = watch
        ids = [one.start(prompt(3 + 2 * number, number), 5, **wishes) for number, wishes in enumerate(WISHES)]
        found.append(one.run(*ids))
    assert max(unknown) == len(WISHES)
    assert len({tuple(answer.tokens) for answer in found[0].values()}) == len(WISHES)
    for expected, got in zip(found[0].values(), found[1].values(), strict=True):
        assert got.error is None
        assert got.tokens == expected.tokens
        assert len(got.rows) == len(expected.rows)
        for row, wanted in zip(got.rows, expected.rows, strict=True):
            assert torch.equal(row.isnan(), wanted.isnan())  # the same tokens are reported
            assert float((row - wanted).nan_to_num().abs().max()) < TOLERANCE
    judge.engine.close()


def test_a_step_that_does_not_fit_runs_in_halves(llama: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = FusedRig(llama.path)
    whole = cuda.CudaRunner._pass
    tried: list[int] = []

    def scarce(self: cuda.CudaRunner, slices: tuple[SeqSlice, ...], indices: tuple[int, ...], **kind: bool) -> object:
        num_tokens = sum(piece.length for piece in slices)
        tried.append(num_tokens)
        if num_tokens > 28:
            raise torch.OutOfMemoryError
        return whole(self, slices, indices, **kind)

    monkeypatch.setattr(cuda.CudaRunner, "_pass", scarce)
    prompts = [prompt(length, length) for length in (25, 26)]
    ids = [rig.start(tokens, 3) for tokens in prompts]
    answers = rig.run(*ids)
    assert tried[:3] == [51, 25, 26]
    for request_id, tokens in zip(ids, prompts, strict=True):
        answer = answers[request_id]
        assert same_rows(answer, llama.logprobs(tokens + answer.tokens), len(tokens)) < TOLERANCE
    monkeypatch.setattr("quire.backends.sampling.PROMPT_ROWS", 7)  # positions at a time: a prompt needs several
    alone = rig.answer(tokens := prompt(55, 7), 2, prompt_logprobs=160)  # a single prompt is cut along its length
    expected = llama.logprobs(tokens + alone.tokens)
    assert same_rows(alone, expected, len(tokens)) < TOLERANCE
    assert sorted(alone.prompt_rows) == list(range(1, 55))
    for position, row in alone.prompt_rows.items():
        assert float((row - expected[position - 1]).abs().max()) < TOLERANCE
    ids = [rig.start(prompt(65, 8), 2), rig.start(prompt(10, 9), 2)]  # the first does not fit at all; the second does
    answers = rig.run(*ids)
    assert answers[ids[0]].error == cuda.NO_MEMORY
    assert answers[ids[1]].error is None
    assert len(answers[ids[1]].tokens) == 2


def test_nan_fails_only_its_own_request(llama: Reference) -> None:
    rig = FusedRig(llama.path)
    with torch.inference_mode():
        assert isinstance(rig.runner.model, DecoderModel)
        rig.runner.model.embedding[7] = float("nan")
    ids = [rig.start([7, *prompt(40, 1)], 3), rig.start(prompt(40, 2), 3)]
    answers = rig.run(*ids)
    assert answers[ids[0]].error == BROKEN
    assert answers[ids[1]].error is None
    assert all(torch.isfinite(pool).all() for pool in rig.runner.store.pools.values())
