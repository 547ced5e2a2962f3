"""The engine loop. Knows token ids, plans and results, not text, processes or tensors.

A step that raised is repeated in smaller parts, so that only the requests that fail alone end. One request can make the
step of a whole batch raise. A batch can run out of memory although each of its halves fits.

`StepEstimator` predicts the duration of a step from earlier steps: for the limit of a watchdog and, on a CPU, the
scheduler's cost of a row. It is not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from quire.backends.base import Runner, TokenMasks
from quire.core.memory import choose_boundaries
from quire.core.policy import StepCost
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import BlockCopy, Load, PromptLogprobs, SeqSlice, StepPlan, StepResult, TokenLogprobs, TokenUpdate
from quire.core.values import FinishReason, Level, PackedPrompt
from quire.engine.generation import EngineOutput, GenerationRequest, PinPrefix
from quire.engine.guesses import Speculation, awaits_tokens
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
    if not _is_repeatable(plan, error):
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


def _is_repeatable(plan: StepPlan, error: Exception) -> bool:
    """Return whether the step may run again.

    Not with recurrent states, which the first attempt may have updated in place. Not if the plan is wrong: its parts
    would be wrong too.
    """
    return not isinstance(error, InvariantViolation) and not any(piece.state_target for piece in plan.slices)


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
        was_alive = self.scheduler.finish(request_id, num_output_tokens)
        self._forget(request_id)
        return was_alive

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._pins.pop(request_id, None)
        self._masking.entries.pop(request_id, None)
        self.speculation.remove(request_id)

    def pin(self, pin_id: str, prefix: PackedPrompt | Sequence[int], salt: str, ttl_s: float) -> int:
        """Pin the cached full blocks of this prefix for `ttl_s`. Returns their number of tokens."""
        return self.scheduler.cache.pin(pin_id, prefix, salt, self._deadline_ns(ttl_s))

    def _deadline_ns(self, ttl_s: float) -> int:
        return self.clock() + int(ttl_s * 1e9)

    def step(self) -> list[EngineOutput]:
        """Plan and enqueue a step, then collect the previous one, or this one if the runner has no overlap.

        If many requests await tokens of the previous step, it is collected first. A step in which all requests wait for
        reads plans nothing. It is no progress: see `has_progressed`.
        """
        self.has_progressed = False
        if self.transfers is not None:
            self.follow_deletions()
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
        """Whether the next call of `step` collects the step in flight before it plans."""
        return (
            self._in_flight is not None
            and self.speculation.has_active
            and awaits_tokens(self.scheduler.running.requests)
        )

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
            self.follow_deletions()
            self._settle_transfers(self.transfers)
            self.transfers.start(self.scheduler.schedule_idle())

    def save_cache(self, limit_s: float) -> bool:
        """Save all cached content, for at most `limit_s`. Returns whether it is all saved. Runs no further step."""
        deadline_ns = self.clock() + int(limit_s * 1e9)
        self.follow_deletions(at_once=True)
        if self._in_flight is not None and self.has_idle_work:  # a device may copy only when no step is running
            self._commit_in_flight()
        while self.has_idle_work and self.transfers is not None:
            if self.clock() >= deadline_ns:
                return False
            self.idle()
            self.transfers.wait(WAIT_S)
        return True

    def follow_deletions(self, *, at_once: bool = False) -> bool:
        """Forget what `quire cache` has deleted from the folder. Returns whether it has cleared the cache.

        Looks at most once per second, unless `at_once`.
        """
        if self.transfers is None or self.transfers.disk is None:
            return False
        deletion = self.transfers.disk.watch.look(at_once=at_once)
        if deletion is None:
            return False
        if deletion.cleared_ns is not None:
            self.scheduler.cache.clear()
        self.transfers.follow(deletion)
        return deletion.cleared_ns is not None

    def clear_cache(self) -> None:
        """Delete all cached content, in all levels.

        Raises CacheFolderError if files cannot be deleted. This process does not use them any more even then.
        """
        self.scheduler.cache.clear()
        if self.transfers is not None:
            self.transfers.clear()

    def drop_cache(self) -> None:
        """Delete cached content that may be wrong. Logs files that cannot be deleted."""
        try:
            self.clear_cache()
        except CacheFolderError as error:
            log.error("the cache was cleared because it may be wrong, but %s", error)

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
            error = self._try(plan, lambda: self.runner.forward(plan))
            outputs += self._commit_in_flight()
            masks = self._masking.compute(plan)
        else:
            masks = self._masking.compute(plan)
            error = self._try(plan, lambda: self.runner.forward(plan))
        outputs += [self._fail(request_id, why) for request_id, why in masks.failures.items()]
        if error is None:
            error = self._try(plan, lambda: self.runner.sample(masks.by_batch_index))
        launched = _InFlight(plan) if error is None else self._repeat(plan, masks.by_batch_index, error)
        if self.capacity.has_overlap:
            self._in_flight = launched
            return outputs
        return outputs + self._commit(launched)

    def _launch(self, plan: StepPlan) -> _InFlight:
        def launch() -> None:
            self.runner.forward(plan)
            self.runner.sample(None)

        error = self._try(plan, launch)
        return _InFlight(plan) if error is None else self._repeat(plan, None, error)

    def _try(self, plan: StepPlan, enqueue: Callable[[], None]) -> Exception | None:
        """Enqueue a step or a part of it. Returns the exception of the backend, which must not end the engine."""
        try:
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
        if speculation.has_active:  # else the step has no drafts
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
            self.scheduler.cache.pin_prompt(pin.pin_id, request, pin.num_tokens, self._deadline_ns(pin.ttl_s))

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
