"""Sampling for the whole batch at once, in MLX's graph. Implements the definition in `quire.backends.torch.sampling`.

Apple's GPUs have no float64, so cumulative probabilities are float32 here. A draw within a rounding error of the border
between two tokens may therefore choose the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.backends.base import TokenMasks
from quire.backends.sampling import NEVER, Ranks, TokenCounter, draw_of, edits_of, is_changed
from quire.core.step import SeqSlice

# S rows that sample, V vocabulary


class Sampled(NamedTuple):
    """Arrays that may not be computed yet."""

    tokens: mx.array  # [S]
    is_broken: mx.array  # [S]: the logits of this row are not finite
    is_blocked: mx.array  # [S]: every token of this row was forbidden
    logprobs: Ranks | None


class Penalties:
    """Token counts of the request at each batch index, computed once and then updated with each token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counter = TokenCounter()
        self._counts: dict[int, tuple[mx.array, mx.array]] = {}

    def release(self, batch_index: int) -> None:
        self._counter.release(batch_index)
        self._counts.pop(batch_index, None)

    def clear(self) -> None:
        """Discard all counts. They are computed again from the history."""
        self._counter.forget()
        self._counts.clear()

    @property
    def arrays(self) -> list[mx.array]:
        return [array for counts in self._counts.values() for array in counts]

    def apply(self, logits: mx.array, rows: Sequence[SeqSlice], last_tokens: mx.array) -> None:
        """Change logits in place. `last_tokens` [S]: last token of each row's context, even if not in the plan."""
        chosen = [index for index, piece in enumerate(rows) if piece.sampling.has_penalty]
        if not chosen:
            return
        counts = [self._count(rows[index], last_tokens[index]) for index in chosen]
        num_answered, seen = (mx.stack(list(parts)) for parts in zip(*counts, strict=True))  # [rows, V]
        params = [rows[index].sampling for index in chosen]
        repetition = mx.array([p.repetition_penalty for p in params])[:, None]
        frequency = mx.array([p.frequency_penalty for p in params])[:, None]
        presence = mx.array([p.presence_penalty for p in params])[:, None]
        index = mx.array(chosen, dtype=mx.int32)
        picked = logits[index]
        repeated = mx.where(picked > 0, picked / repetition, picked * repetition)
        picked = mx.where(seen, repeated, picked)
        logits[index] = picked - frequency * num_answered - presence * (num_answered > 0)

    def _count(self, piece: SeqSlice, last_token: mx.array) -> tuple[mx.array, mx.array]:
        """Return the number of occurrences of each token in the answer [V], and whether it is in the context [V]."""
        new = self._counter.count(piece)
        if new.is_first:
            self._counts[piece.batch_index] = mx.zeros(self._vocab_size), mx.zeros(self._vocab_size, mx.bool_)
        num_answered, seen = self._counts[piece.batch_index]
        if new.tokens:
            seen[mx.array(new.tokens)] = True
        if answered := new.tokens[new.num_prompt :]:
            num_answered = num_answered.at[mx.array(answered)].add(1.0)
        if new.has_last:
            seen[last_token] = True
            num_answered = num_answered.at[last_token].add(1.0)
        self._counts[piece.batch_index] = num_answered, seen
        return num_answered, seen


def sample(
    logits: mx.array, rows: Sequence[SeqSlice], penalties: Penalties, last_tokens: mx.array, masks: TokenMasks | None
) -> Sampled:
    """Choose one token for each row of logits [S, V] in float32."""
    is_broken = ~mx.isfinite(logits.max(-1))  # a maximum with a NaN is NaN
    wanted = tuple(index for index, piece in enumerate(rows) if piece.sampling.logprobs is not None)
    raw = logits
    is_blocked = mx.zeros_like(is_broken)
    if masks or any(map(is_changed, rows)):
        logits = mx.array(logits)  # changed in place below
        penalties.apply(logits, rows, last_tokens)
        _edit(logits, rows, masks)
        is_blocked = ~(mx.isfinite(logits.max(-1)) | is_broken)
    tokens = logits.argmax(-1).astype(mx.int32)
    drawn = [index for index, piece in enumerate(rows) if not piece.sampling.is_greedy]
    if len(drawn) == len(rows):
        tokens = _draw(logits, rows)
    elif drawn:
        index = mx.array(drawn, dtype=mx.int32)
        tokens[index] = _draw(logits[index], [rows[index] for index in drawn])
    if not wanted:
        return Sampled(tokens, is_broken, is_blocked, None)
    counts = tuple(rows[index].sampling.logprobs or 0 for index in wanted)
    index = mx.array(wanted, dtype=mx.int32)
    return Sampled(tokens, is_broken, is_blocked, rank(raw[index], tokens[index], wanted, counts))


