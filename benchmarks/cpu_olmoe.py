"""A random model with the shape of OLMoE 1B-7B as a GGUF file: for `cpu.py --model olmoe`.

Experts and attention are Q4_0, which llama.cpp multiplies fastest; embeddings and logits are Q8_0. A random router
chooses all experts about equally often, which is the worst case for both contenders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.weights.hub import cache_dir

NAME = "olmoe"
HIDDEN, HEADS, EXPERTS, CHOSEN, EXPERT_SIZE, VOCAB = 2048, 16, 64, 8, 1024, 50_304
WEIGHT_STD = 0.02
CODE_STD = {"Q4_0": 4.6, "Q8_0": 73.9}  # of codes that are all equally frequent
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first
    type: str


def find_or_write(num_layers: int) -> Path:
    """Return the file, written once into quire's cache: about 240 MB per layer."""
    path = cache_dir() / "benchmarks" / f"{NAME}-{num_layers}-layers.Q4_0.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write(partial, num_layers)
        partial.rename(path)
    return path


def _tensors(num_layers: int) -> Iterator[Tensor]:
    yield Tensor("token_embd", (VOCAB, HIDDEN), "Q8_0")
    yield Tensor("output", (VOCAB, HIDDEN), "Q8_0")
    yield Tensor("output_norm", (HIDDEN,), "F32")
    for index in range(num_layers):
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield Tensor(f"blk.{index}.{norm}", (HIDDEN,), "F32")
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield Tensor(f"blk.{index}.{matrix}", (HIDDEN, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_gate_inp", (EXPERTS, HIDDEN), "F32")
        yield Tensor(f"blk.{index}.ffn_gate_exps", (EXPERTS, EXPERT_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_up_exps", (EXPERTS, EXPERT_SIZE, HIDDEN), "Q4_0")
        yield Tensor(f"blk.{index}.ffn_down_exps", (EXPERTS, HIDDEN, EXPERT_SIZE), "Q4_0")


def _write(path: Path, num_layers: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, NAME)
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
    writer.add_tokenizer_model("none")
    arrays = [(tensor, _shape_in_bytes(tensor)) for tensor in _tensors(num_layers)]
    for tensor, shape in arrays:
        dtype: Any = np.dtype(np.float32 if tensor.type == "F32" else np.uint8)
        raw = None if tensor.type == "F32" else gguf.GGMLQuantizationType[tensor.type]
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(f"{tensor.name}.weight", shape, dtype, num_bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for tensor, shape in arrays:
        writer.write_tensor_data(_values(rng, tensor, shape))
    writer.close()


def _shape_in_bytes(tensor: Tensor) -> tuple[int, ...]:
    if tensor.type == "F32":
        return tensor.shape
    return (*tensor.shape[:-1], tensor.shape[-1] // 32 * BLOCK_BYTES[tensor.type])


def _values(rng: np.random.Generator, tensor: Tensor, shape: tuple[int, ...]) -> Any:
    if tensor.type == "F32":
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // BLOCK_BYTES[tensor.type], BLOCK_BYTES[tensor.type]), np.uint8)
    blocks[:, :2] = np.array([WEIGHT_STD / CODE_STD[tensor.type]], np.float16).view(np.uint8)
    return blocks.reshape(shape)
