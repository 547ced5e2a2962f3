"""Queues of requests, and scheduling policies: order of admission and prefill, preemption rules, service accounting.

The waiting queue has a lane for each priority, in which tenants may be served fairly, and the requests that wait for a
prefix to be computed or loaded. The running set has the requests that hold a batch row, most urgent first.

`Fair` is the default. `Aging` and `Policy` itself (first come, first served) are for comparison, without accounting.

The ledger of a policy divides the planning of a step into turns. The planner processes the turns in order, gives tokens
to the requests of each, and charges the tokens to the ledger. `Ledger` implements four rules:

- **Guaranteed shares.** A lower tier that wants more than it gets earns credit: its share of all computed tokens, minus
  its own tokens. A tier with credit is *owed*: it has the first turn, up to its credit, and no waiting request preempts
  it. Credit does not protect from running requests that need memory.
- **Progress by credit.** A request that was preempted computes its context again. It is admitted as owed only when the
  credit of its tier covers that and a block of new tokens. This credit is set aside for the request, which no waiting
  request preempts until it has used it up. The limit of the credit rises accordingly.
- **Precedence above the shares.** All other tokens go to the tiers in order: HIGH, NORMAL, LOW.
- **Tenants.** Within a tier, the tenant that has been served least is first (`TenantClock`).

Where each row of a batch costs time (on a CPU), the ledger also decides which running requests are left out of a step:
see `StepCost`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from quire.core.cache import KeyedHeap
from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request, RequestState
from quire.core.values import NS_PER_S, TIERS, Priority
from quire.errors import InvalidRequest, QueueFull

Key = tuple[int, int]  # the policy's key, then order of arrival
G = TypeVar("G")


class ArrivalLane:
    """Requests in order of arrival. The key of the lane is the smallest key of its requests.

    A preempted request returns with a larger key, because it has been served. The order of arrival prevents later
    requests of its tier from overtaking it for that reason.
    """

    def __init__(self, key: Callable[[Request], int]) -> None:
        self._key = key
        self._by_arrival: KeyedHeap[Key, Request] = KeyedHeap()
        self._by_key: KeyedHeap[Key, Request] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_arrival)

    def push(self, request: Request) -> None:
        self._by_arrival.push((request.sequence, 0), request)
        self._by_key.push((self._key(request), request.sequence), request)

    def remove(self, request: Request) -> None:
        self._by_arrival.remove(request)
        self._by_key.remove(request)

    def first(self) -> tuple[Key, Request]:
        return self._by_key.first()[0], self._by_arrival.first()[1]


MIN_SWEEP = 64  # tenants stored before idle ones are first removed


class TenantClock:
    """Virtual time of each tenant in tokens, by start-time fair queuing.

    A tenant that was idle starts at the floor: it gets no credit for service it did not request. The floor is the
    lowest time among the tenants served last. A tenant without a stored time has the floor's, so the time of an idle
    tenant is only stored while it is above the floor. In a step in which the tier gets all it wants, no tenant is
    served at another's expense, so all times are set equal.
    """

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._num_alive: dict[str, int] = {}  # number of waiting and running requests
        self._floor = 0
        self._lowest: int | None = None  # lowest time served in this step
        self._highest = 0  # highest time of all tenants
        self._max_remembered = MIN_SWEEP
        # Tenants whose time decreased since their lane was last read. Their order decides between equal times: a set of
        # strings has another order in each process.
        self.refunded: dict[str, None] = {}

    def time(self, tenant: str) -> int:
        """Virtual time of a tenant. While the tenant has requests, only a refund decreases it."""
        return self._times.get(tenant, self._floor)

    def arrive(self, tenant: str) -> None:
        num_alive = self._num_alive.get(tenant, 0)
        if not num_alive:
            self._times[tenant] = max(self._times.get(tenant, 0), self._floor)
        self._num_alive[tenant] = num_alive + 1

    def leave(self, tenant: str) -> None:
        self._num_alive[tenant] -= 1
        if not self._num_alive[tenant]:
            del self._num_alive[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        start = self.time(tenant)
        self._times[tenant] = start + num_tokens
        self._highest = max(self._highest, start + num_tokens)
        if self._lowest is None or start < self._lowest:
            self._lowest = start

    def refund(self, tenant: str, num_tokens: int) -> None:
        """Take back a charge of this step."""
        self._times[tenant] -= num_tokens
        self.refunded[tenant] = None

    def end_step(self, *, is_short: bool = True) -> None:
        if self._lowest is None:
            return
        if not is_short:
            self._floor, self._lowest = self._highest, None
            self._times = dict.fromkeys(self._num_alive, self._highest)
            return
        self._floor = max(self._floor, self._lowest)
        self._lowest = None
        if len(self._times) > self._max_remembered:
            alive, floor = self._num_alive, self._floor
            self._times = {name: time for name, time in self._times.items() if time > floor or name in alive}
            self._max_remembered = max(MIN_SWEEP, 2 * len(self._times))


class TenantLane:
    """The waiting requests of one tier, ordered by the virtual time of their tenants.

    The tenant served least is first; its requests are in order of arrival. Times seldom decrease, so an outdated key
    is detected and corrected when it is the smallest. After a refund, a tenant gets a new key.
    """

    def __init__(self, clock: TenantClock) -> None:
        self._clock = clock
        self._lines: dict[str, KeyedHeap[Key, Request]] = {}
        self._tenants: KeyedHeap[Key, str] = KeyedHeap()  # those of `_lines`, by time and serial number of the line
        self._num_lines = 0  # created so far
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        for line in self._lines.values():
            yield from line

    def push(self, request: Request) -> None:
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = KeyedHeap()
            self._num_lines += 1
            self._tenants.push((self._clock.time(request.tenant), self._num_lines), request.tenant)
        line.push((request.sequence, 0), request)
        self._len += 1

    def remove(self, request: Request) -> None:
        self._lines[request.tenant].remove(request)
        self._len -= 1

    def first(self) -> tuple[Key, Request]:
        """The next request and its key. The lane must not be empty."""
        for tenant in self._clock.refunded:
            if tenant in self._lines:
                self._tenants.push((self._clock.time(tenant), 0), tenant)
        self._clock.refunded.clear()
        while True:
            (time, number), tenant = self._tenants.first()
            line = self._lines[tenant]
            now = self._clock.time(tenant)
            if not line:
                self._tenants.remove(tenant)
                del self._lines[tenant]
            elif now > time:
                self._tenants.push((now, number), tenant)
            else:
                request = line.first()[1]
                return (time, request.sequence), request


Lane = ArrivalLane | TenantLane  # the waiting requests of one tier, in order of admission; every operation is O(log n)


class Waiters(Generic[G]):
    """Requests that wait in groups: each group for the same event.

    A waiter costs time only when its wait starts and ends.
    """

    def __init__(self) -> None:
        self._groups: dict[G, KeyedHeap[Key, Request]] = {}
        self._group_of: dict[int, G] = {}  # by request id
        self._counts: Counter[tuple[Priority, str]] = Counter()  # (tier, tenant) -> number of waiters

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._group_of

    def __iter__(self) -> Iterator[Request]:
        for heap in self._groups.values():
            yield from heap

    def count(self, priority: Priority, tenant: str) -> int:
        return self._counts[priority, tenant]

    def groups(self) -> list[G]:
        return list(self._groups)

    def group_of(self, request: Request) -> G:
        return self._group_of[request.request_id]

    def park(self, request: Request, group: G, key: Key = (0, 0)) -> None:
        """Add a waiter to a group. `key`: order within the group; it begins with the length of its prefix."""
        self._group_of[request.request_id] = group
        self._counts[request.priority, request.tenant] += 1
        self._groups.setdefault(group, KeyedHeap()).push(key, request)

    def remove(self, request: Request) -> None:
        group = self._group_of.pop(request.request_id)
        heap = self._groups[group]
        heap.remove(request)
        if not heap:
            del self._groups[group]
        self._counts[request.priority, request.tenant] -= 1
        if not self._counts[request.priority, request.tenant]:
            del self._counts[request.priority, request.tenant]

    def pop(self, group: G, num_tokens: int | None = None) -> list[Request]:
        """Remove and return the waiters of a group whose prefix has at most this many tokens. None: all of them."""
        popped: list[Request] = []
        while heap := self._groups.get(group):
            (length, _), request = heap.first()
            if num_tokens is not None and length > num_tokens:
                break
            self.remove(request)
            popped.append(request)
        return popped


class WaitingQueue:
    """All waiting requests, up to a limit."""

    def __init__(self, make_lane: Callable[[Priority], Lane], max_requests: int) -> None:
        if max_requests < 1:
            raise InvalidRequest(f"{max_requests = } is less than 1")
        self.max_requests = max_requests
        self._lanes = {priority: make_lane(priority) for priority in Priority}
        # Requests that wait while a running request, the owner, computes their common prefix: by the owner, its epoch,
        # and whether they are its children.
        self.prefix_waiters: Waiters[tuple[Request, int, bool]] = Waiters()
        self.load_waiters: Waiters[int] = Waiters()  # requests that wait while a prefix is loaded, by the load's id
        self.num_tokens = 0  # known tokens of all waiting requests

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values())) + len(self.prefix_waiters) + len(self.load_waiters)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order; prefix waiters and load waiters included."""
        for lane in self._lanes.values():
            yield from lane
        yield from self.prefix_waiters
        yield from self.load_waiters

    def num_prefix_waiters(self, request: Request) -> int:
        """Number of requests of the same tier and tenant that wait for a prefix to be computed or loaded."""
        account = request.priority, request.tenant
        return self.prefix_waiters.count(*account) + self.load_waiters.count(*account)

    def num_ready(self, priority: Priority) -> int:
        """Number of waiting requests of a tier that could start now, without those that wait for a prefix."""
        return len(self._lanes[priority])

    def check_room(self) -> None:
        if len(self) >= self.max_requests:
            raise QueueFull(f"{len(self)} requests are waiting, which is the limit")

    def push(self, request: Request) -> None:
        """Queue a request.

        `check_room` applies to arrivals only: a preempted request is always queued.
        """
        self._lanes[request.priority].push(request)
        self.num_tokens += len(request.tokens)

    def head(self, tiers: Collection[Priority] = tuple(Priority)) -> tuple[Key, Request] | None:
        """The next request of these tiers, with its key."""
        heads = [self._lanes[priority].first() for priority in tiers if self._lanes[priority]]
        return min(heads, key=itemgetter(0)) if heads else None

    def park(self, request: Request, owner: Request, num_tokens: int) -> None:
        """Let a request wait for a prefix in flight, until `owner` has computed `num_tokens` or has stopped running."""
        self._lanes[request.priority].remove(request)
        group = (owner, owner.epoch, request.parent is owner)
        self.prefix_waiters.park(request, group, (num_tokens, request.sequence))

    def unpark(self, can_share: Callable[[Request], bool]) -> None:
        """Move prefix waiters whose prefix is computed, or will not be available, back into their lanes.

        It will not be available if the owner has stopped running or will not publish it (`can_share`). A child takes
        the blocks from its parent's table, so they need not be published.
        """
        for group in self.prefix_waiters.groups():
            owner, epoch, is_parent = group
            is_owner = owner.epoch == epoch and owner.state is RequestState.RUNNING
            is_owner = is_owner and (is_parent or can_share(owner))
            self._return(self.prefix_waiters.pop(group, owner.num_computed if is_owner else None))

    def park_for_load(self, request: Request, load_id: int) -> None:
        """Let a request wait for a load."""
        self._lanes[request.priority].remove(request)
        self.load_waiters.park(request, load_id)

    def unpark_load(self, load_id: int) -> list[Request]:
        """Move the waiters of a load back into their lanes, and return them."""
        return self._return(self.load_waiters.pop(load_id))

    def _return(self, waiters: list[Request]) -> list[Request]:
        for request in waiters:
            self._lanes[request.priority].push(request)
        return waiters

    def remove(self, request: Request) -> None:
        """Remove a request from its lane, from the prefix waiters or from the load waiters."""
        if request in self.prefix_waiters:
            self.prefix_waiters.remove(request)
        elif request in self.load_waiters:
            self.load_waiters.remove(request)
        else:
            self._lanes[request.priority].remove(request)
        self.num_tokens -= len(request.tokens)


