"""Chooses the replica for a request by the work that it would cause there.

The work is counted in prompt tokens: those of the request that the replica has not cached, those that are queued there
before it, and what running answers and a full memory cost. A replica with a cached prefix is chosen until its queue is
longer than what the prefix saves, so that requests with a common system prompt spread over all replicas by themselves.

`PrefixIndex` is what a router knows about the caches behind it, in bounded memory. Blocks are found by their chain
keys, so content of different salts is never confused. The index may be behind the caches, or have forgotten a part of
them: it then credits a replica with less than it has, or routes a request to a replica that computes the prefix again.
Answers do not depend on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import exp
from typing import Generic, NamedTuple, TypeVar

from quire.core.values import Priority
from quire.engine.worker.kv_events import HASH_BYTES, CacheReport, split_keys
from quire.errors import InvalidRequest

ENTRY_BYTES = 200  # of one block in this index, measured (tests/scale/test_prefix_index.py)
DEFAULT_MAX_BLOCKS = 500_000  # 100 MB
SWEEP_BLOCKS = 1000  # whose masks one call cleans: less than a millisecond
R = TypeVar("R", bound=Hashable)  # a replica, as its router names it


class PrefixIndex(Generic[R]):
    """Blocks and the replicas that have them, least recently used first.

    A replica has a bit in the masks of its blocks. If its content is cleared, it gets another
    bit: removing the old one from hundreds of thousands of masks at once would stop the server, so this is done in
    slices by later calls. Until then masks may contain bits of no replica.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise InvalidRequest(f"{max_blocks = } is less than 1")
        self.max_blocks = max_blocks
        self._masks: OrderedDict[int, int] = OrderedDict()  # first bytes of a chain key -> bits of replicas
        self._bits: dict[R, int] = {}  # replica -> its bit; none if it was never added
        self._owners: dict[int, R] = {}  # bit -> its replica
        self._retired = 0  # bits of no replica that masks may contain
        self._unswept: list[int] = []  # entries that may have them

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Memory of the index, about."""
        return ENTRY_BYTES * len(self._masks)

    def add(self, replica: R, keys: Sequence[bytes]) -> None:
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

    def remove(self, replica: R, keys: Iterable[bytes]) -> None:
        """Record that a replica does not have these blocks any more."""
        masks, bit = self._masks, self._bits.get(replica, 0)
        for key in keys:
            entry = _entry(key)
            mask = masks.get(entry, 0) & ~bit
            if mask:
                masks[entry] = mask
            else:
                masks.pop(entry, None)

    def clear(self, replica: R) -> None:
        """Record that a replica has nothing: it was restarted, or its cache was cleared."""
        bit = self._bits.pop(replica, 0)
        if bit:
            del self._owners[bit]
            self._retired |= bit
            self._unswept = list(dict.keys(self._masks))  # in any order, which takes a tenth of the time
            self._sweep()

    def match(self, keys: Sequence[bytes]) -> dict[R, int]:
        """The number of leading blocks of a prompt, of each replica that has some. Counts as a use of these blocks."""
        self._sweep()
        masks = self._masks
        counts: dict[R, int] = {}
        candidates = sum(self._owners)
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

    def _note(self, counts: dict[R, int], mask: int, number: int) -> None:
        """Set the counts of the replicas in a mask."""
        while mask and number:
            low = mask & -mask
            counts[self._owners[low]] = number
            mask ^= low

    def _take_bit(self, replica: R) -> int:
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
    return int.from_bytes(key[:HASH_BYTES], "little")


ROW_TOKENS = 32  # a running or waiting answer slows a new one down like this many prompt tokens
FULL_TOKENS = 4096  # a replica without a free row or memory makes a request wait, or evicts what others use
RECENT_PART = 8  # this part of the work of the last minute counts, so that a light load is shared too
RECENT_NS = 60_000_000_000
STICKY_TOKENS = 512  # a session stays with its replica if another would save less than this
MAX_SESSIONS = 100_000


class ReplicaLoad(NamedTuple):
    """What a router knows about a replica. It may be old."""

    queued_tokens: tuple[int, int, int] = (0, 0, 0)  # prompt tokens that are not computed yet, by priority
    num_requests: int = 0  # running and waiting
    max_num_seqs: int = 1
    num_free_blocks: int = 0  # that no running request uses
    num_blocks: int = 0

    def with_request(self, priority: Priority, num_tokens: int, num_blocks: int) -> ReplicaLoad:
        """The load after a request was sent there."""
        queued = list(self.queued_tokens)
        queued[priority] += num_tokens
        return self._replace(
            queued_tokens=(queued[0], queued[1], queued[2]),
            num_requests=self.num_requests + 1,
            num_free_blocks=max(self.num_free_blocks - num_blocks, 0),
        )


class Prompt(NamedTuple):
    """What is known of a request when it is routed."""

    num_tokens: int
    priority: Priority = Priority.NORMAL
    num_blocks: int = 0  # for its prompt and its expected answer


def expected_work(prompt: Prompt, num_cached_tokens: int, load: ReplicaLoad, recent_tokens: float = 0) -> int:
    """The tokens that would be computed before the first token of the answer, and what else delays it.

    Requests of lower priority do not delay it: the replica serves them later. `recent_tokens`: see `RecentWork`.
    """
    work = max(prompt.num_tokens - num_cached_tokens, 1)
    work += sum(load.queued_tokens[: prompt.priority + 1])
    work += ROW_TOKENS * load.num_requests + int(recent_tokens) // RECENT_PART
    num_over = load.num_requests + 1 - load.max_num_seqs
    if num_over > 0:
        work += FULL_TOKENS * num_over // load.max_num_seqs + FULL_TOKENS // 8
    num_missing = prompt.num_blocks - load.num_free_blocks
    if load.num_blocks and num_missing > 0:
        work += FULL_TOKENS * min(num_missing, prompt.num_blocks) // max(prompt.num_blocks, 1)
    return work


class RecentWork(Generic[R]):
    """The work that was sent to each replica in about the last minute. Older work counts less."""

    def __init__(self) -> None:
        self._work: dict[R, tuple[float, int]] = {}  # tokens, as seen at a time

    def add(self, replica: R, num_tokens: int, now_ns: int) -> None:
        self._work[replica] = self.at(replica, now_ns) + num_tokens, now_ns

    def forget(self, replica: R) -> None:
        self._work.pop(replica, None)

    def at(self, replica: R, now_ns: int) -> float:
        """The tokens of a replica, as seen at this time: those of a time count e^(time / RECENT_NS)."""
        num_tokens, then_ns = self._work.get(replica, (0.0, now_ns))
        return num_tokens * exp((then_ns - now_ns) / RECENT_NS)


class PrefixRouter(Generic[R]):
    """Chooses replicas by what they report about their caches (`index`), their load, sessions and earlier choices."""

    def __init__(self, block_size: int, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.index = PrefixIndex[R](max_blocks)
        self.block_size = block_size
        self._sessions: OrderedDict[str, R] = OrderedDict()  # the least recently used first
        self._recent = RecentWork[R]()

    def forget(self, replica: R) -> None:
        """Forget a replica that is gone."""
        self.index.clear(replica)
        self._recent.forget(replica)
        for session in [session for session, own in self._sessions.items() if own == replica]:
            del self._sessions[session]

    def take(self, replica: R, report: CacheReport) -> None:
        """Take the changes of a replica's cache."""
        if report.is_cleared:
            self.index.clear(replica)
        self.index.remove(replica, split_keys(report.removed))
        self.index.add(replica, split_keys(report.added))

    def cached_tokens(self, keys: Sequence[bytes]) -> dict[R, int]:
        """How many tokens of a prompt each replica has. `keys`: chain keys of the whole blocks of the prompt."""
        return {replica: num_blocks * self.block_size for replica, num_blocks in self.index.match(keys).items()}

    def choose(
        self, prompt: Prompt, cached: Mapping[R, int], loads: Mapping[R, ReplicaLoad], session: str, now_ns: int
    ) -> R:
        """The replica for a request. `cached`: tokens of the prompt that each has cached.

        It is the one with the least work; among equals, the one with fewer requests. A session stays where it is,
        unless that is much more work.
        """
        work = {
            replica: expected_work(prompt, cached.get(replica, 0), load, self._recent.at(replica, now_ns))
            for replica, load in loads.items()
        }
        chosen = min(work, key=lambda replica: (work[replica], loads[replica].num_requests))
        if session:
            own = self._sessions.pop(session, chosen)
            if own in work and work[own] < work[chosen] + STICKY_TOKENS:
                chosen = own
            self._sessions[session] = chosen
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._recent.add(chosen, prompt.num_tokens - cached.get(chosen, 0) + ROW_TOKENS, now_ns)
        return chosen
