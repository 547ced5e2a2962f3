"""Runs step plans in C: one forward pass for the whole batch, then one sampling pass for the rows that sample.

`make_runner` makes a runner from a checkpoint and the user's options. `NativeSampler` implements the definition in
`quire.backends.torch.sampling`. Work over the whole vocabulary (grammar masks, temperature, min-p, top-k, top-p, the
draw, logprobs) is one call into csrc/sampling.c for all rows. Penalties, bias and min_tokens affect few rows and are
computed here, for those rows only.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends import kv_memory
from quire.backends.base import (
    DEFAULT_MAX_CHUNK,
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
from quire.backends.kv_memory import KVSpec, MemoryRequest
from quire.backends.machine import choose_threads
from quire.backends.native.library import Floats, Ints, kernels_in_use, load_library
from quire.backends.native.model import Batch, Engine, NativeModel, build_batch, kv_costs
from quire.backends.native.packing import pack_model
from quire.backends.sampling import (
    SampledRows,
    TokenCounter,
    broken_slices,
    draw_of,
    edits_of,
    is_changed,
    join_prompt_logprobs,
    make_result,
    masks_by_row,
    prompt_parts,
    sampled_pieces,
)
from quire.backends.support import refuse_unsupported, rope_notice
from quire.core.step import PromptLogprobs, SeqSlice, StepPlan, StepResult, TokenLogprobs
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

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


class NativeRunner:
    def __init__(self, model: NativeModel) -> None:
        capacity = model.capacity
        self.model = model
        self._last_samples: Ints = np.zeros(capacity.max_num_seqs, np.int32)
        self._penalties = Penalties(capacity.vocab_size)
        self._sampler = NativeSampler(model.engine.library, model.engine.handle)
        self._forwarded: _Forwarded | None = None
        self._results: deque[StepResult] = deque()  # not collected yet
        layout = layout_text(  # the same tokens give other bits with other kernels, and with another precision
            "native",
            LAYOUT,
            kv="float16",
            states="float32",
            block_size=capacity.block_size,
            precision=model.precision,
            kernels=kernels_in_use(),
            window=capacity.window,
            model=model_key(model.spec, model.memory.kv, capacity.max_model_len),
        )
        self._block_io = HostBlockIO(model.memory.pools(), counts_of(capacity), layout, model.packed.num_bytes)

    def capacity(self) -> Capacity:
        return self.model.capacity

    def facts(self) -> RunnerFacts:
        on_disk = ["experts on disk"] if self.model.packed.has_experts_on_disk else []
        return RunnerFacts(
            backend=f"native ({kernels_in_use()})",
            device="cpu",
            dtype=", ".join((self.model.spec.quantization, self.model.precision, *on_disk)),
            num_threads=self.model.engine.num_threads,
            weight_bytes=self.model.packed.num_bytes,
            kv_bytes=self.model.memory.num_bytes,
            notice=rope_notice(self.model.spec, self.model.capacity.max_model_len),
            layout=self._block_io.layout,
            is_row_exact=True,
        )

    def use_threads(self, num_threads: int) -> None:
        self.model.engine.use_threads(num_threads)

    def prepare(self) -> bool:
        return False

    def block_io(self) -> BlockIO:
        return self._block_io

    def forward(self, plan: StepPlan) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("forward before the last step was sampled")
        for batch_index in plan.released:
            self._penalties.release(batch_index)
        batch = build_batch(plan.slices, self._last_samples, self.model.capacity)
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
        batch, rows = forwarded.batch, None
        if batch.sampled:
            pieces = [one for piece in forwarded.slices if piece.wants_token for one in sampled_pieces(piece)]
            last_tokens = batch.tokens[batch.sampled_rows]
            sampled = self._sampler.sample(forwarded.logits, pieces, self._penalties, last_tokens, masks)
            self._last_samples[[piece.batch_index for piece in pieces]] = sampled.tokens
            broken, blocked = sampled.is_broken.tolist(), sampled.is_blocked.tolist()
            rows = SampledRows(batch.sampled, sampled.tokens.tolist(), broken, blocked, sampled.logprobs)
        unsound = np.flatnonzero(~forwarded.is_sound).tolist()
        result = make_result(forwarded.slices, unsound, rows, forwarded.prompt_logprobs)
        for index in broken_slices(result):
            windows = batch.window_tables  # ids are checked; 0 is the null block
            self.model.purge_blocks(batch.tables[index].tolist(), [] if windows is None else windows[index].tolist())
        self._results.append(result)

    def collect(self) -> StepResult:
        if not self._results:
            raise InvariantViolation("collect with no step in flight")
        return self._results.popleft()

    def abandon(self) -> None:
        """Discard a pass that raised, so that the next plan can run."""
        self._forwarded = None

    def close(self) -> None:
        self._forwarded = None
        self._results.clear()
        self.model.engine.close()

    def _rank_prompts(self, slices: tuple[SeqSlice, ...], batch: Batch, hidden: Floats) -> dict[int, PromptLogprobs]:
        """Return logprobs of the prompt tokens after each position: a position's logits predict the next token."""
        result: dict[int, PromptLogprobs] = {}
        for index, piece in enumerate(slices):
            first_row, parts = int(batch.first_rows[index]), []
            for row, tokens in prompt_parts(piece):
                raw = self.model.head(hidden[first_row + row : first_row + row + len(tokens)])
                counts = [piece.sampling.prompt_logprobs or 0] * len(tokens)
                parts.append(self._sampler.rank(raw, np.array(tokens, np.int32), counts))
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
    num_threads = choose_threads(options.threads)
    packed = pack_model(checkpoint, num_threads, progress)
    engine = Engine(num_threads)
    try:
        model = NativeModel(spec, packed, engine, _capacity(spec, options, max_model_len), options.precision)
    except BaseException:
        engine.close()
        raise
    return NativeRunner(model)


