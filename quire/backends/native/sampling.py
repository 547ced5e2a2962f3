"""Sampling for the whole batch at once. Implements the definition in `quire.backends.torch.sampling`, without torch.

Work over the whole vocabulary (grammar masks, temperature, min-p, top-k, top-p, the draw, logprobs) is one call into
csrc/sampling.c for all rows. Penalties, bias and min_tokens affect few rows and are computed here, for those rows only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.base import TokenMasks
from quire.backends.native.library import Floats, Ints
from quire.backends.sampling import TokenCounter, draw_of, edits_of, is_changed, masks_by_row
from quire.core.step import SeqSlice, TokenLogprobs
from quire.errors import InvariantViolation

# S rows that sample, V vocabulary

Bools = NDArray[np.bool_]

_GREEDY = (0.0, 1.0, 0.0, 0.0, 0)
_CHOICE = np.dtype(  # quire_choice in csrc/sampling.h
    [("draw", "f8"), ("top_p", "f8"), ("temperature", "f4"), ("min_p", "f4"), ("top_k", "i4")], align=True
)


class _Sampling(ctypes.Structure):  # quire_sampling in csrc/sampling.h
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("choices", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("is_sound", ctypes.c_void_p),
        ("was_sound", ctypes.c_void_p),
    )


class _Ranking(ctypes.Structure):  # quire_ranking in csrc/sampling.h
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_tokens", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Ints  # [S]
    is_broken: Bools  # [S]: the logits of this row are not finite
    is_blocked: Bools  # [S]: every token of this row was forbidden
    logprobs: Mapping[int, TokenLogprobs]  # by row, where requested


class Penalties:
    """Token counts of the request at each batch index, computed once and then updated with each token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counter = TokenCounter()
        self._counts: dict[int, tuple[Floats, Bools]] = {}

    def release(self, batch_index: int) -> None:
        self._counter.release(batch_index)
        self._counts.pop(batch_index, None)

    def apply(self, logits: Floats, rows: Sequence[SeqSlice], last_tokens: Ints) -> None:
        """Change logits in place. `last_tokens` [S]: last token of each row's context, even if not in the plan."""
        for index, piece in enumerate(rows):
            if not piece.sampling.has_penalty:
                continue
            (counts, is_seen), params = self._count(piece, int(last_tokens[index])), piece.sampling
            seen = np.flatnonzero(is_seen)
            num_answered = counts[seen]
            repetition = np.float32(params.repetition_penalty)
            picked = logits[index, seen]
            picked = np.where(picked > 0, picked / repetition, picked * repetition)
            picked -= np.float32(params.frequency_penalty) * num_answered
            picked -= np.float32(params.presence_penalty) * (num_answered > 0)
            logits[index, seen] = picked

    def _count(self, piece: SeqSlice, last_token: int) -> tuple[Floats, Bools]:
        """Return the number of occurrences of each token in the answer [V], and whether it is in the context [V]."""
        new = self._counter.count(piece)
        if new.is_first:
            arrays = np.zeros(self._vocab_size, np.float32), np.zeros(self._vocab_size, np.bool_)
            self._counts[piece.batch_index] = arrays
        num_answered, seen = self._counts[piece.batch_index]
        tokens = np.array([*new.tokens, *([last_token] if new.has_last else [])], np.intp)
        seen[tokens] = True
        np.add.at(num_answered, tokens[new.num_prompt :], 1)
        return num_answered, seen


