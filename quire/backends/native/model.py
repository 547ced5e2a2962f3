"""A model as C sees it: packed weights, rotation tables, KV pool, and the forward pass."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from quire.backends.native.batch import Batch, Limits
from quire.backends.native.library import BatchArgs, Bytes, Engine, Floats, Ints, Layer, Model, Refine
from quire.backends.native.packing import PackedModel
from quire.core.step import BlockCopy
from quire.errors import InvariantViolation
from quire.weights.spec import Activation, ModelSpec, RopeSpec

# For each product's input, the number of groups, out of 256, that get 8 additional bits. These are the groups with the
# largest scales, because they cause most of the error. Decision 0022 has the measurements.
REFINED = {"fast": Refine(), "balanced": Refine(71, 71, 52, 74, 71), "exact": Refine(256, 256, 256, 256, 256)}


class NativeModel:
    def __init__(
        self,
        spec: ModelSpec,
        packed: PackedModel,
        engine: Engine,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        precision: str = "balanced",
    ) -> None:
        self.spec = spec
        self.precision = precision
        self.engine = engine
        self.limits = Limits(num_blocks, block_size, max_model_len, spec.vocab_size)
        self._packed = packed
        self._angles = {rope: _angles(rope, max_model_len) for rope in {spec.rope, spec.local_rope or spec.rope}}
        layers = (Layer * spec.num_layers)(*packed.layers)
        for index, layer in enumerate(layers):
            rope = spec.local_rope if spec.windows[index] and spec.local_rope else spec.rope
            cosines, sines = self._angles[rope]
            layer.cosines, layer.sines = cosines.ctypes.data, sines.ctypes.data
        self._layers = layers
        self._args = _model_args(spec, packed, layers, max_model_len)
        self._args.refine = REFINED[precision]
        self._args.is_half_attention = may_attend_in_halves(spec, precision)
        self._args.num_blocks, self._args.block_size = num_blocks, block_size
        self.pool = zeroed(num_blocks * spec.num_layers * block_bytes(engine, spec, block_size))
        self._args.pool = self.pool.ctypes.data

    @property
    def weight_bytes(self) -> int:
        return self._packed.num_bytes

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
            logit_rows=logit_rows.ctypes.data,
            logits=logits.ctypes.data,
            hidden=None if hidden is None else hidden.ctypes.data,
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

    def logits(self, tokens: list[int]) -> Floats:
        """Return the logits [T, V] of one sequence, from an empty cache. Overwrites the first blocks of the pool."""
        num_blocks = -(-len(tokens) // self.limits.block_size)
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.arange(len(tokens), dtype=np.int32),
            first_rows=np.array([0, len(tokens)], np.int32),
            tables=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
            sampled=(),
        )
        if num_blocks >= self.limits.num_blocks or len(tokens) > self.limits.max_model_len:
            raise ValueError(f"the pool does not hold {len(tokens)} tokens")
        return self.forward(batch, np.arange(len(tokens), dtype=np.int32))[0]

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            pairs = np.array(copies, np.int64)
            if (pairs < 0).any() or (pairs >= self.limits.num_blocks).any():
                raise InvariantViolation(f"{copies = } are not all within the pool's {self.limits.num_blocks} blocks")
            pairs = pairs.astype(np.int32)
            self.engine.library.quire_copy_blocks(ctypes.byref(self._args), pairs.ctypes.data, len(pairs))

    def purge_blocks(self, blocks: list[int]) -> None:
        """Set values that are not finite to 0, so that the next request that gets the block cannot read them."""
        array = np.array(blocks, np.int32)
        self.engine.library.quire_purge_blocks(ctypes.byref(self._args), array.ctypes.data, len(array))


def block_bytes(engine: Engine, spec: ModelSpec, block_size: int) -> int:
    """Return the bytes of one block in one layer."""
    shape = Model(num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, block_size=block_size)
    return int(engine.library.quire_block_bytes(ctypes.byref(shape)))


def may_attend_in_halves(spec: ModelSpec, precision: str) -> bool:
    """Return whether attention may multiply in fp16.

    In some models a bias adds a large value to every key. fp16 sums would then lose the differences between keys.
    """
    return precision != "exact" and not spec.has_qkv_bias


def zeroed(num_bytes: int) -> Bytes:
    """Allocate zeros, because masked values must still be finite. The pages are allocated at the first write."""
    return np.zeros(num_bytes + 64, np.uint8)


def _model_args(spec: ModelSpec, packed: PackedModel, layers: ctypes.Array[Layer], max_model_len: int) -> Model:
    return Model(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        rotary_size=spec.rope.rotary_size,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        activation=0 if spec.activation is Activation.SILU else 1,
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        embedding_scale=spec.embedding_scale,
        attention_softcap=spec.attention_softcap,
        logit_softcap=spec.logit_softcap,
        layers=ctypes.cast(layers, ctypes.POINTER(Layer)),
        norm=packed.norm.ctypes.data,
        embedding=packed.embedding,
        head=packed.head,
    )


def _angles(rope: RopeSpec, max_model_len: int) -> tuple[Floats, Floats]:
    frequencies = np.array(rope.inverse_frequencies(max_model_len), np.float32)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(rope.attention_factor)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
