"""Layers with a recurrent state in files: which layers have one, and its sizes. Qwen 3.5 and LFM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import UnsupportedModel
from quire.weights.families import Family, Recurrence
from quire.weights.fields import Fields, show
from quire.weights.spec import DeltaNetSpec, ShortConvSpec

MAX_TAPS = 64
MAX_STATE_HEADS = 4096
MAX_STATE_HEAD_SIZE = 1024
MAX_SIZE = 1 << 20

RecurrentSpec = DeltaNetSpec | ShortConvSpec
_KINDS = {Recurrence.DELTA_NET: "linear_attention", Recurrence.SHORT_CONV: "conv"}  # names in layer_types


def read_recurrent(fields: Fields, family: Family, num_layers: int) -> list[RecurrentSpec | None]:
    """Return the mixers of the layers that do not attend, None for the others, from config.json."""
    if family.recurrence is Recurrence.NONE:
        return [None] * num_layers
    if family.has_gate and not fields.flag("attn_output_gate", True):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}attn_output_gate is false: not supported")
    attends = _attends(fields, family, num_layers)
    mixer = _delta_net(fields) if family.recurrence is Recurrence.DELTA_NET else _short_conv(fields)
    return [None if one else mixer for one in attends]


def _attends(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    kind = _KINDS[family.recurrence]
    types = fields.get("layer_types")
    if types is None and family.recurrence is Recurrence.DELTA_NET:
        every = fields.whole("full_attention_interval", 1, MAX_SIZE)
        return _checked(fields, "full_attention_interval", [(i + 1) % every == 0 for i in range(num_layers)])
    if types is None:
        indices = fields.get("full_attn_idxs")
        indices = list(range(num_layers)) if indices is None else indices
        if not isinstance(indices, list) or not all(isinstance(one, int) for one in indices):
            raise fields.wrong("full_attn_idxs", "not a list of layer numbers")
        return _checked(fields, "full_attn_idxs", [i in indices for i in range(num_layers)])
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", f"not a list of {num_layers} names")
    for i, one in enumerate(types):
        if one not in ("full_attention", kind):
            raise UnsupportedModel(
                f"{fields.source}: {fields.prefix}layer_types[{i}] {show(one)} is not full_attention or {kind}"
            )
    return _checked(fields, "layer_types", [one == "full_attention" for one in types])


def _checked(fields: Fields, name: str, attends: list[bool]) -> list[bool]:
    if not any(attends):
        raise fields.wrong(name, "no layer attends")
    return attends


def _delta_net(fields: Fields) -> DeltaNetSpec:
    num_key_heads = fields.whole("linear_num_key_heads", 1, MAX_STATE_HEADS)
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=_multiple(fields, "linear_num_value_heads", num_key_heads),
        key_head_size=fields.whole("linear_key_head_dim", 1, MAX_STATE_HEAD_SIZE),
        value_head_size=fields.whole("linear_value_head_dim", 1, MAX_STATE_HEAD_SIZE),
        num_taps=fields.whole("linear_conv_kernel_dim", 2, MAX_TAPS),
    )


def _short_conv(fields: Fields) -> ShortConvSpec:
    return ShortConvSpec(fields.whole("conv_L_cache", 2, MAX_TAPS), has_bias=fields.flag("conv_bias", False))


def _multiple(fields: Fields, name: str, num_key_heads: int) -> int:
    count = fields.whole(name, 1, MAX_STATE_HEADS)
    if count % num_key_heads:
        raise fields.wrong(name, f"not a multiple of {num_key_heads} key heads")
    return count


def lfm2_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LFM2's first files under the names of the later ones."""
    old = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    return {**values, **{name: values[alias] for alias, name in old.items() if values.get(alias) is not None}}


