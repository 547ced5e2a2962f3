"""Turns a step plan into the arrays that its kernels read, written on the host and sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.torch.attention_work import (
    MIN_SIBLINGS,
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
from quire.backends.torch.state_store import CHUNK_FIELDS, DECODE_FIELDS, SEQUENCE_FIELDS, StateWork, plan_states
from quire.core.step import SeqSlice

ITEM_FIELDS = 6
_ALIGN = 16  # int32: arrays start at multiples of 64 bytes, so that no kernel is compiled for unaligned addresses


class Layout(NamedTuple):
    """The number of rows and items, or their maximum in a CUDA graph."""

    num_rows: int
    num_narrow: int
    num_wide: int
    window: WindowLayout | None = None  # None: no layer uses window blocks
    states: StateLayout | None = None  # None: no layer has a state

    def holds(self, other: Layout) -> bool:
        """Whether a step of the other layout fits. Both are of one model, so both have windows and states or none."""
        if self.num_rows < other.num_rows or self.num_narrow < other.num_narrow or self.num_wide < other.num_wide:
            return False
        mine, theirs = (*(self.window or ()), *(self.states or ())), (*(other.window or ()), *(other.states or ()))
        return all(have >= need for have, need in zip(mine, theirs, strict=True))

    @property
    def size(self) -> int:
        return _bounds(self)[-1][1]

    def lengths(self) -> list[int]:
        """Return the length of each array, in the order in which they lie in the buffer."""
        rows = self.num_rows
        lengths = [rows, rows, rows, rows + 1, self.num_narrow * ITEM_FIELDS, self.num_wide * ITEM_FIELDS]
        if self.window is not None:
            lengths += [rows + 1, self.window.num_narrow * ITEM_FIELDS, self.window.num_wide * ITEM_FIELDS]
        if self.states is not None:
            lengths += [
                self.states.num_decodes * DECODE_FIELDS,
                self.states.num_chunks * CHUNK_FIELDS,
                self.states.num_sequences * SEQUENCE_FIELDS,
            ]
        return lengths if self.window is None and self.states is None else [*lengths, rows]

    def carve(self, flat: Any) -> StepInputs:
        """Return the arrays within one flat buffer, a tensor or a numpy array."""
        pieces = [flat[first:last] for first, last in _bounds(self)[:-1]]
        tokens, positions, batch_indices, first_parts, narrow, wide = pieces[:6]
        inputs = StepInputs(
            tokens,
            positions,
            batch_indices,
            first_parts,
            narrow.reshape(-1, ITEM_FIELDS),
            wide.reshape(-1, ITEM_FIELDS),
        )
        others = pieces[6:]
        if not others:
            return inputs
        window = states = None
        if self.window is not None:
            first_parts, narrow, wide, *others = others
            window = Items(first_parts, narrow.reshape(-1, ITEM_FIELDS), wide.reshape(-1, ITEM_FIELDS))
        if self.states is not None:
            decodes, chunks, sequences, *others = others
            states = StateWork(
                decodes.reshape(-1, DECODE_FIELDS),
                chunks.reshape(-1, CHUNK_FIELDS),
                sequences.reshape(-1, SEQUENCE_FIELDS),
            )
        return inputs._replace(window=window, states=states, kept=others[0])


@lru_cache(maxsize=1024)  # a step uses one of few layouts of graphs, or a layout of its own
def _bounds(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return first and last index of each array, and at the end 0 and the size of the buffer."""
    bounds, at = [], 0
    for length in layout.lengths():
        bounds.append((at, at + length))
        at += -(-length // _ALIGN) * _ALIGN
    return (*bounds, (0, at))


class WindowLayout(NamedTuple):
    """Items of the layers that use window blocks."""

    num_narrow: int
    num_wide: int


class StateLayout(NamedTuple):
    """Lengths of the arrays of `StateWork`."""

    num_decodes: int
    num_chunks: int
    num_sequences: int


class Items(NamedTuple):
    """Attention of the layers of one pool, as arrays of `attention_work.Work`."""

    first_parts: Any  # [T + 1]
    narrow: Any  # [items, ITEM_FIELDS]
    wide: Any  # [items, ITEM_FIELDS]

    def write(self, work: Work) -> None:
        """Write into arrays that may be longer; the rest is padding."""
        end = len(work.first_parts)
        self.first_parts[:end], self.first_parts[end:] = work.first_parts, work.first_parts[-1]
        for items, found in ((self.narrow, work.narrow), (self.wide, work.wide)):
            items[: len(found)] = found
            items[len(found) :, 1] = 0  # items without rows


class StepInputs(NamedTuple):
    """int32, on the host or on the device. T rows."""

    tokens: Any  # [T]; -1: the last sample of the row's batch index
    positions: Any  # [T]
    batch_indices: Any  # [T]; -1: a padding row
    first_parts: Any  # [T + 1]: see `attention_work`
    narrow: Any  # [items, ITEM_FIELDS]
    wide: Any  # [items, ITEM_FIELDS]
    window: Items | None = None  # of the layers that use window blocks
    states: StateWork | None = None
    # [T]: batch indices; -1: a padding row, or one whose keys and values are in shared blocks already. Such rows exist
    # only in models with windows or states, which may compute tokens again whose keys are cached.
    kept: Any = None

    @property
    def items(self) -> Items:
        return Items(self.first_parts, self.narrow, self.wide)

    def arrays(self) -> list[Any]:
        """Return all arrays in the order in which they lie in the buffer."""
        others = () if self.kept is None else (*(self.window or ()), *(self.states or ()), self.kept)
        return [self.tokens, self.positions, self.batch_indices, *self.items, *others]


class Step(NamedTuple):
    """A plan in row order: decodes first, siblings side by side, then prompts."""

    slices: tuple[SeqSlice, ...]
    order: tuple[int, ...]  # index of each slice in the plan
    last_rows: Ints  # last row of each slice
    starts: Ints  # positions of the decodes
    batch_indices: Ints
    work: Work
    window_work: Work | None = None
    states: StateWork | None = None

    @property
    def num_merged(self) -> int:
        """Number of rows up to the last one that has parts in any layer."""
        return max(self.work.num_merged, 0 if self.window_work is None else self.window_work.num_merged)

    @property
    def num_decodes(self) -> int:
        return len(self.starts)

    @property
    def is_decode(self) -> bool:
        """Whether every row is the next token of a different sequence."""
        return len(self.starts) == len(self.slices)

    @property
    def layout(self) -> Layout:
        layout = Layout(len(self.work.first_parts) - 1, len(self.work.narrow), len(self.work.wide))
        if self.window_work is not None:
            layout = layout._replace(window=WindowLayout(len(self.window_work.narrow), len(self.window_work.wide)))
        if self.states is not None:
            layout = layout._replace(states=StateLayout(*map(len, self.states)))
        return layout

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
        inputs.items.write(self.work)
        if inputs.window is not None and self.window_work is not None:
            inputs.window.write(self.window_work)
        if inputs.states is not None and self.states is not None:
            for array, found in zip(inputs.states, self.states, strict=True):
                array[: len(found)], array[len(found) :] = found, 0
        if inputs.kept is not None:
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
    window_work = None
    if division.window_sizes is not None:
        window_work = plan_work(starts, batch_indices, (), prompts, num_rows, division.window_sizes, division.window)
    states = plan_states(ordered, len(decodes)) if division.has_states else None
    return Step(ordered, tuple(chosen), last_rows, starts, batch_indices, work, window_work, states)


_Seen = tuple[Sequence[int] | None, int]  # table, and entries sent


class BlockTables:
    """The block tables of all running requests, on the host and on the device. Only new entries are sent.

    With a window there are also tables of window blocks, on the device only. Entries behind the window are not read,
    so they are not sent, and not sent again when the scheduler sets them to 0.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device, window: int = 0
    ) -> None:
        self.host: Ints = np.zeros((max_num_seqs, max_blocks), np.int32)
        # One tensor for both kinds of tables, so that one kernel updates them.
        num_kinds = 2 if window else 1
        self.whole = torch.zeros(num_kinds * max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.device = self.whole[:max_num_seqs]
        self.window_device = self.whole[max_num_seqs:]  # empty without a window
        self._window = window
        self._block_size = block_size
        self._seen: list[_Seen] = [(None, 0)] * max_num_seqs
        self._seen_windows: list[_Seen] = [(None, 0)] * max_num_seqs
        self._versions = np.zeros(max_num_seqs, np.int64)  # increased when a batch index gets another table
        self._grouping: Grouping | None = None  # of the last step
        self._grouped = (b"", b"")  # batch indices and versions of that step

    def update(self, slices: Sequence[SeqSlice]) -> tuple[list[int], list[int]]:
        """Return positions in the flattened `whole` tables and their new values, for the device."""
        places: list[int] = []
        blocks: list[int] = []
        width = self.host.shape[1]
        for piece in slices:
            table, batch_index = piece.block_table, piece.batch_index
            needed = (piece.start + piece.length - 1) // self._block_size + 1
            owner, known = self._seen[batch_index]
            if owner is not table:  # compared by identity: tables only grow, and each request has its own list
                known = 0
                self._versions[batch_index] += 1
            elif known >= needed:
                continue
            new = table[known:needed]
            self.host[batch_index, known:needed] = new
            places += range(batch_index * width + known, batch_index * width + needed)
            blocks += new
            self._seen[batch_index] = (table, needed)
        if self._window:
            self._update_windows(slices, places, blocks)
        return places, blocks

    def _update_windows(self, slices: Sequence[SeqSlice], places: list[int], blocks: list[int]) -> None:
        max_num_seqs, width = self.host.shape
        for piece in slices:
            table, batch_index = piece.window_table, piece.batch_index
            needed = (piece.start + piece.length - 1) // self._block_size + 1
            owner, known = self._seen_windows[batch_index]
            if owner is not table:
                known = max(piece.start + 1 - self._window, 0) // self._block_size
            elif known >= needed:
                continue
            first = (max_num_seqs + batch_index) * width
            places += range(first + known, first + needed)
            blocks += table[known:needed]
            self._seen_windows[batch_index] = (table, needed)

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
        self._seen_windows = [(None, 0)] * len(self._seen)


class Staging:
    """Pinned host memory for several steps: one is written while others are being copied."""

    DEPTH = 3

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * self.DEPTH
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._buffers]  # the same memory
        self._carved: list[dict[Layout, StepInputs]] = [{} for _ in range(self.DEPTH)]  # parts of these arrays
        self._events: list[torch.cuda.Event] = []  # recorded after each copy; empty without CUDA
        if self._is_cuda:
            self._events = [torch.cuda.Event() for _ in range(self.DEPTH)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def begin(self, size: int) -> Ints:
        """Return a buffer for `size` numbers that is no longer being read."""
        self._turn = turn = (self._turn + 1) % self.DEPTH
        if self._is_cuda:
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
        if self._is_cuda:
            self._events[self._turn].record()
