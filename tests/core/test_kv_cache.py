"""Tests of block tables: exact blocks, counts and free lists after each operation. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from quire.core.cache import NO_HIT, hash_block_tokens
from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request
from quire.core.step import BlockCopy
from quire.core.values import SamplingParams
from quire.errors import ContextTooLong, OutOfBlocks
from tests.core.helpers import compute, free_ids, ids, make_request, pin_tokens


def make_cache(num_blocks: int = 9) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4)


class CountedDigest:
    """A digest that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, parent_key: bytes, tokens: bytes) -> bytes:
        self.num_calls += 1
        return hash_block_tokens(parent_key, tokens)


def refs(cache: KVCacheManager) -> list[int]:
    """Reference counts of blocks 1, 2, ..."""
    return [block.ref_count for block in cache.pool.blocks[1:]]


def test_grow_is_all_or_nothing() -> None:
    cache = make_cache(num_blocks=6)
    holder = make_request(1, 8)
    compute(cache, holder)
    cache.release(holder)
    request = make_request(2, 40)
    hit = cache.match(request)
    assert ids(hit.blocks) == [1, 2]
    with pytest.raises(OutOfBlocks, match="5 blocks are missing"):
        cache.grow(request, 40, hit)
    assert request.block_table == []
    assert refs(cache) == [0, 0, 0, 0, 0]
    assert free_ids(cache.pool) == [3, 4, 5, 2, 1]


def test_the_next_turn_continues_the_tail_of_a_finished_request_in_place() -> None:
    cache = make_cache()
    first = make_request(1, 6)
    compute(cache, first)
    cache.release(first)
    assert free_ids(cache.pool) == [3, 4, 5, 6, 7, 8, 2, 1]
    turn = make_request(2, 11)
    hit = cache.match(turn)
    assert hit.is_adoptable
    assert cache.grow(turn, 11, hit) == []  # no copy at all
    assert turn.block_table == [1, 2, 3]
    assert (turn.num_computed, turn.num_planned) == (6, 6)
    assert free_ids(cache.pool) == [4, 5, 6, 7, 8]


def test_a_tail_in_use_is_copied_and_its_source_is_held_until_settle() -> None:
    cache = make_cache()
    writer, reader = make_request(1, 6), make_request(2, 8)
    compute(cache, writer)
    hit = cache.match(reader)
    assert not hit.is_adoptable
    copies = cache.grow(reader, 8, hit)
    assert copies == [BlockCopy(source=2, destination=3)]
    assert reader.block_table == [1, 3]
    assert refs(cache)[:3] == [2, 2, 1]  # block 2 is held by the writer and by the copy in flight
    assert (reader.num_computed, reader.num_planned) == (4, 6)  # the copied tokens do not exist yet
    cache.settle(copies)
    assert refs(cache)[:3] == [2, 1, 1]


def test_a_fork_shares_all_computed_blocks_of_its_parent() -> None:
    cache = make_cache()
    parent = make_request(1, 6)
    compute(cache, parent)
    child = Request(2, parent.tokens, parent=parent)
    hit = cache.fork(parent, child)
    assert (ids(hit.blocks), hit.num_tokens, hit.is_fork) == ([1], 5, True)
    assert cache.grow(child, 6, hit) == [BlockCopy(2, 3)]
    assert (parent.block_table, child.block_table) == ([1, 2], [1, 3])


def test_a_fork_with_other_tokens_or_salt_shares_nothing() -> None:
    cache = make_cache()
    parent = make_request(1, 6)
    compute(cache, parent)
    assert cache.fork(parent, make_request(2, 6, first=1)) == NO_HIT
    assert cache.fork(parent, Request(3, parent.tokens, salt="other")) == NO_HIT


def test_release_extends_a_published_tail() -> None:
    cache = make_cache()
    request = make_request(1, 5)
    compute(cache, request)
    request.tokens.extend([5, 6])
    request.num_computed = request.num_planned = 7
    cache.release(request)
    assert cache.match(make_request(2, 8)).num_tokens == 7


