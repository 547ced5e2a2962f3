"""What all open connections share: places, and bytes of headers and of pipelined requests."""

from __future__ import annotations

from typing import Protocol

FREE_BYTES = 8 << 10  # of each connection, outside the shared budget: a client is served while others use it up
MAX_SHARED_BYTES = 64 << 20


class Waiter(Protocol):
    """A connection without a complete request."""

    def evict(self) -> None: ...


class OpenConnections:
    """The connections that wait for a request, and the bytes that all connections hold."""

    def __init__(self, max_bytes: int = MAX_SHARED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # above FREE_BYTES of each connection
        # Each oldest first, in the order of eviction: without a first request, between requests, in a body.
        self._silent: dict[Waiter, None] = {}
        self._idle: dict[Waiter, None] = {}
        self._sending: dict[Waiter, None] = {}

    def waits(self, connection: Waiter, *, was_served: bool) -> None:
        self.waits_no_more(connection)
        (self._idle if was_served else self._silent)[connection] = None

    def sends(self, connection: Waiter) -> None:
        """Its headers are complete and its body is not."""
        self.waits_no_more(connection)
        self._sending[connection] = None

    def waits_no_more(self, connection: Waiter) -> None:
        for waiting in (self._silent, self._idle, self._sending):
            waiting.pop(connection, None)

    def evict_oldest(self, newcomer: Waiter) -> bool:
        """Close the connection that has waited longest for a request. False: each one has a complete request."""
        for waiting in (self._silent, self._idle, self._sending):
            oldest = next(iter(waiting), newcomer)
            if oldest is not newcomer:
                del waiting[oldest]
                oldest.evict()
                return True
        return False

    def change(self, num_before: int, num_after: int) -> bool:
        """Count the bytes that a connection holds. Returns whether they are within the budget."""
        self.num_bytes += max(0, num_after - FREE_BYTES) - max(0, num_before - FREE_BYTES)
        return num_after <= FREE_BYTES or self.num_bytes <= self._max_bytes
