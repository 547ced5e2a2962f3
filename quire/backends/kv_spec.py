"""What each layer of a model stores per token: the pool of KV blocks is sized and divided by it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.weights.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerKV:
    num_kv_heads: int
    head_size: int
    window: int = 0  # keys older than this are not read; 0: all are
    num_groups: int = 1  # query heads per KV head, by which attention is divided into tiles

    @property
    def num_elements(self) -> int:
        """Elements per token: a key and a value for each head."""
        return 2 * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class KVSpec:
    layers: tuple[LayerKV, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> KVSpec:
        attentions = [layer.attention for layer in spec.layers]
        return cls(
            tuple(
                LayerKV(one.num_kv_heads, one.head_size, one.window, one.num_heads // one.num_kv_heads)
                for one in attentions
            )
        )

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window for layer in self.layers)

    def block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in all layers."""
        return sum(layer.num_elements for layer in self.layers) * block_size * item_bytes
