"""Several replicas behind a router: each is a whole scheduler with simulated steps.

The routers choose the replica for a request.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Protocol

from quire.core.cache.block import BLOCK_SIZE
from quire.core.cache.context import TokenChain, hash_block_tokens, root_key
from quire.core.events import Cleared, Published, Removed, TreeChange
from quire.core.policy import NS_PER_S
from quire.core.values import Priority
from quire.scale.routing import DEFAULT_MAX_BLOCKS, PrefixRouter, Prompt, ReplicaLoad
from quire.sim.simulator import RequestRecord, SimConfig, SimReplica, StepTime, make_records, to_ns
from quire.sim.traces import TraceRequest

NUM_POINTS = 100  # of each replica on the ring of consistent hashing


class Router(Protocol):
    def choose(self, number: int, one: TraceRequest) -> int:
        """The replica for request `number` of a trace."""

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Take what a replica says of itself, from time to time."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def choose(self, number: int, one: TraceRequest) -> int:
        del one
        return number % self._num_replicas

    def report(self, replica: int, load: ReplicaLoad) -> None: ...


class PowerOfTwo:
    """Of two random replicas, the one with fewer requests. Counts its own between reports."""

    def __init__(self, num_replicas: int) -> None:
        self._counts = [0] * num_replicas
        self._random = Random(0)

    def choose(self, number: int, one: TraceRequest) -> int:
        del number, one
        count = len(self._counts)
        pair = self._random.sample(range(count), 2) if count > 1 else [0]
        chosen = min(pair, key=self._counts.__getitem__)
        self._counts[chosen] += 1
        return chosen

    def report(self, replica: int, load: ReplicaLoad) -> None:
        self._counts[replica] = load.num_requests


class ConsistentHash:
    """By the session of a request, or by the start of its prompt if it has none. Knows no load."""

    def __init__(self, num_replicas: int) -> None:
        places = [(replica, point) for replica in range(num_replicas) for point in range(NUM_POINTS)]
        ring = sorted((_hash(f"{replica} {point}"), replica) for replica, point in places)
        self._points: list[int] = [point for point, _ in ring]
        self._replicas: list[int] = [replica for _, replica in ring]

    def choose(self, number: int, one: TraceRequest) -> int:
        name = f"{one.salt} {one.session or one.prompt_ids(number)[:BLOCK_SIZE]}"
        return self._replicas[bisect_left(self._points, _hash(name)) % len(self._points)]

    def report(self, replica: int, load: ReplicaLoad) -> None: ...


class ByPrefix:
    """By expected work: cached prefixes, queues and memory (`quire.scale.routing`)."""

    def __init__(self, num_replicas: int, block_size: int = BLOCK_SIZE, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._router = PrefixRouter(num_replicas, block_size, max_blocks)
        self.index = self._router.index
        self.num_expected_tokens: dict[int, int] = {}  # request -> prompt tokens that its replica should compute

    def choose(self, number: int, one: TraceRequest) -> int:
        tokens = one.prompt_ids(number)
        chain = TokenChain(root_key(b"", one.salt), array("I", tokens), self._block_size, hash_block_tokens)
        keys = [chain.key(index) for index in range((len(tokens) - 1) // self._block_size)]
        num_blocks = -(-(len(tokens) + one.output_tokens) // self._block_size)
        prompt = Prompt(len(tokens), one.priority, num_blocks)
        chosen = self._router.choose(prompt, keys, one.session, round(one.arrival_s * NS_PER_S))
        self.num_expected_tokens[number] = len(tokens) - chosen.num_cached_tokens
        return chosen.replica

    def report(self, replica: int, load: ReplicaLoad) -> None:
        self._router.loads[replica] = load


ROUTERS: dict[str, Callable[[int], Router]] = {
    "prefix": ByPrefix,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "consistent-hash": ConsistentHash,
}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def imbalance(values: Sequence[float]) -> float:
    """The largest value, relative to the mean."""
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


REPORT_S = 0.5  # a replica tells the router its load and the changes of its cache this often


@dataclass(frozen=True, slots=True)
class ClusterReport:
    router: str
    num_replicas: int
    records: tuple[RequestRecord, ...]
    num_requests: tuple[int, ...]  # of each replica
    busy_s: tuple[float, ...]  # of each replica, in steps
    num_preemptions: int
    makespan_s: float
    index_bytes: int  # of the router's index at the end

    @property
    def hit_tokens(self) -> int:
        return sum(record.num_hit_tokens for record in self.records)

    @property
    def imbalance(self) -> float:
        """The busy time of the busiest replica, relative to the mean."""
        return imbalance(self.busy_s)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(record.num_outputs for record in self.records) / self.makespan_s if self.makespan_s else 0.0

    def tier(self, priority: Priority) -> list[RequestRecord]:
        return [record for record in self.records if record.priority is priority]


def simulate_cluster(
    trace: Sequence[TraceRequest],
    config: SimConfig,
    step_time: StepTime,
    num_replicas: int,
    router: str = "prefix",
    *,
    report_s: float = REPORT_S,
    progress: Callable[[int], None] = lambda _done: None,
) -> ClusterReport:
    """Simulate a trace on a cluster. Every replica has a cache of `config.num_blocks`."""
    return _Cluster(trace, config, step_time, num_replicas, router, report_s, progress).run()


class _Cluster:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: SimConfig,
        step_time: StepTime,
        num_replicas: int,
        router: str,
        report_s: float,
        progress: Callable[[int], None],
    ) -> None:
        self.trace = trace
        self.name = router
        self.router: Router = ROUTERS[router](num_replicas)
        self.records = make_records(trace)
        self.progress = progress
        self.replicas = [SimReplica(trace, config, step_time, records=self.records) for _ in range(num_replicas)]
        self.num_requests = [0] * num_replicas
        self.num_ended = 0
        self._report_ns = max(to_ns(report_s), 1)
        self._changes: list[list[TreeChange]] = [[] for _ in self.replicas]
        for number, replica in enumerate(self.replicas):
            replica.on_end = self._note_end
            if isinstance(self.router, ByPrefix):
                replica.scheduler.cache.tree.reports_salts = True
                replica.scheduler.cache.tree.on_change = self._changes[number].append

    def run(self) -> ClusterReport:
        next_report_ns = 0
        for number, one in enumerate(self.trace):
            now_ns = to_ns(one.arrival_s)
            while next_report_ns <= now_ns:
                self._report(next_report_ns)
                next_report_ns = max(next_report_ns + self._report_ns, now_ns - now_ns % self._report_ns)
            chosen = self.router.choose(number, one)
            self.num_requests[chosen] += 1
            self.replicas[chosen].run_until(now_ns)
            self.replicas[chosen].push(number)
        for replica in self.replicas:
            replica.run_until(None)
        self.progress(self.num_ended)
        return ClusterReport(
            router=self.name,
            num_replicas=len(self.replicas),
            records=tuple(self.records),
            num_requests=tuple(self.num_requests),
            busy_s=tuple(replica.busy_ns / NS_PER_S for replica in self.replicas),
            num_preemptions=sum(replica.num_preemptions for replica in self.replicas),
            makespan_s=max(replica.now_ns for replica in self.replicas) / NS_PER_S,
            index_bytes=self.router.index.num_bytes if isinstance(self.router, ByPrefix) else 0,
        )

    def _report(self, now_ns: int) -> None:
        """Let all replicas tell the router what has changed."""
        for number, replica in enumerate(self.replicas):
            replica.run_until(now_ns)
            self.router.report(number, self._load(replica))
            if isinstance(self.router, ByPrefix):
                self._apply_changes(self.router, number)

    def _apply_changes(self, router: ByPrefix, number: int) -> None:
        for change in self._changes[number]:
            match change:
                case Published(key):
                    router.index.add(number, (key,))
                case Removed(keys):
                    router.index.remove(number, keys)
                case Cleared():
                    router.index.clear(number)
        self._changes[number].clear()

    def _load(self, replica: SimReplica) -> ReplicaLoad:
        scheduler = replica.scheduler
        expected = self.router.num_expected_tokens if isinstance(self.router, ByPrefix) else {}
        queued = [0, 0, 0]
        for request in scheduler.waiting:
            queued[request.priority] += expected.get(request.request_id, len(request.tokens))
        for request in scheduler.running:
            queued[request.priority] += max(len(request.tokens) - request.num_planned, 0)
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=len(scheduler.running) + len(scheduler.waiting),
            max_num_seqs=replica.config.max_num_seqs,
            num_free_blocks=scheduler.cache.pool.num_free,
            num_blocks=replica.config.num_blocks,
        )

    def _note_end(self, number: int) -> None:
        del number
        self.num_ended += 1
        if self.num_ended % 64 == 0:
            self.progress(self.num_ended)
