"""Runs step plans on MLX: one forward pass for the whole batch where the model allows it, then one sampling pass.

MLX builds a graph, and computes it when it is evaluated. The graph of the next step is built while the current step is
computed, and evaluated as soon as the current one is done. It is not evaluated earlier: a pool that an unfinished step
still reads would be copied instead of being written in place (decision 0036).

A thread of its own does all of a runner's work, one call after the other. MLX's streams belong to threads: an array
that one thread has not evaluated yet cannot be evaluated by another. An engine, however, may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import mlx.core as mx

from quire.backends.base import BlockIO, Capacity, RunnerFacts, TokenMasks
from quire.backends.mlx.batch import BatchMode, Pass, build_passes
from quire.backends.mlx.model import PagedModel
from quire.backends.mlx.paged_cache import KVStore, MlxBlockIO
from quire.backends.mlx.sampling import Penalties, Sampled, rank, sample
from quire.backends.sampling import Ranks, SampledRows, broken_slices, join_prompt_logprobs, make_result, prompt_parts
from quire.core.step import PromptLogprobs, SeqSlice, StepPlan, StepResult
from quire.errors import InvariantViolation

Result = TypeVar("Result")
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class OwnThread:
    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.is_stopped = False
        # A daemon, so that a program that is interrupted while a model is loaded can end.
        threading.Thread(target=self._work, name="mlx", daemon=True).start()

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in the thread and wait for its result."""
        if self.is_stopped:
            raise InvariantViolation("the runner is closed")
        future: Future[Result] = Future()
        self._calls.put((future, function, args))
        return future.result()

    def stop(self) -> None:
        """End the thread after the calls before."""
        self.is_stopped = True
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:  # it belongs to the caller
                future.set_exception(error)
            del call, future, function, args  # they may hold large arrays until the next call


@dataclass(slots=True)
class _Step:
    """A step from its forward pass until it is collected. Its arrays may not be computed yet."""

    slices: tuple[SeqSlice, ...]
    order: tuple[int, ...]  # of the slices in the passes
    sampled_indices: tuple[int, ...]  # of the slices that sample, in the order of the logits
    logits: mx.array | None  # [S, V]
    last_tokens: mx.array | None  # [S]
    is_sound: mx.array  # [slices], in their order: whether the last hidden state is finite
    prompt_ranks: dict[int, list[Ranks]]  # by slice index: logprobs of its prompt tokens, in parts
    read_first: list[mx.array]  # contents of block copies
    sampled: Sampled | None = None
    error: Exception | None = None  # of the evaluation
    is_started: bool = False  # its evaluation

    @property
    def arrays(self) -> list[object]:
        """What is evaluated, in any nesting."""
        return [self.is_sound, self.logits if self.sampled is None else self.sampled, self.prompt_ranks]


