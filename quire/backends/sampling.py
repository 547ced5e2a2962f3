"""Sampling rules, random numbers and messages that all backends share. Independent of tensors and arrays.

Random numbers are computed from a counter instead of drawn from a stream. A number depends only on (seed, sample index,
position). A seeded answer therefore uses the same numbers in any batch, before and after a preemption, and on every
backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple

from quire.backends.base import TokenMasks
from quire.core.step import PromptLogprobs, SeqSlice, StepResult, TokenLogprobs, accepted

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


NEVER = float("-inf")  # added to the logit of a token that is forbidden


def is_short(piece: SeqSlice) -> bool:
    """Return whether the answer is still below `min_tokens`."""
    num_answered = piece.start + piece.length - piece.num_prompt_tokens
    return num_answered < piece.sampling.min_tokens and bool(piece.sampling.stop_token_ids)


def is_changed(piece: SeqSlice) -> bool:
    """Return whether something other than a grammar changes the logits of this row."""
    params = piece.sampling
    return bool(params.logit_bias) or piece.sampling.has_penalty or bool(params.min_tokens and is_short(piece))


def edits_of(piece: SeqSlice) -> dict[int, float]:
    """Return what is added to single logits of a row, by token: the bias, and NEVER for tokens that are forbidden."""
    if not is_short(piece):
        return dict(piece.sampling.logit_bias)
    return {**piece.sampling.logit_bias, **dict.fromkeys(piece.sampling.stop_token_ids, NEVER)}


def draw_of(piece: SeqSlice) -> float:
    """Return the random number of the token after a slice."""
    return uniform(piece.sampling.seed, piece.sampling.sample_index, piece.start + piece.length)


class NewTokens(NamedTuple):
    """Tokens of a context that were not counted before."""

    is_first: bool  # nothing of this request was counted before
    tokens: list[int]
    num_prompt: int  # the leading ones, which are in the prompt
    has_last: bool  # the last token of the context follows: it was sampled in the step before and is not known here


class TokenCounter:
    """Knows which tokens of the request at each batch index are counted already, for penalties."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[tuple[int, int], int]] = {}  # by batch index: request, and tokens counted

    def release(self, batch_index: int) -> None:
        self._counted.pop(batch_index, None)

    def forget(self) -> None:
        """Count the tokens of all requests again."""
        self._counted.clear()

    def count(self, piece: SeqSlice) -> NewTokens:
        """Return the tokens up to the end of a slice that are new, which are counted then."""
        owner, end = (piece.request_id, piece.epoch), piece.start + piece.length
        last_owner, num_counted = self._counted.get(piece.batch_index, (None, 0))
        if is_first := last_owner != owner:
            num_counted = 0
        self._counted[piece.batch_index] = (owner, end)
        tokens = list(piece.history[num_counted:end])
        num_prompt = min(max(piece.num_prompt_tokens - num_counted, 0), len(tokens))
        return NewTokens(is_first, tokens, num_prompt, num_counted + len(tokens) < end)


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


def prompt_parts(piece: SeqSlice) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the prompt tokens that follow the positions of a slice, if it reports them, in parts of PROMPT_ROWS.

    With each part comes the row of the slice whose logits predict its first token.
    """
    if piece.sampling.prompt_logprobs is None:
        return
    first, last = piece.start + 1, min(piece.start + piece.length + 1, piece.num_prompt_tokens)
    for start in range(first, last, PROMPT_ROWS):
        yield start - first, tuple(piece.history[start : min(start + PROMPT_ROWS, last)])


class Ranks(NamedTuple):
    """Logprobs of chosen tokens as arrays of a backend, which may not be computed yet."""

    rows: tuple[int, ...]  # rows that report logprobs
    counts: tuple[int, ...]  # number of alternatives for each
    chosen: Any  # [rows]
    ranks: Any  # [rows]
    top_values: Any  # [rows, most]
    top_tokens: Any

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Return plain numbers by row. `tokens`: the chosen token of each row. Waits for the device."""
        chosen, ranks, values, ids = (array.tolist() for array in self[2:])
        result: dict[int, TokenLogprobs] = {}
        for place, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
            result[row] = TokenLogprobs(tokens[row], chosen[place], ranks[place], top)
        return result


def add_prompt_logprobs(
    found: dict[int, PromptLogprobs], index: int, first: int, entries: tuple[TokenLogprobs, ...]
) -> None:
    """Add logprobs of prompt tokens from position `first` on to those before, of the slice with that index."""
    earlier = found.get(index, PromptLogprobs(first, ()))
    found[index] = earlier._replace(entries=earlier.entries + entries)


def join_prompt_logprobs(start: int, parts: Sequence[tuple[TokenLogprobs, ...]]) -> PromptLogprobs:
    return PromptLogprobs(start, tuple(entry for part in parts for entry in part))


class SampledRows(NamedTuple):
    """Sampled rows of a step as plain numbers, in the order of the logits."""

    indices: Sequence[int]  # slice of each row; the rows of a slice are in the order of their positions
    tokens: Sequence[int]
    is_broken: Sequence[int]  # the row's logits are not finite
    is_blocked: Sequence[int]  # every token was forbidden
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
    for index, token in zip(rows.indices, rows.tokens, strict=True):
        tokens[index] += (token,)
    for index, piece in enumerate(slices):
        if tokens[index] and piece.num_drafts and piece.wants_token:  # a failed half of a step has no rows
            tokens[index] = accepted(tokens[index], piece.drafts)
    if rows.logprobs or any(rows.is_broken) or any(rows.is_blocked):
        num_rows = [0] * len(slices)  # of each slice, so far
        for row, index in enumerate(rows.indices):
            is_valid = num_rows[index] < len(tokens[index])
            num_rows[index] += 1
            if rows.is_broken[row]:
                failures[index] = BROKEN
            elif is_valid and rows.is_blocked[row]:
                failures.setdefault(index, BLOCKED)
            if is_valid and row in rows.logprobs:
                logprobs[index] = (*logprobs.get(index, ()), rows.logprobs[row])
    return StepResult(tuple(tokens), logprobs, prompt_logprobs, failures, BROKEN in failures.values())


def broken_slices(result: StepResult) -> list[int]:
    """Return the slices whose blocks may hold values that are not finite."""
    return [index for index, why in result.failures.items() if why == BROKEN]