def _edit(logits: mx.array, rows: Sequence[SeqSlice], masks: TokenMasks | None) -> None:
    """Add biases and forbid tokens, in place."""
    edits = {(row, token): value for row, piece in enumerate(rows) for token, value in edits_of(piece).items()}
    if edits:
        where, token = zip(*edits, strict=True)
        logits[mx.array(where), mx.array(token)] += mx.array(list(edits.values()), dtype=mx.float32)
    masked = [index for index, piece in enumerate(rows) if masks and piece.batch_index in masks]
    if masks and masked:
        together = b"".join(masks[rows[index].batch_index] for index in masked)
        packed = mx.array(np.frombuffer(together, np.uint8).reshape(len(masked), -1))
        bits = (packed[:, :, None] >> mx.arange(8, dtype=mx.uint8)) & 1
        is_allowed = bits.reshape(len(masked), -1)[:, : logits.shape[1]] == 1
        index = mx.array(masked, dtype=mx.int32)
        logits[index] = mx.where(is_allowed, logits[index], NEVER)


def _draw(logits: mx.array, rows: Sequence[SeqSlice]) -> mx.array:
    params = [piece.sampling for piece in rows]
    vocab_size = logits.shape[1]
    logits = logits / mx.array([p.temperature for p in params])[:, None]
    peak = logits.max(-1, keepdims=True)
    floor = mx.full(peak.shape, NEVER)  # tokens below it are cut off
    if any(p.min_p > 0 for p in params):
        floor = peak + mx.log(mx.array([p.min_p for p in params]))[:, None]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if any(p.top_p < 1 for p in params) or min(top_k) < vocab_size:
        descending = -mx.sort(-logits, axis=-1)
        if min(top_k) < vocab_size:  # the k-th largest logit; ties with it are kept
            kth = mx.take_along_axis(descending, mx.array(top_k)[:, None] - 1, axis=-1)
            floor = mx.maximum(floor, kth)
        if any(p.top_p < 1 for p in params):
            floor = mx.maximum(floor, _top_p_floor(descending, peak, floor, [p.top_p for p in params]))
    weights = mx.where(logits < floor, 0.0, mx.exp(logits - peak))  # [S, V]
    cumulative = mx.cumsum(weights, axis=-1)
    targets = mx.array(list(map(draw_of, rows)), dtype=mx.float32)[:, None] * cumulative[:, -1:]
    passed = (cumulative <= targets).sum(-1).astype(mx.int32)
    # Rounding may place the target behind the last kept token.
    last = vocab_size - 1 - mx.argmax(weights[:, ::-1] > 0, axis=-1).astype(mx.int32)
    return mx.minimum(passed, last)


def _top_p_floor(descending: mx.array, peak: mx.array, floor: mx.array, top_p: Sequence[float]) -> mx.array:
    """Return the smallest logit of the smallest set whose share of the kept tokens reaches top_p."""
    kept = mx.where(descending < floor, 0.0, mx.exp(descending - peak))
    cumulative = mx.cumsum(kept, axis=-1)
    share = mx.array(list(top_p))[:, None]
    before = cumulative - kept
    last = (before < share * cumulative[:, -1:]).sum(-1, keepdims=True) - 1
    result = mx.take_along_axis(descending, mx.maximum(last, 0), axis=-1)
    return mx.where(share < 1, result, NEVER)


def rank(raw: mx.array, chosen: mx.array, rows: tuple[int, ...], counts: tuple[int, ...]) -> Ranks:
    """Return logprobs of the chosen tokens [rows] and of the most probable ones, from raw logits [rows, V]."""
    logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    picked = mx.take_along_axis(logprobs, chosen[:, None], axis=-1)
    ranks = (logprobs > picked).sum(-1)
    num_top = min(max(*counts, 1), raw.shape[1])  # at least one: `Ranks.read` cuts each row
    order = mx.argsort(-logprobs, axis=-1)[:, :num_top]
    return Ranks(rows, counts, picked[:, 0], ranks, mx.take_along_axis(logprobs, order, axis=-1), order)
