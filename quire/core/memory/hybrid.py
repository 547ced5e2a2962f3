"""Memory of a request besides its block table: window blocks and recurrent states.

A node of the prefix tree stands for the tokens of one block. It may have three kinds of memory, from three pools:

    keys and values of layers with full attention    the KV block, which is the node itself
    keys and values of layers with a window          a window block, attached to the node
    recurrent states                                 snapshots, found by the node's key and the tokens after it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum

from quire.core.cache.block import KVCacheBlock, StateSlot, WindowBlock
from quire.core.cache.context import Context, TokenChain
from quire.core.cache.prefix import FROM_ZERO, Continuation, PrefixHit, PrefixTree
from quire.core.memory.states import StateMemory, StateUse
from quire.core.memory.windows import WindowMemory
from quire.core.step import BlockCopy, SeqSlice
from quire.core.values import TOKEN_BYTES


class Place(StrEnum):
    """Positions of a prompt from which later requests are expected to continue.

    States are stored there, and window blocks before them are kept longer than others.
    """

    PROMPT = "prompt"  # its end: the same prompt again, other samples of it
    ANSWER = "answer"  # its end: the next turn of a conversation; stored when a request ends, not placed
    MESSAGE = "message"  # starts of messages: the same system text; the next turn, if the template omits reasoning
    BRANCH = "branch"  # where a second request differs from the first


ALL_PLACES = frozenset(Place)


def place_points(
    num_tokens: int,
    start: int,
    num_kv_tokens: int,
    boundaries: Sequence[int],
    places: Collection[Place],
    spacing: int,
) -> list[int]:
    """Positions within (start, num_tokens) to store states at, in order, at least `spacing` tokens apart.

    `num_kv_tokens`: cached prefix of the prompt; if it ends after `start`, the prompt differs there from a cached one,
    and no state is stored there yet. The last token of a prompt is always computed, so a state after all tokens would
    never be used.
    """
    last = num_tokens - 1
    wanted: set[int] = set()
    if Place.MESSAGE in places:
        wanted.update(boundaries)
    if Place.BRANCH in places:
        wanted.add(num_kv_tokens)
    if Place.PROMPT in places:
        wanted.add(last)
    points: list[int] = []
    for point in sorted(wanted):
        before = points[-1] if points else start
        if start < point <= last and (before == 0 or point - before >= spacing):
            points.append(point)
    return points


def choose_boundaries(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Of all positions where messages start: the end of the system text, the last message, and the answer."""
    return (*boundaries[:1], *boundaries[1:][-2:])


def add_point(points: list[int], point: int) -> None:
    """Insert a branch point that was found while the prompt is computed."""
    at = bisect_left(points, point)
    if at == len(points) or points[at] != point:
        points.insert(at, point)


WindowAt = Callable[[int], WindowBlock | None]  # block number -> the window block with its tokens


