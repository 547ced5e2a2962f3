"""Divides the work of layers with recurrent states: decodes, and chunks of prompts. Plain numpy.

A decode is one row that updates a state. A prompt is divided into chunks of at most CHUNK_ROWS rows, and a chunk ends
at every position whose state is stored. Most of the work of a chunk does not depend on the state before it, so chunks
run in parallel; only a short part of each runs in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.core.step import SeqSlice

CHUNK_ROWS = 64
DECODE_FIELDS = 2  # source slot, target slot
# First row, number of rows, rows of the same sequence before it in this step, source slot of the sequence, slot of the
# next stored state (after this chunk or a later one), index of the chunk that follows that state.
CHUNK_FIELDS = 6
SEQUENCE_FIELDS = 2  # first chunk, last chunk + 1


NO_CHUNKS = np.zeros((0, CHUNK_FIELDS), np.int32)
NO_SEQUENCES = np.zeros((0, SEQUENCE_FIELDS), np.int32)


class StateWork(NamedTuple):
    """int32 arrays, on the host or on the device. Zeros are padding: entries that do nothing."""

    decodes: Any  # [decodes, DECODE_FIELDS]: entry i is row i of the step
    chunks: Any  # [chunks, CHUNK_FIELDS]
    sequences: Any  # [prompts, SEQUENCE_FIELDS]


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
    if not sequences:  # the common step
        return StateWork(np.array(decodes, np.int32).reshape(-1, DECODE_FIELDS), NO_CHUNKS, NO_SEQUENCES)
    return StateWork(
        np.array(decodes, np.int32).reshape(-1, DECODE_FIELDS),
        np.array(chunks, np.int32).reshape(-1, CHUNK_FIELDS),
        np.array(sequences, np.int32).reshape(-1, SEQUENCE_FIELDS),
    )


def max_chunks(num_rows: int, num_sequences: int, num_snapshots: int) -> int:
    """Return a number of chunks that no step exceeds with this many rows, prompts and stored states within them."""
    return num_rows // CHUNK_ROWS + num_sequences + num_snapshots
