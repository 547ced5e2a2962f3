"""The model families that quire has equations for: one row each.

A row says how a family differs from Llama. `config.py` and `gguf_spec.py` read a file's fields with it, `tensors.py`
the names of its tensors. A family with new equations also needs a switch in `spec.py` and code in the backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.weights.spec import Activation, QKNorm


class Windows(Enum):
    """Which layers have a sliding window."""

    NONE = 0
    ALL = 1  # if the field sliding_window is given
    SOME = 2  # those that layer_types lists, or all but every n-th


class Ropes(Enum):
    """Which rotary embedding a layer has."""

    ONE = 0
    LOCAL_BASE = 1  # layers with a window have their own base (Gemma 3)
    LOCAL_UNSCALED = 2  # layers with a window have the same base, without scaling (OLMo 3)


# What the layers that do not attend have instead, as layer_types names them.
DELTA_NET = "linear_attention"
SHORT_CONV = "conv"


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """How config.json describes routed experts, by the names of its fields."""

    num_experts: str = "num_experts"
    size: str = "moe_intermediate_size"
    renormalizes: str | bool = True  # a field, or a constant
    num_chosen: str = "num_experts_per_tok"
    flag: str = ""  # a field that must be true for layers to have experts
    has_bias: bool = False  # experts and router have biases
    is_parallel: bool = False  # experts beside the MLP, whose router has a norm and factors of the experts (Gemma 4)
    shared_size: str = ""  # of an expert that every token uses; empty: there is none
    num_dense_layers: str = (
        ""  # the first layers, whose MLP is not routed; empty: decoder_sparse_step and mlp_only_layers
    )
    bias: str = ""  # whether a bias takes part in the choice; if there is this field, the scores are sigmoids
    has_scale: bool = False  # the sum of the experts is scaled, also without a bias: in GGUF


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    architectures: tuple[str, ...]  # class names in config.json
    model_types: tuple[str, ...]  # model_type in config.json, one for each class
    gguf: str  # general.architecture in GGUF files
    models: str  # examples with sizes, for people
    tools: str = ""  # the tool format (`quire.text.tool_formats`) of its models' chat templates; empty: none of these
    reasoning: str = ""  # the reasoning format (`quire.text.reasoning`) of those models that reason; empty: none do
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of transformers, for fields config.json omits
    has_pre_norms: bool = True
    has_post_norms: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    rounds_norms_first: bool = True
    # Biases: a constant, or the field that decides. GGUF files are read by their tensors instead.
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: Windows = Windows.NONE
    window_flag: str = ""  # a field that must be true for windows to be used
    full_every: int = 0  # every n-th layer has full attention, if layer_types is not given
    ropes: Ropes = Ropes.ONE
    has_partial_rotary: bool = False
    is_interleaved: bool = False  # rotated pairs are neighbours in the files of transformers
    is_permuted_in_gguf: bool = False  # and in those of llama.cpp
    no_rope_every: int = 0  # every n-th layer has no positions, if no_rope_layers is not given
    has_query_scaling: bool = False
    is_gemma: bool = False  # norm weights are stored minus 1, embeddings are scaled, gelu, soft caps
    has_plain_norms: bool = False  # a Gemma whose norm weights are stored as they are
    has_sinks: bool = False
    activation: Activation | None = None  # None: the one the file names
    has_norm_offset: bool = False  # norm weights are stored minus 1 in the files of transformers
    has_gate: bool = False  # of the output of attention; its rows and those of the queries alternate by head
    recurrence: str = ""  # DELTA_NET or SHORT_CONV; empty: all layers attend
    has_multipliers: bool = False  # of embeddings, attention, residuals and logits (Granite)
    experts: ExpertFields | None = None
    ffn_size: str = "intermediate_size"
    norm_eps: str = "rms_norm_eps"
    # Tensor names that differ from Llama's: the file's name of a layer's tensor, and what it holds.
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_names: tuple[str, str] = ("model.norm", "output_norm")  # of the last norm, in safetensors and in GGUF
    nested: tuple[str, ...] = ()  # classes whose language model is described in text_config
    skipped: Mapping[str, str] = field(default_factory=dict)  # tensors that are not loaded, by prefix: the part's name


_FUSED_GATE_UP = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}
_SANDWICH_NORMS = {  # Gemma's four norms
    "post_attention_layernorm": ("post_attention_norm",),
    "pre_feedforward_layernorm": ("mlp_norm",),
    "post_feedforward_layernorm": ("post_mlp_norm",),
}
_GGUF_POST_NORMS = {"post_attention_norm": ("post_attention_norm",), "post_ffw_norm": ("post_mlp_norm",)}
_QWEN_DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_QWEN35: dict[str, Any] = {
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_QWEN35_SKIPPED = {"model.visual.": "vision tower", "visual.": "vision tower", "mtp.": "MTP head"}
_QUERIES_AND_GATES = ("q_proj", "q_gate")
_DELTA_NET = {
    "self_attn.q_proj": _QUERIES_AND_GATES,
    "linear_attn.in_proj_qkv": ("in_proj_qkv",),
    "linear_attn.in_proj_z": ("in_proj_z",),
    "linear_attn.in_proj_b": ("in_proj_b",),
    "linear_attn.in_proj_a": ("in_proj_a",),
    "linear_attn.conv1d": ("conv",),
    "linear_attn.A_log": ("a_log",),
    "linear_attn.dt_bias": ("dt_bias",),
    "linear_attn.norm": ("gated_norm",),
    "linear_attn.out_proj": ("out_proj",),
}
_GGUF_DELTA_NET = {
    "post_attention_norm": ("mlp_norm",),
    "attn_q": _QUERIES_AND_GATES,
    "attn_qkv": ("in_proj_qkv",),
    "attn_gate": ("in_proj_z",),
    "ssm_beta": ("in_proj_b",),
    "ssm_alpha": ("in_proj_a",),
    "ssm_conv1d": ("conv",),
    "ssm_a": ("a_log",),
    "ssm_dt.bias": ("dt_bias",),
    "ssm_norm": ("gated_norm",),
    "ssm_out": ("out_proj",),
}
_SHARED = {f"mlp.shared_expert.{name}": (f"shared.{name}",) for name in ("gate_proj", "up_proj", "down_proj")}
_LFM2: dict[str, Any] = {
    "vocab_size": 65_536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT_CONV = {
    "operator_norm": ("input_norm",),
    "ffn_norm": ("mlp_norm",),
    "self_attn.out_proj": ("o_proj",),
    "self_attn.q_layernorm": ("q_norm",),
    "self_attn.k_layernorm": ("k_norm",),
    "conv.in_proj": ("in_proj",),
    "conv.conv": ("conv",),
    "conv.out_proj": ("out_proj",),
    "feed_forward.w1": ("gate_proj",),
    "feed_forward.w3": ("up_proj",),
    "feed_forward.w2": ("down_proj",),
}
_GGUF_SHORT_CONV = {
    "shortconv.in_proj": ("in_proj",),
    "shortconv.conv": ("conv",),
    "shortconv.out_proj": ("out_proj",),
}
FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        gguf="llama",
        models="Llama 2, 3, 3.1, 3.2, 3.3 (1B to 70B), SmolLM2, TinyLlama, DeepSeek-R1 distillations of Llama",
        tools="llama3",
        reasoning="think",
        defaults={"max_position_embeddings": 2048},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        is_permuted_in_gguf=True,
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        model_types=("mistral",),
        gguf="llama",
        models="Mistral 7B, Nemo 12B, Small 22B and 24B, Codestral, Devstral",
        tools="mistral",
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows=Windows.ALL,
        is_permuted_in_gguf=True,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        model_types=("mixtral",),
        gguf="llama",
        models="Mixtral 8x7B and 8x22B",
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        windows=Windows.ALL,
        experts=ExpertFields(num_experts="num_local_experts", size="intermediate_size"),
        names={
            "block_sparse_moe.gate": ("router",),
            "block_sparse_moe.experts.#.w1": ("experts.#.gate_proj",),
            "block_sparse_moe.experts.#.w3": ("experts.#.up_proj",),
            "block_sparse_moe.experts.#.w2": ("experts.#.down_proj",),
        },
        is_permuted_in_gguf=True,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        model_types=("qwen2",),
        gguf="qwen2",
        models="Qwen 2, 2.5 and 2.5-Coder (0.5B to 72B), QwQ 32B, DeepSeek-R1 distillations of Qwen",
        tools="hermes",
        reasoning="think",
        defaults=_QWEN_DEFAULTS,
        qkv_bias=True,
        windows=Windows.SOME,
        window_flag="use_sliding_window",
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_types=("qwen3",),
        gguf="qwen3",
        models="Qwen 3 (0.6B to 32B)",
        tools="hermes",
        reasoning="think",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        qk_norm=QKNorm.HEAD,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.SOME,
        window_flag="use_sliding_window",
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        model_types=("qwen3_moe",),
        gguf="qwen3moe",
        models="Qwen 3 30B-A3B and 235B-A22B, Qwen 3 Coder",
        tools="hermes",
        reasoning="think",
        defaults={
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        qk_norm=QKNorm.HEAD,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.ALL,
        window_flag="use_sliding_window",
        experts=ExpertFields(renormalizes="norm_topk_prob"),
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        model_types=("olmoe",),
        gguf="olmoe",
        models="OLMoE 1B-7B",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50_279,
        },
        qk_norm=QKNorm.WIDTH,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        experts=ExpertFields(size="intermediate_size", renormalizes="norm_topk_prob"),
    ),
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        model_types=("olmo2",),
        gguf="olmo2",
        models="OLMo 2 (1B to 32B)",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50_279},
        has_pre_norms=False,
        has_post_norms=True,
        qk_norm=QKNorm.WIDTH,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        names={
            "post_attention_layernorm": ("post_attention_norm",),
            "post_feedforward_layernorm": ("post_mlp_norm",),
        },
        gguf_names=_GGUF_POST_NORMS,
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        model_types=("olmo3",),
        gguf="olmo2",
        models="OLMo 3 (7B, 32B)",
        reasoning="think",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "eos_token_id": 50_279,
            "rope_theta": 5e5,
        },
        has_pre_norms=False,
        has_post_norms=True,
        qk_norm=QKNorm.WIDTH,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.SOME,
        full_every=4,
        ropes=Ropes.LOCAL_UNSCALED,
        names={
            "post_attention_layernorm": ("post_attention_norm",),
            "post_feedforward_layernorm": ("post_mlp_norm",),
        },
        gguf_names=_GGUF_POST_NORMS,
    ),
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        model_types=("smollm3",),
        gguf="smollm3",
        models="SmolLM3 3B",
        tools="hermes",
        reasoning="think",
        defaults={
            "vocab_size": 128_256,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=Windows.SOME,
        window_flag="use_sliding_window",
        no_rope_every=4,
        is_permuted_in_gguf=True,
    ),
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        model_types=("granite",),
        gguf="granite",
        models="Granite 3.0 to 3.3 (2B, 8B), Granite 4.1 dense",
        defaults={"max_position_embeddings": 2048},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
        is_permuted_in_gguf=True,
    ),
    Family(
        name="granite4",
        architectures=("GraniteMoeHybridForCausalLM",),
        model_types=("granitemoehybrid",),
        gguf="granite",
        models="Granite 4.0 dense (350M, 1B, Micro 3B); not the H models, whose layers have a state",
        tools="hermes",
        defaults={"max_position_embeddings": 2048, "shared_intermediate_size": 1024, "num_local_experts": 8},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_multipliers=True,
        ffn_size="shared_intermediate_size",
        names={
            "shared_mlp.input_linear": ("gate_proj", "up_proj"),
            "shared_mlp.output_linear": ("down_proj",),
        },
        is_permuted_in_gguf=True,
    ),
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        model_types=("ministral3", "mistral3"),
        gguf="mistral3",
        models="Ministral 3 (3B, 8B, 14B), Mistral Small 3.1 and 3.2 (text only)",
        reasoning="mistral",
        defaults={
            "max_position_embeddings": 262_144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        windows=Windows.ALL,
        has_query_scaling=True,
        is_permuted_in_gguf=True,
        nested=("Mistral3ForConditionalGeneration",),
    ),
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        model_types=("glm4",),
        gguf="glm4",
        models="GLM-4-0414 and GLM-Z1-0414 (9B, 32B)",
        reasoning="think",
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151_329, 151_336, 151_338],
        },
        has_post_norms=True,
        qkv_bias="attention_bias",
        has_partial_rotary=True,
        is_interleaved=True,
        names={
            "post_self_attn_layernorm": ("post_attention_norm",),
            "post_mlp_layernorm": ("post_mlp_norm",),
            **_FUSED_GATE_UP,
        },
        gguf_names={**_GGUF_POST_NORMS, "ffn_up": ("gate_proj", "up_proj")},
        is_permuted_in_gguf=True,
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        model_types=("seed_oss",),
        gguf="seed_oss",
        models="Seed-OSS 36B",
        reasoning="seed",
        defaults={
            "max_position_embeddings": 524_288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
        },
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        gguf_names={"post_attention_norm": ("mlp_norm",)},
    ),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        model_types=("gemma2",),
        gguf="gemma2",
        models="Gemma 2 (2B, 9B, 27B)",
        defaults={
            "vocab_size": 256_000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        has_post_norms=True,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.SOME,
        full_every=2,
        is_gemma=True,
        names=_SANDWICH_NORMS,
        gguf_names=_GGUF_POST_NORMS,
    ),
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        model_types=("gemma3_text", "gemma3"),
        gguf="gemma3",
        models="Gemma 3 (270M to 27B, text only)",
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        has_post_norms=True,
        qk_norm=QKNorm.HEAD,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.SOME,
        full_every=6,
        ropes=Ropes.LOCAL_BASE,
        is_gemma=True,
        names=_SANDWICH_NORMS,
        gguf_names=_GGUF_POST_NORMS,
        nested=("Gemma3ForConditionalGeneration",),
    ),
    Family(
        name="gemma4",
        architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        model_types=("gemma4_text", "gemma4"),
        gguf="gemma4",
        models="Gemma 4 (E2B, E4B, 12B, 26B-A4B, 31B, text only)",
        tools="gemma4",
        reasoning="gemma4",
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        has_post_norms=True,
        qk_norm=QKNorm.HEAD,
        rounds_norms_first=False,
        windows=Windows.SOME,
        full_every=6,
        is_gemma=True,
        has_plain_norms=True,
        experts=ExpertFields(num_chosen="top_k_experts", flag="enable_moe_block", is_parallel=True),
        names={
            **_SANDWICH_NORMS,
            "pre_feedforward_layernorm_2": ("experts_norm",),
            "post_feedforward_layernorm_1": ("post_dense_norm",),
            "post_feedforward_layernorm_2": ("post_experts_norm",),
            "router.proj": ("router",),
            "per_layer_input_gate": ("ple_gate",),
            "per_layer_projection": ("ple_proj",),
            "post_per_layer_input_norm": ("ple_norm",),
        },
        gguf_names={
            **_GGUF_POST_NORMS,
            "pre_ffw_norm_2": ("experts_norm",),
            "post_ffw_norm_1": ("post_dense_norm",),
            "post_ffw_norm_2": ("post_experts_norm",),
            "layer_output_scale": ("output_scale",),
            "inp_gate": ("ple_gate",),
            "proj": ("ple_proj",),
            "post_norm": ("ple_norm",),
        },
        nested=("Gemma4ForConditionalGeneration",),
    ),
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        model_types=("gpt_oss",),
        gguf="gpt-oss",
        models="gpt-oss 20b and 120b",
        tools="harmony",
        reasoning="harmony",
        defaults={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows.SOME,
        full_every=2,
        has_sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        experts=ExpertFields(num_experts="num_local_experts", size="intermediate_size", has_bias=True),
        names={"mlp.router": ("router",)},
        gguf_names={"post_attention_norm": ("mlp_norm",), "attn_sinks": ("sinks",)},
    ),
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        model_types=("phi3",),
        gguf="phi3",
        models="Phi-3, Phi-3.5, Phi-4 and Phi-4-mini",
        reasoning="think",
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        windows=Windows.ALL,
        has_partial_rotary=True,
        names={"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), **_FUSED_GATE_UP},
        gguf_names={"attn_qkv": ("q_proj", "k_proj", "v_proj"), "ffn_up": ("gate_proj", "up_proj")},
    ),
    Family(
        name="qwen3_5",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        model_types=("qwen3_5_text", "qwen3_5"),
        gguf="qwen35",
        models="Qwen 3.5 (0.8B to 27B), Qwen 3.6 and 3.8 27B (text only)",
        tools="qwen_xml",
        reasoning="think",
        defaults={**_QWEN35, "num_key_value_heads": 4},
        qk_norm=QKNorm.HEAD,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_partial_rotary=True,
        has_norm_offset=True,
        has_gate=True,
        recurrence=DELTA_NET,
        names=_DELTA_NET,
        gguf_names=_GGUF_DELTA_NET,
        nested=("Qwen3_5ForConditionalGeneration",),
        skipped=_QWEN35_SKIPPED,
    ),
    Family(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        gguf="qwen35moe",
        models="Qwen 3.5 and 3.6 35B-A3B, 122B-A10B and 397B-A17B (text only)",
        tools="qwen_xml",
        reasoning="think",
        defaults={
            **_QWEN35,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        qk_norm=QKNorm.HEAD,
        rounds_norms_first=False,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_partial_rotary=True,
        has_norm_offset=True,
        has_gate=True,
        recurrence=DELTA_NET,
        experts=ExpertFields(shared_size="shared_expert_intermediate_size"),
        ffn_size="moe_intermediate_size",  # it has no other: all layers are routed
        names={**_DELTA_NET, **_SHARED, "mlp.shared_expert_gate": ("shared_gate",)},
        gguf_names={
            **_GGUF_DELTA_NET,
            "ffn_gate_shexp": ("shared.gate_proj",),
            "ffn_up_shexp": ("shared.up_proj",),
            "ffn_down_shexp": ("shared.down_proj",),
            "ffn_gate_inp_shexp": ("shared_gate",),
        },
        nested=("Qwen3_5MoeForConditionalGeneration",),
        skipped=_QWEN35_SKIPPED,
    ),
    Family(
        name="lfm2",
        architectures=("Lfm2ForCausalLM",),
        model_types=("lfm2",),
        gguf="lfm2",
        models="LFM2 and LFM2.5 (230M to 2.6B)",
        tools="lfm2",
        reasoning="think",
        defaults={**_LFM2, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        qk_norm=QKNorm.HEAD,
        norm_eps="norm_eps",
        norm_names=("model.embedding_norm", "token_embd_norm"),
        recurrence=SHORT_CONV,
        names=_SHORT_CONV,
        gguf_names=_GGUF_SHORT_CONV,
    ),
    Family(
        name="lfm2_moe",
        architectures=("Lfm2MoeForCausalLM",),
        model_types=("lfm2_moe",),
        gguf="lfm2moe",
        models="LFM2 8B-A1B",
        tools="lfm2",
        defaults={
            **_LFM2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
        qk_norm=QKNorm.HEAD,
        norm_eps="norm_eps",
        norm_names=("model.embedding_norm", "token_embd_norm"),
        recurrence=SHORT_CONV,
        experts=ExpertFields(
            renormalizes="norm_topk_prob", num_dense_layers="num_dense_layers", bias="use_expert_bias"
        ),
        names={
            **_SHORT_CONV,
            "feed_forward.gate": ("router",),
            "feed_forward.expert_bias": ("expert_bias",),
            "feed_forward.experts.#.w1": ("experts.#.gate_proj",),
            "feed_forward.experts.#.w3": ("experts.#.up_proj",),
            "feed_forward.experts.#.w2": ("experts.#.down_proj",),
        },
        gguf_names={**_GGUF_SHORT_CONV, "exp_probs_b.bias": ("expert_bias",)},
    ),
)

BY_ARCHITECTURE: Mapping[str, Family] = {name: row for row in FAMILIES for name in row.architectures}
BY_MODEL_TYPE: Mapping[str, str] = {
    model_type: name for row in FAMILIES for model_type, name in zip(row.model_types, row.architectures, strict=True)
}
BY_NAME: Mapping[str, Family] = {row.name: row for row in FAMILIES}
GGUF_ARCHITECTURES: tuple[str, ...] = tuple(dict.fromkeys(row.gguf for row in FAMILIES))