class Continuations:
    """Finds where a request continues after a prefix hit, in a model with windows or recurrent states.

    Cached keys and values of full attention are not enough for such a model. To continue after token t it also needs
    the keys and values of its window layers for the last `window` tokens before t, and the recurrent state after
    exactly t tokens. A continuation is the largest t for which all of them exist.
    """

    def __init__(self, block_size: int, window: int, states: StateMemory | None) -> None:
        self._block_size = block_size
        self._window = window  # 0: no layer has one
        self._states = states

    def first_block(self, position: int) -> int:
        """Number of the first block that a token at `position` sees through the window."""
        return max(position - self._window + 1, 0) // self._block_size

    def find(
        self, chain: TokenChain, blocks: Sequence[KVCacheBlock], num_kv_tokens: int, window_at: WindowAt
    ) -> Continuation:
        """The best continuation of a prefix whose full-attention KV exists for `num_kv_tokens`.

        `blocks`: its full blocks.
        """
        if self._states is None:
            candidates: Iterator[tuple[int, StateSlot | None]] = self._boundaries(num_kv_tokens)
        else:
            candidates = self._snapshots(chain, blocks, num_kv_tokens)
        blocked = num_kv_tokens  # no position after this has all of its window blocks
        for position, state in candidates:
            if position > blocked:
                continue
            if not self._window:
                return Continuation(position, state)
            missing = self._missing(position, window_at)
            if missing is None:
                return self._with_windows(position, state, window_at)
            blocked = missing * self._block_size
        return FROM_ZERO

    def _boundaries(self, num_kv_tokens: int) -> Iterator[tuple[int, StateSlot | None]]:
        """Positions to continue from without a state: the end, then every block boundary before it."""
        if num_kv_tokens % self._block_size:
            yield num_kv_tokens, None
        for position in range(num_kv_tokens // self._block_size * self._block_size, 0, -self._block_size):
            yield position, None

    def _snapshots(
        self, chain: TokenChain, blocks: Sequence[KVCacheBlock], num_kv_tokens: int
    ) -> Iterator[tuple[int, StateSlot | None]]:
        """Positions with a snapshot, last first."""
        assert self._states is not None
        size = self._block_size
        num_full, num_tail = divmod(num_kv_tokens, size)
        for number in range(num_full, -1, -1):
            key = chain.parent_key(number)
            found = self._states.pool.at(key)
            # The blocks of a running parent may not be in the tree, and other content may have the same key.
            if found is None or (number and blocks[number - 1].key != key):
                continue
            longest = num_tail if number == num_full else size - 1
            run = chain.run(number * size, number * size + longest)
            for length in range(longest, -1, -1):
                state = found.get(run[: length * TOKEN_BYTES])
                if state is not None and self._states.may_hold(state):
                    yield number * size + length, state

    def _missing(self, position: int, window_at: WindowAt) -> int | None:
        """The last block that a token at `position` sees and whose window block is not cached."""
        last = (position - 1) // self._block_size
        return next((n for n in range(last, self.first_block(position) - 1, -1) if window_at(n) is None), None)

    def _with_windows(self, position: int, state: StateSlot | None, window_at: WindowAt) -> Continuation:
        num_full, num_tail = divmod(position, self._block_size)
        blocks = [window_at(number) for number in range(self.first_block(position), num_full)]
        tail = window_at(num_full) if num_tail else None
        return Continuation(position, state, tuple(block for block in blocks if block is not None), tail)


class HybridMemory:
    """Window blocks and states of requests. A model may have either or both."""

    def __init__(
        self,
        tree: PrefixTree,
        blocks: Sequence[KVCacheBlock],
        can_cache: Callable[[Context, int], bool],
        *,
        window: int,
        num_window_blocks: int,
        num_states: int,
        num_live_states: int,
        places: Collection[Place],
    ) -> None:
        self._tree = tree
        self._can_cache = can_cache  # whether the content of this block of a request may be published
        self.windows = WindowMemory(num_window_blocks, window, tree.block_size, blocks) if num_window_blocks else None
        self.states = StateMemory(num_states, num_live_states, tree.block_size) if num_states else None
        self.places = frozenset(places)
        self._spacing = tree.block_size // 2  # of two points closer than this, one is used
        self._continuations = Continuations(tree.block_size, window if num_window_blocks else 0, self.states)
        tree.on_removal = self._forget

    def reserve(self, max_num_seqs: int, max_chunk_tokens: int) -> None:
        """Check that the pools are large enough for this scheduler."""
        if self.windows is not None:
            self.windows.reserve(max_chunk_tokens)
        if self.states is not None:
            self.states.reserve(max_num_seqs)

    # Queries

    def continue_hit(self, chain: TokenChain, hit: PrefixHit, parent: Context | None = None) -> PrefixHit:
        """Add to a hit where a request can continue. `parent`: the request whose blocks a fork shares."""
        found = self._continuations.find(chain, hit.blocks, hit.num_tokens, self._window_at(hit, parent))
        if found.start == hit.num_tokens and hit.is_adoptable and found.window_tail is not None:
            found = found._replace(is_window_adoptable=found.window_tail.ref_count == 0)
        return hit._replace(continuation=found)

    def _window_at(self, hit: PrefixHit, parent: Context | None) -> WindowAt:
        if self.windows is None:
            return _no_window
        if parent is not None:
            blocks, table = self.windows.pool.blocks, parent.window_table
            return lambda number: blocks[table[number]] if number < len(table) and table[number] else None
        nodes = hit.blocks if hit.tail is None else (*hit.blocks, hit.tail)
        return lambda number: cached_window(nodes[number])

    @property
    def num_releases(self) -> int:
        """Grows when window blocks are released; callers compare it to detect that memory was freed."""
        return 0 if self.windows is None else self.windows.pool.num_releases

    def num_blocks(self, context: Context) -> int:
        """Number of leading blocks for which a running request has all the memory to compute them."""
        num_blocks = len(context.block_table)
        return num_blocks if self.windows is None else min(num_blocks, len(context.window_table))

    def growth_shortage(self, context: Context, upto: int) -> int:
        """Number of window blocks that a running request lacks to compute up to `upto`."""
        if self.windows is None:
            return 0
        return self.windows.growth(context, upto) - self.windows.pool.num_free

    def start_shortage(self, context: Context, hit: PrefixHit, running: Sequence[Context]) -> int:
        """Number of window blocks that are missing to start a request beside the running ones."""
        if self.windows is None:
            return 0
        num_promised = sum(map(self.windows.debt, running))
        num_needed = self.windows.needed(context, hit.continuation or FROM_ZERO)
        return num_needed + num_promised - self.windows.pool.num_free

    # Verbs

    def begin(self, context: Context, hit: PrefixHit) -> list[BlockCopy]:
        """Assign memory to a request that just started from `hit`.

        Returns the copies of window blocks that the runner must make.
        """
        continuation = hit.continuation or FROM_ZERO
        context.points = place_points(
            len(context.tokens), hit.start, hit.num_tokens, context.boundaries, self.places, self._spacing
        )
        context.next_point = 0
        if self.states is not None:
            self.states.start(context, continuation.state)
        return [] if self.windows is None else self.windows.start(context, continuation)

    def grow(self, context: Context, upto: int) -> None:
        if self.windows is not None:
            self.windows.grow(context, upto)

    def plan_states(self, context: Context, end: int) -> StateUse:
        """The slots of the next slice of a context, which ends at `end`."""
        return (0, 0, ()) if self.states is None else self.states.plan(context, end)

    def can_roll_back(self, context: Context, end: int) -> bool:
        """Whether the next slice may end with drafts, of which some may turn out to be wrong."""
        return self.states is None or self.states.can_roll_back(context, end)

    def roll_back(self, context: Context, piece: SeqSlice) -> None:
        """Undo a slice whose drafts were not all right: continue from the state before it."""
        if self.states is not None:
            self.states.roll_back(context, piece)

    def note_branch(self, context: Context, position: int) -> None:
        """Store a state after `position` tokens: another request shares these and waits until they are computed."""
        is_near = any(0 <= position - point < self._spacing for point in context.points)
        if Place.BRANCH in self.places and position > context.num_planned and not is_near:
            add_point(context.points, position)

    def commit(self, context: Context, chain: TokenChain) -> None:
        """Publish window blocks and states that exist now, and release those behind the window."""
        if self.states is not None:
            self.states.commit(context, chain, self._can_cache)
        if self.windows is not None:
            if self._can_cache(context, 0):
                self.windows.publish(context)
            self.windows.release_passed(context)

    def settle(self, copies: Sequence[BlockCopy]) -> None:
        if self.windows is not None:
            self.windows.settle(copies)

    def release(self, context: Context, chain: TokenChain) -> None:
        """Release everything. What was computed stays in the cache until its memory is taken."""
        if self.states is not None:
            self.states.release(context, chain, self._can_cache, is_kept=Place.ANSWER in self.places)
        if self.windows is not None:
            if self._can_cache(context, 0):
                self.windows.publish(context)
            self.windows.release(context)
        context.points = []

    def _forget(self, block: KVCacheBlock) -> None:
        """Drop the window block and the states of a block that leaves the tree.

        If a twin with the same tokens stays in the tree, it gets them.
        """
        heir = None if block.key is None else self._tree.find(block.key)
        if self.windows is not None and (window := block.window) is not None:
            if heir is not None and heir is not block and heir.window is None:
                heir.window, window.node, block.window = window, heir, None
            else:
                self.windows.pool.detach(block)
        if self.states is not None and block.key is not None and heir is None:
            self.states.pool.forget(block.key)


def _no_window(_number: int) -> None:
    return None


def cached_window(node: KVCacheBlock) -> WindowBlock | None:
    """The window block of a node, or of a twin with the same tokens."""
    if node.window is not None or node.twins is None:
        return node.window
    return next((twin.window for twin in node.twins if twin.window is not None), None)
