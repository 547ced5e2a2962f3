"""The layers of Gemma 4, whose shapes differ by layer, from config.json and from GGUF metadata.

Layers with a window and layers with full attention have their own head sizes and numbers of KV heads. The last layers
of the small models read the keys and values of an earlier layer, and have wider MLPs. The text of all models is the
same architecture; towers for images and sound are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModel
from quire.weights.checkpoint import TensorInfo
from quire.weights.fields import Fields, show
from quire.weights.rope import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_FACTOR, MIN_THETA
from quire.weights.spec import Activation, AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, QKNorm, RopeSpec

MAX_PLE_SIZE = 8192
MAX_HEAD_SIZE = 1024
MAX_HEADS = 4096
FULL_EVERY = 6  # every sixth layer has full attention, if layer_types is not given

_OVERRIDES = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Gemma4Layers:
    """What both formats say about the layers. Lists have one entry per layer."""

    num_heads: int
    head_sizes: list[int]
    num_kv_heads: list[int]
    ffn_sizes: list[int]
    windows: list[int]  # 0: full attention
    has_values: list[bool]  # False: values are the raw keys
    num_shared: int  # last layers that read the keys and values of an earlier layer
    ple_size: int
    rope: RopeSpec  # of the layers with full attention
    local_rope: RopeSpec
    experts: ExpertsSpec | None

    def specs(self, activation: Activation) -> tuple[LayerSpec, ...]:
        return tuple(self._spec(index, activation) for index in range(len(self.windows)))

    def _spec(self, index: int, activation: Activation) -> LayerSpec:
        source = self._source(index)
        attention = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads[index],
            head_size=self.head_sizes[index],
            scale=1.0,  # queries and keys are normed
            rope=self.local_rope if self.windows[index] else self.rope,
            window=self.windows[index],
            qk_norm=QKNorm.HEAD,
            has_value_norm=source is None,
            is_key_value=source is None and not self.has_values[index],
            shared_with=source,
        )
        return LayerSpec(
            mixer=attention,
            mlp=MlpSpec(self.ffn_sizes[index], activation),
            has_post_norms=True,
            parallel_experts=self.experts,
            has_output_scale=True,
            ple_size=self.ple_size,
        )

    def _source(self, index: int) -> int | None:
        """Return the last layer of the same kind that has keys and values, if this layer has none."""
        first = len(self.windows) - self.num_shared
        if index < first:
            return None
        return max(i for i in range(first) if self.windows[i] == self.windows[index])


def has_sources(windows: list[int], num_shared: int) -> bool:
    """Return whether each kind among the last layers has a layer before them."""
    first = len(windows) - num_shared
    return set(windows[first:]) <= set(windows[:first])


# config.json


def from_config(
    fields: Fields, *, num_layers: int, num_heads: int, num_kv_heads: int, head_size: int, ffn_size: int,
    experts: ExpertsSpec | None,
) -> Gemma4Layers:  # fmt: skip
    is_full = _full_layers(fields, num_layers)
    window = fields.whole("sliding_window", 1, MAX_CONTEXT)
    windows = [0 if full else window for full in is_full]
    num_shared = fields.whole("num_kv_shared_layers", 0, num_layers - 1, 0)
    if not has_sources(windows, num_shared):
        raise fields.wrong("num_kv_shared_layers", "no layer of the same kind comes before")
    is_wide = fields.flag("use_double_wide_mlp", False)
    head_sizes, kv_heads = _shapes(fields, is_full, head_size, num_kv_heads)
    if any(num_heads % one for one in kv_heads):
        raise fields.wrong("num_attention_heads", f"not a multiple of the numbers of KV heads {sorted(set(kv_heads))}")
    ropes = fields.table("rope_parameters")
    full_size = next((size for size, full in zip(head_sizes, is_full, strict=True) if full), head_size)
    return Gemma4Layers(
        num_heads=num_heads,
        head_sizes=head_sizes,
        num_kv_heads=kv_heads,
        ffn_sizes=[ffn_size * (2 if is_wide and i >= num_layers - num_shared else 1) for i in range(num_layers)],
        windows=windows,
        has_values=[not full or not fields.flag("attention_k_eq_v", False) for full in is_full],
        num_shared=num_shared,
        ple_size=_ple_size(fields),
        rope=_rope(ropes.table("full_attention"), 1e6, full_size),
        local_rope=_rope(ropes.table("sliding_attention"), 1e4, head_size),
        experts=experts,
    )


def refuse_settings(fields: Fields) -> None:
    """Raise for settings that change the equations. Bidirectional attention among the tokens of an image does not."""
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModel(
            f"{fields.source}: use_bidirectional_attention is {show(fields.get('use_bidirectional_attention'))}: "
            "only causal models are supported"
        )
    if fields.flag("attention_bias", False):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}attention_bias is true: not supported for Gemma 4")


def _full_layers(fields: Fields, num_layers: int) -> list[bool]:
    types = fields.get("layer_types")
    if types is None:
        types = ["sliding_attention" if (i + 1) % FULL_EVERY else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", f"not a list of {num_layers} names")
    unknown = [one for one in types if one not in ("sliding_attention", "full_attention")]
    if unknown:
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}layer_types has {show(unknown[0])}: not supported")
    return [one == "full_attention" for one in types[:-1]] + [True]  # transformers forces the last


def _shapes(fields: Fields, is_full: list[bool], head_size: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """Return the size of a head and the number of KV heads of each layer. Newer files list what differs by layer."""
    listed = fields.table("per_layer_config")
    if "per_layer_config" in fields:
        for name, entry in listed.values.items():
            if not isinstance(entry, dict) or any(field not in _OVERRIDES for field in entry):
                raise listed.wrong(name, f"not an object with {' and '.join(_OVERRIDES)} only")
        tables = [listed.table(str(i)) for i in range(len(is_full))]
    else:
        values = {"head_dim": fields.whole("global_head_dim", 2, MAX_HEAD_SIZE, 512)}
        if fields.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in fields:
            values["num_key_value_heads"] = fields.whole("num_global_key_value_heads", 1, MAX_HEADS)
        whole, none = Fields(fields.source, values, fields.prefix), Fields(fields.source, {}, fields.prefix)
        tables = [whole if full else none for full in is_full]
    sizes = [table.whole("head_dim", 2, MAX_HEAD_SIZE, head_size) for table in tables]
    if any(size % 2 for size in sizes):
        raise fields.wrong("head_dim", "heads cannot be rotated: the size of one is not even")
    by_kind = {(full, size) for full, size in zip(is_full, sizes, strict=True)}
    if len(by_kind) > len(set(is_full)):
        raise fields.wrong("per_layer_config", "layers of the same kind have different head sizes: not supported")
    return sizes, [table.whole("num_key_value_heads", 1, MAX_HEADS, num_kv_heads) for table in tables]


def _ple_size(fields: Fields) -> int:
    size = fields.find_whole("hidden_size_per_layer_input", 0, MAX_PLE_SIZE) or 0
    if size and fields.get("vocab_size_per_layer_input") not in (None, fields.get("vocab_size")):
        raise fields.wrong("vocab_size_per_layer_input", f"not vocab_size {show(fields.get('vocab_size'))}")
    return size


def _rope(scaling: Fields, default_theta: float, head_size: int) -> RopeSpec:
    theta = scaling.real("rope_theta", MIN_THETA, MAX_THETA, default_theta)
    kind = scaling.get("rope_type") or "default"
    if kind == "default":
        return RopeSpec(theta, head_size)
    if kind != "proportional":
        raise UnsupportedModel(f"{scaling.source}: {scaling.prefix}rope_type {show(kind)} is not supported for Gemma 4")
    part = scaling.real("partial_rotary_factor", 0, 1, 1.0)
    factor = scaling.real("factor", MIN_FACTOR, MAX_FACTOR, 1.0)
    return proportional_rope(theta, head_size, int(part * head_size // 2), factor)


def proportional_rope(theta: float, head_size: int, num_rotated: int, factor: float = 1.0) -> RopeSpec:
    """Return a rope that turns the first pairs of a head with their usual frequencies, and the others not at all."""
    return RopeSpec(theta, head_size, (factor,) * num_rotated + (math.inf,) * (head_size // 2 - num_rotated))


# GGUF

_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def first_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that are listed by layer as those of the first layer, for the general checks."""
    listed = {name: values[name] for name in _BY_LAYER if isinstance(values.get(name), list)}
    return {name: sizes[0] for name, sizes in listed.items() if sizes}


