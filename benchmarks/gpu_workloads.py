"""Definitions of `gpu.py`: the shapes, workloads A, B and C, vLLM's figures, our targets and the physical limit.

vLLM's figures are for one H200 in bf16 with random weights. They apply only to the full `Scale`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from quire.core.request import SamplingParams
from quire.weights.opening import open_checkpoint
from quire.weights.spec import ModelSpec
from quire.weights.tensors import expected_tensors

QWEN, LLAMA = "qwen3-0.6b", "llama-3-8b"
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
    peer_requests: int = 64
    peer_in: int = 128
    peer_out: int = 256
    greedy_prompts: int = 24
    greedy_out: int = 48
    profiled_steps: int = 150


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
    peer_requests=2,
    peer_in=4,
    peer_out=4,
    greedy_prompts=4,
    greedy_out=6,
    profiled_steps=6,
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


def workload_b(scale: Scale, seed: int = 0) -> Workload:
    rng = Random(seed)
    shared = random_prompt(rng, scale, scale.b_shared)
    prompts = [shared + random_prompt(rng, scale, scale.b_own) for _ in range(scale.b_requests)]
    samplings = [SamplingParams(temperature=0.6, seed=i, max_tokens=scale.b_out) for i in range(scale.b_requests)]
    return Workload("B", prompts, samplings, scale.b_shared)


def workload_c(scale: Scale, clients: int = 1, seed: int = 0) -> Workload:
    rng = Random(seed)
    prompts = [random_prompt(rng, scale, scale.c_in) for _ in range(clients)]
    samplings = [SamplingParams(temperature=0, max_tokens=scale.c_out)] * clients
    return Workload("C" if clients == 1 else f"C x {clients}", prompts, samplings)


def workload_peer(scale: Scale, seed: int = 0) -> Workload:
    """Return the workload for the comparison with `transformers`."""
    rng = Random(seed)
    prompts = [random_prompt(rng, scale, scale.peer_in) for _ in range(scale.peer_requests)]
    samplings = [SamplingParams(temperature=0, max_tokens=scale.peer_out)] * scale.peer_requests
    return Workload("beside transformers", prompts, samplings)


def random_prompt(rng: Random, scale: Scale, length: int) -> list[int]:
    return [rng.randint(0, scale.max_token) for _ in range(length)]


def write_shape(name: str, scale: Scale, folder: Path) -> ModelSpec:
    """Write a folder that holds only config.json: weights are generated (load_format = "dummy")."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], **(TINY if scale.is_quick else {})}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder, "dummy")
    checkpoint.close()
    return checkpoint.spec


def limit_s(spec: ModelSpec, workload: Workload) -> float:
    """Return the time that no 16-bit implementation on that card can beat, by its memory and its products.

    A step reads all matrices once, and the KV of every context once (a shared prefix once for all); prompts cost
    products. Products of decodes and reads of prompts are counted as free.
    """
    shapes = expected_tensors(spec)
    embedding = math.prod(shapes["model.embed_tokens.weight"])
    num_used = sum(math.prod(shape) for shape in shapes.values()) - (0 if spec.is_tied else embedding)
    num_layers = num_used - embedding  # the embedding and the head have the same shape
    kv_bytes = 2 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_size
    lengths = [one.max_tokens or 0 for one in workload.samplings]
    num_steps = max(lengths)
    num_read = sum(
        sum(range(len(prompt) - workload.num_shared + 1, len(prompt) - workload.num_shared + length))
        for prompt, length in zip(workload.prompts, lengths, strict=True)
    )
    num_read += workload.num_shared * num_steps
    num_prompt = workload.num_in - workload.num_shared * (len(workload.prompts) - 1)
    read_s = (num_read * kv_bytes + num_steps * 2 * num_used) / COPY_RATE
    return read_s + 2 * num_layers * num_prompt / PRODUCT_RATE


class Anchor(NamedTuple):
    """vLLM 0.26's figure on the same kind of card, our target, and the physical limit."""

    unit: str
    vllm: float | None
    bar: float | None
    limit: float | None = None  # None: `limit_s`, if it applies

    @property
    def is_more_better(self) -> bool:
        return self.unit in ("tok/s", "x")


A0, A1, B, C, GAIN = "A, seed 0", "A, seed 1", "B", "C", "C x 4 over the best single"
READY, CACHE = "ready, cold", "prefix cache at 0 % hits"
ANCHORS: dict[tuple[str, str], Anchor] = {
    (A0, QWEN): Anchor("tok/s", 21_200, 25_500, 32_000),
    (A1, QWEN): Anchor("tok/s", 23_190, 27_800, 32_000),
    (B, QWEN): Anchor("s", 0.65, 0.50),
    (C, QWEN): Anchor("tok/s", 413, 600),
    (GAIN, QWEN): Anchor("x", None, 3.2),
    (READY, QWEN): Anchor("s", 88, 10),
    (CACHE, QWEN): Anchor("%", None, 1),
    (A0, LLAMA): Anchor("tok/s", 9_460, 9_900, 11_900),
    (A1, LLAMA): Anchor("tok/s", 10_095, 10_600, 11_900),
    (B, LLAMA): Anchor("s", 1.24, 1.03),
    (C, LLAMA): Anchor("tok/s", 203, 215),
    (GAIN, LLAMA): Anchor("x", None, 3.2),
    (READY, LLAMA): Anchor("s", 76, 10),
    (CACHE, LLAMA): Anchor("%", None, 1),
}
PEER_ANCHOR = Anchor("tok/s", None, None)
