"""State slots of requests: which slots a slice reads and writes, and which become snapshots."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.chain import TokenChain
from quire.core.request import Request
from quire.core.state_pool import EMPTY_SLOT, StatePool, StateSlot
from quire.core.step import SeqSlice, StateSnapshot
from quire.errors import InvalidRequest

# Most conversations continue after the answer. States within a prompt are for branches, which are rarer: the tokens
# that they save are divided by this number. Measured in docs/simulator.md.
PROMPT_SHARE = 4
StateUse = tuple[int, int, tuple[StateSnapshot, ...]]  # source, target and snapshots of a slice
CanPublish = Callable[[Request, int], bool]  # whether the block before this number is in the tree


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

    def start(self, request: Request, state: StateSlot | None) -> None:
        """Assign live slots to a request that continues from a snapshot, or from the empty state."""
        self.hold(request, state)
        request.live_states = tuple(self.pool.take() for _ in range(self.num_live))
        for slot in request.live_states:
            slot.position = -1
        self._num_started += 1

    def hold(self, request: Request, state: StateSlot | None) -> None:
        request.state_slot = state
        request.state_base = request.state_start = 0
        if state is not None:
            self.pool.share(state)
            self.pool.touch(state)
            request.snapshots.append(state)
            request.state_base = request.state_start = state.position

    def plan(self, request: Request, end: int) -> StateUse:
        """Choose the slots of the next slice, which ends at `end`."""
        source, points = request.state_slot, request.points
        snapshots: list[StateSnapshot] = []
        target: StateSlot | None = None
        while request.next_point < len(points) and points[request.next_point] <= end:
            point = points[request.next_point]
            request.next_point += 1
            if point <= request.num_planned or not self.may_hold():
                continue
            slot = self.pool.take()
            slot.position = point
            request.snapshots.append(slot)
            if point == end:
                target = slot
            else:
                snapshots.append(StateSnapshot(point, slot.slot_id))
        if target is None:
            target = self._next_live(request)
            target.position = end
        request.state_slot = target
        return (EMPTY_SLOT if source is None else source.slot_id), target.slot_id, tuple(snapshots)

    def _next_live(self, request: Request) -> StateSlot:
        """The live slot with the older state: the other one holds the state that the slice reads."""
        return min(request.live_states, key=_position)

    def can_roll_back(self, request: Request, end: int) -> bool:
        """Whether the state before the next slice survives it, and the slice stores no snapshot before `end`."""
        points = request.points
        has_point = request.next_point < len(points) and points[request.next_point] <= end
        return self.num_live > 1 and request.state_slot is not None and not has_point

    def roll_back(self, request: Request, piece: SeqSlice) -> None:
        """Continue from the state that a slice has read. What the slice has written is not used.

        Keys and values of the tokens that were right exist. They are not written again when the tokens are.
        """
        held = (*request.live_states, *request.snapshots)
        if request.state_slot is not None:
            request.state_slot.position = -1
        request.state_slot = next(slot for slot in held if slot.slot_id == piece.state_source)
        request.kv_start = max(request.kv_start, request.num_computed)
        request.num_computed = request.num_planned = piece.start

    def commit(self, request: Request, chain: TokenChain, can_publish: CanPublish) -> None:
        """Publish the snapshots that exist now, and release those that no later slice reads."""
        num_computed, kept = request.num_computed, []
        for slot in request.snapshots:
            if slot.position <= num_computed and not slot.is_published:
                cost = (slot.position - request.state_base) // PROMPT_SHARE
                self._publish(request, slot, chain, can_publish, cost)
            if slot.position < num_computed:
                self.pool.release(slot)
            else:
                kept.append(slot)
        request.snapshots = kept

    def _publish(
        self, request: Request, slot: StateSlot, chain: TokenChain, can_publish: CanPublish, cost: int
    ) -> None:
        number, num_tail = divmod(slot.position, self._block_size)
        if not can_publish(request, number):
            return  # the cache was cleared, or is off
        run = chain.run(slot.position - num_tail, slot.position)
        self.pool.publish(slot, chain.parent_key(number), run, cost)
        request.state_base = slot.position

    def release(self, request: Request, chain: TokenChain, can_publish: CanPublish, *, is_kept: bool) -> None:
        """Release all slots of a request. `is_kept`: keep the state after its computed tokens as a snapshot."""
        for slot in request.live_states:
            if is_kept and slot.position == request.num_computed > request.state_base:
                cost = slot.position - request.state_start  # the next turn would compute all of it again
                self._publish(request, slot, chain, can_publish, cost)
            self.pool.release(slot)
        for slot in request.snapshots:
            self.pool.release(slot)
        self._num_started -= bool(request.live_states)
        request.live_states, request.snapshots, request.state_slot = (), [], None


def _position(slot: StateSlot) -> int:
    return slot.position
