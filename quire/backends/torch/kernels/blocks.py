"""Cache maintenance between steps: block copies for forks, and new block table entries."""

from __future__ import annotations

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
