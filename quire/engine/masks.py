"""Computes the token masks of a step. Knows matchers and plans, not grammars or text.

A matcher sees committed tokens only, never tokens that are sampled and dropped (an old epoch, a preemption).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.backends.machine import usable_cores
from quire.core.step import SeqSlice, StepPlan
from quire.errors import QuireError

MASK_LIMIT_S = 0.02  # CPU time for one token of one answer
OVERRUN_LIMIT_S = 0.5  # total time above that limit for one answer: its masks delay the whole batch
MAX_THREADS = 8
ROWS_PER_THREAD = 4  # minimum: passing one row to a thread costs as much as computing its mask

log = logging.getLogger(__name__)


class GrammarFailed(QuireError):
    """A matcher cannot continue: its grammar is too complex at this point, or its library failed."""


class Matcher(Protocol):
    """The position of one answer in its grammar. Used by one thread at a time."""

    @property
    def family(self) -> object:
        """Matchers of the same family share a lock in their library, so they should run in the same thread."""

    def mask(self) -> bytes:
        """A bit mask of the allowed next tokens, lowest bit first. Includes end-of-text if the answer may end."""

    def consume(self, token: int) -> bool:
        """Advance by a token. Returns True if the answer is complete: only end-of-text could follow."""

    def forced(self) -> Sequence[int]:
        """Tokens that must follow, as far as the grammar allows only one text."""

    def num_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows one after the other, before the answer is complete."""

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        """The masks before each of these tokens, which are valid, and after the last, one after the other."""


class Masks(NamedTuple):
    """The masks of one step."""

    by_batch_index: Mapping[int, bytes]
    failures: Mapping[int, str]  # request id -> why it has no mask


@dataclass(slots=True)
class _Entry:
    """A request's matcher and its time above the limit."""

    matcher: Matcher
    overrun_s: float = 0.0


_Row = tuple[SeqSlice, _Entry]
_Found = list[tuple[int, int, bytes | str]]  # request id, batch index, and the mask or an error


class GrammarMasks:
    """The matchers of the running requests."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by request id
        self._num_threads = min(MAX_THREADS, usable_cores())
        self._pool: ThreadPoolExecutor | None = None

    def add(self, request_id: int, matcher: Matcher) -> None:
        self.entries[request_id] = _Entry(matcher)

    def forced(self, request_id: int) -> Sequence[int]:
        """Tokens that must follow. None if the matcher fails."""
        try:
            return self.entries[request_id].matcher.forced()
        except Exception:  # the next mask reports why
            return ()

    def num_valid(self, request_id: int, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar of a request allows one after the other."""
        try:
            return self.entries[request_id].matcher.num_valid(tokens)
        except Exception:  # the next mask reports why
            return 0

    def has_any(self, plan: StepPlan) -> bool:
        """Whether this step needs a mask before it can be sampled."""
        entries = self.entries
        return any(piece.wants_token and piece.request_id in entries for piece in plan.slices)

    def consume(self, request_id: int, token: int) -> bool:
        """Advance a request by a committed token. Returns True if its answer is complete. Raises GrammarFailed."""
        entry = self.entries.get(request_id)
        if entry is None:
            return False
        start_s = time.thread_time()
        is_complete = entry.matcher.consume(token)
        entry.overrun_s += max(time.thread_time() - start_s - MASK_LIMIT_S, 0.0)
        return is_complete

    def compute(self, plan: StepPlan) -> Masks:
        """The masks of a step, computed in this thread and as many others as are useful."""
        first, *others = self._share_out(plan) or [[]]
        jobs = [self._submit(rows) for rows in others]
        found = _compute(first) + [one for job in jobs for one in job.result()]
        failures = {request_id: mask for request_id, _, mask in found if isinstance(mask, str)}
        return Masks({index: mask for _, index, mask in found if isinstance(mask, bytes)}, failures)

    def _share_out(self, plan: StepPlan) -> list[list[_Row]]:
        """The rows of each thread. The largest families are assigned first."""
        entries, families = self.entries, defaultdict[int, list[_Row]](list)
        for piece in plan.slices:
            if piece.wants_token and (entry := entries.get(piece.request_id)) is not None:
                families[id(entry.matcher.family)].append((piece, entry))
        num_rows = sum(map(len, families.values()))
        shares: list[list[_Row]] = [[] for _ in range(min(self._num_threads, -(-num_rows // ROWS_PER_THREAD)))]
        for family in sorted(families.values(), key=len, reverse=True):
            min(shares, key=len).extend(family)
        return [share for share in shares if share]

    def _submit(self, rows: list[_Row]) -> Future[_Found]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        return self._pool.submit(_compute, rows)

    def close(self) -> None:
        self.entries.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _compute(rows: Sequence[_Row]) -> _Found:
    return [(piece.request_id, piece.batch_index, _mask(entry, piece.drafts)) for piece, entry in rows]


def _mask(entry: _Entry, drafts: Sequence[int]) -> bytes | str:
    start_s = time.thread_time()
    try:
        mask = entry.matcher.draft_masks(drafts) if drafts else entry.matcher.mask()
    except GrammarFailed as error:
        return f"grammar: {error}"
    except Exception as error:
        log.exception("a mask could not be computed")
        return f"grammar: {type(error).__name__}: {error}"
    entry.overrun_s += max(time.thread_time() - start_s - MASK_LIMIT_S, 0.0)
    if entry.overrun_s > OVERRUN_LIMIT_S:
        return f"grammar is too complex: its tokens take more than {MASK_LIMIT_S * 1000:.0f} ms to choose"
    return mask