class NativeSampler:
    def __init__(self, library: ctypes.CDLL, engine: int) -> None:
        self._engine = engine
        self._sample, self._rank = library.quire_sample, library.quire_rank
        for function, args in ((self._sample, _Sampling), (self._rank, _Ranking)):
            function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(args)]

    def sample(
        self,
        logits: Floats,
        rows: Sequence[SeqSlice],
        penalties: Penalties,
        last_tokens: Ints,
        masks: TokenMasks | None,
    ) -> Sampled:
        """Choose one token for each row of logits [S, V], which are changed in place."""
        _check(logits, len(rows))
        reported = [index for index, piece in enumerate(rows) if piece.sampling.logprobs is not None]
        raw = logits[reported] if reported else None
        was_broken: dict[int, bool] = {}  # rows changed here: whether they were broken before
        changed = [index for index, piece in enumerate(rows) if is_changed(piece)]
        if changed:
            was_broken = {index: not np.isfinite(logits[index].max()) for index in changed}
            penalties.apply(logits, rows, last_tokens)
            for index in changed:
                if edits := edits_of(rows[index]):
                    logits[index, list(edits)] += np.array(list(edits.values()), np.float32)
        tokens, is_sound, was_sound = self._choose(logits, rows, masks_by_row(rows, masks, logits.shape[1]))
        is_broken = ~was_sound
        for index, was in was_broken.items():
            is_broken[index] = was
        logprobs = {}
        if raw is not None:
            counts = [rows[index].sampling.logprobs or 0 for index in reported]
            logprobs = dict(zip(reported, self.rank(raw, tokens[reported], counts), strict=True))
        return Sampled(tokens, is_broken, ~(is_sound | is_broken), logprobs)

    def rank_tokens(self, raw: Floats, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
        """Return logprobs of given tokens, from the raw logits [N, V] of the positions before them."""
        return self.rank(raw, np.array(tokens, np.int32), [count] * len(tokens))

    def rank(self, raw: Floats, chosen: Ints, counts: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return, per row of raw logits [N, V], logprobs of the chosen token and of the `counts` most probable ones."""
        _check(raw, len(chosen))
        num_rows, vocab_size = raw.shape
        if num_rows and not 0 <= chosen.min() <= chosen.max() < vocab_size:
            raise InvariantViolation(f"tokens {chosen.tolist()} are not all within {vocab_size = }")
        num_top = min(max(counts, default=0), vocab_size)
        logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        top_tokens, top_logprobs = np.empty((num_rows, num_top), np.int32), np.empty((num_rows, num_top), np.float32)
        arrays = (raw, chosen, logprobs, ranks, top_tokens, top_logprobs)
        args = _Ranking(num_rows, vocab_size, num_top, *(array.ctypes.data for array in arrays))
        if self._rank(self._engine, args):
            raise MemoryError(f"no memory to rank {vocab_size = }")
        tops = (
            tuple(zip(ids[:count], values[:count], strict=True))
            for ids, values, count in zip(top_tokens.tolist(), top_logprobs.tolist(), counts, strict=True)
        )
        return tuple(map(TokenLogprobs, chosen.tolist(), logprobs.tolist(), ranks.tolist(), tops))

    def _choose(
        self, logits: Floats, rows: Sequence[SeqSlice], masks: Mapping[int, bytes]
    ) -> tuple[Ints, Bools, Bools]:
        """Return the tokens, and for each row whether its largest logit is finite after and before its mask.

        If it is not finite after the mask, the token is meaningless.
        """
        num_rows, vocab_size = logits.shape
        choices = np.array([_choice(piece, vocab_size) for piece in rows], _CHOICE)
        tokens, (is_sound, was_sound) = np.empty(num_rows, np.int32), np.empty((2, num_rows), np.bool_)
        found = [masks.get(row) for row in range(num_rows)]
        if any(mask is not None and len(mask) != -(-vocab_size // 8) for mask in found):
            raise InvariantViolation(f"masks of {[mask and len(mask) for mask in found]} bytes for {vocab_size = }")
        masked = (ctypes.c_char_p * num_rows)(*found)
        pointers = (array.ctypes.data for array in (choices, tokens, is_sound, was_sound))
        args = _Sampling(num_rows, vocab_size, logits.ctypes.data, ctypes.addressof(masked), *pointers)
        if self._sample(self._engine, args):
            raise MemoryError(f"no memory to sample from {vocab_size = }")
        return tokens, is_sound, was_sound


def _check(logits: Floats, num_rows: int) -> None:
    """Check what C relies on."""
    if len(logits) != num_rows or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise InvariantViolation(f"{num_rows = }, but logits are {logits.shape} {logits.dtype} {logits.strides}")


def _choice(piece: SeqSlice, vocab_size: int) -> tuple[float, float, float, float, int]:
    params = piece.sampling
    if params.is_greedy:
        return _GREEDY
    top_k = params.top_k if params.top_k < vocab_size else 0
    return draw_of(piece), params.top_p, params.temperature, params.min_p, top_k
