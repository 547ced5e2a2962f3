"""Block I/O: checks of pieces and buffers, the description of their layout, and copies in ordinary host memory.

The runners of other memory have classes of their own. A copy of host memory is made in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from quire.backends.base import Capacity, Copied, MemorySizes, PendingCopy
from quire.core.step import MemoryKind, MemoryRef
from quire.errors import InvariantViolation
from quire.weights.spec import OTHER, AttentionSpec, ModelSpec

# On a CPU, the bytes that are copied beside a step: a part of the weights, because a step reads most of them.
MIN_STEP_BYTES = 4 << 20  # takes about a millisecond
MAX_STEP_BYTES = 32 << 20
WEIGHT_SHARE = 64
MAX_EXPORTS = 64  # on a CPU; a block takes much less time to copy than to compute

Counts = tuple[int, int, int]  # blocks, window blocks and state slots of a runner, number 0 included


def counts_of(capacity: Capacity) -> Counts:
    return capacity.num_blocks, capacity.num_window_blocks, capacity.num_states


def check_pieces(
    pieces: Sequence[MemoryRef],
    buffers: Sequence[memoryview],
    sizes: MemorySizes,
    counts: Counts,
    *,
    is_export: bool,
) -> None:
    """Raise if a copy would be out of bounds, or its result would depend on the order of the copies.

    Number 0 is refused for every kind: the null blocks have no content, and the empty state must stay empty.
    """
    if len(pieces) != len(buffers):
        raise InvariantViolation(f"{len(pieces)} pieces and {len(buffers)} buffers: not one buffer for each piece")
    for ref, buffer in zip(pieces, buffers, strict=True):
        size, count, name = sizes.of(ref.kind), counts[ref.kind], MemoryKind(ref.kind).name
        if not 0 < ref.index < count:
            bounds = f"from 1 to {count - 1}" if count > 1 else "none"
            raise InvariantViolation(f"{name} {ref.index} is not in the runner's memory: it has {bounds}")
        if buffer.nbytes != size or not buffer.c_contiguous or buffer.itemsize != 1:
            kind = "" if buffer.c_contiguous else ", not contiguous,"
            kind += "" if buffer.itemsize == 1 else f" in words of {buffer.itemsize}, not bytes,"
            raise InvariantViolation(f"a buffer of {buffer.nbytes} bytes{kind} for {name} {ref.index} of {size} bytes")
        if is_export and buffer.readonly:
            raise InvariantViolation(f"{name} {ref.index} is exported to a read-only buffer")
    if not is_export and len(set(pieces)) < len(pieces):
        raise InvariantViolation(f"two buffers are imported into one piece: {sorted(pieces)}")


def model_key(spec: ModelSpec, stored: object, max_model_len: int) -> str:
    """Return a digest of all that decides the keys, values and states of a model, except its weights.

    These are its equations, and what each layer stores (`stored`, by its `repr`). Long contexts may have other rotary
    frequencies, so `max_model_len` decides too. For models of other libraries it is not known how, so the number itself
    is part of the key.
    """
    ropes = [
        layer.mixer.rope.inverse_frequencies(max_model_len)
        for layer in spec.layers
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.rope is not None
    ]
    equations = (
        spec.architecture,
        spec.layers,
        spec.hidden_size,
        spec.norm_eps,
        spec.embedding_scale,
        spec.norm_offset,
        spec.rounds_norms_first,
    )
    other = max_model_len if spec.family == OTHER else 0
    return blake2b(repr((equations, dict.fromkeys(ropes), stored, other)).encode(), digest_size=8).hexdigest()


def layout_text(backend: str, version: int, **facts: object) -> str:
    """Return a layout. `version` is raised when a change of the backend changes the meaning of its bytes."""
    return " ".join((f"{backend}/{version}", *(f"{name}={value}".replace(" ", "_") for name, value in facts.items())))


def cpu_pieces_per_step(sizes: MemorySizes, weight_bytes: int) -> int:
    budget = min(max(weight_bytes // WEIGHT_SHARE, MIN_STEP_BYTES), MAX_STEP_BYTES)
    return max(budget // max(sizes.block, sizes.window, 1), 1)


Bytes = NDArray[np.uint8]
Pools = tuple[Sequence[Bytes], Sequence[Bytes], Sequence[Bytes]]  # by kind


class HostBlockIO:
    """`pools` has the pools of each kind of memory in the order of a buffer, as views [layers, pieces, bytes]."""

    def __init__(self, pools: Pools, counts: Counts, layout: str, weight_bytes: int) -> None:
        self._pools = pools
        self.sizes = MemorySizes(*(sum(pool.shape[0] * pool.shape[2] for pool in some) for some in pools))
        self.layout = layout
        self.is_host_memory = True
        self.max_exports = MAX_EXPORTS
        self.pieces_per_step = cpu_pieces_per_step(self.sizes, weight_bytes)
        self._counts = counts

    def allocate(self, num_bytes: int) -> memoryview:
        return np.zeros(num_bytes, np.uint8).data

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=True)
        for held, given in self._parts(pieces, buffers):
            given[:] = held
        return Copied()

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=False)
        for held, given in self._parts(pieces, buffers):
            held[:] = given
        return Copied()

    def _parts(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield each part of a piece in the pools and in its buffer [layers, bytes]."""
        for (kind, index), buffer in zip(pieces, buffers, strict=True):
            flat, at = np.frombuffer(buffer, np.uint8), 0
            for pool in self._pools[kind]:
                held = pool[:, index]
                yield held, flat[at : at + held.size].reshape(held.shape)
                at += held.size
