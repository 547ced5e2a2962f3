"""Attention over the paged cache: the reference path, in plain PyTorch.

Queries are those of one step; keys and values are read back through the block tables, this step's own included, so a
shared, forked or chunked context takes the same way as any other. The CUDA path has the same signature.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.batch import AttentionGroup, Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import softcap

# T tokens in the batch, B sequences of a group, Q queries of a sequence, L keys, H heads, K kv heads, G heads a kv head


def attend(
    queries: Tensor, layer: int, store: KVStore, batch: Batch, *, scale: float, window: int, cap: float
) -> Tensor:
    """queries [T, H, D] to outputs [T, H * D]."""
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
    if group.num_queries == 1:  # the heads of a group are the queries of their KV head: no key is read twice
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
