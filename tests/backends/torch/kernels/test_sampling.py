"""The GPU sampler compared with its definition, `quire.backends.torch.sampling`, on the same logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.sampling import Ranks, uniform
from quire.backends.torch import device_sampling
from quire.backends.torch.device_sampling import DeviceSampler, SpecialRows, _Edits, fill_params
from quire.backends.torch.kernels.sampling import NUM_PARAMS
from quire.backends.torch.sampling import sample
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.test_sampling import adjusted, is_settled, random_row, row

CPU = torch.device("cpu")
ON_GPU = DEVICE == "cuda"
NUM_BATCHES = 20 if ON_GPU else 2  # per vocabulary size
NUM_EQUAL = 20 if ON_GPU else 2


MAX_SEQS = 40
MARGIN = 1e-5  # sums of the GPU have another order
INF = math.inf


class Outcome(NamedTuple):
    tokens: list[int]
    flags: list[int]
    logprobs: Ranks | None
    last_samples: list[int]


def run(
    logits: Tensor,
    rows: Sequence[SeqSlice],
    masks: Mapping[int, bytes] | None = None,
    *,
    sampler: DeviceSampler | None = None,
    last_tokens: Sequence[int] | None = None,
    draws: Sequence[float] | None = None,
) -> Outcome:
    """Sample as the runner does, with rows at their batch indices. `draws` replace the requests' random numbers."""
    max_num_seqs = max(MAX_SEQS, len(rows))
    if sampler is None:
        sampler = DeviceSampler(logits.shape[1], max_num_seqs, torch.device(DEVICE))
    params = np.full((len(rows), NUM_PARAMS), 77, np.float32)
    special_rows = fill_params(params, rows)
    if draws is not None:
        params[:, 4] = draws
    last = [piece.history[-1] for piece in rows] if last_tokens is None else last_tokens
    last_samples = torch.full((max_num_seqs,), -5, dtype=torch.int32, device=DEVICE)
    out = torch.full((3, len(rows) + 2), -7, dtype=torch.int32, device=DEVICE)
    logprobs = sampler.sample(
        logits.to(DEVICE),
        rows,
        special_rows,
        torch.from_numpy(params).to(DEVICE),
        torch.tensor([piece.batch_index for piece in rows], dtype=torch.int32, device=DEVICE),
        torch.tensor(last, dtype=torch.int32, device=DEVICE),
        last_samples,
        masks,
        out,
    )
    assert bool((out[2] == -7).all() & (out[:, len(rows) :] == -7).all())  # nothing else was written
    tokens, flags, _ = out[:, : len(rows)].tolist()
    return Outcome(tokens, flags, logprobs, last_samples.tolist())


def reference(logits: Tensor, rows: Sequence[SeqSlice], masks: Mapping[int, bytes] | None = None) -> list[int]:
    last = torch.tensor([piece.history[-1] for piece in rows])
    tokens: list[int] = sample(logits.float().clone(), rows, last, masks).tokens.tolist()
    return tokens