_order = attrgetter("urgency", "sequence")


class RunningSet:
    """Running requests ordered by (urgency, order of arrival).

    Each holds a batch row: its index in the runner's batch. The order is constant, because urgency does not change
    while a request runs. The last request is preempted first.
    """

    def __init__(self, max_num_seqs: int, cache: KVCacheManager) -> None:
        if max_num_seqs < 1:
            raise InvalidRequest(f"{max_num_seqs = } is less than 1")
        self.max_num_seqs = max_num_seqs
        self.requests: list[Request] = []
        self.prompts: dict[int, Request] = {}  # by id: requests in prefill
        self.counts = [0] * len(Priority)  # running requests by tier
        self._cache = cache
        self.free_batch_indices = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def num_free_seqs(self) -> int:
        return len(self.free_batch_indices)

    def add(self, request: Request) -> None:
        """Assign a batch row to a request and insert it in order."""
        request.batch_index = self.free_batch_indices.pop()
        request.state = RequestState.RUNNING
        insort(self.requests, request, key=_order)
        self.prompts[request.request_id] = request
        self.counts[request.priority] += 1

    def vacate(self, request: Request) -> None:
        """Remove a request: free its batch row and blocks, and invalidate its results in flight."""
        assert request.batch_index is not None
        self.requests.remove(request)
        self.prompts.pop(request.request_id, None)
        self.counts[request.priority] -= 1
        self.free_batch_indices.append(request.batch_index)
        self._released.append(request.batch_index)
        request.batch_index = None
        request.epoch += 1
        self._cache.release(request)

    def pop_released(self) -> tuple[int, ...]:
        """Batch indices released since the last call."""
        released, self._released = self._released, []
        return tuple(released)


