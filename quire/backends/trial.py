"""A trial of a model of another library when it is loaded: two short prompts in three steps over a paged cache.

The backend compares the logits of the steps with those of the library's own cache. A model whose logits differ is
refused: a wrong position or a wrong key changes them completely.

Some models rotate keys by the longest request of a pass. The trial finds this without a long prompt if the first prompt
has the last positions of the context (`first_positions`): the other one runs alone and beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from quire.core.step import SeqSlice
from quire.core.values import SamplingParams

LENGTHS = (11, 7)
BLOCK_SIZE = 4
BLOCKS_PER_PROMPT = -(-max(LENGTHS) // BLOCK_SIZE)
NUM_BLOCKS = len(LENGTHS) * BLOCKS_PER_PROMPT + 1  # with the null block
# Largest root mean square error of logits, relative to their spread. In 16 bits, passes of other shapes round
# differently.
MAX_ERROR = 1e-3
MAX_ERROR_16_BITS = 0.15


def make_prompts(vocab_size: int) -> list[list[int]]:
    return [[(7919 * (place + length)) % vocab_size for place in range(length)] for length in LENGTHS]


def first_positions(max_model_len: int) -> tuple[int, int]:
    """Return the first position of each prompt: one ends with the context, the other begins with it."""
    return max(max_model_len - LENGTHS[0], 0), 0


def make_steps(prompts: Sequence[list[int]]) -> Iterator[list[SeqSlice]]:
    """Yield the slices of three steps: chunks of both prompts, a chunk beside a decode, decodes."""
    first, second = (len(prompt) for prompt in prompts)
    cuts = (
        ((0, first - 3), (0, second - 2)),
        ((first - 3, first - 1), (second - 2, second - 1)),
        ((first - 1, first), (second - 1, second)),
    )
    for ranges in cuts:
        yield [_make_slice(index, prompts[index], *ranges[index]) for index in range(len(prompts))]


def last_position(piece: SeqSlice) -> int:
    """Return the position whose logits a slice gives."""
    return piece.start + piece.length - 1


def find_error(errors: Sequence[float], *, is_exact: bool) -> float | None:
    """Return the error if it is too large. `is_exact`: the model computes in fp32.

    In 16 bits, rounding may lead a token to other experts, which changes single rows; an error in a pass changes all.
    """
    error = max(errors) if is_exact else statistics.median(errors)
    return None if error <= (MAX_ERROR if is_exact else MAX_ERROR_16_BITS) else error


def _make_slice(index: int, tokens: list[int], start: int, end: int) -> SeqSlice:
    return SeqSlice(
        request_id=index,
        epoch=0,
        batch_index=index,
        tokens=tokens[start:end],
        start=start,
        length=end - start,
        block_table=[1 + 2 * place + index for place in range(BLOCKS_PER_PROMPT)],  # blocks of both in turn
        history=tokens,
        wants_token=True,
        sampling=SamplingParams(temperature=0.0),
        num_prompt_tokens=len(tokens),
    )
