"""An mlx-lm model over the paged cache.

mlx-lm has more than 100 architectures, and a model file may use its cache in any way. When a model is loaded,
`adapt_model` therefore runs it on a few tokens in quire's passes and with mlx-lm's own cache, and uses the fastest kind
of pass that gives the same logits. If no kind of pass gives them, the model is refused.

Attention of a flat pass replaces the function that mlx-lm's models call. The rows of a pass are divided into groups:
decodes of similar length, whose contexts are gathered and padded together, and prompts, one by one. On a GPU,
`paged_decode.py` reads the blocks of decodes without a gather where that is faster.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from quire.backends import support
from quire.backends.mlx.batch import BatchMode, Group, Pass, build_passes
from quire.backends.mlx.paged_cache import KVStore, LayerCache, LayerShape, PagedContext, PagedMask, Unpageable
from quire.backends.support import describe_error
from quire.errors import UnsupportedModel

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
    keys_pool, values_pool = layer.pools
    is_decode = group.num_queries == 1
    if is_decode and kernel is not None and group.num_seqs >= kernel.least_rows and queries.dtype == keys_pool.dtype:
        arrays = queries[:, :, 0], keys_pool, values_pool, group.view(0).tables, group.lengths
        return kernel.attend(*arrays, scale=scale, window=window, sinks=sinks)[:, :, None]  # [B, H, 1, D]
    view = group.view(window)
    keys, values = (heads[:, :, : view.num_keys] for heads in layer.read(view.tables))
    if not is_decode:
        queries = queries.swapaxes(0, 2)  # [1, H, Q, D]
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=view.mask, sinks=sinks)
    return out if is_decode else out.swapaxes(0, 2)


log = logging.getLogger(__name__)

# T tokens of a pass, R rows that need logits, E hidden size, V vocabulary

BODIES = ("model", "transformer", "backbone")  # names of the part of a model that ends with its last norm


def _find_body(model: Module) -> Module | None:
    owner: Any = model
    while isinstance(getattr(owner, "language_model", None), Module):
        owner = owner.language_model
    for name in BODIES:
        body = getattr(owner, name, None)
        if isinstance(body, Module):
            return body
    return None


class PagedModel:
    """A model that runs passes over the pools of a store, in place of mlx-lm's own cache.

    mlx-lm's models end with the head, over every row they computed. To compute logits of chosen rows only, the class of
    the model's body is replaced by a subclass that passes on only these rows of its result.
    """

    def __init__(self, model: Module, layout: CacheLayout) -> None:
        self.model = model
        self.mode = BatchMode.FLAT
        self._layout = layout
        self._rows: mx.array | None = None  # None: all
        self._hidden: mx.array | None = None  # [T, E]: the body's last result
        self._replayed: mx.array | None = None
        body = _find_body(model)
        self._has_body = body is not None
        if body is not None:
            self._attach(body)

    def forward(self, step: Pass, store: KVStore, rows: Sequence[int]) -> tuple[mx.array | None, mx.array]:
        """Return the logits [R, V] of `rows`, and the hidden states [T, E], or all logits of a model without a body.

        Nothing is computed before the results are evaluated.
        """
        # A step that only reads prompts needs no logits. One row is computed anyway: a head may not accept no rows.
        self._rows = mx.array(list(rows) or [0], dtype=mx.int32)
        store.begin(step)
        try:
            logits = self.model(step.tokens, cache=self._layout.arrange(store.layers))
        finally:
            store.begin(None)
        logits = logits.reshape(-1, logits.shape[-1])
        if not self._has_body:
            return (logits[self._rows] if rows else None), logits
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return (logits if rows else None), hidden

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits [R, V] of what `forward` returned of some rows."""
        if not self._has_body:
            return hidden
        self._replayed = hidden[:, None]
        try:
            logits: mx.array = self.model(mx.zeros((len(hidden), 1), mx.int32))
        finally:
            self._replayed = None
        return logits.reshape(len(hidden), -1)

    def close(self) -> None:
        """Free the weights."""
        del self.model

    def _attach(self, body: Module) -> None:
        base: Any = type(body)
        paged = self

        class SelectingBody(base):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                if paged._replayed is not None:
                    return paged._replayed
                return paged._select(super().__call__(*args, **kwargs))

        body.__class__ = SelectingBody

    def _select(self, hidden: Any) -> Any:
        if not isinstance(hidden, mx.array):  # not the hidden states alone: logits are selected after the head
            self._has_body = False
            return hidden
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        return hidden if self._rows is None else self._hidden[self._rows][:, None]


