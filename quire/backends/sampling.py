"""Sampling rules and messages that all backends share. Independent of tensors and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.core.step import PromptLogprobs, SeqSlice, StepResult, TokenLogprobs

PROMPT_ROWS = 128  # positions per pass of prompt logprobs: each is a row as long as the vocabulary
BROKEN = "the model's output is not a number (NaN or infinity): the weights or the arithmetic are broken"
BLOCKED = "every token is forbidden here, by logit_bias, min_tokens or a grammar"


def is_penalised(piece: SeqSlice) -> bool:
    sampling = piece.sampling
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


def is_short(piece: SeqSlice) -> bool:
    """Return whether the answer is still below `min_tokens`."""
    num_answered = piece.start + piece.length - piece.num_prompt_tokens
    return num_answered < piece.sampling.min_tokens and bool(piece.sampling.stop_token_ids)


def join_prompt_logprobs(start: int, parts: Sequence[tuple[TokenLogprobs, ...]]) -> PromptLogprobs:
    return PromptLogprobs(start, tuple(entry for part in parts for entry in part))


class SampledRows(NamedTuple):
    """Sampled rows of a step as plain numbers, in the order of the logits."""

    indices: Sequence[int]  # slice of each row
    tokens: Sequence[int]
    is_broken: Sequence[bool]  # the row's logits are not finite
    is_blocked: Sequence[bool]  # every token was forbidden
    logprobs: Mapping[int, TokenLogprobs]  # by row, where requested


def make_result(
    num_slices: int,
    unsound: Sequence[int],
    rows: SampledRows | None,
    prompt_logprobs: Mapping[int, PromptLogprobs],
) -> StepResult:
    """Assemble the result of a step. `unsound`: slices whose last hidden state is not finite."""
    tokens: list[tuple[int, ...]] = [()] * num_slices
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    failures = dict.fromkeys(unsound, BROKEN)
    for row, index in enumerate(rows.indices if rows is not None else ()):
        assert rows is not None
        tokens[index] = (rows.tokens[row],)
        if row in rows.logprobs:
            logprobs[index] = (rows.logprobs[row],)
        if rows.is_broken[row]:
            failures[index] = BROKEN
        elif rows.is_blocked[row]:
            failures.setdefault(index, BLOCKED)
    return StepResult(tuple(tokens), logprobs, prompt_logprobs, failures, BROKEN in failures.values())


def broken_slices(result: StepResult) -> list[int]:
    """Return the slices whose blocks may hold values that are not finite."""
    return [index for index, why in result.failures.items() if why == BROKEN]
