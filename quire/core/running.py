"""The running set: requests that hold a batch row, most urgent first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from quire.core.kv_cache import KVCacheManager
from quire.core.request import Priority, Request, RequestState
from quire.errors import InvalidRequest

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
        self._free_batch_indices = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def num_free_seqs(self) -> int:
        return len(self._free_batch_indices)

    @property
    def free_batch_indices(self) -> tuple[int, ...]:
        return tuple(self._free_batch_indices)

    def add(self, request: Request) -> int:
        """Assign a batch row to a request and insert it in order. Returns the batch index."""
        request.batch_index = self._free_batch_indices.pop()
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
        self._free_batch_indices.append(request.batch_index)
        self._released.append(request.batch_index)
        request.batch_index = None
        request.epoch += 1
        self._cache.release(request)

    def pop_released(self) -> tuple[int, ...]:
        """Batch indices released since the last call."""
        released, self._released = self._released, []
        return tuple(released)
