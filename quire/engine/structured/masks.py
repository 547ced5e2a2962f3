"""Which tokens the answers of a step may go on with. Knows matchers and plans; knows nothing of grammars or text.

A matcher follows committed tokens alone: what is sampled and dropped (an old epoch, a preemption) it never hears of.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def family(self) -> object:
        """Those that share one take turns inside their library: more threads would only wait for each other."""

    def mask(self) -> bytes:
        """The tokens that may come next, a bit each, lowest bit first; end-of-text where the answer may end."""

    def consume(self, token: int) -> bool:
        """Go on with a token. True: the answer is complete, and nothing but end-of-text could follow."""


class Masks(NamedTuple):
    """Of one step."""

    by_batch_index: Mapping[int, bytes]
    failures: Mapping[int, str]  # request id -> why there is none for it


class _Entry:
    """A request's matcher, and what it has used up."""

    __slots__ = ("matcher", "overrun_s")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.overrun_s = 0.0


_Row = tuple[int, int, _Entry]  # request id, batch index
_Found = list[tuple[int, int, bytes | str]]  # request id, batch index; the mask, or why there is none


class GrammarMasks:
    """The matchers of the requests under way. `begin` and `finish` go around whatever a device does meanwhile; where
    the device is this processor, nothing would be gained, and `compute` is both."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by request id
        self._num_threads = min(MAX_THREADS, usable_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[_Found]] = []

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
        self._jobs = [self._submit(rows) for rows in self._share_out(plan)]

    def finish(self) -> Masks:
        """Wait for them."""
        jobs, self._jobs = self._jobs, []
        return _sort(found for job in jobs for found in job.result())

    def compute(self, plan: StepPlan) -> Masks:
        """The masks of a step, in this thread and as many others as help."""
        first, *others = self._share_out(plan) or [[]]
        jobs = [self._submit(rows) for rows in others]
        return _sort(_compute(first) + [found for job in jobs for found in job.result()])

    def _share_out(self, plan: StepPlan) -> list[list[_Row]]:
        """What each thread is to compute; the longest first."""
        entries, families = self._entries, defaultdict[int, list[_Row]](list)
        for piece in plan.slices:
            if piece.wants_token and (entry := entries.get(piece.request_id)) is not None:
                families[id(entry.matcher.family)].append((piece.request_id, piece.batch_index, entry))
        num_rows = sum(map(len, families.values()))
        shares: list[list[_Row]] = [[] for _ in range(min(self._num_threads, -(-num_rows // ROWS_A_THREAD)))]
        for family in sorted(families.values(), key=len, reverse=True):
            min(shares, key=len).extend(family)
        return [share for share in shares if share]

    def _submit(self, rows: list[_Row]) -> Future[_Found]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        return self._pool.submit(_compute, rows)

    def close(self) -> None:
        self._entries.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _compute(rows: Sequence[_Row]) -> _Found:
    return [(request_id, batch_index, _mask(entry)) for request_id, batch_index, entry in rows]


def _sort(found: Iterable[tuple[int, int, bytes | str]]) -> Masks:
    masks: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    for request_id, batch_index, mask in found:
        if isinstance(mask, str):
            failures[request_id] = mask
        else:
            masks[batch_index] = mask
    return Masks(masks, failures)


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
