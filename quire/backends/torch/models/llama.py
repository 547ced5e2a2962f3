"""Llama and all whose equations are Llama's: Mistral, Qwen 2 (biases on q, k and v) and Phi 3 (fused in its files)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.attention import attend
from quire.backends.torch.batch import Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Angles, RMSNorm, Rotary, gated, product, softcap
from quire.backends.torch.loading import LayerWeights, ModelWeights
from quire.weights.spec import ModelSpec

# T tokens in the batch, H query heads, K kv heads, D head size, E hidden size, F width of the MLP, V vocabulary


class LlamaLayer:
    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights) -> None:
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self.scale, self.cap, self.window = spec.attention_scale, spec.attention_softcap, spec.windows[index]
        self.activation = spec.activation
        self.input_norm = RMSNorm(weights.norms["input_layernorm"], spec.norm_eps)
        self.mlp_norm = RMSNorm(weights.norms["post_attention_layernorm"], spec.norm_eps)
        self.qkv_proj, self.o_proj = weights.qkv_proj, weights.o_proj
        self.gate_up_proj, self.down_proj = weights.gate_up_proj, weights.down_proj

    def __call__(self, x: Tensor, angles: Angles, batch: Batch, store: KVStore) -> Tensor:
        x = x + self.attention(self.input_norm(x), angles, batch, store)  # [T, E]
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: Tensor, angles: Angles, batch: Batch, store: KVStore) -> Tensor:
        qkv = self.qkv_proj(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_size)  # [T, H + 2K, D]
        qkv = angles.rotate(self.norm_heads(qkv))
        q, kv = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        store.store(self.index, kv, batch.slot_rows)
        out = attend(q, self.index, store, batch, scale=self.scale, window=self.window, cap=self.cap)  # [T, H * D]
        return self.o_proj(out)

    def norm_heads(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [T, H + 2K, D] before rotation: Qwen 3 and Gemma 3 normalise the first two."""
        return qkv

    def mlp(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_up_proj(x), self.activation))


class LlamaModel:
    layer_type = LlamaLayer

    def __init__(self, spec: ModelSpec, weights: ModelWeights, max_context: int) -> None:
        self.spec = spec
        self.embedding = weights.embedding  # [V, E]
        self.head = weights.head  # [V, E], the embedding itself where they are tied
        self.norm = RMSNorm(weights.norm, spec.norm_eps)
        self.layers = [self.layer_type(spec, index, layer) for index, layer in enumerate(weights.layers)]
        device = weights.embedding.device
        self.rotary = Rotary(spec.rope, max_context, spec.head_size, device)
        self.local_rotary = self.rotary
        if spec.local_rope is not None:
            self.local_rotary = Rotary(spec.local_rope, max_context, spec.head_size, device)

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """The hidden states [T, E] after the last norm."""
        x = F.embedding(batch.tokens, self.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        num_rotated = self.spec.num_heads + self.spec.num_kv_heads
        heads = (num_rotated, num_rotated + self.spec.num_kv_heads)
        angles = local = self.rotary.angles(batch.positions, x.dtype, *heads)
        if self.local_rotary is not self.rotary:
            local = self.local_rotary.angles(batch.positions, x.dtype, *heads)
        for layer in self.layers:
            x = layer(x, local if layer.window else angles, batch, store)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, E] to [rows, V], in fp32 whatever the model runs in."""
        logits = product(hidden, self.head).float()
        return softcap(logits, self.spec.logit_softcap) if self.spec.logit_softcap else logits
