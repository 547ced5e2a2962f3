"""config.json of every family, in the forms of transformers 4 and 5, compared with the numbers of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.config import read_generation, spec_from_config
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.spec import (
    Activation,
    GenerationDefaults,
    ModelSpec,
    QKNorm,
    RopeSpec,
)
from tests.weights.makers import HEAD, SIZES, config


def spec(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    return spec_from_config(config(architecture, **changes), {}, "config.json", "F32")


def rope(one: ModelSpec, layer: int = 0) -> RopeSpec:
    found = one.layers[layer].attention.rope
    assert found is not None
    return found


def test_both_forms_of_rope_settings_are_equal() -> None:
    new = spec(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    old = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    assert new.layers == old.layers
    assert rope(new).factors == (4.0,) * (HEAD // 2)


def test_both_names_of_the_type() -> None:
    assert spec(torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec(torch_dtype=None, dtype="float16").dtype == "float16"
    assert spec(torch_dtype=None).dtype == "float32"


def test_mistral_has_a_sliding_window() -> None:
    assert spec("MistralForCausalLM", sliding_window=None).windows == (0, 0)
    assert spec("MistralForCausalLM", sliding_window=32).windows == (32, 32)
    assert spec("MistralForCausalLM").windows == (4096, 4096)  # transformers' default
    assert spec("MistralForCausalLM").family == "mistral"


def test_qwen2_windows_only_where_they_are_used() -> None:
    assert spec("Qwen2ForCausalLM", sliding_window=32, max_window_layers=1).windows == (0, 0)
    used = {"use_sliding_window": True, "sliding_window": 32}
    assert spec("Qwen2ForCausalLM", **used, max_window_layers=1).windows == (0, 32)
    assert spec("Qwen2ForCausalLM", **used, layer_types=["sliding_attention", "full_attention"]).windows == (32, 0)
    with pytest.raises(ModelFileError, match="sliding_window"):
        spec("Qwen2ForCausalLM", sliding_window=None, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModel, match=r"layer_types\[1\] 'linear_attention'"):
        spec("Qwen2ForCausalLM", **used, layer_types=["full_attention", "linear_attention"])
    one = spec("Qwen2ForCausalLM").attention
    assert (one.has_qkv_bias, one.has_output_bias, one.qk_norm) == (True, False, QKNorm.NONE)


GEMMA: dict[str, Any] = {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 32, "query_pre_attn_scalar": 64}


def test_gemma3() -> None:
    old = spec("Gemma3ForCausalLM", **GEMMA, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0})
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    new = spec("Gemma3ForCausalLM", **GEMMA, layer_types=types, rope_parameters=ropes)
    assert old == new
    assert old.windows == (32, 32, 32, 32, 32, 0, 32)
    assert rope(old, 5) == RopeSpec(1e6, 32, (8.0,) * 16)
    assert rope(old, 0) == rope(old, 6) == RopeSpec(1e4, 32)
    assert (old.norm_offset, old.embedding_scale, old.attention.scale) == (1.0, 8.0, 64**-0.5)
    assert (old.mlp.activation, old.is_tied, old.attention.qk_norm) == (Activation.GELU_TANH, True, QKNorm.HEAD)
    assert old.layers[0].has_post_norms
    assert spec("Gemma3ForCausalLM", **GEMMA, sliding_window_pattern=2).windows == (32, 0, 32, 0, 32, 0, 32)
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        spec("Gemma3ForCausalLM", **GEMMA, use_bidirectional_attention=True)
    with pytest.raises(ModelFileError, match=r"rope_parameters\.rope_theta"):
        spec("Gemma3ForCausalLM", **GEMMA, rope_parameters={"rope_theta": 1e6})


def test_phi3() -> None:
    factors = {"short_factor": [1.5] * 6, "long_factor": [3.0] * 6}
    changes = {"max_position_embeddings": 4096, "original_max_position_embeddings": 64, "sliding_window": 100}
    old = spec("Phi3ForCausalLM", **changes, rope_scaling={"type": "su", **factors}, partial_rotary_factor=0.75)
    parameters = {"rope_type": "longrope", **factors, "partial_rotary_factor": 0.75, "rope_theta": 1e4}
    assert old == spec("Phi3ForCausalLM", **changes, rope_parameters=parameters)
    assert (old.windows, rope(old).rotary_size) == ((100, 100), 12)
    assert rope(old).attention_factor == pytest.approx(math.sqrt(1 + math.log(64) / math.log(64)))
    assert rope(old).inverse_frequencies(64)[0] == pytest.approx(1 / 1.5)
    assert rope(old).inverse_frequencies(65)[0] == pytest.approx(1 / 3)


def test_a_family_that_rotates_whole_heads_only() -> None:
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor 0\.5"):
        spec(partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModel, match=r"rope_parameters\.full_attention"):
        spec(rope_parameters={"full_attention": {"rope_theta": 1e4}})


def test_generation_config_takes_precedence_for_eos() -> None:
    def ends(generation: dict[str, Any], **changes: Any) -> tuple[int, ...]:
        return spec_from_config(config(**changes), generation, "config.json", "F32").eos_token_ids

    assert ends({}) == (2,)
    assert ends({}, eos_token_id=[2, 5, 2]) == (2, 5)
    assert ends({"eos_token_id": [7, 8]}) == (7, 8)
    assert ends({"eos_token_id": None}, eos_token_id=None) == ()


def test_generation_defaults() -> None:
    assert read_generation({"do_sample": False, "eos_token_id": 2}, "x") == GenerationDefaults()
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1}
    assert read_generation(given, "x") == GenerationDefaults(0.6, 20, 0.95, 0.0, 1.1)
    for name, value in (("top_k", -1), ("top_p", 0), ("min_p", 2), ("repetition_penalty", 0), ("temperature", "hot")):
        with pytest.raises(ModelFileError, match=f"gen.json: {name} is"):
            read_generation({name: value}, "gen.json")


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.7},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.5,
        "mscale_all_dim": 0.8,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1 + i / 8 for i in range(32)],
        "long_factor": [2 + i for i in range(32)],
        "original_max_position_embeddings": 512,
        "factor": 8.0,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: str(list(one.values())[:4]))
def test_rotations_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {**SIZES, "hidden_size": 256, "max_position_embeddings": 4096}
    settings = {"architectures": ["LlamaForCausalLM"], **sizes, "rope_parameters": {"rope_theta": 5e5, **scaling}}
    ours = rope(spec_from_config(settings, {}, "config.json", "F32"))
    theirs = transformers.LlamaConfig(**sizes, rope_parameters={"rope_theta": 5e5, **scaling})
    contexts = (256, 4096) if scaling["rope_type"] == "longrope" else (4096,)
    for context in contexts:
        if scaling["rope_type"] == "default":
            expected, attention = [5e5 ** (-i / 32) for i in range(32)], 1.0
        else:
            found, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, None, seq_len=context)
            expected = found.tolist()
        assert ours.inverse_frequencies(context) == pytest.approx(expected, rel=2e-6)
        assert ours.attention_factor == pytest.approx(attention)


def test_every_listed_architecture_is_read() -> None:
    needed: dict[str, dict[str, Any]] = {
        "granite4": {
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "layer_types": ["attention"] * SIZES["num_hidden_layers"],
        },
        **{key: {"full_attention_interval": 2} for key in ("qwen3_5", "qwen3_5_moe")},
    }
    for architecture, family in BY_ARCHITECTURE.items():
        more = needed.get(family.name, {})
        one = spec(architecture, text_config={**SIZES, **more}, bos_token_id=1, **more)
        assert one.family == family.name
