"""Sampling on a GPU for the whole batch at once. The host sends all parameters in one small copy and never waits.

All rows are sampled from the model's own logits. Rows whose logits must be changed first (penalties, bias, forbidden
tokens) are then sampled again from changed copies. A row is therefore computed in the same way whatever the other rows
need, and the model's own logits remain available for logprobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.backends.base import TokenMasks
from quire.backends.sampling import (
    Ranks,
    TokenCounter,
    draw_of,
    edits_of,
    is_changed,
    is_short,
    masks_by_row,
)
from quire.backends.torch.kernels.sampling import NUM_PARAMS as NUM_PARAMS
from quire.backends.torch.kernels.sampling import Scratch, change, choose, count, edit
from quire.backends.torch.sampling import rank
from quire.core.step import SeqSlice
from quire.core.values import MIN_TEMPERATURE, SamplingParams

# S rows that sample, R of them whose logits are changed first, V vocabulary

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

_NO_FLOOR = (0.0, 0.0, 1.0)  # min-p, top-k, top-p

_KINDS = (  # kinds of requests that have their own kernels; the last is prepared first
    SamplingParams(logit_bias={0: 1.0}, top_p=0.5),
    SamplingParams(logit_bias={0: 1.0}),
    SamplingParams(top_p=0.5),
    SamplingParams(),
)


class SpecialRows(NamedTuple):
    """Rows of a step that need more than a temperature."""

    floored: tuple[int, ...]  # rows with min-p, top-k or top-p
    changed: tuple[int, ...]  # rows with a penalty, a bias or tokens that are forbidden at the moment
    reported: tuple[int, ...]  # rows that report logprobs


def fill_params(out: NDArray[np.float32], rows: Sequence[SeqSlice]) -> SpecialRows:
    """Write each row's parameters for the kernels to out [S, NUM_PARAMS]. Runs every step, so it must be fast."""
    temperatures: list[float] = []
    draws: list[float] = []
    floors: list[tuple[float, float, float]] = []
    floored, changed, reported = [], [], []
    for row, piece in enumerate(rows):
        params = piece.sampling
        if (temperature := params.temperature) < MIN_TEMPERATURE:
            temperatures.append(0.0)
            draws.append(0.0)
        else:
            temperatures.append(temperature)
            draws.append(draw_of(piece))
            if params.top_p < 1 or params.top_k or params.min_p:
                floored.append(row)
                floors.append((params.min_p, params.top_k, params.top_p))
        if is_changed(piece):
            changed.append(row)
        if params.logprobs is not None:
            reported.append(row)
    out = out[: len(rows)]
    out[:, 0] = temperatures
    out[:, 1:4] = _NO_FLOOR
    out[:, 4] = draws
    if floored:
        out[floored, 1:4] = floors
    return SpecialRows(tuple(floored), tuple(changed), tuple(reported))


