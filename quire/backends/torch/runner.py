"""Runs step plans on a CPU, in plain PyTorch.

A step is one forward pass for the whole batch, then one sampling pass for the rows that sample. `BaseRunner` is what
the runner of GPUs has in common with that of CPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.backends.base import DEFAULT_MAX_CHUNK, BlockIO, Capacity, RunnerFacts, TokenMasks
from quire.backends.block_io import HostBlockIO, counts_of
from quire.backends.sampling import (
    SampledRows,
    add_prompt_logprobs,
    broken_slices,
    make_result,
    prompt_parts,
    sampled_pieces,
)
from quire.backends.torch.attention import ReferencePass
from quire.backends.torch.batch import Batch, build_batch
from quire.backends.torch.block_io import host_pools, torch_layout
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.sampling import Sampled, rank_tokens, sample
from quire.core.step import PromptLogprobs, SeqSlice, StepPlan, StepResult
from quire.errors import InvariantViolation

MAX_DRAFTS = 15  # of a slice


class BaseRunner:
    """What the runners of all devices have in common. `kind`: of the equations, for the layout of blocks."""

    kind: str

    def __init__(self, model: Model, store: KVStore, *, max_num_seqs: int, max_model_len: int, **limits: Any) -> None:
        """`limits`: further fields of the capacity."""
        self.model = model
        self.store = store
        self._device = torch.get_device_module(store.device)
        self._capacity = Capacity(
            num_blocks=store.num_blocks,
            block_size=store.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model.spec.vocab_size,
            window=max(store.windows, default=0),
            num_window_blocks=store.num_window_blocks,
            num_states=store.num_states,
            **limits,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def facts(self) -> RunnerFacts:
        device, store = self.store.device, self.store
        is_cpu = device.type == "cpu"
        kv = [f"KV cache in {store.kv_dtype}"] if store.is_fp8 else []
        return RunnerFacts(
            backend=f"torch {torch.__version__}",
            device="cpu" if is_cpu else f"{device} ({torch.cuda.get_device_name(device)})",
            dtype=", ".join((str(store.dtype).removeprefix("torch."), *self.model.packed_types, *kv)),
            kv_dtype=store.kv_dtype,
            num_threads=torch.get_num_threads() if is_cpu else 1,
            weight_bytes=self.model.num_bytes,
            notice=self.model.notice,
            layout=self.layout(),
            **store.facts(),
        )

    def prompt_rows(
        self, slices: Sequence[SeqSlice], last_rows: Sequence[int], hidden: Tensor
    ) -> Iterator[tuple[int, int, tuple[int, ...], Tensor]]:
        """Yield prompt tokens whose logprobs are wanted: place of the slice, first position, tokens, logits [N, V]."""
        for place, piece in enumerate(slices):
            first_row = int(last_rows[place]) + 1 - piece.length
            for row, tokens in prompt_parts(piece):
                raw = self.model.logits(hidden[first_row + row : first_row + row + len(tokens)])
                yield place, piece.start + 1 + row, tokens, raw

    def layout(self) -> str:
        return torch_layout(self.kind, self.model, self.store, self._capacity.max_model_len)


@dataclass(slots=True)
class _Step:
    """A forward pass that has not been collected."""

    batch: Batch
    rows: tuple[int, ...]  # [S]: index of the batch's slice of each row that is sampled
    logits: Tensor | None  # [S, V]
    is_sound: Tensor  # [slices]: whether the last hidden state is finite
    prompt_logprobs: Mapping[int, PromptLogprobs]  # by index of the plan's slices
    sampled: Sampled | None = None


class TorchRunner(BaseRunner):
    kind = "reference"

    def __init__(
        self,
        model: Model,
        store: KVStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_chunk_tokens: int = DEFAULT_MAX_CHUNK,
    ) -> None:
        super().__init__(
            model,
            store,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            has_overlap=False,  # computation happens inside the call
            has_costly_rows=True,
            max_chunk_tokens=max_chunk_tokens,
            max_drafts=MAX_DRAFTS,
        )
        self._last_samples = torch.zeros(max_num_seqs, dtype=torch.int64, device=store.device)
        self._forwarded: _Step | None = None
        self._steps: deque[_Step] = deque()
        self._block_io: HostBlockIO | None = None

    def use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def prepare(self) -> bool:
        return False

    def block_io(self) -> BlockIO:
        if self._block_io is None:
            weight_bytes = self.model.num_bytes
            self._block_io = HostBlockIO(host_pools(self.store), counts_of(self._capacity), self.layout(), weight_bytes)
        return self._block_io

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("forward before the last step was sampled")
        self.store.copy(plan.copies)
        self.store.copy(plan.window_copies, is_window=True)
        batch = build_batch(plan.slices, self.store, self.model.kv_spec.windows, self._last_samples)
        hidden = self.model.forward(ReferencePass(batch, self.store))  # [T, E]
        rows = tuple(row for row, piece in enumerate(batch.slices) for _ in range(piece.num_sampled))
        logits = None
        wanted = _sampled_rows(batch)
        if wanted:
            is_all = len(wanted) == hidden.shape[0]
            logits = self.model.logits(hidden if is_all else hidden[wanted]).float()
        # A NaN anywhere in a context reaches its last row, so this check also covers prompts in progress.
        is_sound = torch.isfinite(hidden[list(batch.last_rows)].float().sum(-1))
        self._forwarded = _Step(batch, rows, logits, is_sound, self._prompt_logprobs(batch, hidden))

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        forwarded = self._forwarded
        if forwarded is None:
            raise InvariantViolation("sample without a forward pass")
        self._forwarded = None
        if forwarded.logits is not None:
            batch = forwarded.batch
            pieces = [one for piece in batch.slices if piece.wants_token for one in sampled_pieces(piece)]
            last_tokens = batch.tokens[_sampled_rows(batch)]
            forwarded.sampled = sample(forwarded.logits, pieces, last_tokens, masks)
            self._last_samples[[piece.batch_index for piece in pieces]] = forwarded.sampled.tokens
        self._steps.append(forwarded)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        if not self._steps:
            raise InvariantViolation("collect with no step in flight")
        step = self._steps.popleft()
        batch, sampled = step.batch, step.sampled
        rows = None
        if sampled is not None:
            chosen = sampled.tokens.tolist()
            ranked = {} if sampled.logprobs is None else sampled.logprobs.read(chosen)
            broken, blocked = sampled.is_broken.tolist(), sampled.is_blocked.tolist()
            indices = [batch.order[row] for row in step.rows]
            rows = SampledRows(indices, chosen, broken, blocked, ranked)
        unsound = [batch.order[row] for row, is_sound in enumerate(step.is_sound.tolist()) if not is_sound]
        plan = list(batch.slices)
        for place, index in enumerate(batch.order):
            plan[index] = batch.slices[place]
        result = make_result(plan, unsound, rows, step.prompt_logprobs)
        for index in broken_slices(result):
            self.store.purge(batch.slices[batch.order.index(index)])
        return result

    def abandon(self) -> None:
        """Discard a pass that raised, so that the next plan can run."""
        self._forwarded = None

    def close(self) -> None:
        self._forwarded = None
        self._steps.clear()

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> Mapping[int, PromptLogprobs]:
        """Return logprobs of the prompt tokens after a slice's positions: a position's logits predict the next."""
        result: dict[int, PromptLogprobs] = {}
        for place, first, tokens, raw in self.prompt_rows(batch.slices, batch.last_rows, hidden):
            ranked = rank_tokens(raw.float(), tokens, batch.slices[place].sampling.prompt_logprobs or 0)
            add_prompt_logprobs(result, batch.order[place], first, ranked)
        return result


def _sampled_rows(batch: Batch) -> list[int]:
    """Return the rows after which a token is sampled, slice by slice."""
    return [
        row
        for last, piece in zip(batch.last_rows, batch.slices, strict=True)
        for row in range(last + 1 - piece.num_sampled, last + 1)
    ]
