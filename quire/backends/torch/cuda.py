"""Runs step plans on a GPU.

Inputs are sent in one copy, the pass runs in our kernels or as a CUDA graph, and results come back in one copy.
Normally only `collect` waits for the device, so the host plans the next step in the meantime. The last sampled token of
every batch index stays on the device, where the next step reads it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.base import BlockIO, TokenMasks
from quire.backends.block_io import counts_of
from quire.backends.kv_memory import KVSpec, LayerKV
from quire.backends.sampling import (
    Ranks,
    SampledRows,
    add_prompt_logprobs,
    broken_slices,
    make_result,
    sampled_pieces,
)
from quire.backends.torch.attention_work import SPARE, Sizes, max_wide_tiles
from quire.backends.torch.cuda_block_io import CudaBlockIO
from quire.backends.torch.device_sampling import DeviceSampler, SpecialRows, fill_params, rank_prompt
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.fused import DeviceState, FusedPass
from quire.backends.torch.graphs import Kind, StepGraph, StepGraphs, graph_sizes, mixed_sizes
from quire.backends.torch.inputs import (
    BlockTables,
    Division,
    Layout,
    Staging,
    Step,
    StepInputs,
    arrange,
)
from quire.backends.torch.kernel_compilation import Compiling
from quire.backends.torch.kernels.attention import part_size, rows_per_item, tilings
from quire.backends.torch.kernels.blocks import copy_blocks, update_tables
from quire.backends.torch.kernels.linear import padded_rows
from quire.backends.torch.kernels.sampling import NUM_PARAMS
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.runner import BaseRunner
from quire.backends.torch.state_work import max_chunks
from quire.core.step import BlockCopy, PromptLogprobs, SeqSlice, StepPlan, StepResult, TokenLogprobs
from quire.errors import InvariantViolation

# T rows of the batch, S rows that sample, E hidden size, V vocabulary

PROGRAMS = 4  # programs of one row each that keep a multiprocessor busy
WIDE_PROGRAMS = 2  # the same for programs of many rows each
MIN_PARTS = 4096
GRAPH_PROMPT = 32  # rows of a mixed graph for each prompt it has room for
MIN_GRAPH_PROMPTS = 8
MAX_GRAPH_SEQUENCES = 32  # prompts of a mixed graph of a model with states: empty ones take time in every layer too
GRAPH_SNAPSHOTS = 2  # states within a prompt, beside that at its end, for which a mixed graph has room on average
MAX_DRAFTS = 31  # of a slice: with the token before them, the rows of a graph
POLL_S = 0.01  # interval of polling the compiler processes
NO_MEMORY = "out of memory on the device, even without other requests: a shorter prompt or smaller steps may fit"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pass:
    """One forward pass in flight. A step has more than one only after it ran out of memory."""

    step: Step
    places: tuple[int, ...]  # [S]: index of the step's slice of each sampled row
    rows: list[SeqSlice]  # [S]: a slice that ends at that row
    special_rows: SpecialRows
    inputs: _SampleInputs | None  # None: no row samples
    sound: Tensor | None  # [slices]: whether the last hidden state of each is finite
    prompts: list[tuple[int, int, tuple[int, ...], Ranks]]  # index in the plan, first position, tokens, their ranks
    results: Tensor | None = None  # on the host, after the copy: tokens, flags, soundness
    logprobs: Ranks | None = None


class _SampleInputs(NamedTuple):
    """Inputs of the sampling kernels."""

    logits: Tensor  # [S, V]
    params: Tensor  # [S, NUM_PARAMS] fp32
    batch_indices: Tensor  # [S] int32
    last_tokens: Tensor  # [S] int32


@dataclass(slots=True)
class _InFlight:
    passes: list[_Pass]
    slices: Sequence[SeqSlice]  # of the plan
    failures: dict[int, str]
    event: Any = None  # after the copy of the results


class CudaRunner(BaseRunner):
    kind = "fused"

    def __init__(
        self,
        model: Model,
        store: KVStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = 8192,
        max_chunk_tokens: int = 8192,
        max_mixed_tokens: int | None = None,
        max_graph_tokens: int = 0,
        compiling: Compiling | None = None,
        has_graphs: bool = True,
    ) -> None:
        super().__init__(
            model,
            store,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            has_overlap=True,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_mixed_tokens=max_mixed_tokens,
            max_drafts=MAX_DRAFTS,
        )
        spec, device = model.spec, store.device
        self._is_cuda = device.type == "cuda"
        self._stream = self._device.Stream(device)
        num_cores = torch.cuda.get_device_properties(device).multi_processor_count if self._is_cuda else 1
        max_parts = max(MIN_PARTS, 4 * max_num_seqs)
        self._division = _divide(model.kv_spec, store, num_cores, max_parts)
        max_blocks = -(-max_model_len // store.block_size)
        self._tables = BlockTables(max_num_seqs, max_blocks, store.block_size, device, self._division.window)
        layers = model.kv_spec.kv_layers
        part = max(part_size(layer.num_kv_heads * layer.num_groups, layer.head_size) for layer in layers)
        self._state = DeviceState(
            store=store,
            tables=self._tables.device,
            window_tables=self._tables.window_device,
            last_samples=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            parts=torch.empty(max_parts, part, dtype=torch.float32, device=device),
        )
        self._staging = Staging(device)
        # Copies of a plan that were not enqueued yet: among the blocks, and among the window blocks.
        self._copies: tuple[Sequence[BlockCopy], Sequence[BlockCopy]] = ((), ())
        self._sampler = DeviceSampler(spec.vocab_size, max_num_seqs, device)
        # Shared by all graphs: sampling has read it before the next graph runs.
        self._graph_logits = torch.empty(max_num_seqs, spec.vocab_size, dtype=store.dtype, device=device)
        sizes = mixed_sizes(min(max_graph_tokens, max_num_batched_tokens))
        self._graph_hidden = torch.empty(max(sizes, default=0), spec.hidden_size, dtype=store.dtype, device=device)
        self._graphs = StepGraphs(
            graph_sizes(max_num_seqs), sizes, self._room, self._run_graph, self._has_compiled, device
        )
        self._has_graphs = has_graphs
        self._compiling = compiling  # None: kernels are compiled when they are first launched
        self._forwarded: _InFlight | None = None
        self._steps: deque[_InFlight] = deque()
        self._spare_results: list[Tensor] = []
        self._block_io: CudaBlockIO | None = None
        self._stream.wait_stream(self._device.current_stream(device))  # the tensors above were written on that one

    def use_threads(self, num_threads: int) -> None:
        """No effect: host threads do not compute here."""

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Compile kernels for graphs of few rows in child processes; meanwhile and afterwards, capture the graphs."""
        has_compiled = self._has_compiled()
        with self._on_stream():
            if self._has_graphs and self._graphs.prepare():
                return True
            if has_compiled:
                return self._sampler.prepare(self.store.dtype)
        time.sleep(POLL_S)
        return True

    def block_io(self) -> BlockIO:
        """The first call allocates staging memory and compiles kernels, or loads them."""
        if self._block_io is None:
            counts = counts_of(self._capacity)
            self._block_io = CudaBlockIO(self.store, counts, self.layout(), self._stream)
        return self._block_io

    def _has_compiled(self) -> bool:
        return self._compiling is None or not self._compiling.is_running

    # Forward

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        if self._forwarded is not None:
            raise InvariantViolation("forward before the last step was sampled")
        with self._on_stream():
            self._sampler.release(plan.released)
            self._copies = (plan.copies, plan.window_copies)
            slices, indices = self._divide_drafts(plan.slices)
            self._forwarded = self._launch(slices, indices)
            self._forwarded.slices = plan.slices

    def _copy(self, pairs: Tensor) -> None:
        """Copy blocks. `pairs` holds the sources and destinations of the copies, then those of window blocks."""
        copies, window_copies = self._copies
        for shape, pool in self.store.all_pools():
            own = window_copies if shape.window else copies
            if len(own) == 1:  # the tail of one prompt: this takes the host a third of the time of launching a kernel
                pool[:, own[0].destination].copy_(pool[:, own[0].source])
            elif own:
                first = 2 * len(copies) if shape.window else 0
                sources, destinations = pairs[first : first + 2 * len(own)].view(2, -1)
                copy_blocks(pool, sources, destinations)
        self._copies = ((), ())  # not again if this pass runs out of memory: blocks written since would be overwritten

    def _divide_drafts(self, slices: Sequence[SeqSlice]) -> tuple[Sequence[SeqSlice], Sequence[int]]:
        """Make a decode of each draft: all keys and values of a step are stored before its attention.

        So a step with drafts runs in the graphs of decodes. A recurrent state is updated token by token, so slices of
        models with states stay whole. Returns the slices and the index of each in the plan.
        """
        if self.store.has_states or not any(piece.num_drafts for piece in slices):
            return slices, tuple(range(len(slices)))
        divided: list[SeqSlice] = []
        indices: list[int] = []
        for index, piece in enumerate(slices):
            indices += [index] * (1 + piece.num_drafts)
            if not piece.num_drafts:
                divided.append(piece)
                continue
            cut = piece.length - piece.num_drafts
            divided.append(piece._replace(tokens=piece.tokens[:cut], length=cut, num_drafts=0))
            head, rest = piece[:3], piece[6:-1]  # `_replace` would take four times as long
            for position, token in enumerate(piece.drafts, piece.start + cut):
                divided.append(SeqSlice._make((*head, (token,), position, 1, *rest, 0)))
        return divided, tuple(indices)

    def _launch(self, slices: Sequence[SeqSlice], indices: Sequence[int]) -> _InFlight:
        """Run in one pass. If memory runs out, run again in halves; only slices that do not fit even then fail."""
        try:
            return _InFlight([self._pass(slices, indices)], slices, {})
        except torch.OutOfMemoryError:
            log.warning("out of memory in a step of %d requests: repeating it in halves", len(slices))
        passes: list[_Pass] = []
        failures: dict[int, str] = {}
        for some, where in _halves(slices, indices):
            self._tables.forget()
            torch.cuda.empty_cache()
            try:
                passes.append(self._pass(some, where, has_graphs=False))  # graphs would share one logits buffer
            except torch.OutOfMemoryError:
                failures |= dict.fromkeys(where, NO_MEMORY)
        return _InFlight(passes, slices, failures)

    def _pass(self, slices: Sequence[SeqSlice], indices: Sequence[int], *, has_graphs: bool = True) -> _Pass:
        updates = self._tables.update(slices)
        step = arrange(slices, self._tables, self._division)
        step = step._replace(order=tuple(indices[place] for place in step.order))
        graph = self._graph(step) if has_graphs and self._has_graphs else None
        layout = step.layout.padded(padded_rows(step.layout.num_rows)) if graph is None else graph.layout
        places = tuple([place for place, piece in enumerate(step.slices) for _ in range(piece.num_sampled)])
        rows = [one for piece in step.slices if piece.wants_token for one in sampled_pieces(piece)]
        num_sampled, num_updates, num_slices = len(places), len(updates[0]), len(step.slices)
        pairs = [number for copies in self._copies for ends in zip(*copies, strict=True) for number in ends]
        sizes = (num_slices, num_sampled, num_sampled, num_sampled * NUM_PARAMS, 2 * num_updates, len(pairs))
        size = layout.size
        total = size + sum(sizes)
        host = self._staging.begin(total)
        step.write(layout.carve(host) if graph is None else self._staging.carve(layout))
        bounds = list(itertools.accumulate(sizes, initial=size))
        pieces = [host[first:last] for first, last in itertools.pairwise(bounds)]
        pieces[0][:] = step.last_rows
        pieces[1][:] = _sampled_rows(step)
        pieces[2][:] = [piece.batch_index for piece in rows]
        special_rows = fill_params(pieces[3].view(np.float32).reshape(-1, NUM_PARAMS), rows)
        pieces[4][:num_updates], pieces[4][num_updates:] = updates
        pieces[5][:] = pairs
        device = self._target(total, graph)
        self._staging.send(total, device)
        tail = device[size:total].split(sizes)  # type: ignore[no-untyped-call]
        if pairs:
            self._copy(tail[5])
        if num_updates:
            self._update_tables(updates[0], tail[4])
        hidden = self._hidden(step, layout, device, graph)
        sound, prompts, inputs = None, [], None
        if hidden is not None:
            sound = torch.isfinite(hidden[tail[0]].float().sum(-1)) if num_sampled < num_slices else None
            prompts = self._prompt_logprobs(step, hidden)
        if places:
            logits = self._graph_logits[:num_sampled] if hidden is None else self.model.logits(hidden[tail[1]])
            last_tokens = self._last_tokens(layout.carve(device), tail[1]) if special_rows.changed else tail[2]
            params = tail[3].view(torch.float32).view(-1, NUM_PARAMS)
            inputs = _SampleInputs(logits, params, tail[2], last_tokens)
        return _Pass(step, places, rows, special_rows, inputs, sound, prompts)

    def _update_tables(self, places: list[int], entries: Tensor) -> None:
        """Write new entries of block tables. `entries` holds their places, then their values."""
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):  # of one request: a copy takes the host less time
            self._tables.whole.view(-1)[first : first + count].copy_(entries[count:])
        else:
            update_tables(self._tables.whole, entries[:count], entries[count:])

    def _hidden(self, step: Step, layout: Layout, device: Tensor, graph: StepGraph | None) -> Tensor | None:
        """Run the layers. Return the hidden states of all rows, or None if a decode graph has computed the logits."""
        if graph is None:
            return self._run(layout.carve(device), num_merged=step.num_merged, is_graph=False)
        if device is not self._graphs.inputs:
            self._graphs.inputs[: layout.size].copy_(device[: layout.size])
        graph.recording.replay()
        return self._graph_hidden[: graph.kind.size] if graph.kind.is_mixed else None

    def _target(self, size: int, graph: StepGraph | None) -> Tensor:
        """Return the buffer for the inputs: a graph reads them from its own."""
        if graph is not None and size <= len(self._graphs.inputs):
            return self._graphs.inputs
        return torch.empty(size, dtype=torch.int32, device=self.store.device)

    def _graph(self, step: Step) -> StepGraph | None:
        """Return the graph for a step, if any. A decode graph needs rows that all sample, without prompt logprobs."""
        if step.is_decode and all(piece.wants_token and not _has_prompt_logprobs(piece) for piece in step.slices):
            return self._graphs.find(step.layout, has_parts=step.num_merged > 0)
        return self._graphs.find_mixed(step.layout, step.num_decodes)

    def _room(self, kind: Kind) -> Layout:
        """Return the sizes a graph must hold. `attention_work` never makes more items of decodes than this."""
        division = self._division
        num_decodes = kind.size if kind.num_decodes is None else kind.num_decodes
        num_prompts = max(kind.size // GRAPH_PROMPT, MIN_GRAPH_PROMPTS) if kind.is_mixed else 0
        num_siblings = max_wide_tiles(num_decodes, division.sizes) if kind.is_wide else 0
        layout = Layout(kind.size, *_max_items(kind.size, num_decodes, num_prompts, num_siblings, division.sizes))
        if division.window_sizes is not None:
            num_narrow, num_wide = _max_items(kind.size, num_decodes, num_prompts, 0, division.window_sizes)
            layout = layout._replace(
                num_window_parts=2 * kind.size + 1,
                num_window_narrow=num_narrow,
                num_window_wide=num_wide,
                num_kept=kind.size,
            )
        if division.has_states:
            num_prompts = min(num_prompts, MAX_GRAPH_SEQUENCES)
            num_chunks = max_chunks(kind.size, num_prompts, GRAPH_SNAPSHOTS * num_prompts) if kind.is_mixed else 0
            layout = layout._replace(
                num_decodes=num_decodes, num_chunks=num_chunks, num_sequences=num_prompts, num_kept=kind.size
            )
        return layout

    def _run(self, inputs: StepInputs, *, num_merged: int, is_graph: bool, num_spare: int = 0) -> Tensor:
        return self.model.forward(
            FusedPass(inputs, self._state, num_merged=num_merged, is_graph=is_graph, num_spare=num_spare)
        )

    def _run_graph(self, inputs: StepInputs, kind: Kind, is_compiled: bool) -> None:
        hidden = self._run(inputs, num_merged=kind.size if kind.has_parts else 0, is_graph=is_compiled, num_spare=SPARE)
        if kind.is_mixed:
            self._graph_hidden[: kind.size].copy_(hidden)
        else:
            self.model.logits(hidden, out=self._graph_logits[: kind.size])

    def _last_tokens(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        tokens = inputs.tokens[rows]
        return torch.where(tokens < 0, self._state.last_samples[inputs.batch_indices[rows]], tokens)

    def _prompt_logprobs(self, step: Step, hidden: Tensor) -> list[tuple[int, int, tuple[int, ...], Ranks]]:
        """Return logprobs of the prompt tokens after a slice's positions: a position's logits predict the next."""
        return [
            (
                step.order[place],
                first,
                tokens,
                rank_prompt(raw, tokens, step.slices[place].sampling.prompt_logprobs or 0),
            )
            for place, first, tokens, raw in self.prompt_rows(step.slices, step.last_rows.tolist(), hidden)
        ]

    # Sampling

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        forwarded = self._forwarded
        if forwarded is None:
            raise InvariantViolation("sample without a forward pass")
        self._forwarded = None
        with self._on_stream():
            for one in forwarded.passes:
                self._sample(one, masks)
            forwarded.event = self._device.Event()
            forwarded.event.record()
        self._steps.append(forwarded)

    def _sample(self, one: _Pass, masks: TokenMasks | None) -> None:
        width = max(len(one.places), len(one.step.slices))
        out = torch.empty((3, width), dtype=torch.int32, device=self.store.device)
        if one.inputs is not None:
            one.logprobs = self._sampler.sample(
                one.inputs.logits,
                one.rows,
                one.special_rows,
                one.inputs.params,
                one.inputs.batch_indices,
                one.inputs.last_tokens,
                self._state.last_samples,
                masks,
                out,
            )
            one.inputs = None  # the logits are not needed any more
        if one.sound is not None:
            out[2] = one.sound
        one.results = self._take_results(width)
        one.results[: out.numel()].copy_(out.view(-1), non_blocking=True)

    def _take_results(self, width: int) -> Tensor:
        """Return a flat host buffer. A copy into a part of a matrix would use a temporary buffer, and wait."""
        while self._spare_results:
            if len(spare := self._spare_results.pop()) >= 3 * width:
                return spare  # buffers that are too short are dropped, so that they do not accumulate
        return torch.empty(max(6 * width, 256), dtype=torch.int32, pin_memory=self._is_cuda)

    # Results

    @torch.inference_mode()
    def collect(self) -> StepResult:
        if not self._steps:
            raise InvariantViolation("collect with no step in flight")
        step = self._steps.popleft()
        step.event.synchronize()
        unsound: list[int] = []
        indices: list[int] = []  # these three by row
        tokens: list[int] = []
        flags: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, PromptLogprobs] = {}
        for one in step.passes:
            assert one.results is not None
            width = max(len(one.places), len(one.step.slices))
            chosen, found, sound = one.results[: 3 * width].view(3, width).tolist()
            self._spare_results.append(one.results)
            order, num_rows = one.step.order, len(one.places)
            if one.sound is not None:
                unsound += [index for place, index in enumerate(order) if not sound[place]]
            if one.logprobs is not None:
                logprobs |= {len(tokens) + row: entry for row, entry in one.logprobs.read(chosen).items()}
            indices += [order[place] for place in one.places]
            tokens += chosen[:num_rows]
            flags += found[:num_rows]
            for index, first, known, ranked in one.prompts:
                add_prompt_logprobs(prompts, index, first, tuple(ranked.read(known).values()))
        broken, blocked = ([flag & bit for flag in flags] if any(flags) else flags for bit in (1, 2))
        rows = SampledRows(indices, tokens, broken, blocked, logprobs)
        if step.failures or len(set(indices)) < len(indices):  # slices with drafts have several rows
            rows = _in_order(rows, [row for one in step.passes for row in one.rows], step.failures)
        result = make_result(step.slices, unsound, rows, prompts)
        if result.is_poisoned:
            self._purge(step, broken_slices(result))
        return result._replace(failures={**step.failures, **result.failures}) if step.failures else result

    def _purge(self, step: _InFlight, broken: Sequence[int]) -> None:
        """Purge blocks after all work in flight, which may still read them."""
        with self._on_stream():
            for one in step.passes:
                for place, piece in enumerate(one.step.slices):
                    if one.step.order[place] in broken:
                        self.store.purge(piece)

    def abandon(self) -> None:
        """Discard a pass that raised, so that the next plan can run."""
        self._forwarded = None
        self._tables.forget()
        self._sampler.forget()

    def close(self) -> None:
        self._forwarded = None
        self._steps.clear()
        if self._compiling is not None:
            self._compiling.cancel()
        self._device.synchronize(self.store.device)
        if self._block_io is not None:
            self._block_io.close()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return self._device.stream(self._stream)  # type: ignore[no-any-return]


def _sampled_rows(step: Step) -> list[int]:
    """Return the rows after which a token is sampled, slice by slice."""
    if all(not piece.num_drafts for piece in step.slices):
        return [last for last, piece in zip(step.last_rows.tolist(), step.slices, strict=True) if piece.wants_token]
    lasts = zip(step.last_rows.tolist(), step.slices, strict=True)
    return [row for last, piece in lasts for row in range(last + 1 - piece.num_sampled, last + 1)]


def _in_order(rows: SampledRows, pieces: Sequence[SeqSlice], failures: Mapping[int, str]) -> SampledRows:
    """Sort the rows of drafts by slice and position. Slices that failed may lack rows: theirs are dropped."""
    kept = [row for row, index in enumerate(rows.indices) if index not in failures]
    kept.sort(key=lambda row: (rows.indices[row], pieces[row].start + pieces[row].length))
    indices, tokens, broken, blocked = ([numbers[row] for row in kept] for numbers in rows[:4])
    logprobs = {place: rows.logprobs[row] for place, row in enumerate(kept) if row in rows.logprobs}
    return SampledRows(indices, tokens, broken, blocked, logprobs)


def _divide(kv_spec: KVSpec, store: KVStore, num_cores: int, max_parts: int) -> Division:
    """Return one division of the work for all layers of a pool: the one for the layer that needs the smallest tiles."""

    def sizes(layers: Sequence[LayerKV]) -> Sizes:
        return Sizes(
            num_kv_heads=min(layer.num_kv_heads for layer in layers),
            block_size=store.block_size,
            rows_per_item=min(
                rows_per_item(tilings(layer.head_size, store.dtype.itemsize)[1], layer.num_groups) for layer in layers
            ),
            target=num_cores * PROGRAMS,
            wide_target=num_cores * WIDE_PROGRAMS,
            max_parts=max_parts,
        )

    layers = {index: layer for index, layer in enumerate(kv_spec.layers) if isinstance(layer, LayerKV)}
    full = [layer for index, layer in layers.items() if not store.shapes[index].window]
    windowed = [layer for index, layer in layers.items() if store.shapes[index].window]
    return Division(
        sizes=sizes(full or windowed),
        window=max(store.windows, default=0),
        window_sizes=sizes(windowed) if windowed else None,
        has_states=store.has_states,
    )


def _max_items(num_rows: int, num_decodes: int, num_prompts: int, num_siblings: int, sizes: Sizes) -> tuple[int, int]:
    """Return the most narrow and wide items of a step: one per row or tile, those that fill the card, and the spare."""
    num_tiles = num_siblings + (-(-num_rows // sizes.rows_per_item) + num_prompts if num_prompts else 0)
    num_wide = num_tiles + sizes.wide_target // sizes.num_kv_heads + 1 + SPARE if num_tiles else 0
    return num_decodes + sizes.target // sizes.num_kv_heads + 1 + SPARE, num_wide


def _halves(slices: Sequence[SeqSlice], indices: Sequence[int]) -> list[tuple[Sequence[SeqSlice], Sequence[int]]]:
    """Split into halves of about equal tokens. A single slice is cut in two: its second half attends to the first."""
    if len(slices) > 1:
        total, half, cut = sum(piece.length for piece in slices), 0, 0
        while half * 2 < total and cut < len(slices) - 1:
            half += slices[cut].length
            cut += 1
        return [(slices[:cut], indices[:cut]), (slices[cut:], indices[cut:])]
    piece = slices[0]
    if piece.length == 1:
        return [(slices, indices)]
    cut = piece.length // 2
    middle = piece.start + cut
    between = dict(piece.snapshots).get(middle, piece.state_target)
    first = piece._replace(
        tokens=piece.tokens[:cut],
        length=cut,
        wants_token=False,
        state_target=between,
        snapshots=tuple(one for one in piece.snapshots if one.position < middle),
    )
    second = piece._replace(
        tokens=piece.tokens[cut:],
        start=middle,
        length=piece.length - cut,
        state_source=between,
        snapshots=tuple(one for one in piece.snapshots if one.position > middle),
    )
    return [((first,), indices), ((second,), indices)]


def _has_prompt_logprobs(piece: SeqSlice) -> bool:
    """Return whether logprobs of prompt tokens are wanted, and one follows the first position of this slice."""
    return piece.sampling.prompt_logprobs is not None and piece.start + 1 < piece.num_prompt_tokens