def from_gguf(
    fields: Fields,
    by_layer: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    read_floats: Callable[[str, int], list[float] | None],
    *,
    num_layers: int,
    num_heads: int,
    experts: ExpertsSpec | None,
) -> Gemma4Layers:
    """Read llama.cpp's keys. `by_layer` holds the values of sizes that may be lists."""
    window = fields.whole("attention.sliding_window", 1, MAX_CONTEXT)
    pattern = fields.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
        raise fields.wrong("attention.sliding_window_pattern", f"not {num_layers} times true or false")
    windows = [window if one else 0 for one in pattern]
    num_shared = fields.whole("attention.shared_kv_layers", 0, num_layers - 1, 0)
    if not has_sources(windows, num_shared):
        raise fields.wrong("attention.shared_kv_layers", "no layer of the same kind comes before")
    full_size = fields.whole("attention.key_length", 2, MAX_HEAD_SIZE)
    local_size = fields.whole("attention.key_length_swa", 2, MAX_HEAD_SIZE, full_size)
    if full_size % 2 or local_size % 2:
        raise fields.wrong("attention.key_length", "heads cannot be rotated: the size is not even")
    for name, size in (("rope.dimension_count", full_size), ("rope.dimension_count_swa", local_size)):
        if fields.whole(name, 2, MAX_HEAD_SIZE, size) != size:
            raise fields.wrong(name, f"not the size of a head, {size}")
    kv_heads = _sizes(fields, by_layer, "attention.head_count_kv", num_layers)
    if any(num_heads % one for one in kv_heads):
        raise fields.wrong("attention.head_count", f"not a multiple of the numbers of KV heads {sorted(set(kv_heads))}")
    return Gemma4Layers(
        num_heads=num_heads,
        head_sizes=[local_size if one else full_size for one in pattern],
        num_kv_heads=kv_heads,
        ffn_sizes=_sizes(fields, by_layer, "feed_forward_length", num_layers),
        windows=windows,
        has_values=[f"blk.{i}.attn_v.weight" in tensors for i in range(num_layers)],
        num_shared=num_shared,
        ple_size=fields.whole("embedding_length_per_layer_input", 0, MAX_PLE_SIZE, 0),
        rope=_measured_rope(fields, read_floats, full_size),
        local_rope=RopeSpec(fields.real("rope.freq_base_swa", MIN_THETA, MAX_THETA, 1e4), local_size),
        experts=experts,
    )


