from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels.blocks import copy_blocks, move_pieces, piece_table, update_tables
from tests.backends.torch.kernels.device import DEVICE

NUM_PIECES = 9
INDICES = [4, 1, 8, 5]
# Rows of a piece, by pool, and the words they are copied in.
SHAPES: list[tuple[list[tuple[int, ...]], torch.dtype, torch.dtype]] = [
    ([(2, 2, 8, 16)] * 3, torch.bfloat16, torch.int64),
    ([(2, 1, 32, 64), (2, 2, 32, 80), (3, 40)], torch.float32, torch.int64),  # more than one program in a row
    ([(3, 5), (7,)], torch.float32, torch.int32),
    ([(3, 5), (7,)], torch.bfloat16, torch.int16),
    ([(3, 5), (1,)], torch.uint8, torch.uint8),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "block_size", "head_size"),
    [(1, 1, 8, 64), (3, 3, 16, 80), (2, 2, 32, 128), (5, 1, 5, 7)],
)
def test_copies_in_all_layers(
    num_layers: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_size)
    pool = torch.randn(num_layers, 12, 2, num_kv_heads, block_size, head_size).to(DEVICE, dtype)
    sources, destinations = [4, 0, 4, 11], [2, 10, 1, 3]  # one source may have several destinations
    expected = pool.clone()
    expected[:, destinations] = pool[:, sources]
    assert not torch.equal(pool, expected)
    copy_blocks(
        pool,
        torch.tensor(sources, dtype=torch.int32, device=DEVICE),
        torch.tensor(destinations, dtype=torch.int32, device=DEVICE),
    )
    assert torch.equal(pool, expected)


def test_copies_beyond_32_bits() -> None:
    """Only the pages that are used take memory."""
    num_blocks = 2**17 + 2
    pool = torch.empty(2, num_blocks, 2, 4, 32, 64, dtype=torch.uint8, device=DEVICE)  # a layer is more than 2**31
    torch.manual_seed(0)
    block = torch.randint(256, (2, *pool.shape[2:]), dtype=torch.uint8, device=DEVICE)
    pool[:, 1] = block
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    copy_blocks(pool, one, one * (num_blocks - 1))
    assert torch.equal(pool[:, num_blocks - 1], block)


@pytest.mark.parametrize("num_entries", [0, 1, 7, 128, 300])
def test_updates_of_tables(num_entries: int) -> None:
    torch.manual_seed(num_entries)
    tables = torch.randint(1000, (40, 50), dtype=torch.int32, device=DEVICE)
    places = torch.randperm(tables.numel())[:num_entries].to(DEVICE, torch.int32)
    blocks = torch.randint(1000, 2000, (num_entries,), dtype=torch.int32, device=DEVICE)
    expected = tables.clone()
    expected.view(-1)[places.long()] = blocks
    update_tables(tables, places, blocks)
    assert torch.equal(tables, expected)


def as_bytes(pools: list[Tensor], index: int) -> Tensor:
    return torch.cat([pool[index].reshape(-1).view(torch.uint8) for pool in pools])


@pytest.mark.parametrize(("shapes", "dtype", "word"), SHAPES)
def test_gathers_and_scatters(shapes: list[tuple[int, ...]], dtype: torch.dtype, word: torch.dtype) -> None:
    torch.manual_seed(len(shapes))
    pools = [torch.randint(256, (NUM_PIECES, *shape), device=DEVICE).to(dtype) for shape in shapes]
    table = piece_table(pools, torch.device(DEVICE))
    assert table.word is word
    indices = torch.tensor(INDICES, dtype=torch.int32, device=DEVICE)
    staging = torch.full(((len(INDICES) + 1) * table.num_words,), 17, dtype=word, device=DEVICE)
    move_pieces(table, indices, staging, is_gather=True)
    pieces = staging.view(torch.uint8).view(len(INDICES) + 1, -1)
    for row, index in zip(pieces, INDICES, strict=False):
        assert torch.equal(row, as_bytes(pools, index))
    assert (staging[len(INDICES) * table.num_words :] == 17).all()
    before = [pool.clone() for pool in pools]
    targets = [7, 0, 4, 2]  # a target may be another piece's source: that was read already
    move_pieces(table, torch.tensor(targets, dtype=torch.int32, device=DEVICE), staging, is_gather=False)
    for now, then in zip(pools, before, strict=True):
        expected = then.clone()
        expected[targets] = then[INDICES]
        assert torch.equal(now, expected)


def test_pieces_beyond_32_bits() -> None:
    """Only the pages that are used take memory."""
    pool = torch.empty(2**17 + 2, 2, 4, 32, 64, dtype=torch.uint8, device=DEVICE)  # more than 2**31 bytes
    torch.manual_seed(0)
    block = torch.randint(256, pool.shape[1:], dtype=torch.uint8, device=DEVICE)
    pool[-1] = block
    table = piece_table([pool], torch.device(DEVICE))
    staging = torch.zeros(table.num_words, dtype=table.word, device=DEVICE)
    last = torch.tensor([len(pool) - 1], dtype=torch.int32, device=DEVICE)
    move_pieces(table, last, staging, is_gather=True)
    assert torch.equal(staging.view(torch.uint8), block.view(-1))
    move_pieces(table, last - 1, staging, is_gather=False)
    assert torch.equal(pool[-2], block)