def test_chain_keys_are_computed_on_demand_and_once() -> None:
    digest = CountedDigest()
    cache = KVCacheManager(2000, 4, digest=digest)
    num_full = 256
    first = make_request(1, 4 * num_full + 1)
    assert cache.match(first).num_tokens == 0
    assert digest.num_calls == 0  # a match compares tokens
    for upto in range(64, len(first.tokens), 64):
        compute(cache, first, upto)
        assert digest.num_calls == upto // 4  # grows with the computed blocks
    compute(cache, first)
    cache.release(first)
    assert digest.num_calls == num_full

    half = Request(2, [*range(2 * num_full), *[5] * 2 * num_full])
    assert cache.match(half).num_tokens == 2 * num_full
    whole = Request(3, first.tokens)
    assert len(cache.match(whole).blocks) == len(cache.match(whole).blocks) == num_full
    assert cache.chain(whole).key(num_full - 1) == cache.chain(first).key(num_full - 1)
    assert digest.num_calls == num_full  # the keys of cached blocks are not computed again
    whole.tokens.extend([7, 8, 9])  # one more full block
    last = cache.chain(whole)
    assert last.key(num_full) == hash_block_tokens(last.key(num_full - 1), last.block(num_full))
    assert cache.chain(half).key(num_full // 2) != cache.chain(first).key(num_full // 2)
    assert digest.num_calls == num_full + 2


def test_pinning_the_prompt_of_a_request_computes_no_new_keys() -> None:
    digest = CountedDigest()
    cache = KVCacheManager(100, 4, digest=digest)
    request = make_request(1, 50)
    compute(cache, request)
    num_calls = digest.num_calls
    assert cache.pin("a", request, 50, 10**9) == 48
    assert cache.pin("b", request, 11, 10**9) == 8
    assert digest.num_calls == num_calls
    assert [ids(pin.held.blocks) for pin in cache.pins] == [list(range(1, 13)), [1, 2]]


def test_a_disabled_cache_finds_and_publishes_nothing() -> None:
    cache = KVCacheManager(9, 4, is_caching=False)
    request = make_request(1, 9)
    compute(cache, request)
    cache.release(request)
    assert cache.match(make_request(2, 9)) == NO_HIT
    assert cache.stats().num_cached == 0


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    cache = make_cache(num_blocks=3)
    cache.check_fits(7, 8)
    with pytest.raises(ContextTooLong, match=r"prompt of 8 .* context of 8 tokens \(the whole KV pool: 2 blocks"):
        cache.check_fits(8, 8)
    with pytest.raises(ContextTooLong, match=r"prompt of 8 tokens .* context of 7 tokens$"):
        cache.check_fits(8, 7)


def test_requests_that_skip_the_cache_are_not_counted_as_queries() -> None:
    off = KVCacheManager(9, 4, is_caching=False)
    off.grow(make_request(1, 8), 8)
    scored = Request(2, range(8), SamplingParams(prompt_logprobs=0))  # needs every position computed
    on = make_cache()
    on.grow(scored, 8, on.match(scored))
    for cache in (off, on):
        assert (cache.stats().num_queried_tokens, cache.stats().num_hit_tokens) == (0, 0)


def test_stats_count_hits_tails_and_twins() -> None:
    cache = make_cache()
    first, twin = make_request(1, 8), make_request(2, 8)
    cache.grow(first, 8)
    cache.grow(twin, 8)  # both start before either has published a block
    for request in (first, twin):
        request.num_computed = 8
        cache.publish(request)
    reader = make_request(3, 9)
    cache.grow(reader, 9, cache.match(reader))
    stats = cache.stats()
    assert (stats.num_twins, stats.num_hit_tokens, stats.num_queried_tokens) == (2, 8, 22)
    assert stats.hit_rate == pytest.approx(8 / 22)
    assert (stats.num_blocks, stats.num_free, stats.num_in_use, stats.num_shared) == (8, 3, 5, 2)


# Pins


def test_pinned_blocks_are_not_evicted_until_they_expire() -> None:
    cache = make_cache()
    request = make_request(1, 10)
    compute(cache, request)
    cache.release(request)
    assert pin_tokens(cache, "system", list(range(10)), "", expires_ns=100) == 8  # full blocks only
    other = make_request(2, 24, first=500)
    cache.grow(other, 24)
    assert cache.shortage(make_request(3, 4, first=900), 4) == 1
    cache.release(other)
    assert cache.match(make_request(4, 9)).num_tokens == 8
    cache.pins.expire(99)
    assert cache.stats().num_pinned == 2
    cache.pins.expire(100)
    assert cache.stats().num_pinned == 0
    assert len(cache.pool.free) == 8


def test_a_pin_longer_than_half_the_pool_is_cut() -> None:
    cache = make_cache()
    request = make_request(1, 28)
    compute(cache, request)
    assert pin_tokens(cache, "long", request.tokens, "", 10**9) == 16
    assert [ids(pin.held.blocks) for pin in cache.pins] == [[1, 2, 3, 4]]  # the first blocks are kept


def test_pinning_again_extends_and_renews() -> None:
    cache = make_cache()
    request = make_request(1, 12)
    compute(cache, request, upto=4)
    assert pin_tokens(cache, "chat", request.tokens, "", expires_ns=10) == 4
    compute(cache, request, upto=12)
    cache.release(request)
    assert pin_tokens(cache, "chat", request.tokens, "", expires_ns=20) == 12
    cache.pins.expire(15)
    assert cache.pins.num_blocks == 3
    cache.clear()
    assert len(cache.pins) == 0
