"""The pools of a model: blocks of keys and values, window blocks, and states of layers with a recurrence."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from quire.backends.kv_memory import KVCosts, KVSpec, LayerKV, LayerState
from quire.backends.native.library import Bytes, Floats, Layer, load_library

STATE_ITEM_BYTES = 4  # rows of a convolution are fp32, as they are computed: a state is the same bits as its rows


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of blocks and slots, the null block and the empty state included."""

    num_blocks: int
    num_window_blocks: int = 0  # 0: layers with a window keep their whole context in the other blocks
    num_states: int = 0


class Memory:
    """Allocates the pools and gives each layer its part. A pool has one array of blocks or slots for each layer."""

    def __init__(self, kv: KVSpec, sizes: PoolSizes, block_size: int) -> None:
        self.has_window_blocks = sizes.num_window_blocks > 0
        self.window = kv.window if self.has_window_blocks else 0
        full, window = _block_bytes(kv, block_size, self.has_window_blocks)
        self.blocks = zeroed(sizes.num_blocks * full)
        self.window_blocks = zeroed(sizes.num_window_blocks * window) if window else np.zeros(0, np.uint8)
        self.states: Floats = np.zeros(sizes.num_states * state_bytes(kv) // STATE_ITEM_BYTES, np.float32)
        self.kv, self._sizes, self._block_size = kv, sizes, block_size

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.window_blocks.nbytes + self.states.nbytes

    def state_arrays(self) -> list[Floats]:
        """Return views of the pools of states: rows of convolutions, then matrices, [slots, ...] for each layer."""
        views: list[Floats] = []
        at, num_states = 0, self._sizes.num_states
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
        full: list[int] = []
        window: list[int] = []
        for layer in self.kv.kv_layers:
            if layer.shared_with is None:
                has_window = self.has_window_blocks and layer.window
                (window if has_window else full).append(layer_block_bytes(layer, self._block_size))
        states = [math.prod(pool.shape[1:]) * STATE_ITEM_BYTES for pool in self.state_arrays()]
        return (
            _views(self.blocks, full, self._sizes.num_blocks),
            _views(self.window_blocks, window, self._sizes.num_window_blocks),
            _views(self.states.view(np.uint8), states, self._sizes.num_states),
        )

    def place(self, layers: ctypes.Array[Layer]) -> None:
        """Set the pools of all layers."""
        next_block, next_window_block = self.blocks.ctypes.data, self.window_blocks.ctypes.data
        next_state = self.states.ctypes.data
        for layer, kv in zip(layers, self.kv.layers, strict=True):
            if isinstance(kv, LayerState):
                next_state = _place_state(layer, kv, next_state, self._sizes.num_states)
            elif kv.shared_with is not None:
                other = layers[kv.shared_with]
                layer.pool, layer.has_window_blocks = other.pool, other.has_window_blocks
            elif self.has_window_blocks and kv.window:
                layer.pool, layer.has_window_blocks = next_window_block, 1
                next_window_block += self._sizes.num_window_blocks * layer_block_bytes(kv, self._block_size)
            else:
                layer.pool = next_block
                next_block += self._sizes.num_blocks * layer_block_bytes(kv, self._block_size)


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


def _block_bytes(kv: KVSpec, block_size: int, has_window_blocks: bool) -> tuple[int, int]:
    """Return the bytes of a block and of a window block, in all layers that have such blocks."""
    full = window = 0
    for layer in kv.kv_layers:
        num_bytes = layer_block_bytes(layer, block_size)
        if has_window_blocks and layer.window:
            window += num_bytes
        else:
            full += num_bytes
    return full, window


def kv_costs(kv: KVSpec, block_size: int, *, has_window_blocks: bool) -> KVCosts:
    """Return the bytes of each kind of memory, with the padding that C needs."""
    full, window = _block_bytes(kv, block_size, has_window_blocks)
    return KVCosts(full, window, state_bytes(kv), kv.window if has_window_blocks else 0)


def state_bytes(kv: KVSpec) -> int:
    return kv.state_bytes(STATE_ITEM_BYTES)


def layer_block_bytes(kv: LayerKV, block_size: int) -> int:
    if kv.shared_with is not None:
        return 0
    return int(load_library().quire_block_bytes(kv.num_kv_heads, kv.head_size, block_size))


def zeroed(num_bytes: int) -> Bytes:
    """Allocate zeros, because masked values must still be finite. The pages are allocated at the first write."""
    return np.zeros(num_bytes + 64, np.uint8)
