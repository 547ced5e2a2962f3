"""A step as flat arrays, and the checks that keep C within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.backends.base import Capacity
from quire.backends.native.model import Batch, build_batch
from quire.core.step import SeqSlice
from quire.errors import InvariantViolation
from tests.backends import plans

CAPACITY = Capacity(num_blocks=10, block_size=4, max_num_seqs=4, max_model_len=24, vocab_size=50)
LAST_SAMPLES = np.array([40, 41, 42, 43], np.int32)


def piece(tokens: Sequence[int], start: int = 0, table: Sequence[int] = (1, 2, 3, 4, 5, 6), **changes: Any) -> SeqSlice:
    changes = {"history": (), "num_prompt_tokens": 1, "length": len(tokens), **changes}
    return plans.piece(tokens=tokens, start=start, block_table=table, **changes)


def build(*slices: SeqSlice) -> Batch:
    return build_batch(slices, LAST_SAMPLES, CAPACITY)


def test_a_mixed_step() -> None:
    batch = build(
        piece([5, 6, 7], start=3, table=[1, 2, 9]),
        piece([], start=10, length=1, batch_index=2, table=[3, 4, 5]),
        piece([8, 9], start=0, table=[6], wants_token=False),
        piece([11], start=23, table=[1, 2, 3, 4, 5, 7], batch_index=1),
    )
    assert batch.tokens.tolist() == [5, 6, 7, 42, 8, 9, 11]  # 42 is the runner's last sample of batch index 2
    assert batch.positions.tolist() == [3, 4, 5, 10, 0, 1, 23]
    assert batch.first_rows.tolist() == [0, 3, 4, 6, 7]
    assert batch.sampled == (0, 1, 3)
    assert batch.tables.tolist() == [[1, 2, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 7]]
    for array in (batch.tokens, batch.positions, batch.first_rows, batch.tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_table_entries_beyond_the_slice_are_ignored() -> None:
    assert build(piece([1, 2, 3, 4], table=[7, 999, -5])).tables.tolist() == [[7]]


@pytest.mark.parametrize(
    "wrong",
    [
        piece([50]),
        piece([1, 2, -1]),
        piece([2**31]),
        piece([], start=4, length=1, batch_index=0)._replace(tokens=(50,)),
        piece([1], table=[10]),
        piece([1], table=[-1]),
        piece([1], start=4, table=[1, 10]),
        piece([1], start=4, table=[1]),  # no block for it
        piece([1], start=12, table=[1]),  # numpy must not repeat one block four times
        piece([1], table=[]),
        piece([1], start=24, table=range(1, 8)),
        piece([1, 2], start=23, table=range(1, 8)),
        piece([1], start=-1),
        piece([1], start=2**31 - 1),
        piece([1], start=2**31),
        piece([1], length=0),
        piece([1], length=-1),
        piece([1, 2], length=1),
        piece([1], length=2),
        piece([], start=3, length=2),
        piece([], start=3, length=1, batch_index=4),
        piece([], start=3, length=1, batch_index=-1),
    ],
)
def test_out_of_bounds_slices_are_refused(wrong: SeqSlice) -> None:
    for slices in ([wrong], [piece([1]), wrong, piece([2])]):
        with pytest.raises(InvariantViolation):
            build(*slices)


def test_lengths_that_agree_only_in_total_are_refused() -> None:
    with pytest.raises(InvariantViolation):
        build(piece([1, 2], length=1), piece([3], length=2))


def test_a_last_sample_that_is_not_a_token_is_refused() -> None:
    """The runner's own sample, from a step that failed, must not be used as an index."""
    with pytest.raises(InvariantViolation):
        build_batch([piece([], start=3, length=1)], np.array([50], np.int32), CAPACITY)
