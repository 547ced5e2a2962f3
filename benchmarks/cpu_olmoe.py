"""A random model with the shape of OLMoE 1B-7B as a GGUF file: for `cpu.py --model olmoe`.

Experts and attention are Q4_0, which llama.cpp multiplies fastest; embeddings and logits are Q8_0. A random router
chooses all experts about equally often, which is the worst case for both contenders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_random
from cpu_random import Tensor

NAME = "olmoe"
HIDDEN, HEADS, EXPERTS, CHOSEN, EXPERT_SIZE, VOCAB = 2048, 16, 64, 8, 1024, 50_304


def find_or_write(num_layers: int = 8) -> Path:
    """Return the file: about 240 MB per layer, of which the real model has 16."""

    def describe(writer: Any) -> None:
        writer.add_block_count(num_layers)
        writer.add_context_length(4096)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(EXPERT_SIZE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(CHOSEN)
        writer.add_vocab_size(VOCAB)

    return cpu_random.find_or_write(f"{NAME}-{num_layers}-layers.Q4_0.gguf", NAME, _tensors(num_layers), describe)


def _tensors(num_layers: int) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB, HIDDEN), "Q8_0")
    yield Tensor("output.weight", (VOCAB, HIDDEN), "Q8_0")
    yield Tensor("output_norm.weight", (HIDDEN,), "F32")
    for index in range(num_layers):
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield Tensor(f"blk.{index}.{norm}.weight", (HIDDEN,), "F32")
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield Tensor(f"blk.{index}.{matrix}.weight", (HIDDEN, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_gate_inp.weight", (EXPERTS, HIDDEN), "F32")
        yield Tensor(f"blk.{index}.ffn_gate_exps.weight", (EXPERTS, EXPERT_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_up_exps.weight", (EXPERTS, EXPERT_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_down_exps.weight", (EXPERTS, HIDDEN, EXPERT_SIZE), "Q4_0")
