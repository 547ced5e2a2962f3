"""Several replicas behind a router: each is a whole scheduler with simulated steps.

A router chooses the replica for a request, by what the replicas have reported and what was sent there since.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from quire.core.cache import BLOCK_SIZE, TokenChain, hash_block_tokens, root_key
from quire.core.values import NS_PER_S
from quire.engine.worker.kv_events import CacheReporter
from quire.scale.routing import DEFAULT_MAX_BLOCKS, PrefixRouter, Prompt, ReplicaLoad
from quire.sim.simulator import Progress, RunReport, SimConfig, SimReplica, StepTime, make_records, to_ns
from quire.sim.traces import TraceRequest

REPORT_S = 0.5  # a replica tells the router its load and the changes of its cache this often

Router = Callable[[int, TraceRequest, Sequence[ReplicaLoad]], int]  # the replica for request `number` of a trace


def round_robin(number: int, one: TraceRequest, loads: Sequence[ReplicaLoad]) -> int:
    """Each replica in turn."""
    del one
    return number % len(loads)


class ByPrefix(PrefixRouter[int]):
    """By expected work: cached prefixes, queues and memory (`quire.scale.routing`)."""

    def __init__(self, block_size: int = BLOCK_SIZE, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        super().__init__(block_size, max_blocks)
        self.num_expected_tokens: dict[int, int] = {}  # request -> prompt tokens that its replica should compute

    def __call__(self, number: int, one: TraceRequest, loads: Sequence[ReplicaLoad]) -> int:
        tokens = one.prompt_ids(number)
        chain = TokenChain(root_key(b"", one.salt), array("I", tokens), self.block_size, hash_block_tokens)
        cached = self.cached_tokens([chain.key(index) for index in range((len(tokens) - 1) // self.block_size)])
        prompt = Prompt(len(tokens), one.priority, _num_blocks(one, self.block_size))
        chosen = self.choose(prompt, cached, dict(enumerate(loads)), one.session, to_ns(one.arrival_s))
        self.num_expected_tokens[number] = len(tokens) - cached.get(chosen, 0)
        return chosen


ROUTERS: dict[str, Callable[[int], Router]] = {  # for a block size
    "prefix": ByPrefix,
    "round-robin": lambda _: round_robin,
}


def _num_blocks(one: TraceRequest, block_size: int) -> int:
    return -(-(one.prompt_tokens + one.output_tokens) // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport(RunReport):
    router: str
    num_replicas: int
    num_requests: tuple[int, ...]  # of each replica
    busy_s: tuple[float, ...]  # of each replica, in steps
    index_bytes: int  # of the router's index at the end

    @property
    def hit_tokens(self) -> int:
        return sum(record.num_hit_tokens for record in self.records)

    @property
    def imbalance(self) -> float:
        """The busy time of the busiest replica, relative to the mean."""
        mean = sum(self.busy_s) / len(self.busy_s)
        return max(self.busy_s) / mean if mean else 1.0


def simulate_cluster(
    trace: Sequence[TraceRequest],
    config: SimConfig,
    step_time: StepTime,
    num_replicas: int,
    router: str = "prefix",
    *,
    report_s: float = REPORT_S,
    progress: Progress = lambda _: None,
) -> ClusterReport:
    """Simulate a trace on a cluster. Every replica has a cache of `config.num_blocks`."""
    records, numbers = make_records(trace), count(1)
    replicas = [SimReplica(trace, config, step_time, records, numbers, progress) for _ in range(num_replicas)]
    choose = ROUTERS[router](config.block_size)
    by_prefix = choose if isinstance(choose, ByPrefix) else None
    expected = {} if by_prefix is None else by_prefix.num_expected_tokens
    reporters = [] if by_prefix is None else [CacheReporter(replica.scheduler.cache) for replica in replicas]
    loads = [ReplicaLoad()] * num_replicas
    num_requests = [0] * num_replicas
    report_ns, next_report_ns = max(to_ns(report_s), 1), 0
    for number, one in enumerate(trace):
        now_ns = to_ns(one.arrival_s)
        while next_report_ns <= now_ns:
            for replica in replicas:
                replica.run_until(next_report_ns)
            loads = [_load(replica, expected) for replica in replicas]
            for at, reporter in enumerate(reporters):
                if by_prefix is not None and (report := reporter.pop(is_idle=True)) is not None:
                    by_prefix.take(at, report)
            next_report_ns = max(next_report_ns + report_ns, now_ns - now_ns % report_ns)
        chosen = choose(number, one, loads)
        num_tokens, num_blocks = expected.get(number, one.prompt_tokens), _num_blocks(one, config.block_size)
        loads[chosen] = loads[chosen].with_request(one.priority, num_tokens, num_blocks)
        num_requests[chosen] += 1
        replicas[chosen].run_until(now_ns)
        replicas[chosen].push(number)
    for replica in replicas:
        replica.run_until(None)
    progress(len(trace))
    return ClusterReport(
        records=tuple(records),
        num_preemptions=sum(replica.num_preemptions for replica in replicas),
        makespan_s=max(replica.now_ns for replica in replicas) / NS_PER_S,
        router=router,
        num_replicas=num_replicas,
        num_requests=tuple(num_requests),
        busy_s=tuple(replica.busy_ns / NS_PER_S for replica in replicas),
        index_bytes=0 if by_prefix is None else by_prefix.index.num_bytes,
    )


def _load(replica: SimReplica, expected: Mapping[int, int]) -> ReplicaLoad:
    """`expected`: prompt tokens that a waiting request should compute, if its router knows that."""
    scheduler = replica.scheduler
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
