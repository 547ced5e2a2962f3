"""The waiting queue: bounded, ordered by the policy across tiers and by arrival within one, with cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from quire.core.policy import Policy
from quire.core.request import Priority, Request
from quire.errors import InvalidRequest, QueueFull

Key = tuple[int, int]  # the policy's key, then order of arrival


class _Heap:
    """Requests by a key. A removed one is forgotten at once and leaves the heap when it surfaces, or when half the heap
    is such entries: O(log n) for everything."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._live: dict[int, int] = {}  # request id -> number of its live entry
        self._num_pushes = 0  # unique, so entries never compare requests

    def push(self, key: Key, request: Request) -> None:
        self._num_pushes += 1
        self._live[request.request_id] = self._num_pushes
        heappush(self._heap, (key, self._num_pushes, request))

    def first(self) -> tuple[Key, int, Request]:
        """The entry with the smallest key; there must be one."""
        heap, live = self._heap, self._live
        while live.get(heap[0][2].request_id) != heap[0][1]:
            heappop(heap)
        return heap[0]

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
        if self._heap[0][2] is request:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + 16:
            live = self._live
            self._heap = [entry for entry in self._heap if live.get(entry[2].request_id) == entry[1]]
            heapify(self._heap)


class _Lane:
    """One tier: served in the order of arrival, and as early as the smallest key in it allows.

    A preempted request comes back with a larger key than it had, for it has been served; those of its tier who arrived
    later must not pass it for that.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.by_arrival = _Heap()
        self.by_key = _Heap()


class WaitingQueue:
    def __init__(self, policy: Policy, max_requests: int) -> None:
        if max_requests < 1:
            raise InvalidRequest(f"{max_requests = } is less than 1")
        self.max_requests = max_requests
        self._policy = policy
        self._lanes = {priority: _Lane() for priority in Priority}
        self.num_tokens = 0  # known tokens of all who wait, for whoever bounds the queue by them

    def __len__(self) -> int:
        return sum(len(lane.requests) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        for lane in self._lanes.values():
            yield from lane.requests.values()

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._lanes[request.priority].requests

    def check_room(self) -> None:
        if len(self) >= self.max_requests:
            raise QueueFull(f"{len(self)} requests wait already, which is the limit")

    def push(self, request: Request) -> None:
        """Queue at its policy key. `check_room` is for those who arrive: work pushed back has been let in."""
        lane = self._lanes[request.priority]
        lane.requests[request.request_id] = request
        lane.by_arrival.push((request.sequence, 0), request)
        lane.by_key.push((self._policy.key(request), request.sequence), request)
        self.num_tokens += len(request.tokens)

    def head(self) -> tuple[Key, Request] | None:
        """Who is next, and with what key: the smallest of its lane."""
        best: tuple[Key, Request] | None = None
        for lane in self._lanes.values():
            if lane.requests:
                key = lane.by_key.first()[0]
                if best is None or key < best[0]:
                    best = key, lane.by_arrival.first()[2]
        return best

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        lane = self._lanes[request.priority]
        del lane.requests[request.request_id]
        lane.by_arrival.remove(request)
        lane.by_key.remove(request)
        self.num_tokens -= len(request.tokens)
