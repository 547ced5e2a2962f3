"""Turns a step plan into the arrays that its kernels read, written on the host and sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.backends.torch.attention_work import Grouping, Ints, Prompt, Siblings, Sizes, Work, find_siblings, plan_work
from quire.core.step import SeqSlice

ITEM_FIELDS = 6
_ALIGN = 16  # int32: arrays start at multiples of 64 bytes, so that no kernel is compiled for unaligned addresses


class Layout(NamedTuple):
    """The number of rows and items, or their maximum in a CUDA graph."""

    num_rows: int
    num_narrow: int
    num_wide: int

    def holds(self, other: Layout) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    @property
    def size(self) -> int:
        return sum(_padded(length) for length in self._lengths())

    def _lengths(self) -> tuple[int, ...]:
        rows = self.num_rows
        return rows, rows, rows, rows + 1, self.num_narrow * ITEM_FIELDS, self.num_wide * ITEM_FIELDS

    def carve(self, flat: Any) -> StepInputs:
        """Return the arrays within one flat buffer, a tensor or a numpy array."""
        pieces, at = [], 0
        for length in self._lengths():
            pieces.append(flat[at : at + length])
            at += _padded(length)
        tokens, positions, batch_indices, first_parts, narrow, wide = pieces
        return StepInputs(
            tokens,
            positions,
            batch_indices,
            first_parts,
            narrow.reshape(-1, ITEM_FIELDS),
            wide.reshape(-1, ITEM_FIELDS),
        )


class StepInputs(NamedTuple):
    """int32, on the host or on the device. T rows."""

    tokens: Any  # [T]; -1: the last sample of the row's batch index
    positions: Any  # [T]
    batch_indices: Any  # [T]; -1: a padding row
    first_parts: Any  # [T + 1]: see `attention_work`
    narrow: Any  # [items, ITEM_FIELDS]
    wide: Any  # [items, ITEM_FIELDS]


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


class Step(NamedTuple):
    """A plan in row order: decodes first, siblings side by side, then prompts."""

    slices: tuple[SeqSlice, ...]
    order: tuple[int, ...]  # index of each slice in the plan
    last_rows: Ints  # last row of each slice
    starts: Ints  # positions of the decodes
    batch_indices: Ints
    work: Work

    @property
    def num_decodes(self) -> int:
        return len(self.starts)

    @property
    def is_decode(self) -> bool:
        """Whether every row is the next token of a different sequence."""
        return len(self.starts) == len(self.slices)

    @property
    def layout(self) -> Layout:
        return Layout(len(self.work.first_parts) - 1, len(self.work.narrow), len(self.work.wide))

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
        inputs.first_parts[: row + 1], inputs.first_parts[row + 1 :] = self.work.first_parts, self.work.first_parts[-1]
        for items, found in ((inputs.narrow, self.work.narrow), (inputs.wide, self.work.wide)):
            items[: len(found)] = found
            items[len(found) :, 1] = 0  # items without rows


def arrange(slices: Sequence[SeqSlice], tables: BlockTables, sizes: Sizes) -> Step:
    """Order the rows of a step. `tables` must be updated with the slices first."""
    decodes = [index for index, piece in enumerate(slices) if piece.length == 1]
    starts = np.array([slices[index].start for index in decodes], np.int32)
    batch_indices = np.array([slices[index].batch_index for index in decodes], np.int32)
    siblings: Sequence[Siblings] = ()
    if (grouping := tables.group(batch_indices, starts, sizes)) is not None:
        siblings, order = grouping.siblings, grouping.order
        decodes = [decodes[place] for place in order.tolist()]
        starts, batch_indices = starts[order], batch_indices[order]
    if len(decodes) == len(slices):
        ordered = tuple(slices[index] for index in decodes)
        work = plan_work(starts, batch_indices, siblings, (), len(decodes), sizes)
        return Step(ordered, tuple(decodes), np.arange(len(decodes), dtype=np.int32), starts, batch_indices, work)
    chosen = decodes + [index for index, piece in enumerate(slices) if piece.length > 1]
    ordered = tuple(slices[index] for index in chosen)
    last_rows = np.cumsum([piece.length for piece in ordered], dtype=np.int32) - 1
    prompts = [
        Prompt(int(last_rows[place]) + 1 - piece.length, piece.length, piece.start, piece.batch_index)
        for place, piece in enumerate(ordered[len(decodes) :], len(decodes))
    ]
    work = plan_work(starts, batch_indices, siblings, prompts, int(last_rows[-1]) + 1, sizes)
    return Step(ordered, tuple(chosen), last_rows, starts, batch_indices, work)


class BlockTables:
    """The block tables of all running requests, on the host and on the device. Only new entries are sent."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.host: Ints = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.device = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._block_size = block_size
        self._seen: list[tuple[Sequence[int] | None, int]] = [(None, 0)] * max_num_seqs  # table, and entries sent
        self._versions = np.zeros(max_num_seqs, np.int64)  # increased when a batch index gets another table
        self._grouping: Grouping | None = None  # of the last step
        self._grouped = (b"", b"")  # batch indices and versions of that step

    def update(self, slices: Sequence[SeqSlice]) -> tuple[list[int], list[int]]:
        """Return positions in the flat table and their new values, for the device."""
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
        return places, blocks

    def group(self, batch_indices: Ints, starts: Ints, sizes: Sizes) -> Grouping | None:
        """Find the siblings among decodes, or return those of the last step if it had the same decodes.

        Tables only grow, so the same tables still begin with the same blocks. They do not begin with more: the block at
        a position is written by its request, and the scheduler never shares a block that is written.
        """
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
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * self.DEPTH
        self._events: list[torch.cuda.Event | None] = [None] * self.DEPTH
        self._turn = 0

    def begin(self, size: int) -> NDArray[np.int32]:
        """Return a buffer for `size` numbers that is no longer being read."""
        self._turn = (self._turn + 1) % self.DEPTH
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._is_cuda)
        array: NDArray[np.int32] = self._buffers[self._turn].numpy()
        return array

    def send(self, size: int, out: Tensor) -> None:
        """Copy the first `size` numbers to a buffer on the device. Does not wait."""
        out[:size].copy_(self._buffers[self._turn][:size], non_blocking=True)
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events[self._turn] = event
