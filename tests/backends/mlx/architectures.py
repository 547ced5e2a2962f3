"""Small random models of mlx-lm's architectures, as folders. The reference is mlx-lm with its own dense cache."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from torch import Tensor

from tests.backends.contract import VOCAB

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {  # multi-head latent attention: keys and values of other sizes than the heads'
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
NORM = {"layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5}
GPT2 = {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 512, **NORM}
FACTORS: dict[str, Any] = {"original_max_position_embeddings": 512, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}

# Models that run in one pass per step.
FLAT: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with windows": {  # two layers of each kind
        "model_type": "llama",
        **WINDOWS,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "apertus": {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True, "rope_scaling": None},
    "cohere": NORM,
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2, **NORM},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "ernie4_5": {"use_bias": False},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": "LG", "rope_scaling": None},
    "gemma": {},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma4_text": {  # the last two layers use the keys and values of those before
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
    },
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
    },
    "gpt2": GPT2,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True, **NORM},
    "gpt_oss": {**EXPERTS, **WINDOWS, "rope_scaling": None},
    "granite": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "helium": {"attention_bias": False, "mlp_bias": False},
    "internlm3": {"bias": False, "qkv_bias": False, "rope_scaling": None},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
    "ministral3": {
        "rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
        "layer_types": ["full_attention"] * 2,
    },
    "mixtral": EXPERTS,
    "nemotron": {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.5}
    | NORM,
    "olmo2": {},
    "olmo3": WINDOWS,
    "olmoe": EXPERTS,
    "phi": {"partial_rotary_factor": 0.5, **NORM},
    "phi3": {},
    "phimoe": {**EXPERTS, **NORM, "rope_scaling": {**FACTORS, "long_mscale": 1.0, "short_mscale": 1.0}},
    "plamo3": {"window_size": 8, "sliding_window_pattern": 2},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "rope_scaling": None},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": False, "use_qkv_bias": False, "rope_pct": 0.25, **NORM},
    "starcoder2": NORM,
}
# Models that compute attention, or masks, or positions themselves.
DIVIDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "n_routed_experts": None, "n_shared_experts": None, "rope_scaling": None},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16.0},
    "gpt_bigcode": {**GPT2, "num_key_value_heads": 1},
}
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "intermediate_size": 128,
    },
    "qwen3_next": {
        **EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
}
ARCHITECTURES = {**FLAT, **DIVIDED, **REFUSED}


def write_model(folder: Path, name: str, *, quantization: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write config.json and model.safetensors. `quantization`: group_size, bits and mode, as mlx-lm writes them."""
    config = {**SIZES, "model_type": name, **ARCHITECTURES[name], **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Norms and biases too: ones and zeros would hide a missing one.
    model.update(tree_map(_disturb, model.parameters()))
    model.eval()
    if quantization is not None:
        quantize(model, **quantization)
        config["quantization"] = quantization
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


def _disturb(parameter: mx.array) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    return parameter + 0.1 * mx.random.normal(parameter.shape)


class DenseReference:
    """mlx-lm itself, with its own cache: the whole sequence in one pass."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        self.model.set_dtype(mx.float32)

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        logits = self.model(mx.array([list(tokens)]), cache=make_prompt_cache(self.model))[0].astype(mx.float32)
        return torch.log_softmax(torch.from_numpy(np.array(logits)), -1)
