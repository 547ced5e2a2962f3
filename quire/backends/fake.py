"""A runner without a model, which verifies the scheduler's plans.

For every position its memory holds a digest of the whole prefix up to that position. Real KV depends on all earlier
tokens; a fake that stored plain tokens could not distinguish two blocks with the same tokens and different parents. To
compute a token it reads the whole context back through the block table, so any wrong block changes the answer.

`run_alone` computes the same answer for one request in separate memory, without blocks, batching or cache. The
simulator tests that the two agree under any sharing, chunking, preemption and eviction.

As the backend "fake" it also replaces a model in a worker process, for tests of the code around it.

Its block I/O copies the integers of its memory as words of 8 bytes. A runner that executes late also copies late: after
the steps that were enqueued before, and not before `is_done` was called once or more. Until then an exported buffer and
the targets of an import hold poison, so that a caller who uses them too early gets wrong content.
"""

from __future__ import annotations

import re
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from quire.backends.base import (
    DEFAULT_MAX_SEQS,
    BackendOptions,
    BlockIO,
    Capacity,
    Copied,
    MemorySizes,
    PendingCopy,
    Progress,
    RunnerFacts,
    TokenMasks,
)
from quire.backends.block_io import MAX_EXPORTS, check_pieces, counts_of, layout_text
from quire.backends.kv_memory import KVSpec
from quire.backends.sampling import masks_by_row, prompt_parts, sampled_pieces
from quire.core.step import (
    BlockCopy,
    MemoryKind,
    MemoryRef,
    PromptLogprobs,
    SeqSlice,
    StepPlan,
    StepResult,
    TokenLogprobs,
    accepted,
)
from quire.core.values import SamplingParams
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.checkpoint import Checkpoint

_MASK = 2**62 - 1
NUM_BLOCKS = 2048  # default size of the pool
MAX_DRAFTS = 15
NUM_STATES = 8  # states per request, live ones and snapshots


def digest(*parts: int) -> int:
    """Hash integers only, so that the result is the same in every process."""
    return hash(parts) & _MASK


def choose_token(context: int, sampling: SamplingParams, history: Sequence[int], vocab_size: int) -> int:
    """Return the token after a context. Depends on a real sampler's inputs: seed, sample index, position, history."""
    parts = [context, len(history)]
    if sampling.temperature > 0:
        parts += [sampling.seed, sampling.sample_index]
    if sampling.repetition_penalty != 1.0:
        parts.append(digest(*history))
    return digest(*parts) % vocab_size


class Hybrid:
    """Window entries and the recurrent state of a context, as digests.

    The window entry of a token depends on the entries that the token sees; the state on all tokens before it.
    """

    __slots__ = ("_window", "seen", "state")

    def __init__(self, window: int, seen: Sequence[int] = (), state: int = 0) -> None:
        self._window = window  # 0: no layer has one
        self.seen = list(seen)  # entries that the next token sees, at most window - 1
        self.state = state

    def read(self, token: int, position: int) -> int:
        """Read a token. Returns its window entry."""
        entry = digest(1, *self.seen, token, position)
        if self._window:
            self.seen = [*self.seen, entry][-self._window :]
        self.state = digest(2, self.state, token, position)
        return entry

    def value(self, fold: int, *, has_states: bool) -> int:
        """Digest of everything that the last token sees."""
        parts = [fold]
        if self._window:
            parts.append(digest(*self.seen))
        if has_states:
            parts.append(self.state)
        return digest(*parts) if len(parts) > 1 else fold

    def step(self) -> None:
        """Move the window to the next token, which sees one entry less of the context."""
        if self._window:
            self.seen = self.seen[-(self._window - 1) :] if self._window > 1 else []


class Fold:
    """A running digest of a context, block by block. Stands for attention over the whole context."""

    __slots__ = ("_block_size", "_open", "done")

    def __init__(self, block_size: int, done: int = 0) -> None:
        self._block_size = block_size
        self.done = done  # digest of all full blocks
        self._open: list[int] = []  # entries of the last, partial block

    def read(self, entries: Sequence[int]) -> None:
        """Add entries, which must not cross the end of the current block."""
        self._open += entries
        if len(self._open) == self._block_size:
            self.done = digest(self.done, *self._open)
            self._open = []

    def entry(self, token: int, position: int) -> int:
        """Return the KV entry of a token that follows this context."""
        return digest(self.done, *self._open, token, position)

    def value(self) -> int:
        return digest(self.done, *self._open)


