"""Small random models of every family, made by `transformers`, which is also the reference for their results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def _config(model_type: str, **settings: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**{**SIZES, **settings})


def _gemma4(**settings: Any) -> Any:
    """Heads of layers with full attention are wider."""
    shape = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0}
    window = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    return _config("gemma4_text", **{**shape, **window, **settings})


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
OLMO3_ROPE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

# Families that share most of Llama's equations, and routed experts.
MORE_FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: _config("qwen3_moe", head_dim=32, norm_topk_prob=True, **EXPERTS),
    "qwen3_moe with a dense layer": lambda: _config("qwen3_moe", head_dim=32, mlp_only_layers=[0], **EXPERTS),
    "mixtral": lambda: _config("mixtral", num_local_experts=5, num_experts_per_tok=2),
    "olmoe": lambda: _config("olmoe", num_experts=6, num_experts_per_tok=3),
    "smollm3": lambda: _config("smollm3", no_rope_layers=[1, 0, 1]),
    "olmo2": lambda: _config("olmo2"),
    "olmo3": lambda: _config("olmo3", rope_parameters=OLMO3_ROPE, **WINDOWS),
    "granite": lambda: _config("granite", **GRANITE),
    "granite4": lambda: _config(
        "granitemoehybrid",
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        layer_types=["attention"] * 3,
        **GRANITE,
    ),
    "ministral3": lambda: _config("ministral3", head_dim=32, rope_parameters=MINISTRAL_ROPE),
    "glm4": lambda: _config("glm4", head_dim=32),
    "gemma2": lambda: _config("gemma2", head_dim=32, query_pre_attn_scalar=24, sliding_window=24),
    "seed_oss": lambda: _config("seed_oss", head_dim=32, mlp_bias=True),
    "gpt_oss": lambda: _config(
        "gpt_oss",
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={**YARN, "truncate": False},
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma4": lambda: _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4 with experts": lambda: _gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "gemma4 with shared layers": lambda: _gemma4(
        num_key_value_heads=1,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=160,
        hidden_size_per_layer_input=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("llama"),
    "llama tied": lambda: _config("llama", tie_word_embeddings=True),
    "llama with biases": lambda: _config("llama", attention_bias=True, mlp_bias=True),
    "llama 3 rope": lambda: _config("llama", rope_parameters=LLAMA3_ROPE),
    "llama yarn": lambda: _config("llama", rope_parameters=YARN),
    "llama linear rope": lambda: _config(
        "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": lambda: _config("mistral", sliding_window=None),
    "mistral with a window": lambda: _config("mistral", sliding_window=24),
    "qwen2": lambda: _config("qwen2"),
    "qwen3": lambda: _config("qwen3", head_dim=32),
    "gemma3": lambda: _config("gemma3_text", head_dim=32, query_pre_attn_scalar=24, **WINDOWS),
    "phi3": lambda: _config("phi3"),
    "phi3 long rope": lambda: _config("phi3", rope_parameters=LONG_ROPE),
    **MORE_FAMILIES,
}


DELTA_NET = {
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
SHORT_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}

# Families with a recurrent state. They need state slots, which not every rig has.
STATE_FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: _config("qwen3_5_text", **DELTA_NET),
    "qwen3_5 with a key head per value head": lambda: _config(
        "qwen3_5_text", **{**DELTA_NET, "linear_num_key_heads": 6, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "qwen3_5_moe": lambda: _config("qwen3_5_moe_text", shared_expert_intermediate_size=40, **DELTA_NET, **EXPERTS),
    "lfm2": lambda: _config("lfm2", block_auto_adjust_ff_dim=True, block_multiple_of=24, **SHORT_CONV),
    "lfm2 with biases": lambda: _config("lfm2", conv_bias=True, block_auto_adjust_ff_dim=False, **SHORT_CONV),
    "lfm2_moe": lambda: _config("lfm2_moe", num_dense_layers=1, **EXPERTS, **SHORT_CONV),
}
EVERY_FAMILY = FAMILIES | STATE_FAMILIES


class Reference:
    """`transformers` with the same weights, in fp32. `dtype`: the type that the weights are rounded to and saved in."""

    def __init__(
        self, name: str, folder: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        config = EVERY_FAMILY[name]()
        for field, value in changes.items():
            setattr(config, field, value)
        config._attn_implementation = "eager"
        self.model: Any = AutoModelForCausalLM.from_config(config)
        self.model.eval().float()
        for parameter in self.model.parameters():  # norms and biases too: ones and zeros would hide a missing one
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        if config.model_type == "gemma4_text":  # whose attention has no scale: as weights of 1 would be too sharp
            for layer in self.model.model.layers:
                layer.self_attn.q_norm.weight.data.mul_(0.3)
        for buffer_name, buffer in self.model.named_buffers():
            if buffer_name.endswith("layer_scalar"):  # of Gemma 4
                buffer.copy_(0.8 + 0.4 * torch.rand_like(buffer))
            elif buffer_name.endswith(".expert_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.05)
        self.model.to(dtype).save_pretrained(folder)
        self.model.float()
        self.path = folder

    def running_in(self, dtype: torch.dtype, device: str = "cpu") -> Any:
        """Return the same model of `transformers`, computing in that type."""
        return copy.deepcopy(self.model).to(device, dtype)

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        return logprobs(self.model, tokens)


@torch.inference_mode()
def logprobs(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return [len(tokens), V]: row i predicts the token after position i."""
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([list(tokens)], device=device)).logits[0]
    return torch.log_softmax(logits.float(), -1).cpu()