class DeviceSampler:
    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._unprepared = list(_KINDS)
        self._edits = _Edits()
        self._counts = _TokenCounts(vocab_size, max_num_seqs, device)
        self._scratch = Scratch.empty(max_num_seqs, vocab_size, device)
        self._all_rows = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self._no_counts = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._no_masks = torch.zeros((1, -(-vocab_size // 8)), dtype=torch.uint8, device=device)

    def release(self, batch_indices: Sequence[int]) -> None:
        for batch_index in batch_indices:
            self._counts.counter.release(batch_index)
            self._edits.release(batch_index)

    def forget(self) -> None:
        """Count the tokens of all rows again in the next step: an attempt that raised may not have counted them."""
        self._counts.counter.forget()

    def prepare(self, dtype: torch.dtype) -> bool:
        """Compile the kernels for one more kind of request in advance. Returns False if none is left."""
        if not self._unprepared:
            return False
        rows = [SeqSlice(0, 0, 0, (0,), 0, 1, (), (0,), True, self._unprepared.pop(), 1)]
        host = np.empty((1, NUM_PARAMS), np.float32)
        special_rows = fill_params(host, rows)
        logits = torch.zeros((1, self._vocab_size), dtype=dtype, device=self._device)
        zero = torch.zeros(1, dtype=torch.int32, device=self._device)
        out = torch.empty((2, 1), dtype=torch.int32, device=self._device)
        params = torch.from_numpy(host).to(self._device)
        self.sample(logits, rows, special_rows, params, zero, zero, torch.empty_like(zero), None, out)
        return True

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SeqSlice],
        special_rows: SpecialRows,
        params: Tensor,
        batch_indices: Tensor,
        last_tokens: Tensor,
        last_samples: Tensor,
        masks: TokenMasks | None,
        out: Tensor,
    ) -> Ranks | None:
        """Enqueue sampling. Writes tokens to out[0, :S] and last_samples[batch_indices], flags to out[1, :S].

        Flags: 1 broken, 2 blocked.

        logits [S, V] bf16 or fp32, params [S, NUM_PARAMS] fp32 as `fill_params` wrote them, batch_indices [S],
        last_tokens [S] (of each row's context), last_samples [max_num_seqs], out [2 or more, S or more] int32:
        all on the device. Logprobs are copied to the host asynchronously; wait for this step before reading them.
        """
        found = masks_by_row(rows, masks, self._vocab_size)
        masked = list(found)
        changed = tuple(sorted({*special_rows.changed, *masked})) if special_rows.changed else masked
        num_floored = len(special_rows.floored)
        num_changed_floored = len(set(special_rows.floored).intersection(changed)) if changed else 0
        choose(
            logits, self._all_rows, params, batch_indices, last_samples, out, self._scratch,
            has_floor=num_floored > num_changed_floored, is_changed=False,
        )  # fmt: skip
        if changed:
            if special_rows.changed:
                where, altered = self._change(logits, rows, changed, last_tokens, found)
            else:
                where, altered = self._mask(logits, found)
            choose(
                altered, where, params, batch_indices, last_samples, out, self._scratch,
                has_floor=num_changed_floored > 0, is_changed=True,
            )  # fmt: skip
        if not special_rows.reported:
            return None
        (where,) = _send([np.array(special_rows.reported, np.int32)], self._device)
        top = tuple(rows[row].sampling.logprobs or 0 for row in special_rows.reported)
        raw = logits.index_select(0, where).float()
        return _to_host(rank(raw, out[0].index_select(0, where).long(), special_rows.reported, top))

    def _mask(self, logits: Tensor, masks: Mapping[int, bytes]) -> tuple[Tensor, Tensor]:
        """Like `_change` for rows that only have masks, as in most steps with grammars."""
        count = len(masks)
        where, batch_indices, mask_rows, penalties = _send(
            (
                np.array(list(masks), np.int32),
                np.full(count, -1, np.int32),
                np.arange(count, dtype=np.int32),
                np.zeros(3 * count, np.float32),
            ),
            self._device,
        )
        sent = self._send_masks(list(masks.values()))
        return where, change(logits, where, self._no_counts, batch_indices, penalties, sent, mask_rows)

    def _change(
        self,
        logits: Tensor,
        rows: Sequence[SeqSlice],
        changed: Sequence[int],
        last_tokens: Tensor,
        masks: Mapping[int, bytes],
    ) -> tuple[Tensor, Tensor]:
        """Return row indices [R], and their logits [R, V] in fp32 after penalties, bias and forbidden tokens."""
        pieces = [rows[row] for row in changed]
        counted = [piece.batch_index if piece.sampling.has_penalty else -1 for piece in pieces]
        update = self._counts.find_new_tokens([(row, rows[row]) for row in changed if rows[row].sampling.has_penalty])
        edits = self._edits.join(pieces)
        where, batch_indices, mask_rows, penalties, resets, *entries, places, tokens, values = _send(
            (
                np.array(changed, np.int32),
                np.array(counted, np.int32),
                np.array(_mask_rows(changed, masks), np.int32),
                np.array([_penalties(piece) for piece in pieces], np.float32).ravel(),
                *(np.array(numbers, np.int32) for numbers in update),
                *edits,
            ),
            self._device,
        )
        counts = self._counts.update(resets, entries, last_tokens) if max(counted) >= 0 else self._no_counts
        sent = self._send_masks([masks[row] for row in changed if row in masks])
        altered = change(logits, where, counts, batch_indices, penalties, sent, mask_rows)
        if len(edits[0]):
            edit(altered, places, tokens, values)
        return where, altered

    def _send_masks(self, found: Sequence[bytes]) -> Tensor:
        """Return masks [masks, bytes] on the device."""
        if not found:
            return self._no_masks
        num_bytes = self._no_masks.shape[1]
        host = torch.empty((len(found), num_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for row, mask in zip(host.numpy(), found, strict=True):  # a single copy; joining first would make two
            row[:] = np.frombuffer(mask, np.uint8)
        return host.to(self._device, non_blocking=True)


class _CountUpdate(NamedTuple):
    """Changes to the counts on the device: batch indices to reset, then parallel lists of tokens to count."""

    resets: list[int]
    batch_indices: list[int]
    tokens: list[int]  # -1 - row: the last token of that row, which is only on the device
    is_prompt: list[int]


class _TokenCounts:
    """Counts of each token in the answer at each batch index, and whether it is in the prompt."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._counts: Tensor | None = None  # [max_num_seqs, V] int32, allocated for the first request with a penalty
        self.counter = TokenCounter()

    def find_new_tokens(self, rows: Sequence[tuple[int, SeqSlice]]) -> _CountUpdate:
        """Return the tokens that were added since these rows were last counted."""
        update = _CountUpdate([], [], [], [])
        for row, piece in rows:
            new = self.counter.count(piece)
            if new.is_first:
                update.resets.append(piece.batch_index)
            tokens = [*new.tokens, -1 - row] if new.has_last else new.tokens
            update.batch_indices.extend([piece.batch_index] * len(tokens))
            update.tokens.extend(tokens)
            update.is_prompt.extend([1] * new.num_prompt + [0] * (len(tokens) - new.num_prompt))
        return update

    def update(self, resets: Tensor, entries: Sequence[Tensor], last_tokens: Tensor) -> Tensor:
        """Apply the changes and return the counts [max_num_seqs, V]."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        if resets.shape[0]:
            self._counts.index_fill_(0, resets.long(), 0)
        batch_indices, tokens, is_prompt = entries
        if batch_indices.shape[0]:
            count(self._counts, batch_indices, tokens, is_prompt, last_tokens)
        return self._counts


class _Edits:
    """Values added to single logits. They are computed once per request and joined in every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SamplingParams, bool, Ints, Floats]] = {}  # by batch index

    def release(self, batch_index: int) -> None:
        self._known.pop(batch_index, None)

    def join(self, pieces: Sequence[SeqSlice]) -> tuple[Ints, Ints, Floats]:
        """Return three arrays for [place in R, token] += value."""
        found = [self._of(piece) for piece in pieces]
        places = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(tokens) for tokens, _ in found])
        return places, np.concatenate([tokens for tokens, _ in found]), np.concatenate([values for _, values in found])

    def _of(self, piece: SeqSlice) -> tuple[Ints, Floats]:
        params, is_early = piece.sampling, is_short(piece)
        known = self._known.get(piece.batch_index)
        if known is None or known[0] is not params or known[1] != is_early:
            values = edits_of(piece)
            arrays = np.array(list(values), np.int32), np.array(list(values.values()), np.float32)
            known = self._known[piece.batch_index] = (params, is_early, *arrays)
        return known[2], known[3]


def _mask_rows(rows: Sequence[int], masks: Mapping[int, bytes]) -> list[int]:
    """Return the index of each row's mask among those sent, or -1."""
    numbers = itertools.count()
    return [next(numbers) if row in masks else -1 for row in rows]


def _penalties(piece: SeqSlice) -> tuple[float, float, float]:
    params = piece.sampling
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def rank_prompt(raw: Tensor, tokens: Sequence[int], count: int) -> Ranks:
    """Rank given tokens by raw logits [N, V] of the positions before them.

    The result is copied asynchronously, as in `DeviceSampler.sample`: after the device has finished this step, use
    `result.read(tokens)`.
    """
    (chosen,) = _send([np.array(tokens, np.int32)], raw.device)
    return _to_host(rank(raw.float(), chosen.long(), tuple(range(len(tokens))), (count,) * len(tokens)))


def _send(arrays: Sequence[NDArray[np.int32] | NDArray[np.float32]], device: torch.device) -> list[Tensor]:
    """Send all arrays in one copy from pinned memory: the host does not wait."""
    sizes = [array.size for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.int32) for array in arrays], out=host.numpy())
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return [
        part.view(torch.float32) if array.dtype == np.float32 else part
        for part, array in zip(parts, arrays, strict=True)
    ]


def _to_host(ranks: Ranks) -> Ranks:
    """Start copying to host memory. The copy is complete when the step is collected."""
    return Ranks(ranks.rows, ranks.counts, *(array.to("cpu", non_blocking=True) for array in ranks[2:]))
