"""Memory of contexts: the pools of a runner, window blocks and recurrent states of requests, and pins.

A request holds window blocks only for the tokens that its next token can see. Those behind the window are released
while it runs. A released block keeps its content as long as the KV block of the same tokens is in the prefix tree
and no other request takes it.

A snapshot is a stored state from which other requests continue. It is found by the tokens that it covers: the key of
the last full block before it, and the tokens after that block. It is immutable. A request that continues from it reads
it and writes the next state to a slot of its own.

Pins are prefixes held in the cache until a deadline, and dropped before a request is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from quire.core.cache import (
    EMPTY_SLOT,
    FROM_ZERO,
    NULL_BLOCK_ID,
    BlockPool,
    Continuation,
    KVCacheBlock,
    Pool,
    PrefixHit,
    PrefixTree,
    StatePool,
    StateSlot,
    TokenChain,
    WindowBlock,
    WindowPool,
)
from quire.core.request import Context
from quire.core.step import BlockCopy, SeqSlice, StateSnapshot
from quire.errors import InvalidRequest


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


CanCache = Callable[[Context, int], bool]  # whether the content of this block of a context may be published


class Held(NamedTuple):
    """Memory that a pin or a load holds, by kind."""

    blocks: tuple[KVCacheBlock, ...] = ()
    windows: tuple[WindowBlock, ...] = ()
    states: tuple[StateSlot, ...] = ()


class WindowGroup:
    """Extends, publishes and releases the window tables of requests.

    The window table has one entry per block of the context. Entries behind the window are 0.
    """

    def __init__(
        self, num_blocks: int, window: int, block_size: int, kv_blocks: Sequence[KVCacheBlock], can_cache: CanCache
    ) -> None:
        if num_blocks == 1:
            raise InvalidRequest(f"num_window_blocks = {num_blocks} is less than 2")
        if num_blocks and window < 1:
            raise InvalidRequest(f"{window = } is less than 1")
        self.is_used = num_blocks > 0
        self.pool = WindowPool(max(num_blocks, 1))
        self.window = window
        self._block_size = block_size
        self._kv_blocks = kv_blocks
        self._can_cache = can_cache
        self._max_chunk_tokens = 1

    def reserve(self, max_num_seqs: int, max_chunk_tokens: int) -> None:  # noqa: ARG002
        """Check that a request that runs alone always fits."""
        self._max_chunk_tokens = max_chunk_tokens
        needed = self._peak(max_chunk_tokens)
        if needed > self.pool.num_usable:
            raise InvalidRequest(
                f"num_window_blocks = {self.pool.num_usable + 1} is less than {needed + 1}: a window of {self.window}"
                f" tokens and a chunk of max_chunk_tokens = {max_chunk_tokens} need them"
            )

    def _peak(self, num_new: int) -> int:
        """Blocks that a request holds at most while it computes `num_new` tokens, with the source of a tail copy."""
        return (self.window - 1 + num_new) // self._block_size + 3

    def first_block(self, position: int) -> int:
        """Number of the first block that a token at `position` sees."""
        return max(position - self.window + 1, 0) // self._block_size

    # Room

    def shortage(self, context: Context, continuation: Continuation, running: Sequence[Context]) -> int:
        """Number of blocks that are missing to start a request beside the running ones."""
        if not self.is_used:
            return 0
        num_promised = sum(map(self.debt, running))
        return self.needed(context, continuation) + num_promised - self.pool.num_free

    def growth(self, context: Context, upto: int) -> int:
        """Number of new blocks that a running request needs to compute up to `upto`."""
        return -(-upto // self._block_size) - len(context.window_table)

    def debt(self, context: Context) -> int:
        """Number of blocks that a running request may still need in addition to those it holds.

        Two chunks: one in flight, whose window is not released yet, and the next.
        """
        if not self.is_used:
            return 0
        num_new = 2 * min(max(len(context.tokens) - context.num_computed, 1), self._max_chunk_tokens)
        num_held = len(context.window_table) - context.num_windows_passed
        return max(min(self._peak(num_new), -(-context.token_limit // self._block_size)) - num_held, 0)

    def needed(self, context: Context, continuation: Continuation) -> int:
        """Number of free blocks that a request needs to start: those it takes, and cached ones that it will hold."""
        num_new = min(len(context.tokens) - continuation.start, self._max_chunk_tokens)
        num_most = min(self._peak(num_new), -(-len(context.tokens) // self._block_size) + 1)
        return num_most - sum(block.ref_count > 0 for block in continuation.windows)

    # Verbs

    def start(self, context: Context, continuation: Continuation) -> list[BlockCopy]:
        """Start the window table of a request from a continuation. Returns the copies that the runner must make."""
        pool, table = self.pool, [NULL_BLOCK_ID] * (continuation.start // self._block_size)
        first = len(table) - len(continuation.windows)
        pool.share(continuation.windows)
        table[first:] = [block.block_id for block in continuation.windows]
        context.num_windows_passed, context.num_windows_published = first, len(table)
        context.window_table = table
        tail = continuation.window_tail
        if tail is None:
            return []
        pool.share((tail,))  # if it is copied, until the copy is done
        if continuation.is_window_adoptable:
            table.append(tail.block_id)
            return []
        (block,) = pool.take(1)
        table.append(block.block_id)
        return [BlockCopy(tail.block_id, block.block_id)]

    def grow(self, context: Context, upto: int) -> None:
        num_new = self.growth(context, upto)
        if num_new > 0:
            context.window_table.extend([block.block_id for block in self.pool.take(num_new)])

    def commit(self, context: Context, chain: TokenChain) -> None:  # noqa: ARG002
        """Publish the window blocks that exist now, and release those behind the window."""
        self._publish(context)
        self._release_passed(context)

    def _publish(self, context: Context) -> None:
        """Attach computed window blocks to the KV blocks of the same tokens, where these are in the tree."""
        if not self._can_cache(context, 0):
            return
        num_full = context.num_computed // self._block_size
        for number in range(context.num_windows_published, -(-context.num_computed // self._block_size)):
            node = self._kv_blocks[context.block_table[number]]
            block = self.pool.blocks[context.window_table[number]]
            is_filled = node.num_tokens <= context.num_computed - number * self._block_size
            if node.is_published and is_filled and node.window is None and block.node is None and block.block_id:
                self.pool.attach(block, node)
        context.num_windows_published = max(num_full, context.num_windows_published)

    def _release_passed(self, context: Context) -> None:
        """Release the blocks that no later token sees. Those that a token at one of its points sees are taken last."""
        first = context.num_windows_passed
        last = min(self.first_block(context.num_computed), len(context.window_table))
        if last <= first:
            return
        table = context.window_table
        for number in range(first, last):
            block = self.pool.blocks[table[number]]
            table[number] = NULL_BLOCK_ID
            if block.block_id != NULL_BLOCK_ID:
                self.pool.release((block,), is_kept=any(self._is_seen(number, point) for point in context.points))
        context.num_windows_passed = last

    def _is_seen(self, number: int, point: int) -> bool:
        """Whether a token at position `point` sees the block."""
        return self.first_block(point) <= number < -(-point // self._block_size)

    def release(self, context: Context, chain: TokenChain) -> None:  # noqa: ARG002
        """Release everything. What was computed stays in the cache until its memory is taken."""
        self._publish(context)
        table = context.window_table[context.num_windows_passed :]
        context.window_table = []
        context.num_windows_passed = context.num_windows_published = 0
        self.pool.release([self.pool.blocks[block_id] for block_id in table if block_id != NULL_BLOCK_ID])

    def forget(self, block: KVCacheBlock, heir: KVCacheBlock | None) -> None:
        """Drop the window block of a block that leaves the tree. A twin that stays in the tree gets it."""
        window = block.window
        if window is not None and heir is not None and heir is not block and heir.window is None:
            heir.window, window.node, block.window = window, heir, None
        else:
            self.pool.detach(block)


# Most conversations continue after the answer. States within a prompt are for branches, which are rarer: the tokens
# that they save are divided by this number. Measured in docs/simulator.md.
PROMPT_SHARE = 4
StateUse = tuple[int, int, tuple[StateSnapshot, ...]]  # source, target and snapshots of a slice
NO_STATES: StateUse = (0, 0, ())


class StateGroup:
    """Assigns slots to running requests.

    A request has one or two live slots. With two it writes them in turn, so that the state after its committed tokens
    still exists while the next step is in flight, and can be kept when the request ends. A snapshot needs no copy: the
    step writes the state to a new slot, which is published, and the next step reads it from there.
    """

    def __init__(
        self, num_slots: int, num_live: int, block_size: int, can_cache: CanCache, *, keeps_answers: bool
    ) -> None:
        if num_slots == 1:
            raise InvalidRequest(f"num_states = {num_slots} is less than 2: slot {EMPTY_SLOT} is the empty state")
        self.is_used = num_slots > 0
        self.pool = StatePool(max(num_slots, 1))
        self.num_live = num_live  # slots of a running request
        self._can_cache = can_cache
        self._keeps_answers = keeps_answers  # states after answers are kept as snapshots
        self._block_size = block_size
        self._max_num_seqs = 1
        self._num_started = 0

    def reserve(self, max_num_seqs: int, max_chunk_tokens: int) -> None:  # noqa: ARG002
        """Check that every running request can have its live slots."""
        self._max_num_seqs = max_num_seqs
        needed = 1 + self.num_live * max_num_seqs
        if len(self.pool.blocks) < needed:
            raise InvalidRequest(
                f"num_states = {len(self.pool.blocks)} is less than {needed}: each of max_num_seqs = {max_num_seqs}"
                f" requests needs {self.num_live}, and one is the empty state"
            )

    def may_hold(self, slot: StateSlot | None = None) -> bool:
        """Whether a snapshot may be held; None: whether a slot may be taken for a new one.

        True if enough slots are left for all requests that may still start.
        """
        if slot is not None and slot.ref_count:
            return True
        return self.pool.num_free > self.num_live * (self._max_num_seqs - self._num_started)

    def start(self, context: Context, continuation: Continuation) -> list[BlockCopy]:
        """Assign live slots to a request that continues from a snapshot, or from the empty state."""
        state = context.state_slot = continuation.state
        context.state_base = context.state_start = 0
        if state is not None:
            self.pool.share((state,))
            self.pool.touch(state)
            context.snapshots.append(state)
            context.state_base = context.state_start = state.position
        context.live_states = tuple(self.pool.take(self.num_live))
        for slot in context.live_states:
            slot.position = -1
        self._num_started += 1
        return []

    def plan(self, context: Context, end: int) -> StateUse:
        """Choose the slots of the next slice, which ends at `end`."""
        source, points = context.state_slot, context.points
        snapshots: list[StateSnapshot] = []
        target: StateSlot | None = None
        while context.next_point < len(points) and points[context.next_point] <= end:
            point = points[context.next_point]
            context.next_point += 1
            if point <= context.num_planned or not self.may_hold():
                continue
            (slot,) = self.pool.take(1)
            slot.position = point
            context.snapshots.append(slot)
            if point == end:
                target = slot
            else:
                snapshots.append(StateSnapshot(point, slot.block_id))
        if target is None:
            # The live slot with the older state: the other one holds the state that the slice reads.
            target = min(context.live_states, key=attrgetter("position"))
            target.position = end
        context.state_slot = target
        return (EMPTY_SLOT if source is None else source.block_id), target.block_id, tuple(snapshots)

    def can_roll_back(self, context: Context, end: int) -> bool:
        """Whether the next slice may end with drafts, of which some may turn out to be wrong.

        The state before it must survive it, and it must store no snapshot before `end`.
        """
        if not self.is_used:
            return True
        points = context.points
        has_point = context.next_point < len(points) and points[context.next_point] <= end
        return self.num_live > 1 and context.state_slot is not None and not has_point

    def roll_back(self, context: Context, piece: SeqSlice) -> None:
        """Continue from the state that a slice has read. What the slice has written is not used.

        Keys and values of the tokens that were right exist. They are not written again when the tokens are.
        """
        held = (*context.live_states, *context.snapshots)
        if context.state_slot is not None:
            context.state_slot.position = -1
        context.state_slot = next(slot for slot in held if slot.block_id == piece.state_source)
        context.kv_start = max(context.kv_start, context.num_computed)
        context.num_computed = context.num_planned = piece.start

    def commit(self, context: Context, chain: TokenChain) -> None:
        """Publish the snapshots that exist now, and release those that no later slice reads."""
        num_computed, kept = context.num_computed, []
        for slot in context.snapshots:
            if slot.position <= num_computed and not slot.is_published:
                cost = (slot.position - context.state_base) // PROMPT_SHARE
                self._publish(context, slot, chain, cost)
            if slot.position < num_computed:
                self.pool.release((slot,))
            else:
                kept.append(slot)
        context.snapshots = kept

    def _publish(self, context: Context, slot: StateSlot, chain: TokenChain, cost: int) -> None:
        number, num_tail = divmod(slot.position, self._block_size)
        if not self._can_cache(context, number):
            return  # the cache was cleared, or is off
        run = chain.run(slot.position - num_tail, slot.position)
        self.pool.publish(slot, chain.parent_key(number), run, cost)
        context.state_base = slot.position

    def release(self, context: Context, chain: TokenChain) -> None:
        """Release all slots of a context."""
        for slot in context.live_states:
            if self._keeps_answers and slot.position == context.num_computed > context.state_base:
                cost = slot.position - context.state_start  # the next turn would compute all of it again
                self._publish(context, slot, chain, cost)
            self.pool.release((slot,))
        self.pool.release(context.snapshots)
        self._num_started -= bool(context.live_states)
        context.live_states, context.snapshots, context.state_slot = (), [], None

    def forget(self, block: KVCacheBlock, heir: KVCacheBlock | None) -> None:
        """Drop the states after a block that leaves the tree, unless a twin stays in it."""
        if block.key is not None and heir is None:
            self.pool.forget(block.key)


class Memory:
    """The pools of a runner, and the groups that give memory beside the block table to contexts.

    A node of the prefix tree stands for the tokens of one block. It may have three kinds of memory, from three pools:

        keys and values of layers with full attention    the KV block, which is the node itself
        keys and values of layers with a window          a window block, attached to the node
        recurrent states                                 snapshots, found by the node's key and the tokens after it

    A model may have windows, states, both or neither; the pool of what it does not have is empty.
    """

    def __init__(
        self,
        tree: PrefixTree,
        blocks: BlockPool,
        can_cache: CanCache,
        *,
        window: int = 0,
        num_window_blocks: int = 0,
        num_states: int = 0,
        num_live_states: int = 2,
        places: Collection[Place] = ALL_PLACES,
    ) -> None:
        self.tree = tree
        self.blocks = blocks
        size = tree.block_size
        self.windows = WindowGroup(num_window_blocks, window, size, blocks.blocks, can_cache)
        keeps_answers = Place.ANSWER in places
        self.states = StateGroup(num_states, num_live_states, size, can_cache, keeps_answers=keeps_answers)
        self.groups: list[WindowGroup | StateGroup] = [group for group in (self.states, self.windows) if group.is_used]
        self.is_hybrid = bool(self.groups)  # the model has windows or states
        self.pools: tuple[Pool[Any], ...] = (blocks, self.windows.pool, self.states.pool)  # by `MemoryKind`
        self.places = frozenset(places)
        self._spacing = size // 2  # of two points closer than this, one is used
        if self.is_hybrid:
            tree.on_removal = self._forget

    @property
    def num_releases(self) -> int:
        """Grows when memory is released; callers compare it to detect that."""
        return self.blocks.num_releases + self.windows.pool.num_releases

    def share(self, held: Held) -> None:
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.share(blocks)

    def release(self, held: Held) -> None:
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.release(blocks)

    # Memory of contexts, in a model with windows or states

    def num_blocks(self, context: Context) -> int:
        """Number of leading blocks for which a running request has all the memory to compute them."""
        num_blocks = len(context.block_table)
        return min(num_blocks, len(context.window_table)) if self.windows.is_used else num_blocks

    def begin(self, context: Context, hit: PrefixHit) -> list[BlockCopy]:
        """Assign memory to a request that just started from `hit`.

        Returns the copies of window blocks that the runner must make.
        """
        context.points = place_points(
            len(context.tokens), hit.start, hit.num_tokens, context.boundaries, self.places, self._spacing
        )
        context.next_point = 0
        return [copy for group in self.groups for copy in group.start(context, hit.continuation or FROM_ZERO)]

    def note_branch(self, context: Context, position: int) -> None:
        """Store a state after `position` tokens: another request shares these and waits until they are computed."""
        is_near = any(0 <= position - point < self._spacing for point in context.points)
        is_new = not is_near and position not in context.points
        if Place.BRANCH in self.places and position > context.num_planned and is_new:
            insort(context.points, position)

    def commit(self, context: Context, chain: TokenChain) -> None:
        """Publish the memory whose content exists now, and release what no later token needs."""
        for group in self.groups:
            group.commit(context, chain)

    def release_context(self, context: Context, chain: TokenChain) -> None:
        """Release everything. What was computed stays in the cache until its memory is taken."""
        for group in self.groups:
            group.release(context, chain)
        context.points = []

    def _forget(self, block: KVCacheBlock) -> None:
        """Drop what belongs to a block that leaves the tree. A twin with the same tokens that stays may get it."""
        heir = None if block.key is None else self.tree.find(block.key)
        self.windows.forget(block, heir)
        self.states.forget(block, heir)


MAX_PINS = 1024
NEVER_NS = 2**63


@dataclass(frozen=True, slots=True)
class Pin:
    held: Held  # consecutive blocks from the root, and what is needed to continue after them
    expires_ns: int
    owner: str


@dataclass(slots=True)
class PinOwner:
    num_blocks: int = 0  # total of its pins; a block held by two of them counts twice
    pins: dict[str, int] = field(default_factory=dict)  # pin id -> serial number, oldest first


class PinBoard:
    """Pins by id, oldest first: at most MAX_PINS, which together hold at most half of the pool.

    The owner of a pin is its id up to the first `/`. When a new pin needs room, pins of the owner with the most blocks
    are dropped, so that no owner can displace the pins of all others. The cost of a pin depends on its own blocks, on
    the blocks of the pins it displaces, and on the number of owners, but not on other pins.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._num_windows = 0  # window blocks of all pins; one that two pins hold counts twice
        self._pins: dict[str, Pin] = {}
        self._num_made = 0  # pins made so far
        self.owners: dict[str, PinOwner] = {}  # owners with at least one block
        self.holders: dict[int, int] = {}  # block id -> number of pins that hold it; only pinned blocks
        self._earliest_ns = NEVER_NS  # no pin expires before this
        self.max_blocks = memory.blocks.num_usable // 2

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Number of distinct pinned blocks."""
        return len(self.holders)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(
        self,
        pin_id: str,
        blocks: tuple[KVCacheBlock, ...],
        expires_ns: int,
        continuation: Continuation | None = None,
    ) -> int:
        """Hold these blocks until `expires_ns`, replacing an older pin of that id.

        Returns the number of pinned blocks. Older pins are dropped to make room. Blocks in excess of half the pool are
        cut from the end. Without blocks, no pin is made.
        """
        blocks = blocks[: self.max_blocks]
        self._memory.blocks.share(blocks)  # before the old pin releases them
        self.unpin(pin_id)
        if not blocks:
            return 0
        name, holders = pin_id.partition("/")[0], self.holders
        owner = self.owners.setdefault(name, PinOwner())
        owner.num_blocks += len(blocks)
        for block in blocks:
            holders[block.block_id] = holders.get(block.block_id, 0) + 1
        while self._pins and (len(holders) > self.max_blocks or len(self._pins) >= MAX_PINS):
            self.unpin(self._next_to_yield())
        self._num_made += 1
        owner.pins[pin_id] = self._num_made
        self._pins[pin_id] = Pin(self._hold(blocks, continuation or FROM_ZERO), expires_ns, name)
        self._earliest_ns = min(self._earliest_ns, expires_ns)
        return len(blocks)

    def _hold(self, blocks: tuple[KVCacheBlock, ...], continuation: Continuation) -> Held:
        """Hold the window blocks and the state after a pinned prefix.

        Window blocks are held up to half of their pool. A state is held if enough slots are left for requests.
        """
        memory, state = self._memory, continuation.state
        has_room = self._num_windows + len(continuation.windows) <= memory.windows.pool.num_usable // 2
        held = Held(
            windows=continuation.windows if has_room else (),
            states=(state,) if state is not None and memory.states.may_hold(state) else (),
        )
        memory.share(held)
        self._num_windows += len(held.windows)
        return held._replace(blocks=blocks)

    def unpin(self, pin_id: str) -> bool:
        """Release a pin. Returns False if there is none of that id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        holders = self.holders
        for block in pin.held.blocks:
            holders[block.block_id] -= 1
            if not holders[block.block_id]:
                del holders[block.block_id]
        owner = self.owners[pin.owner]
        owner.num_blocks -= len(pin.held.blocks)
        del owner.pins[pin_id]
        if not owner.num_blocks:
            del self.owners[pin.owner]
        self._memory.release(pin.held)
        self._num_windows -= len(pin.held.windows)
        return True

    def yield_oldest(self) -> bool:
        """Drop the oldest pin to make room for a request. Returns False if there is none."""
        return bool(self._pins) and self.unpin(next(iter(self._pins)))

    def _next_to_yield(self) -> str:
        """The oldest pin of the owner with the most blocks.

        If that owner has only the new pin, the oldest pin of all owners.
        """
        most = max(owner.num_blocks for owner in self.owners.values())
        oldest = [
            next(iter(owner.pins.items())) for owner in self.owners.values() if owner.num_blocks == most and owner.pins
        ]
        return min(oldest, key=itemgetter(1))[0] if oldest else next(iter(self._pins))

    def expire(self, now_ns: int) -> None:
        if not self._pins or now_ns < self._earliest_ns:
            return
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires_ns <= now_ns]:
            self.unpin(pin_id)
        self._earliest_ns = min((pin.expires_ns for pin in self._pins.values()), default=NEVER_NS)

    def clear(self) -> None:
        for pin_id in list(self._pins):
            self.unpin(pin_id)