def _capacity(spec: ModelSpec, options: BackendOptions, max_model_len: int) -> Capacity:
    kv = KVSpec.of(spec).within(max_model_len)
    costs = kv_costs(kv, options.block_size, has_window_blocks=kv_memory.HAS_WINDOWS and kv.window > 0)
    limits = (max_model_len, options.max_num_seqs or DEFAULT_MAX_SEQS, DEFAULT_MAX_CHUNK)
    sizes = MemoryRequest(options, costs, *limits, has_overlap=False).divide_on_cpu()
    return Capacity(
        num_blocks=sizes.num_blocks,
        block_size=options.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        has_overlap=False,  # computation happens inside the call
        has_costly_rows=True,
        max_chunk_tokens=sizes.max_chunk_tokens,
        max_mixed_tokens=MAX_MIXED_TOKENS,
        max_drafts=MAX_DRAFTS,
        window=costs.window,
        num_window_blocks=sizes.num_window_blocks,
        num_states=sizes.num_states,
    )


# S rows that sample, V vocabulary

Bools = NDArray[np.bool_]

_GREEDY = (0.0, 1.0, 0.0, 0.0, 0)
_CHOICE = np.dtype(  # quire_choice in csrc/sampling.h
    [("draw", "f8"), ("top_p", "f8"), ("temperature", "f4"), ("min_p", "f4"), ("top_k", "i4")], align=True
)


class _Sampling(ctypes.Structure):  # quire_sampling in csrc/sampling.h
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("choices", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("is_sound", ctypes.c_void_p),
        ("was_sound", ctypes.c_void_p),
    )


class _Ranking(ctypes.Structure):  # quire_ranking in csrc/sampling.h
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_tokens", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Ints  # [S]
    is_broken: Bools  # [S]: the logits of this row are not finite
    is_blocked: Bools  # [S]: every token of this row was forbidden
    logprobs: Mapping[int, TokenLogprobs]  # by row, where requested


class Penalties:
    """Token counts of the request at each batch index, computed once and then updated with each token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counter = TokenCounter()
        self._counts: dict[int, tuple[Floats, Bools]] = {}

    def release(self, batch_index: int) -> None:
        self._counter.release(batch_index)
        self._counts.pop(batch_index, None)

    def apply(self, logits: Floats, rows: Sequence[SeqSlice], last_tokens: Ints) -> None:
        """Change logits in place. `last_tokens` [S]: last token of each row's context, even if not in the plan."""
        for index, piece in enumerate(rows):
            if not piece.sampling.has_penalty:
                continue
            (counts, is_seen), params = self._count(piece, int(last_tokens[index])), piece.sampling
            seen = np.flatnonzero(is_seen)
            num_answered = counts[seen]
            repetition = np.float32(params.repetition_penalty)
            picked = logits[index, seen]
            picked = np.where(picked > 0, picked / repetition, picked * repetition)
            picked -= np.float32(params.frequency_penalty) * num_answered
            picked -= np.float32(params.presence_penalty) * (num_answered > 0)
            logits[index, seen] = picked

    def _count(self, piece: SeqSlice, last_token: int) -> tuple[Floats, Bools]:
        """Return the number of occurrences of each token in the answer [V], and whether it is in the context [V]."""
        new = self._counter.count(piece)
        if new.is_first:
            arrays = np.zeros(self._vocab_size, np.float32), np.zeros(self._vocab_size, np.bool_)
            self._counts[piece.batch_index] = arrays
        num_answered, seen = self._counts[piece.batch_index]
        tokens = np.array([*new.tokens, *([last_token] if new.has_last else [])], np.intp)
        seen[tokens] = True
        np.add.at(num_answered, tokens[new.num_prompt :], 1)
        return num_answered, seen


