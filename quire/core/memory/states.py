"""Recurrent states: the pool of live states and snapshots, and who reads and writes them.

A snapshot is a stored state from which other requests continue. It is found by the tokens that it covers: the key of
the last full block before it, and the tokens after that block. It is immutable. A request that continues from it reads
it and writes the next state to a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.core.cache.block import EMPTY_SLOT, StateSlot
from quire.core.cache.context import Context, TokenChain
from quire.core.step import SeqSlice, StateSnapshot
from quire.errors import InvalidRequest, OutOfBlocks


@dataclass(frozen=True, slots=True)
class StateStats:
    num_slots: int  # slots that can be allocated
    num_free: int  # without content
    num_cached: int  # snapshots that no request or pin holds
    num_in_use: int  # live states of requests, and snapshots held by requests or pins
    num_snapshots: int  # held or not
    num_evictions: int


class StatePool:
    """Allocates and releases slots, and finds snapshots by content.

    All slots have the same size, so the value of a snapshot per byte is the number of tokens it saves. The score of a
    snapshot is that number plus the score of the last evicted one, at its publication and again at each use
    (GreedyDual). So a snapshot that saves many tokens outlives several that save few, and one that is not used again
    is evicted in the end, however many tokens it saves.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise InvalidRequest(f"num_states = {num_slots} is less than 2: slot {EMPTY_SLOT} is the empty state")
        self.slots = [StateSlot(slot_id) for slot_id in range(num_slots)]
        self.slots[EMPTY_SLOT].ref_count = 1
        self._free = self.slots[:EMPTY_SLOT:-1]  # without content
        self._index: dict[bytes, dict[bytes, StateSlot]] = {}  # parent key -> run -> snapshot
        self._heap: list[tuple[int, int, StateSlot]] = []  # (score, serial number, snapshot); may hold stale entries
        self._num_pushes = 0
        self._clock = 0  # score of the last evicted snapshot
        self.num_cached = 0  # snapshots that no request or pin holds
        self.num_snapshots = 0  # published, held or not
        self.num_evictions = 0
        self.on_eviction: Callable[[StateSlot], None] | None = None  # called before a snapshot is lost

    @property
    def num_usable(self) -> int:
        return len(self.slots) - 1

    @property
    def num_available(self) -> int:
        """Slots that `take` can return: free ones, and snapshots that it may evict."""
        return len(self._free) + self.num_cached

    def stats(self) -> StateStats:
        return StateStats(
            num_slots=self.num_usable,
            num_free=len(self._free),
            num_cached=self.num_cached,
            num_in_use=self.num_usable - self.num_available,
            num_snapshots=self.num_snapshots,
            num_evictions=self.num_evictions,
        )

    def at(self, parent_key: bytes) -> dict[bytes, StateSlot] | None:
        """Snapshots between the full block with this key and the next one, by the tokens after that block."""
        return self._index.get(parent_key)

    def take(self) -> StateSlot:
        """Allocate a slot of undefined content, or raise `OutOfBlocks`."""
        if not self._free:
            self._evict()
        slot = self._free.pop()
        slot.ref_count = 1
        return slot

    def share(self, slot: StateSlot) -> None:
        if slot.ref_count == 0:
            self.num_cached -= 1
        slot.ref_count += 1

    def release(self, slot: StateSlot) -> None:
        assert slot.ref_count > 0, f"{slot!r} released without a reference"
        slot.ref_count -= 1
        if slot.ref_count:
            return
        if slot.parent_key is None:
            self._free.append(slot)
        else:
            self.num_cached += 1
            self._push(slot)

    def publish(self, slot: StateSlot, parent_key: bytes, run: bytes, cost: int) -> None:
        """Make a held state a snapshot. If there is one of the same tokens already, that one is kept instead."""
        assert slot.ref_count > 0, f"{slot!r} published without a reference"
        assert slot.parent_key is None, f"{slot!r} published twice"
        found = self._index.setdefault(parent_key, {})
        known = found.get(run)
        if known is not None:
            self.touch(known)
            return
        found[run] = slot
        slot.parent_key, slot.run, slot.cost = parent_key, run, max(cost, 1)
        slot.score = self._clock + slot.cost
        self.num_snapshots += 1

    def touch(self, slot: StateSlot) -> None:
        """Renew the score of a snapshot that was used."""
        slot.score = self._clock + slot.cost
        if slot.ref_count == 0:
            self._push(slot)

    def forget(self, parent_key: bytes) -> None:
        """Drop the snapshots after a block that left the prefix tree: nothing can reach them."""
        for slot in self._index.pop(parent_key, {}).values():
            self._unpublish(slot)

    def clear(self) -> None:
        for key in list(self._index):
            self.forget(key)

    def evict_unused(self) -> int:
        """Evict all snapshots that no request or pin holds. Returns their number."""
        num_before = self.num_cached
        while self.num_cached:
            self._evict()
        return num_before

    def _evict(self) -> None:
        heap = self._heap
        while heap:
            score, _, slot = heappop(heap)
            if slot.parent_key is not None and slot.ref_count == 0 and slot.score == score:
                if self.on_eviction is not None:
                    self.on_eviction(slot)
                self._clock = score
                self.num_evictions += 1
                self._remove(slot)
                return
        raise OutOfBlocks("all state slots are in use")

    def _remove(self, slot: StateSlot) -> None:
        assert slot.parent_key is not None
        runs = self._index[slot.parent_key]
        del runs[slot.run]
        if not runs:
            del self._index[slot.parent_key]
        self._unpublish(slot)

    def _unpublish(self, slot: StateSlot) -> None:
        slot.parent_key, slot.run = None, b""
        self.num_snapshots -= 1
        if slot.ref_count == 0:
            self.num_cached -= 1
            self._free.append(slot)

    def _push(self, slot: StateSlot) -> None:
        self._num_pushes += 1
        heappush(self._heap, (slot.score, self._num_pushes, slot))
        if len(self._heap) > 2 * self.num_cached + 16:
            best: dict[int, tuple[int, int, StateSlot]] = {}
            for entry in self._heap:
                slot = entry[2]
                if slot.parent_key is not None and slot.ref_count == 0 and slot.score == entry[0]:
                    best[slot.slot_id] = entry
            self._heap = list(best.values())
            heapify(self._heap)


