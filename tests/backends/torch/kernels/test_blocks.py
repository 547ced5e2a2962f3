from __future__ import annotations

import pytest
import torch

from quire.backends.torch.kernels.blocks import copy_blocks, update_tables
from tests.backends.torch.kernels.device import DEVICE


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
