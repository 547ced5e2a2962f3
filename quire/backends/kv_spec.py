"""What each layer of a model stores: keys and values per token, or one state per request.

The sizes of the pools follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.weights.spec import AttentionSpec, DeltaNetSpec, Mixer, ModelSpec, ShortConvSpec

SCALE_BYTES = 2  # of a key or value of one head in FP8
STATE_BYTES = 4  # of an element of a recurrent state, which is fp32 whatever the type of the model


@dataclass(frozen=True, slots=True)
class LayerKV:
    num_kv_heads: int
    head_size: int
    window: int = 0  # keys older than this are not read; 0: all are
    num_groups: int = 1  # query heads per KV head, by which attention is divided into tiles
    shared_with: int | None = None  # the layer stores nothing and reads the keys and values of this one

    @property
    def num_elements(self) -> int:
        """Elements per token: a key and a value for each head."""
        return self.num_vectors * self.head_size

    @property
    def num_vectors(self) -> int:
        """Keys and values per token."""
        return 0 if self.shared_with is not None else 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerState:
    """State of a layer after some token: the last inputs of its convolution, and a matrix per head."""

    num_rows: int  # inputs of the convolution, in the type of the model
    num_channels: int
    num_heads: int = 0  # matrices of [key_size, value_size] in fp32; 0: the layer has none
    key_size: int = 0
    value_size: int = 0

    def num_bytes(self, item_bytes: int) -> int:
        matrices = self.num_heads * self.key_size * self.value_size
        return self.num_rows * self.num_channels * item_bytes + matrices * STATE_BYTES


@dataclass(frozen=True, slots=True)
class KVSpec:
    layers: tuple[LayerKV | LayerState, ...]
    # Keys and values are stored in FP8, each with a scale, whatever the type of the model. States are not.
    is_fp8: bool = field(default=False, repr=False)  # caches on disk are found by the `repr` of the layers

    @classmethod
    def of(cls, spec: ModelSpec, *, is_fp8: bool = False) -> KVSpec:
        return cls(tuple(_layer(layer.mixer, spec.hidden_size) for layer in spec.layers), is_fp8)

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The layers that attend."""
        return tuple(layer for layer in self.layers if isinstance(layer, LayerKV))

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window if isinstance(layer, LayerKV) else 0 for layer in self.layers)

    @property
    def window(self) -> int:
        """The largest window; 0: no layer has one."""
        return max(self.windows)

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, LayerState) for layer in self.layers)

    def within(self, max_model_len: int) -> KVSpec:
        """Return the spec without windows that no context of this length exceeds."""
        layers = tuple(
            replace(layer, window=0) if isinstance(layer, LayerKV) and layer.window >= max_model_len else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in all layers."""
        return self.full_block_bytes(block_size, item_bytes) + self.window_block_bytes(block_size, item_bytes)

    def full_block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in the layers that keep their whole context."""
        return self._block_bytes(block_size, item_bytes, has_window=False)

    def window_block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in the layers with a window."""
        return self._block_bytes(block_size, item_bytes, has_window=True)

    def context_bytes(self, num_tokens: int, item_bytes: int) -> int:
        """Return the bytes that a request with a context of this length holds: keys, values and its state."""
        full, window = self.full_block_bytes(1, item_bytes), self.window_block_bytes(1, item_bytes)
        return num_tokens * full + min(num_tokens, self.window) * window + self.state_bytes(item_bytes)

    def state_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the state of one request in all layers."""
        return sum(layer.num_bytes(item_bytes) for layer in self.layers if isinstance(layer, LayerState))

    def _block_bytes(self, block_size: int, item_bytes: int, *, has_window: bool) -> int:
        chosen = [layer for layer in self.layers if isinstance(layer, LayerKV) and bool(layer.window) == has_window]
        num_elements = sum(layer.num_elements for layer in chosen)
        if self.is_fp8:
            return (num_elements + SCALE_BYTES * sum(layer.num_vectors for layer in chosen)) * block_size
        return num_elements * block_size * item_bytes


def _layer(mixer: Mixer, hidden_size: int) -> LayerKV | LayerState:
    if isinstance(mixer, AttentionSpec):
        num_groups = mixer.num_heads // mixer.num_kv_heads
        return LayerKV(mixer.num_kv_heads, mixer.head_size, mixer.window, num_groups, mixer.shared_with)
    if isinstance(mixer, DeltaNetSpec):
        sizes = mixer.num_value_heads, mixer.key_head_size, mixer.value_head_size
        return LayerState(mixer.num_taps - 1, mixer.num_channels, *sizes)
    assert isinstance(mixer, ShortConvSpec)
    return LayerState(mixer.num_taps - 1, hidden_size)
