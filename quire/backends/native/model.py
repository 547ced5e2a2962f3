"""A model as C sees it: packed weights, rotation tables, the pools, and the forward pass.

The pools are blocks of keys and values, window blocks, and states of layers with a recurrence. A step is sent to C as
flat arrays. Every size and number that C relies on is checked here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from quire.backends.base import Capacity
from quire.backends.kv_memory import KVCosts, KVSpec, LayerKV, LayerState
from quire.backends.native.library import (
    MAX_THREADS,
    BatchArgs,
    Bytes,
    Floats,
    Ints,
    Layer,
    Model,
    Refine,
    load_library,
)
from quire.backends.native.packing import PackedModel
from quire.core.step import BlockCopy, SeqSlice
from quire.errors import InvalidRequest, InvariantViolation
from quire.weights.spec import AttentionSpec, ModelSpec, QKNorm, QueryScaling, RopeSpec


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, in the order of the plan. L of the rows are sampled."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    first_rows: Ints  # [S + 1]
    tables: Ints  # [S, blocks]
    sampled: tuple[int, ...]  # [L]: sequence of each row that is sampled
    sampled_rows: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # [L]
    window_tables: Ints | None = None  # [S, blocks]; blocks behind the window are 0
    kv_starts: Ints | None = None  # [S]; None: all 0
    segments: Ints | None = None  # [segments, 4]: first and last row, source and target slot, see csrc/quire.h
    first_segments: Ints | None = None  # [S + 1]


def build_batch(slices: Sequence[SeqSlice], last_samples: Ints, capacity: Capacity) -> Batch:
    """Make the arrays of a step. `last_samples` is indexed by batch index.

    Integers of any size are checked before they are converted to 32 bits. The code uses lists because the batches of a
    single stream are so small that calls into numpy would take longer than the work.
    """
    tokens: list[int] = []
    positions: list[int] = []
    first_rows, widths = [0], []
    for piece in slices:
        _refuse(
            length=piece.length < 1 or piece.length != (len(piece.tokens) or 1),
            start=piece.start < 0 or piece.start + piece.length > capacity.max_model_len,
            batch_index=not 0 <= piece.batch_index < len(last_samples),
        )
        end = piece.start + piece.length
        tokens.extend(piece.tokens or (int(last_samples[piece.batch_index]),))
        positions.extend(range(piece.start, end))
        first_rows.append(len(tokens))
        widths.append(-(-end // capacity.block_size))
    tables = np.zeros((len(slices), max(widths)), np.int64)
    for row, (piece, width) in enumerate(zip(slices, widths, strict=True)):
        _refuse(block_table=len(piece.block_table) < width)
        tables[row, :width] = piece.block_table[:width]
    _refuse(
        tokens=not 0 <= min(tokens) <= max(tokens) < capacity.vocab_size,
        block_table=not 0 <= tables.min() <= tables.max() < capacity.num_blocks,
    )
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        first_rows=np.array(first_rows, np.int32),
        tables=tables.astype(np.int32),
        sampled=tuple(index for index, piece in enumerate(slices) for _ in range(piece.num_sampled)),
        sampled_rows=_sampled_rows(slices, first_rows),
        window_tables=_window_tables(slices, widths, capacity) if capacity.num_window_blocks else None,
        kv_starts=np.array([max(piece.kv_start, 0) for piece in slices], np.int32),
        **_segments(slices, first_rows, capacity.num_states),
    )


def _sampled_rows(slices: Sequence[SeqSlice], first_rows: Sequence[int]) -> Ints:
    """Return the last rows of each slice: one, and one for each draft."""
    rows: list[int] = []
    for index, piece in enumerate(slices):
        _refuse(num_drafts=not 0 <= piece.num_drafts < piece.length)
        rows.extend(range(first_rows[index + 1] - piece.num_sampled, first_rows[index + 1]))
    return np.array(rows, np.int32)


def _window_tables(slices: Sequence[SeqSlice], widths: Sequence[int], capacity: Capacity) -> Ints:
    """Return tables without the blocks behind the window, whose entries may be of freed blocks."""
    tables = np.zeros((len(slices), max(widths)), np.int64)
    for row, (piece, width) in enumerate(zip(slices, widths, strict=True)):
        first = max(piece.start - capacity.window + 1, 0) // capacity.block_size
        _refuse(window_table=len(piece.window_table) < width)
        tables[row, first:width] = piece.window_table[first:width]
    _refuse(window_table=not 0 <= tables.min() <= tables.max() < capacity.num_window_blocks)
    return tables.astype(np.int32)


def _segments(slices: Sequence[SeqSlice], first_rows: Sequence[int], num_states: int) -> dict[str, Ints]:
    """Return the segments of all slices: a slice is divided where a snapshot of its state is stored."""
    if not num_states:
        return {}
    segments: list[tuple[int, int, int, int]] = []
    first_segments = [0]
    for piece, first_row in zip(slices, first_rows, strict=False):
        start, source = piece.start, piece.state_source
        for position, slot in (*piece.snapshots, (piece.start + piece.length, piece.state_target)):
            _refuse(snapshots=position <= start, states=not (0 <= source < num_states and 0 < slot < num_states))
            segments.append((first_row + start - piece.start, first_row + position - piece.start, source, slot))
            start, source = position, slot
        first_segments.append(len(segments))
    return {"segments": np.array(segments, np.int32), "first_segments": np.array(first_segments, np.int32)}


def _refuse(**problems: bool | np.bool_) -> None:
    """Raise if any problem is True: C would write out of bounds. No plan of the scheduler fails here."""
    if any(problems.values()):
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        raise InvariantViolation(f"the plan's {', '.join(wrong)} would make C access memory out of bounds")


# For each product's input, the number of steps of 4, out of 256, that get 8 additional bits. These are the steps with
# the largest numbers, because they cause most of the error. Decision 0022 has the measurements.
REFINED = {"fast": Refine(), "balanced": Refine(4, 4, 12, 12, 20), "exact": Refine(256, 256, 256, 256, 256)}


class Engine:
    """The library's threads and working memory."""

    def __init__(self, num_threads: int) -> None:
        self.library = load_library()
        self._handle: int | None = self.library.quire_open(_checked(num_threads))
        if not self._handle:
            raise MemoryError("no memory for the threads of the native backend")
        self.num_threads = self._count_threads()

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise InvariantViolation("the native backend is closed")
        return self._handle

    def use_threads(self, num_threads: int) -> None:
        if self.library.quire_use_threads(self.handle, _checked(num_threads)):
            raise MemoryError(f"no memory for {num_threads} threads")
        self.num_threads = self._count_threads()

    def close(self) -> None:
        if self._handle is not None:
            self.library.quire_close(self._handle)
            self._handle = None

    def _count_threads(self) -> int:
        """Return how many threads were started: the operating system may refuse some."""
        return int(self.library.quire_num_threads(self.handle))


