"""The waiting queue: a bounded heap by policy key, with cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.core.policy import Policy
from quire.core.request import Request
from quire.errors import InvalidRequest, QueueFull


class _Entry(NamedTuple):
    key: int
    sequence: int
    push: int  # unique, so entries never compare requests
    request: Request


class WaitingQueue:
    """Push, pop and cancel cost O(log n): a cancelled entry is forgotten at once and leaves the heap when it surfaces,
    or when half the heap is such entries."""

    def __init__(self, policy: Policy, max_requests: int) -> None:
        if max_requests < 1:
            raise InvalidRequest(f"{max_requests = } is less than 1")
        self.max_requests = max_requests
        self._policy = policy
        self._heap: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # request id -> live entry
        self._num_pushes = 0
        self.num_tokens = 0  # known tokens of all who wait

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return (entry.request for entry in self._entries.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def check_room(self) -> None:
        if len(self._entries) >= self.max_requests:
            raise QueueFull(f"{len(self._entries)} requests wait already, which is the limit")

    def push(self, request: Request) -> None:
        """Queue at its policy key. `check_room` is for those who arrive: work pushed back has been let in."""
        self._num_pushes += 1
        entry = _Entry(self._policy.key(request), request.sequence, self._num_pushes, request)
        self._entries[request.request_id] = entry
        self.num_tokens += len(request.tokens)
        heappush(self._heap, entry)

    def head(self) -> Request | None:
        """Who is next."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry.request.request_id) is entry:
                return entry.request
            heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._entries[request.request_id]
        self.num_tokens -= len(request.tokens)
        if self._heap[0].request is request:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)
