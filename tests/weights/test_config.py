"""config.json of every family, in the forms of transformers 4 and 5, compared with the numbers of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.kv_memory import KVSpec
from quire.backends.support import MLX_GGUF_FAMILIES
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.config import read_generation, spec_from_config
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.opening import open_checkpoint
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    GenerationDefaults,
    ModelSpec,
    QKNorm,
    RopeSpec,
)
from quire.weights.tensors import (
    Target,
    check_tensors,
    expected_tensors,
    num_active_weights,
    num_weights,
    place_tensors,
)
from tests.weights.makers import HEAD, SIZES, config, llama_arrays, tiny_gguf, write_folder


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


def test_a_head_that_differs_from_the_embedding_is_used_although_the_config_ties_them(tmp_path: Path) -> None:
    arrays = llama_arrays()
    settings = config(tie_word_embeddings=True)
    own = open_checkpoint(write_folder(tmp_path / "own", settings, arrays))
    assert not own.spec.is_tied
    check_tensors(own)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    twice = open_checkpoint(write_folder(tmp_path / "twice", settings, arrays))
    assert twice.spec.is_tied
    check_tensors(twice)


def test_a_null_replaces_the_default_of_transformers() -> None:
    gemma = spec("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (gemma.attention.softcap, gemma.logit_softcap) == (0.0, 0.0)
    assert (spec("Gemma2ForCausalLM").attention.softcap, spec("Gemma2ForCausalLM").logit_softcap) == (50.0, 30.0)
    assert spec("MistralForCausalLM", num_key_value_heads=None).attention.num_kv_heads == 4
    assert spec("SeedOssForCausalLM", head_dim=None).attention.head_size == 16


def test_windows_that_are_switched_on_have_the_default_size() -> None:
    assert spec("Qwen3MoeForCausalLM", use_sliding_window=True).windows == (4096, 4096)
    assert spec("Qwen3MoeForCausalLM").windows == (0, 0)


def test_the_text_of_mistral_small_3_has_the_defaults_of_mistral() -> None:
    text = {**config(), "model_type": "mistral"}
    del text["rms_norm_eps"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "torch_dtype": "float32"}
    assert spec_from_config(whole, {}, "config.json", "F32").norm_eps == 1e-6
    assert spec_from_config(whole, {}, "config.json", "F32").windows == (4096, 4096)


def opened(tmp_path: Path, **keys: Any) -> ModelSpec:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(**keys))
    return open_checkpoint(path).spec


def test_gguf_keys_without_a_default_are_required(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="layer_norm_rms_epsilon is missing"):
        opened(tmp_path, llama__attention__layer_norm_rms_epsilon=None)


def test_gguf_keys_of_other_equations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope\.dimension_sections is"):
        opened(tmp_path, llama__rope__dimension_sections=[8, 12, 12, 0])
    assert opened(tmp_path, llama__rope__dimension_sections=[0, 0, 0, 0]).family == "llama"


def test_a_stack_of_more_experts_than_the_model_has_is_not_divided() -> None:
    """A forged file could make millions of them, before its tensors are checked."""
    experts = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    model = spec("Qwen3MoeForCausalLM", **experts)
    info = TensorInfo("stack", TensorType.F32, (1_000_000, 1, 64), 256_000_000)
    target = Target(("layers.0.experts.{}.gate_proj.weight",), is_stack=True)
    assert list(place_tensors({"stack": info}, {"stack": target}, model, "file")) == [
        "layers.0.experts.{}.gate_proj.weight"
    ]


def test_families_whose_gguf_files_mlx_reads() -> None:
    from quire.backends.mlx.spec_model import MODEL_TYPES

    assert tuple(MODEL_TYPES) == MLX_GGUF_FAMILIES


def test_the_saved_head_of_a_multimodal_mistral_is_read(tmp_path: Path) -> None:
    """transformers 5 writes a tied outer config and a separate head for these models."""
    arrays = {f"language_model.{name}": array for name, array in llama_arrays().items()}
    text = {**config(), "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    folder = write_folder(tmp_path / "model", whole, arrays)
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    assert not checkpoint.spec.is_tied
    head = np.frombuffer(checkpoint.read("head.weight").data.tobytes(), np.float32)
    assert np.array_equal(head, llama_arrays()["lm_head.weight"].ravel())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


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
        # equations that are not known
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"layer_types": ["chunked_attention"] * 12}, "layer_types.0. 'chunked_attention' is not"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn' is not supported"),
    ],
)
def test_wrong_values(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        small(**changes)
