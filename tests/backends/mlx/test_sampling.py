"""The MLX sampler compared with its definition, `quire.backends.torch.sampling`, on the same logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.backends.mlx.sampling import Penalties, Sampled, sample
from quire.backends.native.library import Floats
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams
from tests.backends.native.test_sampling import Masks, normal, random_logits, reference
from tests.backends.torch.test_sampling import adjusted, is_settled, random_row, row

MARGIN = 3e-5  # cumulative probabilities are float32


def run(logits: Floats, rows: Sequence[SeqSlice], masks: Masks | None = None) -> Sampled:
    last = mx.array([piece.history[-1] for piece in rows])
    return sample(mx.array(logits), rows, Penalties(logits.shape[1]), last, masks)


def numbers(array: mx.array) -> Any:
    return array.tolist()


@pytest.mark.parametrize("vocab_size", [5, 50, 129, 2049, 50_000])
def test_a_mixed_batch_follows_the_definition(vocab_size: int) -> None:
    rng = Random(vocab_size)
    num_settled = num_rows = 0
    for _ in range(4 if vocab_size > 9001 else 25):
        logits = random_logits(rng, rng.randrange(1, 17), vocab_size)
        batch_indices = rng.sample(range(40), len(logits))
        rows = [random_row(rng, vocab_size, batch_index) for batch_index in batch_indices]
        masks = {batch_index: rng.randbytes(-(-vocab_size // 8)) for batch_index in batch_indices if rng.random() < 0.1}
        wanted, found = reference(logits, rows, masks), run(logits, rows, masks)
        assert numbers(found.is_broken) == wanted.is_broken.tolist()
        assert numbers(found.is_blocked) == wanted.is_blocked.tolist()
        for index, piece in enumerate(rows):
            if wanted.is_broken[index] or wanted.is_blocked[index]:
                continue
            num_rows += 1
            changed = np.array(adjusted(logits[index].tolist(), piece, masks.get(piece.batch_index)), np.float32)
            if is_settled(changed, piece, MARGIN):
                num_settled += 1
                assert numbers(found.tokens)[index] == int(wanted.tokens[index]), piece.sampling
    assert num_settled > 0.5 * num_rows


def test_logprobs_are_those_before_all_changes() -> None:
    logits = normal(Random(1), 3, 300)
    params = [
        SamplingParams(temperature=0.0, logprobs=5, logit_bias={7: 100.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3, logprobs=0, top_k=2),
    ]
    rows = [row(one, [1, 2], batch_index=index) for index, one in enumerate(params)]
    wanted, found = reference(logits, rows), run(logits, rows)
    assert wanted.logprobs is not None
    assert found.logprobs is not None
    tokens = numbers(found.tokens)
    assert tokens[0] == 7
    assert set(found.logprobs.read(tokens)) == {0, 2}
    expected = wanted.logprobs.read(tokens)
    for index, entry in found.logprobs.read(tokens).items():
        assert entry.token == expected[index].token
        assert entry.rank == expected[index].rank
        assert entry.logprob == pytest.approx(expected[index].logprob, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for token, _ in expected[index].top]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite(value: float) -> None:
    logits = normal(Random(3), 3, 40)
    logits[1, 5] = value
    rows = [row(SamplingParams(temperature=1.0, seed=1), [1], batch_index=index) for index in range(3)]
    found = run(logits, rows)
    assert numbers(found.is_broken) == [False, True, False]
    assert numbers(found.is_blocked) == [False, False, False]


def test_a_draw_never_leaves_the_kept_tokens() -> None:
    """The last kept token is followed by thousands of tokens of weight 0, which rounding must not reach."""
    logits = np.full((64, 9001), -50.0, np.float32)
    logits[:, 17:20] = [[3.0, 2.0, 1.0]]
    rows = [row(SamplingParams(temperature=1.0, seed=seed, top_k=3), [1], batch_index=seed) for seed in range(64)]
    assert set(numbers(run(logits, rows).tokens)) <= {17, 18, 19}
