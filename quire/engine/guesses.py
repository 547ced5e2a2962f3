"""Guesses the next tokens of a request, so that several of them can be verified in one step.

A draft is right where the model would have sampled the same tokens. Its tokens are forced by a grammar, or are those of
a prediction, or repeat earlier text: an answer quotes its prompt, edits a file or follows a form. `Drafter` looks for
the last tokens of a request among its earlier ones, and guesses what followed there. Wrong guesses change no answer.
They cost the time of the rows that verify them, and with a step in flight the time in which the device waits, so a
drafter that was wrong demands longer matches.

Drafts are made after the tokens before them are known. With a step in flight they are not known when the next step is
planned, so a request for which drafts are likely is held until its token has arrived.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from quire.backends.base import Capacity
from quire.core.policy import StepCost
from quire.core.request import Request
from quire.engine.generation import Predicted
from quire.engine.masks import GrammarMasks

INDEX_PER_CALL = 2048  # tokens of a prompt that are indexed at once: this takes half a millisecond
FEW = 8  # tokens that are faster to index one by one
MAX_INDEXED = 65_536  # tokens of one request; an entry takes about 200 bytes
MAX_MATCH = 64  # longer matches are not distinguished
NUM_FAILURES = 2  # drafts without a right token, after which longer matches are demanded
FIRST_RATE = 0.8  # share of right tokens that is assumed before there is experience
MAX_ROWS = 64  # of a step with drafts, where a few more rows cost almost nothing
MIN_DRAFTS = 2  # fewer are not worth waiting for the token before them, nor the rows in a larger batch
GAIN = 1.1  # a draft must be worth this much more than no draft


class TokenIndex:
    """Knows where runs of `size` tokens occur in a sequence that only grows."""

    __slots__ = ("_ends", "_num_indexed", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends: dict[tuple[int, ...], int] = {}  # tokens -> end of their last occurrence
        self._num_indexed = 0  # ends of all occurrences up to here are known

    def find(self, tokens: array[int]) -> int | None:
        """The end of the previous occurrence of the last tokens of a sequence.

        Occurrences that are not indexed yet are not found.
        """
        end = len(tokens)
        if end <= self.size:
            return None
        self.extend(tokens, end - 1)
        return self.end_of(tokens[end - self.size :])

    def extend(self, tokens: array[int], end: int) -> None:
        """Index `tokens` up to `end`, or a part of them if they are many."""
        size = self.size
        first = max(self._num_indexed, size - 1, end - MAX_INDEXED)
        last = min(end, first + INDEX_PER_CALL)
        if last <= first + FEW:  # the usual case, in less time
            for place in range(first + 1, last + 1):
                self._ends[tuple(tokens[place - size : place])] = self._num_indexed = place
        else:
            part = tokens[first + 1 - size : last]
            runs = zip(*(part[offset:] for offset in range(size)), strict=False)
            self._ends.update(zip(runs, range(first + 1, last + 1), strict=False))
            self._num_indexed = last

    def end_of(self, run: Sequence[int]) -> int | None:
        """The end of the last occurrence of a run that is indexed."""
        return self._ends.get(tuple(run))


def match_length(tokens: array[int], place: int, most: int = MAX_MATCH) -> int:
    """Number of tokens before `place` that are equal to those at the end."""
    end, length = len(tokens), 0
    while length < most and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Guess(NamedTuple):
    tokens: Sequence[int]
    is_predicted: bool = False  # from the prediction of the caller


NO_GUESS = Guess(())


class Prediction:
    """The position of an answer within the text that its caller expects."""

    __slots__ = ("_index", "_num_followed", "_place", "_tokens", "num_matched")

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        """`size`: tokens by which the place is found again after the answer has left the prediction."""
        self._tokens = array("I", tokens)
        self._index = TokenIndex(size)
        self._place: int | None = 0  # of the token that comes next; None: the answer has left the prediction
        self._num_followed = 0  # tokens of the answer that were compared
        self.num_matched = MAX_MATCH  # tokens before the place that are in the answer; at first it counts as matched

    def follow(self, tokens: array[int], num_prompt_tokens: int) -> None:
        """Move the place past the new tokens of the answer."""
        expected, end, place = self._tokens, len(tokens), self._place
        for token in tokens[num_prompt_tokens + self._num_followed :]:
            if place is not None and place < len(expected) and expected[place] == token:
                place += 1
                self.num_matched += 1
            else:
                place = None
        self._num_followed = end - num_prompt_tokens
        size = self._index.size
        if place is None and self._num_followed >= size:
            self._index.extend(expected, len(expected))
            place, self.num_matched = self._index.end_of(tokens[end - size :]), size
        self._place = place

    def next(self, most: int) -> Sequence[int]:
        return () if self._place is None else self._tokens[self._place : self._place + most]


class Drafter:
    """Guesses the tokens of one request. `prediction`: tokens that the caller expects in the answer.

    `reach`: how many tokens are guessed for each token that matches.
    """

    __slots__ = ("_index", "_least", "_min_match", "_num_failures", "_prediction", "_reach", "rate")

    def __init__(self, min_match: int, prediction: Sequence[int] = (), *, reach: int = 1) -> None:
        self._least = self._min_match = min_match
        self._reach = reach
        self._index = TokenIndex(min(min_match, 8))
        self._prediction = Prediction(prediction, self._index.size) if prediction else None
        self._num_failures = 0
        self.rate = FIRST_RATE  # share of guessed tokens that are right, an average of the last guesses

    def guess(self, tokens: array[int], num_prompt_tokens: int, most: int) -> Guess:
        """At most `most` tokens that may follow. `tokens` only grow from call to call."""
        if (prediction := self._prediction) is not None:
            prediction.follow(tokens, num_prompt_tokens)
            if prediction.num_matched >= self._min_match and (coming := prediction.next(most)):
                return Guess(coming, is_predicted=True)
        place = self._index.find(tokens)
        if place is None:
            return NO_GUESS
        length = match_length(tokens, place)
        if length < self._min_match:
            return NO_GUESS
        count = min(most, self._reach * length)
        found = tokens[place : place + count]
        if len(found) < count:  # what follows are the last tokens themselves: they repeat
            found = (found * -(-count // len(found)))[:count]
        return Guess(found)

    def learn(self, num_guessed: int, num_right: int) -> None:
        """Take account of a verified guess."""
        self.rate += (num_right / num_guessed - self.rate) / 4
        if num_right:
            self._num_failures = 0
            self._min_match = max(self._least, self._min_match // 2)
            return
        self._num_failures += 1
        if self._num_failures >= NUM_FAILURES:
            self._num_failures = 0
            self._min_match = min(2 * self._min_match, MAX_MATCH)


def awaits_tokens(running: Collection[Request]) -> bool:
    """Whether at least half of these requests cannot be planned before the step in flight is committed.

    Then it is awaited before the next one is planned. Otherwise those requests would miss a whole step; the wait costs
    only the time of planning, in which the device idles.
    """
    return 2 * sum([request.awaits_sample for request in running]) >= max(len(running), 1)


def num_allowed(max_drafts: int, max_num_seqs: int, num_running: int, *, has_costly_rows: bool) -> int:
    """How many drafts a request may have among `num_running` requests. Drafts use rows that are free."""
    most = min(max_drafts, max_num_seqs // max(num_running, 1) - 1)
    if has_costly_rows:
        return max(most, 0)
    most = min(most, MAX_ROWS // max(num_running, 1) - 1)
    return most if most >= MIN_DRAFTS else 0


def num_paying(rate: float, most: int, num_rows: int, cost: StepCost) -> int:
    """How many guessed tokens pay where every row takes time, beside `num_rows` rows. 0: none.

    With a share `rate` of right tokens, k guesses add rate + rate^2 + ... + rate^k tokens.
    """
    alone_ns = cost.base_ns + num_rows * cost.token_ns - (cost.single_ns if num_rows == 1 else 0)
    best, best_speed = 0, GAIN * num_rows / max(alone_ns, 1)
    gained, right = 0.0, 1.0
    for count in range(1, most + 1):
        right *= rate
        gained += right
        speed = (num_rows + gained) / (cost.base_ns + (num_rows + count) * cost.token_ns)
        if speed > best_speed:
            best, best_speed = count, speed
    return best


MIN_MATCH = 4  # tokens, where a few more rows cost almost nothing
MIN_COSTLY_MATCH = 8  # where every row takes time
NUM_MISSES = 16  # tokens in a row without a guess, after which only every (NUM_SKIPPED + 1)th token is looked up
NUM_SKIPPED = 3  # a lookup takes 1 % of the step of a small model
REACH = 4  # guessed tokens for each token that matches, where a few more rows cost almost nothing


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
        if not self.is_on or sampling.prompt_logprobs is not None or sampling.has_penalty:
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
        has_grammar = request_id in masking.entries
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
