"""Repeats a step that raised, in smaller parts, so that only the requests that fail alone end.

One request can make the step of a whole batch raise. A batch can run out of memory although each of its halves fits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from quire.backends.base import Runner, TokenMasks
from quire.core.step import BlockCopy, SeqSlice, StepPlan, StepResult
from quire.errors import InvariantViolation

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
    failed = failed_step(plan, error)
    if not _is_repeatable(plan, error):
        return failed
    log.warning("repeating the step of %d requests in smaller parts", len(plan.slices))
    slices = {index: _with_tokens(piece, sampled) for index, piece in enumerate(plan.slices)}
    known = {index: piece for index, piece in slices.items() if piece is not None}
    if not known:
        return failed
    part, end_s = _part(plan, tuple(known.values())), time.monotonic() + MAX_REPEAT_S
    return _spread(_join([_attempt(runner, half, masks, end_s) for half in _parts(part)]), tuple(known), failed)


def last_tokens(plan: StepPlan, result: StepResult) -> Sampled:
    """The tokens that the slices of a step sampled last."""
    return {
        (piece.request_id, piece.epoch): tokens[-1]
        for index, (piece, tokens) in enumerate(zip(plan.slices, result.tokens, strict=True))
        if tokens and index not in result.failures
    }


def failed_step(plan: StepPlan, error: Exception) -> StepResult:
    """The result of a step in which every slice failed with `error`."""
    why = f"the step failed: {type(error).__name__}: {error}"
    return StepResult(((),) * len(plan.slices), failures=dict.fromkeys(range(len(plan.slices)), why))


def _attempt(runner: Runner, plan: StepPlan, masks: TokenMasks | None, end_s: float) -> StepResult:
    """Run a part. If it raises, run its halves, or fail all of it after `end_s`: a worker that is silent is killed."""
    try:
        runner.forward(plan)
        runner.sample(masks)
        return runner.collect()
    except Exception as error:
        runner.abandon()
        if len(plan.slices) == 1 or time.monotonic() > end_s:
            return failed_step(plan, error)
    return _join([_attempt(runner, part, masks, end_s) for part in _parts(plan)])


def _with_tokens(piece: SeqSlice, sampled: Sampled) -> SeqSlice | None:
    """The slice with its tokens. None: its token was not sampled, because its request failed in the step before."""
    if piece.tokens:
        return piece
    if len(piece.history) > piece.start:
        return piece._replace(tokens=(piece.history[piece.start],))
    token = sampled.get((piece.request_id, piece.epoch))
    return None if token is None else piece._replace(tokens=(token,))


def _spread(result: StepResult, places: Sequence[int], whole: StepResult) -> StepResult:
    """Put the results of some slices into the result of all."""
    tokens = list(whole.tokens)
    for index, place in enumerate(places):
        tokens[place] = result.tokens[index]
    return StepResult(
        tuple(tokens),
        {places[index]: value for index, value in result.logprobs.items()},
        {places[index]: value for index, value in result.prompt_logprobs.items()},
        {index: why for index, why in whole.failures.items() if index not in places}
        | {places[index]: why for index, why in result.failures.items()},
        result.is_poisoned,
    )


def _is_repeatable(plan: StepPlan, error: Exception) -> bool:
    """Return whether the step may run again.

    Not with recurrent states, which the first attempt may have updated in place. Not if the plan is wrong: its parts
    would be wrong too.
    """
    return not isinstance(error, InvariantViolation) and not any(piece.state_target for piece in plan.slices)


def _parts(plan: StepPlan) -> list[StepPlan]:
    """Two halves, or the same plan if it has one slice.

    It is not known how much of the plan the failed attempt did. A part therefore repeats the block copies and released
    rows of the plan, except those of the other slices: a later part must not undo the work of an earlier one.
    """
    slices = plan.slices
    middle = len(slices) // 2
    return [_part(plan, some) for some in (slices[:middle], slices[middle:]) if some]


def _part(plan: StepPlan, slices: tuple[SeqSlice, ...]) -> StepPlan:
    ids = {piece.request_id for piece in slices}
    others = [piece for piece in plan.slices if piece.request_id not in ids]
    rows = {piece.batch_index for piece in others}
    return StepPlan(
        slices,
        _without(plan.copies, {block for piece in others for block in piece.block_table}),
        tuple(row for row in plan.released if row not in rows),
        _without(plan.window_copies, {block for piece in others for block in piece.window_table}),
    )


def _without(copies: Sequence[BlockCopy], blocks: set[int]) -> tuple[BlockCopy, ...]:
    return tuple(copy for copy in copies if copy.destination not in blocks)


def _join(results: Sequence[StepResult]) -> StepResult:
    tokens: tuple[tuple[int, ...], ...] = ()
    joined = StepResult((), {}, {}, {})
    for result in results:
        first = len(tokens)
        tokens += result.tokens
        joined = StepResult(
            tokens,
            {**joined.logprobs, **{first + index: value for index, value in result.logprobs.items()}},
            {**joined.prompt_logprobs, **{first + index: value for index, value in result.prompt_logprobs.items()}},
            {**joined.failures, **{first + index: value for index, value in result.failures.items()}},
            joined.is_poisoned or result.is_poisoned,
        )
    return joined