class NativeSampler:
    def __init__(self, library: ctypes.CDLL, engine: int) -> None:
        self._engine = engine
        self._sample, self._rank = library.quire_sample, library.quire_rank
        for function, args in ((self._sample, _Sampling), (self._rank, _Ranking)):
            function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(args)]

    def sample(
        self,
        logits: Floats,
        rows: Sequence[SeqSlice],
        penalties: Penalties,
        last_tokens: Ints,
        masks: TokenMasks | None,
    ) -> Sampled:
        """Choose one token for each row of logits [S, V], which are changed in place."""
        _check(logits, len(rows))
        reported = [index for index, piece in enumerate(rows) if piece.sampling.logprobs is not None]
        raw = logits[reported] if reported else None
        was_broken: dict[int, bool] = {}  # rows changed here: whether they were broken before
        changed = [index for index, piece in enumerate(rows) if is_changed(piece)]
        if changed:
            was_broken = {index: not np.isfinite(logits[index].max()) for index in changed}
            penalties.apply(logits, rows, last_tokens)
            for index in changed:
                if edits := edits_of(rows[index]):
                    logits[index, list(edits)] += np.array(list(edits.values()), np.float32)
        tokens, is_sound, was_sound = self._choose(logits, rows, masks_by_row(rows, masks, logits.shape[1]))
        is_broken = ~was_sound
        for index, was in was_broken.items():
            is_broken[index] = was
        logprobs = {}
        if raw is not None:
            counts = [rows[index].sampling.logprobs or 0 for index in reported]
            logprobs = dict(zip(reported, self.rank(raw, tokens[reported], counts), strict=True))
        return Sampled(tokens, is_broken, ~(is_sound | is_broken), logprobs)

    def rank(self, raw: Floats, chosen: Ints, counts: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return, per row of raw logits [N, V], logprobs of the chosen token and of the `counts` most probable ones."""
        _check(raw, len(chosen))
        num_rows, vocab_size = raw.shape
        if num_rows and not 0 <= chosen.min() <= chosen.max() < vocab_size:
            raise InvariantViolation(f"tokens {chosen.tolist()} are not all within {vocab_size = }")
        num_top = min(max(counts, default=0), vocab_size)
        logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        top_tokens, top_logprobs = np.empty((num_rows, num_top), np.int32), np.empty((num_rows, num_top), np.float32)
        arrays = (raw, chosen, logprobs, ranks, top_tokens, top_logprobs)
        args = _Ranking(num_rows, vocab_size, num_top, *(array.ctypes.data for array in arrays))
        if self._rank(self._engine, args):
            raise MemoryError(f"no memory to rank {vocab_size = }")
        tops = (
            tuple(zip(ids[:count], values[:count], strict=True))
            for ids, values, count in zip(top_tokens.tolist(), top_logprobs.tolist(), counts, strict=True)
        )
        return tuple(map(TokenLogprobs, chosen.tolist(), logprobs.tolist(), ranks.tolist(), tops))

    def _choose(
        self, logits: Floats, rows: Sequence[SeqSlice], masks: Mapping[int, bytes]
    ) -> tuple[Ints, Bools, Bools]:
        """Return the tokens, and for each row whether its largest logit is finite after and before its mask.

        If it is not finite after the mask, the token is meaningless.
        """
        num_rows, vocab_size = logits.shape
        choices = np.array([_choice(piece, vocab_size) for piece in rows], _CHOICE)
        tokens, (is_sound, was_sound) = np.empty(num_rows, np.int32), np.empty((2, num_rows), np.bool_)
        found = [masks.get(row) for row in range(num_rows)]
        if any(mask is not None and len(mask) != -(-vocab_size // 8) for mask in found):
            raise InvariantViolation(f"masks of {[mask and len(mask) for mask in found]} bytes for {vocab_size = }")
        masked = (ctypes.c_char_p * num_rows)(*found)
        pointers = (array.ctypes.data for array in (choices, tokens, is_sound, was_sound))
        args = _Sampling(num_rows, vocab_size, logits.ctypes.data, ctypes.addressof(masked), *pointers)
        if self._sample(self._engine, args):
            raise MemoryError(f"no memory to sample from {vocab_size = }")
        return tokens, is_sound, was_sound


def _check(logits: Floats, num_rows: int) -> None:
    """Check what C relies on."""
    if len(logits) != num_rows or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise InvariantViolation(f"{num_rows = }, but logits are {logits.shape} {logits.dtype} {logits.strides}")


def _choice(piece: SeqSlice, vocab_size: int) -> tuple[float, float, float, float, int]:
    params = piece.sampling
    if params.is_greedy:
        return _GREEDY
    top_k = params.top_k if params.top_k < vocab_size else 0
    return draw_of(piece), params.top_p, params.temperature, params.min_p, top_k
