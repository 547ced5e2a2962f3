"""Which replicas have which prefixes: what a router knows about the caches behind it, in bounded memory.

Blocks are found by their chain keys, so content of different salts is never confused. The index may be behind the
caches, or have forgotten a part of them: it then credits a replica with less than it has, or routes a request to a
replica that computes the prefix again. Answers do not depend on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.errors import InvalidRequest

ENTRY_KEY_BYTES = 8  # of a chain key that are kept: enough to tell a billion blocks apart
ENTRY_BYTES = 200  # of one block in this index, measured (tests/core/test_prefix_index.py)
DEFAULT_MAX_BLOCKS = 500_000  # 100 MB


class PrefixIndex:
    """Blocks and the replicas that have them, least recently used first.

    A replica is a small number; its bit is set in the masks of its blocks.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise InvalidRequest(f"{max_blocks = } is less than 1")
        self.max_blocks = max_blocks
        self._masks: OrderedDict[int, int] = OrderedDict()  # first bytes of a chain key -> replicas

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Memory of the index, about."""
        return ENTRY_BYTES * len(self._masks)

    def add(self, replica: int, keys: Iterable[bytes]) -> None:
        """Record that a replica has these blocks."""
        masks, bit = self._masks, 1 << replica
        for key in keys:
            entry = _entry(key)
            masks[entry] = masks.get(entry, 0) | bit
            masks.move_to_end(entry)
        while len(masks) > self.max_blocks:
            masks.popitem(last=False)

    def remove(self, replica: int, keys: Iterable[bytes]) -> None:
        """Record that a replica does not have these blocks any more."""
        masks, bit = self._masks, 1 << replica
        for key in keys:
            entry = _entry(key)
            mask = masks.get(entry, 0) & ~bit
            if mask:
                masks[entry] = mask
            else:
                masks.pop(entry, None)

    def clear(self, replica: int) -> None:
        """Record that a replica has nothing: it was restarted, or its cache was cleared."""
        bit = 1 << replica
        for entry in [entry for entry, mask in self._masks.items() if mask & bit]:
            mask = self._masks[entry] & ~bit
            if mask:
                self._masks[entry] = mask
            else:
                del self._masks[entry]

    def match(self, keys: Sequence[bytes], num_replicas: int) -> list[int]:
        """The number of leading blocks of a prompt that each replica has. Counts as a use of these blocks."""
        masks = self._masks
        counts = [0] * num_replicas
        candidates = (1 << num_replicas) - 1
        used: list[int] = []
        for number, key in enumerate(keys):
            entry = _entry(key)
            mask = masks.get(entry, 0) & candidates
            if mask != candidates:
                _note(counts, candidates & ~mask, number)
                candidates = mask
            if not mask:
                break
            used.append(entry)
        else:
            _note(counts, candidates, len(keys))
        for entry in reversed(used):  # the first block of a prefix is the last to be forgotten
            masks.move_to_end(entry)
        return counts


def split_keys(keys: bytes) -> list[bytes]:
    """The first bytes of chain keys, from a report in which they follow each other."""
    return [keys[at : at + ENTRY_KEY_BYTES] for at in range(0, len(keys), ENTRY_KEY_BYTES)]


def _entry(key: bytes) -> int:
    return int.from_bytes(key[:ENTRY_KEY_BYTES], "little")


def _note(counts: list[int], mask: int, number: int) -> None:
    """Set the counts of the replicas in a mask."""
    while mask:
        low = mask & -mask
        counts[low.bit_length() - 1] = number
        mask ^= low
