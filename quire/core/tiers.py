"""Tiers below the device: host memory and disk.

The prefix tree describes the device only. Content of lower tiers is found by the same chain keys, after a match on the
device has ended. A prefix that is found there is loaded into new blocks and published in the tree; then it is a prefix
hit like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.core.block_pool import BlockPool
from quire.core.chain import TokenChain
from quire.core.hybrid import HybridMemory
from quire.core.loads import Loaded, PrefixLoad, PrefixLoads
from quire.core.lower_tier import NS_PER_S, LowerTier
from quire.core.prefix import PrefixHit, PrefixTree
from quire.core.saves import SaveLimits, Saves
from quire.core.step import Content, Load, MemoryKind, Tier, Transfers
from quire.core.tier_search import Reach, TierSearch

MIN_TIMEOUT_NS = 2_000_000_000  # a load is given up after this, or after TIMEOUT_FACTOR times its expected duration
TIMEOUT_FACTOR = 10
LEARNED_PIECES = 4  # a load of at least this many shows the speed of its tier
RETRY_NS = 60_000_000_000  # after this long without a load, one is made although it may not pay


@dataclass(frozen=True, slots=True)
class LowerTierStats:
    """Content of one tier, and counters since the start."""

    tier: str
    num_pieces: int  # blocks, window blocks and states
    num_bytes: int
    max_bytes: int | None  # of a disk, for all models that share its folder; None: not known
    num_loads: int  # prefixes
    num_loaded_tokens: int
    num_loaded_bytes: int
    num_failed_loads: int  # pieces that were damaged or missing, and loads that were late
    num_saves: int  # pieces
    num_failed_saves: int
    num_evictions: int
    break_even_tokens: int | None  # loads of fewer tokens are slower than computing them; None: never faster


@dataclass(slots=True)
class _Counts:
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_loaded_bytes: int = 0
    num_failed_loads: int = 0
    num_saves: int = 0
    num_failed_saves: int = 0
    num_lost: int = 0


class Tiers:
    """The tiers below the device: stored content, loads and saves."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: BlockPool,
        hybrid: HybridMemory | None,
        tiers: Sequence[LowerTier],
        limits: SaveLimits,
    ) -> None:
        self.tiers = tuple(tiers)  # the fastest first
        self._by_tier = {tier.tier: tier for tier in tiers}
        self._counts = {tier.tier: _Counts() for tier in tiers}
        self._block_size = tree.block_size
        # The first searches all tiers, the next one not the slowest, and so on.
        self._searches = [
            TierSearch(self.tiers[:count], tree.block_size, hybrid) for count in range(len(self.tiers), 0, -1)
        ]
        self.loads = PrefixLoads(tree, pool, hybrid)
        self.saves = Saves(tree, pool, hybrid, tiers, limits=limits)
        self.ns_per_token: int | None = None  # measured duration of computing a prompt token; None: unknown
        # Called with the first pieces of a load while memory for the others is taken, which takes milliseconds. The
        # plan has the others, at least one. Not called if content must be saved before it is overwritten.
        self.on_loads: Callable[[tuple[Load, ...]], None] | None = None
        self._new_loads: list[Load] = []
        self._num_loading_bytes: Counter[Tier] = Counter()  # of loads in flight that are not abandoned
        self._num_late: Counter[Tier] = Counter()  # loads in flight after their deadline, by their slowest tier
        self._now_ns = 0
        self._last_begin_ns = 0  # start of the last load, or of this process

    @property
    def num_loading_bytes(self) -> Mapping[Tier, int]:
        """Bytes of the loads in flight for which requests wait."""
        return self._num_loading_bytes

    # Whether a load pays

    def find(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """How far the tiers extend a hit; None if not at all."""
        return self._searches[0].find(chain, limit, hit)

    def choose(self, chain: TokenChain, limit: int, hit: PrefixHit) -> Reach | None:
        """The longest reach that is worth a load; None if computing the tokens is faster.

        If a load from all tiers is slower than computing, one from the faster tiers alone is considered.
        """
        for search in self._searches:
            reach = search.find(chain, limit, hit)
            if reach is None:
                return None
            if self._pays(hit, reach):
                return reach
        return None

    def _pays(self, hit: PrefixHit, reach: Reach) -> bool:
        """Whether a load is faster than computing its tokens. False for a tier with a load that is late.

        Loads and computations in flight are not considered: a request waits behind others in either case. A load is
        also tried if there was none for a while, because a disk that was slow may be fast again.
        """
        if self._num_late[reach.source]:
            return False
        if self.ns_per_token is None or self._now_ns - self._last_begin_ns >= RETRY_NS:
            return True
        return self._load_ns(self._num_bytes(reach)) < (reach.start - hit.start) * self.ns_per_token

    def _load_ns(self, num_bytes: Counter[Tier]) -> int:
        """Expected duration of loads of this many bytes from each tier."""
        return sum(
            tier.speed.load_ns(num_bytes[tier.tier])
            for tier in self.tiers
            if tier.speed is not None and num_bytes[tier.tier]
        )

    def _num_bytes(self, reach: Reach) -> Counter[Tier]:
        """Number of bytes that a load reads from each tier."""
        num_bytes: Counter[Tier] = Counter()
        for tier, count in Counter([stored.tier for stored in reach.blocks]).items():
            num_bytes[tier] = count * self._by_tier[tier].sizes[MemoryKind.BLOCK]
        for stored in reach.pieces[len(reach.blocks) :]:
            num_bytes[stored.tier] += self._by_tier[stored.tier].sizes[stored.content.kind]
        return num_bytes

    def break_even(self, tier: LowerTier) -> int | None:
        """Number of tokens from which on a load pays. None: it never does."""
        if tier.speed is None or self.ns_per_token is None:
            return 0
        token_bytes = max(tier.sizes[MemoryKind.BLOCK] or tier.sizes[MemoryKind.WINDOW], 1) // self._block_size
        saved_ns = self.ns_per_token - tier.speed.load_ns(token_bytes) + tier.speed.latency_ns
        return None if saved_ns <= 0 else -(-tier.speed.latency_ns // saved_ns)

    # Loads

    def begin(self, hit: PrefixHit, reach: Reach, now_ns: int) -> PrefixLoad:
        """Start a load. `PrefixLoads.shortage` must not be positive."""
        num_bytes = self._num_bytes(reach)
        expected_ns = self._load_ns(self._num_loading_bytes + num_bytes)  # behind those in flight
        self._last_begin_ns = now_ns
        load = self.loads.begin(hit, reach, now_ns + max(MIN_TIMEOUT_NS, TIMEOUT_FACTOR * expected_ns))
        new: list[Load] = []
        for first in self.loads.take_blocks(load):
            new += load.loads_of_blocks(first)
            is_last = len(load.blocks) == len(reach.blocks)
            if self.on_loads is not None and not is_last and not self.saves.has_chosen:
                self.on_loads(tuple(new))
                new.clear()
        self._new_loads += new
        self._new_loads += load.loads_of_others()
        self._num_loading_bytes.update(num_bytes)
        for stored in reversed(reach.pieces):  # the first block of a prefix is the last to be evicted
            self._by_tier[stored.tier].touch(stored.content)
        return load

    def finish(self, load: PrefixLoad, failures: Collection[Content], read_ns: int) -> Loaded:
        """End a load. Failed pieces are forgotten."""
        loaded = self.loads.finish(load, failures)
        if load.is_alone and not failures and read_ns:
            self._learn_speed(load, read_ns)
        self._num_late[load.source] -= load.is_late
        if not load.is_abandoned:
            self._num_loading_bytes.subtract(self._num_bytes(load.reach))
        for stored in load.reach.pieces:
            counts, tier = self._counts[stored.tier], self._by_tier[stored.tier]
            if stored.content in failures:
                counts.num_failed_loads += 1
                if tier.remove(stored.content) and stored.tier is Tier.HOST:
                    self.saves.drop(stored.content)
            else:
                counts.num_loaded_bytes += tier.sizes[stored.content.kind]
        counts = self._counts[load.source]
        counts.num_loads += 1
        counts.num_loaded_tokens += loaded.num_tokens
        return loaded

    def _learn_speed(self, load: PrefixLoad, took_ns: int) -> None:
        """Adjust the speed of the disk to a load: files may be in the page cache, or on a busy disk."""
        tier = self._by_tier[load.source]
        num_bytes = sum(tier.sizes[stored.content.kind] for stored in load.reach.pieces if stored.tier is tier.tier)
        if tier.speed is not None and num_bytes >= LEARNED_PIECES * tier.sizes[MemoryKind.BLOCK]:
            seen = num_bytes * NS_PER_S // max(took_ns - tier.speed.latency_ns, 1)
            tier.speed = tier.speed._replace(bytes_per_s=max((3 * tier.speed.bytes_per_s + seen) // 4, 1))

    def expire(self, now_ns: int) -> list[PrefixLoad]:
        """Loads whose waiters should not wait any longer: they are late, or the cache was cleared.

        They stay in flight, because their copies cannot be recalled.
        """
        self._now_ns = now_ns
        self._last_begin_ns = self._last_begin_ns or now_ns
        ended = [load for load in self.loads if not load.is_abandoned and (load.is_void or load.deadline_ns <= now_ns)]
        for load in ended:
            load.is_abandoned = True
            load.is_late = not load.is_void
            self._num_late[load.source] += load.is_late
            self._counts[load.source].num_failed_loads += load.is_late
            self._num_loading_bytes.subtract(self._num_bytes(load.reach))
        return ended

    # Content that appears and disappears

    def restore(self, tier: Tier, contents: Iterable[Content]) -> int:
        """Add content that an earlier process stored, oldest first. Returns the number of pieces that were added."""
        return sum(self._by_tier[tier].add(content) is not None for content in contents)

    def lose(self, tier: Tier, contents: Iterable[Content]) -> None:
        """Forget content that the store of a tier evicted or found damaged."""
        for content in contents:
            if self._by_tier[tier].remove(content):
                self._counts[tier].num_lost += 1

    def finish_save(self, content: Content, tier: Tier, *, is_saved: bool) -> None:
        if self.saves.finish(content, tier, is_saved):
            counts = self._counts[tier]
            counts.num_saves += is_saved
            counts.num_failed_saves += not is_saved

    def pop_plan(self) -> Transfers:
        """Saves and loads of the next plan, and content to drop from host memory before them."""
        loads = tuple(self._new_loads)
        self._new_loads = []
        saves, drops = self.saves.pop_plan()
        return saves, loads, drops

    def clear(self) -> None:
        """Forget everything. Loads in flight end without effect."""
        for tier in self.tiers:
            tier.clear()
        self.loads.clear()
        self.saves.clear()

    def stats(self) -> tuple[LowerTierStats, ...]:
        return tuple(self._stats(tier) for tier in self.tiers)

    def _stats(self, tier: LowerTier) -> LowerTierStats:
        counts = self._counts[tier.tier]
        return LowerTierStats(
            tier=tier.tier,
            num_pieces=len(tier),
            num_bytes=tier.num_bytes,
            max_bytes=tier.max_bytes,
            num_loads=counts.num_loads,
            num_loaded_tokens=counts.num_loaded_tokens,
            num_loaded_bytes=counts.num_loaded_bytes,
            num_failed_loads=counts.num_failed_loads,
            num_saves=counts.num_saves,
            num_failed_saves=counts.num_failed_saves,
            num_evictions=tier.num_evictions + counts.num_lost,
            break_even_tokens=self.break_even(tier),
        )