# Most conversations continue after the answer. States within a prompt are for branches, which are rarer: the tokens
# that they save are divided by this number. Measured in docs/simulator.md.
PROMPT_SHARE = 4
StateUse = tuple[int, int, tuple[StateSnapshot, ...]]  # source, target and snapshots of a slice
CanPublish = Callable[[Context, int], bool]  # whether the block before this number is in the tree


class StateMemory:
    """Assigns slots to running requests.

    A request has one or two live slots. With two it writes them in turn, so that the state after its committed tokens
    still exists while the next step is in flight, and can be kept when the request ends. A snapshot needs no copy: the
    step writes the state to a new slot, which is published, and the next step reads it from there.
    """

    def __init__(self, num_slots: int, num_live: int, block_size: int) -> None:
        self.pool = StatePool(num_slots)
        self.num_live = num_live  # slots of a running request
        self._block_size = block_size
        self._max_num_seqs = 1
        self._num_started = 0

    def reserve(self, max_num_seqs: int) -> None:
        """Check that every running request can have its live slots."""
        self._max_num_seqs = max_num_seqs
        needed = 1 + self.num_live * max_num_seqs
        if len(self.pool.slots) < needed:
            raise InvalidRequest(
                f"num_states = {len(self.pool.slots)} is less than {needed}: each of max_num_seqs = {max_num_seqs}"
                f" requests needs {self.num_live}, and one is the empty state"
            )

    def may_hold(self, slot: StateSlot | None = None) -> bool:
        """Whether a snapshot may be held; None: whether a slot may be taken for a new one.

        True if enough slots are left for all requests that may still start.
        """
        if slot is not None and slot.ref_count:
            return True
        return self.pool.num_available > self.num_live * (self._max_num_seqs - self._num_started)

    def start(self, context: Context, state: StateSlot | None) -> None:
        """Assign live slots to a request that continues from a snapshot, or from the empty state."""
        self.hold(context, state)
        context.live_states = tuple(self.pool.take() for _ in range(self.num_live))
        for slot in context.live_states:
            slot.position = -1
        self._num_started += 1

    def hold(self, context: Context, state: StateSlot | None) -> None:
        context.state_slot = state
        context.state_base = context.state_start = 0
        if state is not None:
            self.pool.share(state)
            self.pool.touch(state)
            context.snapshots.append(state)
            context.state_base = context.state_start = state.position

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
            slot = self.pool.take()
            slot.position = point
            context.snapshots.append(slot)
            if point == end:
                target = slot
            else:
                snapshots.append(StateSnapshot(point, slot.slot_id))
        if target is None:
            target = self._next_live(context)
            target.position = end
        context.state_slot = target
        return (EMPTY_SLOT if source is None else source.slot_id), target.slot_id, tuple(snapshots)

    def _next_live(self, context: Context) -> StateSlot:
        """The live slot with the older state: the other one holds the state that the slice reads."""
        return min(context.live_states, key=_position)

    def can_roll_back(self, context: Context, end: int) -> bool:
        """Whether the state before the next slice survives it, and the slice stores no snapshot before `end`."""
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
        context.state_slot = next(slot for slot in held if slot.slot_id == piece.state_source)
        context.kv_start = max(context.kv_start, context.num_computed)
        context.num_computed = context.num_planned = piece.start

    def commit(self, context: Context, chain: TokenChain, can_publish: CanPublish) -> None:
        """Publish the snapshots that exist now, and release those that no later slice reads."""
        num_computed, kept = context.num_computed, []
        for slot in context.snapshots:
            if slot.position <= num_computed and not slot.is_published:
                cost = (slot.position - context.state_base) // PROMPT_SHARE
                self._publish(context, slot, chain, can_publish, cost)
            if slot.position < num_computed:
                self.pool.release(slot)
            else:
                kept.append(slot)
        context.snapshots = kept

    def _publish(
        self, context: Context, slot: StateSlot, chain: TokenChain, can_publish: CanPublish, cost: int
    ) -> None:
        number, num_tail = divmod(slot.position, self._block_size)
        if not can_publish(context, number):
            return  # the cache was cleared, or is off
        run = chain.run(slot.position - num_tail, slot.position)
        self.pool.publish(slot, chain.parent_key(number), run, cost)
        context.state_base = slot.position

    def release(self, context: Context, chain: TokenChain, can_publish: CanPublish, *, is_kept: bool) -> None:
        """Release all slots of a context. `is_kept`: keep the state after its computed tokens as a snapshot."""
        for slot in context.live_states:
            if is_kept and slot.position == context.num_computed > context.state_base:
                cost = slot.position - context.state_start  # the next turn would compute all of it again
                self._publish(context, slot, chain, can_publish, cost)
            self.pool.release(slot)
        for slot in context.snapshots:
            self.pool.release(slot)
        self._num_started -= bool(context.live_states)
        context.live_states, context.snapshots, context.state_slot = (), [], None


def _position(slot: StateSlot) -> int:
    return slot.position
