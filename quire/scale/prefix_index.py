"""Which replicas have which prefixes: what a router knows about the caches behind it, in bounded memory.

Blocks are found by their chain keys, so content of different salts is never confused. The index may be behind the
caches, or have forgotten a part of them: it then credits a replica with less than it has, or routes a request to a
replica that computes the prefix again. Answers do not depend on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.worker.protocol import ENTRY_KEY_BYTES
from quire.errors import InvalidRequest

ENTRY_BYTES = 200  # of one block in this index, measured (tests/scale/test_prefix_index.py)
DEFAULT_MAX_BLOCKS = 500_000  # 100 MB
SWEEP_BLOCKS = 1000  # whose masks one call cleans: less than a millisecond


class PrefixIndex:
    """Blocks and the replicas that have them, least recently used first.

    A replica is a small number, and has a bit in the masks of its blocks. If its content is cleared, it gets another
    bit: removing the old one from hundreds of thousands of masks at once would stop the server, so this is done in
    slices by later calls. Until then masks may contain bits of no replica.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise InvalidRequest(f"{max_blocks = } is less than 1")
        self.max_blocks = max_blocks
        self._masks: OrderedDict[int, int] = OrderedDict()  # first bytes of a chain key -> bits of replicas
        self._bits: dict[int, int] = {}  # replica -> its bit; none if it was never added
        self._owners: dict[int, int] = {}  # bit -> its replica
        self._retired = 0  # bits of no replica that masks may contain
        self._unswept: list[int] = []  # entries that may have them

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Memory of the index, about."""
        return ENTRY_BYTES * len(self._masks)

    def add(self, replica: int, keys: Sequence[bytes]) -> None:
        """Record that a replica has these blocks."""
        if not keys:
            return
        masks, bit = self._masks, self._bits.get(replica) or self._take_bit(replica)
        for key in keys:
            entry = _entry(key)
            masks[entry] = masks.get(entry, 0) | bit
            masks.move_to_end(entry)
        while len(masks) > self.max_blocks:
            masks.popitem(last=False)
        self._sweep()

    def remove(self, replica: int, keys: Iterable[bytes]) -> None:
        """Record that a replica does not have these blocks any more."""
        masks, bit = self._masks, self._bits.get(replica, 0)
        for key in keys:
            entry = _entry(key)
            mask = masks.get(entry, 0) & ~bit
            if mask:
                masks[entry] = mask
            else:
                masks.pop(entry, None)

    def clear(self, replica: int) -> None:
        """Record that a replica has nothing: it was restarted, or its cache was cleared."""
        bit = self._bits.pop(replica, 0)
        if bit:
            del self._owners[bit]
            self._retired |= bit
            self._unswept = list(dict.keys(self._masks))  # in any order, which takes a tenth of the time
            self._sweep()

    def match(self, keys: Sequence[bytes], num_replicas: int) -> list[int]:
        """The number of leading blocks of a prompt that each replica has. Counts as a use of these blocks."""
        self._sweep()
        masks = self._masks
        counts = [0] * num_replicas
        candidates = sum(bit for replica, bit in self._bits.items() if replica < num_replicas)
        used: list[int] = []
        for number, key in enumerate(keys):
            entry = _entry(key)
            mask = masks.get(entry, 0) & candidates
            if mask != candidates:
                self._note(counts, candidates & ~mask, number)
                candidates = mask
            if not mask:
                break
            used.append(entry)
        else:
            self._note(counts, candidates, len(keys))
        for entry in reversed(used):  # the first block of a prefix is the last to be forgotten
            masks.move_to_end(entry)
        return counts

    def _note(self, counts: list[int], mask: int, number: int) -> None:
        """Set the counts of the replicas in a mask."""
        while mask:
            low = mask & -mask
            counts[self._owners[low]] = number
            mask ^= low

    def _take_bit(self, replica: int) -> int:
        """Give a replica the lowest bit that no mask contains."""
        used = self._retired | sum(self._owners)
        bit = ~used & (used + 1)
        self._bits[replica] = bit
        self._owners[bit] = replica
        return bit

    def _sweep(self) -> None:
        """Remove retired bits from the next slice of masks. After the last one they can be used again."""
        if not self._retired:
            return
        masks, kept = self._masks, ~self._retired
        for entry in self._unswept[-SWEEP_BLOCKS:]:
            mask = masks.get(entry, 0)
            if mask & kept == mask:
                continue
            if mask & kept:
                masks[entry] = mask & kept
            else:
                del masks[entry]
        del self._unswept[-SWEEP_BLOCKS:]
        if not self._unswept:
            self._retired = 0


def _entry(key: bytes) -> int:
    return int.from_bytes(key[:ENTRY_KEY_BYTES], "little")
