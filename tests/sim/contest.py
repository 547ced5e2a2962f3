"""Permanent overload: tiers and tenants that always have waiting requests, generated from a seed.

There is no runner: every answer has its maximum length, and all tokens are 1. The tests check how many tokens each tier
and tenant gets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from quire.core.check import check_scheduler
from quire.core.events import Admitted, Event, Preempted
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import UNITS, Aging, Fair, StepCost
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import NS_PER_S, Priority, SamplingParams
from tests.core.helpers import service_bound
from tests.sim.world import overtake_window

MAX_PROMPT, MAX_ANSWER = 40, 12
COSTS = (None, None, StepCost(1, 1_000), StepCost(5_000_000, 2_000_000), StepCost(10**9, 10**7))


@dataclass(slots=True)
class Load:
    """Requests of one tenant. `num_waiting`: number of its waiting requests at any time; 0: added by the test."""

    priority: Priority
    tenant: str = ""
    num_waiting: int = 0


@dataclass(slots=True)
class Arrival:
    """Counters at the arrival of a request: planned steps and computed tokens."""

    request: Request
    num_steps: int
    total: int
    own: int  # tokens of its tier


class Contest:
    def __init__(self, seed: int, loads: list[Load], patience_s: float | None = None) -> None:
        """`patience_s`: of the aging policy, which then replaces the fair one."""
        self.random = random = Random(seed)
        self.loads = loads
        self.fair = Fair()
        self.fair.ledger.cost = random.choice(COSTS)
        self.aging = None if patience_s is None else Aging(patience_s)
        self.max_num_seqs = random.choice((1, 2, 4, 8, 16))
        self.max_num_batched_tokens = self.max_num_seqs + random.choice((4, 16, 64))
        longest = MAX_PROMPT + MAX_ANSWER
        num_blocks = 1 + self.max_num_seqs * -(-longest // 4) * random.choice((1, 2))
        self.scheduler = Scheduler(
            KVCacheManager(num_blocks + 2 * self.max_num_seqs, 4),
            self.aging or self.fair,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=random.choice((4, 16, 64)),
            observe=self._observe,
        )
        # Tokens computed until a batch row and its blocks are free
        self.drain_tokens = self.max_num_seqs * longest + self.max_num_batched_tokens
        self.served: Counter[Priority] = Counter()
        self.served_tenants: Counter[tuple[Priority, str]] = Counter()
        self.arrivals: dict[int, Arrival] = {}  # requests that have not started
        self.started: list[Arrival] = []  # here the counters are the differences between arrival and start
        self.num_preemptions = 0
        self.num_steps = 0
        self.now_ns = 0

    def _observe(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self.num_preemptions += 1
        elif isinstance(event, Admitted) and not event.is_resumed:
            at = self.arrivals.pop(event.request_id)
            priority = at.request.priority
            self.started.append(
                Arrival(
                    at.request,
                    self.num_steps - at.num_steps,
                    sum(self.served.values()) - at.total,
                    self.served[priority] - at.own,
                )
            )

    def add(self, load: Load) -> None:
        number = len(self.started) + len(self.arrivals) + 1
        prompt = [self.random.randrange(1 << 30) for _ in range(self.random.randint(1, MAX_PROMPT))]
        sampling = SamplingParams(max_tokens=self.random.randint(1, MAX_ANSWER))
        request = Request(number, prompt, sampling, priority=load.priority, tenant=load.tenant)
        total, own = sum(self.served.values()), self.served[load.priority]
        self.arrivals[number] = Arrival(request, self.num_steps, total, own)
        self.scheduler.add(request, self.now_ns)

    def step(self) -> StepPlan:
        waiting = Counter((request.priority, request.tenant) for request in self.scheduler.waiting)
        for load in self.loads:
            while load.num_waiting and waiting[load.priority, load.tenant] < load.num_waiting:
                waiting[load.priority, load.tenant] += 1
                self.add(load)
        self.now_ns += 1_000_000
        plan = self.scheduler.schedule(self.now_ns)
        self.num_steps += 1
        requests = [self.scheduler.requests.get(piece.request_id) for piece in plan.slices]
        for piece, request in zip(plan.slices, requests, strict=True):
            assert request is not None
            self.served[request.priority] += piece.length
            self.served_tenants[request.priority, request.tenant] += piece.length
        if not plan.is_empty:
            tokens = tuple((1,) if piece.wants_token else () for piece in plan.slices)
            self.scheduler.commit(plan, StepResult(tokens))
        if self.num_steps % 50 == 0:
            check_scheduler(self.scheduler)
        return plan

    def wait_ratios(self, priority: Priority) -> list[float]:
        """Waits of a tier's requests under the fair policy, in tokens of all tiers, as a part of their bounds."""
        total, own = sum(self.served.values()), self.served[priority]
        waits = [(one.request, one.total, one.own) for one in self.started]
        waits += [(one.request, total - one.total, own - one.own) for one in self.arrivals.values()]
        ledger, drain_tokens, step_tokens = self.fair.ledger, self.drain_tokens, self.max_num_batched_tokens
        return [
            waited / service_bound(ledger, priority, ahead + len(request.tokens), drain_tokens, step_tokens)
            for request, waited, ahead in waits
            if request.priority is priority
        ]

    def overtaken_ratios(self, priority: Priority) -> list[float]:
        """How much later than a tier's request the last one came that started before it, as a part of the bound.

        Under the aging policy. The bound is the window in which requests of a higher tier may overtake it.
        """
        assert self.aging is not None
        latest: dict[Priority, int] = {}  # arrival of requests that have started
        ratios = []
        for one in (*self.started, *self.arrivals.values()):
            request = one.request
            if request.priority is priority:
                windows_ns = {p: overtake_window(self.aging.patience_s * NS_PER_S, priority, p) for p in latest}
                later = [(at - request.arrived_ns) / windows_ns[p] for p, at in latest.items()]
                ratios.append(max([0.0, *later]))
            elif request.request_id not in self.arrivals:
                latest[request.priority] = max(latest.get(request.priority, 0), request.arrived_ns)
        return ratios

    def lag(self, priority: Priority) -> float:
        """Number of tokens by which a tier is below its guaranteed share."""
        share = self.fair.ledger.shares[priority] / UNITS
        return share * sum(self.served.values()) - self.served[priority]
