"""The pool of recurrent states: for each layer that has one, a tensor with a row per slot.

Slot 0 is the empty state. It is read at the start of a context and never written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.kv_spec import KVSpec, LayerState
from quire.core.step import SeqSlice


class Segment(NamedTuple):
    """Rows of a batch that continue the state of one slot and leave theirs in another, which may be the same."""

    first_row: int
    num_rows: int
    source: int  # slot
    target: int  # slot; 0: the state is dropped


def find_segments(slices: Iterable[SeqSlice]) -> tuple[Segment, ...]:
    """Divide slices, in the order of their rows, at their snapshots. A segment may read what the last one wrote."""
    found = []
    row = 0
    for piece in slices:
        position, source, end = piece.start, piece.state_source, piece.start + piece.length
        for stop, slot in (*piece.snapshots, (end, piece.state_target)):
            found.append(Segment(row, stop - position, source, slot))
            row += stop - position
            position, source = stop, slot
    return tuple(found)


class StateStore:
    def __init__(self, kv_spec: KVSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots  # the empty state included
        layers = {index: one for index, one in enumerate(kv_spec.layers) if isinstance(one, LayerState)}
        self.conv: dict[int, Tensor] = {  # by layer: [slots, rows, channels], oldest row first
            index: torch.zeros(num_slots, one.num_rows, one.num_channels, dtype=dtype, device=device)
            for index, one in layers.items()
        }
        self.matrices: dict[int, Tensor] = {  # by layer, if it has them: [slots, heads, key size, value size] fp32
            index: torch.zeros(num_slots, one.num_heads, one.key_size, one.value_size, device=device)
            for index, one in layers.items()
            if one.num_heads
        }

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.conv.values(), *self.matrices.values()))
