"""Memory of a request besides its block table: window blocks and recurrent states.

A node of the prefix tree stands for the tokens of one block. It may have three kinds of memory, from three pools:

    keys and values of layers with full attention    the KV block, which is the node itself
    keys and values of layers with a window          a window block, attached to the node
    recurrent states                                 snapshots, found by the node's key and the tokens after it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from quire.core.block import KVCacheBlock
from quire.core.chain import TokenChain
from quire.core.continuation import FROM_ZERO, Continuations, WindowAt
from quire.core.placement import Place, add_point, place_points
from quire.core.prefix import PrefixHit, PrefixTree
from quire.core.request import Request
from quire.core.state_memory import StateMemory, StateUse
from quire.core.step import BlockCopy, SeqSlice
from quire.core.window_memory import WindowMemory
from quire.core.window_pool import WindowBlock


class HybridMemory:
    """Window blocks and states of requests. A model may have either or both."""

    def __init__(
        self,
        tree: PrefixTree,
        blocks: Sequence[KVCacheBlock],
        can_cache: Callable[[Request, int], bool],
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

    def continue_hit(self, chain: TokenChain, hit: PrefixHit, parent: Request | None = None) -> PrefixHit:
        """Add to a hit where a request can continue. `parent`: the request whose blocks a fork shares."""
        found = self._continuations.find(chain, hit.blocks, hit.num_tokens, self._window_at(hit, parent))
        if found.start == hit.num_tokens and hit.is_adoptable and found.window_tail is not None:
            found = found._replace(is_window_adoptable=found.window_tail.ref_count == 0)
        return hit._replace(continuation=found)

    def _window_at(self, hit: PrefixHit, parent: Request | None) -> WindowAt:
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

    def num_blocks(self, request: Request) -> int:
        """Number of leading blocks for which a running request has all the memory to compute them."""
        num_blocks = len(request.block_table)
        return num_blocks if self.windows is None else min(num_blocks, len(request.window_table))

    def growth_shortage(self, request: Request, upto: int) -> int:
        """Number of window blocks that a running request lacks to compute up to `upto`."""
        if self.windows is None:
            return 0
        return self.windows.growth(request, upto) - self.windows.pool.num_free

    def start_shortage(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> int:
        """Number of window blocks that are missing to start a request beside the running ones."""
        if self.windows is None:
            return 0
        num_promised = sum(map(self.windows.debt, running))
        num_needed = self.windows.needed(request, hit.continuation or FROM_ZERO)
        return num_needed + num_promised - self.windows.pool.num_free

    # Verbs

    def begin(self, request: Request, hit: PrefixHit) -> list[BlockCopy]:
        """Assign memory to a request that just started from `hit`.

        Returns the copies of window blocks that the runner must make.
        """
        continuation = hit.continuation or FROM_ZERO
        request.points = place_points(
            len(request.tokens), hit.start, hit.num_tokens, request.boundaries, self.places, self._spacing
        )
        request.next_point = 0
        if self.states is not None:
            self.states.start(request, continuation.state)
        return [] if self.windows is None else self.windows.start(request, continuation)

    def grow(self, request: Request, upto: int) -> None:
        if self.windows is not None:
            self.windows.grow(request, upto)

    def plan_states(self, request: Request, end: int) -> StateUse:
        """The slots of the next slice of a request, which ends at `end`."""
        return (0, 0, ()) if self.states is None else self.states.plan(request, end)

    def can_roll_back(self, request: Request, end: int) -> bool:
        """Whether the next slice may end with drafts, of which some may turn out to be wrong."""
        return self.states is None or self.states.can_roll_back(request, end)

    def roll_back(self, request: Request, piece: SeqSlice) -> None:
        """Undo a slice whose drafts were not all right: continue from the state before it."""
        if self.states is not None:
            self.states.roll_back(request, piece)

    def note_branch(self, request: Request, position: int) -> None:
        """Store a state after `position` tokens: another request shares these and waits until they are computed."""
        is_near = any(0 <= position - point < self._spacing for point in request.points)
        if Place.BRANCH in self.places and position > request.num_planned and not is_near:
            add_point(request.points, position)

    def commit(self, request: Request, chain: TokenChain) -> None:
        """Publish window blocks and states that exist now, and release those behind the window."""
        if self.states is not None:
            self.states.commit(request, chain, self._can_cache)
        if self.windows is not None:
            if self._can_cache(request, 0):
                self.windows.publish(request)
            self.windows.release_passed(request)

    def settle(self, copies: Sequence[BlockCopy]) -> None:
        if self.windows is not None:
            self.windows.settle(copies)

    def release(self, request: Request, chain: TokenChain) -> None:
        """Release everything. What was computed stays in the cache until its memory is taken."""
        if self.states is not None:
            self.states.release(request, chain, self._can_cache, is_kept=Place.ANSWER in self.places)
        if self.windows is not None:
            if self._can_cache(request, 0):
                self.windows.publish(request)
            self.windows.release(request)
        request.points = []

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
