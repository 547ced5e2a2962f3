"""Chooses the drafts of each request: tokens forced by its grammar, a prediction, or repeated text.

Drafts are made after the tokens before them are known. With a step in flight they are not known when the next step is
planned, so a request for which drafts are likely is held until its token has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.backends.base import Capacity
from quire.backends.sampling import has_penalty
from quire.core.ledger import StepCost
from quire.core.request import Request
from quire.core.speculation import Drafter, num_paying
from quire.engine.structured.masks import GrammarMasks

MIN_MATCH = 3  # tokens, where a few more rows cost almost nothing
MIN_COSTLY_MATCH = 8  # where every row takes time
MAX_ROWS = 64  # of a step with drafts, where a few more rows cost almost nothing
MIN_DRAFTS = 2  # fewer are not worth waiting for the token before them


class Predicted(NamedTuple):
    """Tokens of a prediction that were verified so far."""

    num_right: int = 0
    num_wrong: int = 0


class _Entry:
    __slots__ = ("drafter", "is_forced", "is_predicted", "predicted", "request")

    def __init__(self, request: Request, drafter: Drafter) -> None:
        self.request = request
        self.drafter = drafter
        self.is_forced = self.is_predicted = False  # where the present draft comes from
        self.predicted: Predicted | None = None


class Speculation:
    """The drafters of all requests."""

    def __init__(self, capacity: Capacity, *, is_on: bool = True) -> None:
        self._capacity = capacity
        self.is_on = is_on and capacity.max_drafts > 0
        if capacity.num_states and capacity.num_live_states < 2:
            self.is_on = False  # a state cannot be rolled back
        self._entries: dict[int, _Entry] = {}

    def add(self, request: Request, prediction: Sequence[int] = ()) -> None:
        """Make drafts for a request, if its parameters allow that."""
        sampling = request.sampling
        if not self.is_on or sampling.prompt_logprobs is not None or has_penalty(sampling):
            return
        min_match = MIN_COSTLY_MATCH if self._capacity.has_costly_rows else MIN_MATCH
        entry = self._entries[request.request_id] = _Entry(request, Drafter(min_match, prediction))
        if prediction:
            request.draft = prediction[: self._capacity.max_drafts]
            entry.is_predicted = True

    def remove(self, request_id: int) -> None:
        self._entries.pop(request_id, None)

    def predicted(self, request_id: int) -> Predicted | None:
        """How much of a request's prediction was right so far. None: it has none, or it was not used."""
        entry = self._entries.get(request_id) if self._entries else None
        return None if entry is None else entry.predicted

    def learn(self, request_id: int, num_drafts: int, num_tokens: int) -> None:
        """Take account of a slice with drafts that gave `num_tokens`."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        num_right = num_tokens - 1
        if not entry.is_forced:
            entry.drafter.learn(num_drafts, num_right)
        if entry.is_predicted:
            before = entry.predicted or Predicted()
            entry.predicted = Predicted(before.num_right + num_right, before.num_wrong + num_drafts - num_right)

    def update(self, request_id: int, num_running: int, cost: StepCost | None, masking: GrammarMasks) -> None:
        """Make a new draft for a request whose last tokens have arrived."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        request = entry.request
        request.draft, request.is_held = (), False
        most = self._most(num_running)
        if most < 1:
            return
        forced = masking.forced(request_id) if request_id in masking else ()
        guess = entry.drafter.guess(request.tokens, request.num_prompt_tokens, most)
        entry.is_forced = len(forced) > 0
        entry.is_predicted = guess.is_predicted and not forced
        draft: Sequence[int] = forced or guess.tokens
        if not draft:
            return
        if request.num_in_flight:  # the first guess is for the token in flight
            request.is_held = len(draft) > MIN_DRAFTS
            return
        if self._capacity.has_costly_rows:
            rate = 1.0 if forced else entry.drafter.rate
            most = 0 if cost is None else num_paying(rate, min(most, len(draft)), num_running, cost)
        draft = draft[:most]
        if request_id in masking and draft:
            draft = draft[: masking.num_valid(request_id, draft)]
        request.draft = draft

    def _most(self, num_running: int) -> int:
        """How many drafts a request may have now."""
        capacity = self._capacity
        free = capacity.max_num_seqs // max(num_running, 1) - 1
        if capacity.has_costly_rows:
            return min(capacity.max_drafts, free)
        most = min(capacity.max_drafts, free, MAX_ROWS // max(num_running, 1) - 1)
        return most if most >= MIN_DRAFTS else 0
