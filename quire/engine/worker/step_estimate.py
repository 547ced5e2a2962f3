"""Predicts the duration of a step from earlier steps.

The prediction sets the watchdog's limit and, on a CPU, the scheduler's cost of a row. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from quire.core.policy import StepCost
from quire.core.step import StepPlan

KEPT = 9  # steps per size: the median is used, so that an outlier does not matter
# Cost of attention relative to the rest of a token. Both depend on model and machine. The middle of the measured range
# is good enough for a limit of ten times the prediction.
CONTEXT_PER_TOKEN = 300  # keys read from the cache: 70 to 1,000
PAIRS_PER_TOKEN = 8000  # pairs of a query and a key in a prompt: 4,000 (135M) to 30,000 (8B)
MAX_BATCH = 512  # in tokens of effort: larger steps do not show the cost of another row
MEMORY_BOUND = 64  # tokens that may take no longer than one: the step is limited by reading the weights


class Work(NamedTuple):
    """The amount of work of a step."""

    num_tokens: int
    effort: float  # in tokens, attention included


NO_WORK = Work(0, 0.0)


def work_of(plan: StepPlan) -> Work:
    num_tokens, pairs = plan.num_tokens, 0
    context = num_tokens + sum([piece.start for piece in plan.slices])
    if num_tokens > len(plan.slices):  # not only decodes
        pairs = sum([piece.length * (2 * piece.start + piece.length) for piece in plan.slices if piece.length > 1]) // 2
    return Work(num_tokens, num_tokens + context / CONTEXT_PER_TOKEN + pairs / PAIRS_PER_TOKEN)


class _Size:
    """The last steps of about one size: their efforts are within a factor of two."""

    __slots__ = ("_last", "median")

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=KEPT)  # seconds and effort
        self.median = 0.0, 0.0  # of two steps, the shorter one: the first of a kind is often slow

    def take(self, took_s: float, effort: float) -> None:
        self._last.append((took_s, effort))
        self.median = sorted(self._last)[(len(self._last) - 1) // 2]


class StepEstimator:
    """Interpolates between the medians of the sizes seen, and extrapolates beyond the largest.

    A step has a fixed cost and a cost per token. One size alone does not separate the two, so a decode does not show
    the cost of a prompt. Beyond the largest step seen, each further token costs the duration of that step divided by
    its number of tokens, which is taken as at least `MEMORY_BOUND`. Each size keeps its own last steps, so that a
    thousand decodes do not displace the durations of prompts.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # keyed by the bit length of the effort
        self._batches: dict[int, _Size] = {}  # the same, without single-token steps
        self._single = _Size()  # single-token steps only

    def learn(self, work: Work, took_s: float) -> None:
        if work.num_tokens:
            size = self._sizes.setdefault(int(work.effort).bit_length(), _Size())
            size.take(took_s, work.effort)
            if work.num_tokens == 1:
                self._single.take(took_s, work.effort)
            else:
                batch = self._batches.setdefault(int(work.effort).bit_length(), _Size())
                batch.take(took_s, work.effort)

    def cost(self) -> StepCost | None:
        """The fixed cost of a step and the cost of a token in a batch. None: too few steps were seen.

        A single-token step may be faster than predicted from larger ones: backends have a special path for it.
        """
        batches = [size.median for bits, size in self._batches.items() if 1 << bits <= 2 * MAX_BATCH]
        seen = batches if len(batches) > 1 else [*batches, self._single.median]
        seen = [step for step in seen if step[1]]
        if len(seen) < 2:
            return None
        (least_s, least), (most_s, most) = min(seen, key=_effort), max(seen, key=_effort)
        slope_s = max(0.0, most_s - least_s) / (most - least)
        base_s = max(0.0, least_s - slope_s * least)
        single_s, single = self._single.median
        saved_s = max(0.0, base_s + slope_s * single - single_s) if single else 0.0
        token_ns = max(1, round(slope_s * 1e9))
        return StepCost(round(base_s * 1e9), token_ns, token_ns // CONTEXT_PER_TOKEN, round(saved_s * 1e9))

    def predict_s(self, work: Work) -> float:
        """The predicted duration. 0: no steps were seen, or there is no work."""
        if not self._sizes or not work.num_tokens:
            return 0.0
        seen = [self._sizes[bits].median for bits in sorted(self._sizes)]
        base_s, least = seen[0]
        if work.effort <= least:
            return base_s
        for (low_s, low), (high_s, high) in pairwise(seen):
            if work.effort <= high:
                return low_s + (high_s - low_s) * (work.effort - low) / (high - low)
        most_s, most = seen[-1]
        token_s = most_s / max(most, MEMORY_BOUND)
        if most > least:
            token_s = max(token_s, (most_s - base_s) / (most - least))
        token_s = min(token_s, *(took_s / effort for took_s, effort in seen))  # no token takes longer than its step
        return most_s + token_s * (work.effort - most)


def _effort(step: tuple[float, float]) -> float:
    return step[1]
