"""Tests of blocks and the free list."""

import pytest

from quire.core.cache.context import BLOCK_SIZE, FreeKVCacheBlockQueue, KVCacheBlock, check_block_size
from quire.errors import InvalidRequest


def queue_of(count: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(count)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def test_the_default_block_size_is_32() -> None:
    assert BLOCK_SIZE == 32


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_powers_of_two_up_to_256_are_block_sizes(size: int) -> None:
    assert check_block_size(size) == size


@pytest.mark.parametrize("size", [0, -1, 3, 31, 33, 512, 2.0, True, "32", None])
def test_other_block_sizes_are_refused(size: object) -> None:
    with pytest.raises(InvalidRequest, match=r"block_size = .* is not a power of two from 1 to 256"):
        check_block_size(size)  # type: ignore[arg-type]


def test_queue_refuses_invalid_operations() -> None:
    blocks, queue = queue_of(2)
    with pytest.raises(ValueError, match="already in the free list"):
        queue.append(blocks[0])
    with pytest.raises(ValueError, match="already in the free list"):
        queue.prepend(blocks[1])
    queue.remove(blocks[0])
    with pytest.raises(ValueError, match="not in the free list"):
        queue.remove(blocks[0])
    queue.pop_front()
    with pytest.raises(IndexError):
        queue.pop_front()
