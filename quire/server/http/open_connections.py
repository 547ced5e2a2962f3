"""Limits that all open connections share: their number, and the bytes of headers and pipelined requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

FREE_BYTES = 8 << 10  # of each connection, not counted: small requests are served although others use up the budget
MAX_SHARED_BYTES = 64 << 20
GRACE_S = 0.5  # a connection is not evicted in this time: its request may have arrived and not been read yet


class Waiter(Protocol):
    """A connection without a complete request."""

    def evict(self) -> None: ...


class OpenConnections:
    """The connections that wait for a request, and the bytes that all connections hold."""

    def __init__(self, max_bytes: int = MAX_SHARED_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self.num_bytes = 0  # those of each connection beyond FREE_BYTES
        # Connections before their first request, between requests, and in a body: evicted in this order, oldest first.
        self._silent: dict[Waiter, float] = {}
        self._idle: dict[Waiter, float] = {}
        self._sending: dict[Waiter, float] = {}

    def waits(self, connection: Waiter, *, was_served: bool) -> None:
        self.waits_no_more(connection)
        (self._idle if was_served else self._silent)[connection] = self._clock()

    def sends(self, connection: Waiter) -> None:
        """Note that the headers of a request are complete and its body is not."""
        self.waits_no_more(connection)
        self._sending[connection] = self._clock()

    def waits_no_more(self, connection: Waiter) -> None:
        for waiting in (self._silent, self._idle, self._sending):
            waiting.pop(connection, None)

    def evict_oldest(self, newcomer: Waiter) -> bool:
        """Close the connection that has waited longest for a request. False: each has a request, or is new."""
        latest_s = self._clock() - GRACE_S
        for waiting in (self._silent, self._idle, self._sending):
            oldest, since_s = next(iter(waiting.items()), (newcomer, 0.0))
            if oldest is not newcomer and since_s <= latest_s:
                del waiting[oldest]
                oldest.evict()
                return True
        return False

    def change(self, num_before: int, num_after: int) -> bool:
        """Change the number of bytes that one connection holds. Returns whether they are within the budget."""
        self.num_bytes += max(0, num_after - FREE_BYTES) - max(0, num_before - FREE_BYTES)
        return num_after <= FREE_BYTES or self.num_bytes <= self._max_bytes
