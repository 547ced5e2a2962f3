"""The division of a step into decodes and chunks of prompts."""

from __future__ import annotations

import random

from quire.backends.torch.state_work import CHUNK_ROWS, StateWork, max_chunks, plan_states
from tests.backends.torch.kernels.states import piece


def lists(work: StateWork) -> tuple[list[list[int]], ...]:
    return tuple(array.tolist() for array in work)


def test_chunks_end_where_states_are_stored() -> None:
    slices = [piece(1, 3, 4), piece(1, 5, 5), piece(100, 6, 7, (10, 8), start=32), piece(2, 0, 9)]
    decodes, chunks, sequences = lists(plan_states(slices, 2))
    assert decodes == [[3, 4], [5, 5]]
    assert chunks == [  # first row, rows, rows before, source, stored in, after the chunk before this one
        [2, 10, 0, 6, 8, 1],
        [12, 64, 10, 6, 7, 3],
        [76, 26, 74, 6, 7, 3],
        [102, 2, 0, 0, 9, 4],
    ]
    assert sequences == [[0, 3], [3, 4]]


def test_no_step_exceeds_the_largest_number_of_chunks() -> None:
    rng = random.Random(0)
    for _ in range(200):
        slices = []
        for _ in range(rng.randint(1, 5)):
            length = rng.choice([2, 63, 64, 65, rng.randint(2, 300)])
            cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, 3))))
            slices.append(piece(length, 1, 2, *((cut, 3) for cut in cuts)))
        work = plan_states(slices, 0)
        num_snapshots = sum(len(one.snapshots) for one in slices)
        num_rows = sum(one.length for one in slices)
        assert len(work.chunks) <= max_chunks(num_rows, len(slices), num_snapshots)
        assert work.chunks[:, 1].sum() == num_rows
        assert work.chunks[:, 1].max() <= CHUNK_ROWS
