"""Divides the work of layers with recurrent states.

`find_segments` does it for the reference, `plan_states` for the kernels. A decode is one row that updates a state. A
prompt is divided into chunks of at most CHUNK_ROWS rows, and a chunk ends at every position whose state is stored. Most
of the work of a chunk does not depend on the state before it, so chunks run in parallel; only a short part of each runs
in sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.core.step import SeqSlice


class Segment(NamedTuple):
    """Rows of one sequence over which a state is computed: read from one slot, written to another.

    The segments of a slice are in order, and each reads the slot that the one before it wrote.
    """

    first_row: int
    num_rows: int
    source: int  # slot
    target: int  # slot, which may be the source; 0: the state is dropped


def find_segments(slices: Iterable[SeqSlice]) -> tuple[Segment, ...]:
    """Divide slices, in the order of their rows, at the states that they store."""
    segments: list[Segment] = []
    row = 0
    for piece in slices:
        position, source = piece.start, piece.state_source
        for end, slot in (*piece.snapshots, (piece.start + piece.length, piece.state_target)):
            segments.append(Segment(row, end - position, source, slot))
            row += end - position
            position, source = end, slot
    return tuple(segments)


CHUNK_ROWS = 64
DECODE_FIELDS = 2  # source slot, target slot
# First row, number of rows, rows of the same sequence before it in this step, source slot of the sequence, slot of the
# next stored state (after this chunk or a later one), index of the chunk that follows that state.
CHUNK_FIELDS = 6
SEQUENCE_FIELDS = 2  # first chunk, last chunk + 1


class StateWork(NamedTuple):
    """int32 arrays, on the host or on the device. Zeros are padding: entries that do nothing."""

    decodes: Any  # [decodes, DECODE_FIELDS]: entry i is row i of the step
    chunks: Any  # [chunks, CHUNK_FIELDS]
    sequences: Any  # [prompts, SEQUENCE_FIELDS]

    @classmethod
    def of(cls, decodes: Sequence[Any], chunks: Sequence[Any], sequences: Sequence[Any]) -> StateWork:
        parts = ((decodes, DECODE_FIELDS), (chunks, CHUNK_FIELDS), (sequences, SEQUENCE_FIELDS))
        return cls(*(np.array(entries, np.int32).reshape(-1, width) for entries, width in parts))


NO_STATES = StateWork.of((), (), ())


def plan_states(slices: Sequence[SeqSlice], num_decodes: int) -> StateWork:
    """Divide a step, given its slices in the order of rows: `num_decodes` of one row, then prompts."""
    decodes = [(piece.state_source, piece.state_target) for piece in slices[:num_decodes]]
    chunks: list[tuple[int, int, int, int, int, int]] = []
    sequences = []
    row = num_decodes
    for piece in slices[num_decodes:]:
        first = len(chunks)
        done = 0
        for position, slot in (*piece.snapshots, (piece.start + piece.length, piece.state_target)):
            end = position - piece.start
            stored_after = len(chunks) + -(-(end - done) // CHUNK_ROWS)
            while done < end:
                count = min(CHUNK_ROWS, end - done)
                chunks.append((row + done, count, done, piece.state_source, slot, stored_after))
                done += count
        sequences.append((first, len(chunks)))
        row += piece.length
    return StateWork.of(decodes, chunks, sequences)


def max_chunks(num_rows: int, num_sequences: int, num_snapshots: int) -> int:
    """Return a number of chunks that no step exceeds with this many rows, prompts and stored states within them."""
    return num_rows // CHUNK_ROWS + num_sequences + num_snapshots
