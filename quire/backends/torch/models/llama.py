"""Llama, and families with its equations: Mistral, Qwen 2 (biases on q, k and v) and Phi 3 (fused in its files)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.torch.layers import Heads, Pass, RMSNorm, Rotary, product, softcap
from quire.backends.torch.loading import LayerWeights, ModelWeights
from quire.weights.spec import ModelSpec

# T tokens in the batch, H query heads, K kv heads, D head size, E hidden size, F width of the MLP, V vocabulary


class LlamaLayer:
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights, rotary: Rotary) -> None:
        self.heads = Heads(
            index=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            scale=spec.attention_scale,
            cap=spec.attention_softcap,
            window=spec.windows[index],
            rotary=rotary,
        )
        self.activation = spec.activation
        self.input_norm = RMSNorm(weights.norms["input_layernorm"], spec.norm_eps)
        self.mlp_norm = RMSNorm(weights.norms["post_attention_layernorm"], spec.norm_eps)
        self.qkv_proj, self.o_proj = weights.qkv_proj, weights.o_proj
        self.gate_up_proj, self.down_proj = weights.gate_up_proj, weights.down_proj

    def __call__(self, x: Tensor, residual: Tensor | None, step: Pass) -> tuple[Tensor, Tensor]:
        """Return the output, which the next norm adds to the residual, and the residual. x and residual: [T, E]."""
        x, residual = step.add_norm(x, residual, self.input_norm)
        x = self.attention(x, step)
        x, residual = step.add_norm(x, residual, self.mlp_norm)
        return self.mlp(x, step), residual

    def attention(self, x: Tensor, step: Pass) -> Tensor:
        out = step.attend(step.project(x, self.qkv_proj), self.heads)  # [T, (H + 2K) * D] to [T, H * D]
        return step.project_back(out, self.o_proj)

    def mlp(self, x: Tensor, step: Pass) -> Tensor:
        return step.project_back(step.gated(x, self.gate_up_proj, self.activation), self.down_proj)


class LlamaModel:
    layer_type = LlamaLayer

    def __init__(self, spec: ModelSpec, weights: ModelWeights, max_model_len: int) -> None:
        self.spec = spec
        self.embedding = weights.embedding  # [V, E]
        self.head = weights.head  # [V, E], the embedding itself if they are tied
        self.norm = RMSNorm(weights.norm, spec.norm_eps)
        device = weights.embedding.device
        rotary = local = Rotary(spec.rope, max_model_len, spec.head_size, device)
        if spec.local_rope is not None:
            local = Rotary(spec.local_rope, max_model_len, spec.head_size, device)
        self.layers = [
            self.layer_type(spec, index, layer, local if spec.windows[index] else rotary)
            for index, layer in enumerate(weights.layers)
        ]

    def forward(self, step: Pass) -> Tensor:
        """Return the hidden states [T, E] after the last norm."""
        x, residual = step.embed(self.embedding, self.spec.embedding_scale), None
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        return step.add_norm(x, residual, self.norm)[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [rows, E] to logits [rows, V] in the model's dtype, into `out` if given."""
        logits = product(hidden, self.head) if out is None else torch.mm(hidden, self.head.t(), out=out)
        if not self.spec.logit_softcap:
            return logits
        capped = softcap(logits, self.spec.logit_softcap)
        return capped if out is None else out.copy_(capped)
