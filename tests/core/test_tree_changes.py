"""Changes that the prefix tree reports: a reader that applies them has the tree's public content at every moment."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.cache import pack_tokens
from quire.core.events import Cleared, Published, Removed, TreeChange
from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request
from tests.core.following import TreeCopy, public_content
from tests.core.helpers import compute
from tests.sim.world import FIRST_HYBRID, World

WORLDS = [*range(16), *range(FIRST_HYBRID, FIRST_HYBRID + 4)]


def watched(num_blocks: int = 20) -> tuple[KVCacheManager, list[TreeChange]]:
    """A cache with blocks of four tokens, and the list of its changes."""
    cache, changes = KVCacheManager(num_blocks, 4), list[TreeChange]()
    cache.tree.on_change = changes.append
    return cache, changes


def published(changes: list[TreeChange]) -> list[bytes]:
    return [change.tokens for change in changes if isinstance(change, Published)]


def keys_of(request: Request, cache: KVCacheManager) -> list[bytes]:
    return [cache.chain(request).key(index) for index in range(len(request.tokens) // 4)]


def test_full_blocks_are_published_in_order_and_tails_never() -> None:
    cache, changes = watched()
    request = Request(1, range(11))
    compute(cache, request)
    first, second = keys_of(request, cache)
    root = cache.tree.root("")
    assert changes == [
        Published(first, root, pack_tokens(range(4))),
        Published(second, first, pack_tokens(range(4, 8))),
    ]
    cache.release(request)
    compute(cache, Request(2, range(10)))
    assert len(changes) == 2  # found in the cache, with a partial tail


def test_content_is_published_with_its_first_block_and_removed_with_its_last() -> None:
    cache, changes = watched()
    requests = [Request(number, range(5)) for number in (1, 2, 3)]
    for request in requests:  # none of them finds the blocks of the others
        cache.grow(request, 5)
    for request in requests:
        request.num_computed = 5
        cache.publish(request)
    assert cache.tree.num_twins == 2
    assert published(changes) == [pack_tokens(range(4))]
    for request in requests:
        cache.release(request)
    assert len(changes) == 1  # one block is still cached
    cache.evict_unused()
    assert changes[1:] == [Removed((keys_of(requests[0], cache)[0],))]


def test_a_removed_block_takes_its_descendants_along_children_first() -> None:
    cache, changes = watched()
    request = Request(1, [*range(12), 99])
    other = Request(2, [*range(4), 7, 7, 7, 7, 99])
    for one in (request, other):
        compute(cache, one)
        cache.release(one)
    first, second, third = keys_of(request, cache)
    _, branch = keys_of(other, cache)
    changes.clear()
    found = cache.tree.find(first)
    assert found is not None
    cache.tree.remove(found)
    (change,) = changes
    assert isinstance(change, Removed)
    assert sorted(change.keys) == sorted((first, second, third, branch))
    assert change.keys[-1] == first
    assert change.keys.index(third) < change.keys.index(second)


def test_nothing_below_the_root_of_a_salt_is_reported() -> None:
    cache, changes = watched()
    for number, salt in enumerate(("tenant", "", "other"), 1):
        request = Request(number, range(9), salt=salt)
        compute(cache, request)
        cache.release(request)
    assert published(changes) == [pack_tokens(range(4)), pack_tokens(range(4, 8))]
    assert {change.parent_key for change in changes if isinstance(change, Published)}.isdisjoint(
        {cache.tree.root("tenant"), cache.tree.root("other")}
    )
    cache.evict_unused()
    assert sum(len(change.keys) for change in changes if isinstance(change, Removed)) == 2


def test_a_clear_is_reported_and_blocks_in_use_are_published_no_more() -> None:
    cache, changes = watched()
    request = Request(1, range(13))
    compute(cache, request, 8)
    cache.clear()
    compute(cache, request)
    assert [type(change) for change in changes] == [Published, Published, Cleared]
    again = Request(2, range(9))
    compute(cache, again)
    assert len(changes) == 5


class FollowedWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, check_every=8)
        self.copy = TreeCopy(self.scheduler.cache.tree)

    def _event(self, verb: Callable[[], None]) -> None:
        super()._event(verb)
        assert self.copy.content == public_content(self.scheduler.cache.tree)


def test_a_copy_built_from_changes_equals_the_tree_after_every_event() -> None:
    """With evictions, twins, salts, clears, preemptions and colliding keys, in worlds of the simulation."""
    worlds = [FollowedWorld(seed) for seed in WORLDS]
    for world in worlds:
        world.run(400)
    counts = {kind: sum(world.copy.num_changes[kind] for world in worlds) for kind in (Published, Removed, Cleared)}
    num_twins = sum(world.counts["twins"] for world in worlds)
    num_salted = sum(len(world.scheduler.cache.tree) > len(world.copy.content) for world in worlds)
    assert counts[Published] > 1000
    assert counts[Removed] > 800
    assert counts[Cleared] > 8
    assert num_twins > 50
    assert num_salted > 5  # trees with content that is not public
