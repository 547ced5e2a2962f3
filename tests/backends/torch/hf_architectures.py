"""Small random models of the decoders in `transformers`, made from their own configs with small sizes.

`TINY` gives sizes by the names that configs use for them; `SPECIAL` adds what a model type needs beside them. Used by
the tests and by the survey, which writes the tables of docs/transformers.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.backends.torch.models.transformers_model import TransformersModel, load_transformers_model
from quire.errors import UnsupportedModel
from quire.weights.safetensors import SafetensorsCheckpoint
from tests.backends.contract import VOCAB, random_prompt
from tests.backends.torch.families import logprobs
from tests.backends.torch.rig import Rig, same_rows

NUM_LAYERS = 3
MAX_PARAMETERS = 20_000_000
MAX_MODEL_LEN = 256
BOUND = 1e-4  # of log-probabilities in fp32

# Sizes by the names of fields in configs; only those that a config has are set.
TINY: dict[str, Any] = {
    # layers and widths
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS, "depth": 2, "num_blocks": 2,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim_model": 64, "emb_dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "dim_ff": 96, "n_inner": 96, "dff": 96,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "mlp_dim": 96,
    # attention
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "dim_head": 16,
    "kv_channels": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_intermediate_size": 32, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    # the rest
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_sequence_length": 512, "max_seq_len": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

LATENT = {"num_key_value_heads": 4}  # multi-head latent attention: every head has its own keys and values
SOME_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
SMALL_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_VISION |= {"image_size": 32, "patch_size": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "codegen": {"rotary_dim": 8},
    "cohere2": SOME_WINDOWS,
    "cohere_compass_text": {**SOME_WINDOWS, "rope_parameters": ROPES},
    "cwm": SOME_WINDOWS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "exaone4": SOME_WINDOWS,
    "gemma3": {"vision_config": SMALL_VISION, "mm_tokens_per_image": 4},
    "gemma3_text": SOME_WINDOWS,
    "gemma3n_text": {**SOME_WINDOWS, "num_kv_shared_layers": 1, "laurel_rank": 8, "num_hidden_layers": 3},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16}},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 32,
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["attention"] * NUM_LAYERS,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "hy_v4": LATENT,
    "inkling_text": {},
    "kimi_linear": LATENT,
    "longcat_flash": {**LATENT, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "minicpm3": LATENT,
    "mistral4": LATENT,
    "olmo3": SOME_WINDOWS,
    "reformer": {"is_decoder": True},
    "youtu": LATENT,
}

# Model types that run, and have the distributions of eager attention.
NUM_KEPT = 36  # in `make test`: the first ones. Most of the others share their code with one of them.
EQUAL = """
    afmoe arcee biogpt bitnet cohere2 ctrl deepseek_v2 deepseek_v3 diffllama dots1 exaone4 flex_olmo gemma2
    gemma3n_text gemma4_unified gemma4_unified_text glm4_moe_lite gpt2 gpt_bigcode gpt_neox granitemoehybrid helium
    jetmoe llama longcat_flash mimo_v2_flash minicpm3 minimax_m2 modernbert-decoder nemotron opt persimmon phi
    phimoe stablelm youtu

    apertus aria_text axk1 beam cohere cohere2_moe cohere_compass_text cwm ernie4_5 ernie4_5_moe exaone_moe
    flint gemma gemma3 gemma3_text gemma4 gemma4_text glm glm4 glm4_moe gpt-sw3 gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoeshared hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax jais2 kolibri1 laguna mellum minimax_m3_vl_text ministral ministral3 mistral mixtral
    nanochat olmo olmo2 olmo3 olmoe phi3 phi4_multimodal qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
    solar_open starcoder2 vaultgemma
""".split()  # noqa: SIM905
# Model types that do not run, and a part of the reason: one of each kind, because all of them take minutes.
REFUSED = {
    "bert": "attends to later tokens",
    "bloom": "has attention of its own",
    "deepseek_v32": "layers of type indexed_attention",
    "doge": "changes the mask of its attention",
    "falcon_h1": "mamba_d_state is 256: Mamba layers do not run",
    "llama4_text": "layers of type chunked_attention",
    "lfm2": "layers of type conv",
    "mamba": "state_size is 16: Mamba layers do not run",
    "qwen3_next": "layers of type linear_attention",
    "rwkv": "recurrent state",
}


def make_config(model_type: str, **changes: Any) -> Any:
    """Return a small config. Fields that are not in `TINY` keep the values of the library."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    parts = {
        name: {**tiny_values(part), **SPECIAL.get(getattr(part, "model_type", ""), {})}
        for name, part in getattr(config_class, "sub_configs", {}).items()
        if name.endswith("_config") and getattr(part, "model_type", "")
    }
    return config_class(**{**tiny_values(config_class), **parts, **SPECIAL.get(model_type, {}), **changes})


def tiny_values(config_class: Any) -> dict[str, Any]:
    fields = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", ()))
    fields |= set(getattr(config_class, "attribute_map", {}))
    return {name: value for name, value in TINY.items() if name in fields}


def write_model(folder: Path, model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Write a folder with a random model in fp32; return the model, with attention of the library."""
    from transformers import AutoModelForCausalLM

    config = make_config(model_type, **changes)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in shape.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{model_type}: a tiny config has {num_parameters} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():  # norms and biases too: ones and zeros would hide a missing one
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


class EagerReference:
    """`transformers` with attention of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        return logprobs(self.model, tokens)


def load_tiny(folder: Path) -> TransformersModel:
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        return load_transformers_model(checkpoint, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    finally:
        checkpoint.close()


def largest_error(reference: EagerReference, rig: Rig) -> float:
    """Run prompts whole, in chunks, side by side and on a shared prefix; return the largest error of a distribution."""
    prompts = [random_prompt(1, 37), random_prompt(2, 5), [*random_prompt(1, 37), 9, 8, 7]]
    errors = []
    rig.reset(max_chunk_tokens=16)
    ids = [rig.start(prompt, 4) for prompt in prompts[:2]]
    answers = list(rig.run(*ids).values())
    answers.append(rig.answer(prompts[2], 3))
    if answers[2].num_cached_tokens < 32:
        raise UnsupportedModel("nothing was reused")
    rig.reset()
    answers.append(rig.answer(prompts[0], 1))  # in one chunk
    for prompt, answer in zip([*prompts, prompts[0]], answers, strict=True):
        assert answer.error is None, answer.error
        expected = reference.logprobs([*prompt, *answer.tokens])
        errors.append(same_rows(answer, expected, len(prompt)))
    return max(errors)
