"""Tests of the pin board: which pins are dropped for a new one, and the cost of a pin."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from quire.core.cache import KVCacheBlock
from quire.core.kv_cache import KVCacheManager
from quire.core.memory import MAX_PINS
from tests.core.helpers import check_cache

LATER = 10**18


def make_cache(num_blocks: int) -> tuple[KVCacheManager, list[KVCacheBlock]]:
    """A cache and all its blocks. Pins can hold blocks without content."""
    cache = KVCacheManager(num_blocks, 4)
    return cache, cache.pool.blocks[1:]


class NaiveBoard:
    """A simple implementation of the rules, without incremental counters."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.pins: dict[str, list[int]] = {}

    def pin(self, pin_id: str, block_ids: list[int]) -> None:
        self.pins.pop(pin_id, None)
        block_ids = block_ids[: self.max_blocks]
        if not block_ids:
            return
        while self.pins and (len(self.distinct() | {*block_ids}) > self.max_blocks or len(self.pins) >= MAX_PINS):
            held = Counter({pin_id.partition("/")[0]: len(block_ids)})
            for other, blocks in self.pins.items():
                held[other.partition("/")[0]] += len(blocks)
            most = max(held.values())
            greedy = [other for other in self.pins if held[other.partition("/")[0]] == most]
            del self.pins[greedy[0] if greedy else next(iter(self.pins))]
        self.pins[pin_id] = block_ids

    def distinct(self) -> set[int]:
        return {block_id for blocks in self.pins.values() for block_id in blocks}


@pytest.mark.parametrize("seed", range(20))
def test_the_board_drops_the_same_pins_as_the_naive_board(seed: int) -> None:
    random = Random(seed)
    cache, blocks = make_cache(random.choice((9, 41, 161)))
    board, naive = cache.pins, NaiveBoard(cache.pins.max_blocks)
    names = [f"{owner}/{number}" for owner in ("ann", "bob", "eve") for number in range(6)] + ["none"]
    for _ in range(300):
        name = random.choice(names)
        if random.random() < 0.15:
            assert board.unpin(name) == (naive.pins.pop(name, None) is not None)
        else:
            start = random.randrange(len(blocks))
            wanted = tuple(blocks[start : start + random.choice((0, 1, 2, 5, 20, 200))])  # neighbours overlap
            num_held = board.pin(name, wanted, LATER)
            naive.pin(name, [block.block_id for block in wanted])
            assert num_held == len(naive.pins.get(name, ()))
        assert list(board._pins) == list(naive.pins)
        assert board.num_blocks == len(naive.distinct())
        check_cache(cache)
    board.clear()
    assert (board.num_blocks, board.owners, cache.pool.num_free) == (0, {}, len(blocks))


def test_there_are_at_most_max_pins() -> None:
    cache, blocks = make_cache(4 * MAX_PINS)
    for number in range(MAX_PINS + 3):
        cache.pins.pin(f"{number % 7}/{number}", (blocks[number],), LATER)
    assert len(cache.pins) == MAX_PINS
    check_cache(cache)


class Counted(dict[Any, Any]):
    """A dictionary that counts accesses and fails when it is iterated."""

    num_used = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_used += 1
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.num_used += 1
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self.num_used += 1
        return super().get(key, default)

    def _no(self, *_: Any) -> Any:
        raise AssertionError("all pins were iterated")

    items = values = keys = _no


def test_the_cost_of_a_pin_depends_on_its_own_and_the_dropped_blocks() -> None:
    cache, blocks = make_cache(20_001)
    board, size = cache.pins, 20
    for start in range(0, board.max_blocks, size):
        board.pin(f"{start % 3}/{start}", tuple(blocks[start : start + size]), LATER)
    assert board.num_blocks == board.max_blocks  # the next pin displaces another
    board._pins, board.holders = Counted(board._pins), Counted(board.holders)
    num_pins = len(board)
    board.pin("new/1", tuple(blocks[-size:]), LATER)
    assert len(board) == num_pins
    assert board.holders.num_used <= 6 * size
    assert board._pins.num_used <= 6
