"""Gemma 3, text: norms before and after each half of a layer, windows on most layers, gelu, scaled embeddings."""

from __future__ import annotations

from torch import Tensor

from quire.backends.torch.batch import Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Angles, RMSNorm
from quire.backends.torch.loading import LayerWeights
from quire.backends.torch.models.llama import LlamaModel
from quire.backends.torch.models.qwen3 import Qwen3Layer
from quire.weights.spec import ModelSpec


class Gemma3Layer(Qwen3Layer):
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights) -> None:
        super().__init__(spec, index, weights)
        self.mlp_norm = RMSNorm(weights.norms["pre_feedforward_layernorm"], spec.norm_eps)
        self.post_attention_norm = RMSNorm(weights.norms["post_attention_layernorm"], spec.norm_eps)
        self.post_mlp_norm = RMSNorm(weights.norms["post_feedforward_layernorm"], spec.norm_eps)

    def __call__(self, x: Tensor, angles: Angles, batch: Batch, store: KVStore) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), angles, batch, store))
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))


class Gemma3Model(LlamaModel):
    layer_type = Gemma3Layer
