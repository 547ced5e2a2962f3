"""Attention of a flat pass over the paged cache, in place of the function that mlx-lm's models call.

The rows of a pass are divided into groups: decodes of similar length, whose contexts are gathered and padded together,
and prompts, one by one. On a GPU, `paged_decode.py` reads the blocks of decodes without a gather where that is faster.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base

from quire.backends.mlx.batch import Group
from quire.backends.mlx.paged_cache import LayerCache, PagedContext, PagedMask, Unpageable
from quire.backends.mlx.paged_decode import Attention

# T tokens of the pass, B sequences of a group, Q queries of a sequence, H heads, K KV heads, D head size


class DecodeKernel(Attention, Protocol):
    """Attention of one query per sequence, which reads the pools through block tables."""

    def is_used(self, queries: mx.array, keys: mx.array, values: mx.array, batch: int, num_tokens: int) -> bool: ...


_dense = base.scaled_dot_product_attention
_kernel: DecodeKernel | None = None


def install_attention() -> None:
    """Make mlx-lm's models, also those already imported, call `attend` instead of their own function."""
    base.scaled_dot_product_attention = attend
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "scaled_dot_product_attention", None) is _dense:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]


def use_kernel(kernel: DecodeKernel | None) -> None:
    """Use this kernel for decodes from now on. The caller has checked it."""
    global _kernel  # noqa: PLW0603 - models call a plain function, so there is one kernel per process
    _kernel = kernel


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
    window = (mask.window if mask is not None else 0) or layer.shape.window
    outputs = [
        _attend_group(queries[group.first : group.last], layer, group, scale, window, sinks)
        for group in layer.running.groups
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_group(
    queries: mx.array, layer: LayerCache, group: Group, scale: float, window: int, sinks: mx.array | None
) -> mx.array:
    if group.num_queries == 1 and _kernel is not None:
        num_tokens = min(group.num_tokens, window or group.num_tokens)
        pools = layer.keys_pool, layer.values_pool
        if _kernel.is_used(queries, *pools, group.num_seqs, num_tokens):
            tables = group.view(0).tables
            rows = _kernel(
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