NORMAL_SHARE = 0.25
LOW_SHARE = 0.125
MAX_GUARANTEED = 0.9  # sum of the guaranteed shares: the rest is left for the highest tier
UNITS = 1_000_000  # of credit per token: credits are whole numbers, so that plans are exact

# Lower tiers may lengthen a step by this fraction of the time that the highest tier in it takes alone.
SPARE_NUMERATOR, SPARE_DENOMINATOR = 1, 3
# Longest step of LOW work alone: a request of a higher tier has to wait for its end.
LOW_STEP_NS = 50_000_000
LOW_STEP_BASES = 4  # or this many times the fixed cost of a step, if longer: otherwise steps would be mostly fixed cost
NO_NEEDS: Mapping[Priority, int] = MappingProxyType({})
NO_SHARES: Mapping[Priority, float] = MappingProxyType({})


class StepCost(NamedTuple):
    """Estimated duration of a step where every batch row takes time: a fixed cost and a cost per token."""

    base_ns: int
    token_ns: int  # at least 1
    context_ns: int = 0  # additional cost of a token for each token of context that it attends to
    single_ns: int = 0  # time saved in a step of a single token, where a backend has a faster path for it

    def price_ns(self, request: Request) -> int:
        """Cost of the next token of a request."""
        return self.token_ns + self.context_ns * request.num_planned


