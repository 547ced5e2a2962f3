"""The pool of recurrent states: live states of running requests, and snapshots.

A snapshot is a stored state from which other requests continue. It is found by the tokens that it covers: the key of
the last full block before it, and the tokens after that block. It is immutable. A request that continues from it reads
it and writes the next state to a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.errors import InvalidRequest, OutOfBlocks

EMPTY_SLOT = 0  # the state before the first token: read, never written


@dataclass(frozen=True, slots=True)
class StateStats:
    num_slots: int  # slots that can be allocated
    num_free: int  # without content
    num_cached: int  # snapshots that no request or pin holds
    num_in_use: int  # live states of requests, and snapshots held by requests or pins
    num_snapshots: int  # held or not
    num_evictions: int


class StateSlot:
    """One slot of state memory.

    Only `StatePool` changes `ref_count` and the fields of a published snapshot.
    """

    __slots__ = ("cost", "parent_key", "position", "ref_count", "run", "score", "slot_id")

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.ref_count = 0
        self.position = 0  # number of tokens that the state covers, or will cover when the step in flight is done
        self.parent_key: bytes | None = None  # key of the full blocks before it; None: not published
        self.run = b""  # packed tokens after those blocks, fewer than a block
        self.cost = 0  # tokens to compute again without it
        self.score = 0  # the snapshot with the smallest score is evicted first

    @property
    def is_published(self) -> bool:
        return self.parent_key is not None

    def __repr__(self) -> str:
        kind = "snapshot" if self.is_published else "private"
        return f"<state {self.slot_id} at {self.position} ref_count={self.ref_count} {kind}>"


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
