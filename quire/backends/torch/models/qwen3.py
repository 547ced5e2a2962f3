"""Qwen 3: Llama with an RMS norm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from quire.backends.torch.layers import HeadNorm, Rotary
from quire.backends.torch.loading import LayerWeights
from quire.backends.torch.models.llama import LlamaLayer, LlamaModel
from quire.weights.spec import ModelSpec


class Qwen3Layer(LlamaLayer):
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights, rotary: Rotary) -> None:
        super().__init__(spec, index, weights, rotary)
        q_norm, k_norm = weights.norms["self_attn.q_norm"], weights.norms["self_attn.k_norm"]
        num_heads, num_kv_heads, rounds_first = spec.num_heads, spec.num_kv_heads, spec.rounds_norms_first
        norm = HeadNorm(q_norm, k_norm, num_heads, num_kv_heads, spec.norm_eps, rounds_first=rounds_first)
        self.heads = replace(self.heads, norm=norm)


class Qwen3Model(LlamaModel):
    layer_type = Qwen3Layer
