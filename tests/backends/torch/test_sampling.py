"""The sampler compared with its definition, written out for one row in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.sampling import uniform
from quire.backends.torch import sampling as module
from quire.backends.torch.sampling import penalize, rank_tokens, sample
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams

VOCAB = 50
MARGIN = 1e-6  # allowed difference of sums and exponentials between two machines


def row(params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = (), batch_index: int = 0) -> SeqSlice:
    """A decode whose whole context is known."""
    history = [*prompt, *output]
    start = len(history) - 1
    return SeqSlice(batch_index + 1, 0, batch_index, history[-1:], start, 1, [1], history, True, params, len(prompt))


def run(logits: Tensor, rows: Sequence[SeqSlice], masks: dict[int, bytes] | None = None) -> list[int]:
    last = torch.tensor([piece.history[-1] for piece in rows])
    return [int(token) for token in sample(logits.clone(), rows, last, masks).tokens]


def adjusted(logits: Sequence[float], piece: SeqSlice, mask: bytes | None = None) -> list[float]:
    """Apply penalties, bias and forbidden tokens."""
    params, out = piece.sampling, list(logits)
    counts = Counter(piece.history[piece.num_prompt_tokens :])
    for token in set(piece.history):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if len(piece.history) - piece.num_prompt_tokens < params.min_tokens:
        for token in params.stop_token_ids:
            out[token] = -math.inf
    if mask is not None:
        out = [value if mask[i // 8] >> i % 8 & 1 else -math.inf for i, value in enumerate(out)]
    return out


def expected(logits: Sequence[float], piece: SeqSlice, mask: bytes | None = None) -> int:
    params = piece.sampling
    values = adjusted(logits, piece, mask)
    if params.temperature == 0:
        return values.index(max(values))
    scaled = [value / params.temperature for value in values]
    peak = max(scaled)
    kept = {i for i, value in enumerate(scaled) if value > -math.inf}
    if params.min_p:
        kept = {i for i in kept if scaled[i] >= peak + math.log(params.min_p)}
    if params.top_k:
        floor = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        kept = {i for i in kept if scaled[i] >= floor}
    if params.top_p < 1:
        total = sum(math.exp(scaled[i] - peak) for i in kept)
        mass, chosen = 0.0, set()
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if mass >= params.top_p * total:
                break
            chosen.add(i)
            mass += math.exp(scaled[i] - peak)
        kept = chosen
    target = uniform(params.seed, params.sample_index, len(piece.history))
    target *= sum(math.exp(scaled[i] - peak) for i in kept)
    mass = 0.0
    for i in sorted(kept):
        mass += math.exp(scaled[i] - peak)
        if mass > target:
            return i
    raise AssertionError("no token")


def is_settled(logits: np.ndarray[Any, np.dtype[np.float32]], piece: SeqSlice, margin: float = MARGIN) -> bool:
    """Return whether no decision for this row's token is so close that another exponential could change it.

    `logits` [V] are those after penalties, bias and forbidden tokens.
    """
    params = piece.sampling
    if params.is_greedy:
        return True
    scaled = logits / np.float32(params.temperature)
    weights = np.exp(scaled.astype(np.float64) - scaled.max())
    if params.min_p > 0:
        floor = scaled.max() + np.log(np.float32(params.min_p))
        if (np.abs(scaled - floor) < margin * np.abs(scaled)).any() and params.min_p < 1:
            return False
        weights[scaled < floor] = 0
    if 0 < params.top_k < len(logits):
        weights[scaled < np.sort(scaled)[-params.top_k]] = 0
    if params.top_p < 1:
        ordered = -np.sort(-weights)
        before = (ordered.cumsum() - ordered) / weights.sum()
        threshold = ordered[before < params.top_p][-1]
        distance = np.abs(weights - threshold)
        if (np.abs(before[1:] - params.top_p) < margin).any() or (
            (distance > 0) & (distance < margin * threshold)
        ).any():
            return False
        weights[weights < threshold] = 0
    cumulative = weights.cumsum()[weights > 0] / weights.sum()
    draw = uniform(params.seed, params.sample_index, piece.start + piece.length)
    return bool((np.abs(cumulative[:-1] - draw) > margin).all())


def random_params(rng: Random, vocab_size: int) -> SamplingParams:
    fields: dict[str, Any] = {"seed": rng.randrange(2**63), "sample_index": rng.randrange(3)}
    options: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0.0, 1e-3, 0.3, 0.9, 2.5, 10.0]),
        "top_k": lambda: rng.choice([1, 2, 3, 20, 60, 700, 10**6]),
        "top_p": lambda: rng.choice([1e-6, 0.05, 0.5, 0.9, 0.999]),
        "min_p": lambda: rng.choice([1e-4, 0.01, 0.2, 1.0]),
        "repetition_penalty": lambda: rng.choice([0.5, 1.3]),
        "presence_penalty": lambda: rng.choice([-1.0, 1.5]),
        "frequency_penalty": lambda: rng.choice([-0.5, 2.0]),
        "logit_bias": lambda: {rng.randrange(vocab_size): rng.choice([-100.0, 3.0]) for _ in range(3)},
    }
    for name, choose in options.items():
        if rng.random() < 0.3:
            fields[name] = choose()
    if rng.random() < 0.3:
        fields |= {"min_tokens": 5, "stop_token_ids": (1, 2, 2)}
    return SamplingParams(**fields)


def random_row(rng: Random, vocab_size: int, batch_index: int) -> SeqSlice:
    tokens = [rng.randrange(vocab_size) for _ in range(rng.randrange(2, 12))]
    num_prompt = rng.randrange(1, len(tokens) + 1)
    return row(random_params(rng, vocab_size), tokens[:num_prompt], tokens[num_prompt:], batch_index)


@pytest.mark.parametrize("seed", range(60))
def test_a_mixed_batch_follows_the_definition(seed: int) -> None:
    rng = Random(seed)
    torch.manual_seed(seed)
    logits = torch.randn(12, VOCAB) * 3
    rows = [random_row(rng, VOCAB, batch_index) for batch_index in range(12)]
    masks = {3: bytes([0xAA] * 7), 7: bytes([0x10] + [0] * 6)}
    wanted = [expected(logits[i].tolist(), piece, masks.get(i)) for i, piece in enumerate(rows)]
    assert run(logits, rows, masks) == wanted
    # A row's token does not depend on the other rows.
    for i, piece in enumerate(rows):
        assert run(logits[i : i + 1], [piece], masks) == [wanted[i]]


def test_a_wide_top_p_sorts_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOP_P_CANDIDATES", 4)
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB)
    rows = [row(SamplingParams(top_p=0.95, seed=seed), [1, 2], batch_index=seed) for seed in range(8)]
    assert run(logits, rows) == [expected(logits[i].tolist(), piece) for i, piece in enumerate(rows)]


def test_random_numbers_are_spread_and_depend_on_all_three() -> None:
    values = [uniform(seed, index, position) for seed in range(20) for index in range(5) for position in range(20)]
    assert len(set(values)) == len(values) == 2000
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_penalties_count_samples_the_scheduler_has_not_seen() -> None:
    """With a step in flight, the history is one token short: the runner counts its own last sample."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    late = SeqSlice(1, 0, 0, (), 3, 1, [1], [4, 5, 6], True, params, 2)
    first = logits.clone()
    penalize(first, [late], torch.tensor([9]))
    assert first[0, 6] == -3
    assert first[0, 9] == -3
    assert first[0, 4] == 0  # in the prompt
    later = SeqSlice(1, 0, 0, (9,), 4, 1, [1], [4, 5, 6, 9, 9], True, params, 2)
    second = logits.clone()
    penalize(second, [later], torch.tensor([9]))
    assert second[0, 9] == -5


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, VOCAB)
    rows = [
        row(SamplingParams(temperature=0, logprobs=2, logit_bias={7: 100.0}), [1, 2], batch_index=0),
        row(SamplingParams(temperature=0), [1, 2], batch_index=1),
        row(SamplingParams(temperature=0, logprobs=0), [1, 2], batch_index=2),
    ]
    sampled = sample(logits.clone(), rows, torch.tensor([2, 2, 2]), None)
    assert sampled.logprobs is not None
    found = sampled.logprobs.read(sampled.tokens.tolist())
    assert set(found) == {0, 2}
    truth = torch.log_softmax(logits, -1)
    assert found[0].token == 7  # chosen by the bias; its probability is still the model's
    assert math.isclose(found[0].logprob, float(truth[0, 7]), abs_tol=1e-6)
    assert found[0].rank == int((truth[0] > truth[0, 7]).sum())
    assert [token for token, _ in found[0].top] == truth[0].topk(2).indices.tolist()
    assert found[2].top == ()
    ranked = rank_tokens(logits, [4, 5, 6], 1)
    assert [entry.token for entry in ranked] == [4, 5, 6]
    assert math.isclose(ranked[1].logprob, float(truth[1, 5]), abs_tol=1e-6)


def test_only_broken_and_blocked_rows_are_marked() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 5] = float("nan")
    rows = [row(SamplingParams(seed=1), [1, 2], batch_index=batch_index) for batch_index in range(3)]
    sampled = sample(logits, rows, torch.tensor([2, 2, 2]), {2: bytes(7)})
    assert sampled.is_broken.tolist() == [False, True, False]
    assert sampled.is_blocked.tolist() == [False, False, True]
    assert all(0 <= token < VOCAB for token in sampled.tokens.tolist())
