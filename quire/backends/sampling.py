"""Sampling rules and messages that all backends share. Independent of tensors and arrays."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.step import PromptLogprobs, SeqSlice, TokenLogprobs

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
