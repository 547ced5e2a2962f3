"""Block tables of requests: prefix matches, growth, publication and release.

Knows requests, counts and blocks. Knows nothing of scheduling order, batch rows or token budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from quire.core.cache import (
    BLOCK_SIZE,
    NO_HIT,
    BlockPool,
    CacheExplanation,
    Digest,
    PoolStats,
    PrefixHit,
    PrefixTree,
    StateStats,
    StopReason,
    TokenChain,
    check_block_size,
    hash_block_tokens,
)
from quire.core.levels.levels import NO_SAVES, Levels, LevelStats, SaveLimits
from quire.core.levels.lower_level import LowerLevel, Reach, Search
from quire.core.memory import ALL_PLACES, Memory, PinBoard, Place
from quire.core.request import Context, Request
from quire.core.step import BlockCopy
from quire.errors import ContextTooLong, OutOfBlocks


@dataclass(frozen=True, slots=True)
class CacheStats(PoolStats):
    """Current state of the pool, and counters of the cache since it was created."""

    num_shared: int = 0  # with two or more references
    num_pins: int = 0
    num_pinned: int = 0  # distinct pinned blocks
    num_queried_tokens: int = 0  # looked up by first admissions
    num_hit_tokens: int = 0  # found by first admissions
    num_recovered_tokens: int = 0  # found by preempted requests when they resumed
    num_partial_hits: int = 0  # tails copied
    num_adoptions: int = 0  # tails continued in place
    num_twins: int = 0  # blocks filled with content that was already in the tree
    num_collisions: int = 0
    num_recomputed_tokens: int = 0  # computed again although their keys and values were found: no state or window
    windows: PoolStats | None = None  # None: the model has no window blocks
    states: StateStats | None = None  # None: the model has no recurrent states
    levels: tuple[LevelStats, ...] = ()  # below the device, the fastest first

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class KVCacheManager:
    """Assigns blocks to requests: matches prefixes, grows and releases block tables, and pins prefixes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        secret: bytes = b"",
        is_caching: bool = True,
        digest: Digest = hash_block_tokens,
        window: int = 0,
        num_window_blocks: int = 0,
        num_states: int = 0,
        num_live_states: int = 2,
        places: Collection[Place] = ALL_PLACES,
        levels: Sequence[LowerLevel] = (),
        save_limits: SaveLimits = NO_SAVES,
    ) -> None:
        """`levels`: below the device, the fastest first."""
        self.block_size = check_block_size(block_size)
        self.is_caching = is_caching
        self.tree = PrefixTree(block_size, secret=secret, max_ghosts=num_blocks, digest=digest)
        self.pool = BlockPool(num_blocks, self.tree)
        self.memory = Memory(
            self.tree,
            self.pool,
            self.can_publish,
            window=window,
            num_window_blocks=num_window_blocks,
            num_states=num_states,
            num_live_states=num_live_states,
            places=places,
        )
        self.pins = PinBoard(self.memory)
        self.levels = Levels(self.memory, levels if is_caching else (), save_limits)
        self._device = Search(self.memory)
        self._counts: Counter[str] = Counter()  # fields of `CacheStats`

    @property
    def max_model_len(self) -> int:
        """The longest context that fits into the whole pool."""
        return self.pool.num_usable * self.block_size

    # Queries

    def chain(self, context: Context) -> TokenChain:
        if context.chain is None:
            context.chain = self.tree.chain(context.tokens, context.salt)
        return context.chain

    def match(self, request: Request) -> PrefixHit:
        """Find the cached prefix of a request's context.

        The last token is excluded: it must be computed.
        """
        if not self._is_searched(request):
            return NO_HIT
        hit = self.tree.match(self.chain(request), len(request.tokens) - 1)
        return self._device.continue_hit(self.chain(request), hit)

    def reach(self, request: Request, hit: PrefixHit) -> Reach | None:
        """How far lower levels extend a hit; None if not at all."""
        if not self._is_searched(request):
            return None
        return self.levels.find(self.chain(request), len(request.tokens) - 1, hit)

    def worthwhile_reach(self, request: Request, hit: PrefixHit, *, may_read: bool = True) -> Reach | None:
        """How far lower levels extend a hit with loads that save time, without reads of the disk unless `may_read`."""
        if not self.levels.levels or not self._is_searched(request):
            return None
        return self.levels.choose(self.chain(request), len(request.tokens) - 1, hit, may_read=may_read)

    def was_evicted(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the full block after a hit was evicted recently."""
        end = (len(hit.blocks) + 1) * self.block_size
        is_wanted = self._is_searched(request) and end < len(request.tokens)
        return is_wanted and self.tree.was_evicted(self.chain(request).key(len(hit.blocks)))

    def _is_searched(self, request: Request) -> bool:
        return self.is_caching and request.sampling.prompt_logprobs is None

    def fork(self, parent: Request, child: Request) -> PrefixHit:
        """Hit of `child` on the blocks that `parent` has computed.

        Needs no published blocks. Returns `NO_HIT` if the tokens or salts differ. The tail is always copied: the parent
        continues to write into its own block.
        """
        num_tokens = min(parent.num_computed, len(child.tokens) - 1)
        if child.salt != parent.salt or child.tokens[:num_tokens] != parent.tokens[:num_tokens]:
            return NO_HIT
        num_full, num_tail = divmod(num_tokens, self.block_size)
        blocks = [self.pool.blocks[block_id] for block_id in parent.block_table[: num_full + (num_tail > 0)]]
        tail = blocks.pop() if num_tail else None
        hit = PrefixHit(tuple(blocks), tail, num_tail, False, num_tokens, is_fork=True)
        return self._device.continue_hit(self.chain(child), hit, parent)

    def without_tail(self, request: Request, hit: PrefixHit) -> PrefixHit:
        """The part of a hit that needs no copy of a block."""
        parent = request.parent if hit.is_fork else None
        return self._device.continue_hit(self.chain(request), hit.without_tail(), parent)

    def shortage(self, request: Request, upto: int, hit: PrefixHit = NO_HIT) -> int:
        """Number of free blocks that `grow` lacks. If negative: the number that would be left."""
        num_new = -(-upto // self.block_size) - len(request.block_table) - len(hit.blocks)
        num_revived = [block.ref_count for block in hit.blocks].count(0)
        if hit.tail is not None:
            if hit.is_adoptable:
                num_new -= 1
            num_revived += not hit.tail.ref_count
        return num_new + num_revived - len(self.pool.free)

    def check_fits(self, num_prompt_tokens: int, max_model_len: int) -> None:
        """Raise `ContextTooLong` if a prompt could not run even on an empty pool."""
        if num_prompt_tokens + 1 > max_model_len:
            why = ""
            if max_model_len == self.max_model_len:
                why = f" (the whole KV pool: {self.pool.num_usable} blocks of {self.block_size})"
            raise ContextTooLong(
                f"prompt of {num_prompt_tokens} tokens and one to generate exceed"
                f" the context of {max_model_len} tokens{why}"
            )

    def explain(self, request: Request, hit: PrefixHit, is_in_flight: Callable[[int], bool]) -> CacheExplanation:
        """Explain where this hit of the request ends and why."""
        num_kv_tokens = 0
        if not self._is_searched(request):
            is_complete = 0 < hit.start == len(request.tokens) - 1  # a hit on the blocks of a parent
            reason = StopReason.COMPLETE if is_complete else StopReason.OFF
        elif hit.start == hit.num_tokens:
            reason = self.tree.explain(self.chain(request), len(request.tokens) - 1, hit, is_in_flight)
        else:
            reason = StopReason.NO_STATE if self.memory.states.is_used else StopReason.NO_WINDOW
            num_kv_tokens = hit.num_tokens
        return CacheExplanation(hit.start, hit.start // self.block_size, hit.start, reason, num_kv_tokens)

    def can_publish(self, context: Context, index: int) -> bool:
        """Whether the block before `index` is in the tree. False after a `clear` or a collision, or if nothing is."""
        if index == 0 or not self.is_caching:
            return self.is_caching
        parent = self.pool.blocks[context.block_table[index - 1]]
        return parent.key is not None and parent.key == self.chain(context).key(index - 1)

    def stats(self) -> CacheStats:
        windows, states = self.memory.windows, self.memory.states
        return CacheStats(
            **asdict(self.pool.stats()),
            num_shared=self.pool.num_shared,
            num_pins=len(self.pins),
            num_pinned=self.pins.num_blocks,
            num_twins=self.tree.num_twins,
            num_collisions=self.tree.num_collisions,
            **self._counts,
            windows=windows.pool.stats() if windows.is_used else None,
            states=states.pool.state_stats() if states.is_used else None,
            levels=self.levels.stats(),
        )

    # Verbs

    def grow(self, request: Request, upto: int, hit: PrefixHit = NO_HIT) -> list[BlockCopy]:
        """Extend the block table to cover [0, upto).

        Returns the copies that the runner must make. Raises `OutOfBlocks` and changes nothing if `shortage` is
        positive. A request without blocks starts from `hit`, whose blocks are shared before new ones are taken, because
        taking may evict them.
        """
        if (missing := self.shortage(request, upto, hit)) > 0:
            raise OutOfBlocks(f"{request!r} cannot grow to {upto} tokens: {missing} blocks are missing")
        copies = self._start(request, hit) if not request.block_table else []
        table = request.block_table
        num_new = -(-upto // self.block_size) - len(table)
        if num_new > 0:
            table.extend([block.block_id for block in self.pool.take(num_new)])
        return copies

    def _start(self, request: Request, hit: PrefixHit) -> list[BlockCopy]:
        pool = self.pool
        pool.share(hit.blocks)
        if not request.num_preemptions:  # a resumed request uses its own content
            self.levels.saves.note_use(hit.blocks)
        table = [block.block_id for block in hit.blocks]
        num_existing = hit.num_tokens  # tokens whose KV exists now; a copied tail exists only after its step has run
        copies: list[BlockCopy] = []
        if hit.tail is not None and hit.is_adoptable:
            pool.share((hit.tail,))
            table.append(hit.tail.block_id)
        elif hit.tail is not None:
            pool.share((hit.tail,))  # until the copy is done
            (block,) = pool.take(1)
            table.append(block.block_id)
            copies.append(BlockCopy(hit.tail.block_id, block.block_id))
            num_existing -= hit.num_tail_tokens
        request.block_table = table
        request.num_published = len(hit.blocks)
        request.kv_start = hit.num_tokens
        request.num_computed = min(num_existing, hit.start)
        request.num_planned = hit.start
        self._record(request, hit)
        return copies

    def extend(self, request: Request, upto: int) -> None:
        """Give a running request the blocks to compute up to `upto`. `growth_shortage` must not be positive."""
        self.grow(request, upto)
        if self.memory.windows.is_used:
            self.memory.windows.grow(request, upto)

    def growth_shortage(self, request: Request, upto: int) -> int:
        """Number of free blocks that `extend` lacks, in the pool that lacks more."""
        missing, windows = self.shortage(request, upto), self.memory.windows
        return max(missing, windows.growth(request, upto) - windows.pool.num_free) if windows.is_used else missing

    def settle(self, copies: Sequence[BlockCopy], window_copies: Sequence[BlockCopy] = ()) -> None:
        """Release the sources of copies whose step is done."""
        for pool, done in zip(self.memory.pools, (copies, window_copies), strict=False):
            pool.release([pool.blocks[copy.source] for copy in done])

    def publish(self, request: Request) -> None:
        """Publish the full blocks whose KV exists now."""
        num_full = request.num_computed // self.block_size
        if not self.is_caching:
            request.num_published = num_full
        if request.num_published >= num_full:
            return
        chain = self.chain(request)
        chain.key(num_full - 1)  # computes all keys at once, which is faster
        while request.num_published < num_full:
            index = request.num_published
            request.num_published += 1
            if self.can_publish(request, index):
                block = self.pool.blocks[request.block_table[index]]
                self.pool.publish(block, chain.parent_key(index), chain.key(index), chain.block(index))

    def publish_tail(self, request: Request) -> None:
        """Publish the last, partly filled block."""
        index, num_tail = divmod(request.num_computed, self.block_size)
        if not num_tail or not self.can_publish(request, index) or request.num_computed < request.kv_start:
            return
        chain = self.chain(request)
        tokens = chain.run(index * self.block_size, request.num_computed)
        block = self.pool.blocks[request.block_table[index]]
        if block.tokens != tokens:
            self.pool.publish(block, chain.parent_key(index), None, tokens)

    def release(self, request: Request) -> None:
        """Release all blocks, tail first.

        Computed content stays in the cache until its block is taken.
        """
        self.publish_tail(request)
        if self.memory.is_hybrid:
            self.memory.release_context(request, self.chain(request))
        table = request.block_table
        request.block_table = []  # a new list: a plan in flight still reads the old one
        request.num_computed = request.num_planned = request.num_in_flight = request.num_published = 0
        request.kv_start = request.num_drafts = 0
        request.draft = ()
        self.pool.release([self.pool.blocks[block_id] for block_id in table])

    def pin(self, pin_id: str, context: Context, num_tokens: int, expires_ns: int) -> int:
        """Pin the cached full blocks of the first `num_tokens` until `expires_ns`.

        Returns the number of pinned tokens.
        """
        chain = self.chain(context)
        hit = self._device.continue_hit(chain, self.tree.match(chain, num_tokens).without_tail())
        self.levels.saves.note_use(hit.blocks)
        return self.pins.pin(pin_id, hit.blocks, expires_ns, hit.continuation) * self.block_size

    def clear(self) -> None:
        """Drop all cached content, in all levels, and all pins. Running requests keep their blocks."""
        self.pins.clear()
        self.levels.clear()
        self.pool.clear()
        self.memory.states.pool.clear()

    def evict_unused(self) -> int:
        """Evict all content that no request and no pin holds. Returns the number of evicted blocks."""
        num_evicted = self.pool.evict_unused()
        self.memory.states.pool.evict_unused()
        return num_evicted

    def _record(self, request: Request, hit: PrefixHit) -> None:
        counts = self._counts
        if request.num_preemptions:
            counts["num_recovered_tokens"] += hit.start
        elif self._is_searched(request):
            counts["num_queried_tokens"] += len(request.tokens) - 1
            counts["num_hit_tokens"] += hit.start
        counts["num_recomputed_tokens"] += hit.num_tokens - hit.start
        counts["num_adoptions"] += hit.is_adoptable
        counts["num_partial_hits"] += hit.tail is not None and not hit.is_adoptable