class Turn(NamedTuple):
    """Limits within which requests of these tiers share tokens and time.

    None: the limit of the step.
    """

    tiers: Collection[Priority]
    max_tokens: int | None = None
    max_ns: int | None = None
    is_owed: bool = False  # the turn of a tier with credit, which gives at least one token
    is_prepaid: bool = False  # only for requests for which credit was set aside


ALL_TIERS = Turn(TIERS)


class TierWork(NamedTuple):
    """Work of a tier before a step is planned."""

    num_decodes: int  # running requests whose prompts are fully computed
    num_prompts: int  # running requests in prefill
    num_waiting: int
    num_context: int = 0  # context tokens of the decodes, where rows cost time


class Ledger:
    """Counts of a policy, by which it divides a step into turns.

    Credits of tiers that have a guaranteed share, virtual time of tenants, and time limits of rationed tiers. Without
    shares, one turn is for all tiers.
    """

    def __init__(self, shares: Mapping[Priority, float] = NO_SHARES) -> None:
        self.cost: StepCost | None = None  # None: an additional batch row costs almost nothing
        self.rationed: Collection[Priority] = ()  # tiers whose running requests need a turn to be in this step
        self.shares = {priority: round(share * UNITS) for priority, share in shares.items()}
        self.credits = dict.fromkeys(self.shares, 0)  # UNITS per token
        self.prepaid = dict.fromkeys(self.shares, 0)  # tokens for which credit was set aside, not planned yet
        self.clocks = {priority: TenantClock() for priority in TIERS}
        self._work: Sequence[TierWork] = ()
        self._decodes = dict.fromkeys(TIERS, 0)  # requests whose token of this step needs no turn
        self._served = dict.fromkeys(TIERS, 0)  # tokens charged in this step
        self._num_prepaid = dict.fromkeys(self.shares, 0)  # of these, tokens paid by credit that was set aside
        self._is_awaited = False
        self._max_step_tokens = UNITS  # unknown before the end of the first step
        self._spent_ns = dict.fromkeys(TIERS, 0)  # cost of the tokens that turns gave in this step
        self._last_ns = 0  # estimated duration of the last step
        self._spare_ns = 0  # unused time by which lower tiers may still lengthen steps
        self._deferred_ns = 0  # cost of a token that was deferred to the next step

    # Queries

    def is_owed(self, priority: Priority) -> bool:
        return self.credits.get(priority, 0) > 0

    # One step

    def arrive(self, request: Request) -> None:
        """Record that a new request entered the queue."""
        self.clocks[request.priority].arrive(request.tenant)

    def leave(self, request: Request) -> None:
        """Record that a request ended."""
        self.clocks[request.priority].leave(request.tenant)

    def begin_step(self, work: Sequence[TierWork], *, is_awaited: bool = False) -> None:
        """Start a step. `work`: work of each tier, HIGH first.

        `is_awaited`: a waiting request needs the memory of a request for which credit was set aside. Such requests are
        not rationed then.
        """
        self._work = work
        self.rationed = self._find_rationed() if self.shares and self.cost is not None else frozenset()
        self._is_awaited = is_awaited
        self._deferred_ns = 0
        for priority in TIERS:
            self._served[priority] = self._spent_ns[priority] = 0
            self._decodes[priority] = 0 if priority in self.rationed else work[priority].num_decodes

    def _find_rationed(self) -> frozenset[Priority]:
        """The rationed tiers: LOW, whose steps are kept short, and every tier below the highest tier with work."""
        highest = next((tier for tier in TIERS if any(self._work[tier])), Priority.LOW)
        return frozenset(tier for tier in TIERS if tier > highest or tier is Priority.LOW)

    def turns(self) -> Iterator[Turn]:
        """The turns of this step. Each is computed after the previous one has ended."""
        if not self.shares:
            yield ALL_TIERS
            return
        for priority, num_tokens in self.prepaid.items():
            if num_tokens:
                if self._is_awaited:
                    yield Turn((priority,), num_tokens, is_owed=True, is_prepaid=True)
                    continue
                num_tokens = min(num_tokens, -(-self._max_owed(priority) // UNITS))
                yield Turn((priority,), num_tokens, self._owed_ns(priority), is_owed=True, is_prepaid=True)
        owed = [priority for priority in self.credits if self.is_owed(priority)]
        for priority in sorted(owed, key=lambda tier: -self.credits[tier] * UNITS // self.shares[tier]):
            num_served = self._served[priority] * UNITS  # by the turn before, from credit that was set aside
            num_tokens = min(self.credits[priority], self._max_owed(priority) - num_served)
            if num_tokens > 0:
                yield Turn((priority,), -(-num_tokens // UNITS), self._owed_ns(priority), is_owed=True)
        for priority in TIERS:
            yield Turn((priority,), max_ns=self._limit_ns(priority))

    def _max_owed(self, priority: Priority) -> int:
        """Most credit that a tier uses in the first turns of a step: twice its share of the tokens of a step.

        The rest is left for higher tiers, so that they do not wait while it catches up.
        """
        return 2 * self.shares[priority] * self._max_step_tokens

    def _owed_ns(self, priority: Priority) -> int | None:
        """Time that an owed tier may add to the step.

        This is twice its share, so that it catches up over several steps. The share is taken of the previous step,
        because the work of higher tiers in this step is not known yet.
        """
        limit_ns = self._limit_ns(priority)
        owed_ns = 2 * self._last_ns * self.shares[priority] // UNITS - self._spent_ns[priority]
        return None if limit_ns is None else max(limit_ns, owed_ns)

    def _limit_ns(self, priority: Priority) -> int | None:
        """Time that a tier may add to the step, next to higher tiers or alone. None: unlimited."""
        cost = self.cost
        if cost is None or priority not in self.rationed:
            return None
        top = self._top()
        if top is None or top >= priority:
            if priority is not Priority.LOW:
                return None
            longest_ns = max(LOW_STEP_NS, LOW_STEP_BASES * cost.base_ns)
            return max(longest_ns - cost.base_ns, cost.token_ns) - self._spent_ns[priority]
        return self._spare_ns + self._allowance_ns(cost, top) - self._below_ns(top) - self._single_ns(cost, top)

    def _top(self) -> Priority | None:
        """The highest tier with tokens in this step, as planned so far."""
        return next((tier for tier in TIERS if self._decodes[tier] or self._served[tier]), None)

    def _allowance_ns(self, cost: StepCost, top: Priority) -> int:
        return self._alone_ns(cost, top) * SPARE_NUMERATOR // SPARE_DENOMINATOR

    def _alone_ns(self, cost: StepCost, top: Priority) -> int:
        """Estimated duration of the step with that tier alone."""
        alone_ns = cost.base_ns + self._spent_ns[top] - self._single_ns(cost, top)
        if self._decodes[top]:
            alone_ns += self._decodes[top] * cost.token_ns + self._work[top].num_context * cost.context_ns
        return alone_ns

    def _single_ns(self, cost: StepCost, top: Priority) -> int:
        """Cost of losing the fast path for single tokens, if the top tier has one token."""
        is_single = self._decodes[top] == 1 and not self._spent_ns[top]
        return min(cost.single_ns, cost.base_ns + cost.token_ns) if is_single else 0

    def _below_ns(self, top: Priority) -> int:
        return sum(self._spent_ns[tier] for tier in TIERS if tier > top)

    def affordable(self, request: Request, left_ns: int) -> int:
        """Number of tokens of a request that can be computed in `left_ns`."""
        num_tokens = max(left_ns, 0) // self.price_ns(request)
        if not num_tokens:
            self._deferred_ns = max(self._deferred_ns, self.price_ns(request))
        return num_tokens

    def price_ns(self, request: Request) -> int:
        return 1 if self.cost is None else self.cost.price_ns(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge tokens that a turn gave to a request."""
        self._served[request.priority] += num_tokens
        self._spent_ns[request.priority] += num_tokens * self.price_ns(request)
        self.clocks[request.priority].charge(request.tenant, num_tokens)

    def refund(self, request: Request, num_tokens: int) -> None:
        """Take back the charge of tokens that are not in the plan of this step after all."""
        self._served[request.priority] -= num_tokens
        self._spent_ns[request.priority] -= num_tokens * self.price_ns(request)
        self.clocks[request.priority].refund(request.tenant, num_tokens)

    def charge_decodes(self, priority: Priority, tenant: str, num_tokens: int) -> None:
        """Charge tokens that no turn gave: one for each decode of a tenant."""
        self._served[priority] += num_tokens
        self.clocks[priority].charge(tenant, num_tokens)

    def covers(self, priority: Priority, num_tokens: int) -> bool:
        """Whether the credit of a tier pays for this many tokens."""
        return priority in self.credits and self.credits[priority] >= num_tokens * UNITS

    def set_aside(self, request: Request, num_tokens: int) -> None:
        """Set credit aside for the next tokens of a request, if the credit of its tier covers them."""
        request.is_covered = self.covers(request.priority, num_tokens)
        if request.is_covered:
            request.num_prepaid = num_tokens
            self.prepaid[request.priority] += num_tokens
            self.credits[request.priority] -= num_tokens * UNITS

    def use_prepaid(self, request: Request, num_tokens: int) -> None:
        """Use up credit that was set aside: these tokens are in the plan of this step."""
        num_used = min(num_tokens, request.num_prepaid)
        request.num_prepaid -= num_used
        self.prepaid[request.priority] -= num_used
        self._num_prepaid[request.priority] += num_used

    def give_back(self, request: Request) -> None:
        """Return unused credit of a request that ends or is preempted to its tier."""
        if request.num_prepaid:
            self.prepaid[request.priority] -= request.num_prepaid
            self.credits[request.priority] += request.num_prepaid * UNITS
            request.num_prepaid = 0
        request.is_covered = False

    def end_step(
        self,
        short: Collection[Priority],
        max_num_batched_tokens: int,
        needs: Mapping[Priority, int] = NO_NEEDS,
        saving: Collection[Priority] = (),
    ) -> None:
        """End a step. `short`: tiers that wanted more tokens than they got.

        `needs`: tokens of the first waiting request of a tier, for which the tier may save credit. `saving`: tiers with
        a request that was preempted and has not caught up: they do not lose their credit meanwhile.
        """
        self._keep_spare()
        self._max_step_tokens = max_num_batched_tokens
        total = sum(self._served.values())
        for priority, credit in self.credits.items():
            if credit or short:  # otherwise no tier is short, and there is no credit to reset
                changed = self._credit_after(priority, total, short, is_saving=priority in saving)
                most = max_num_batched_tokens + 2 * needs.get(priority, 0) - self.prepaid[priority]
                self.credits[priority] = max(-max_num_batched_tokens * UNITS, min(changed, max(most, 0) * UNITS))
            self._num_prepaid[priority] = 0
        for priority, clock in self.clocks.items():
            clock.end_step(is_short=priority in short)

    def _credit_after(self, priority: Priority, total: int, short: Collection[Priority], *, is_saving: bool) -> int:
        """Credit of a tier after a step of `total` tokens.

        `is_saving`: one of its requests was preempted and has to compute its context again. The tier then keeps credit
        that it does not need at the moment. Otherwise a request that is preempted before it catches up, in every pause
        of a higher tier, would not make progress.
        """
        credit = self.credits[priority]
        kept = credit if is_saving else min(credit, 0)
        gain = total * self.shares[priority]
        if not any(any(self._work[tier]) or self._served[tier] for tier in TIERS if tier is not priority):
            return max(min(credit + gain, 0), kept)  # it has no rivals
        changed = credit + gain - (self._served[priority] - self._num_prepaid[priority]) * UNITS
        if not any(tier is not priority for tier in short):
            changed = max(changed, kept)  # no other tier was short: the tier gets no debt
        return changed if priority in short or is_saving else min(changed, 0)

    def _keep_spare(self) -> None:
        """Carry unused time of the lower tiers over to the next step, up to about the cost of one token.

        Without it, an allowance of less than one token per step would never admit a token.
        """
        cost = self.cost
        if cost is None or (top := self._top()) is None:
            return
        self._last_ns = sum(self._alone_ns(cost, tier) - cost.base_ns for tier in TIERS) + cost.base_ns
        below_ns, single_ns = self._below_ns(top), self._single_ns(cost, top)
        spare_ns = self._spare_ns + self._allowance_ns(cost, top) - below_ns - (single_ns if below_ns else 0)
        self._spare_ns = max(0, min(spare_ns, max(self._deferred_ns, cost.token_ns) + single_ns - 1))


PATIENCE_S = 10.0


class Policy:
    """A scheduling policy. This one is the simplest: first come, first served, and no preemption by waiting requests.

    Each scheduler has its own instance. Times are integers in nanoseconds: keys are exact.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()

    def make_lane(self, priority: Priority) -> Lane:  # noqa: ARG002
        """Create an empty queue for the waiting requests of one tier."""
        return ArrivalLane(self.key)

    def key(self, request: Request) -> int:
        """Order of prompts within a turn, smallest first.

        It may increase while a request runs, and never decreases.
        """
        return request.arrived_ns

    def urgency(self, request: Request, now_ns: int) -> int:  # noqa: ARG002
        """Order in which running requests get memory, smallest first; the last is preempted first.

        Constant while the request runs.
        """
        return 0

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:  # noqa: ARG002
        """Whether a waiting request may take the batch row and the blocks of a running request.

        Running requests that need memory for their next token do not ask: they take it from the lowest tier.
        """
        return False

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:  # noqa: ARG002
        """Number of batch rows that a tier keeps while a request of a higher tier waits for one."""
        return 0

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        """Whether `waiting` should wait for a common prefix that `running` is computing."""
        return (self.key(running), running.sequence) < (self.key(waiting), waiting.sequence)


class Fair(Policy):
    """Guaranteed shares for lower tiers, and fairness between tenants.

    Higher tiers have precedence for everything above the shares. A waiting request preempts requests of a lower tier,
    unless that tier is owed service (has had less than its share). A request that was preempted before and catches up
    is preempted also then, unless the credit of its tier was set aside for it (`Request.is_spared`).
    """

    def __init__(self, normal_share: float = NORMAL_SHARE, low_share: float = LOW_SHARE) -> None:
        for name, share in (("normal_share", normal_share), ("low_share", low_share)):
            if type(share) not in (int, float) or not 0 < share < 1:
                raise InvalidRequest(f"{name} = {share!r} is not a number above 0 and below 1")
        if normal_share + low_share > MAX_GUARANTEED:
            raise InvalidRequest(f"{normal_share = } and {low_share = } together are more than {MAX_GUARANTEED}")
        self.ledger = Ledger({Priority.NORMAL: normal_share, Priority.LOW: low_share})

    def make_lane(self, priority: Priority) -> Lane:
        return TenantLane(self.ledger.clocks[priority])

    def key(self, request: Request) -> int:
        return self.ledger.clocks[request.priority].time(request.tenant)

    def urgency(self, request: Request, now_ns: int) -> int:  # noqa: ARG002 - a tier does not age
        return request.priority

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:  # noqa: ARG002
        if waiting.priority >= running.priority:
            return False
        if running.is_catching_up:
            return not running.is_covered
        return not self.ledger.is_owed(running.priority)

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:
        """The tier's share of the batch rows.

        A request may be admitted because its tier is owed service. Without kept rows it would be preempted as soon as
        its prompt had used up the credit, and most of the share would be spent on recomputing tails.
        """
        return self.ledger.shares.get(priority, 0) * max_num_seqs // UNITS

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        """True if `running` is of a higher tier, or of the same tier and its tenant is not served later."""
        if running.priority is not waiting.priority:
            return running.priority < waiting.priority
        return running.tenant == waiting.tenant or self.key(running) <= self.key(waiting)


class Aging(Policy):
    """Tiers with aging: each `patience_s` seconds of waiting raises a request by one tier.

    The usual form of aging, `effective = tier - waited / patience`, never changes the order of two waiting requests,
    because both age at the same rate. So a waiting request has one constant key, a virtual deadline, until its prompt
    is computed:

        key = (start of this wait) - (earlier waits) + tier * patience

    Memory and batch rows are assigned by urgency: the same formula, rounded to whole tiers. Age is time spent waiting,
    so the urgency of a running request is constant. A LOW backlog older than twice the patience precedes every new HIGH
    request, which is why `Fair` is the default.
    """

    def __init__(self, patience: float = PATIENCE_S) -> None:
        """`patience`: in seconds."""
        if type(patience) not in (int, float) or not 0 <= patience <= 1e6:
            raise InvalidRequest(f"{patience = } is not a number from 0 to 1e6 seconds")
        super().__init__()
        self.patience_s = patience
        self._patience_ns = round(patience * NS_PER_S)

    def key(self, request: Request) -> int:
        return request.enqueued_ns - request.earlier_waits_ns + request.priority * self._patience_ns

    def urgency(self, request: Request, now_ns: int) -> int:
        if not self._patience_ns:
            return 0  # zero patience: any wait outweighs all tiers
        waited_ns = request.waited_ns
        if request.state is RequestState.WAITING:
            waited_ns += now_ns - request.enqueued_ns
        return request.priority - waited_ns // self._patience_ns

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return waiting.priority < running.priority and self.urgency(waiting, now_ns) < running.urgency


def make_policy(
    name: str, patience: float | None = None, normal_share: float | None = None, low_share: float | None = None
) -> Policy:
    """Create a policy by name.

    None: the policy's default. Raises if a setting does not apply to the policy.
    """
    if name not in POLICIES:
        raise InvalidRequest(f"scheduling_policy = {name!r} is not one of {', '.join(POLICIES)}")
    settings = {"patience": patience, "normal_share": normal_share, "low_share": low_share}
    given = {setting: value for setting, value in settings.items() if value is not None}
    for setting, value in given.items():
        if (owner := SETTINGS[setting]) != name:
            raise InvalidRequest(f"{setting} = {value!r} applies only to the policy {owner}, not to {name}")
    return POLICIES[name](**given)


POLICIES: dict[str, Callable[..., Policy]] = {
    "fair": Fair,
    "aging": Aging,
    "fcfs": Policy,
}
SETTINGS = {"patience": "aging", "normal_share": "fair", "low_share": "fair"}  # setting -> the policy that has it
