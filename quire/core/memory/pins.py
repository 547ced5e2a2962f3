"""Pins: prefixes held in the cache until a deadline, and dropped before a request is preempted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from quire.core.cache.block import KVCacheBlock, StateSlot, WindowBlock
from quire.core.cache.block_pool import BlockPool
from quire.core.cache.prefix import FROM_ZERO, Continuation
from quire.core.events import Observer, PinYielded, ignore
from quire.core.memory.hybrid import HybridMemory

MAX_PINS = 1024
NEVER_NS = 2**63


@dataclass(frozen=True, slots=True)
class Pin:
    blocks: tuple[KVCacheBlock, ...]  # consecutive, from the root
    expires_ns: int
    owner: str
    windows: tuple[WindowBlock, ...] = ()  # to continue after the blocks
    state: StateSlot | None = None


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

    def __init__(self, pool: BlockPool, observe: Observer = ignore, hybrid: HybridMemory | None = None) -> None:
        self._pool = pool
        self._windows = hybrid.windows if hybrid is not None else None
        self._states = hybrid.states if hybrid is not None else None
        self._num_windows = 0  # window blocks of all pins; one that two pins hold counts twice
        self._observe = observe
        self._pins: dict[str, Pin] = {}
        self._num_made = 0  # pins made so far
        self.owners: dict[str, PinOwner] = {}  # owners with at least one block
        self.holders: dict[int, int] = {}  # block id -> number of pins that hold it; only pinned blocks
        self._earliest_ns = NEVER_NS  # no pin expires before this
        self.max_blocks = pool.num_usable // 2

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
        self._pool.share(blocks)  # before the old pin releases them
        self.unpin(pin_id)
        if not blocks:
            return 0
        name, holders = pin_id.partition("/")[0], self.holders
        owner = self.owners.setdefault(name, PinOwner())
        owner.num_blocks += len(blocks)
        for block in blocks:
            holders[block.block_id] = holders.get(block.block_id, 0) + 1
        while self._pins and (len(holders) > self.max_blocks or len(self._pins) >= MAX_PINS):
            self._yield(self._next_to_yield())
        self._num_made += 1
        owner.pins[pin_id] = self._num_made
        self._pins[pin_id] = Pin(blocks, expires_ns, name, *self._hold(continuation or FROM_ZERO))
        self._earliest_ns = min(self._earliest_ns, expires_ns)
        return len(blocks)

    def _hold(self, continuation: Continuation) -> tuple[tuple[WindowBlock, ...], StateSlot | None]:
        """Hold the window blocks and the state after a pinned prefix.

        Window blocks are held up to half of their pool. A state is held if enough slots are left for requests.
        """
        windows: tuple[WindowBlock, ...] = ()
        if self._windows is not None:
            pool = self._windows.pool
            if self._num_windows + len(continuation.windows) <= pool.num_usable // 2:
                windows = continuation.windows
                pool.share(windows)
                self._num_windows += len(windows)
        state = continuation.state
        if state is not None and (self._states is None or not self._states.may_hold(state)):
            state = None
        if state is not None and self._states is not None:
            self._states.pool.share(state)
        return windows, state

    def unpin(self, pin_id: str) -> bool:
        """Release a pin. Returns False if there is none of that id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        holders = self.holders
        for block in pin.blocks:
            holders[block.block_id] -= 1
            if not holders[block.block_id]:
                del holders[block.block_id]
        owner = self.owners[pin.owner]
        owner.num_blocks -= len(pin.blocks)
        del owner.pins[pin_id]
        if not owner.num_blocks:
            del self.owners[pin.owner]
        self._pool.release(pin.blocks)
        if self._windows is not None:
            self._windows.pool.release(pin.windows, is_kept=True)
            self._num_windows -= len(pin.windows)
        if self._states is not None and pin.state is not None:
            self._states.pool.release(pin.state)
        return True

    def yield_oldest(self, request_id: int) -> bool:
        """Drop the oldest pin to make room for a request. Returns False if there is none."""
        if not self._pins:
            return False
        self._yield(next(iter(self._pins)), request_id)
        return True

    def _yield(self, pin_id: str, by_request_id: int | None = None) -> None:
        block_ids = tuple(block.block_id for block in self._pins[pin_id].blocks)
        self.unpin(pin_id)
        self._observe(PinYielded(pin_id, block_ids, by_request_id))

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
