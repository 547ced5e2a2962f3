"""Prefixes someone asked to keep: they hold references until a deadline, and give way before work is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.block import KVCacheBlock
from quire.core.events import Observer, PinYielded, ignore
from quire.core.pool import BlockPool

MAX_PINS = 1024
NEVER_NS = 2**63


@dataclass(frozen=True, slots=True)
class Pin:
    blocks: tuple[KVCacheBlock, ...]  # from the root down: who holds a block holds all before it
    expires_ns: int


class PinBoard:
    """Pins by name, oldest first: at most so many, and together they hold at most half the pool.

    What a name has before its first `/` is its owner. For a new pin, pins of the owner who holds the most yield, so
    that nobody can push out everyone else's.
    """

    def __init__(self, pool: BlockPool, observe: Observer = ignore) -> None:
        self._pool = pool
        self._observe = observe
        self._pins: dict[str, Pin] = {}
        self.holders: Counter[int] = Counter()  # block id -> pins that hold it
        self._earliest_ns = NEVER_NS  # no pin expires before this
        self.max_blocks = pool.num_usable // 2

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held."""
        return len(self.holders)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(self, pin_id: str, blocks: tuple[KVCacheBlock, ...], expires_ns: int) -> int:
        """Hold these blocks until then, in place of an older pin of that name. Returns how many it holds.

        Older pins yield to a new one; what exceeds half the pool is cut from the end. Nothing to hold, no pin.
        """
        blocks = blocks[: self.max_blocks]
        self._pool.share(blocks)  # before the old pin lets go of them
        self.unpin(pin_id)
        if not blocks:
            return 0
        block_ids = {block.block_id for block in blocks}
        while self._pins and (len(self.holders.keys() | block_ids) > self.max_blocks or len(self._pins) >= MAX_PINS):
            self._yield(self._next_to_yield(pin_id, len(blocks)))
        self._pins[pin_id] = Pin(blocks, expires_ns)
        self._earliest_ns = min(self._earliest_ns, expires_ns)
        self.holders.update(block_ids)
        return len(blocks)

    def unpin(self, pin_id: str) -> bool:
        """Let go of a pin. False if there is none of that name."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        for block in pin.blocks:
            self.holders[block.block_id] -= 1
            if not self.holders[block.block_id]:
                del self.holders[block.block_id]
        self._pool.release(pin.blocks)
        return True

    def yield_oldest(self) -> bool:
        """Let the oldest pin go to make room. False if there is none."""
        if not self._pins:
            return False
        self._yield(next(iter(self._pins)))
        return True

    def _yield(self, pin_id: str) -> None:
        block_ids = tuple(block.block_id for block in self._pins[pin_id].blocks)
        self.unpin(pin_id)
        self._observe(PinYielded(pin_id, block_ids))

    def _next_to_yield(self, newcomer: str, num_blocks: int) -> str:
        """The oldest pin of the owner who would hold the most; of all, if that owner has none yet."""
        held = Counter({_owner(newcomer): num_blocks})
        for pin_id, pin in self._pins.items():
            held[_owner(pin_id)] += len(pin.blocks)
        most = max(held.values())
        greedy = (pin_id for pin_id in self._pins if held[_owner(pin_id)] == most)
        return next(greedy, next(iter(self._pins)))

    def expire(self, now_ns: int) -> None:
        if not self._pins or now_ns < self._earliest_ns:
            return
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires_ns <= now_ns]:
            self.unpin(pin_id)
        self._earliest_ns = min((pin.expires_ns for pin in self._pins.values()), default=NEVER_NS)

    def clear(self) -> None:
        for pin_id in list(self._pins):
            self.unpin(pin_id)


def _owner(pin_id: str) -> str:
    return pin_id.partition("/")[0]
