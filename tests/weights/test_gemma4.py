"""Gemma 4's config.json: shapes that differ by layer, in the old form and in that of transformers 5."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.backends.kv_memory import KVSpec
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.config import spec_from_config
from quire.weights.spec import AttentionSpec, ModelSpec
from quire.weights.tensors import expected_tensors, num_active_weights, num_weights

TEXT_26B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": None,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262_144,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SMALL: dict[str, Any] = {  # with the sharing of E2B
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 1000,
}


def nested(**changes: Any) -> ModelSpec:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {**TEXT_26B, **changes}}
    return spec_from_config(config, {}, "config.json", "BF16")


def small(**changes: Any) -> ModelSpec:
    config = {"architectures": ["Gemma4ForCausalLM"], **SMALL, **changes}
    return spec_from_config(config, {}, "config.json", "BF16")


def attention(spec: ModelSpec, index: int) -> AttentionSpec:
    return spec.layers[index].attention


def test_the_26b() -> None:
    spec = nested()
    local, full = attention(spec, 0), attention(spec, 5)
    assert (local.num_kv_heads, local.head_size, local.window, local.is_key_value) == (8, 256, 1024, False)
    assert (full.num_kv_heads, full.head_size, full.window, full.is_key_value) == (2, 512, 0, True)
    assert local.scale == full.scale == 1
    assert full.rope is not None
    assert full.rope.factors == (1.0,) * 64 + (math.inf,) * 192
    assert full.rope.inverse_frequencies(4096)[64:] == (0.0,) * 192
    assert (spec.norm_offset, spec.ple_size, spec.logit_softcap) == (0, 0, 30)
    assert 25e9 < num_weights(spec) < 27e9
    assert 3.5e9 < num_active_weights(spec) < 4.5e9


def test_the_kv_memory_of_the_26b_at_32k() -> None:
    """1.2 GB with windows of 1,024 tokens freed; 7.4 GB if all layers kept everything."""
    kv = KVSpec.of(nested())
    full, window = kv.full_block_bytes(32, 2), kv.window_block_bytes(32, 2)
    assert full * 1024 + window * (1024 // 32 + 2) < 1.2e9
    assert 7.3e9 < (full + window) * 1024 < 7.6e9


def test_the_form_of_transformers_5() -> None:
    listed = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    assert nested(global_head_dim=None, num_global_key_value_heads=None, per_layer_config=listed) == nested()


def test_shared_layers() -> None:
    spec = small()
    assert [attention(spec, i).shared_with for i in range(6)] == [None] * 6
    assert [attention(spec, i).shared_with for i in range(6, 12)] == [4, 4, 4, 4, 4, 5]
    assert [layer.mlp.size for layer in spec.layers] == [512] * 6 + [1024] * 6
    names = expected_tensors(spec)
    assert "layers.6.k_proj.weight" not in names
    assert names["ple_embedding.weight"] == (1000, 12 * 32)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 10}, "no layer of the same kind"),
        ({"vocab_size_per_layer_input": 900}, "vocab_size_per_layer_input"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"per_layer_config": {"0": {"intermediate_size": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "different head sizes"),
    ],
)
def test_wrong_values(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        small(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": "all"},
        {"attention_bias": True},
        {"layer_types": ["chunked_attention"] * 12},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
    ],
)
def test_unknown_equations(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        small(**changes)
