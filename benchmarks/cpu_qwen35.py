"""A random model with the shape of Qwen3.5-0.8B as a GGUF file: for `cpu.py --model qwen3.5-0.8b`.

Three of four layers are gated delta nets. Matrices are Q4_0, which llama.cpp multiplies fastest; the embedding, which
is also the output matrix, is Q8_0. The states keep most of their content from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_random
from cpu_random import Tensor

NAME = "qwen3.5-0.8b"
ARCHITECTURE = "qwen35"
LAYERS, INTERVAL, HIDDEN, FFN_SIZE, VOCAB = 24, 4, 1024, 3584, 248_320
HEADS, KV_HEADS, HEAD_SIZE, ROTARY_SIZE = 8, 2, 256, 64
STATE_HEADS, STATE_SIZE, TAPS = 16, 128, 4
WIDTH = STATE_HEADS * STATE_SIZE  # of all keys, and of all values


def find_or_write(num_layers: int = LAYERS) -> Path:
    """Return the file: about 580 MB."""

    def describe(writer: Any) -> None:
        writer.add_block_count(num_layers)
        writer.add_context_length(32_768)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN_SIZE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e7)
        writer.add_rope_dimension_count(ROTARY_SIZE)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(TAPS)
        writer.add_ssm_inner_size(WIDTH)
        writer.add_ssm_state_size(STATE_SIZE)
        writer.add_ssm_time_step_rank(STATE_HEADS)
        writer.add_ssm_group_count(STATE_HEADS)
        writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", INTERVAL)
        writer.add_vocab_size(VOCAB)

    file_name = f"{NAME}-{num_layers}-layers.Q4_0.gguf"
    return cpu_random.find_or_write(file_name, ARCHITECTURE, _tensors(num_layers), describe)


def _tensors(num_layers: int) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB, HIDDEN), "Q8_0")
    yield Tensor("output_norm.weight", (HIDDEN,), "F32")
    for index in range(num_layers):
        for tensor in _attention() if (index + 1) % INTERVAL == 0 else _delta_net():
            yield tensor._replace(name=f"blk.{index}.{tensor.name}")
        for norm in ("attn_norm", "post_attention_norm"):
            yield Tensor(f"blk.{index}.{norm}.weight", (HIDDEN,), "F32")
        yield Tensor(f"blk.{index}.ffn_gate.weight", (FFN_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_up.weight", (FFN_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_down.weight", (HIDDEN, FFN_SIZE), "Q4_0")


def _attention() -> Iterator[Tensor]:
    yield Tensor("attn_q.weight", (2 * HEADS * HEAD_SIZE, HIDDEN), "Q4_0")  # queries and gates
    yield Tensor("attn_k.weight", (KV_HEADS * HEAD_SIZE, HIDDEN), "Q4_0")
    yield Tensor("attn_v.weight", (KV_HEADS * HEAD_SIZE, HIDDEN), "Q4_0")
    yield Tensor("attn_output.weight", (HIDDEN, HEADS * HEAD_SIZE), "Q4_0")
    yield Tensor("attn_q_norm.weight", (HEAD_SIZE,), "F32")
    yield Tensor("attn_k_norm.weight", (HEAD_SIZE,), "F32")


def _delta_net() -> Iterator[Tensor]:
    yield Tensor("attn_qkv.weight", (3 * WIDTH, HIDDEN), "Q4_0")
    yield Tensor("attn_gate.weight", (WIDTH, HIDDEN), "Q4_0")
    yield Tensor("ssm_beta.weight", (STATE_HEADS, HIDDEN), "Q8_0")
    yield Tensor("ssm_alpha.weight", (STATE_HEADS, HIDDEN), "Q8_0")
    yield Tensor("ssm_conv1d.weight", (3 * WIDTH, TAPS), "F32", 0.5)
    yield Tensor("ssm_a", (STATE_HEADS,), "F32", -1.0)
    yield Tensor("ssm_dt.bias", (STATE_HEADS,), "F32", -4.0)
    yield Tensor("ssm_norm.weight", (STATE_SIZE,), "F32")
    yield Tensor("ssm_out.weight", (HIDDEN, WIDTH), "Q4_0")