def run_alone(
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    *,
    block_size: int,
    vocab_size: int,
    window: int = 0,
    has_states: bool = False,
) -> list[int]:
    """The oracle: return the next `num_tokens` tokens of a request that is computed without batching or cache."""
    fold, hybrid = Fold(block_size), Hybrid(window)
    history: list[int] = []
    waiting = list(prompt)
    while len(history) < len(prompt) + num_tokens:
        if len(history) < len(prompt):
            token = waiting[len(history)]
        else:
            token = choose_token(hybrid.value(fold.value(), has_states=has_states), sampling, history, vocab_size)
        hybrid.step()
        hybrid.read(token, len(history))
        fold.read((fold.entry(token, len(history)),))
        history.append(token)
    return history[len(prompt) :]


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> FakeRunner:
    """Make a runner with a model's vocabulary and limits but no weights. `device` sets the time of a step."""
    del progress  # nothing is loaded
    spec = checkpoint.spec
    max_model_len = options.context_within(spec.max_model_len)
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_SEQS
    kv_spec = KVSpec.of(spec).within(max_model_len)
    num_blocks = options.num_blocks or NUM_BLOCKS
    capacity = Capacity(
        num_blocks=num_blocks,
        window=kv_spec.window,
        num_window_blocks=num_blocks if kv_spec.window else 0,
        num_states=1 + NUM_STATES * max_num_seqs if kv_spec.has_states else 0,
        block_size=options.block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        max_drafts=MAX_DRAFTS,
    )
    return FakeRunner(capacity, step_s=_step_time(options.device))


def _step_time(device: str) -> float:
    if device == "auto":
        return 0.0
    found = re.fullmatch(r"(\d{1,5}(?:\.\d{1,3})?)ms", device)
    if found is None:
        raise InvalidRequest(f"device = {device!r} is not auto or the time of a step, such as 5ms")
    return float(found[1]) / 1000


