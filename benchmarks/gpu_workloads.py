"""Definitions of `gpu.py`: the shapes, workloads A, B, C and T, vLLM's figures, our targets and the physical limit.

vLLM's figures are for one H200 in bf16 with random weights. They apply only to the full `Scale`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from quire.backends.kv_memory import KVSpec
from quire.core.values import SamplingParams
from quire.weights.opening import open_checkpoint
from quire.weights.spec import ModelSpec
from quire.weights.tensors import num_active_weights, num_weights

QWEN, LLAMA, QWEN_MOE = "qwen3-0.6b", "llama-3-8b", "qwen3-30b-a3b"
QWEN35, QWEN35_MOE, GPT_OSS, GEMMA4 = "qwen3.5-0.8b", "qwen3.5-35b-a3b", "gpt-oss-20b", "gemma-4-26b-a4b"
_DELTA_NET: dict[str, Any] = {
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    QWEN: {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    QWEN_MOE: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    QWEN35: {
        **_DELTA_NET,
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    QWEN35_MOE: {
        **_DELTA_NET,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    GPT_OSS: {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "dtype": "bfloat16",
    },
    GEMMA4: {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262_144,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# For fields that only some shapes have
TINY_PARTS = {
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 64,
    "num_local_experts": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "top_k_experts": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}

# Of the card: bytes per second that a copy reaches (read and written), and products per second in bf16.
COPY_RATE = 4.28e12
PRODUCT_RATE = 790e12


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of everything: as vLLM's figures were measured, or small enough for a test on a CPU."""

    is_quick: bool = False
    max_num_seqs: int = 256
    max_model_len: int = 4096
    a_requests: int = 256
    a_lengths: tuple[int, int] = (100, 1024)
    max_token: int = 10_000
    b_requests: int = 64
    b_shared: int = 2048
    b_own: int = 64
    b_out: int = 128
    c_in: int = 128
    c_out: int = 256
    t_system: int = 1500
    t_persona: int = 500
    t_personas: int = 8
    t_users: int = 256
    t_turns: int = 3
    t_in: int = 100
    t_out: int = 100
    greedy_prompts: int = 24
    greedy_out: int = 48


FULL = Scale()
QUICK = Scale(
    is_quick=True,
    max_num_seqs=8,
    max_model_len=256,
    a_requests=8,
    a_lengths=(4, 24),
    max_token=299,
    b_requests=4,
    b_shared=64,
    b_own=4,
    b_out=4,
    c_in=8,
    c_out=8,
    t_system=40,
    t_persona=12,
    t_personas=2,
    t_users=4,
    t_turns=2,
    t_in=6,
    t_out=4,
    greedy_prompts=4,
    greedy_out=6,
)


class Workload(NamedTuple):
    name: str
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    num_shared: int = 0  # leading tokens that all prompts share

    @property
    def num_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_out(self) -> int:
        return sum(one.max_tokens or 0 for one in self.samplings)


A_TOTALS = {0: (142_827, 133_966), 1: (149_935, 156_222)}  # tokens in and out, at full scale


def workload_a(scale: Scale, seed: int) -> Workload:
    """nano-vllm's workload: uniform lengths of prompts and answers, drawn in this order."""
    rng = Random(seed)
    low, high = scale.a_lengths
    count = range(scale.a_requests)
    prompts = [[rng.randint(0, scale.max_token) for _ in range(rng.randint(low, high))] for _ in count]
    samplings = [SamplingParams(temperature=0.6, seed=i, max_tokens=rng.randint(low, high)) for i in count]
    found = Workload(f"A, seed {seed}", prompts, samplings)
    if not scale.is_quick and (found.num_in, found.num_out) != A_TOTALS[seed]:
        raise RuntimeError(f"{found.name} has {found.num_in} tokens in and {found.num_out} out, not {A_TOTALS[seed]}")
    return found


def workload_b(scale: Scale) -> Workload:
    sampled = [SamplingParams(temperature=0.6, seed=i, max_tokens=scale.b_out) for i in range(scale.b_requests)]
    return _alike("B", scale, scale.b_own, sampled, scale.b_shared)


def workload_c(scale: Scale, clients: int = 1) -> Workload:
    greedy = SamplingParams(temperature=0, max_tokens=scale.c_out)
    return _alike("C" if clients == 1 else f"C x {clients}", scale, scale.c_in, [greedy] * clients)


def _alike(name: str, scale: Scale, num_in: int, samplings: list[SamplingParams], num_shared: int = 0) -> Workload:
    """Return requests with prompts of one length, after a shared head."""
    rng = Random(0)
    head = random_prompt(rng, scale, num_shared)
    return Workload(name, [head + random_prompt(rng, scale, num_in) for _ in samplings], samplings, num_shared)


def first_turn_of_tree(scale: Scale) -> Workload:
    """Return the first turn of workload T: users of several personas, which share a system prompt."""
    rng = Random(0)
    system = random_prompt(rng, scale, scale.t_system)
    heads = [system + random_prompt(rng, scale, scale.t_persona) for _ in range(scale.t_personas)]
    return next_turn_of_tree(scale, 1, [heads[user % len(heads)] for user in range(scale.t_users)])


