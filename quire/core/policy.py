"""Scheduling policies: order of admission, order of prefill, and preemption rules.

`Fair` is the default: tiers have guaranteed shares of all computed tokens, and tenants share a tier equally. Its
counters are in `quire/core/fairness.py`. `Aging` and `Fcfs` are simpler policies for comparison, without counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.core.fairness import LOW_SHARE, NORMAL_SHARE, UNITS, FairLedger, Ledger, OpenLedger, TenantLane
from quire.core.queues import ArrivalLane, Lane
from quire.core.request import Request, RequestState
from quire.core.values import Priority
from quire.errors import InvalidRequest

NS_PER_S = 1_000_000_000
PATIENCE_S = 10.0


class Policy(Protocol):
    """A scheduling policy.

    Each scheduler has its own instance. Times are integers in nanoseconds: keys are exact.
    """

    @property
    def ledger(self) -> Ledger: ...

    def make_lane(self, priority: Priority) -> Lane:
        """Create an empty queue for the waiting requests of one tier."""

    def key(self, request: Request) -> int:
        """Order of prompts within a turn, smallest first.

        It may increase while a request runs, and never decreases.
        """

    def urgency(self, request: Request, now_ns: int) -> int:
        """Order in which running requests get memory, smallest first; the last is preempted first.

        Constant while the request runs.
        """

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Whether a waiting request may take the batch row and the blocks of a running request.

        Running requests that need memory for their next token do not ask: they take it from the lowest tier.
        """

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:
        """Number of batch rows that a tier keeps while a request of a higher tier waits for one."""

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        """Whether `waiting` should wait for a common prefix that `running` is computing."""


class Fair:
    """Guaranteed shares for lower tiers, and fairness between tenants.

    Higher tiers have precedence for everything above the shares. A waiting request preempts requests of a lower tier,
    unless that tier is owed service (has had less than its share). A request that was preempted before and catches up
    is preempted also then, unless the credit of its tier was set aside for it (`Request.is_spared`).
    """

    def __init__(self, normal_share: float = NORMAL_SHARE, low_share: float = LOW_SHARE) -> None:
        self._ledger = FairLedger(normal_share, low_share)

    @property
    def ledger(self) -> FairLedger:
        return self._ledger

    def make_lane(self, priority: Priority) -> Lane:
        return TenantLane(self._ledger.clocks[priority])

    def key(self, request: Request) -> int:
        return self._ledger.clocks[request.priority].time(request.tenant)

    def urgency(self, request: Request, now_ns: int) -> int:  # noqa: ARG002 - a tier does not age
        return request.priority

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:  # noqa: ARG002
        if waiting.priority >= running.priority:
            return False
        if running.is_catching_up:
            return not running.is_covered
        return not self._ledger.is_owed(running.priority)

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:
        """The tier's share of the batch rows.

        A request may be admitted because its tier is owed service. Without kept rows it would be preempted as soon as
        its prompt had used up the credit, and most of the share would be spent on recomputing tails.
        """
        return self._ledger.shares.get(priority, 0) * max_num_seqs // UNITS

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        """True if `running` is of a higher tier, or of the same tier and its tenant is not served later."""
        if running.priority is not waiting.priority:
            return running.priority < waiting.priority
        return running.tenant == waiting.tenant or self.key(running) <= self.key(waiting)


class Aging:
    """Tiers with aging: each `patience_s` seconds of waiting raises a request by one tier.

    The usual form of aging, `effective = tier - waited / patience`, never changes the order of two waiting requests,
    because both age at the same rate. So a waiting request has one constant key, a virtual deadline, until its prompt
    is computed:

        key = (start of this wait) - (earlier waits) + tier * patience

    Memory and batch rows are assigned by urgency: the same formula, rounded to whole tiers. Age is time spent waiting,
    so the urgency of a running request is constant. A LOW backlog older than twice the patience precedes every new HIGH
    request, which is why `Fair` is the default.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        if type(patience_s) not in (int, float) or not 0 <= patience_s <= 1e6:
            raise InvalidRequest(f"patience = {patience_s!r} is not a number from 0 to 1e6 seconds")
        self.patience_s = patience_s
        self.ledger = OpenLedger()
        self._patience_ns = round(patience_s * NS_PER_S)

    def make_lane(self, priority: Priority) -> Lane:  # noqa: ARG002
        return ArrivalLane(self.key)

    def key(self, request: Request) -> int:
        return request.enqueued_ns - request.earlier_waits_ns + request.priority * self._patience_ns

    def urgency(self, request: Request, now_ns: int) -> int:
        if not self._patience_ns:
            return 0  # zero patience: any wait outweighs all tiers
        waited_ns = request.waited_ns
        if request.state is RequestState.WAITING:
            waited_ns += now_ns - request.enqueued_ns
        return request.priority - waited_ns // self._patience_ns

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return waiting.priority < running.priority and self.urgency(waiting, now_ns) < running.urgency

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:  # noqa: ARG002
        return 0

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        return (self.key(running), running.sequence) < (self.key(waiting), waiting.sequence)

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:
        """Starvation bound in seconds.

        A request of tier `behind` that arrives at time t is admitted before every request of tier `ahead` that arrives
        later than t plus this bound. The exception is a request that waits for a prefix in flight.
        """
        return max(0, behind - ahead) * self.patience_s


class Fcfs:
    """First come, first served. Ignores tiers."""

    def __init__(self) -> None:
        self.ledger = OpenLedger()

    def make_lane(self, priority: Priority) -> Lane:  # noqa: ARG002
        return ArrivalLane(self.key)

    def key(self, request: Request) -> int:
        return request.arrived_ns

    def urgency(self, request: Request, now_ns: int) -> int:  # noqa: ARG002 - all requests are equal
        return 0

    def may_preempt(self, waiting: Request, running: Request, now_ns: int) -> bool:  # noqa: ARG002
        return False

    def num_seqs_kept(self, priority: Priority, max_num_seqs: int) -> int:  # noqa: ARG002
        return 0

    def is_ahead(self, running: Request, waiting: Request) -> bool:
        return (running.arrived_ns, running.sequence) < (waiting.arrived_ns, waiting.sequence)

    def overtake_window_s(self, behind: Priority, ahead: Priority) -> float:  # noqa: ARG002
        return 0.0


def make_policy(
    name: str, patience_s: float | None = None, normal_share: float | None = None, low_share: float | None = None
) -> Policy:
    """Create a policy by name.

    None: the policy's default. Raises if a setting does not apply to the policy.
    """
    if name not in POLICIES:
        raise InvalidRequest(f"scheduling_policy = {name!r} is not one of {', '.join(POLICIES)}")
    if patience_s is not None and name != "aging":
        raise InvalidRequest(f"patience = {patience_s!r} applies only to the policy aging, not to {name}")
    shares = {"normal_share": normal_share, "low_share": low_share}
    given = {key: value for key, value in shares.items() if value is not None}
    if given and name != "fair":
        field, value = next(iter(given.items()))
        raise InvalidRequest(f"{field} = {value!r} applies only to the policy fair, not to {name}")
    if patience_s is not None:
        return Aging(patience_s)
    return Fair(**given) if given else POLICIES[name]()


POLICIES: dict[str, Callable[[], Policy]] = {
    "fair": Fair,
    "aging": Aging,
    "fcfs": Fcfs,
}
