"""Tests of the block pool: exact block ids, reference counts and the whole free list after each operation."""

import pytest

from quire.core.cache import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    PrefixTree,
    check_block_size,
    hash_block_tokens,
    pack_tokens,
)
from quire.errors import InvalidRequest, OutOfBlocks
from tests.core.helpers import free_ids, ids


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixTree]:
    tree = PrefixTree(2)
    return BlockPool(num_blocks, tree), tree


def publish_chain(pool: BlockPool, tree: PrefixTree, blocks: list[KVCacheBlock], first_token: int = 0) -> None:
    """Publish consecutive blocks, filled with consecutive numbers."""
    parent = tree.root("")
    for index, block in enumerate(blocks):
        start = first_token + index * tree.block_size
        tokens = pack_tokens(range(start, start + tree.block_size))
        key = hash_block_tokens(parent, tokens)
        pool.publish(block, parent, key, tokens)
        parent = key


@pytest.mark.parametrize("size", [0, -1, 3, 31, 33, 512, 2.0, True, "32", None])
def test_block_sizes_that_are_no_power_of_two_up_to_256_are_refused(size: object) -> None:
    assert [check_block_size(1 << exponent) for exponent in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    with pytest.raises(InvalidRequest, match=r"block_size = .* is not a power of two from 1 to 256"):
        check_block_size(size)  # type: ignore[arg-type]


def test_the_free_list_refuses_a_block_twice_and_a_block_that_is_not_in_it() -> None:
    blocks = list(map(KVCacheBlock, range(4)))
    queue = FreeKVCacheBlockQueue(blocks)
    for insert in (queue.append, queue.prepend):
        with pytest.raises(ValueError, match="already in the free list"):
            insert(blocks[1])
    queue.remove(blocks[1])  # from the middle
    with pytest.raises(ValueError, match="not in the free list"):
        queue.remove(blocks[1])
    queue.prepend(blocks[1])
    assert (ids(list(queue)), ids(list(queue.backwards())), len(queue)) == ([1, 0, 2, 3], [3, 2, 0, 1], 4)
    assert ids([queue.pop_front() for _ in blocks]) == [1, 0, 2, 3]
    with pytest.raises(IndexError, match="the free list is empty"):
        queue.pop_front()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_in_addition_to_the_null_block(num_blocks: int) -> None:
    with pytest.raises(InvalidRequest, match=f"num_blocks = {num_blocks} is less than 2"):
        make_pool(num_blocks)


def test_take_is_all_or_nothing() -> None:
    pool, _ = make_pool(5)
    pool.take(2)
    with pytest.raises(OutOfBlocks, match="count = 3 blocks requested, 2 are free"):
        pool.take(3)
    assert free_ids(pool) == [3, 4]
    assert pool.take(0) == []


def test_unpublished_blocks_are_released_to_the_front() -> None:
    pool, _ = make_pool(7)
    taken = pool.take(3)
    assert free_ids(pool) == [4, 5, 6]
    pool.release(taken)
    assert free_ids(pool) == [1, 2, 3, 4, 5, 6]  # released 3, 2, 1, each to the front


def test_published_blocks_are_released_to_the_back_tail_first() -> None:
    pool, tree = make_pool(9)
    taken = pool.take(4)
    publish_chain(pool, tree, taken[:3])  # 4 is a private tail
    pool.release(taken)
    assert free_ids(pool) == [4, 5, 6, 7, 8, 3, 2, 1]  # unpublished first, then never used, then tails before heads


def test_shared_blocks_are_free_after_the_last_release() -> None:
    pool, tree = make_pool(6)
    first = pool.take(3)
    publish_chain(pool, tree, first)
    pool.share(first[:2])
    assert [block.ref_count for block in first] == [2, 2, 1]
    assert pool.num_shared == 2
    pool.release(first)
    assert [block.ref_count for block in first] == [1, 1, 0]
    assert free_ids(pool) == [4, 5, 3]
    pool.release(first[:2])
    assert free_ids(pool) == [4, 5, 3, 2, 1]


def test_eviction_is_lazy_and_least_recently_used_first() -> None:
    pool, tree = make_pool(6)
    old, new = pool.take(2), pool.take(2)
    publish_chain(pool, tree, old, first_token=0)
    publish_chain(pool, tree, new, first_token=100)
    pool.release(old)
    pool.release(new)
    assert free_ids(pool) == [5, 2, 1, 4, 3]
    assert len(tree) == 4
    assert ids(pool.take(3)) == [5, 2, 1]
    assert len(tree) == 2
    assert pool.stats().num_evictions == 2


def test_descendants_of_an_evicted_block_move_to_the_front() -> None:
    pool, tree = make_pool(6)
    taken = pool.take(4)
    publish_chain(pool, tree, taken)
    pool.release(taken)
    assert free_ids(pool) == [5, 4, 3, 2, 1]
    pool.share(pool.blocks[3:5])
    pool.release(pool.blocks[3:5])  # held without their ancestors, like the source of a copy
    assert free_ids(pool) == [5, 2, 1, 4, 3]
    assert ids(pool.take(2)) == [5, 2]
    assert free_ids(pool) == [4, 3, 1]  # 3 and 4 followed 2 and lost their content
    assert pool.stats().num_cached == 1


def test_only_the_last_released_twin_stays_cached() -> None:
    pool, tree = make_pool(7)
    first, second = pool.take(2), pool.take(2)
    publish_chain(pool, tree, first)
    publish_chain(pool, tree, second)
    pool.release(first)  # the indexed blocks are replaced by their twins
    assert free_ids(pool) == [1, 2, 5, 6]
    assert not first[0].is_published
    pool.release(second)
    assert free_ids(pool) == [1, 2, 5, 6, 4, 3]
    assert pool.stats().num_cached == 2
    assert len(tree) == 2


def test_releasing_a_free_block_fails() -> None:
    pool, _ = make_pool(3)
    with pytest.raises(AssertionError, match="released without a reference"):
        pool.release([pool.blocks[1]])