def next_turn_of_tree(scale: Scale, turn: int, histories: list[list[int]]) -> Workload:
    """Return a turn: every user's history, prompt and answer, and a new question."""
    rng = Random(turn)
    prompts = [history + random_prompt(rng, scale, scale.t_in) for history in histories]
    seeds = range(1000 * turn, 1000 * turn + len(prompts))
    samplings = [SamplingParams(temperature=0.6, seed=seed, max_tokens=scale.t_out) for seed in seeds]
    return Workload(f"T, turn {turn}", prompts, samplings)


def random_prompt(rng: Random, scale: Scale, length: int) -> list[int]:
    return [rng.randint(0, scale.max_token) for _ in range(length)]


def write_shape(name: str, scale: Scale, folder: Path, num_layers: int | None = None) -> ModelSpec:
    """Write a folder that holds only config.json: weights are generated (load_format = "dummy").

    With `num_layers`, the model has only the first ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(SHAPES[name])
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        config |= {field: config[field][:num_layers] for field in ("layer_types",) if field in config}
    if scale.is_quick:
        config |= TINY | {field: value for field, value in TINY_PARTS.items() if field in config}
    (folder / "config.json").write_text(json.dumps(config))
    return open_spec(folder)


def open_spec(folder: Path) -> ModelSpec:
    checkpoint = open_checkpoint(folder, "dummy")
    checkpoint.close()
    return checkpoint.spec


def limit_s(spec: ModelSpec, workload: Workload) -> float:
    """Return the time that no 16-bit implementation on that card can beat, by its memory and its products.

    A step reads all matrices once, and the KV of every context once (a shared prefix once for all); prompts cost
    products. Products of decodes and reads of prompts are counted as free.
    """
    embedding = spec.vocab_size * spec.hidden_size
    num_used = num_weights(spec) - (0 if spec.is_tied else embedding)
    num_layers = num_active_weights(spec) - embedding  # the embedding and the head have the same shape
    kv_spec = KVSpec.of(spec)
    kv_bytes = kv_spec.full_block_bytes(1, 2)
    lengths = [one.max_tokens or 0 for one in workload.samplings]
    num_steps = max(lengths)
    num_read = sum(
        sum(range(len(prompt) - workload.num_shared + 1, len(prompt) - workload.num_shared + length))
        for prompt, length in zip(workload.prompts, lengths, strict=True)
    )
    num_read += workload.num_shared * num_steps
    if len(workload.prompts) == 1:  # a single row reads only the experts it chooses
        num_used = num_layers + embedding
    num_prompt = workload.num_in - workload.num_shared * (len(workload.prompts) - 1)
    # Layers with a window read at most that many tokens, and a state is read and written once per token.
    num_seen = sum(
        sum(min(len(prompt) + i, kv_spec.window) for i in range(1, length))
        for prompt, length in zip(workload.prompts, lengths, strict=True)
    )
    other_bytes = num_seen * kv_spec.window_block_bytes(1, 2) + 2 * sum(lengths) * kv_spec.state_bytes(2)
    read_s = (num_read * kv_bytes + other_bytes + num_steps * 2 * num_used) / COPY_RATE
    return read_s + 2 * num_layers * num_prompt / PRODUCT_RATE


class Anchor(NamedTuple):
    """vLLM 0.26's figure on the same kind of card, our target, and the physical limit."""

    vllm: float | None = None
    bar: float | None = None
    limit: float | None = None  # None: `limit_s`, if it applies


A0, A1, B, C, GAIN = "A, seed 0", "A, seed 1", "B", "C", "C x 4 over the best single"
READY, CACHE, TREE = "ready, cold", "prefix cache at 0 % hits", "T"
UNITS = {B: "s", GAIN: "x", READY: "s", CACHE: "%"}  # of the others: tok/s
ANCHORS: dict[tuple[str, str], Anchor] = {
    (A0, QWEN): Anchor(21_200, 25_500, 32_000),
    (A1, QWEN): Anchor(23_190, 27_800, 32_000),
    (B, QWEN): Anchor(0.65, 0.50),
    (C, QWEN): Anchor(413, 600),
    (GAIN, QWEN): Anchor(None, 3.2),
    (READY, QWEN): Anchor(88, 10),
    (CACHE, QWEN): Anchor(None, 1),
    (A0, LLAMA): Anchor(9_460, 9_900, 11_900),
    (A1, LLAMA): Anchor(10_095, 10_600, 11_900),
    (B, LLAMA): Anchor(1.24, 1.03),
    (C, LLAMA): Anchor(203, 215),
    (GAIN, LLAMA): Anchor(None, 3.2),
    (READY, LLAMA): Anchor(76, 10),
    (CACHE, LLAMA): Anchor(None, 1),
    (TREE, QWEN): Anchor(13_740),
    (TREE, LLAMA): Anchor(8_160),
    (A0, QWEN_MOE): Anchor(5_855, 6_150, 7_600),
    (TREE, QWEN_MOE): Anchor(7_120, 7_200),
    (C, QWEN_MOE): Anchor(None, 250),
    (READY, QWEN_MOE): Anchor(116, 20),
    (A0, QWEN35): Anchor(11_439, 17_000),
    (C, QWEN35): Anchor(369, 550),
    (READY, QWEN35): Anchor(162),
    (C, QWEN35_MOE): Anchor(214, 260),
    (READY, QWEN35_MOE): Anchor(221),
}
