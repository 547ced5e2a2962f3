"""Sampling rules, random numbers and messages that all backends share. Independent of tensors and arrays.

Random numbers are computed from a counter instead of drawn from a stream. A number depends only on (seed, sample index,
position). A seeded answer therefore uses the same numbers in any batch, before and after a preemption, and on every
backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from quire.backends.base import TokenMasks
from quire.core.step import PromptLogprobs, SeqSlice, StepResult, TokenLogprobs, accepted
from quire.core.values import SamplingParams

_PACK = Struct("<QQQ").pack
_MASK = 2**64 - 1
_SCALE = 2.0**-53
_BASE = blake2b(digest_size=8, person=b"quire.draw")


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` (counted from the start of the prompt)."""
    hashed = _BASE.copy()  # a third faster than a new one
    hashed.update(_PACK(seed & _MASK, sample_index, position))
    return (int.from_bytes(hashed.digest(), "little") >> 11) * _SCALE


PROMPT_ROWS = 128  # positions per pass of prompt logprobs: each is a row as long as the vocabulary
BROKEN = "the model's output is not a number (NaN or infinity): the weights or the arithmetic are broken"
BLOCKED = "every token is forbidden here, by logit_bias, min_tokens or a grammar"


def is_penalised(piece: SeqSlice) -> bool:
    return has_penalty(piece.sampling)


def has_penalty(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


def is_short(piece: SeqSlice) -> bool:
    """Return whether the answer is still below `min_tokens`."""
    num_answered = piece.start + piece.length - piece.num_prompt_tokens
    return num_answered < piece.sampling.min_tokens and bool(piece.sampling.stop_token_ids)


def sampled_pieces(piece: SeqSlice) -> list[SeqSlice]:
    """One slice for each position after which the runner samples, which ends at this position."""
    if not piece.num_drafts:
        return [piece]
    lengths = range(piece.length - piece.num_drafts, piece.length + 1)
    return [piece._replace(tokens=piece.tokens[:length], length=length, num_drafts=0) for length in lengths]


def masks_by_row(rows: Sequence[SeqSlice], masks: TokenMasks | None, vocab_size: int) -> dict[int, bytes]:
    """Masks by index of the rows that have one. A slice with drafts has several rows, in any order."""
    if not masks:
        return {}
    size = -(-vocab_size // 8)
    found = {row: masks[piece.batch_index] for row, piece in enumerate(rows) if piece.batch_index in masks}
    if all(len(mask) <= size for mask in found.values()):
        return found
    of_slice: dict[int, list[int]] = {}  # batch index -> its rows
    for row in found:
        of_slice.setdefault(rows[row].batch_index, []).append(row)
    for group in of_slice.values():
        if len(group) == 1 or len(found[group[0]]) != size * len(group):
            continue  # one mask for all rows, or of a wrong size, which the caller refuses
        group.sort(key=lambda row: rows[row].start + rows[row].length)
        for number, row in enumerate(group):
            found[row] = found[row][number * size : (number + 1) * size]
    return found


def join_prompt_logprobs(start: int, parts: Sequence[tuple[TokenLogprobs, ...]]) -> PromptLogprobs:
    return PromptLogprobs(start, tuple(entry for part in parts for entry in part))


class SampledRows(NamedTuple):
    """Sampled rows of a step as plain numbers, in the order of the logits."""

    indices: Sequence[int]  # slice of each row; the rows of a slice are in the order of their positions
    tokens: Sequence[int]
    is_broken: Sequence[bool]  # the row's logits are not finite
    is_blocked: Sequence[bool]  # every token was forbidden
    logprobs: Mapping[int, TokenLogprobs]  # by row, where requested


def make_result(
    slices: Sequence[SeqSlice],
    unsound: Sequence[int],
    rows: SampledRows | None,
    prompt_logprobs: Mapping[int, PromptLogprobs],
) -> StepResult:
    """Assemble the result of a step. `unsound`: slices whose last hidden state is not finite."""
    tokens: list[tuple[int, ...]] = [()] * len(slices)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    failures = dict.fromkeys(unsound, BROKEN)
    if rows is None:
        return StepResult(tuple(tokens), logprobs, prompt_logprobs, failures, bool(failures))
    row = 0
    while row < len(rows.indices):
        index = rows.indices[row]
        last = row + slices[index].num_sampled
        tokens[index] = accepted(rows.tokens[row:last], slices[index].drafts)
        valid = range(row, row + len(tokens[index]))
        if row in rows.logprobs:
            logprobs[index] = tuple(rows.logprobs[each] for each in valid)
        if any(rows.is_broken[row:last]):
            failures[index] = BROKEN
        elif any(rows.is_blocked[each] for each in valid):
            failures.setdefault(index, BLOCKED)
        row = last
    return StepResult(tuple(tokens), logprobs, prompt_logprobs, failures, BROKEN in failures.values())


def broken_slices(result: StepResult) -> list[int]:
    """Return the slices whose blocks may hold values that are not finite."""
    return [index for index, why in result.failures.items() if why == BROKEN]
