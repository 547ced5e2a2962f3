"""The engine loop. Knows token ids, plans and results, not text, processes or tensors.

A step that raised is repeated in smaller parts, so that only the requests that fail alone end. One request can make the
step of a whole batch raise. A batch can run out of memory although each of its halves fits.

`Speculation` guesses tokens, which steps verify. `StepEstimator` predicts the duration of a step from earlier steps:
for the limit of a watchdog and, on a CPU, the scheduler's cost of a row. It is not thread-safe.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from quire.backends.base import Capacity, Runner, TokenMasks
from quire.core.memory import choose_boundaries
from quire.core.policy import StepCost
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import BlockCopy, Load, PromptLogprobs, SeqSlice, StepPlan, StepResult, TokenLogprobs, TokenUpdate
from quire.core.values import FinishReason, Level
from quire.engine.generation import EngineOutput, GenerationRequest, PinPrefix, Predicted
from quire.engine.levels.transfers import LoadDone, Lost, ReadDone, SaveDone, Transfers
from quire.engine.masks import GrammarFailed, GrammarMasks, Matcher
from quire.errors import CacheFolderError, InvalidRequest, InvariantViolation, QuireError

MAX_REPEAT_S = 8.0

log = logging.getLogger(__name__)


Sampled = Mapping[tuple[int, int], int]  # by request and epoch: the token that the step before sampled last


def repeat_step(
    runner: Runner, plan: StepPlan, masks: TokenMasks | None, error: Exception, sampled: Sampled
) -> StepResult:
    """Run a plan whose first attempt raised `error` again, in parts. A slice that raises alone fails.

    The results of all earlier steps must have been collected from the runner. Its last samples may be those of the
    failed attempt, so slices that would read them get their tokens: `sampled` has those that are not in the history.
    """
    # Not with recurrent states, which the first attempt may have updated in place, nor if the plan itself is wrong.
    if isinstance(error, InvariantViolation) or any(piece.state_target for piece in plan.slices):
        return failed_step(plan, error)
    log.warning("repeating the step of %d requests in smaller parts", len(plan.slices))
    slices = {
        place: piece for place, one in enumerate(plan.slices) if (piece := _with_tokens(one, sampled)) is not None
    }
    tokens: list[tuple[int, ...]] = [()] * len(plan.slices)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    failures = {place: _reason(error) for place in range(len(plan.slices)) if place not in slices}
    is_poisoned = False
    end_s = time.monotonic() + MAX_REPEAT_S  # a worker that is silent is killed
    todo = _halves(list(slices))
    while todo:
        places = todo.pop(0)
        try:
            runner.forward(_part(plan, [slices[place] for place in places]))
            runner.sample(masks)
            result = runner.collect()
        except Exception as problem:
            runner.abandon()
            if len(places) == 1 or time.monotonic() > end_s:
                failures |= dict.fromkeys(places, _reason(problem))
            else:
                todo = _halves(places) + todo
            continue
        for place, own in zip(places, result.tokens, strict=True):
            tokens[place] = own
        logprobs |= {places[index]: value for index, value in result.logprobs.items()}
        prompt_logprobs |= {places[index]: value for index, value in result.prompt_logprobs.items()}
        failures |= {places[index]: why for index, why in result.failures.items()}
        is_poisoned |= result.is_poisoned
    return StepResult(tuple(tokens), logprobs, prompt_logprobs, failures, is_poisoned)


def last_tokens(plan: StepPlan, result: StepResult) -> Sampled:
    """The tokens that the slices of a step sampled last."""
    return {
        (piece.request_id, piece.epoch): tokens[-1]
        for index, (piece, tokens) in enumerate(zip(plan.slices, result.tokens, strict=True))
        if tokens and index not in result.failures
    }


def failed_step(plan: StepPlan, error: Exception) -> StepResult:
    """The result of a step in which every slice failed with `error`."""
    return StepResult(((),) * len(plan.slices), failures=dict.fromkeys(range(len(plan.slices)), _reason(error)))


def _reason(error: Exception) -> str:
    return f"the step failed: {type(error).__name__}: {error}"


def _with_tokens(piece: SeqSlice, sampled: Sampled) -> SeqSlice | None:
    """The slice with its tokens. None: its token was not sampled, because its request failed in the step before."""
    if piece.tokens:
        return piece
    if len(piece.history) > piece.start:
        return piece._replace(tokens=(piece.history[piece.start],))
    token = sampled.get((piece.request_id, piece.epoch))
    return None if token is None else piece._replace(tokens=(token,))


def _halves(places: list[int]) -> list[list[int]]:
    """Two halves, or the same if it is one place."""
    middle = len(places) // 2
    return [some for some in (places[:middle], places[middle:]) if some]


def _part(plan: StepPlan, slices: Sequence[SeqSlice]) -> StepPlan:
    """A part of a plan.

    It is not known how much of the plan the failed attempt did. A part therefore repeats the block copies and released
    rows of the plan, except those of the other slices: a later part must not undo the work of an earlier one.
    """
    ids = {piece.request_id for piece in slices}
    others = [piece for piece in plan.slices if piece.request_id not in ids]
    rows = {piece.batch_index for piece in others}
    return StepPlan(
        tuple(slices),
        _without(plan.copies, {block for piece in others for block in piece.block_table}),
        tuple(row for row in plan.released if row not in rows),
        _without(plan.window_copies, {block for piece in others for block in piece.window_table}),
    )


def _without(copies: Sequence[BlockCopy], blocks: set[int]) -> tuple[BlockCopy, ...]:
    return tuple(copy for copy in copies if copy.destination not in blocks)


# Guesses of tokens

INDEX_PER_CALL = 2048  # tokens of a prompt that are indexed at once: this takes half a millisecond
FEW = 8  # tokens that are faster to index one by one
MAX_INDEXED = 65_536  # tokens of one request; an entry takes about 200 bytes
MAX_MATCH = 64  # longer matches are not distinguished
NUM_FAILURES = 2  # drafts without a right token, after which longer matches are demanded
FIRST_RATE = 0.8  # share of right tokens that is assumed before there is experience
MAX_ROWS = 64  # of a step with drafts, where a few more rows cost almost nothing
MIN_DRAFTS = 2  # fewer are not worth waiting for the token before them, nor the rows in a larger batch
GAIN = 1.1  # a draft must be worth this much more than no draft


@dataclass(slots=True)
class TokenIndex:
    """Knows where runs of `size` tokens occur in a sequence that only grows."""

    size: int
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # tokens -> end of their last occurrence
    _num_indexed: int = 0  # ends of all occurrences up to here are known

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
    tokens: Sequence[int] = ()
    is_predicted: bool = False  # from the prediction of the caller


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
            return Guess()
        length = match_length(tokens, place)
        if length < self._min_match:
            return Guess()
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


@dataclass(slots=True)
class _Drafted:
    request: Request
    drafter: Drafter
    expected: int | None = None  # the token for which the request is held
    is_forced: bool = False  # the present draft, by a grammar
    is_predicted: bool = False  # the present draft, by the caller
    predicted: Predicted | None = None
    num_misses: int = 0  # tokens in a row without a guess
    num_to_skip: int = 0  # next tokens without a lookup


class Speculation:
    """The drafters of all requests. Guesses tokens, so that several of them can be verified in one step.

    A draft is right where the model would have sampled the same tokens. Its tokens are forced by a grammar, or are
    those of a prediction, or repeat earlier text: an answer quotes its prompt, edits a file or follows a form; a
    `Drafter` looks for the last tokens of a request among its earlier ones. Wrong guesses change no answer. They cost
    the time of the rows that verify them, and with a step in flight the time in which the device waits, so a drafter
    that was wrong demands longer matches.

    Drafts are made after the tokens before them are known. With a step in flight they are not known when the next step
    is planned, so a request for which drafts are likely is held until its token has arrived.
    """

    def __init__(self, capacity: Capacity, *, is_on: bool = True) -> None:
        self._capacity = capacity
        self._new_drafter = partial(Drafter, MIN_MATCH, reach=REACH)
        if capacity.has_costly_rows:
            self._new_drafter = partial(Drafter, MIN_COSTLY_MATCH)
        can_roll_back = not capacity.num_states or capacity.num_live_states > 1
        self.is_on = is_on and can_roll_back and capacity.max_drafts > 0
        self._entries: dict[int, _Drafted] = {}
        self.active: set[int] = set()  # ids of requests that have a draft or are held

    def add(self, request: Request, prediction: Sequence[int] = ()) -> None:
        """Make drafts for a request, if its parameters allow that."""
        sampling = request.sampling
        if not self.is_on or sampling.prompt_logprobs is not None or sampling.has_penalty:
            return
        entry = self._entries[request.request_id] = _Drafted(request, self._new_drafter(prediction=prediction))
        if prediction and (most := self._most(len(self._entries))) > 0:
            request.draft = prediction[:most]
            entry.is_predicted = True
            self.active.add(request.request_id)

    def remove(self, request_id: int) -> None:
        self._entries.pop(request_id, None)
        self.active.discard(request_id)

    def predicted(self, request_id: int) -> Predicted | None:
        """How much of a request's prediction was right so far. None: it has none, or it was not used."""
        entry = self._entries.get(request_id)
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
        most = self._most(num_running)
        if most < 1 and not self.active:  # in a large batch nothing is done for each token
            return
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is None:
                continue
            if entry.num_to_skip:
                entry.num_to_skip -= 1
            else:
                self._update(entry, most, num_running, cost, masking)

    def _update(
        self, entry: _Drafted, most: int, num_running: int, cost: StepCost | None, masking: GrammarMasks
    ) -> None:
        request, request_id = entry.request, entry.request.request_id
        if entry.expected is not None:
            if request.tokens[-1] != entry.expected:
                entry.drafter.learn(1, 0)  # the awaited token differs from the guess
            entry.expected = None
        request.draft, request.is_held = (), False
        self.active.discard(request_id)
        if most < 1:
            return
        has_grammar = request_id in masking.entries
        forced = masking.forced(request_id) if has_grammar else ()
        guess = Guess() if forced else entry.drafter.guess(request.tokens, request.num_prompt_tokens, most)
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
                self.active.add(request_id)
            return
        if self._capacity.has_costly_rows:
            rate = 1.0 if forced else entry.drafter.rate
            most = 0 if cost is None else num_paying(rate, min(most, len(draft)), num_running, cost)
        draft = draft[:most]
        if has_grammar and draft:
            draft = draft[: masking.num_valid(request_id, draft)]
        request.draft = draft
        if draft:
            self.active.add(request_id)

    def _most(self, num_running: int) -> int:
        """How many drafts a request may have among `num_running` requests. Drafts use rows that are free."""
        capacity = self._capacity
        most = min(capacity.max_drafts, capacity.max_num_seqs // max(num_running, 1) - 1)
        if capacity.has_costly_rows:
            return max(most, 0)
        most = min(most, MAX_ROWS // max(num_running, 1) - 1)
        return most if most >= MIN_DRAFTS else 0


# The loop

WAIT_S = 0.001  # for transfers, when there is nothing to compute; messages are read this often
MAX_FAILED_STEPS = 3  # in a row; after that, the runner is considered broken, not the requests


class BrokenRunner(QuireError):
    """Several steps in a row failed, with different requests. The engine should be replaced."""


class _InFlight(NamedTuple):
    plan: StepPlan
    result: StepResult | None = None  # None: the runner has it


class Engine:
    """Executes a scheduler's plans on a runner, with one step in flight if the runner supports overlap.

    Not thread-safe: its owner calls `add`, `cancel`, `finish` and `step` one at a time.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        on_plan: Callable[[StepPlan], None] | None = None,
        transfers: Transfers | None = None,
        has_drafts: bool = False,
    ) -> None:
        """`transfers`: makes saves and loads, if the scheduler's cache has levels below the device.

        `has_drafts`: guess tokens and verify several of them in one step, where that pays. It changes no answer.
        """
        self.runner = runner
        self.scheduler = scheduler
        self.capacity = runner.capacity()
        self.clock = clock
        self.on_plan = on_plan  # called with every plan before it runs
        self._requests: dict[int, Request] = {}  # unfinished, and not cancelled by the caller
        self._pins: dict[int, Sequence[PinPrefix]] = {}  # request id -> pins to set once its prompt is computed
        self._masking = GrammarMasks()
        self.speculation = Speculation(self.capacity, is_on=has_drafts)
        self._in_flight: _InFlight | None = None
        self.has_progressed = False  # in the last step: something was computed, read or loaded, or was begun
        self._num_failed_steps = 0
        self.transfers = transfers
        scheduler.cache.levels.on_loads = self._start_loads_early

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work

    @property
    def has_idle_work(self) -> bool:
        """Whether cached content should be saved while nothing runs, or saves are in flight."""
        if self.transfers is None:
            return False
        return self.transfers.has_copies or self.scheduler.cache.levels.saves.has_unsaved

    def add(
        self,
        request_id: int,
        request: GenerationRequest,
        *,
        index: int = 0,
        parent_id: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Add sample `index` of a request, or raise and change nothing. It shares the KV of a running parent.

        `matcher` restricts the tokens of the answer and must not be shared between samples.
        """
        self.check(request)
        pins = () if index else request.pins
        block_size = self.scheduler.cache.block_size
        points = {*choose_boundaries(request.boundaries), *(pin.num_tokens // block_size * block_size for pin in pins)}
        sample = Request(
            request_id,
            request.prompt,
            request.sampling.sample(index),
            priority=request.priority,
            salt=request.salt,
            tenant=request.tenant,
            parent=None if parent_id is None else self._requests.get(parent_id),
            boundaries=tuple(sorted(points)),
        )
        self.scheduler.add(sample, self.clock())
        self._requests[request_id] = sample
        if pins:
            self._pins[request_id] = pins
        if matcher is not None:
            self._masking.add(request_id, matcher)
        prediction = request.prediction if matcher is None else None
        self.speculation.add(sample, () if prediction is None else prediction.tokens)

    def cancel(self, request_id: int) -> bool:
        """Free everything the request holds. It produces no further output. Returns whether it was unfinished."""
        self._forget(request_id)
        return self.scheduler.cancel(request_id)

    def finish(self, request_id: int, num_output_tokens: int) -> bool:
        """End the request after this many output tokens. It produces no further output."""
        self._forget(request_id)
        return self.scheduler.finish(request_id, num_output_tokens)

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._pins.pop(request_id, None)
        self._masking.entries.pop(request_id, None)
        self.speculation.remove(request_id)

    def step(self) -> list[EngineOutput]:
        """Plan and enqueue a step, then collect the previous one, or this one if the runner has no overlap.

        If many requests await tokens of the previous step, it is collected first. A step in which all requests wait for
        reads plans nothing. It is no progress: see `has_progressed`.
        """
        self.has_progressed = False
        if self.transfers is not None:
            self.follow_clears()
            self._settle_transfers(self.transfers)
        outputs: list[EngineOutput] = []
        if self.awaits_tokens:
            outputs = self._commit_in_flight()
        plan = self.scheduler.schedule(self.clock())
        self.has_progressed |= bool(plan.slices or plan.reads or plan.loads)
        if self.on_plan is not None:
            self.on_plan(plan)
        if self.transfers is not None:
            self.transfers.start(plan, is_busy=not plan.is_empty)
            if plan.is_empty and self._in_flight is None:
                self.transfers.wait(WAIT_S)  # only loads are in flight
        if self._masking.entries and self._masking.has_any(plan):
            return outputs + self._step_masked(plan)
        launched = None if plan.is_empty else self._launch(plan)
        if self.capacity.has_overlap:
            launched, self._in_flight = self._in_flight, launched
        return outputs if launched is None else outputs + self._commit(launched)

    @property
    def read_limit_s(self) -> float:
        """Time until the reads for which requests wait are late. They compute then."""
        return max(self.scheduler.cache.levels.last_deadline_ns - self.clock(), 0) / 1e9

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next call of `step` collects the step in flight before it plans.

        It does if at least half of the requests cannot be planned before that. Otherwise those would miss a whole step;
        the wait costs only the time of planning, in which the device idles.
        """
        if self._in_flight is None or not self.speculation.active:
            return False
        running = self.scheduler.running.requests
        return 2 * sum([request.awaits_sample for request in running]) >= max(len(running), 1)

    # Levels below the device

    def _settle_transfers(self, transfers: Transfers) -> None:
        """Apply the transfers that have ended."""
        for done in transfers.poll(is_busy=len(self.scheduler.running) > 0):
            self.has_progressed |= isinstance(done, ReadDone | LoadDone)
            match done:
                case ReadDone(read_id, failures, read_ns):
                    self.scheduler.loads.finish_read(read_id, failures, read_ns)
                case LoadDone(load_id, failures):
                    self.scheduler.loads.finish(load_id, failures)
                case SaveDone(content, level, is_saved):
                    self.scheduler.cache.levels.saves.finish(content, level, is_saved=is_saved)
                case Lost(contents):
                    self.scheduler.cache.levels.lose(Level.DISK, contents)

    def _start_loads_early(self, loads: Sequence[Load]) -> None:
        """Start copies while the rest of the plan is made."""
        if self.transfers is not None:
            self.transfers.start_early(loads, is_busy=len(self.scheduler.running) > 0)

    def idle(self) -> None:
        """Save some cached content. Call it while `has_idle_work` and not `has_work`."""
        if self.transfers is not None:
            self.follow_clears()
            self._settle_transfers(self.transfers)
            self.transfers.start(self.scheduler.schedule_idle())

    def save_cache(self, limit_s: float) -> bool:
        """Save all cached content, for at most `limit_s`. Returns whether it is all saved. Runs no further step."""
        deadline_ns = self.clock() + int(limit_s * 1e9)
        self.follow_clears(at_once=True)
        if self._in_flight is not None and self.has_idle_work:  # a device may copy only when no step is running
            self._commit_in_flight()
        while self.has_idle_work and self.transfers is not None:
            if self.clock() >= deadline_ns:
                return False
            self.idle()
            self.transfers.wait(WAIT_S)
        return True

    def follow_clears(self, *, at_once: bool = False) -> bool:
        """Clear the cache if `quire cache clear` has deleted its files. Returns whether it has.

        Looks at most once per second, unless `at_once`.
        """
        if self.transfers is None or self.transfers.disk is None:
            return False
        cleared_ns = self.transfers.disk.watch.look(at_once=at_once)
        if cleared_ns is not None:
            self.drop_cache(cleared_ns)
        return cleared_ns is not None

    def clear_cache(self, cleared_ns: int | None = None) -> None:
        """Delete all cached content, in all levels. `cleared_ns`: see `DiskStore.clear`.

        Raises CacheFolderError if files cannot be deleted. This process does not use them any more even then.
        """
        self.scheduler.cache.clear()
        if self.transfers is not None:
            self.transfers.clear(cleared_ns)

    def drop_cache(self, cleared_ns: int | None = None) -> None:
        """Delete cached content that may be wrong or was deleted by others. Logs files that cannot be deleted."""
        try:
            self.clear_cache(cleared_ns)
        except CacheFolderError as error:
            log.error("the cache was cleared, but %s", error)

    def close(self) -> None:
        self._masking.close()
        if self.transfers is not None:
            self.transfers.close()
        self.runner.close()

    def _step_masked(self, plan: StepPlan) -> list[EngineOutput]:
        """Run a step with grammar masks, which depend on the tokens of the previous step.

        With overlap, the forward pass is enqueued first and runs while the masks are computed. On a CPU the masks are
        computed first: mask threads would preempt the backend's spin-waiting threads.
        """
        outputs: list[EngineOutput] = []
        if self.capacity.has_overlap:
            error = self._try(plan, partial(self.runner.forward, plan))
            outputs += self._commit_in_flight()
            masks = self._masking.compute(plan)
        else:
            masks = self._masking.compute(plan)
            error = self._try(plan, partial(self.runner.forward, plan))
        outputs += [self._fail(request_id, why) for request_id, why in masks.failures.items()]
        if error is None:
            error = self._try(plan, partial(self.runner.sample, masks.by_batch_index))
        launched = _InFlight(plan) if error is None else self._repeat(plan, masks.by_batch_index, error)
        if self.capacity.has_overlap:
            self._in_flight = launched
            return outputs
        return outputs + self._commit(launched)

    def _launch(self, plan: StepPlan) -> _InFlight:
        error = self._try(plan, partial(self.runner.forward, plan), partial(self.runner.sample, None))
        return _InFlight(plan) if error is None else self._repeat(plan, None, error)

    def _try(self, plan: StepPlan, *parts: Callable[[], None]) -> Exception | None:
        """Enqueue parts of a step. Returns the exception of the backend, which must not end the engine."""
        try:
            for enqueue in parts:
                enqueue()
        except Exception as error:
            log.exception("a step of %d requests failed", len(plan.slices))
            self.runner.abandon()
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)  # whose frames would keep the memory of the failed attempt
        return None

    def _repeat(self, plan: StepPlan, masks: TokenMasks | None, error: Exception) -> _InFlight:
        """Run a step that failed again. The requests that fail once more end."""
        sampled: Sampled = {}
        if (earlier := self._in_flight) is not None:  # the runner returns results in order
            before = self._collect(earlier)
            self._in_flight = _InFlight(earlier.plan, before)
            sampled = last_tokens(earlier.plan, before)
        result = repeat_step(self.runner, plan, masks, error, sampled)
        is_failed = len(result.failures) == len(plan.slices)
        self._num_failed_steps = self._num_failed_steps + 1 if is_failed else 0
        return _InFlight(plan, result)

    def _commit_in_flight(self) -> list[EngineOutput]:
        earlier, self._in_flight = self._in_flight, None
        return [] if earlier is None else self._commit(earlier)

    def _commit(self, step: _InFlight) -> list[EngineOutput]:
        self.has_progressed = True
        result = self._collect(step)
        updates = self.scheduler.commit(step.plan, result)
        if result.is_poisoned:  # other requests must not reuse what such a request left in the cache
            self.drop_cache()
        if self._masking.entries:
            updates = [self._match(update) for update in updates]
        if self.speculation.is_on:
            self._speculate(step.plan, updates)
        outputs = [self._output(update) for update in updates]
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            last = next((output.error for output in outputs if output.error), "")
            raise BrokenRunner(f"{self._num_failed_steps} steps in a row failed; the last: {last}")
        return outputs

    def _speculate(self, plan: StepPlan, updates: Sequence[TokenUpdate]) -> None:
        """Learn from the drafts of a step, and make new ones."""
        speculation, scheduler = self.speculation, self.scheduler
        if speculation.active:  # else the step has no drafts
            drafted = {piece.request_id: piece.num_drafts for piece in plan.slices if piece.num_drafts}
            for update in updates:
                if update.tokens and update.request_id in drafted:
                    speculation.learn(update.request_id, drafted[update.request_id], len(update.tokens))
        waiting = (update.request_id for update in updates if update.tokens and update.finish_reason is None)
        speculation.update(waiting, len(scheduler.running), scheduler.policy.ledger.cost, self._masking)

    def _collect(self, step: _InFlight) -> StepResult:
        if step.result is not None:
            return step.result
        try:
            result = self.runner.collect()
        except Exception as problem:
            log.exception("a step of %d requests failed", len(step.plan.slices))
            self._num_failed_steps += 1
            return failed_step(step.plan, problem)
        self._num_failed_steps = 0
        return result

    def _match(self, update: TokenUpdate) -> TokenUpdate:
        """Pass the tokens to the request's matcher. The request ends when its grammar is complete.

        With drafts, one more token may have been sampled after the last one of the grammar: it is removed.
        """
        reason, request_id = update.finish_reason, update.request_id
        if reason not in (None, FinishReason.LENGTH, FinishReason.STOP):
            return update
        tokens = update.tokens[:-1] if reason is FinishReason.STOP else update.tokens  # without the stop token
        num_taken = 0
        try:
            for token in tokens:
                num_taken += 1
                if self._masking.consume(request_id, token):
                    break
            else:
                return update
        except Exception as error:
            if not isinstance(error, GrammarFailed):
                log.exception("the matcher of request %d failed", request_id)
            self.scheduler.fail(request_id)
            return update._replace(tokens=(), logprobs=(), finish_reason=FinishReason.ERROR, error=f"grammar: {error}")
        num_dropped = len(update.tokens) - num_taken
        self.scheduler.finish(request_id, self._requests[request_id].num_output_tokens - num_dropped)
        return update._replace(
            tokens=update.tokens[:num_taken], logprobs=update.logprobs[:num_taken], finish_reason=FinishReason.STOP
        )

    def _fail(self, request_id: int, error: str) -> EngineOutput:
        self.scheduler.fail(request_id)
        return self._output(TokenUpdate(request_id, (), FinishReason.ERROR, error=error))

    def _output(self, update: TokenUpdate) -> EngineOutput:
        request = self._requests[update.request_id]
        is_first = request.num_output_tokens <= len(update.tokens)
        if self._pins and (update.tokens or update.finish_reason is not None):
            self._keep_prefixes(request, update)
        predicted = self.speculation.predicted(update.request_id)
        if update.finish_reason is not None:
            self._forget(update.request_id)
        return EngineOutput(
            update.request_id,
            update.tokens,
            update.finish_reason,
            request.num_cached_tokens,
            request.cache_explanation if is_first else None,
            update.logprobs,
            update.prompt_logprobs,
            update.error,
            predicted,
        )

    def _keep_prefixes(self, request: Request, update: TokenUpdate) -> None:
        """Set the pins of a request at its first token, when its prompt is computed and published."""
        pins = self._pins.pop(request.request_id, ())
        for pin in pins if update.tokens else ():
            deadline_ns = self.clock() + int(pin.ttl_s * 1e9)
            self.scheduler.cache.pin(pin.pin_id, request, pin.num_tokens, deadline_ns)

    def check(self, request: GenerationRequest) -> None:
        """Raise if the request can never run: too long, or token ids outside the vocabulary.

        Such ids would make the whole batch fail.
        """
        self.scheduler.cache.check_fits(len(request.prompt), self.scheduler.max_model_len)
        for name, largest in (
            ("prompt", request.prompt.largest),
            ("logit_bias", max(request.sampling.logit_bias, default=0)),
            ("stop_token_ids", max(request.sampling.stop_token_ids, default=0)),
            ("prediction", 0 if request.prediction is None else request.prediction.largest),
        ):
            if largest >= self.capacity.vocab_size:
                size = self.capacity.vocab_size
                raise InvalidRequest(f"{name}: token id {largest} is outside the vocabulary of {size}")


KEPT = 9  # steps per size: the median is used, so that an outlier does not matter
# Cost of attention relative to the rest of a token. Both depend on model and machine. The middle of the measured range
# is good enough for a limit of ten times the prediction.
CONTEXT_PER_TOKEN = 300  # keys read from the cache: 70 to 1,000
PAIRS_PER_TOKEN = 8000  # pairs of a query and a key in a prompt: 4,000 (135M) to 30,000 (8B)
MAX_BATCH = 512  # in tokens of effort: larger steps do not show the cost of another row
MEMORY_BOUND = 64  # tokens that may take no longer than one: the step is limited by reading the weights


class Work(NamedTuple):
    """The amount of work of a step."""

    num_tokens: int = 0
    effort: float = 0.0  # in tokens, attention included


def work_of(plan: StepPlan) -> Work:
    num_tokens, pairs = plan.num_tokens, 0
    context = num_tokens + sum([piece.start for piece in plan.slices])
    if num_tokens > len(plan.slices):  # not only decodes
        pairs = sum([piece.length * (2 * piece.start + piece.length) for piece in plan.slices if piece.length > 1]) // 2
    return Work(num_tokens, num_tokens + context / CONTEXT_PER_TOKEN + pairs / PAIRS_PER_TOKEN)


@dataclass(slots=True)
class _Size:
    """The last steps of about one size: their efforts are within a factor of two."""

    last: deque[tuple[float, float]] = field(default_factory=partial(deque, maxlen=KEPT))  # seconds and effort
    median: tuple[float, float] = 0.0, 0.0  # of two steps, the shorter one: the first of a kind is often slow

    def take(self, took_s: float, effort: float) -> None:
        self.last.append((took_s, effort))
        self.median = sorted(self.last)[(len(self.last) - 1) // 2]


class StepEstimator:
    """Interpolates between the medians of the sizes seen, and extrapolates beyond the largest.

    A step has a fixed cost and a cost per token. One size alone does not separate the two, so a decode does not show
    the cost of a prompt. Beyond the largest step seen, each further token costs the duration of that step divided by
    its number of tokens, which is taken as at least `MEMORY_BOUND`. Each size keeps its own last steps, so that a
    thousand decodes do not displace the durations of prompts.
    """

    def __init__(self) -> None:
        self._batches: dict[int, _Size] = {}  # steps of several tokens, keyed by the bit length of the effort
        self._single = _Size()  # single-token steps

    def learn(self, work: Work, took_s: float) -> None:
        if work.num_tokens > 1:
            self._batches.setdefault(int(work.effort).bit_length(), _Size()).take(took_s, work.effort)
        elif work.num_tokens:
            self._single.take(took_s, work.effort)

    def cost(self) -> StepCost | None:
        """The fixed cost of a step and the cost of a token in a batch. None: too few steps were seen.

        A single-token step may be faster than predicted from larger ones: backends have a special path for it.
        """
        batches = [size.median for bits, size in self._batches.items() if 1 << bits <= 2 * MAX_BATCH]
        seen = batches if len(batches) > 1 else [*batches, self._single.median]
        seen = [step for step in seen if step[1]]
        if len({effort for _, effort in seen}) < 2:
            return None
        (least_s, least), (most_s, most) = min(seen, key=itemgetter(1)), max(seen, key=itemgetter(1))
        slope_s = max(0.0, most_s - least_s) / (most - least)
        base_s = max(0.0, least_s - slope_s * least)
        single_s, single = self._single.median
        saved_s = max(0.0, base_s + slope_s * single - single_s) if single else 0.0
        token_ns = max(1, round(slope_s * 1e9))
        return StepCost(round(base_s * 1e9), token_ns, token_ns // CONTEXT_PER_TOKEN, round(saved_s * 1e9))

    def predict_s(self, work: Work) -> float:
        """The predicted duration. 0: no steps were seen, or there is no work."""
        seen = [size.median for size in (self._single, *self._batches.values()) if size.median[1]]
        if not seen or not work.num_tokens:
            return 0.0
        seen.sort(key=itemgetter(1))
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
