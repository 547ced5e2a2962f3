"""Runs step plans in C: one forward pass for the whole batch, then one sampling pass for the rows that sample.

`make_runner` makes a runner from a checkpoint and the user's options.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends import kv_memory
from quire.backends.base import (
    DEFAULT_MAX_SEQS,
    BackendOptions,
    BlockIO,
    Capacity,
    Progress,
    Runner,
    RunnerFacts,
    TokenMasks,
)
from quire.backends.block_io import HostBlockIO, counts_of, layout_text, model_key
from quire.backends.kv_memory import KVMemory, KVSpec, MemoryRequest
from quire.backends.machine import choose_threads
from quire.backends.native.library import Engine, Floats, Ints, kernels_in_use, load_library
from quire.backends.native.model import Batch, NativeModel, build_batch, kv_costs
from quire.backends.native.packing import pack_model
from quire.backends.native.sampling import NativeSampler, Penalties, Sampled
from quire.backends.sampling import (
    SampledRows,
    broken_slices,
    join_prompt_logprobs,
    make_result,
    prompt_parts,
    sampled_pieces,
)
from quire.backends.support import refuse_unsupported, rope_notice
from quire.core.step import PromptLogprobs, SeqSlice, StepPlan, StepResult
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

MAX_CHUNK_TOKENS = 512  # of a prompt, by default
LAYOUT = 1  # version of the bytes of blocks and states; raise it when a change of C changes their meaning or rounding
MAX_DRAFTS = 15  # of a slice
MAX_MIXED_TOKENS = 64  # beside answers: a larger piece is hardly faster, and the answers wait for it


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A forward pass that has not been sampled."""

    slices: tuple[SeqSlice, ...]
    batch: Batch
    logits: Floats  # [L, V]
    is_sound: NDArray[np.bool_]  # [S]
    prompt_logprobs: Mapping[int, PromptLogprobs]  # by index of the plan's slices


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that has been sampled but not collected."""

    forwarded: _Forwarded
    sampled: Sampled | None


class NativeRunner:
    def __init__(self, model: NativeModel, *, max_num_seqs: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS) -> None:
        limits = model.limits
        self.model = model
        self._capacity = Capacity(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            has_overlap=False,  # computation happens inside the call
            has_costly_rows=True,
            max_chunk_tokens=max_chunk_tokens,
            max_mixed_tokens=MAX_MIXED_TOKENS,
            max_drafts=MAX_DRAFTS,
            window=limits.window,
            num_window_blocks=limits.num_window_blocks,
            num_states=limits.num_states,
        )
        self._last_samples: Ints = np.zeros(max_num_seqs, np.int32)
        self._penalties = Penalties(limits.vocab_size)
        self._sampler = NativeSampler(model.engine.library, model.engine.handle)
        self._forwarded: _Forwarded | None = None
        self._steps: deque[_Step] = deque()
        self._block_io: HostBlockIO | None = None

    def capacity(self) -> Capacity:
        return self._capacity

    def facts(self) -> RunnerFacts:
        on_disk = ["experts on disk"] if self.model.has_experts_on_disk else []
        return RunnerFacts(
            backend=f"native ({kernels_in_use()})",
            device="cpu",
            dtype=", ".join((self.model.spec.quantization, self.model.precision, *on_disk)),
            num_threads=self.model.engine.num_threads,
            weight_bytes=self.model.weight_bytes,
            kv_bytes=self.model.memory.num_bytes,
            notice=rope_notice(self.model.spec, self.capacity().max_model_len),
            layout=self._layout(),
            is_row_exact=True,
        )

    def use_threads(self, num_threads: int) -> None:
        self.model.engine.use_threads(num_threads)

    def prepare(self) -> bool:
        return False

    def block_io(self) -> BlockIO:
        if self._block_io is None:
            memory = self.model.memory
            self._block_io = HostBlockIO(
                memory.pools(), counts_of(self._capacity), self._layout(), self.model.weight_bytes
            )
        return self._block_io

    def _layout(self) -> str:
        """Kernels and precision are part of it: the same tokens give other bits with others."""
        limits = self.model.limits
        return layout_text(
            "native",
            LAYOUT,
            kv="float16",
            states="float32",
            block_size=limits.block_size,
            precision=self.model.precision,
            kernels=kernels_in_use(),
            window=limits.window,
            model=model_key(self.model.spec, self.model.memory.kv, limits.max_model_len),
        )

    def forward(self, plan: StepPlan) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("forward before the last step was sampled")
        for batch_index in plan.released:
            self._penalties.release(batch_index)
        batch = build_batch(plan.slices, self._last_samples, self.model.limits)
        self.model.copy_blocks(plan.copies, plan.window_copies)
        hidden = None
        if any(piece.sampling.prompt_logprobs is not None for piece in plan.slices):
            hidden = np.empty((len(batch.tokens), self.model.spec.hidden_size), np.float32)
        logits, is_sound = self.model.forward(batch, batch.sampled_rows, hidden)
        found = {} if hidden is None else self._rank_prompts(plan.slices, batch, hidden)
        self._forwarded = _Forwarded(plan.slices, batch, logits, is_sound, found)

    def sample(self, masks: TokenMasks | None) -> None:
        forwarded = self._forwarded
        if forwarded is None:
            raise InvariantViolation("sample without a forward pass")
        self._forwarded = None
        sampled = None
        if forwarded.batch.sampled:
            pieces = [one for piece in forwarded.slices if piece.wants_token for one in sampled_pieces(piece)]
            last_tokens = forwarded.batch.tokens[forwarded.batch.sampled_rows]
            sampled = self._sampler.sample(forwarded.logits, pieces, self._penalties, last_tokens, masks)
            self._last_samples[[piece.batch_index for piece in pieces]] = sampled.tokens
        self._steps.append(_Step(forwarded, sampled))

    def collect(self) -> StepResult:
        if not self._steps:
            raise InvariantViolation("collect with no step in flight")
        step = self._steps.popleft()
        forwarded, sampled = step.forwarded, step.sampled
        rows = None
        if sampled is not None:
            broken, blocked = sampled.is_broken.tolist(), sampled.is_blocked.tolist()
            rows = SampledRows(forwarded.batch.sampled, sampled.tokens.tolist(), broken, blocked, sampled.logprobs)
        unsound = np.flatnonzero(~forwarded.is_sound).tolist()
        result = make_result(forwarded.slices, unsound, rows, forwarded.prompt_logprobs)
        for index in broken_slices(result):
            windows = forwarded.batch.window_tables  # ids are checked; 0 is the null block
            window_blocks = [] if windows is None else windows[index].tolist()
            self.model.purge_blocks(forwarded.batch.tables[index].tolist(), window_blocks)
        return result

    def abandon(self) -> None:
        """Discard a pass that raised, so that the next plan can run."""
        self._forwarded = None

    def close(self) -> None:
        self._forwarded = None
        self._steps.clear()
        self.model.engine.close()

    def _rank_prompts(self, slices: tuple[SeqSlice, ...], batch: Batch, hidden: Floats) -> dict[int, PromptLogprobs]:
        """Return logprobs of the prompt tokens after each position: a position's logits predict the next token."""
        result: dict[int, PromptLogprobs] = {}
        for index, piece in enumerate(slices):
            first_row, parts = int(batch.first_rows[index]), []
            for row, tokens in prompt_parts(piece):
                raw = self.model.head(hidden[first_row + row : first_row + row + len(tokens)])
                parts.append(self._sampler.rank_tokens(raw, tokens, piece.sampling.prompt_logprobs or 0))
            if parts:
                result[index] = join_prompt_logprobs(piece.start + 1, parts)
        return result


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Runner:
    spec = checkpoint.spec
    refuse_unsupported(spec)
    load_library()
    if options.device not in ("auto", "cpu"):
        raise InvalidRequest(f"device = {options.device!r}: the native backend runs on the CPU; use --backend torch")
    if options.dtype not in ("auto", "int8"):
        raise InvalidRequest(
            f"dtype = {options.dtype!r}: the native backend stores weights in 4 and 8 bits only; use --backend torch"
        )
    max_model_len = options.context_within(spec.max_model_len)
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_SEQS
    num_threads = choose_threads(options.threads)
    packed = pack_model(checkpoint, num_threads, progress)
    engine = Engine(num_threads)
    try:
        sizes = _pool_sizes(spec, options, max_model_len, max_num_seqs)
        model = NativeModel(
            spec,
            packed,
            engine,
            num_blocks=sizes.num_blocks,
            num_window_blocks=sizes.num_window_blocks,
            num_states=sizes.num_states,
            block_size=options.block_size,
            max_model_len=max_model_len,
            precision=options.precision,
        )
    except BaseException:
        engine.close()
        raise
    return NativeRunner(model, max_num_seqs=sizes.max_num_seqs, max_chunk_tokens=sizes.max_chunk_tokens)


def _pool_sizes(spec: ModelSpec, options: BackendOptions, max_model_len: int, max_num_seqs: int) -> KVMemory:
    kv = KVSpec.of(spec).within(max_model_len)
    costs = kv_costs(kv, options.block_size, has_window_blocks=kv_memory.HAS_WINDOWS and kv.window > 0)
    limits = (max_model_len, max_num_seqs, MAX_CHUNK_TOKENS)
    return MemoryRequest(options, costs, *limits, has_overlap=False).divide_on_cpu()