class CacheLayout:
    """How mlx-lm nests a model's caches: one per layer, and in some models a list of them per layer."""

    def __init__(self, caches: Sequence[Any], source: str) -> None:
        self._nested = [list(cache.caches) if isinstance(cache, CacheList) else cache for cache in caches]
        self.caches = [cache for entry in self._nested for cache in (entry if isinstance(entry, list) else [entry])]
        for cache in self.caches:
            if type(cache) not in (KVCache, RotatingKVCache):
                raise UnsupportedModel(
                    f"{source}: its layers keep a {type(cache).__name__}, which the mlx backend cannot divide into"
                    " blocks of tokens: models with a recurrent state or chunked attention do not run yet"
                )
            if getattr(cache, "keep", 0):
                raise UnsupportedModel(f"{source}: its windows keep their first {cache.keep} tokens: not supported")

    def arrange(self, layers: Sequence[LayerCache]) -> list[Any]:
        remaining = iter(layers)
        return [
            [next(remaining) for _ in entry] if isinstance(entry, list) else next(remaining) for entry in self._nested
        ]


def _shape(cache: Any) -> LayerShape:
    """Return what a layer stores, from a cache that has been used."""
    window = cache.max_size if isinstance(cache, RotatingKVCache) else 0
    if cache.keys is None:  # the layer uses the keys of another one
        return LayerShape(1, 1, 1, mx.float32, window, is_unused=True)
    keys, values = cache.keys, cache.values
    return LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, window)


def adapt_model(model: Module, vocab_size: int, source: str) -> tuple[PagedModel, list[LayerShape], int]:
    """Find out how a model can run over the paged cache. Raises UnsupportedModel if it cannot.

    `source`: the model's path, for messages. Returns the model, what its layers store, and the width of its logits.
    """
    install_attention()
    layout = CacheLayout(make_prompt_cache(model), source)
    prompts = support.make_prompts(vocab_size)
    own = [make_prompt_cache(model) for _ in prompts]
    expected = [
        model(mx.array([prompt]), cache=cache)[0].astype(mx.float32) for prompt, cache in zip(prompts, own, strict=True)
    ]
    mx.eval(expected)
    shapes = [_shape(cache) for cache in CacheLayout(own[0], source).caches]
    paged = PagedModel(model, layout)
    problems: list[str] = []
    for mode in BatchMode:
        paged.mode = mode
        store = KVStore(shapes, support.NUM_BLOCKS, support.BLOCK_SIZE)
        problem = _try_mode(paged, store, prompts, expected)
        if problem is None:
            if mode is not BatchMode.FLAT:
                log.warning("%s: steps need several forward passes, which is slower: %s", source, problems[0])
            found = [replace(layer.shape, num_query_heads=layer.num_query_heads) for layer in store.layers]
            return paged, found, int(expected[0].shape[-1])
        problems.append(problem)
    raise UnsupportedModel(f"{source}: does not run over quire's paged cache: {problems[-1]}")


def _try_mode(
    paged: PagedModel, store: KVStore, prompts: Sequence[list[int]], expected: Sequence[mx.array]
) -> str | None:
    """Run the steps of the trial. Returns what is wrong."""
    errors: list[float] = []
    try:
        for slices in support.make_steps(prompts):
            for step in build_passes(slices, store.block_size, store.max_gathered, mx.zeros(2, mx.int32), paged.mode):
                logits, _ = paged.forward(step, store, list(step.last_rows.values()))
                assert logits is not None
                mx.eval(logits, store.arrays)
                for row, index in enumerate(step.last_rows):
                    errors.append(_relative_error(logits[row], expected[index][support.last_position(slices[index])]))
    except Exception as problem:  # a model file may do anything with its cache
        return describe_error(problem, "its code uses its cache in another way")
    error = support.find_error(errors, is_exact=store.layers[0].shape.dtype == mx.float32)
    return None if error is None else f"logits of {paged.mode} passes differ by {error:.2g} of their spread"


def _relative_error(logits: mx.array, expected: mx.array) -> float:
    difference = mx.sqrt(mx.mean(mx.square(logits.astype(mx.float32) - expected)))
    relative: Any = (difference / mx.maximum(mx.std(expected), 1e-6)).item()
    return float(relative)
