"""Who goes first: one number per request, smaller first, that never needs sorting anew.

Aging as everyone draws it, `effective = tier - waited / patience`, changes all the time but never the order of two
requests that both wait: they age alike. So a waiting request keeps one constant key, a virtual deadline:

    key = (start of this wait) - (earlier waits) + tier * patience

and a heap is enough. Age is time spent waiting. A running request does not age: its key moves with the clock, so the
order among running requests is constant as well, and only the distance between the two groups changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.core.request import Priority, Request
from quire.errors import InvalidRequest

NS_PER_S = 1_000_000_000
PATIENCE_S = 10.0


class Policy(Protocol):
    """All times are whole nanoseconds, so that keys compare exactly."""

    def waiting_key(self, request: Request) -> int:
        """Constant while the request waits."""

    def running_rank(self, request: Request) -> int:
        """Constant while the request runs."""

    def drift_ns(self, now_ns: int) -> int:
        """What to add to a running rank now, to compare it with a waiting key."""

    def may_preempt(self, waiting: Priority, running: Priority) -> bool:
        """Whether one who waits may push out one who runs, if its key is smaller as well."""

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:
        """The starvation bound: a request of tier `behind` that waits from t on is passed by requests of tier `ahead`
        only if they arrive before t plus this many seconds."""


class Aging:
    """Tiers, and every `patience_s` of waiting is worth one tier."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        if not 0 <= patience_s <= 1e6:
            raise InvalidRequest(f"{patience_s = } is not from 0 to 1e6 seconds")
        self.patience_s = patience_s
        self._patience_ns = round(patience_s * NS_PER_S)

    def waiting_key(self, request: Request) -> int:
        return request.enqueued_ns - request.waited_ns + request.priority * self._patience_ns

    def running_rank(self, request: Request) -> int:
        return request.priority * self._patience_ns - request.waited_ns

    def drift_ns(self, now_ns: int) -> int:
        return now_ns

    def may_preempt(self, waiting: Priority, running: Priority) -> bool:
        return waiting < running

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:
        return max(0, behind - ahead) * self.patience_s


class Fcfs:
    """First come, first served; tiers mean nothing."""

    def waiting_key(self, request: Request) -> int:
        return request.arrived_ns

    def running_rank(self, request: Request) -> int:
        return request.arrived_ns

    def drift_ns(self, now_ns: int) -> int:  # noqa: ARG002 - nothing moves
        return 0

    def may_preempt(self, waiting: Priority, running: Priority) -> bool:  # noqa: ARG002
        return False

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:  # noqa: ARG002
        return 0.0


POLICIES: dict[str, Callable[[], Policy]] = {
    "aging": Aging,
    "fcfs": Fcfs,
}
