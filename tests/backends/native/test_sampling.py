"""The native sampler compared with its definition, `quire.backends.torch.sampling`, on the same logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.native.library import Floats
from quire.backends.native.model import Engine
from quire.backends.native.runner import NativeSampler, Penalties, Sampled
from quire.backends.torch import sampling as definition
from quire.core.step import SeqSlice, TokenLogprobs
from quire.core.values import SamplingParams
from quire.errors import InvariantViolation
from tests.backends.torch.test_sampling import is_settled, random_row, row

CPU = torch.device("cpu")
INF = math.inf

Masks = Mapping[int, bytes]


@pytest.fixture
def sampler(engine: Engine) -> NativeSampler:
    return NativeSampler(engine.library, engine.handle)


def normal(rng: Random, num_rows: int, vocab_size: int, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(rng.randrange(2**32)).standard_normal((num_rows, vocab_size)) * scale).astype(
        np.float32
    )


def run(sampler: NativeSampler, logits: Floats, rows: Sequence[SeqSlice], masks: Masks | None = None) -> Sampled:
    last = np.array([piece.history[-1] for piece in rows], np.int32)
    return sampler.sample(logits, rows, Penalties(logits.shape[1]), last, masks)


def reference(logits: Floats, rows: Sequence[SeqSlice], masks: Masks | None = None) -> definition.Sampled:
    last = torch.tensor([piece.history[-1] for piece in rows])
    return definition.sample(torch.from_numpy(logits.copy()), rows, last, masks)


def random_logits(rng: Random, num_rows: int, vocab_size: int) -> Floats:
    """Make flat or steep logits; some rows have equal logits, some minus infinity."""
    logits = normal(rng, num_rows, vocab_size, rng.choice([0.3, 3.0, 8.0])) + np.float32(rng.choice([0, -30, 30]))
    if rng.random() < 0.3:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[normal(rng, num_rows, vocab_size) > 7] = -INF
    return logits


@pytest.mark.parametrize("vocab_size", [5, 50, 128, 129, 2049, 9001, 50_000])
def test_a_mixed_batch_follows_the_definition(sampler: NativeSampler, vocab_size: int) -> None:
    rng = Random(vocab_size)
    num_settled = num_rows = 0
    for _ in range(6 if vocab_size > 9001 else 25):
        logits = random_logits(rng, rng.randrange(1, 17), vocab_size)
        batch_indices = rng.sample(range(40), len(logits))
        rows = [random_row(rng, vocab_size, batch_index) for batch_index in batch_indices]
        masks = {batch_index: rng.randbytes(-(-vocab_size // 8)) for batch_index in batch_indices if rng.random() < 0.1}
        wanted = reference(logits, rows, masks)
        found = run(sampler, logits, rows, masks)
        assert found.is_broken.tolist() == wanted.is_broken.tolist()
        assert found.is_blocked.tolist() == wanted.is_blocked.tolist()
        is_good = ~(found.is_broken | found.is_blocked)
        places = [place for place in np.flatnonzero(is_good) if is_settled(logits[place], rows[place])]
        assert found.tokens[places].tolist() == wanted.tokens.numpy()[places].tolist()
        num_settled, num_rows = num_settled + len(places), num_rows + int(is_good.sum())
    assert num_settled > 0.8 * num_rows


@pytest.mark.parametrize("vocab_size", [7, 63, 64, 65, 200, 9001])
@pytest.mark.parametrize("is_nearly_full", [False, True])
def test_a_mask_forbids_exactly_its_tokens(sampler: NativeSampler, vocab_size: int, is_nearly_full: bool) -> None:
    rng = Random(vocab_size)
    logits = normal(rng, 3, vocab_size)
    before = logits.copy()
    is_allowed = np.full((3, vocab_size), is_nearly_full)
    for index in range(3):
        is_allowed[index, rng.sample(range(vocab_size), 3)] = not is_nearly_full
    is_allowed[:, -1] = True
    masks = {index: np.packbits(is_allowed[index], bitorder="little").tobytes() for index in (0, 2)}
    run(sampler, logits, [row(SamplingParams(temperature=0), [1], batch_index=index) for index in range(3)], masks)
    is_allowed[1] = True  # this row has no mask
    assert logits.tolist() == np.where(is_allowed, before, -INF).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 70},  # ends among equal logits: all of them are kept
        {"top_k": 2500},  # more than there are blocks
        {"top_p": 1e-7},
        {"top_p": 0.3},
        {"top_k": 70, "top_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.02, "top_p": 0.7},
        {"min_p": 0.02, "top_k": 70},
    ],
)
def test_equal_logits(sampler: NativeSampler, fields: dict[str, Any]) -> None:
    """Whole numbers only: at the ends of the sets there are hundreds of equal logits. Zeros have both signs."""
    one = normal(Random(1), 1, 9100, 2.0).round()
    one[0, :500] = -INF
    rows = [
        row(SamplingParams(seed=seed, **{"temperature": 0.7, **fields}), [1, 2], batch_index=seed) for seed in range(40)
    ]
    rows = [piece for piece in rows if is_settled(one[0], piece)]
    assert len(rows) > 30
    logits = one.repeat(len(rows), 0)
    assert run(sampler, logits, rows).tokens.tolist() == reference(logits, rows).tokens.tolist()


def test_the_first_of_the_largest_is_taken(sampler: NativeSampler) -> None:
    for places in ([7, 6000], [127, 128], [128, 4096], [6999], [0]):
        logits = np.zeros((1, 7000), np.float32)
        logits[:, places] = 1.0
        assert run(sampler, logits, [row(SamplingParams(temperature=0), [1])]).tokens.tolist() == places[:1]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9999}, {"top_k": 7}, {"top_k": 9}, {"min_p": 0.001}])
def test_the_ends_of_the_draw(sampler: NativeSampler, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """0 takes the first token with any weight, and a draw that rounds to 1 the last, never a forbidden one."""
    logits = np.full((1, 5000), -INF, np.float32)
    logits[:, [11, 12, 2040, 2050, 3000, 4500, 4501]] = [1.0, 2.0, 3.0, 2.5, 1.5, 0.5, 1.0]
    for draw, token in ((0.0, 11), (1.0, 4501)):
        monkeypatch.setattr("quire.backends.sampling.uniform", lambda *_, draw=draw: draw)
        assert run(sampler, logits, [row(SamplingParams(**fields), [1])]).tokens.tolist() == [token]
        weak = row(SamplingParams(temperature=1e-3, **fields), [1])
        assert run(sampler, logits, [weak]).tokens.tolist() == [2040]


def test_only_broken_and_blocked_rows_are_marked(sampler: NativeSampler) -> None:
    logits = normal(Random(4), 12, 4100)
    logits[1, 4000] = math.nan
    logits[2, 7] = INF
    logits[3] = -INF
    logits[6, 3000] = math.nan  # and forbidden: the model is still broken
    logits[7] = math.nan
    logits[9, 4099] = -math.nan
    logits[10, 0] = 3e38  # finite, but not after the division
    many: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
    fields: list[dict[str, Any]] = [many, many, {}, many, {}, {"temperature": 0.0}, many, many, many, {}, many, {}]
    rows = [
        row(SamplingParams(seed=1, **{"logprobs": 2, **one}), [1, 2], batch_index=batch_index)
        for batch_index, one in enumerate(fields)
    ]
    rows[8] = row(SamplingParams(min_tokens=3, stop_token_ids=(5,), **many), [1, 2], batch_index=8)
    rows[10] = row(SamplingParams(temperature=1e-3, **many), [1, 2], batch_index=10)
    only_five = bytearray(513)
    only_five[0] = 1 << 5
    masks = {4: bytes(513), 5: bytes(513), 6: bytes(513), 8: bytes(only_five)}
    before = logits.copy()
    found = run(sampler, logits, rows, masks)
    assert np.flatnonzero(found.is_broken).tolist() == [1, 2, 3, 6, 7, 9]
    assert np.flatnonzero(found.is_blocked).tolist() == [4, 5, 8]
    assert all(0 <= token < 4100 for token in found.tokens.tolist())
    assert found.tokens[10] == 0
    assert math.isnan(found.logprobs[7].logprob)
    for index in (0, 11):
        assert found.tokens[index] == reference(before[index : index + 1], [rows[index]]).tokens[0]


def assert_same(one: TokenLogprobs, other: TokenLogprobs) -> None:
    assert (one.token, one.rank) == (other.token, other.rank)
    assert math.isclose(one.logprob, other.logprob, abs_tol=1e-5)
    assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert all(math.isclose(a, b, abs_tol=1e-5) for (_, a), (_, b) in zip(one.top, other.top, strict=True))


def test_logprobs_are_the_models_own(sampler: NativeSampler) -> None:
    logits = normal(Random(3), 4, 2100)
    logits[3, 100:1000] = -INF
    rows = [
        row(SamplingParams(temperature=0, logprobs=2, logit_bias={7: 100.0}), [1, 2], batch_index=4),
        row(SamplingParams(temperature=0), [1, 2], batch_index=1),
        row(SamplingParams(temperature=0, logprobs=0), [1, 2], batch_index=2),
        row(SamplingParams(seed=8, logprobs=40, top_k=3), [1, 2], batch_index=0),
    ]
    wanted = reference(logits, rows)
    assert wanted.logprobs is not None
    theirs = wanted.logprobs.read(wanted.tokens.tolist())
    ours = run(sampler, logits, rows).logprobs
    assert ours[0].token == 7
    assert list(ours) == list(theirs) == [0, 2, 3]
    for index, one in ours.items():
        assert_same(one, theirs[index])
    assert run(sampler, logits[1:2], rows[1:2]).logprobs == {}


def test_wrong_arguments_do_not_reach_c(sampler: NativeSampler) -> None:
    logits = normal(Random(7), 4, 100)
    rows = [row(SamplingParams(), [1], batch_index=batch_index) for batch_index in range(4)]
    with pytest.raises(InvariantViolation):
        run(sampler, logits, rows[:3])
    with pytest.raises(InvariantViolation):
        run(sampler, logits.T.copy().T, rows)
    with pytest.raises(InvariantViolation):
        run(sampler, logits.astype(np.float64), rows)
    for tokens in ([0, 1, 2, 100], [0, 1, -1, 2]):
        with pytest.raises(InvariantViolation):
            sampler.rank(logits, np.array(tokens, np.int32), [1] * len(tokens))
    for mask in (bytes(12), bytes(14)):
        with pytest.raises(InvariantViolation):
            run(sampler, logits, rows, {1: mask})
