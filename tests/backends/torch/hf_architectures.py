"""Small random models of the decoders in `transformers`, made from their own configs with small sizes.

`TINY` gives sizes by the names that configs use for them; `SPECIAL` adds what a model type needs beside them. Used by
the tests and by the survey, which makes docs/transformers.md (`python -m tests.backends.torch.hf_survey`).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

NUM_LAYERS = 3
VOCAB = 160

# Sizes by the names of fields in configs; only those that a config has are set.
TINY: dict[str, Any] = {
    # layers and widths
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim_model": 64, "emb_dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "dim_ff": 96, "n_inner": 96, "dff": 96,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
    # attention
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "dim_head": 16, "kv_channels": 16,
    "sliding_window": 8, "query_pre_attn_scalar": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_intermediate_size": 32, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    # the rest
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_sequence_length": 512, "max_seq_len": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
    # multimodal configs take their language model's values inside
}  # fmt: skip

SPECIAL: dict[str, dict[str, Any]] = {}


def make_config(model_type: str, **changes: Any) -> Any:
    """Return a small config. Fields that are not in `TINY` keep the values of the library."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    values = {**tiny_values(config_class), **SPECIAL.get(model_type, {}), **changes}
    if "text_config" in getattr(config_class, "sub_configs", {}) and "text_config" not in values:
        text_class = config_class.sub_configs["text_config"]
        if getattr(text_class, "model_type", ""):
            values = {"text_config": {**tiny_values(text_class), **SPECIAL.get(text_class.model_type, {})}} | SPECIAL.get(
                model_type, {}
            )
    return config_class(**values)


def tiny_values(config_class: Any) -> dict[str, Any]:
    fields = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", ()))
    fields |= set(getattr(config_class, "attribute_map", {}))
    return {name: value for name, value in TINY.items() if name in fields}


def make_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model in fp32, with attention of the library."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = make_config(model_type, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():  # norms and biases too: ones and zeros would hide a missing one
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_model(folder: Path, model_type: str, **changes: Any) -> Any:
    model = make_model(model_type, **changes)
    model.save_pretrained(folder)
    return model
