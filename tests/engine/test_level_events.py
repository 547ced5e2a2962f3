"""KV events of levels: a router that reads them knows what each level holds, and nothing that has a salt."""

from __future__ import annotations

from array import array
from random import Random

from quire.core.levels.lower_level import LowerLevel
from quire.core.step import Content, MemoryKind
from quire.core.values import Level
from quire.engine.worker.kv_events import CacheEvents, block_hash
from tests.core.following import public_content
from tests.core.level_rig import BLOCK_SIZE, TieredRig
from tests.engine.vllm_events import Router

MEDIA = {Level.HOST: "CPU", Level.DISK: "STORAGE"}


def listen(rig: TieredRig) -> tuple[CacheEvents, Router]:
    """Announce the cache of a rig, as the publisher of a worker does."""
    events = CacheEvents(rig.cache.tree.root(""), BLOCK_SIZE)
    events.follow(rig.cache)
    return events, Router(BLOCK_SIZE)


def update(events: CacheEvents, router: Router) -> None:
    payload = events.pop(1.0)
    if payload is not None:
        router.take(payload)


def reachable(level: LowerLevel, keys: set[bytes]) -> set[int]:
    """Hashes of the full blocks of a level that follow content with these keys."""
    return {
        block_hash(one.content.key)
        for one in level
        if one.content.kind is MemoryKind.BLOCK and len(one.tokens) == 4 * BLOCK_SIZE and one.content.key in keys
    }


def public_keys(rig: TieredRig) -> set[bytes]:
    """Keys of all content that follows the root of the empty salt through content of any level."""
    found: set[bytes] = set()
    keys = [rig.cache.tree.root("")]
    nodes = {parent: [block.key for block in blocks if block.key] for parent, blocks in rig.cache.tree.positions()}
    while keys:
        parent = keys.pop()
        below = [one.content.key for level in rig.levels.levels for one in level.after(MemoryKind.BLOCK, parent) or ()]
        for key in (*nodes.get(parent, ()), *below):
            if key not in found:
                found.add(key)
                keys.append(key)
    return found


def test_a_router_follows_all_tiers_through_random_traffic() -> None:
    rig = TieredRig(host_bytes=120, has_disk=True, num_blocks=17)
    events, router = listen(rig)
    random = Random(3)
    heads = [[random.randrange(900) for _ in range(random.randrange(4, 20))] for _ in range(5)]
    for number in range(120):
        prompt = [*random.choice(heads), *[random.randrange(900) for _ in range(random.randrange(1, 9))]]
        rig.compute(prompt, max_tokens=2, salt=random.choice(("", "", "tenant")))
        if number % 7 == 0:
            rig.idle()
        if number == 60:
            rig.cache.clear()
            rig.store.stored[Level.HOST].clear()
            rig.store.stored[Level.DISK].clear()
        update(events, router)
        keys = public_keys(rig)
        for level in rig.levels.levels:
            assert set(router.media.get(MEDIA[level.level], {})) == reachable(level, keys)
        assert set(router.device) == {block_hash(key) for key in public_content(rig.cache.tree)}
    assert router.num_stored > 100
    assert router.num_removed > 50


def test_content_of_earlier_processes_is_announced_parents_first() -> None:
    rig = TieredRig(has_disk=True)
    contents = rig.contents(range(100, 121), range(5))
    chain = rig.cache.tree.chain(array("I", range(300, 308)), "tenant")
    salted = [Content(MemoryKind.BLOCK, chain.key(n), chain.parent_key(n), chain.block(n)) for n in range(2)]
    rig.levels.restore(Level.DISK, [*reversed(contents), *salted])
    events, router = listen(rig)
    update(events, router)
    assert list(router.media["STORAGE"]) == [block_hash(content.key) for content in contents]
