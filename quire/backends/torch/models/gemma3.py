"""Gemma 3 (text): norms before and after each half of a layer, windows on most layers, gelu, scaled embeddings."""

from __future__ import annotations

from torch import Tensor

from quire.backends.torch.layers import Pass, RMSNorm, Rotary
from quire.backends.torch.loading import LayerWeights
from quire.backends.torch.models.llama import LlamaModel
from quire.backends.torch.models.qwen3 import Qwen3Layer
from quire.weights.spec import ModelSpec


class Gemma3Layer(Qwen3Layer):
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights, rotary: Rotary) -> None:
        super().__init__(spec, index, weights, rotary)
        self.mlp_norm = RMSNorm(weights.norms["pre_feedforward_layernorm"], spec.norm_eps)
        self.post_attention_norm = RMSNorm(weights.norms["post_attention_layernorm"], spec.norm_eps)
        self.post_mlp_norm = RMSNorm(weights.norms["post_feedforward_layernorm"], spec.norm_eps)

    def __call__(self, x: Tensor, residual: Tensor | None, step: Pass) -> tuple[Tensor, Tensor]:
        x, residual = step.add_norm(x, residual, self.input_norm)
        x = step.norm(self.attention(x, step), self.post_attention_norm)
        x, residual = step.add_norm(x, residual, self.mlp_norm)
        return step.norm(self.mlp(x, step), self.post_mlp_norm), residual


class Gemma3Model(LlamaModel):
    layer_type = Gemma3Layer
