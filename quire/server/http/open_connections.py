"""Limits that all open connections share: their number, and the bytes of headers and pipelined requests."""

from __future__ import annotations

from typing import Protocol

FREE_BYTES = 8 << 10  # of each connection, not counted: small requests are served although others use up the budget
MAX_SHARED_BYTES = 64 << 20


class Waiter(Protocol):
    """A connection without a complete request."""

    def evict(self) -> None: ...


class OpenConnections:
    """The connections that wait for a request, and the bytes that all connections hold."""

    def __init__(self, max_bytes: int = MAX_SHARED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # those of each connection beyond FREE_BYTES
        # Connections before their first request, between requests, and in a body: evicted in this order, oldest first.
        self._silent: dict[Waiter, None] = {}
        self._idle: dict[Waiter, None] = {}
        self._sending: dict[Waiter, None] = {}

    def waits(self, connection: Waiter, *, was_served: bool) -> None:
        self.waits_no_more(connection)
        (self._idle if was_served else self._silent)[connection] = None

    def sends(self, connection: Waiter) -> None:
        """Note that the headers of a request are complete and its body is not."""
        self.waits_no_more(connection)
        self._sending[connection] = None

    def waits_no_more(self, connection: Waiter) -> None:
        for waiting in (self._silent, self._idle, self._sending):
            waiting.pop(connection, None)

    def evict_oldest(self, newcomer: Waiter) -> bool:
        """Close the oldest connection without a complete request. Returns False if there is none beside `newcomer`."""
        for waiting in (self._silent, self._idle, self._sending):
            oldest = next(iter(waiting), newcomer)
            if oldest is not newcomer:
                del waiting[oldest]
                oldest.evict()
                return True
        return False

    def change(self, num_before: int, num_after: int) -> bool:
        """Change the number of bytes that one connection holds. Returns whether they are within the budget."""
        self.num_bytes += max(0, num_after - FREE_BYTES) - max(0, num_before - FREE_BYTES)
        return num_after <= FREE_BYTES or self.num_bytes <= self._max_bytes
