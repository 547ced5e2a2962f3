"""Service accounts: how many tokens tiers and tenants have had, and what each may have in the next step.

A ledger cuts the planning of a step into turns. The planner takes the turns in order, gives tokens to the requests of
each, and charges what it gave.

`FairLedger` holds three rules:

- **Guaranteed shares.** A lower tier that wants more than it gets earns credit: its share of all tokens computed, less
  its own. A tier with credit is *owed*: it has the first turn, up to its credit, and cannot be preempted.
- **Precedence above the shares.** All other tokens go to the tiers in order: HIGH, NORMAL, LOW.
- **Tenants.** Inside a tier, the tenant that has been served least goes first (`TenantClock`).

Where rows of a batch cost time (a CPU), it also decides which running requests a step leaves out: see `StepCost`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from quire.core.request import Priority, Request
from quire.core.tenants import TenantClock
from quire.errors import InvalidRequest

NORMAL_SHARE = 0.25
LOW_SHARE = 0.125
MAX_GUARANTEED = 0.9  # all guaranteed shares together: the highest tier must keep something to be first with
UNITS = 1_000_000  # of a token: credits are whole numbers, so that plans are exact

# Lower tiers may lengthen a step by this part of the time that the highest tier in it takes by itself.
SPARE_NUMERATOR, SPARE_DENOMINATOR = 1, 3
# A step of LOW work alone lasts at most this long, so that a request of a higher tier does not wait long for its end.
LOW_STEP_NS = 50_000_000
LOW_STEP_BASES = 4  # or this many times the fixed cost of a step: shorter steps would waste most of their time on it


class StepCost(NamedTuple):
    """What a step costs where every row of the batch takes time: base + tokens * token. Both are positive."""

    base_ns: int
    token_ns: int


class Turn(NamedTuple):
    """Requests of these tiers share at most so many tokens; None: as many as the step has."""

    tiers: Collection[Priority]
    max_tokens: int | None


EVERYONE = Turn(tuple(Priority), None)


class TierWork(NamedTuple):
    """What a tier wants of a step, before it is planned."""

    num_decodes: int  # running requests that want one token
    num_prompts: int  # running requests that want more
    num_waiting: int


class Ledger(Protocol):
    cost: StepCost | None  # None: one row more costs next to nothing

    def arrive(self, request: Request) -> None:
        """A new request entered the queue."""

    def leave(self, request: Request) -> None:
        """A request ended."""

    def begin_step(self, work: Mapping[Priority, TierWork]) -> None: ...

    def is_rationed(self, priority: Priority) -> bool:
        """Whether running requests of this tier are in the step only if a turn gives them tokens."""

    def turns(self) -> Iterator[Turn]:
        """The turns of this step. Each is decided when the one before it is over."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """A turn gave the request these tokens."""

    def charge_decode(self, request: Request) -> None:
        """The request has one token that no turn gave."""

    def end_step(self, short: Collection[Priority], max_step_tokens: int) -> None:
        """`short`: tiers that wanted more than they got."""


class OpenLedger:
    """One turn for everyone; nothing is counted."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None

    def arrive(self, request: Request) -> None: ...

    def leave(self, request: Request) -> None: ...

    def begin_step(self, work: Mapping[Priority, TierWork]) -> None: ...

    def is_rationed(self, priority: Priority) -> bool:  # noqa: ARG002
        return False

    def turns(self) -> Iterator[Turn]:
        yield EVERYONE

    def charge(self, request: Request, num_tokens: int) -> None: ...

    def charge_decode(self, request: Request) -> None: ...

    def end_step(self, short: Collection[Priority], max_step_tokens: int) -> None: ...


