"""Chooses the drafts of each request: tokens forced by its grammar, a prediction, or repeated text.

Drafts are made after the tokens before them are known. With a step in flight they are not known when the next step is
planned, so a request for which drafts are likely is held until its token has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.backends.base import Capacity
from quire.backends.sampling import has_penalty
from quire.core.fairness import StepCost
from quire.core.request import Request
from quire.engine.guesses import MIN_DRAFTS, NO_GUESS, Drafter, num_allowed, num_paying
from quire.engine.structured.masks import GrammarMasks

MIN_MATCH = 4  # tokens, where a few more rows cost almost nothing
MIN_COSTLY_MATCH = 8  # where every row takes time
NUM_MISSES = 16  # tokens in a row without a guess, after which only every (NUM_SKIPPED + 1)th token is looked up
NUM_SKIPPED = 3  # a lookup takes 1 % of the step of a small model
REACH = 4  # guessed tokens for each token that matches, where a few more rows cost almost nothing


class Predicted(NamedTuple):
    """Tokens of a prediction that were verified so far."""

    num_right: int = 0
    num_wrong: int = 0


class _Entry:
    __slots__ = (
        *("drafter", "expected", "is_forced", "is_predicted", "num_misses", "num_to_skip", "predicted", "request"),
    )

    def __init__(self, request: Request, drafter: Drafter) -> None:
        self.request = request
        self.drafter = drafter
        self.expected: int | None = None  # the token for which the request is held
        self.is_forced = self.is_predicted = False  # where the present draft comes from
        self.predicted: Predicted | None = None
        self.num_misses = self.num_to_skip = 0  # tokens in a row without a guess; next ones without a lookup


class Speculation:
    """The drafters of all requests."""

    def __init__(self, capacity: Capacity, *, is_on: bool = True) -> None:
        self._capacity = capacity
        self.is_on = is_on and capacity.max_drafts > 0
        if capacity.num_states and capacity.num_live_states < 2:
            self.is_on = False  # a state cannot be rolled back
        self._entries: dict[int, _Entry] = {}
        self._active: set[int] = set()  # ids of requests that have a draft or are held
        self._num_running, self._allowed = 1, self._most(1)  # drafts per request that were allowed in the last step

    @property
    def has_active(self) -> bool:
        """Whether a request has a draft or is held."""
        return bool(self._active)

    def add(self, request: Request, prediction: Sequence[int] = ()) -> None:
        """Make drafts for a request, if its parameters allow that."""
        sampling = request.sampling
        if not self.is_on or sampling.prompt_logprobs is not None or has_penalty(sampling):
            return
        if self._capacity.has_costly_rows:
            drafter = Drafter(MIN_COSTLY_MATCH, prediction)
        else:
            drafter = Drafter(MIN_MATCH, prediction, reach=REACH)
        entry = self._entries[request.request_id] = _Entry(request, drafter)
        if prediction and (most := self._most(len(self._entries))) > 0:
            request.draft = prediction[:most]
            entry.is_predicted = True
            self._active.add(request.request_id)

    def remove(self, request_id: int) -> None:
        self._entries.pop(request_id, None)
        self._active.discard(request_id)

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

    def update(
        self, request_ids: Iterable[int], num_running: int, cost: StepCost | None, masking: GrammarMasks
    ) -> None:
        """Make new drafts for requests whose last tokens have arrived."""
        if num_running != self._num_running:
            self._num_running, self._allowed = num_running, self._most(num_running)
        most = self._allowed
        if most < 1 and not self._active:  # in a large batch nothing is done for each token
            return
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is None:
                continue
            if entry.num_to_skip:
                entry.num_to_skip -= 1
            else:
                self._update(entry, most, num_running, cost, masking)

    def _update(self, entry: _Entry, most: int, num_running: int, cost: StepCost | None, masking: GrammarMasks) -> None:
        request, request_id = entry.request, entry.request.request_id
        if entry.expected is not None:
            if request.tokens[-1] != entry.expected:
                entry.drafter.learn(1, 0)  # the awaited token differs from the guess
            entry.expected = None
        request.draft, request.is_held = (), False
        self._active.discard(request_id)
        if most < 1:
            return
        has_grammar = request_id in masking
        forced = masking.forced(request_id) if has_grammar else ()
        guess = NO_GUESS if forced else entry.drafter.guess(request.tokens, request.num_prompt_tokens, most)
        entry.is_forced, entry.is_predicted = bool(forced), guess.is_predicted
        draft: Sequence[int] = forced or guess.tokens
        if not draft:
            entry.num_misses += 1
            if entry.num_misses >= NUM_MISSES and not has_grammar:  # a grammar may force tokens at any place
                entry.num_to_skip = NUM_SKIPPED
            return
        entry.num_misses = 0
        if request.num_in_flight:  # the first guess is for the token in flight
            if len(draft) > MIN_DRAFTS:
                request.is_held = True
                entry.expected = None if forced else draft[0]
                self._active.add(request_id)
            return
        if self._capacity.has_costly_rows:
            rate = 1.0 if forced else entry.drafter.rate
            most = 0 if cost is None else num_paying(rate, min(most, len(draft)), num_running, cost)
        draft = draft[:most]
        if has_grammar and draft:
            draft = draft[: masking.num_valid(request_id, draft)]
        request.draft = draft
        if draft:
            self._active.add(request_id)

    def _most(self, num_running: int) -> int:
        """How many drafts a request may have now."""
        capacity = self._capacity
        return num_allowed(
            capacity.max_drafts, capacity.max_num_seqs, num_running, has_costly_rows=capacity.has_costly_rows
        )
