"""The running set: who holds a place, most urgent first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from quire.core.kv_cache import KVCacheManager
from quire.core.request import Priority, Request, RequestState
from quire.errors import InvalidRequest

_order = attrgetter("urgency", "sequence")


class RunningSet:
    """Running requests by (urgency, order of arrival), each with a place: a row the runner keeps for it.

    The order is constant, because nobody ages while running. The last in it is the first to be preempted.
    """

    def __init__(self, max_num_seqs: int, cache: KVCacheManager) -> None:
        if max_num_seqs < 1:
            raise InvalidRequest(f"{max_num_seqs = } is less than 1")
        self.max_num_seqs = max_num_seqs
        self.requests: list[Request] = []
        self.prompts: dict[int, Request] = {}  # by id: those whose known tokens are not all computed
        self.counts = [0] * len(Priority)  # of each tier
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
        """Give a request a place and its place in the order. Returns the place."""
        request.batch_index = self._free_batch_indices.pop()
        request.state = RequestState.RUNNING
        insort(self.requests, request, key=_order)
        self.prompts[request.request_id] = request
        self.counts[request.priority] += 1
        return request.batch_index

    def vacate(self, request: Request) -> None:
        """Take a request off the machine: place, blocks, and the claim on any result still on its way."""
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
        """Slots given up since the last call."""
        released, self._released = self._released, []
        return tuple(released)