class MlxRunner:
    """`thread` does all work: it has loaded the model, and computes every step."""

    def __init__(
        self, model: PagedModel, store: KVStore, capacity: Capacity, facts: RunnerFacts, thread: OwnThread
    ) -> None:
        self.model = model
        self.store = store
        self._capacity = capacity
        self._facts = facts
        self._last_samples = mx.zeros(capacity.max_num_seqs, mx.int32)
        self._penalties = Penalties(capacity.vocab_size)
        self._building: _Step | None = None  # forwarded, not sampled
        self._steps: deque[_Step] = deque()
        self._broken = ""
        self._thread = thread
        self._block_io = MlxBlockIO(store, facts.layout, facts.weight_bytes, partial(thread.run, self._between_steps))

    def capacity(self) -> Capacity:
        return self._capacity

    def facts(self) -> RunnerFacts:
        return self._facts

    def use_threads(self, num_threads: int) -> None:
        """MLX chooses its own threads."""

    def prepare(self) -> bool:
        return False

    def block_io(self) -> BlockIO:
        return self._block_io

    def forward(self, plan: StepPlan) -> None:
        self._thread.run(self._forward, plan)

    def sample(self, masks: TokenMasks | None) -> None:
        self._thread.run(self._sample, masks)

    def collect(self) -> StepResult:
        return self._thread.run(self._collect)

    def abandon(self) -> None:
        """Discard a pass that raised, so that the next plan can run."""
        self._thread.run(self._abandon)

    def close(self) -> None:
        if not self._thread.is_stopped:
            self._thread.run(self._close)
            self._thread.stop()

    # In the runner's thread

    def _between_steps(self, function: Callable[..., None], *args: Any) -> None:
        """Compute all steps that were enqueued, then call a function that reads or writes the pools."""
        if self._building is not None:
            raise InvariantViolation("memory is copied between the forward pass of a step and its sampling")
        for step in self._steps:
            if not step.is_started:
                self._evaluate(step)
            self._wait_for(step)
        if self._broken:
            raise RuntimeError(self._broken)
        function(*args)

    def _forward(self, plan: StepPlan) -> None:
        if self._building is not None:
            raise InvariantViolation("forward before the last step was sampled")
        if self._broken:
            raise RuntimeError(self._broken)
        for batch_index in plan.released:
            self._penalties.release(batch_index)
        self._check(plan)
        contents = self.store.copy(plan.copies)
        sizes = self.store.block_size, self.store.max_gathered
        passes = build_passes(plan.slices, *sizes, self._last_samples, self.model.mode)
        self._building = self._run_passes(plan.slices, passes, contents)

    def _sample(self, masks: TokenMasks | None) -> None:
        step = self._building
        if step is None:
            raise InvariantViolation("sample without a forward pass")
        self._building = None
        if step.logits is not None:
            assert step.last_tokens is not None
            pieces = [step.slices[index] for index in step.sampled_indices]
            step.sampled = sample(step.logits, pieces, self._penalties, step.last_tokens, masks)
            batch_indices = mx.array([piece.batch_index for piece in pieces], dtype=mx.int32)
            self._last_samples[batch_indices] = step.sampled.tokens
        self._steps.append(step)
        if len(self._steps) == 1:
            self._evaluate(step)

    def _collect(self) -> StepResult:
        if not self._steps:
            raise InvariantViolation("collect with no step in flight")
        step = self._steps.popleft()
        self._wait_for(step)
        following = self._steps[0] if self._steps else self._building
        if following is not None and not following.is_started:
            self._evaluate(following)
        if step.error is not None:
            raise step.error
        return self._read(step)

    def _abandon(self) -> None:
        self._building = None
        self.store.begin(None)
        self._recover()

    def _close(self) -> None:
        """Free the memory: the engine may still refer to the runner."""
        self._building = None
        self._steps.clear()
        self._penalties.clear()
        self.store.layers.clear()
        self.model.close()
        mx.clear_cache()

    # Evaluation

    def _evaluate(self, step: _Step) -> None:
        """Start to compute a step. The previous step must be done."""
        step.is_started = True
        try:
            if step.read_first:
                mx.eval(step.read_first)
                step.read_first = []
            mx.async_eval(step.arrays, self.store.arrays, self._last_samples, self._penalties.arrays)
        except Exception as error:
            step.error = error
            self._recover()

    def _wait_for(self, step: _Step) -> None:
        """Wait until a step that was started is computed, or has failed."""
        if step.error is None:
            try:
                mx.synchronize()
            except Exception as error:
                step.error = error
                self._recover()

    def _recover(self) -> None:
        """After a failed step, compute the pools: the writes of some layers may not be computed yet.

        The contents of the failed step's own blocks are undefined, and its requests end. If the pools cannot be
        computed, the contents of other requests are lost too, and every later step fails until the worker is replaced.
        """
        try:
            mx.synchronize()  # the step before may still run
            mx.eval(self.store.arrays, self._last_samples)
        except Exception as error:
            self._broken = f"the KV cache was lost in a failed step: {error}"
        self._penalties.clear()

    # Forward passes

    def _run_passes(self, slices: tuple[SeqSlice, ...], passes: Sequence[Pass], contents: list[mx.array]) -> _Step:
        """Build the graph of a step. Of several passes, each is computed before the next, which writes in place."""
        is_divided = self.model.mode is not BatchMode.FLAT
        if is_divided:
            mx.eval(contents)
        sampled: list[int] = []
        logits: list[mx.array] = []
        tokens: list[mx.array] = []
        is_sound: list[mx.array] = []
        ranks: dict[int, list[Ranks]] = {}
        for step in passes:
            wanted = {index: row for index, row in step.last_rows.items() if slices[index].wants_token}
            found, hidden = self.model.forward(step, self.store, list(wanted.values()))
            if found is not None:
                sampled += wanted
                logits.append(found.astype(mx.float32))
                tokens.append(step.tokens.reshape(-1)[mx.array(list(wanted.values()), dtype=mx.int32)])
            is_sound.append(_are_finite(hidden[mx.array(list(step.last_rows.values()), dtype=mx.int32)]))
            ranks |= self._rank_prompts(slices, hidden, step.last_rows)
            if is_divided:
                mx.eval(logits, tokens, is_sound, ranks, self.store.arrays)
        return _Step(
            slices=slices,
            order=tuple(index for step in passes for index in step.last_rows),
            sampled_indices=tuple(sampled),
            logits=mx.concatenate(logits) if sampled else None,
            last_tokens=mx.concatenate(tokens) if sampled else None,
            is_sound=mx.concatenate(is_sound),
            prompt_ranks=ranks,
            read_first=contents,
        )

    def _check(self, plan: StepPlan) -> None:
        """Refuse ids out of bounds: MLX would read and write beyond its arrays without an error."""
        num_blocks, size = self.store.num_blocks, self.store.block_size
        for piece in plan.slices:
            end = piece.start + piece.length
            table = piece.block_table[: -(-end // size)]
            is_valid = (
                piece.length == (len(piece.tokens) or 1)
                and 0 <= piece.start < end <= self._capacity.max_model_len
                and 0 <= piece.batch_index < self._capacity.max_num_seqs
                and len(table) * size >= end
                and all(0 <= block < num_blocks for block in (min(table), max(table)))
                and all(0 <= token < self._capacity.vocab_size for token in piece.tokens)
            )
            if not is_valid:
                raise InvariantViolation(f"the plan's slice of request {piece.request_id} is out of bounds")
        for copy in plan.copies:
            if not (0 <= copy.source < num_blocks and 0 <= copy.destination < num_blocks):
                raise InvariantViolation(f"{copy} is not within the pool's {num_blocks} blocks")

    def _rank_prompts(
        self, slices: tuple[SeqSlice, ...], hidden: mx.array, last_rows: Mapping[int, int]
    ) -> dict[int, list[Ranks]]:
        """Return logprobs of the prompt tokens after each position: a position's logits predict the next token."""
        result: dict[int, list[Ranks]] = {}
        for index, last_row in last_rows.items():
            piece = slices[index]
            first_row = last_row + 1 - piece.length
            for row, tokens in prompt_parts(piece):
                raw = self.model.head(hidden[first_row + row : first_row + row + len(tokens)]).astype(mx.float32)
                counts = (piece.sampling.prompt_logprobs or 0,) * len(tokens)
                ranks = rank(raw, mx.array(tokens, dtype=mx.int32), tuple(range(len(tokens))), counts)
                result.setdefault(index, []).append(ranks)
        return result

    # Results

    def _read(self, step: _Step) -> StepResult:
        unsound = [index for index, is_sound in zip(step.order, _numbers(step.is_sound), strict=True) if not is_sound]
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        for index, parts in step.prompt_ranks.items():
            piece = step.slices[index]
            ranked = [
                tuple(part.read(some).values()) for part, (_, some) in zip(parts, prompt_parts(piece), strict=True)
            ]
            prompt_logprobs[index] = join_prompt_logprobs(piece.start + 1, ranked)
        rows = None
        if (sampled := step.sampled) is not None:
            chosen, broken, blocked = (_numbers(array) for array in sampled[:3])
            logprobs = {} if sampled.logprobs is None else sampled.logprobs.read(chosen)
            rows = SampledRows(step.sampled_indices, chosen, broken, blocked, logprobs)
        result = make_result(step.slices, unsound, rows, prompt_logprobs)
        if result.is_poisoned:
            mx.synchronize()  # the next step may already run: its writes come first
            for index in broken_slices(result):
                self.store.purge(step.slices[index].block_table)
        return result


def _are_finite(hidden: mx.array) -> mx.array:
    """Return whether rows are finite. A NaN anywhere in a context reaches its last row."""
    return mx.isfinite(hidden.astype(mx.float32).sum(-1))


def _numbers(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())
