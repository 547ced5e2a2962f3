"""Models drafts: guesses of the next tokens of simulated answers, of which a given share is right.

The most tokens per draft and the steps that are awaited are those of the engine. Matches are not modelled, so wrong
guesses do not reduce the number of drafts, as they do in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from quire.core.fairness import StepCost
from quire.core.request import Request
from quire.engine.guesses import MIN_DRAFTS, num_allowed, num_paying

MAX_DRAFTS = 31  # of a slice, as on a GPU
MAX_COSTLY_DRAFTS = 15  # where rows cost time
SEED = 27


class SimDrafts:
    """Makes the drafts of one replica. `outputs`: the whole answers of its requests, by request id.

    `share`: probability that the text after a token is guessed. `acceptance`: probability that a guessed token is right
    if all before it are.
    """

    def __init__(
        self, outputs: Mapping[int, Sequence[int]], max_num_seqs: int, *, share: float, acceptance: float
    ) -> None:
        self._outputs = outputs
        self._max_num_seqs = max_num_seqs
        self._share = share
        self._acceptance = acceptance
        self._random = Random(SEED)

    def update(self, request: Request, num_running: int, cost: StepCost | None) -> None:
        """Make a new draft for a request whose last tokens have arrived. `cost`: where rows cost time."""
        was_held = request.is_held
        request.draft, request.is_held = (), False
        max_drafts = MAX_DRAFTS if cost is None else MAX_COSTLY_DRAFTS
        most = num_allowed(max_drafts, self._max_num_seqs, num_running, has_costly_rows=cost is not None)
        if most < 1 or not (was_held or self._random.random() < self._share):
            return
        if request.num_in_flight:
            request.is_held = most > MIN_DRAFTS
            return
        if cost is not None:
            most = num_paying(self._acceptance, most, num_running, cost)
        done = request.num_output_tokens
        coming = self._outputs[request.request_id][done : done + most]
        request.draft = [token if self._random.random() < self._acceptance else token ^ 1 for token in coming]
