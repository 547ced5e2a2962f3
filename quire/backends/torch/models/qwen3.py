"""Qwen 3: Llama with an RMS norm on every query and key head."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.torch.layers import RMSNorm
from quire.backends.torch.loading import LayerWeights
from quire.backends.torch.models.llama import LlamaLayer, LlamaModel
from quire.weights.spec import ModelSpec


class Qwen3Layer(LlamaLayer):
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights) -> None:
        super().__init__(spec, index, weights)
        self.num_normed = spec.num_heads + spec.num_kv_heads
        q_norm, k_norm = weights.norms["self_attn.q_norm"], weights.norms["self_attn.k_norm"]
        # One norm over unit weights, then each head's own: queries and keys stay one tensor.
        self.head_weights = torch.cat(
            (q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1))
        )  # [H + K, D]
        self.head_norm = RMSNorm(torch.ones_like(q_norm), spec.norm_eps)

    def norm_heads(self, qkv: Tensor) -> Tensor:
        qk = self.head_norm(qkv[:, : self.num_normed]) * self.head_weights
        return torch.cat((qk, qkv[:, self.num_normed :]), 1)


class Qwen3Model(LlamaModel):
    layer_type = Qwen3Layer
