"""Copies pieces of memory between the pools and a staging buffer. A piece is a block or a state in all layers.

One launch copies any number of pieces in all layers, whatever their shapes: a table has the address of each layer's
pool. In the staging buffer, the layers of a piece lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# P pieces, R rows of a piece: what one tensor of a layer stores

WORDS = 1024  # per program
FIELDS = 3  # of a row: address of piece 0, words of the row, words before it in a piece
WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PieceTable(NamedTuple):
    """The rows of one kind of pieces."""

    rows: Tensor  # [R, FIELDS] int64, on the device
    num_words: int  # of a piece
    longest: int  # words of the longest row
    word: torch.dtype


# No argument is specialised: there is one kernel for all kinds of memory and all places in a staging buffer.
@triton.jit(do_not_specialize=["rows", "indices", "staging", "piece_words"])
def _move_pieces(rows, indices, staging, piece_words, IS_GATHER: tl.constexpr, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    row = rows + tl.program_id(2) * 3
    size = tl.load(row + 1)  # 64 bits: a pool may have more than 2**31 words
    is_in = word < size
    index = tl.load(indices + piece)
    pooled = tl.load(row).to(staging.dtype) + index * size + word
    staged = staging + piece.to(tl.int64) * piece_words + tl.load(row + 2) + word
    if IS_GATHER:
        tl.store(staged, tl.load(pooled, mask=is_in), mask=is_in)
    else:
        tl.store(pooled, tl.load(staged, mask=is_in), mask=is_in)


def piece_table(pools: Sequence[Tensor], device: torch.device) -> PieceTable:
    """Describe pieces that consist of a row of each pool [pieces, ...]. The pools must stay where they are."""
    sizes = [pool.nbytes // len(pool) for pool in pools]
    word = next(kind for kind in WORD_TYPES if math.gcd(*sizes) % kind.itemsize == 0)
    rows, at = [], 0
    for pool, size in zip(pools, sizes, strict=True):
        assert pool.is_contiguous()
        rows.append((pool.data_ptr(), size // word.itemsize, at))
        at += size // word.itemsize
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    return PieceTable(table, at, max(sizes, default=0) // word.itemsize, word)


def gather_pieces(table: PieceTable, indices: Tensor, staging: Tensor) -> None:
    """Copy the pieces `indices` [P] int32 to staging [P * words]."""
    _launch(table, indices, staging, is_gather=True)


def scatter_pieces(table: PieceTable, indices: Tensor, staging: Tensor) -> None:
    """Copy staging [P * words] to the pieces `indices` [P] int32, which are distinct."""
    _launch(table, indices, staging, is_gather=False)


def _launch(table: PieceTable, indices: Tensor, staging: Tensor, *, is_gather: bool) -> None:
    grid = (-(-table.longest // WORDS), len(indices), len(table.rows))
    _move_pieces[grid](
        table.rows, indices, staging, table.num_words, IS_GATHER=is_gather, BLOCK=WORDS, num_warps=4
    )  # fmt: skip
