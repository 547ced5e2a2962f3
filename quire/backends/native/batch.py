"""A step as flat arrays for C. Every size and number that C relies on is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.backends.native.library import Ints
from quire.core.step import SeqSlice
from quire.errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a batch must respect so that C stays within its memory."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    num_window_blocks: int = 0  # 0: layers with a window use the blocks of the others
    window: int = 0  # the largest of the layers with window blocks
    num_states: int = 0  # 0: no layer has a state


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, in the order of the plan. L of the rows are sampled."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    first_rows: Ints  # [S + 1]
    tables: Ints  # [S, blocks]
    sampled: tuple[int, ...]  # [L]: sequence of each row that is sampled
    sampled_rows: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # [L]
    window_tables: Ints | None = None  # [S, blocks]; blocks behind the window are 0
    kv_starts: Ints | None = None  # [S]; None: all 0
    segments: Ints | None = None  # [segments, 4]: first and last row, source and target slot, see csrc/quire.h
    first_segments: Ints | None = None  # [S + 1]

    @property
    def last_rows(self) -> Ints:
        return self.first_rows[1:] - 1


def build_batch(slices: Sequence[SeqSlice], last_samples: Ints, limits: Limits) -> Batch:
    """Make the arrays of a step. `last_samples` is indexed by batch index.

    Integers of any size are checked before they are converted to 32 bits. The code uses lists because the batches of a
    single stream are so small that calls into numpy would take longer than the work.
    """
    tokens: list[int] = []
    positions: list[int] = []
    first_rows, widths = [0], []
    for piece in slices:
        _refuse(
            length=piece.length < 1 or piece.length != (len(piece.tokens) or 1),
            start=piece.start < 0 or piece.start + piece.length > limits.max_model_len,
            batch_index=not 0 <= piece.batch_index < len(last_samples),
        )
        end = piece.start + piece.length
        tokens.extend(piece.tokens or (int(last_samples[piece.batch_index]),))
        positions.extend(range(piece.start, end))
        first_rows.append(len(tokens))
        widths.append(-(-end // limits.block_size))
    tables = np.zeros((len(slices), max(widths)), np.int64)
    for row, (piece, width) in enumerate(zip(slices, widths, strict=True)):
        _refuse(block_table=len(piece.block_table) < width)
        tables[row, :width] = piece.block_table[:width]
    _refuse(
        tokens=not 0 <= min(tokens) <= max(tokens) < limits.vocab_size,
        block_table=not 0 <= tables.min() <= tables.max() < limits.num_blocks,
    )
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        first_rows=np.array(first_rows, np.int32),
        tables=tables.astype(np.int32),
        sampled=tuple(index for index, piece in enumerate(slices) for _ in range(piece.num_sampled)),
        sampled_rows=_sampled_rows(slices, first_rows),
        window_tables=_window_tables(slices, widths, limits) if limits.num_window_blocks else None,
        kv_starts=_kv_starts(slices),
        **_segments(slices, first_rows, limits.num_states),
    )


def _sampled_rows(slices: Sequence[SeqSlice], first_rows: Sequence[int]) -> Ints:
    """Return the last rows of each slice: one, and one for each draft."""
    rows: list[int] = []
    for index, piece in enumerate(slices):
        _refuse(num_drafts=not 0 <= piece.num_drafts < piece.length)
        rows.extend(range(first_rows[index + 1] - piece.num_sampled, first_rows[index + 1]))
    return np.array(rows, np.int32)


def _window_tables(slices: Sequence[SeqSlice], widths: Sequence[int], limits: Limits) -> Ints:
    """Return tables without the blocks behind the window, whose entries may be of freed blocks."""
    tables = np.zeros((len(slices), max(widths)), np.int64)
    for row, (piece, width) in enumerate(zip(slices, widths, strict=True)):
        first = max(piece.start - limits.window + 1, 0) // limits.block_size
        _refuse(window_table=len(piece.window_table) < width)
        tables[row, first:width] = piece.window_table[first:width]
    _refuse(window_table=not 0 <= tables.min() <= tables.max() < limits.num_window_blocks)
    return tables.astype(np.int32)


def _segments(slices: Sequence[SeqSlice], first_rows: Sequence[int], num_states: int) -> dict[str, Ints]:
    """Return the segments of all slices: a slice is divided where a snapshot of its state is stored."""
    if not num_states:
        return {}
    segments: list[tuple[int, int, int, int]] = []
    first_segments = [0]
    for piece, first_row in zip(slices, first_rows, strict=False):
        start, source = piece.start, piece.state_source
        for position, slot in (*piece.snapshots, (piece.start + piece.length, piece.state_target)):
            _refuse(snapshots=position <= start, states=not (0 <= source < num_states and 0 < slot < num_states))
            segments.append((first_row + start - piece.start, first_row + position - piece.start, source, slot))
            start, source = position, slot
        first_segments.append(len(segments))
    return {"segments": np.array(segments, np.int32), "first_segments": np.array(first_segments, np.int32)}


def _kv_starts(slices: Sequence[SeqSlice]) -> Ints | None:
    starts = [max(piece.kv_start, 0) for piece in slices]
    if not any(starts):
        return None
    return np.array(
        [min(start, piece.start + piece.length) for start, piece in zip(starts, slices, strict=True)], np.int32
    )


def _refuse(**problems: bool | np.bool_) -> None:
    """Raise if any problem is True: C would write out of bounds. No plan of the scheduler fails here."""
    if any(problems.values()):
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        raise InvariantViolation(f"the plan's {', '.join(wrong)} would make C access memory out of bounds")
