"""Tests of the prefix tree alone: keys, matches, twins, tails and explanations, without a pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from quire.core.cache import (
    KEY_BYTES,
    KVCacheBlock,
    PrefixTree,
    StopReason,
    common_run,
    hash_block_tokens,
    pack_tokens,
    root_key,
)


class Forest:
    """A tree with blocks of 4 tokens, numbered in order of creation."""

    def __init__(self, **options: int) -> None:
        self.tree = PrefixTree(4, **options)  # type: ignore[arg-type]
        self.blocks: list[KVCacheBlock] = []

    def put(self, tokens: Sequence[int], salt: str = "", *, held: bool = False) -> list[KVCacheBlock]:
        """Publish a whole context as a request would: full blocks, then the tail."""
        chain = self.tree.chain(array("I", tokens), salt)
        made = []
        for index in range(-(-len(tokens) // 4)):
            block = KVCacheBlock(len(self.blocks) + 1)
            block.ref_count = int(held)
            self.blocks.append(block)
            made.append(block)
            is_full = (index + 1) * 4 <= len(tokens)
            run = chain.run(index * 4, min(len(tokens), index * 4 + 4))
            self.tree.insert(block, chain.parent_key(index), chain.key(index) if is_full else None, run)
        return made

    def match(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], int | None, int, bool]:
        """Returns (full blocks, tail block, tokens, adoptable)."""
        hit = self.tree.match(self.tree.chain(array("I", tokens), salt), len(tokens))
        tail = None if hit.tail is None else hit.tail.block_id
        return [block.block_id for block in hit.blocks], tail, hit.num_tokens, hit.is_adoptable

    def explain(self, tokens: Sequence[int], salt: str = "", pending: Sequence[int] = ()) -> tuple[int, StopReason]:
        chain, limit = self.tree.chain(array("I", tokens), salt), len(tokens) - 1
        hit = self.tree.match(chain, limit)
        return hit.num_tokens, self.tree.explain(chain, limit, hit, pending.__contains__)


# Keys


def test_keys_are_chained() -> None:
    tokens = pack_tokens([1, 2, 3])
    after_a = hash_block_tokens(root_key(b"", "a"), tokens)
    after_b = hash_block_tokens(root_key(b"", "b"), tokens)
    assert after_a != after_b
    assert len(after_a) == KEY_BYTES == 16


def test_keys_depend_on_secret_and_salt() -> None:
    keys = {root_key(secret, salt) for secret in (b"", b"x", b"y") for salt in ("", "x", "y")}
    assert len(keys) == 9


def test_a_chain_extends_as_tokens_become_known() -> None:
    tree = PrefixTree(4)
    tokens = array("I", range(6))
    chain = tree.chain(tokens, "")
    first = chain.key(0)
    tokens.extend([6, 7, 8])
    assert chain.key(1) == hash_block_tokens(first, pack_tokens([4, 5, 6, 7]))
    assert chain.run(5, 9) == pack_tokens([5, 6, 7, 8])


def test_common_blocks_are_found_without_hashing() -> None:
    def digest(_parent_key: bytes, _tokens: bytes) -> bytes:
        raise AssertionError("a block was hashed")

    tree = PrefixTree(4, digest=digest)
    owner = tree.chain(array("I", range(400)), "")
    for num_same in (0, 3, 4, 5, 396, 399, 400):
        tokens = array("I", [*range(num_same), *[0] * (400 - num_same)])
        for most in (num_same // 4, 100):
            assert tree.chain(tokens, "").num_common(owner, num_same // 8, most) == num_same // 4


@pytest.mark.parametrize(
    ("a", "b", "run"),
    [
        ([], [1], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 4], 2),
        ([256], [512], 0),
        ([1], [257], 0),
        ([2**32 - 1, 5], [2**32 - 1, 5, 6], 2),
    ],
)
def test_common_run_counts_tokens_not_bytes(a: list[int], b: list[int], run: int) -> None:
    assert common_run(pack_tokens(a), pack_tokens(b)) == run


# Matching


@pytest.mark.parametrize(
    ("cached", "tokens", "expected"),
    [
        (range(12), range(12), ([1, 2, 3], None, 12, False)),
        (range(12), range(4, 12), ([], None, 0, False)),  # the same tokens at another position have different KV
        (range(8), [0, 1, 2, 3, 4, 5, 99, 98], ([1], 2, 6, False)),  # a part of a full block
        (range(6), range(8), ([1], 2, 6, True)),  # a free tail that matches completely can be adopted
        ([50, 51, 52], [50, 51, 60, 61], ([], 1, 2, False)),  # a tail that is longer than the match cannot
    ],
)
def test_matches(
    cached: Sequence[int], tokens: Sequence[int], expected: tuple[list[int], int | None, int, bool]
) -> None:
    forest = Forest()
    forest.put(cached)
    assert forest.match(tokens) == expected


def test_the_best_child_is_found_among_many() -> None:
    forest = Forest()
    for i in range(40):
        forest.put([7, i, i, i])
    for i in range(40):
        assert forest.match([7, i, i, 99]) == ([], i + 1, 3, False)
    assert forest.match([7, 100]) == ([], 40, 1, False)


def test_a_tail_in_use_cannot_be_adopted() -> None:
    forest = Forest()
    forest.put(range(6), held=True)
    assert forest.match(range(8)) == ([1], 2, 6, False)


def test_of_equal_matches_a_tail_that_ends_there_is_preferred() -> None:
    forest = Forest()
    short = forest.put([1, 2], held=True)[0]  # held, so the longer tail does not supersede it
    forest.put([1, 2, 3])
    short.ref_count = 0
    assert forest.match([1, 2, 9, 9]) == ([], 1, 2, True)


def test_a_tail_that_the_tree_contains_is_not_inserted_again() -> None:
    forest = Forest()
    forest.put([1, 2, 3])
    again = forest.put([1, 2, 3])[0]
    part = forest.put([1, 2])[0]
    assert not again.is_published
    assert not part.is_published


def test_a_longer_tail_supersedes_the_one_it_contains() -> None:
    forest = Forest()
    short = forest.put([1, 2])[0]
    forest.put([1, 2, 3])
    assert not short.is_published
    assert forest.match([1, 2, 3, 4]) == ([], 2, 3, True)


def test_a_collision_is_a_miss_and_is_not_published() -> None:
    """With a digest that maps everything to one key, only the comparison of tokens prevents a false hit."""
    tree = PrefixTree(2, digest=lambda _parent, _tokens: b"same")
    mine, other = KVCacheBlock(1), KVCacheBlock(2)
    root = tree.root("")
    for block, tokens in ((mine, [1, 2]), (other, [3, 4])):
        assert tree.insert(block, root, b"same", pack_tokens(tokens)) is None
    assert (mine.is_published, other.is_published) == (True, False)
    assert tree.num_collisions == 1
    assert not other.is_published
    assert tree.match(tree.chain(array("I", [3, 4]), ""), 2).num_tokens == 0
    assert tree.match(tree.chain(array("I", [1, 2]), ""), 2).blocks == (mine,)


# Twins and removal


def test_removing_the_last_twin_removes_all_descendants() -> None:
    forest = Forest()
    first = forest.put(range(14), held=True)
    twin = forest.put(range(4), held=True)[0]
    forest.tree.remove(first[0])
    dropped = forest.tree.remove(twin)
    assert [block.block_id for block in dropped] == [2, 3, 4]  # the partial tail too
    assert not any(block.is_published for block in forest.blocks)
    assert len(forest.tree) == 0
    assert list(forest.tree.positions()) == []


def test_descendants_of_an_evicted_block_are_explained_as_evicted() -> None:
    forest = Forest()
    first = forest.put(range(12))
    forest.tree.remove(first[0])
    forest.put(range(4))
    assert forest.explain(range(13)) == (4, StopReason.EVICTED)


# Explanations


@pytest.mark.parametrize(
    ("num_cached", "tokens", "expected"),
    [
        (9, range(9), (8, StopReason.COMPLETE)),
        (8, [0, 1, 2, 3, 4, 5, 77, 78, 79], (6, StopReason.DIVERGED)),
        (8, [0, 1, 2, 3, 77, 78, 79, 80, 81], (4, StopReason.DIVERGED)),
        (8, [0, 1, 77, 78, 79], (2, StopReason.DIVERGED)),
        (0, [1], (0, StopReason.TOO_SHORT)),  # the only token must be computed
        (0, [1, 2, 3], (0, StopReason.TOO_SHORT)),
        (4, range(6), (4, StopReason.TOO_SHORT)),
        (8, range(50, 60), (0, StopReason.NOT_FOUND)),
        (8, range(20), (8, StopReason.NOT_FOUND)),  # cached up to here, and no content follows
    ],
)
def test_explanations(num_cached: int, tokens: Sequence[int], expected: tuple[int, StopReason]) -> None:
    forest = Forest()
    forest.put(range(num_cached))
    assert forest.explain(tokens) == expected


def test_explain_evicted_while_the_key_is_stored() -> None:
    forest = Forest(max_ghosts=2)
    blocks = forest.put(range(8))
    key = blocks[1].key
    assert key is not None
    forest.tree.remove(blocks[1])
    forest.tree.remember(key)
    assert forest.explain(range(9)) == (4, StopReason.EVICTED)
    forest.tree.remember(b"1")
    forest.tree.remember(b"2")  # two newer keys fill the list
    assert forest.explain(range(9)) == (4, StopReason.NOT_FOUND)


def test_explain_in_flight() -> None:
    forest = Forest()
    forest.put(range(4))
    assert forest.explain(range(9), pending=[1]) == (4, StopReason.IN_FLIGHT)


def test_explain_reveals_nothing_about_another_salt() -> None:
    forest = Forest()
    blocks = forest.put(range(8), salt="a")
    assert blocks[1].key is not None
    forest.tree.remember(blocks[1].key)
    assert forest.explain(range(9), salt="b") == (0, StopReason.NOT_FOUND)
