"""Cache maintenance between steps: block copies for forks, new block table entries, and copies to and from staging.

A piece is a block or a state in all layers. One launch copies any number of pieces in all layers, whatever their
shapes: a table has the address of each layer's pool. In the staging buffer, the layers of a piece lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# N copies or entries, K kv heads, D head size

COPIED = 4096  # elements per program of `copy_blocks`: 64 bytes per thread
ENTRIES = 128  # per program of `update_tables`


# Takes the number of blocks instead of the stride of a layer: the stride exceeds 32 bits in a large pool, and Triton
# would compile another kernel for a 64-bit argument, in the first step that copies.
@triton.jit(do_not_specialize=["sources", "destinations", "num_blocks"])
def _copy_blocks(pool, sources, destinations, num_blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    source = tl.load(sources + copy).to(tl.int64)
    destination = tl.load(destinations + copy).to(tl.int64)
    layer = pool + tl.program_id(2).to(tl.int64) * num_blocks * SIZE
    values = tl.load(layer + source * SIZE + element, mask=element < SIZE)
    tl.store(layer + destination * SIZE + element, values, mask=element < SIZE)


@triton.jit(do_not_specialize=["places", "blocks", "num_entries"])
def _update_tables(tables, places, blocks, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entry < num_entries
    place = tl.load(places + entry, mask=is_in, other=0)
    tl.store(tables + place, tl.load(blocks + entry, mask=is_in, other=0), mask=is_in)


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks `sources` [N] to `destinations` [N] in all layers of pool [layers, blocks, 2, K, block size, D].

    No block is both source and destination: the order of the copies is undefined.
    """
    num_layers, num_blocks = pool.shape[:2]
    size = pool.stride(1)
    _copy_blocks[(-(-size // COPIED), sources.shape[0], num_layers)](
        pool, sources, destinations, num_blocks, SIZE=size, BLOCK=COPIED, num_warps=4
    )


def update_tables(tables: Tensor, places: Tensor, blocks: Tensor) -> None:
    """Write `blocks` [N] at `places` [N] of the flattened tables [max_num_seqs, most blocks]. Places are distinct."""
    num_entries = places.shape[0]
    _update_tables[(-(-num_entries // ENTRIES),)](
        tables, places, blocks, num_entries, BLOCK=ENTRIES, num_warps=4
    )  # fmt: skip


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

    @property
    def num_bytes(self) -> int:
        """Bytes of a piece."""
        return self.num_words * self.word.itemsize


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


def move_pieces(table: PieceTable, indices: Tensor, staging: Tensor, *, is_gather: bool) -> None:
    """Copy the pieces `indices` [P] int32 to staging [P * words], or staging to the pieces, which are distinct then."""
    grid = (-(-table.longest // WORDS), len(indices), len(table.rows))
    _move_pieces[grid](
        table.rows, indices, staging, table.num_words, IS_GATHER=is_gather, BLOCK=WORDS, num_warps=4
    )  # fmt: skip
