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
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import exp
from typing import NamedTuple

from quire.core.values import Priority
from quire.engine.worker.kv_events import HASH_BYTES
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
    return int.from_bytes(key[:HASH_BYTES], "little")


ROW_TOKENS = 32  # a running or waiting answer slows a new one down like this many prompt tokens
FULL_TOKENS = 4096  # a replica without a free row or memory makes a request wait, or evicts what others use
RECENT_PART = 8  # this part of the work of the last minute counts, so that a light load is shared too
RECENT_NS = 60_000_000_000
MAX_AGE = 20  # times RECENT_NS; then weights are computed anew, before they are too large for floats
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


class RecentWork:
    """The work that was sent to each replica in about the last minute. Older work counts less."""

    def __init__(self) -> None:
        # Work of a time counts e^(time / RECENT_NS) from the base on, so that nothing changes while time passes.
        self._base_ns = 0
        self._weighted: dict[int, float] = {}

    def add(self, replica: int, num_tokens: int, now_ns: int) -> None:
        if now_ns - self._base_ns > MAX_AGE * RECENT_NS:
            self._weighted = self.at(now_ns)
            self._base_ns = now_ns
        weight = exp((now_ns - self._base_ns) / RECENT_NS)
        self._weighted[replica] = self._weighted.get(replica, 0.0) + num_tokens * weight

    def forget(self, replica: int) -> None:
        self._weighted.pop(replica, None)

    def at(self, now_ns: int) -> dict[int, float]:
        """The tokens of each replica, as seen at this time."""
        weight = exp(-min(max(now_ns - self._base_ns, 0) / RECENT_NS, 700.0))
        return {replica: tokens * weight for replica, tokens in self._weighted.items()}


class Choice(NamedTuple):
    replica: int
    work: int
    num_cached_tokens: int  # expected


def rank(
    prompt: Prompt,
    cached: Mapping[int, int],
    loads: Mapping[int, ReplicaLoad],
    recent: Mapping[int, float] | None = None,
) -> list[Choice]:
    """All replicas, the best first. `cached`: tokens of the prompt that each has cached. `recent`: see `RecentWork`.

    Among equals, the one with fewer requests is first.
    """
    recent = recent or {}
    choices = []
    for replica, load in loads.items():
        num_cached = cached.get(replica, 0)
        choices.append(Choice(replica, expected_work(prompt, num_cached, load, recent.get(replica, 0)), num_cached))
    return sorted(choices, key=lambda one: (one.work, loads[one.replica].num_requests, one.replica))


class Sessions:
    """The replica of each session, least recently used first."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._replicas: OrderedDict[str, int] = OrderedDict()
        self._max_sessions = max_sessions

    def __len__(self) -> int:
        return len(self._replicas)

    def prefer(self, session: str, choices: Sequence[Choice]) -> list[Choice]:
        """Put the replica of a session first, unless that is much more work."""
        own = self._replicas.get(session)
        at = next((at for at, choice in enumerate(choices) if choice.replica == own), 0)
        if not session or not at or choices[at].work >= choices[0].work + STICKY_TOKENS:
            return [*choices]
        return [choices[at], *choices[:at], *choices[at + 1 :]]

    def note(self, session: str, replica: int) -> None:
        """Record where a request of a session was sent."""
        if not session:
            return
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget a replica that is gone."""
        for session in [session for session, own in self._replicas.items() if own == replica]:
            del self._replicas[session]


class PrefixRouter:
    """Chooses replicas, with what they report about their load (`loads`) and their caches (`index`).

    Replicas have small numbers, which are used again after a replica has left. Requests that were sent to a replica
    after its last report have to be added to its load: `choose` does so, callers of `rank` have their own figures.
    """

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.index = PrefixIndex(max_blocks)
        self.loads = dict.fromkeys(range(num_replicas), ReplicaLoad())
        self._block_size = block_size
        self._sessions = Sessions()
        self._recent = RecentWork()

    def add_replica(self) -> int:
        """The number of a new replica, which has no content yet."""
        number = next(number for number in count() if number not in self.loads)
        self.loads[number] = ReplicaLoad()
        return number

    def remove_replica(self, number: int) -> None:
        del self.loads[number]
        self.index.clear(number)
        self._sessions.forget(number)
        self._recent.forget(number)

    def cached_tokens(self, keys: Sequence[bytes]) -> dict[int, int]:
        """How many tokens of a prompt each replica has. `keys`: chain keys of the whole blocks of the prompt."""
        counts = self.index.match(keys, max(self.loads, default=-1) + 1)
        return {number: num_blocks * self._block_size for number, num_blocks in enumerate(counts) if num_blocks}

    def rank(self, prompt: Prompt, cached: Mapping[int, int], session: str, now_ns: int) -> list[Choice]:
        """All replicas, the best first."""
        return self._sessions.prefer(session, rank(prompt, cached, self.loads, self._recent.at(now_ns)))

    def note(self, prompt: Prompt, chosen: Choice, session: str, now_ns: int) -> None:
        """Record where a request was sent."""
        self._recent.add(chosen.replica, prompt.num_tokens - chosen.num_cached_tokens + ROW_TOKENS, now_ns)
        self._sessions.note(session, chosen.replica)

    def choose(self, prompt: Prompt, keys: Sequence[bytes], session: str, now_ns: int) -> Choice:
        """The replica for a request, which is added to its load."""
        chosen = self.rank(prompt, self.cached_tokens(keys), session, now_ns)[0]
        num_tokens = prompt.num_tokens - chosen.num_cached_tokens
        load = self.loads[chosen.replica]
        self.loads[chosen.replica] = load.with_request(prompt.priority, num_tokens, prompt.num_blocks)
        self.note(prompt, chosen, session, now_ns)
        return chosen
