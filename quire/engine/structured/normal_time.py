"""How long grammars may be compiled at normal priority: a budget of CPU time for each owner, and one for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PATIENCE_S = 0.1  # for one grammar; a common schema takes 5 ms
MIN_S = 0.01  # less is not worth a start at normal priority


class Allowance(NamedTuple):
    """At most `burst_s` at once, which is earned again at `share` of the time that passes."""

    burst_s: float
    share: float


OF_OWNER = Allowance(0.5, 0.005)
OF_ALL = Allowance(2.0, 0.01)
_ALL = None  # the owner of the budget of all owners


class NormalTime:
    """The budgets of all owners. Thread-safe.

    In any t seconds, grammars of one owner get at most OF_OWNER.burst_s + OF_OWNER.share * t by `take`, and those of
    all owners together at most OF_ALL.burst_s + OF_ALL.share * t: other work keeps the rest, whatever clients send.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[str | None, float] = {}  # seconds that are not earned again yet, as of `_now_s`
        self._now_s = clock()

    def __len__(self) -> int:
        """Owners that are remembered: those with less than the whole burst."""
        return len(self._used)

    def take(self, owner: str) -> float:
        """Take time for one grammar: PATIENCE_S, or what is left, or 0."""
        with self._lock:
            self._earn()
            left_s = min(
                allowance.burst_s - self._used.get(one, 0.0) for one, allowance in ((owner, OF_OWNER), (_ALL, OF_ALL))
            )
            taken_s = min(PATIENCE_S, left_s) if left_s >= MIN_S else 0.0
            self._add(owner, taken_s)
            return taken_s

    def give_back(self, owner: str, seconds: float) -> None:
        """Return time that was not used; a negative number of seconds was used beyond what was taken."""
        with self._lock:
            self._earn()
            self._add(owner, -seconds)

    def _earn(self) -> None:
        now_s = self._clock()
        passed_s, self._now_s = now_s - self._now_s, now_s
        for owner, used_s in list(self._used.items()):
            share = (OF_ALL if owner is _ALL else OF_OWNER).share
            self._used[owner] = used_s - passed_s * share
        self._drop_unused()

    def _add(self, owner: str, seconds: float) -> None:
        for one in (owner, _ALL):
            self._used[one] = self._used.get(one, 0.0) + seconds
        self._drop_unused()

    def _drop_unused(self) -> None:
        self._used = {owner: used_s for owner, used_s in self._used.items() if used_s > 0}