def made_up_logprobs(token: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Return logprobs in which each token is half as probable as the previous one, starting with the chosen token."""
    logprobs = [-0.7 * (rank + 1) for rank in range(max(num_top, 1))]
    top = tuple(((token + rank) % vocab_size, logprob) for rank, logprob in enumerate(logprobs))
    return TokenLogprobs(token, logprobs[0], 0, top[:num_top])


class _Logits(NamedTuple):
    """Output of the forward pass, input of the sampler."""

    contexts: tuple[int, ...]  # of the positions after which the runner samples; one if it does not
    last_token: int


class _Step(NamedTuple):
    """A plan, and the lengths of the block table and the window table of each slice when it was enqueued.

    Tables grow while the step is in flight. The blocks that are added belong to later steps.
    """

    plan: StepPlan
    table_sizes: list[tuple[int, int]]


class _Use(NamedTuple):
    """Blocks of one kind that a slice uses."""

    piece: SeqSlice
    table: Sequence[int]
    first_read: int  # position
    first_written: int


class FakeRunner:
    """Executes plans in `forward` and `sample`, or, with `is_late`, in `collect`: eager execution would hide races.

    Performs copies in random order and poisons everything that a slice has not written yet. Refuses plans that break
    the contract. With `step_s`, `collect` sleeps that long, as if a device were computing.
    """

    def __init__(self, capacity: Capacity, *, is_late: bool = False, seed: int = 0, step_s: float = 0.0) -> None:
        self._capacity = capacity
        self._step_s = step_s
        self._is_late = is_late
        self._random = Random(seed)
        pools = FakeMemory(capacity)
        self.memory, self.window_memory, self.states = pools.blocks, pools.window_blocks, pools.states
        self._last_sample: list[int | None] = [None] * capacity.max_num_seqs
        self._forwarded: tuple[_Step, list[_Logits] | None] | None = None  # not sampled yet
        self._late: deque[tuple[_Step, TokenMasks | None] | LateCopy] = deque()  # not executed yet
        self._importing: list[LateCopy] = []  # not done when last asked
        self._block_io = FakeBlockIO(pools, capacity, self._enqueue if is_late else None, seed)
        self._results: deque[StepResult] = deque()  # not collected yet

    def capacity(self) -> Capacity:
        return self._capacity

    def facts(self) -> RunnerFacts:
        device = f"{self._step_s * 1000:g}ms" if self._step_s else "none"
        return RunnerFacts("fake", device, "none", 1, layout=self._block_io.layout, is_row_exact=True)

    def use_threads(self, num_threads: int) -> None:
        del num_threads  # this runner uses one

    def prepare(self) -> bool:
        return False

    def block_io(self) -> BlockIO:
        return self._block_io

    def forward(self, plan: StepPlan) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("forward before the last step was sampled")
        self._check(plan)
        step = _Step(plan, [(len(piece.block_table), len(piece.window_table)) for piece in plan.slices])
        self._forwarded = step, None if self._is_late else self._run(step)

    def sample(self, masks: TokenMasks | None) -> None:
        if self._forwarded is None:
            raise InvariantViolation("sample without a forward pass")
        step, logits = self._forwarded
        self._forwarded = None
        if logits is None:
            self._late.append((step, masks))
        else:
            self._results.append(self._choose(step.plan, logits, masks))

    def collect(self) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        if self._late:
            late = self._late.popleft()
            assert not isinstance(late, LateCopy)  # copies that no step precedes have started
            step, masks = late
            result = self._choose(step.plan, self._run(step), masks)
            self._start_copies()
            return result
        if not self._results:
            raise InvariantViolation("collect with no step in flight")
        return self._results.popleft()

    def abandon(self) -> None:
        self._forwarded = None

    def close(self) -> None:
        self._late.clear()
        self._results.clear()

    def _enqueue(self, copy: LateCopy) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("memory is copied between the forward pass of a step and its sampling")
        if wrong := self._imported_pieces() & set(copy.pieces):
            raise InvariantViolation(f"memory that is being imported is copied: {sorted(wrong)}")
        if not copy.is_export:
            self._importing.append(copy)
        self._late.append(copy)
        self._start_copies()

    def _imported_pieces(self) -> set[MemoryRef]:
        """Return the targets of imports that are not done."""
        self._importing = [copy for copy in self._importing if copy.is_pending]
        return {ref for copy in self._importing for ref in copy.pieces}

    def _start_copies(self) -> None:
        """Start the copies that no step precedes."""
        while self._late and isinstance(copy := self._late[0], LateCopy):
            self._late.popleft()
            copy.start()

    def _run(self, step: _Step) -> list[_Logits]:
        plan = step.plan
        for batch_index in plan.released:
            self._last_sample[batch_index] = None
        for copy in self._random.sample(plan.copies, len(plan.copies)):
            self.memory[copy.destination][:] = self.memory[copy.source]
        for copy in self._random.sample(plan.window_copies, len(plan.window_copies)):
            self.window_memory[copy.destination][:] = self.window_memory[copy.source]
        return [self._compute(piece, *sizes) for piece, sizes in zip(plan.slices, step.table_sizes, strict=True)]

    def _compute(self, piece: SeqSlice, num_blocks: int, num_windows: int) -> _Logits:
        size, table = self._capacity.block_size, piece.block_table
        tokens = piece.tokens or (self._own_sample(piece.batch_index),)
        first_written = max(piece.start, piece.kv_start)
        for index in range(first_written // size, num_blocks):
            first = max(first_written - index * size, 0)
            self.memory[table[index]][first:] = [POISON] * (size - first)
        fold, hybrid = Fold(size), self._hybrid(piece, num_windows)
        for index in range(-(-piece.start // size)):
            fold.read(self.memory[table[index]][: piece.start - index * size])
        snapshots = {snapshot.position: snapshot.slot for snapshot in piece.snapshots}
        contexts: list[int] = []
        has_states = bool(self._capacity.num_states)
        for position, token in enumerate(tokens, piece.start):
            entry = fold.entry(token, position)
            if position >= piece.kv_start:
                self.memory[table[position // size]][position % size] = entry
            elif self.memory[table[position // size]][position % size] != entry:
                raise InvariantViolation(f"position {position} is not written, and does not have its content: {piece}")
            fold.read((entry,))
            hybrid.step()
            window_entry = hybrid.read(token, position)
            if self._capacity.num_window_blocks:
                self.window_memory[piece.window_table[position // size]][position % size] = window_entry
            if position + 1 in snapshots:
                self.states[snapshots[position + 1]] = hybrid.state
            if position >= piece.start + piece.length - piece.num_sampled:
                contexts.append(hybrid.value(fold.value(), has_states=has_states))
        if has_states:
            self.states[piece.state_target] = hybrid.state
        return _Logits(tuple(contexts), tokens[-1])

    def _hybrid(self, piece: SeqSlice, num_windows: int) -> Hybrid:
        """Read the window and the state before a slice, and poison the window memory that it writes."""
        size, window = self._capacity.block_size, self._capacity.window if self._capacity.num_window_blocks else 0
        seen: list[int] = []
        if window:
            first = max(piece.start - window + 1, 0)
            table = piece.window_table
            seen = [self.window_memory[table[at // size]][at % size] for at in range(first, piece.start)]
            for index in range(piece.start // size, num_windows):
                offset = max(piece.start - index * size, 0)
                self.window_memory[table[index]][offset:] = [POISON] * (size - offset)
        return Hybrid(window, seen, self.states[piece.state_source] if self.states else 0)

    def _choose(self, plan: StepPlan, logits: list[_Logits], masks: TokenMasks | None) -> StepResult:
        samples: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        vocab_size = self._capacity.vocab_size
        for index, (piece, row) in enumerate(zip(plan.slices, logits, strict=True)):
            if prompt_tokens := [token for _, tokens in prompt_parts(piece) for token in tokens]:
                num_top = piece.sampling.prompt_logprobs or 0
                entries = tuple(made_up_logprobs(token, num_top, vocab_size) for token in prompt_tokens)
                prompt_logprobs[index] = PromptLogprobs(piece.start + 1, entries)
            if not piece.wants_token:
                samples.append(())
                continue
            tokens = accepted(self._sample_slice(piece, row, masks), piece.drafts)
            self._last_sample[piece.batch_index] = tokens[-1]
            samples.append(tokens)
            if piece.sampling.logprobs is not None:
                num_top = piece.sampling.logprobs
                logprobs[index] = tuple(made_up_logprobs(token, num_top, vocab_size) for token in tokens)
        return StepResult(tuple(samples), logprobs, prompt_logprobs)

    def _sample_slice(self, piece: SeqSlice, row: _Logits, masks: TokenMasks | None) -> list[int]:
        """Sample after each of the last positions of a slice."""
        first = piece.start + piece.length - piece.num_drafts
        history = [*piece.history[:first]]
        if len(history) < first:
            history.append(row.last_token)  # sampled after the plan was made
        tokens: list[int] = []
        allowed = masks_by_row(sampled_pieces(piece), masks, self._capacity.vocab_size)
        for number, context in enumerate(row.contexts):
            context_tokens = [*history, *piece.drafts[:number]]
            token = choose_token(context, piece.sampling, context_tokens, self._capacity.vocab_size)
            if number in allowed:
                token = self._next_allowed(token, allowed[number])
            tokens.append(token)
        return tokens

    def _own_sample(self, batch_index: int) -> int:
        token = self._last_sample[batch_index]
        if token is None:
            raise InvariantViolation(f"batch_index {batch_index} has no sampled token to continue from")
        return token

    def _next_allowed(self, token: int, mask: bytes) -> int:
        vocab_size = self._capacity.vocab_size
        candidates = ((token + step) % vocab_size for step in range(vocab_size))
        return next(candidate for candidate in candidates if mask[candidate // 8] >> candidate % 8 & 1)

    def _check(self, plan: StepPlan) -> None:
        """Check the contract of a plan on which every runner relies."""
        capacity = self._capacity
        self._check_imports(plan)
        if sum(piece.num_sampled for piece in plan.slices) > capacity.max_num_seqs:
            raise InvariantViolation("more positions are sampled than the batch has rows")
        batch_indices: set[int] = set()
        for piece in plan.slices:
            if piece.length < 1 or piece.length != (len(piece.tokens) or 1):
                raise InvariantViolation(f"the slice has no valid tokens or length: {piece}")
            if piece.num_drafts and (not piece.wants_token or len(piece.tokens) <= piece.num_drafts or piece.snapshots):
                raise InvariantViolation(f"the slice cannot have drafts: {piece}")
            if piece.batch_index in batch_indices or not 0 <= piece.batch_index < capacity.max_num_seqs:
                raise InvariantViolation(f"the batch index is used twice or out of range: {piece}")
            batch_indices.add(piece.batch_index)
        uses = [_Use(piece, piece.block_table, 0, max(piece.start, piece.kv_start)) for piece in plan.slices]
        self._check_blocks("block", plan.copies, uses, capacity.num_blocks)
        if capacity.num_window_blocks:
            firsts = [max(piece.start - capacity.window + 1, 0) for piece in plan.slices]
            pairs = zip(plan.slices, firsts, strict=True)
            uses = [_Use(piece, piece.window_table, first, piece.start) for piece, first in pairs]
            self._check_blocks("window block", plan.window_copies, uses, capacity.num_window_blocks)
        elif plan.window_copies or any(piece.window_table for piece in plan.slices):
            raise InvariantViolation("the plan has window blocks, and the runner has none")
        self._check_states(plan)

    def _check_blocks(self, kind: str, copies: Sequence[BlockCopy], uses: Sequence[_Use], num_blocks: int) -> None:
        """Check that tables cover their slices, and that no block has two writers, or a reader beside its writer."""
        size = self._capacity.block_size
        sources, destinations = {copy.source for copy in copies}, {copy.destination for copy in copies}
        if sources & destinations or len(destinations) != len(copies):
            raise InvariantViolation(f"the result of these copies depends on their order: {copies}")
        written: set[int] = set()
        read: set[int] = set()
        for piece, whole_table, first_read, first_written in uses:
            end = -(-(piece.start + piece.length) // size)
            table, first = whole_table[:end], first_written // size
            if len(table) < end or not all(0 < block < num_blocks for block in table[first_read // size :]):
                raise InvariantViolation(f"the {kind} table does not cover its slice: {piece}")
            if not written.isdisjoint(table[first:]):
                raise InvariantViolation(f"two slices write into one {kind}: {piece}")
            written.update(table[first:])
            read.update(table[first_read // size : first])
            if first_written % size:  # a block to which a slice appends may be copied from: copies are done first
                sources -= set(table[first : first + 1])
        if not written.isdisjoint(read | sources):
            raise InvariantViolation(f"a {kind} is written by one slice and read by another")

    def _check_imports(self, plan: StepPlan) -> None:
        """Check that the step uses nothing that is being imported."""
        importing = self._imported_pieces()
        if not importing:
            return
        used: set[MemoryRef] = set()
        for kind, copies in ((MemoryKind.BLOCK, plan.copies), (MemoryKind.WINDOW, plan.window_copies)):
            used |= {MemoryRef(kind, index) for copy in copies for index in copy}
        for piece in plan.slices:
            num_blocks = -(-(piece.start + piece.length) // self._capacity.block_size)
            slots = [piece.state_source, piece.state_target, *(snapshot.slot for snapshot in piece.snapshots)]
            used |= {MemoryRef(MemoryKind.BLOCK, block) for block in piece.block_table[:num_blocks]}
            used |= {MemoryRef(MemoryKind.WINDOW, block) for block in piece.window_table[:num_blocks]}
            used |= {MemoryRef(MemoryKind.STATE, slot) for slot in slots}
        if wrong := used & importing:
            raise InvariantViolation(f"the step uses memory that is being imported: {sorted(wrong)}")

    def _check_states(self, plan: StepPlan) -> None:
        """Check that each slot has one writer, and no reader other than its writer."""
        if not self._capacity.num_states:
            return
        written: dict[int, int] = {}
        for piece in plan.slices:
            targets = [piece.state_target, *[snapshot.slot for snapshot in piece.snapshots]]
            positions = [piece.start, *[snapshot.position for snapshot in piece.snapshots], piece.start + piece.length]
            if positions != sorted(set(positions)):
                raise InvariantViolation(f"snapshots are not in order within their slice: {piece}")
            for slot in targets:
                if slot in written or not 0 < slot < len(self.states):
                    raise InvariantViolation(f"state slot {slot} is written twice or out of range: {piece}")
                written[slot] = piece.batch_index
            if piece.start and piece.state_source == 0:
                raise InvariantViolation(f"the slice continues from the empty state: {piece}")
        for piece in plan.slices:
            if written.get(piece.state_source, piece.batch_index) != piece.batch_index:
                raise InvariantViolation(f"state slot {piece.state_source} is read by one slice and written by another")


POISON = -1  # content of memory that has not been written; digests are never negative
WORD_BYTES = 8
PIECES_PER_STEP = 4  # few, so that tests reach the limit
MAX_POLLS = 3  # calls of `is_done` before a late copy is done


class FakeMemory:
    """The pools, with a digest for each position, and one for each state."""

    def __init__(self, capacity: Capacity) -> None:
        size = capacity.block_size
        self.blocks = [[POISON] * size for _ in range(capacity.num_blocks)]
        self.window_blocks = [[POISON] * size for _ in range(capacity.num_window_blocks)]
        self.states = [POISON] * capacity.num_states
        if self.states:
            self.states[0] = 0  # the empty state

    def read(self, ref: MemoryRef) -> bytes:
        if ref.kind is MemoryKind.STATE:
            return struct.pack("<q", self.states[ref.index])
        words = self._pool(ref.kind)[ref.index]
        return struct.pack(f"<{len(words)}q", *words)

    def write(self, ref: MemoryRef, content: bytes | memoryview) -> None:
        words = struct.unpack(f"<{len(content) // WORD_BYTES}q", content)
        if ref.kind is MemoryKind.STATE:
            (self.states[ref.index],) = words
        else:
            self._pool(ref.kind)[ref.index][:] = words

    def _pool(self, kind: MemoryKind) -> list[list[int]]:
        return self.window_blocks if kind is MemoryKind.WINDOW else self.blocks


class LateCopy:
    """Copies that were enqueued. The runner calls `start` once the steps before them have run."""

    def __init__(
        self,
        memory: FakeMemory,
        pieces: Sequence[MemoryRef],
        buffers: Sequence[memoryview],
        *,
        is_export: bool,
        num_polls: int,
    ) -> None:
        self.pieces = tuple(pieces)
        self.is_export = is_export
        self._memory = memory
        self._buffers = tuple(buffers)
        self._num_polls = num_polls
        self.is_pending = True
        self._is_started = False  # the steps before it have run
        self._contents: list[bytes] = []  # read when the copies started
        if is_export:
            for buffer in buffers:
                buffer.cast("B")[:] = _poison(buffer.nbytes)

    def start(self) -> None:
        self._is_started = True
        if self.is_export:
            self._contents = [self._memory.read(ref) for ref in self.pieces]
            return
        for ref, buffer in zip(self.pieces, self._buffers, strict=True):
            self._memory.write(ref, _poison(buffer.nbytes))

    def is_done(self) -> bool:
        if self._is_started and self.is_pending:
            self._num_polls -= 1
            if self._num_polls <= 0:
                self._finish()
        return not self.is_pending

    def join_steps(self) -> bool:
        return False  # a late copy is not ordered with steps

    def _finish(self) -> None:
        self.is_pending = False
        if self.is_export:
            for buffer, content in zip(self._buffers, self._contents, strict=True):
                buffer.cast("B")[:] = content
        else:
            for ref, buffer in zip(self.pieces, self._buffers, strict=True):
                self._memory.write(ref, buffer)


class FakeBlockIO:
    """`enqueue` is None if the runner executes steps at once; otherwise it takes late copies."""

    def __init__(
        self, memory: FakeMemory, capacity: Capacity, enqueue: Callable[[LateCopy], None] | None, seed: int = 0
    ) -> None:
        block = WORD_BYTES * capacity.block_size
        has_windows, has_states = capacity.num_window_blocks > 0, capacity.num_states > 0
        self.sizes = MemorySizes(block, block * has_windows, WORD_BYTES * has_states)
        self.layout = layout_text(
            "fake",
            1,
            block_size=capacity.block_size,
            window=capacity.window if has_windows else 0,
            states=int(has_states),
        )
        self.is_host_memory = False
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = PIECES_PER_STEP
        self._memory = memory
        self._counts = counts_of(capacity)
        self._enqueue = enqueue
        self._random = Random(seed)

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        return self._copy(pieces, buffers, is_export=True)

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        return self._copy(pieces, buffers, is_export=False)

    def _copy(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview], *, is_export: bool) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=is_export)
        num_polls = 0 if self._enqueue is None else self._random.randint(1, MAX_POLLS)
        copy = LateCopy(self._memory, pieces, buffers, is_export=is_export, num_polls=num_polls)
        if self._enqueue is None:
            copy.start()
            copy.is_done()
            return Copied()
        self._enqueue(copy)
        return copy


def _poison(num_bytes: int) -> bytes:
    return struct.pack("<q", POISON) * (num_bytes // WORD_BYTES)
