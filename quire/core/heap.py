"""A heap of requests with removal from the middle."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from quire.core.request import Request

Key = tuple[int, int]  # the policy's key, then order of arrival


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
