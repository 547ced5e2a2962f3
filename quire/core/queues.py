"""Waiting and running requests.

The waiting queue has a lane for each priority, in which tenants may be served fairly, and the requests that wait for a
prefix to be computed or loaded. The running set has the requests that hold a batch row, most urgent first.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request, RequestState
from quire.core.values import Priority
from quire.errors import InvalidRequest, QueueFull

Key = tuple[int, int]  # the policy's key, then order of arrival
G = TypeVar("G")


class RequestHeap:
    """Requests ordered by a constant key. Every operation is O(log n).

    A removed request is dropped at once. Its heap entry is deleted when it reaches the top, or when half of the heap
    consists of such entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._live: dict[int, tuple[int, Request]] = {}  # request id -> number of its live entry, and the request
        self._num_pushes = 0  # unique, so entries never compare requests

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return (request for _, request in self._live.values())

    def push(self, key: Key, request: Request) -> None:
        self._num_pushes += 1
        self._live[request.request_id] = self._num_pushes, request
        heappush(self._heap, (key, self._num_pushes, request))

    def first(self) -> tuple[Key, Request]:
        """The entry with the smallest key. The heap must not be empty."""
        heap = self._heap
        while not self._is_live(heap[0]):
            heappop(heap)
        return heap[0][0], heap[0][2]

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
        if self._heap[0][2] is request:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        live = self._live.get(entry[2].request_id)
        return live is not None and live[0] == entry[1]


class ArrivalLane:
    """Requests in order of arrival. The key of the lane is the smallest key of its requests.

    A preempted request returns with a larger key, because it has been served. The order of arrival prevents later
    requests of its tier from overtaking it for that reason.
    """

    def __init__(self, key: Callable[[Request], int]) -> None:
        self._key = key
        self._by_arrival = RequestHeap()
        self._by_key = RequestHeap()

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
        self.refunded: set[str] = set()  # tenants whose time decreased since their lane was last read

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
        self.refunded.add(tenant)

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

    The tenant served least is first; its requests are in order of arrival. Times seldom decrease, so an outdated heap
    entry is detected and corrected when it reaches the top. After a refund, a tenant gets a second entry before it.
    """

    def __init__(self, clock: TenantClock) -> None:
        self._clock = clock
        self._lines: dict[str, RequestHeap] = {}
        self._heap: list[tuple[int, int, str]] = []  # (time, serial number of the line, tenant)
        self._times: dict[str, int] = {}  # tenant in `_lines` -> time of its valid entry
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
            line = self._lines[request.tenant] = RequestHeap()
            self._num_lines += 1
            self._enter(request.tenant, self._num_lines)
        line.push((request.sequence, 0), request)
        self._len += 1

    def _enter(self, tenant: str, number: int) -> None:
        self._times[tenant] = time = self._clock.time(tenant)
        heappush(self._heap, (time, number, tenant))

    def remove(self, request: Request) -> None:
        self._lines[request.tenant].remove(request)
        self._len -= 1

    def first(self) -> tuple[Key, Request]:
        """The next request and its key. The lane must not be empty."""
        while self._clock.refunded:
            if (tenant := self._clock.refunded.pop()) in self._lines:
                self._enter(tenant, 0)
        while True:
            time, number, tenant = self._heap[0]
            if self._times.get(tenant) != time:
                heappop(self._heap)  # replaced after a refund, or its line has ended
                continue
            line = self._lines[tenant]
            now = self._clock.time(tenant)
            if not line:
                heappop(self._heap)
                del self._lines[tenant], self._times[tenant]
            elif now > time:
                heapreplace(self._heap, (now, number, tenant))
                self._times[tenant] = now
            else:
                request = line.first()[1]
                return (time, request.sequence), request


Lane = ArrivalLane | TenantLane  # the waiting requests of one tier, in order of admission; every operation is O(log n)


class Waiters(Generic[G]):
    """Requests that wait in groups: each group for the same event.

    A waiter costs time only when its wait starts and ends.
    """

    def __init__(self) -> None:
        self._groups: dict[G, RequestHeap] = {}
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
        self._groups.setdefault(group, RequestHeap()).push(key, request)

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

    def add(self, request: Request) -> int:
        """Assign a batch row to a request and insert it in order. Returns the batch index."""
        request.batch_index = self.free_batch_indices.pop()
        request.state = RequestState.RUNNING
        insort(self.requests, request, key=_order)
        self.prompts[request.request_id] = request
        self.counts[request.priority] += 1
        return request.batch_index

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