def _checked(num_threads: int) -> int:
    if num_threads < 1:
        raise InvalidRequest(f"{num_threads = } is not at least 1")
    return min(num_threads, MAX_THREADS)


class NativeModel:
    def __init__(
        self,
        spec: ModelSpec,
        packed: PackedModel,
        engine: Engine,
        capacity: Capacity,
        precision: str = "balanced",
    ) -> None:
        self.spec = spec
        self.precision = precision
        self.engine = engine
        self.capacity = capacity
        self.memory = Memory(KVSpec.of(spec).within(capacity.max_model_len), capacity)
        self.packed = packed
        self._tables = _Tables(capacity.max_model_len)
        self.layers = (Layer * spec.num_layers)(*packed.layers)
        self.memory.place(self.layers)
        for layer, layer_spec in zip(self.layers, spec.layers, strict=True):
            if isinstance(attention := layer_spec.mixer, AttentionSpec):
                _describe_attention(layer, attention, self._tables)
                layer.is_half_attention = may_attend_in_halves(attention, precision)
            layer.residual_scale = layer_spec.residual_scale
        self._args = _model_args(spec, packed, self.layers, precision, capacity.block_size)

    def forward(self, batch: Batch, logit_rows: Ints, hidden: Floats | None = None) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the logits [L, V] of `logit_rows`, and for each sequence whether its last hidden state is finite.

        `hidden` [T, E] receives the last hidden states, for `head`.
        """
        logits: Floats = np.empty((len(logit_rows), self.spec.vocab_size), np.float32)
        is_sound = np.empty(len(batch.tables), np.uint8)
        args = BatchArgs(
            num_tokens=len(batch.tokens),
            num_seqs=len(batch.tables),
            num_logits=len(logit_rows),
            table_stride=batch.tables.shape[1],
            tokens=batch.tokens.ctypes.data,
            positions=batch.positions.ctypes.data,
            first_rows=batch.first_rows.ctypes.data,
            tables=batch.tables.ctypes.data,
            window_tables=_address(batch.window_tables),
            kv_starts=_address(batch.kv_starts),
            segments=_address(batch.segments),
            first_segments=_address(batch.first_segments),
            logit_rows=logit_rows.ctypes.data,
            logits=logits.ctypes.data,
            hidden=_address(hidden),
            is_sound=is_sound.ctypes.data,
        )
        if self.engine.library.quire_forward(self.engine.handle, ctypes.byref(self._args), ctypes.byref(args)):
            raise MemoryError(f"no memory for a step of {len(batch.tokens)} tokens")
        return logits, is_sound.astype(np.bool_)

    def head(self, hidden: Floats) -> Floats:
        """Return the logits [rows, V] of hidden states [rows, E]."""
        logits: Floats = np.empty((len(hidden), self.spec.vocab_size), np.float32)
        hidden = np.ascontiguousarray(hidden)
        args = (ctypes.byref(self._args), hidden.ctypes.data, len(hidden), logits.ctypes.data)
        if self.engine.library.quire_logits(self.engine.handle, *args):
            raise MemoryError(f"no memory for {len(hidden)} rows of logits")
        return logits

    def copy_blocks(self, copies: tuple[BlockCopy, ...], window_copies: tuple[BlockCopy, ...] = ()) -> None:
        """Copy blocks. All numbers are checked before the first copy."""
        pairs = _pairs(copies, self.capacity.num_blocks)
        window_pairs = _pairs(window_copies, self.capacity.num_window_blocks)
        for has_window_blocks, some in enumerate((pairs, window_pairs)):
            if len(some):
                args = (ctypes.byref(self._args), has_window_blocks, some.ctypes.data, len(some))
                self.engine.library.quire_copy_blocks(*args)

    def purge_blocks(self, blocks: list[int], window_blocks: Sequence[int] = ()) -> None:
        """Set values that are not finite to 0, so that the next request that gets the block cannot read them."""
        for has_window_blocks, some in enumerate((blocks, window_blocks)):
            array = np.array(some, np.int32)
            args = (ctypes.byref(self._args), has_window_blocks, array.ctypes.data, len(array))
            self.engine.library.quire_purge_blocks(*args)


def _pairs(copies: tuple[BlockCopy, ...], num_blocks: int) -> Ints:
    pairs = np.array(copies, np.int64).reshape(-1, 2)
    if (pairs < 0).any() or (pairs >= num_blocks).any():
        raise InvariantViolation(f"{copies = } are not all within the pool's {num_blocks} blocks")
    return pairs.astype(np.int32)


def _address(array: NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


def may_attend_in_halves(attention: AttentionSpec, precision: str) -> bool:
    """Return whether attention may multiply in fp16.

    In some models a bias adds a large value to every key. fp16 sums would then lose the differences between keys.
    """
    return precision != "exact" and not attention.has_qkv_bias


class _Tables:
    """Factors by position, computed once for all layers that share them."""

    def __init__(self, max_model_len: int) -> None:
        self.angles = cache(partial(_angles, max_model_len=max_model_len))
        self.query_scales = cache(partial(_query_scales, max_model_len=max_model_len))
        self.ones = cache(_ones)  # weights of norms that have none


def _describe_attention(layer: Layer, attention: AttentionSpec, tables: _Tables) -> None:
    layer.num_heads, layer.num_kv_heads = attention.num_heads, attention.num_kv_heads
    layer.head_size = attention.head_size
    layer.window, layer.has_gate = attention.window, attention.has_gate
    layer.is_key_value, layer.is_shared = attention.is_key_value, attention.shared_with is not None
    if attention.has_value_norm:
        layer.v_norm = tables.ones(attention.head_size).ctypes.data
    layer.attention_scale, layer.attention_softcap = attention.scale, attention.softcap
    layer.is_norm_of_width = attention.qk_norm is QKNorm.WIDTH
    if attention.rope is not None:
        cosines, sines = tables.angles(attention.rope)
        layer.rotary_size = attention.rope.rotary_size
        layer.cosines, layer.sines = cosines.ctypes.data, sines.ctypes.data
    if attention.query_scaling is not None:
        layer.query_scales = tables.query_scales(attention.query_scaling).ctypes.data


def _model_args(
    spec: ModelSpec, packed: PackedModel, layers: ctypes.Array[Layer], precision: str, block_size: int
) -> Model:
    return Model(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        embedding_scale=spec.embedding_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap,
        layers=ctypes.cast(layers, ctypes.POINTER(Layer)),
        norm=packed.norm.ctypes.data,
        embedding=packed.embedding,
        head=packed.head,
        ple_embedding=packed.ple_embedding,
        ple_proj=packed.ple_proj,
        ple_norm=_address(packed.ple_norm),
        ple_size=spec.ple_size,
        ple_scale=spec.ple_size**0.5,
        ple_proj_scale=spec.hidden_size**-0.5,
        refine=REFINED[precision],
        block_size=block_size,
    )


def _ones(size: int) -> Floats:
    return np.ones(size, np.float32)


def _query_scales(scaling: QueryScaling, max_model_len: int) -> Floats:
    return np.array([scaling.factor(position) for position in range(max_model_len)], np.float32)


def _angles(rope: RopeSpec, max_model_len: int) -> tuple[Floats, Floats]:
    """Return cosines and sines, [max context, rotary size / 2] each."""
    frequencies = np.array(rope.inverse_frequencies(max_model_len), np.float32)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(rope.attention_factor)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


STATE_ITEM_BYTES = 4  # rows of a convolution are fp32, as they are computed: a state is the same bits as its rows


class Memory:
    """Allocates the pools and gives each layer its part. A pool has one array of blocks or slots for each layer."""

    def __init__(self, kv: KVSpec, capacity: Capacity) -> None:
        self.has_window_blocks = capacity.num_window_blocks > 0
        self._sizes = _block_sizes(kv, capacity.block_size, self.has_window_blocks)
        full, window = map(sum, self._sizes)
        self.blocks = zeroed(capacity.num_blocks * full)
        self.window_blocks = zeroed(capacity.num_window_blocks * window) if window else np.zeros(0, np.uint8)
        self.states: Floats = np.zeros(
            capacity.num_states * kv.state_bytes(STATE_ITEM_BYTES) // STATE_ITEM_BYTES, np.float32
        )
        self.kv, self._capacity = kv, capacity

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.window_blocks.nbytes + self.states.nbytes

    def state_arrays(self) -> list[Floats]:
        """Return views of the pools of states: rows of convolutions, then matrices, [slots, ...] for each layer."""
        views: list[Floats] = []
        at, num_states = 0, self._capacity.num_states
        for layer in self.kv.layers:
            if isinstance(layer, LayerState):
                matrices = (layer.num_heads, layer.key_size, layer.value_size)
                for shape in ((layer.num_rows, layer.num_channels), *([matrices] if layer.num_heads else [])):
                    size = num_states * math.prod(shape)
                    views.append(self.states[at : at + size].reshape(num_states, *shape))
                    at += size
        return views

    def pools(self) -> tuple[list[Bytes], list[Bytes], list[Bytes]]:
        """Return views [layers, blocks or slots, bytes] of blocks, window blocks and states.

        Layers of equal size that lie side by side are one view.
        """
        full, window = self._sizes
        states = [math.prod(pool.shape[1:]) * STATE_ITEM_BYTES for pool in self.state_arrays()]
        return (
            _views(self.blocks, full, self._capacity.num_blocks),
            _views(self.window_blocks, window, self._capacity.num_window_blocks),
            _views(self.states.view(np.uint8), states, self._capacity.num_states),
        )

    def place(self, layers: ctypes.Array[Layer]) -> None:
        """Set the pools of all layers."""
        next_block, next_window_block = self.blocks.ctypes.data, self.window_blocks.ctypes.data
        next_state = self.states.ctypes.data
        for layer, kv in zip(layers, self.kv.layers, strict=True):
            if isinstance(kv, LayerState):
                next_state = _place_state(layer, kv, next_state, self._capacity.num_states)
            elif kv.shared_with is not None:
                other = layers[kv.shared_with]
                layer.pool, layer.has_window_blocks = other.pool, other.has_window_blocks
            elif self.has_window_blocks and kv.window:
                layer.pool, layer.has_window_blocks = next_window_block, 1
                next_window_block += self._capacity.num_window_blocks * layer_block_bytes(kv, self._capacity.block_size)
            else:
                layer.pool = next_block
                next_block += self._capacity.num_blocks * layer_block_bytes(kv, self._capacity.block_size)


def _views(memory: Bytes, layer_bytes: list[int], count: int) -> list[Bytes]:
    views, at = [], 0
    for size, layers in groupby(layer_bytes):
        num_layers = len(list(layers))
        end = at + num_layers * count * size
        views.append(memory[at:end].reshape(num_layers, count, size))
        at = end
    return views


def _place_state(layer: Layer, kv: LayerState, at: int, num_states: int) -> int:
    layer.recurrence.rows = at
    at += num_states * kv.num_rows * kv.num_channels * STATE_ITEM_BYTES
    layer.recurrence.matrices = at
    return at + num_states * kv.num_heads * kv.key_size * kv.value_size * STATE_ITEM_BYTES


def _block_sizes(kv: KVSpec, block_size: int, has_window_blocks: bool) -> tuple[list[int], list[int]]:
    """Return the bytes of a block and of a window block, in each layer that stores one."""
    full: list[int] = []
    window: list[int] = []
    for layer in kv.kv_layers:
        if layer.shared_with is None:
            (window if has_window_blocks and layer.window else full).append(layer_block_bytes(layer, block_size))
    return full, window


def kv_costs(kv: KVSpec, block_size: int, *, has_window_blocks: bool) -> KVCosts:
    """Return the bytes of each kind of memory, with the padding that C needs."""
    full, window = map(sum, _block_sizes(kv, block_size, has_window_blocks))
    return KVCosts(full, window, kv.state_bytes(STATE_ITEM_BYTES), kv.window if has_window_blocks else 0)


def layer_block_bytes(kv: LayerKV, block_size: int) -> int:
    return int(load_library().quire_block_bytes(kv.num_kv_heads, kv.head_size, block_size))


def zeroed(num_bytes: int) -> Bytes:
    """Allocate zeros, because masked values must still be finite. The pages are allocated at the first write."""
    return np.zeros(num_bytes + 64, np.uint8)
