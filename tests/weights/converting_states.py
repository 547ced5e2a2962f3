"""What llama.cpp's converter does to models whose layers have a state: Qwen 3.5 and LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DELTA_NETS = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
SHORT_CONVS = (gguf.MODEL_ARCH.LFM2, gguf.MODEL_ARCH.LFM2MOE)


def delta_net_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = fields["rope_parameters"]
    keys: dict[str, Any] = {
        "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
        "ssm.state_size": fields["linear_key_head_dim"],
        "ssm.group_count": fields["linear_num_key_heads"],
        "ssm.time_step_rank": fields["linear_num_value_heads"],
        "ssm.inner_size": fields["linear_value_head_dim"] * fields["linear_num_value_heads"],
        "full_attention_interval": fields["layer_types"].index("full_attention") + 1,
        "rope.dimension_count": int(fields["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    if "moe_intermediate_size" in fields:
        keys["expert_feed_forward_length"] = fields["moe_intermediate_size"]
        keys["expert_shared_feed_forward_length"] = fields["shared_expert_intermediate_size"]
    return keys


def short_conv_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    count = fields["num_key_value_heads"]
    keys: dict[str, Any] = {
        "shortconv.l_cache": fields["conv_L_cache"],
        "attention.head_count_kv": [count if one == "full_attention" else 0 for one in fields["layer_types"]],
        "vocab_size": fields["vocab_size"],
    }
    if fields.get("block_auto_adjust_ff_dim"):
        multiple = fields["block_multiple_of"]
        size = int(fields["block_ffn_dim_multiplier"] * int(2 * fields["intermediate_size"] / 3))
        keys["feed_forward_length"] = multiple * ((size + multiple - 1) // multiple)
    if "moe_intermediate_size" in fields:
        keys |= {
            "expert_feed_forward_length": fields["moe_intermediate_size"],
            "leading_dense_block_count": fields["num_dense_layers"],
            "expert_gating_func": 2,
        }
    return keys


def renamed(name: str) -> str:
    """Return the name that the converter looks up."""
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias")
    return f"{name}.bias" if name.endswith(".expert_bias") else name


def changed(name: str, array: Array, fields: Mapping[str, Any]) -> Array:
    """Return what the file holds of a tensor of Qwen 3.5."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return array + np.float32(1)
    if ".linear_attn." not in name:
        return array
    part = name.split(".linear_attn.")[1]
    size = fields["linear_value_head_dim"]
    num_before = 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    if part == "A_log":
        return tiled(-np.exp(array), fields, 1)
    if part in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return tiled(array, fields, 1)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        plain = array.reshape(len(array), -1)
        return np.concatenate([plain[:num_before], tiled(plain[num_before:], fields, size)])
    if part == "in_proj_z.weight":
        return tiled(array, fields, size)
    if part == "out_proj.weight":
        return np.ascontiguousarray(tiled(np.ascontiguousarray(array.T), fields, size).T)
    return array


def tiled(array: Array, fields: Mapping[str, Any], size: int) -> Array:
    """Move value heads of `size` rows: all firsts of their key heads, then all seconds, ..."""
    num_key_heads = fields["linear_num_key_heads"]
    ratio = fields["linear_num_value_heads"] // num_key_heads
    order = [key * ratio + i for i in range(ratio) for key in range(num_key_heads)]
    return array.reshape(-1, size, *array.shape[1:])[order].reshape(array.shape)
