"""Fair queuing between the tenants (API keys) of one tier."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from quire.core.heap import Key, RequestHeap
from quire.core.request import Request

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