class FairLedger:
    def __init__(self, normal_share: float = NORMAL_SHARE, low_share: float = LOW_SHARE) -> None:
        for name, share in (("normal_share", normal_share), ("low_share", low_share)):
            if type(share) not in (int, float) or not 0 < share < 1:
                raise InvalidRequest(f"{name} = {share!r} is not a number above 0 and below 1")
        if normal_share + low_share > MAX_GUARANTEED:
            raise InvalidRequest(f"{normal_share = } and {low_share = } together are more than {MAX_GUARANTEED}")
        self.shares = {Priority.NORMAL: round(normal_share * UNITS), Priority.LOW: round(low_share * UNITS)}
        self.credits = dict.fromkeys(self.shares, 0)  # in units of a token
        self.clocks = {priority: TenantClock() for priority in Priority}
        self.cost: StepCost | None = None
        self._work: Mapping[Priority, TierWork] = {}
        self._decodes = dict.fromkeys(Priority, 0)  # tokens of this step that are given without a turn
        self._served = dict.fromkeys(Priority, 0)  # and tokens charged
        self._spare_ns = 0  # what lower tiers may still lengthen steps by

    # Queries

    def is_owed(self, priority: Priority) -> bool:
        return self.credits.get(priority, 0) > 0

    def is_rationed(self, priority: Priority) -> bool:
        if self.cost is None:
            return False
        return priority is Priority.LOW or any(
            work.num_decodes or work.num_prompts or work.num_waiting
            for tier, work in self._work.items()
            if tier < priority
        )

    def service_bound(self, priority: Priority, tokens_ahead: int, drain_tokens: int, max_step_tokens: int) -> int:
        """The starvation bound: tokens computed for all tiers together before a waiting request starts.

        `tokens_ahead`: what its own tier computes before it, itself included. `drain_tokens`: what the requests that
        hold slots and blocks when its turn comes may compute before they give them back. A debt is at most one step.
        """
        share = self.shares.get(priority)
        if share is None:
            return tokens_ahead + drain_tokens
        return -(-(tokens_ahead + 2 * max_step_tokens) * UNITS // share) + drain_tokens

    # One step

    def arrive(self, request: Request) -> None:
        self.clocks[request.priority].arrive(request.tenant)

    def leave(self, request: Request) -> None:
        self.clocks[request.priority].leave(request.tenant)

    def begin_step(self, work: Mapping[Priority, TierWork]) -> None:
        self._work = work
        for priority in Priority:
            self._served[priority] = 0
            is_free = not self.is_rationed(priority)
            self._decodes[priority] = work[priority].num_decodes if is_free else 0

    def turns(self) -> Iterator[Turn]:
        owed = [priority for priority in self.credits if self.is_owed(priority)]
        for priority in sorted(owed, key=lambda tier: -self.credits[tier] * UNITS // self.shares[tier]):
            yield Turn((priority,), -(-self.credits[priority] // UNITS))
        for priority in Priority:
            yield Turn((priority,), self._limit(priority))

    def _limit(self, priority: Priority) -> int | None:
        """How many tokens a tier may have beside those above it, or alone. None: as many as it wants."""
        cost, top = self.cost, self._top()
        if cost is None:
            return None
        if top is None or top >= priority:
            if priority is not Priority.LOW:
                return None
            longest_ns = max(LOW_STEP_NS, LOW_STEP_BASES * cost.base_ns)
            return max(1, (longest_ns - cost.base_ns) // cost.token_ns) - self._served[priority]
        return max(0, (self._spare_ns + self._allowance_ns(cost, top)) // cost.token_ns - self._num_below(top))

    def _top(self) -> Priority | None:
        """The highest tier that computes something in this step, as far as it is planned."""
        return next((tier for tier in Priority if self._decodes[tier] or self._served[tier]), None)

    def _allowance_ns(self, cost: StepCost, top: Priority) -> int:
        alone_ns = cost.base_ns + cost.token_ns * (self._decodes[top] + self._served[top])
        return alone_ns * SPARE_NUMERATOR // SPARE_DENOMINATOR

    def _num_below(self, top: Priority) -> int:
        return sum(self._served[tier] for tier in Priority if tier > top)

    def charge(self, request: Request, num_tokens: int) -> None:
        self._served[request.priority] += num_tokens
        self.clocks[request.priority].charge(request.tenant, num_tokens)

    def charge_decode(self, request: Request) -> None:
        self._decodes[request.priority] -= 1
        self.charge(request, 1)

    def end_step(self, short: Collection[Priority], max_step_tokens: int) -> None:
        self._keep_spare()
        total = sum(self._served.values())
        for priority in self.credits:
            has_rivals = any(any(self._work[tier]) or self._served[tier] for tier in Priority if tier is not priority)
            gain = total * self.shares[priority]
            credit = self.credits[priority]
            if has_rivals:
                changed = credit + gain - self._served[priority] * UNITS
                if not any(tier is not priority for tier in short):
                    changed = max(changed, min(credit, 0))  # nobody else wanted what it had: no debt
            else:
                changed = min(credit + gain, 0)
            if priority not in short:
                changed = min(changed, 0)
            most = max_step_tokens * UNITS
            self.credits[priority] = max(-most, min(changed, most))
        for clock in self.clocks.values():
            clock.end_step()

    def _keep_spare(self) -> None:
        """Carry over what lower tiers did not use, if it is less than a token: parts of tokens add up."""
        cost, top = self.cost, self._top()
        if cost is None or top is None:
            return
        allowance_ns = self._allowance_ns(cost, top)
        spare_ns = self._spare_ns + allowance_ns - self._num_below(top) * cost.token_ns
        self._spare_ns = max(0, min(spare_ns, cost.token_ns - 1))
