"""Who goes first.

Aging as everyone draws it, `effective = tier - waited / patience`, changes all the time but never the order of two
requests that both wait: they age alike. So a waiting request keeps one constant key, a virtual deadline,

    key = (start of this wait) - (earlier waits) + tier * patience

and a heap is enough. It keeps that key until its prompt is computed: prompts share the step's tokens in this order.

Memory and slots go by urgency instead, the whole tiers of the same formula: `tier - waited // patience`. Age is time
spent waiting, so the urgency of a running request is constant; if it grew with the key's clock, long LOW jobs would
outgrow every HIGH one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.core.request import Priority, Request, RequestState
from quire.errors import InvalidRequest

NS_PER_S = 1_000_000_000
PATIENCE_S = 10.0


class Policy(Protocol):
    """All times are whole nanoseconds, so that keys compare exactly."""

    def key(self, request: Request) -> int:
        """Order of admission and of prompts, smaller first. Constant from one admission to the next preemption."""

    def urgency(self, request: Request, now_ns: int) -> int:
        """Order of memory and slots, smaller first. Constant while the request runs."""

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Whether one who waits may push out one who runs."""

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:
        """The starvation bound: a request of tier `behind` that arrives at t is admitted before any request of tier
        `ahead` that arrives later than t plus this many seconds (unless it steps aside for a prefix in flight)."""


class Aging:
    """Tiers, and every `patience_s` of waiting is worth one tier."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        if not 0 <= patience_s <= 1e6:
            raise InvalidRequest(f"{patience_s = } is not from 0 to 1e6 seconds")
        self.patience_s = patience_s
        self._patience_ns = round(patience_s * NS_PER_S)

    def key(self, request: Request) -> int:
        return request.enqueued_ns - request.earlier_waits_ns + request.priority * self._patience_ns

    def urgency(self, request: Request, now_ns: int) -> int:
        if not self._patience_ns:
            return 0  # no patience: any wait is worth any tier
        waited_ns = request.waited_ns
        if request.state is RequestState.WAITING:
            waited_ns += now_ns - request.enqueued_ns
        return request.priority - waited_ns // self._patience_ns

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return waiting.priority < running.priority and self.urgency(waiting, now_ns) < running.urgency

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:
        return max(0, behind - ahead) * self.patience_s


class Fcfs:
    """First come, first served; tiers mean nothing."""

    def key(self, request: Request) -> int:
        return request.arrived_ns

    def urgency(self, request: Request, now_ns: int) -> int:  # noqa: ARG002 - everyone is alike
        return 0

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:  # noqa: ARG002
        return False

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:  # noqa: ARG002
        return 0.0


POLICIES: dict[str, Callable[[], Policy]] = {
    "aging": Aging,
    "fcfs": Fcfs,
}