def random_mask(rng: Random, vocab_size: int) -> bytes:
    return rng.randbytes(-(-vocab_size // 8))


def settled_rows(
    rng: Random, logits: Tensor, batch_indices: Sequence[int], masks: Mapping[int, bytes]
) -> list[SeqSlice]:
    """Make random rows, again if a decision is too close."""

    def drawn(values: Tensor, batch_index: int) -> Iterator[SeqSlice]:
        for _ in range(50):
            piece = random_row(rng, len(values), batch_index)
            changed = adjusted(values.tolist(), piece, masks.get(batch_index))
            if is_settled(np.array(changed, np.float32), piece, MARGIN):
                yield piece

    return [next(drawn(logits[index].float(), batch_index)) for index, batch_index in enumerate(batch_indices)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50, 2049, 9001])
def test_a_mixed_batch_follows_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    rng = Random(vocab_size)
    torch.manual_seed(vocab_size)
    for batch in range(NUM_BATCHES):
        num_rows = 1 + batch * 15 % 16
        logits = (torch.randn(num_rows, vocab_size) * rng.choice([0.3, 3.0])).to(dtype)
        logits[torch.rand_like(logits, dtype=torch.float32) < 0.01] = -INF
        batch_indices = rng.sample(range(MAX_SEQS), num_rows)
        masks = {batch_index: random_mask(rng, vocab_size) for batch_index in batch_indices if rng.random() < 0.2}
        rows = settled_rows(rng, logits, batch_indices, masks)
        found = run(logits, rows, masks)
        assert found.tokens == reference(logits, rows, masks)
        assert not any(found.flags)
        assert [found.last_samples[batch_index] for batch_index in batch_indices] == found.tokens
        assert sum(token == -5 for token in found.last_samples) == MAX_SEQS - num_rows


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Not even if a decision is close: the sums are the same in the same order."""
    rng = Random(5)
    torch.manual_seed(5)
    logits = torch.randn(8, 2500).bfloat16()
    rows = [random_row(rng, 2500, batch_index) for batch_index in range(8)]
    masks = {3: random_mask(rng, 2500), 7: random_mask(rng, 2500)}
    together = run(logits, rows, masks).tokens
    assert together == [run(logits[i : i + 1], rows[i : i + 1], masks).tokens[0] for i in range(8)]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 70},  # ends among equal logits: all of them are kept
        {"top_k": 2500},  # more than the candidates have room for
        {"top_p": 1e-7},
        {"top_p": 0.3},
        {"top_k": 70, "top_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.02, "top_p": 0.7},
        {"min_p": 0.02, "top_k": 70},
    ],
)
def test_equal_logits(fields: dict[str, Any]) -> None:
    """Whole numbers only: at the ends of the sets there are hundreds of equal logits. Zeros have both signs."""
    torch.manual_seed(1)
    logits = (torch.randn(1, 9100) * 2).round()
    logits[0, :500] = -INF
    fields = {"temperature": 0.7, **fields}
    rows = [row(SamplingParams(seed=seed, **fields), [1, 2], batch_index=seed) for seed in range(40)]
    rows = [piece for piece in rows if is_settled(logits[0].numpy(), piece, MARGIN)][:NUM_EQUAL]
    logits = logits.expand(len(rows), -1).clone()
    assert len(rows) == NUM_EQUAL
    assert run(logits, rows).tokens == reference(logits, rows)
    assert run(logits.bfloat16(), rows).tokens == reference(logits, rows)


def test_the_first_of_the_largest_is_taken() -> None:
    for places in ([7, 6000], [2047, 2048], [2048, 4096], [4999]):
        logits = torch.zeros(2, 7000, dtype=torch.bfloat16)
        logits[:, places] = 1.0
        rows = [
            row(SamplingParams(temperature=0), [1], batch_index=0),
            row(SamplingParams(top_k=1, top_p=0.1), [1], batch_index=1),
        ]
        assert run(logits, rows, draws=[0.0, 0.0]).tokens == [places[0]] * 2
        assert run(logits, rows, draws=[1.0, 1.0]).tokens == [places[0], places[-1]]


@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.999}, {"top_k": 7}, {"top_k": 9}, {"logit_bias": {9: 0.0}, "min_p": 0.001}]
)
def test_the_ends_of_the_draw(fields: dict[str, Any]) -> None:
    """A draw that rounds to 1 takes the last token with any weight, and 0 takes the first."""
    logits = torch.full((2, 5000), -INF, dtype=torch.bfloat16)
    logits[:, [11, 12, 2040, 2050, 3000, 4500, 4501]] = torch.tensor([1.0, 2.0, 3.0, 2.5, 1.5, 0.5, 1.0]).bfloat16()
    rows = [row(SamplingParams(**fields), [1], batch_index=batch_index) for batch_index in range(2)]
    assert run(logits, rows, draws=[0.0, 1.0]).tokens == [11, 4501]
    weak = [row(SamplingParams(temperature=1e-3, **fields), [1], batch_index=batch_index) for batch_index in range(2)]
    assert run(logits, weak, draws=[0.0, 1.0]).tokens == [2040, 2040]


def test_only_broken_and_blocked_rows_are_marked() -> None:
    torch.manual_seed(4)
    logits = torch.randn(9, 4100)
    logits[1, 4000] = math.nan
    logits[2, 7] = INF
    logits[3] = -INF
    logits[6, 3000] = math.nan  # and forbidden: the model is still broken
    logits[7] = math.nan
    many: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
    fields: list[dict[str, Any]] = [many, many, {}, many, {}, {"temperature": 0.0}, many, many, many]
    rows = [
        row(SamplingParams(seed=1, **one), [1, 2], batch_index=batch_index) for batch_index, one in enumerate(fields)
    ]
    rows[8] = row(SamplingParams(min_tokens=3, stop_token_ids=(5,), **many), [1, 2], batch_index=8)
    only_five = bytearray(513)
    only_five[0] = 1 << 5
    masks = {4: bytes(513), 5: bytes(513), 6: bytes(513), 8: bytes(only_five)}
    for dtype in (torch.float32, torch.bfloat16):
        found = run(logits.to(dtype), rows, masks)
        assert found.flags == [0, 1, 1, 1, 2, 2, 1, 1, 2]
        assert all(0 <= token < 4100 for token in found.tokens)
        assert found.tokens[0] == run(logits[:1].to(dtype), rows[:1]).tokens[0]


class LateRequest(NamedTuple):
    """A request whose sampled tokens reach the scheduler late."""

    request_id: int
    epoch: int
    batch_index: int
    prompt: list[int]
    answer: list[int]
    params: SamplingParams

    def step(self, num_hidden: int) -> SeqSlice:
        """Return the next decode, or the prompt. The last `num_hidden` samples are not in the history yet."""
        tokens = [*self.prompt, *self.answer]
        length = 1 if self.answer else len(tokens)
        known = tokens[: len(tokens) - min(num_hidden, len(self.answer))]
        return SeqSlice(
            self.request_id, self.epoch, self.batch_index, (), len(tokens) - length, length, [1], known, True,
            self.params, len(self.prompt),
        )  # fmt: skip


def test_penalties_follow_the_reference_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 2100
    sampler = DeviceSampler(vocab_size, MAX_SEQS, torch.device(DEVICE))
    rng = Random(3)
    torch.manual_seed(3)
    logits = torch.randn(1, vocab_size)  # the same in every step: only the counts make the tokens differ
    best = logits[0].topk(8).indices.tolist()

    def late_request(request_id: int, batch_index: int, epoch: int = 0, **fields: float) -> LateRequest:
        params = SamplingParams(temperature=0, **fields)  # type: ignore[arg-type]
        return LateRequest(request_id, epoch, batch_index, [*rng.sample(best[1:], 3), *best[:1] * 4], [], params)

    requests = [
        late_request(1, 3, frequency_penalty=0.4),
        late_request(2, 5, presence_penalty=2.0, repetition_penalty=1.1),
        late_request(3, 0),
        late_request(4, 7, repetition_penalty=1.3, frequency_penalty=-0.2),
    ]
    sampled = set()
    for step in range(9):
        if step == 4:  # batch indices are reused, one of them without a release, and a request resumes after preemption
            sampler.release([3])
            requests[0] = late_request(9, 3, frequency_penalty=0.4)
            requests[3] = late_request(10, 7, repetition_penalty=1.3, frequency_penalty=-0.2)
            requests[1] = requests[1]._replace(epoch=1)
        order = rng.sample(requests, len(requests)) if step % 3 else requests[:2]  # some skip a step
        rows = [one.step(rng.randrange(2)) for one in order]
        last = [[*one.prompt, *one.answer][-1] for one in order]
        wanted = sample(logits.repeat(len(rows), 1), rows, torch.tensor(last), None).tokens.tolist()
        if step in (0, 6):  # an attempt that runs out of memory is repeated
            with monkeypatch.context() as patch:
                patch.setattr(device_sampling, "count", out_of_memory)
                with pytest.raises(MemoryError):
                    run(logits.expand(len(rows), -1), rows, sampler=sampler, last_tokens=last)
            sampler.forget()
        found = run(logits.expand(len(rows), -1), rows, sampler=sampler, last_tokens=last)
        assert found.tokens == wanted, step
        for one, token in zip(order, wanted, strict=True):
            one.answer.append(token)
            sampled.add(token)
    assert len(sampled) > 5  # the penalties did something


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_fill_params() -> None:
    rows = [
        row(SamplingParams(seed=-3, sample_index=2), [1, 2, 3], [4], batch_index=0),
        row(SamplingParams(temperature=1e-5, top_p=0.5, logprobs=0), [1], batch_index=1),
        row(SamplingParams(temperature=0.5, top_k=2**32 - 1, top_p=0.25, min_p=0.125), [1], batch_index=2),
        row(SamplingParams(min_tokens=2, stop_token_ids=(9,)), [1], [2], batch_index=3),
        row(SamplingParams(min_tokens=2, stop_token_ids=(9,)), [1], [2, 2], batch_index=4),
        row(SamplingParams(logit_bias={1: 2.0}), [1], batch_index=5),
        row(SamplingParams(presence_penalty=1.0, logprobs=3), [1], batch_index=6),
    ]
    out = np.full((9, NUM_PARAMS), 77, np.float32)
    assert fill_params(out, rows) == SpecialRows(floored=(2,), changed=(3, 5, 6), reported=(1, 6))
    assert out[0].tolist() == [1, 0, 0, 1, np.float32(uniform(-3, 2, 4))]
    assert out[1].tolist() == [0, 0, 0, 1, 0]
    assert out[2, :4].tolist() == [0.5, 0.125, 2**32, 0.25]
    assert (out[7:] == 77).all()
    assert not fill_params(out, rows[:1]).changed


def test_biases_belong_to_the_request_at_the_batch_index() -> None:
    def piece(length: int, **settings: Any) -> SeqSlice:
        return SeqSlice(1, 0, 3, (5,), length - 1, 1, (), [5] * length, True, SamplingParams(**settings), 2)

    edits = _Edits()
    first = piece(3, logit_bias={7: 1.0, 9: -2.0}, min_tokens=2, stop_token_ids=(4,), max_tokens=9)
    places, tokens, values = edits.join(
        [first, first._replace(batch_index=0, sampling=SamplingParams(logit_bias={1: 3.0}))]
    )
    assert places.tolist() == [0, 0, 0, 1]
    assert tokens.tolist() == [7, 9, 4, 1]
    assert values.tolist() == [1.0, -2.0, float("-inf"), 3.0]
    later = first._replace(start=9)  # it may end now
    assert edits.join([later])[1].tolist() == [7, 9]
    other = piece(3, logit_bias={2: 1.0})
    assert edits.join([other])[1].tolist() == [2]
    edits.release(3)
    assert 3 not in edits._known
