"""How many replicas a model needs: by the age of its oldest waiting request and by the tokens that wait."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

DOWN_USE = 0.5  # a replica leaves if the others would then be used by less than this


class Figures(NamedTuple):
    """What one replica reports."""

    queue_age_s: float  # of its oldest waiting request
    waiting_tokens: float  # of prompts
    use: float  # running requests, relative to the most that it runs at once


def wanted_replicas(current: int, figures: Iterable[Figures], queue_age_s: float, waiting_tokens: float) -> int:
    """The number of replicas for this load, without bounds and delays. `figures`: of the replicas that run.

    `queue_age_s` and `waiting_tokens`: the longest wait, and the most waiting tokens of one replica, that are accepted.
    While a replica is being started, a long wait adds no other one: the one that starts will shorten it.
    """
    found = list(figures)
    tokens = sum(one.waiting_tokens for one in found)
    needed = math.ceil(tokens / waiting_tokens)
    is_complete = len(found) >= current
    if is_complete and max((one.queue_age_s for one in found), default=0.0) > queue_age_s:
        needed = max(needed, current + 1)
    if needed > current:
        return needed
    is_spare = current > 1 and not tokens and sum(one.use for one in found) < DOWN_USE * (current - 1)
    return current - 1 if is_spare else current


class QueuePolicy:
    """An autoscaling policy of Ray Serve, which adds the delays and calls it several times per second."""

    def __init__(self, queue_age_s: float, waiting_tokens: float) -> None:
        self._queue_age_s = queue_age_s
        self._waiting_tokens = waiting_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        current = context.target_num_replicas
        wanted = wanted_replicas(current, _figures(context), self._queue_age_s, self._waiting_tokens)
        return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def _figures(context: Any) -> list[Figures]:
    """The last reports of the replicas that run."""
    metrics = context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        values = [_last(metrics.get(name, {}).get(replica)) for name in Figures._fields]
        found.append(Figures(*values))
    return found


def _last(series: Any) -> float:
    """The last value of a series of (time, value)."""
    if not series:
        return 0.0
    point = series[-1]
    return float(getattr(point, "value", point))
