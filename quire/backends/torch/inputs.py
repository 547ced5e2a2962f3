"""Turns a step plan into the arrays that its kernels read, written on the host and sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import ge
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.torch.attention_work import (
    ITEM_FIELDS,
    MIN_SIBLINGS,
    NO_WORK,
    Grouping,
    Ints,
    Prompt,
    Siblings,
    Sizes,
    Work,
    find_siblings,
    group_drafts,
    plan_work,
)
from quire.backends.torch.state_work import (
    CHUNK_FIELDS,
    DECODE_FIELDS,
    NO_STATES,
    SEQUENCE_FIELDS,
    StateWork,
    plan_states,
)
from quire.core.step import SeqSlice

_ALIGN = 16  # int32: arrays start at multiples of 64 bytes, so that no kernel is compiled for unaligned addresses


class Layout(NamedTuple):
    """The lengths of the arrays of `StepInputs`, or their maximum in a CUDA graph."""

    num_rows: int
    num_narrow: int
    num_wide: int
    num_window_parts: int = 0  # 2 rows + 1; 0: no layer uses window blocks
    num_window_narrow: int = 0
    num_window_wide: int = 0
    num_decodes: int = 0  # these three are 0 if no layer has a state
    num_chunks: int = 0
    num_sequences: int = 0
    num_kept: int = 0  # rows; 0: there are neither windows nor states

    def holds(self, other: Layout) -> bool:
        """Whether a step of the other layout fits. Both are of one model."""
        return all(map(ge, self, other))

    def padded(self, num_rows: int) -> Layout:
        """Return a layout with so many rows."""
        parts = 2 * num_rows + 1 if self.num_window_parts else 0
        return self._replace(num_rows=num_rows, num_window_parts=parts, num_kept=num_rows if self.num_kept else 0)

    @property
    def size(self) -> int:
        return _bounds(self)[-1][1]

    def carve(self, flat: Any) -> StepInputs:
        """Return the arrays within one flat buffer, a tensor or a numpy array."""
        pieces = [flat[first:last] for first, last in _bounds(self)[:-1]]
        shaped = [
            piece.reshape(-1, width) if width > 1 else piece for piece, width in zip(pieces, _WIDTHS, strict=True)
        ]
        return StepInputs(*shaped)


# Numbers of an entry of each array.
_WIDTHS = (
    *(1, 1, 1, 1, ITEM_FIELDS, ITEM_FIELDS, 1, ITEM_FIELDS, ITEM_FIELDS),
    *(DECODE_FIELDS, CHUNK_FIELDS, SEQUENCE_FIELDS, 1),
)


@lru_cache(maxsize=1024)  # a step uses one of few layouts of graphs, or a layout of its own
def _bounds(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return first and last index of each array, and at the end 0 and the size of the buffer."""
    bounds, at = [], 0
    rows = layout.num_rows
    for length, width in zip((rows, rows, rows, 2 * rows + 1, *layout[1:]), _WIDTHS, strict=True):
        bounds.append((at, at + length * width))
        at += -(-length * width // _ALIGN) * _ALIGN
    return (*bounds, (0, at))


class StepInputs(NamedTuple):
    """int32, on the host or on the device. T rows. Arrays of what a model does not have are empty."""

    tokens: Any  # [T]; -1: the last sample of the row's batch index
    positions: Any  # [T]
    batch_indices: Any  # [T]; -1: a padding row
    first_parts: Any  # [2 T + 1]: these three are the `attention_work.Work` of layers with whole contexts
    narrow: Any  # [items, ITEM_FIELDS]
    wide: Any  # [items, ITEM_FIELDS]
    window_first_parts: Any  # the same of the layers that use window blocks
    window_narrow: Any
    window_wide: Any
    decodes: Any  # these three are the `StateWork`
    chunks: Any
    sequences: Any
    # [T]: batch indices; -1: a padding row, or one whose keys and values are in shared blocks already. Such rows exist
    # only in models with windows or states, which may compute tokens again whose keys are cached.
    kept: Any

    @property
    def work(self) -> Work:
        return Work(*self[3:6])

    @property
    def window_work(self) -> Work:
        return Work(*self[6:9])

    @property
    def states(self) -> StateWork:
        return StateWork(*self[9:12])


class Step(NamedTuple):
    """A plan in row order: decodes first, siblings side by side, then prompts."""

    slices: tuple[SeqSlice, ...]
    order: tuple[int, ...]  # index of each slice in the plan
    last_rows: Ints  # last row of each slice
    starts: Ints  # positions of the decodes
    batch_indices: Ints
    work: Work
    window_work: Work = NO_WORK
    states: StateWork = NO_STATES

    @property
    def num_merged(self) -> int:
        """Number of rows up to the last one that is split in any layer."""
        return max(self.work.num_merged, self.window_work.num_merged)

    @property
    def num_decodes(self) -> int:
        return len(self.starts)

    @property
    def is_decode(self) -> bool:
        """Whether every row is the next token of a different sequence."""
        return len(self.starts) == len(self.slices)

    @property
    def layout(self) -> Layout:
        num_firsts, *lengths = map(len, (*self.work, *self.window_work, *self.states))
        return Layout._make((num_firsts // 2, *lengths, num_firsts // 2 if any(lengths[2:]) else 0))

    def write(self, inputs: StepInputs) -> None:
        """Write into arrays that may be longer; the rest is padding."""
        count = self.num_decodes
        inputs.positions[:count], inputs.batch_indices[:count] = self.starts, self.batch_indices
        inputs.tokens[:count] = [piece.tokens[0] if piece.tokens else -1 for piece in self.slices[:count]]
        row = count
        for piece in self.slices[count:]:
            last = row + piece.length
            inputs.tokens[row:last] = piece.tokens
            inputs.positions[row:last] = np.arange(piece.start, piece.start + piece.length)
            inputs.batch_indices[row:last] = piece.batch_index
            row = last
        inputs.tokens[row:], inputs.positions[row:], inputs.batch_indices[row:] = 0, 0, -1
        for array, found in zip(inputs[3:-1], (*self.work, *self.window_work, *self.states), strict=True):
            if len(array):
                size = len(found)
                array[:size] = found
                array[size:] = found[-1] if array.ndim == 1 else 0  # items without rows, rows without parts
        if len(inputs.kept):
            self._write_kept(inputs)

    def _write_kept(self, inputs: StepInputs) -> None:
        inputs.kept[:] = inputs.batch_indices
        for place, piece in enumerate(self.slices):
            if piece.kv_start > piece.start:
                row = int(self.last_rows[place]) + 1 - piece.length
                inputs.kept[row : row + min(piece.kv_start - piece.start, piece.length)] = -1


class Division(NamedTuple):
    """How the work of a step is divided among programs."""

    sizes: Sizes
    window: int = 0  # the largest one of the layers that use window blocks; 0: there are none
    window_sizes: Sizes | None = None  # for those layers
    has_states: bool = False


def arrange(slices: Sequence[SeqSlice], tables: BlockTables, division: Division) -> Step:
    """Order the rows of a step. `tables` must be updated with the slices first."""
    sizes = division.sizes
    decodes = [index for index, piece in enumerate(slices) if piece.length == 1]
    positions = [slices[index].start for index in decodes]
    owners = [slices[index].batch_index for index in decodes]
    starts, batch_indices = np.array(positions, np.int32), np.array(owners, np.int32)
    siblings: Sequence[Siblings] = ()
    if len(set(owners)) < len(owners):  # some are drafts
        siblings = group_drafts(owners, positions, sizes)
    elif (grouping := tables.group(batch_indices, starts, sizes)) is not None:
        siblings, order = grouping.siblings, grouping.order
        decodes = [decodes[place] for place in order.tolist()]
        starts, batch_indices = starts[order], batch_indices[order]
    prompts: Sequence[Prompt] = ()
    if len(decodes) == len(slices):
        chosen = decodes
        ordered = tuple(slices[index] for index in decodes)
        last_rows = np.arange(len(decodes), dtype=np.int32)
        num_rows = len(decodes)
    else:
        chosen = decodes + [index for index, piece in enumerate(slices) if piece.length > 1]
        ordered = tuple(slices[index] for index in chosen)
        last_rows = np.cumsum([piece.length for piece in ordered], dtype=np.int32) - 1
        prompts = [
            Prompt(int(last_rows[place]) + 1 - piece.length, piece.length, piece.start, piece.batch_index)
            for place, piece in enumerate(ordered[len(decodes) :], len(decodes))
        ]
        num_rows = int(last_rows[-1]) + 1
    work = plan_work(starts, batch_indices, siblings, prompts, num_rows, sizes)
    window_work = NO_WORK
    if division.window_sizes is not None:
        window_work = plan_work(starts, batch_indices, (), prompts, num_rows, division.window_sizes, division.window)
    states = plan_states(ordered, len(decodes)) if division.has_states else NO_STATES
    return Step(ordered, tuple(chosen), last_rows, starts, batch_indices, work, window_work, states)


_Seen = tuple[Sequence[int] | None, int]  # table, and entries sent


class BlockTables:
    """The block tables of all running requests, on the host and on the device. Only new entries are sent.

    With a window there are also tables of window blocks. Entries behind the window are not read, so they are not sent,
    and not sent again when the scheduler sets them to 0.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device, window: int = 0
    ) -> None:
        # One tensor for both kinds of tables, so that one kernel updates them.
        num_tables = max_num_seqs * (2 if window else 1)
        self.host: Ints = np.zeros((num_tables, max_blocks), np.int32)
        self.whole = torch.zeros(num_tables, max_blocks, dtype=torch.int32, device=device)
        self.device = self.whole[:max_num_seqs]
        self.window_device = self.whole[max_num_seqs:]  # empty without a window
        self._max_num_seqs = max_num_seqs
        self._window = window
        self._block_size = block_size
        self._seen: list[_Seen] = [(None, 0)] * num_tables
        self._versions = np.zeros(num_tables, np.int64)  # increased when a batch index gets another table
        self._grouping: Grouping | None = None  # of the last step
        self._grouped = (b"", b"")  # batch indices and versions of that step

    def update(self, slices: Sequence[SeqSlice]) -> tuple[list[int], list[int]]:
        """Return positions in the flattened `whole` tables and their new values, for the device."""
        places: list[int] = []
        blocks: list[int] = []
        width = self.host.shape[1]
        for first in range(0, len(self._seen), self._max_num_seqs):  # tables of blocks, then of window blocks
            for piece in slices:
                table, row = piece.window_table if first else piece.block_table, first + piece.batch_index
                needed = (piece.start + piece.length - 1) // self._block_size + 1
                owner, known = self._seen[row]
                if owner is not table:  # compared by identity: tables only grow, and each request has its own list
                    known = max(piece.start + 1 - self._window, 0) // self._block_size if first else 0
                    self._versions[row] += 1
                elif known >= needed:
                    continue
                new = table[known:needed]
                self.host[row, known:needed] = new
                places += range(row * width + known, row * width + needed)
                blocks += new
                self._seen[row] = (table, needed)
        return places, blocks

    def group(self, batch_indices: Ints, starts: Ints, sizes: Sizes) -> Grouping | None:
        """Find the siblings among decodes, or return those of the last step if it had the same decodes.

        Tables only grow, so the same tables still begin with the same blocks. They do not begin with more: the block at
        a position is written by its request, and the scheduler never shares a block that is written.
        """
        if len(batch_indices) < MIN_SIBLINGS:
            return None
        grouped = (batch_indices.tobytes(), self._versions[batch_indices].tobytes())
        is_known = grouped == self._grouped
        if is_known and self._grouping is not None:
            is_known = bool((self._grouping.shared <= starts).all())
        if not is_known:
            self._grouping = find_siblings(self.host, batch_indices, starts, sizes)
            self._grouped = grouped
        return self._grouping

    def forget(self) -> None:
        """Send all entries again: those written may not have reached the device."""
        self._seen = [(None, 0)] * len(self._seen)


class Staging:
    """Pinned host memory for several steps: one is written while others are being copied."""

    DEPTH = 3

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * self.DEPTH
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._buffers]  # the same memory
        self._carved: list[dict[Layout, StepInputs]] = [{} for _ in range(self.DEPTH)]  # parts of these arrays
        self._events = [torch.get_device_module(device).Event() for _ in range(self.DEPTH)]  # recorded after each copy
        self._turn = 0

    def begin(self, size: int) -> Ints:
        """Return a buffer for `size` numbers that is no longer being read."""
        self._turn = turn = (self._turn + 1) % self.DEPTH
        self._events[turn].synchronize()  # does not wait before the first copy
        if len(self._arrays[turn]) < size:
            self._buffers[turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._is_cuda)
            self._arrays[turn] = self._buffers[turn].numpy()
            self._carved[turn].clear()
        return self._arrays[turn]

    def carve(self, layout: Layout) -> StepInputs:
        """Return the arrays of a graph's layout within the current buffer. They are made once."""
        carved = self._carved[self._turn]
        if layout not in carved:
            carved[layout] = layout.carve(self._arrays[self._turn])
        return carved[layout]

    def send(self, size: int, out: Tensor) -> None:
        """Copy the first `size` numbers to a buffer on the device. Does not wait."""
        out[:size].copy_(self._buffers[self._turn][:size], non_blocking=True)
        self._events[self._turn].record()
