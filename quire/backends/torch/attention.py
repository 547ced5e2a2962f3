"""A forward pass in plain PyTorch, with attention over the paged cache: the reference path.

Queries are those of one step. Keys and values, including those of this step, are read through the block tables, so
shared, forked and chunked contexts need no special case. `fused.py` calls the GPU kernels instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.batch import AttentionGroup, Batch, MaskKey
from quire.backends.torch.experts import Experts
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Angles, Heads, Inputs, Linear, Outputs, RMSNorm, Rotary, plain, softcap
from quire.backends.torch.recurrence import DeltaNet, ShortConv, delta_net, short_conv
from quire.weights.spec import AttentionSpec

# T tokens in the batch, B sequences of a group, Q queries of a sequence, L keys, H heads, K kv heads, G = H / K


class ReferencePass:
    is_graph = False

    def __init__(self, batch: Batch, store: KVStore) -> None:
        self._batch = batch
        self._store = store
        self._angles: dict[tuple[Rotary, int, int, bool], Angles] = {}

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        x = F.embedding(self._batch.tokens, embedding)
        return x if scale == 1.0 else x * scale

    def token_ids(self) -> Tensor:
        return self._batch.tokens

    def positions(self) -> Tensor:
        return self._batch.positions

    def add_norm(
        self,
        x: Outputs,
        residual: Tensor | None,
        norm: RMSNorm | None,
        scale: float = 1.0,
        total_scale: float = 1.0,
        reader: Linear | None = None,  # noqa: ARG002
    ) -> tuple[Inputs, Tensor]:
        x = plain(x)
        if residual is not None:
            x = x + residual if scale == 1 else torch.add(residual, x * scale)
            x = x if total_scale == 1 else x * total_scale
        return x if norm is None else norm(x), x

    def norm(self, x: Outputs, norm: RMSNorm) -> Tensor:
        return norm(plain(x))

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        if heads.spec.has_gate:
            gates = qkv[:, heads.spec.qkv_size :].sigmoid()
            return self._attend(qkv[:, : heads.spec.qkv_size], heads) * gates
        return self._attend(qkv, heads)

    def _attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        qkv = qkv.reshape(len(qkv), -1, heads.spec.head_size)  # [T, H + 2K, D], or [T, H, D]
        if heads.norm is not None:
            qkv = heads.norm(qkv)
        if heads.rotary is not None:
            qkv = heads.rotary.rotate(qkv, self._rotation(heads.spec, heads.rotary, qkv))
        q, kv = qkv[:, : heads.spec.num_heads], qkv[:, heads.spec.num_heads :]
        if heads.query_factors is not None:
            q = q * heads.query_factors[self._batch.positions].to(q.dtype)[:, None, None]
        if not heads.spec.is_shared:
            self._store.store(heads.index, kv, self._batch.slot_rows)
        return attend(q, self._store, self._batch, heads)  # [T, H * D]

    def route(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        return experts.reference(x, logits)

    def delta_net(self, mixed: Tensor, net: DeltaNet) -> Tensor:
        return delta_net(mixed, net, self._store, self._batch.segments)

    def short_conv(self, bcx: Tensor, conv: ShortConv) -> Tensor:
        return short_conv(bcx, conv, self._store, self._batch.segments)

    def _rotation(self, spec: AttentionSpec, rotary: Rotary, qkv: Tensor) -> Angles:
        key = (rotary, spec.num_heads, spec.num_kv_heads, spec.is_shared)
        angles = self._angles.get(key)
        if angles is None:
            num_rotated = spec.num_heads + (0 if spec.is_shared else spec.num_kv_heads)
            angles = rotary.angles(self._batch.positions, qkv.dtype, num_rotated, qkv.shape[1])
            self._angles[key] = angles
        return angles


def attend(queries: Tensor, store: KVStore, batch: Batch, heads: Heads) -> Tensor:
    """Attend with queries [T, H, D]; return outputs [T, H * D]."""
    if len(batch.groups) == 1:
        return _attend_group(queries, store, batch.groups[0], heads)
    pieces = [_attend_group(queries[group.first : group.last], store, group, heads) for group in batch.groups]
    return torch.cat(pieces)


def _attend_group(queries: Tensor, store: KVStore, group: AttentionGroup, heads: Heads) -> Tensor:
    num_heads, head_size = queries.shape[1:]
    shape = store.shapes[heads.index]
    context = group.contexts[shape]
    context.read(heads.index)
    keys, values = context.keys, context.values  # [B, K, L, D] each
    mask = group.masks[MaskKey(shape.window, heads.spec.window)]
    if group.num_queries == 1:  # query heads of one KV head are computed as its queries, so each key is read once
        q = queries.reshape(group.num_seqs, heads.spec.num_kv_heads, -1, head_size)  # [B, K, G, D]
        sinks = None if heads.sinks is None else heads.sinks.view(1, heads.spec.num_kv_heads, -1, 1)
        out = _softmax_attention(q, keys, values, mask, heads, sinks, is_causal=False)
        return out.reshape(group.num_seqs, num_heads * head_size)
    q = queries.transpose(0, 1)[None]  # [1, H, Q, D]
    is_causal = group.is_causal and mask is None
    sinks = None if heads.sinks is None else heads.sinks.view(1, num_heads, 1, 1)
    out = _softmax_attention(q, keys, values, mask, heads, sinks, is_causal=is_causal)
    return out[0].transpose(0, 1).reshape(group.num_queries, num_heads * head_size)


def _softmax_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, heads: Heads, sinks: Tensor | None, *, is_causal: bool
) -> Tensor:
    if not heads.spec.softcap and sinks is None:
        is_grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=heads.spec.scale, is_causal=is_causal, enable_gqa=is_grouped
        )
    num_groups = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_groups, 1), values.repeat_interleave(num_groups, 1)
    scores = q @ keys.transpose(-1, -2) * heads.spec.scale
    if heads.spec.softcap:
        scores = softcap(scores, heads.spec.softcap)
    if is_causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), device=q.device, dtype=q.dtype).triu_(1)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, -1) @ values
    whole = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(whole, -1)[..., :-1] @ values
