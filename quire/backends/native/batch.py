"""A step as flat arrays: what C reads. Every size and number that C trusts is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.backends.native.library import Ints
from quire.core.step import SeqSlice
from quire.errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch must keep to, for C to stay within its memory."""

    num_blocks: int
    block_size: int
    max_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, in the order of the plan; L of the sequences sample."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    first_rows: Ints  # [S + 1]
    tables: Ints  # [S, blocks]
    sampled: tuple[int, ...]  # [L]: which sequences

    @property
    def last_rows(self) -> Ints:
        return self.first_rows[1:] - 1


def build_batch(slices: Sequence[SeqSlice], last_samples: Ints, limits: Limits) -> Batch:
    """`last_samples` is indexed by slot. Numbers are checked in 64 bits, then handed over in 32."""
    lengths = np.fromiter((piece.length for piece in slices), np.int64, len(slices))
    starts = np.fromiter((piece.start for piece in slices), np.int64, len(slices))
    ends = starts + lengths
    slots = np.fromiter((piece.slot for piece in slices), np.int64, len(slices))
    counts = np.fromiter((len(piece.tokens) or 1 for piece in slices), np.int64, len(slices))
    _refuse(
        length=(lengths < 1) | (counts != lengths),
        start=(starts < 0) | (ends > limits.max_context),
        slot=(slots < 0) | (slots >= len(last_samples)),
    )
    first_rows = np.zeros(len(slices) + 1, np.int64)
    np.cumsum(lengths, out=first_rows[1:])
    known: list[int] = []
    for piece in slices:
        known.extend(piece.tokens or (int(last_samples[piece.slot]),))
    tokens = np.array(known, np.int64)
    widths = -(-ends // limits.block_size)
    tables = np.zeros((len(slices), int(widths.max())), np.int64)
    is_short = np.zeros(len(slices), np.bool_)
    for row, (piece, width) in enumerate(zip(slices, widths.tolist(), strict=True)):
        blocks = piece.block_table[:width]
        is_short[row] = len(blocks) < width
        tables[row, : len(blocks)] = blocks
    is_token = (tokens >= 0) & (tokens < limits.vocab_size)
    _refuse(
        tokens=~is_token,
        block_table=[is_short.any(), (tables < 0).any(), (tables >= limits.num_blocks).any()],
    )
    offsets = np.arange(len(tokens)) - np.repeat(first_rows[:-1], lengths)
    return Batch(
        tokens=tokens.astype(np.int32),
        positions=(np.repeat(starts, lengths) + offsets).astype(np.int32),
        first_rows=first_rows.astype(np.int32),
        tables=tables.astype(np.int32),
        sampled=tuple(index for index, piece in enumerate(slices) if piece.wants_token),
    )


def _refuse(**problems: object) -> None:
    """Nothing the scheduler plans fails here. If it did, C would write where it must not."""
    if wrong := [name for name, found in problems.items() if np.any(np.asarray(found))]:
        raise InvariantViolation(f"a plan whose {', '.join(wrong)} would lead out of memory")
