"""Counters of one model's activity, for `/v1/watch`. Cheap enough to be always on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.engine.worker.protocol import Stepped
from quire.server.observability.request_record import RequestRecord

RECENT_S = 300.0
MAX_RECENT = 256  # requests


class Ttft(NamedTuple):
    """Time to first token of the requests that ended recently."""

    num_requests: int
    p50_s: float
    p95_s: float


class Finished(NamedTuple):
    """A request that has ended, and when: seconds since 1970."""

    at: float
    record: RequestRecord


class ActivityCounters:
    """Totals since the model was loaded. A rate is the difference of two readings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_computed_tokens = 0  # of prompts and answers
        self.num_generated_tokens = 0
        self._clock = clock
        # Newest last. More are kept than shown, because a key sees only its own.
        self.recent: deque[Finished] = deque(maxlen=MAX_RECENT)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)  # end time, TTFT

    @property
    def num_prefilled_tokens(self) -> int:
        """Computed prompt tokens.

        The last token of a prompt produces the first token of the answer and counts as generated. A step that is still
        running when an answer ends counts here.
        """
        return max(0, self.num_computed_tokens - self.num_generated_tokens)

    def stepped(self, stepped: Stepped) -> None:
        self.num_computed_tokens += stepped.num_tokens
        self.num_generated_tokens += stepped.num_generated

    def finished(self, record: RequestRecord) -> None:
        self.recent.append(Finished(time.time(), record))
        if record.ttft_s is not None:
            self._ttfts.append((self._clock(), record.ttft_s))

    def ttft(self) -> Ttft | None:
        """Return the recent TTFT. None: no request had a first token recently."""
        since_s = self._clock() - RECENT_S
        recent = sorted(ttft_s for at_s, ttft_s in self._ttfts if at_s >= since_s)
        if not recent:
            return None
        return Ttft(len(recent), _percentile(recent, 0.50), _percentile(recent, 0.95))


def _percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all values do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 100) * len(ordered) // 100) - 1))]
