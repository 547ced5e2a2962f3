"""What a router knows about the caches of replicas: it never credits content that was not announced."""

from __future__ import annotations

import sys
from hashlib import blake2b
from random import Random

import pytest

from quire.errors import InvalidRequest
from quire.scale.routing import ENTRY_BYTES, SWEEP_BLOCKS, PrefixIndex


def keys(name: str, count: int) -> list[bytes]:
    return [blake2b(f"{name} {number}".encode(), digest_size=16).digest() for number in range(count)]


def test_the_least_recently_used_blocks_are_forgotten_and_the_ends_of_prefixes_first() -> None:
    index = PrefixIndex[int](max_blocks=6)
    old, used = keys("old", 3), keys("used", 3)
    index.add(0, old)
    index.add(0, used)
    assert index.match(used) == {0: 3}
    assert index.match(old) == {0: 3}  # used last
    index.add(0, keys("new", 2))
    assert len(index) == 6
    assert index.match(used) == {0: 1}, "its first block is the last to be forgotten"
    assert index.match(old) == {0: 3}


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_sets(seed: int) -> None:
    """A match ends at the first block that is missing."""
    random = Random(seed)
    prompts = [keys(str(number), 8) for number in range(6)]
    held: list[set[bytes]] = [set() for _ in range(5)]
    index = PrefixIndex[int]()
    for _ in range(400):
        replica, prompt = random.randrange(5), random.choice(prompts)
        at, end = sorted((random.randint(0, 8), random.randint(0, 8)))
        if random.random() < 0.5:
            index.add(replica, prompt[at:end])
            held[replica].update(prompt[at:end])
        elif random.random() < 0.9:
            index.remove(replica, prompt[at:end])
            held[replica].difference_update(prompt[at:end])
        else:
            index.clear(replica)
            held[replica].clear()
        wanted = random.choice(prompts)
        expected = [next((n for n, key in enumerate(wanted) if key not in own), 8) for own in held]
        assert index.match(wanted) == {at: count for at, count in enumerate(expected) if count}
    assert len(index) == len(set().union(*held))


def test_a_large_replica_is_cleared_in_slices() -> None:
    """It has nothing at once; its blocks are forgotten by later calls, and its bit is then used again."""
    index = PrefixIndex[int]()
    own, shared = keys("own", 5 * SWEEP_BLOCKS), keys("shared", 10)
    index.add(0, own)
    for replica in (0, 1):
        index.add(replica, shared)
    index.clear(0)
    assert len(index) > 3 * SWEEP_BLOCKS
    assert index.match(own) == {}
    index.add(0, own[:3])  # while the rest is cleaned
    assert index.match(own) == {0: 3}
    assert index.match(shared) == {1: 10}
    index.clear(2)  # has nothing
    for _ in range(6):
        index.match([])
    assert len(index) == 13
    assert sorted(set(index._masks.values())) == [2, 4]
    index.add(2, own[:3])
    assert set(index._masks.values()) == {2, 5}
    assert index.match(own) == {0: 3, 2: 3}


def test_the_memory_of_a_block_is_as_stated() -> None:
    index = PrefixIndex[int]()
    index.add(63, keys("a", 50_000))
    entries = index._masks
    held = sys.getsizeof(entries) + sum(sys.getsizeof(key) + sys.getsizeof(mask) for key, mask in entries.items())
    assert held / len(entries) <= ENTRY_BYTES
    assert index.num_bytes == 50_000 * ENTRY_BYTES


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_blocks = 0"):
        PrefixIndex[int](0)