def _sizes(fields: Fields, by_layer: Mapping[str, Any], name: str, num_layers: int) -> list[int]:
    value = by_layer.get(name)
    listed = value if isinstance(value, list) else [value] * num_layers
    if len(listed) != num_layers:
        raise fields.wrong(name, f"not a list of {num_layers} numbers")
    items = Fields(fields.source, {f"{name}[{i}]": one for i, one in enumerate(listed)}, fields.prefix)
    return [items.whole(item, 1, 1 << 20) for item in items.values]


def _measured_rope(fields: Fields, read_floats: Callable[[str, int], list[float] | None], head_size: int) -> RopeSpec:
    """Return the rope of full attention. Pairs that do not turn have a huge divisor in the file."""
    theta = fields.real("rope.freq_base", MIN_THETA, MAX_THETA, 1e6)
    factors = read_floats("rope_freqs.weight", head_size // 2)
    if factors is None:
        return RopeSpec(theta, head_size)
    checked = Fields(fields.source, {"rope_freqs.weight": [min(one, MAX_FACTOR) for one in factors]})
    values = checked.reals("rope_freqs.weight", head_size // 2, MIN_FACTOR, MAX_FACTOR)
    return RopeSpec(theta, head_size, tuple(math.inf if one == MAX_FACTOR else one for one in values))
