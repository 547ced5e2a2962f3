"""Which tokens the answers of a step may go on with. Knows matchers and plans; knows nothing of grammars or text.

A matcher follows committed tokens alone: what is sampled and dropped (an old epoch, a preemption) it never hears of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from quire.backends.machine import usable_cores
from quire.core.step import StepPlan
from quire.errors import QuireError

MASK_LIMIT_S = 0.02  # of a core, for one token of one answer
OVERRUN_LIMIT_S = 0.5  # what one answer's masks may take beyond that, in all: everyone in its steps waits for them
MAX_THREADS = 8
ROWS_A_THREAD = 4  # at least: to hand one row to a thread costs as much as to compute its mask

log = logging.getLogger(__name__)


class GrammarFailed(QuireError):
    """A matcher cannot go on: its grammar is too complex here, or its library failed."""


class Matcher(Protocol):
    """Where one answer stands in its grammar. Used by one thread at a time."""

    def mask(self) -> bytes:
        """The tokens that may come next, a bit each, lowest bit first; end-of-text where the answer may end."""

    def consume(self, token: int) -> bool:
        """Go on with a token. True: the answer is complete, and nothing but end-of-text could follow."""


class Masks(NamedTuple):
    """Of one step."""

    by_slot: Mapping[int, bytes]
    failures: Mapping[int, str]  # request id -> why there is none for it


class _Entry:
    __slots__ = ("matcher", "overrun_s")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.overrun_s = 0.0


class Masking:
    """The matchers of the requests under way. `begin` and `finish` go around whatever the device does meanwhile."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by request id
        self._num_threads = min(MAX_THREADS, usable_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[list[tuple[int, int, bytes | str]]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: int, matcher: Matcher) -> None:
        self._entries[request_id] = _Entry(matcher)

    def remove(self, request_id: int) -> None:
        self._entries.pop(request_id, None)

    def has_any(self, plan: StepPlan) -> bool:
        """Whether a mask is needed before this step can be sampled."""
        entries = self._entries
        return bool(entries) and any(piece.wants_token and piece.request_id in entries for piece in plan.slices)

    def consume(self, request_id: int, token: int) -> bool:
        """The token is part of the answer now. True: that is complete. Raises GrammarFailed."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        start_s = time.thread_time()
        is_complete = entry.matcher.consume(token)
        entry.overrun_s += max(time.thread_time() - start_s - MASK_LIMIT_S, 0.0)
        return is_complete

    def begin(self, plan: StepPlan) -> None:
        """Compute the masks of a step, in threads. `finish` must follow before anything else changes."""
        entries = self._entries
        rows = [
            (piece.request_id, piece.slot, entries[piece.request_id])
            for piece in plan.slices
            if piece.wants_token and piece.request_id in entries
        ]
        if not rows:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        size = max(-(-len(rows) // self._num_threads), ROWS_A_THREAD)
        self._jobs = [self._pool.submit(_compute, rows[i : i + size]) for i in range(0, len(rows), size)]

    def finish(self) -> Masks:
        """Wait for them."""
        jobs, self._jobs = self._jobs, []
        masks: dict[int, bytes] = {}
        failures: dict[int, str] = {}
        for job in jobs:
            for request_id, slot, found in job.result():
                if isinstance(found, str):
                    failures[request_id] = found
                else:
                    masks[slot] = found
        return Masks(masks, failures)

    def close(self) -> None:
        self._entries.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _compute(rows: Sequence[tuple[int, int, _Entry]]) -> list[tuple[int, int, bytes | str]]:
    """The mask of each, or why there is none."""
    return [(request_id, slot, _mask(entry)) for request_id, slot, entry in rows]


def _mask(entry: _Entry) -> bytes | str:
    start_s = time.thread_time()
    try:
        mask = entry.matcher.mask()
    except GrammarFailed as error:
        return f"grammar: {error}"
    except Exception as error:
        log.exception("a mask could not be computed")
        return f"grammar: {type(error).__name__}: {error}"
    entry.overrun_s += max(time.thread_time() - start_s - MASK_LIMIT_S, 0.0)
    if entry.overrun_s > OVERRUN_LIMIT_S:
        return f"grammar is too complex: its tokens take more than {MASK_LIMIT_S * 1000:.0f} ms to choose"
    return mask
