"""Tensors of recurrent states: each slot holds one state in all layers that have one.

The state of a layer after some token is the last inputs of its causal convolution, and for a delta net also one matrix
per head. Slot 0 is the empty state: it is read at the start of a context and never written.

`plan_states` divides the work of these layers, with numpy. A decode is one row that updates a state. A prompt is
divided into chunks of at most CHUNK_ROWS rows, and a chunk ends at every position whose state is stored. Most of the
work of a chunk does not depend on the state before it, so chunks run in parallel; only a short part of each runs in
sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from quire.backends.kv_memory import KVSpec, LayerState
from quire.backends.torch.kv_store import KVStore, zeros
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


class StateStore:
    def __init__(self, kv_spec: KVSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots if kv_spec.has_states else 0
        self.device = device
        layers = {index: layer for index, layer in enumerate(kv_spec.layers) if isinstance(layer, LayerState)}
        self.conv: dict[int, Tensor] = {  # by index of the layer: [slots, rows, channels], the oldest row first
            index: zeros((num_slots, layer.num_rows, layer.num_channels), dtype, device)
            for index, layer in layers.items()
        }
        self.matrices: dict[int, Tensor] = {  # [slots, heads, key size, value size]; absent if the layer has none
            index: zeros((num_slots, layer.num_heads, layer.key_size, layer.value_size), torch.float32, device)
            for index, layer in layers.items()
            if layer.num_heads
        }

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools())

    def pools(self) -> list[Tensor]:
        """Return the pools [slots, ...], layer by layer."""
        found = [(self.conv[index], self.matrices.get(index)) for index in self.conv]
        return [pool for pools in found for pool in pools if pool is not None]

    def purge(self, slots: Sequence[int]) -> None:
        """Set values that are not finite to 0, so that the next request that gets the slot cannot read them."""
        if not slots:
            return
        index = torch.tensor(sorted(set(slots)), device=self.device)
        for pool in self.pools():
            pool.index_copy_(0, index, pool.index_select(0, index).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


class MemoryFacts(TypedDict):
    """Fields of `RunnerFacts`."""

    kv_bytes: int
    window_bytes: int
    state_bytes: int


def memory_facts(store: KVStore, states: StateStore | None) -> MemoryFacts:
    state_bytes = 0 if states is None else states.num_bytes
    return {
        "kv_bytes": store.num_bytes + state_bytes,
        "window_bytes": store.num_window_bytes,
        "state_bytes": state_bytes,
    }


def describe_types(store: KVStore, packed_types: Sequence[str]) -> str:
    """Return the types of activations, of packed weights, and of keys and values where they differ."""
    kv = [f"KV cache in {store.kv_dtype}"] if store.is_fp8 else []
    return ", ".join((str(store.dtype).removeprefix("torch."), *packed_types, *kv))


def purge(piece: SeqSlice, store: KVStore, states: StateStore | None) -> None:
    """Purge the memory that a slice wrote, except blocks behind its window: other requests may use these already."""
    store.purge(piece.block_table, piece.window_table)
    if states is not None:
        states.purge([slot for slot in (*(one.slot for one in piece.snapshots), piece.state_target) if slot])


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