def lfm2_ffn_size(fields: Fields, given: int) -> int:
    """Return the width of the MLP, which LFM2 derives from the width in the file."""
    if not fields.flag("block_auto_adjust_ff_dim", False):
        return given
    size = 2 * given // 3
    multiple = fields.whole("block_multiple_of", 1, MAX_SIZE)
    if fields.get("block_ffn_dim_multiplier") is not None:
        size = int(fields.real("block_ffn_dim_multiplier", 0, 1e3, above_low=True) * size)
        size = -(-size // multiple) * multiple
    return size


# GGUF


def gguf_values(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return metadata in the form of models without a recurrence: one number of KV heads, no layers of the MTP head."""
    found = dict(values)
    if family.recurrence is Recurrence.NONE:
        return found
    if "feed_forward_length" not in found and "expert_feed_forward_length" in found:
        found["feed_forward_length"] = found["expert_feed_forward_length"]
    num_layers, num_extra = found.get("block_count"), found.get("nextn_predict_layers", 0)
    if isinstance(num_layers, int) and isinstance(num_extra, int) and 0 < num_extra < num_layers:
        found["block_count"] = num_layers - num_extra
        found["nextn_predict_layers"] = 0
        for name, value in found.items():
            if isinstance(value, list) and len(value) == num_layers:
                found[name] = value[: num_layers - num_extra]
    found.pop("rope.dimension_sections", None)  # rows of an image; the positions of text are equal in all of them
    counts = found.get("attention.head_count_kv")
    if isinstance(counts, list) and all(isinstance(one, int) for one in counts):
        used = {one for one in counts if one}
        if len(used) == 1:
            found |= {"attention.head_count_kv": used.pop(), "kv_heads_by_layer": counts}
    return found


def read_gguf_recurrent(fields: Fields, family: Family, num_layers: int) -> list[RecurrentSpec | None]:
    """Return the mixers of the layers that do not attend, None for the others, from GGUF metadata."""
    if family.recurrence is Recurrence.NONE:
        return [None] * num_layers
    by_layer: Callable[[Fields, int], Sequence[bool]]
    mixer: RecurrentSpec
    if family.recurrence is Recurrence.DELTA_NET:
        mixer, by_layer = _gguf_delta_net(fields), _gguf_delta_layers
    else:
        mixer, by_layer = ShortConvSpec(fields.whole("shortconv.l_cache", 2, MAX_TAPS)), _gguf_conv_layers
    return [mixer if one else None for one in by_layer(fields, num_layers)]


def _gguf_delta_net(fields: Fields) -> DeltaNetSpec:
    num_key_heads = fields.whole("ssm.group_count", 1, MAX_STATE_HEADS)
    num_value_heads = _multiple(fields, "ssm.time_step_rank", num_key_heads)
    value_size = fields.whole("ssm.inner_size", 1, MAX_SIZE)
    if value_size % num_value_heads:
        raise fields.wrong("ssm.inner_size", f"not a multiple of {num_value_heads} heads")
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_size=fields.whole("ssm.state_size", 1, MAX_STATE_HEAD_SIZE),
        value_head_size=value_size // num_value_heads,
        num_taps=fields.whole("ssm.conv_kernel", 2, MAX_TAPS),
        is_tiled=num_value_heads != num_key_heads,
    )


def _gguf_delta_layers(fields: Fields, num_layers: int) -> Sequence[bool]:
    listed = fields.get("attention.recurrent_layers")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
            raise fields.wrong("attention.recurrent_layers", f"not {num_layers} times true or false")
        found = [bool(one) for one in listed]
    else:
        every = fields.whole("full_attention_interval", 1, MAX_SIZE, 4)
        found = [(i + 1) % every != 0 for i in range(num_layers)]
    if all(found):
        raise fields.wrong("full_attention_interval", "no layer attends")
    return found


def _gguf_conv_layers(fields: Fields, num_layers: int) -> Sequence[bool]:
    counts = fields.get("kv_heads_by_layer")
    if counts is None:  # a single number: all layers attend
        return [False] * num_layers
    if len(counts) != num_layers:
        raise fields.wrong("attention.head_count_kv", f"not a list of {num_layers} numbers")
    return [one == 0 for one in counts]
