"""Attention of a flat pass over the paged cache, in place of the function that mlx-lm's models call.

The rows of a pass are divided into groups: decodes of similar length, whose contexts are gathered and padded together,
and prompts, one by one. On a GPU, `paged_decode.py` reads the blocks of decodes without a gather where that is faster.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from quire.backends.mlx.batch import Group
from quire.backends.mlx.paged_cache import LayerCache, PagedContext, PagedMask, Unpageable

# T tokens of the pass, B sequences of a group, Q queries of a sequence, H heads, K KV heads, D head size


_dense = base.scaled_dot_product_attention


def install_attention() -> None:
    """Make mlx-lm's models, also those already imported, call `attend` instead of their own function."""
    base.scaled_dot_product_attention = attend
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "scaled_dot_product_attention", None) is _dense:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]


def attend(
    queries: mx.array,
    keys: object,
    values: object,
    cache: object,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with queries [T, H, 1, D]. Arguments that are not quire's go to mlx-lm's own function."""
    if not isinstance(keys, PagedContext):
        return _dense(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if not (mask is None or isinstance(mask, PagedMask)):
        raise Unpageable(f"the model attends with a mask of its own: {type(mask).__name__}")
    layer = keys.layer
    layer.num_query_heads = queries.shape[1]
    window = (mask.window if mask is not None else 0) or layer.shape.window
    outputs = [
        _attend_group(queries[group.first : group.last], layer, group, scale, window, sinks)
        for group in layer.running.groups
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_group(
    queries: mx.array, layer: LayerCache, group: Group, scale: float, window: int, sinks: mx.array | None
) -> mx.array:
    kernel = layer.kernel
    if group.num_queries == 1 and kernel is not None:
        num_tokens = min(group.num_tokens, window or group.num_tokens)
        pools = layer.keys_pool, layer.values_pool
        if kernel.is_used(queries, *pools, group.num_seqs, num_tokens):
            tables = group.view(0).tables
            rows = kernel(
                queries[:, :, 0], *pools, tables, group.lengths, scale=scale, window=window, sinks=sinks
            )  # [B, H, D]
            return rows[:, :, None]
    view = group.view(window)
    keys, values = layer.read(view)
    if group.num_queries == 1:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=view.mask, sinks=sinks
        )  # [B, H, 1, D]
    together = queries[:, :, 0].swapaxes(0, 1)[None]  # [1, H, Q, D]
    out = mx.fast.scaled_dot_product_attention(together, keys, values, scale=scale, mask=view.mask, sinks=sinks)
    return out[0].swapaxes(0, 1)[:, :, None]  # [Q, H, 1, D]
