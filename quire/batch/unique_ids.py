"""A set of strings that stores only digests, so that a million strings take 16 MiB."""

from __future__ import annotations

from array import array
from hashlib import blake2b


class UniqueIds:
    """A hash table of 64-bit digests with open addressing. Among a million strings, the chance
    of any collision is below 1 in 10^7."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    @property
    def num_bytes(self) -> int:
        return self._slots.itemsize * len(self._slots)

    def add(self, text: str) -> bool:
        """Add a string. Returns False if it was present."""
        digest = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1
        slot = self._find(self._slots, digest)
        if self._slots[slot] == digest:
            return False
        self._slots[slot] = digest
        self._num_ids += 1
        if 2 * self._num_ids > len(self._slots):
            self._grow()
        return True

    def _grow(self) -> None:
        slots = array("Q", bytes(16 * len(self._slots)))
        for digest in self._slots:
            if digest:
                slots[self._find(slots, digest)] = digest
        self._slots = slots

    @staticmethod
    def _find(slots: array[int], digest: int) -> int:
        """The slot of a digest, or the empty slot where it belongs."""
        mask = len(slots) - 1
        slot = digest & mask
        while slots[slot] not in (0, digest):
            slot = (slot + 1) & mask
        return slot
