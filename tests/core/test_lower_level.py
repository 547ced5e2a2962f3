"""The index of a lower level, and the search for the longest prefix in several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.cache import NO_HIT, hash_block_tokens, pack_tokens
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.lower_level import LowerLevel, Reach, Search
from quire.core.request import Request
from quire.core.step import Content, MemoryKind
from quire.core.values import Level
from tests.core.level_rig import BLOCK_SIZE, SIZES, TieredRig

BLOCK, WINDOW, STATE = MemoryKind.BLOCK, MemoryKind.WINDOW, MemoryKind.STATE
ROOT = b"root"


def piece(*tokens: int, kind: MemoryKind = BLOCK, parent_key: bytes = ROOT) -> Content:
    packed = pack_tokens(tokens)
    return Content(kind, hash_block_tokens(parent_key, packed), parent_key, packed)


def contents(level: LowerLevel) -> list[Content]:
    return [stored.content for stored in level]


# The index


def test_content_is_found_by_kind_key_and_tokens() -> None:
    level = LowerLevel(Level.DISK, SIZES)
    block, window = piece(1, 2, 3, 4), piece(1, 2, 3, 4, kind=WINDOW)
    stored = level.add(block)
    assert stored is not None
    assert (stored.content, stored.level) == (block, Level.DISK)
    assert level.find(*block) is stored
    assert block in level
    assert window not in level
    assert level.find(BLOCK, block.key, b"another parent", block.tokens) is None
    assert level.find(BLOCK, block.key, ROOT, pack_tokens([9])) is None
    assert level.add(window) is not None
    assert (len(level), level.num_bytes) == (2, 15)


def test_content_whose_key_is_taken_is_not_added() -> None:
    level = LowerLevel(Level.DISK, SIZES)
    block = piece(1, 2, 3, 4)
    colliding = block._replace(tokens=pack_tokens([5, 6, 7, 8]))
    level.add(block)
    assert level.add(block) is None
    assert level.add(colliding) is None
    assert level.has_key(colliding)
    assert colliding not in level
    assert not level.remove(colliding)
    assert contents(level) == [block]
    assert level.num_bytes == 10


def test_room_is_made_in_order_of_use() -> None:
    level = LowerLevel(Level.HOST, SIZES, (4, 1, 1))
    pieces = [piece(number) for number in range(4)]
    for content in pieces:
        level.add(content)
    level.touch(pieces[0])
    level.touch(piece(99))  # not stored: no effect
    assert [level.reserve(BLOCK), level.reserve(BLOCK)] == [(True, pieces[1]), (True, pieces[2])]
    assert contents(level) == [pieces[3], pieces[0]]
    assert (level.num_bytes, level.num_evictions) == (20, 2)
    assert level.num_reserved == [2, 0, 0]


def test_each_kind_has_its_own_room() -> None:
    level = LowerLevel(Level.HOST, SIZES, (1, 1, 0))
    level.add(piece(1))
    assert level.reserve(WINDOW) == (True, None)
    assert level.reserve(STATE) == (False, None)
    assert level.reserve(BLOCK) == (True, piece(1))
    assert level.max_bytes == SIZES[0] + SIZES[1]


def test_a_tier_whose_store_evicts_has_always_room() -> None:
    level = LowerLevel(Level.DISK, SIZES, store_bytes=10)
    for number in range(3):
        level.add(piece(number))
    assert level.reserve(BLOCK) == (True, None)
    assert len(level) == 3
    assert level.max_bytes == 10


# The search

TOKENS = range(10, 31)  # five blocks of four tokens, and one token


def search(rig: TieredRig, tokens: Sequence[int], *, limit: int | None = None) -> Reach | None:
    request = Request(0, tokens)
    chain = rig.cache.chain(request)
    return rig.levels.find(chain, len(tokens) - 1 if limit is None else limit, rig.cache.match(request))


def found(reach: Reach | None) -> list[tuple[Level, Content]]:
    return [] if reach is None else [(stored.level, stored.content) for stored in reach.pieces]


def two_tiers() -> TieredRig:
    return TieredRig(host_bytes=1_000, has_disk=True)


def test_every_piece_is_taken_from_the_fastest_tier_that_has_it() -> None:
    rig = two_tiers()
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, range(5)))
    rig.levels.restore(Level.HOST, rig.contents(TOKENS, (1, 3)))
    reach = search(rig, TOKENS)
    expected = [Level.DISK, Level.HOST, Level.DISK, Level.HOST, Level.DISK]
    assert found(reach) == list(zip(expected, rig.contents(TOKENS, range(5)), strict=True))
    assert reach is not None
    assert (reach.start, reach.source) == (20, Level.DISK)


def test_a_search_ends_at_the_first_block_that_is_missing() -> None:
    rig = two_tiers()
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, (0, 1, 3, 4)))
    reach = search(rig, TOKENS)
    assert [content for _, content in found(reach)] == rig.contents(TOKENS, (0, 1))
    assert reach is not None
    assert reach.start == 8


def test_the_last_token_is_left_to_compute() -> None:
    rig = two_tiers()
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, range(5)))
    reach = search(rig, TOKENS[:8])
    assert reach is not None
    assert (reach.start, len(reach.blocks)) == (7, 2), "a part of the second block is used"
    assert search(rig, TOKENS[:1]) is None


def test_the_longest_tail_of_all_tiers_is_found() -> None:
    rig = two_tiers()
    rig.levels.restore(Level.HOST, [rig.content(TOKENS[:5], 1), rig.content(TOKENS, 0)])
    rig.levels.restore(Level.DISK, [rig.content(TOKENS[:7], 1), rig.content([*TOKENS[:6], 1, 2], 1)])
    reach = search(rig, TOKENS)
    assert reach is not None
    assert reach.start == 7
    assert found(reach)[-1] == (Level.DISK, rig.content(TOKENS[:7], 1))


def test_what_the_device_has_is_not_searched() -> None:
    rig = two_tiers()
    rig.compute([*TOKENS[:12], 1])
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, (0, 1, 2)))
    assert search(rig, TOKENS) is None
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, (3,)))
    assert found(search(rig, TOKENS)) == [(Level.DISK, rig.content(TOKENS, 3))]


def test_the_blocks_of_a_running_parent_are_not_extended() -> None:
    rig = two_tiers()
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, range(5)))
    chain = rig.cache.chain(Request(0, TOKENS))
    assert rig.levels.find(chain, 20, NO_HIT._replace(is_fork=True)) is None


def hybrid_rig(**options: Any) -> TieredRig:
    return TieredRig(has_disk=True, num_blocks=65, **options)


def test_a_prefix_without_its_window_blocks_is_used_up_to_where_they_are() -> None:
    rig = hybrid_rig(window=6, num_window_blocks=80)
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, range(5)))
    assert search(rig, TOKENS) is None
    windows = [rig.content(TOKENS, number, WINDOW) for number in (1, 2, 4)]
    rig.levels.restore(Level.DISK, windows)
    reach = search(rig, TOKENS)  # a token at 12 sees tokens 7 to 12: the second and third block
    assert reach is not None
    assert reach.start == 12
    assert [number for _, number in reach.windows] == [1, 2]
    assert [content for _, content in found(reach)] == [*rig.contents(TOKENS, range(3)), *windows[:2]]
    rig.levels.restore(Level.DISK, [rig.content(TOKENS, 3, WINDOW)])
    reach = search(rig, TOKENS)
    assert reach is not None
    assert (reach.start, [number for _, number in reach.windows]) == (20, [3, 4])


def state_of(rig: TieredRig, position: int) -> Content:
    number = position // BLOCK_SIZE
    chain = rig.cache.chain(Request(0, TOKENS))
    run, parent_key = chain.run(number * BLOCK_SIZE, position), chain.parent_key(number)
    return Content(STATE, rig.cache.tree.digest(parent_key, run), parent_key, run)


def test_a_prefix_is_used_up_to_the_last_state() -> None:
    rig = hybrid_rig(num_states=40)
    rig.levels.restore(Level.DISK, rig.contents(TOKENS, range(5)))
    assert search(rig, TOKENS) is None
    rig.levels.restore(Level.DISK, [state_of(rig, 3), state_of(rig, 14)])
    reach = search(rig, TOKENS)
    assert reach is not None
    assert (reach.start, len(reach.blocks)) == (14, 4)
    assert [stored.content for stored in reach.states] == [state_of(rig, 14)]
    reach = search(rig, TOKENS, limit=13)
    assert reach is not None
    assert (reach.start, len(reach.blocks)) == (3, 1), "a state before the end of a block needs a part of it"


def test_a_state_is_not_loaded_if_no_slot_may_be_taken_for_it() -> None:
    rig = hybrid_rig(num_states=9)  # eight for running requests
    rig.levels.restore(Level.DISK, [*rig.contents(TOKENS, range(5)), state_of(rig, 20)])
    assert search(rig, TOKENS) is None


def test_a_search_looks_at_no_window_block_twice_for_a_position_that_it_excludes() -> None:
    """Without a limit, a prompt of n blocks and a window of w blocks would take n * w steps."""
    num_blocks = 400
    rig = TieredRig(has_disk=True, num_blocks=2 * num_blocks, window=400, num_window_blocks=2 * num_blocks)
    tokens = range(1, num_blocks * BLOCK_SIZE + 2)
    rig.levels.restore(Level.DISK, rig.contents(tokens, range(num_blocks)))
    rig.levels.restore(Level.DISK, [rig.content(tokens, n, WINDOW) for n in range(num_blocks) if n % 99 != 98])

    class Counting(LowerLevel):
        num_finds = 0

        def find(self, kind, key, parent_key, tokens):  # type: ignore[no-untyped-def]
            Counting.num_finds += 1
            return super().find(kind, key, parent_key, tokens)

    counting = Counting(Level.DISK, SIZES)
    for stored in rig.level(Level.DISK):
        counting.add(stored.content)
    searching = Search(rig.cache.memory, [counting])
    chain = rig.cache.chain(Request(0, tokens))
    Counting.num_finds = 0
    reach = searching.find(chain, len(tokens) - 1, NO_HIT)
    assert reach is not None
    assert reach.start == 98 * BLOCK_SIZE
    assert Counting.num_finds < 3 * num_blocks


def test_a_cache_that_is_off_has_no_tiers() -> None:
    assert KVCacheManager(8, is_caching=False, levels=[LowerLevel(Level.DISK, SIZES)]).levels.levels == ()
