"""A forward pass in plain PyTorch, with attention over the paged cache: the reference path.

Queries are those of one step. Keys and values, including those of this step, are read through the block tables, so
shared, forked and chunked contexts need no special case. `fused.py` calls the GPU kernels instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.batch import AttentionGroup, Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Angles, Heads, Linear, RMSNorm, Rotary, gated, softcap
from quire.weights.spec import Activation

# T tokens in the batch, B sequences of a group, Q queries of a sequence, L keys, H heads, K kv heads, G = H / K


class ReferencePass:
    def __init__(self, batch: Batch, store: KVStore) -> None:
        self._batch = batch
        self._store = store
        self._angles: dict[Rotary, Angles] = {}

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        x = F.embedding(self._batch.tokens, embedding)
        return x if scale == 1.0 else x * scale

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return norm(residual), residual

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm(x)

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        qkv = qkv.view(-1, heads.num_heads + 2 * heads.num_kv_heads, heads.head_size)  # [T, H + 2K, D]
        if heads.norm is not None:
            qkv = heads.norm(qkv)
        qkv = self._rotation(heads, qkv.dtype).rotate(qkv)
        q, kv = qkv[:, : heads.num_heads], qkv[:, heads.num_heads :]
        self._store.store(heads.index, kv, self._batch.slot_rows)
        return attend(
            q, heads.index, self._store, self._batch, scale=heads.scale, window=heads.window, cap=heads.cap
        )  # [T, H * D]

    def project(self, x: Tensor, linear: Linear) -> Tensor:
        return linear(x)

    def project_back(self, x: Tensor, linear: Linear) -> Tensor:
        return linear(x)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        return gated(gate_up(x), activation)

    def _rotation(self, heads: Heads, dtype: torch.dtype) -> Angles:
        angles = self._angles.get(heads.rotary)
        if angles is None:
            num_rotated = heads.num_heads + heads.num_kv_heads
            angles = heads.rotary.angles(self._batch.positions, dtype, num_rotated, num_rotated + heads.num_kv_heads)
            self._angles[heads.rotary] = angles
        return angles


def attend(
    queries: Tensor, layer: int, store: KVStore, batch: Batch, *, scale: float, window: int, cap: float
) -> Tensor:
    """Attend with queries [T, H, D]; return outputs [T, H * D]."""
    if len(batch.groups) == 1:
        return _attend_group(queries, layer, store, batch.groups[0], scale, window, cap)
    pieces = [
        _attend_group(queries[group.first : group.last], layer, store, group, scale, window, cap)
        for group in batch.groups
    ]
    return torch.cat(pieces)


def _attend_group(
    queries: Tensor, layer: int, store: KVStore, group: AttentionGroup, scale: float, window: int, cap: float
) -> Tensor:
    num_heads, head_size = queries.shape[1:]
    context = group.context
    context.read(layer)
    keys, values = context.keys, context.values  # [B, K, L, D] each
    mask = group.masks[window]
    if group.num_queries == 1:  # query heads of one KV head are computed as its queries, so each key is read once
        q = queries.view(group.num_seqs, store.num_kv_heads, -1, head_size)  # [B, K, G, D]
        out = _softmax_attention(q, keys, values, mask, scale, cap, is_causal=False)
        return out.reshape(group.num_seqs, num_heads * head_size)
    q = queries.transpose(0, 1)[None]  # [1, H, Q, D]
    is_causal = group.is_causal and mask is None
    out = _softmax_attention(q, keys, values, mask, scale, cap, is_causal=is_causal)
    return out[0].transpose(0, 1).reshape(group.num_queries, num_heads * head_size)


def _softmax_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float, *, is_causal: bool
) -> Tensor:
    if not cap:
        is_grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, is_causal=is_causal, enable_gqa=is_grouped
        )
    num_groups = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_groups, 1), values.repeat_interleave(num_groups, 1)
    scores = softcap(q @ keys.transpose(-1, -2) * scale, cap)
    if is_causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), device=q.device, dtype=q.dtype).triu_(1)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ values
