"""GGUF files with random weights in the shape of a model, for `cpu.py`. Written once into quire's cache.

Matrices are Q4_0, which llama.cpp multiplies fastest; embeddings and logits are Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.weights.hub import cache_dir

WEIGHT_STD = 0.02
CODE_STD = {"Q4_0": 4.6, "Q8_0": 73.9}  # of codes that are all equally frequent
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first
    type: str = "Q4_0"
    value: float | None = None  # of all elements; None: 1 for vectors, random for matrices


class Shape(NamedTuple):
    architecture: str
    num_layers: int
    fields: dict[str, Any]  # by method of a GGUF writer, without `add_`
    tensors: tuple[Tensor, ...]
    layer: Callable[[int], list[Tensor]]  # tensors of a layer, by its number

    def find_or_write(self, name: str, num_layers: int | None) -> Path:
        num_layers = num_layers or self.num_layers
        path = cache_dir() / "benchmarks" / f"{name}-{num_layers}-layers.Q4_0.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            layers = [
                tensor._replace(name=f"blk.{index}.{tensor.name}")
                for index in range(num_layers)
                for tensor in self.layer(index)
            ]
            _write(partial, self.architecture, {**self.fields, "block_count": num_layers}, [*self.tensors, *layers])
            partial.rename(path)
        return path


def _olmoe_layer(_index: int) -> list[Tensor]:
    """A random router chooses all experts about equally often, which is the worst case for both contenders."""
    hidden, num_experts, expert_size = 2048, 64, 1024
    return [
        *(Tensor(f"{name}.weight", (hidden,), "F32") for name in ("attn_norm", "attn_q_norm", "attn_k_norm")),
        *(Tensor(f"attn_{name}.weight", (hidden, hidden)) for name in ("q", "k", "v", "output")),
        Tensor("ffn_norm.weight", (hidden,), "F32"),
        Tensor("ffn_gate_inp.weight", (num_experts, hidden), "F32"),
        Tensor("ffn_gate_exps.weight", (num_experts, expert_size, hidden)),
        Tensor("ffn_up_exps.weight", (num_experts, expert_size, hidden)),
        Tensor("ffn_down_exps.weight", (num_experts, hidden, expert_size)),
    ]


def _qwen35_layer(index: int) -> list[Tensor]:
    """Three of four layers are gated delta nets, whose states keep most of their content from token to token."""
    hidden, ffn_size = 1024, 3584
    return [
        *(_qwen35_attention(hidden) if index % 4 == 3 else _qwen35_delta_net(hidden)),
        *(Tensor(f"{name}.weight", (hidden,), "F32") for name in ("attn_norm", "post_attention_norm")),
        *(Tensor(f"ffn_{name}.weight", (ffn_size, hidden)) for name in ("gate", "up")),
        Tensor("ffn_down.weight", (hidden, ffn_size)),
    ]


def _qwen35_attention(hidden: int) -> list[Tensor]:
    return [
        Tensor("attn_q.weight", (2 * 8 * 256, hidden)),  # queries and gates
        *(Tensor(f"attn_{name}.weight", (2 * 256, hidden)) for name in ("k", "v")),
        Tensor("attn_output.weight", (hidden, 8 * 256)),
        *(Tensor(f"attn_{name}_norm.weight", (256,), "F32") for name in ("q", "k")),
    ]


def _qwen35_delta_net(hidden: int) -> list[Tensor]:
    num_heads, size = 16, 128
    width = num_heads * size
    return [
        Tensor("attn_qkv.weight", (3 * width, hidden)),
        Tensor("attn_gate.weight", (width, hidden)),
        *(Tensor(f"ssm_{name}.weight", (num_heads, hidden), "Q8_0") for name in ("beta", "alpha")),
        Tensor("ssm_conv1d.weight", (3 * width, 4), "F32", 0.5),
        Tensor("ssm_a", (num_heads,), "F32", -1.0),
        Tensor("ssm_dt.bias", (num_heads,), "F32", -4.0),
        Tensor("ssm_norm.weight", (size,), "F32"),
        Tensor("ssm_out.weight", (hidden, width)),
    ]


OLMOE = "olmoe"
SHAPES = {
    OLMOE: Shape(  # OLMoE 1B-7B with 8 of its 16 layers; 240 MB per layer
        "olmoe",
        8,
        {
            "context_length": 4096,
            "embedding_length": 2048,
            "feed_forward_length": 1024,
            "head_count": 16,
            "head_count_kv": 16,
            "layer_norm_rms_eps": 1e-5,
            "rope_freq_base": 10_000.0,
            "expert_count": 64,
            "expert_used_count": 8,
            "vocab_size": 50_304,
        },
        (
            Tensor("token_embd.weight", (50_304, 2048), "Q8_0"),
            Tensor("output.weight", (50_304, 2048), "Q8_0"),
            Tensor("output_norm.weight", (2048,), "F32"),
        ),
        _olmoe_layer,
    ),
    "qwen3.5-0.8b": Shape(  # 580 MB
        "qwen35",
        24,
        {
            "context_length": 32_768,
            "embedding_length": 1024,
            "feed_forward_length": 3584,
            "head_count": 8,
            "head_count_kv": 2,
            "key_length": 256,
            "value_length": 256,
            "layer_norm_rms_eps": 1e-6,
            "rope_freq_base": 1e7,
            "rope_dimension_count": 64,
            "rope_dimension_sections": [11, 11, 10, 0],
            "ssm_conv_kernel": 4,
            "ssm_inner_size": 2048,
            "ssm_state_size": 128,
            "ssm_time_step_rank": 16,
            "ssm_group_count": 16,
            "full_attention_interval": 4,
            "vocab_size": 248_320,
        },
        (Tensor("token_embd.weight", (248_320, 1024), "Q8_0"), Tensor("output_norm.weight", (1024,), "F32")),
        _qwen35_layer,
    ),
}


def _write(path: Path, architecture: str, fields: dict[str, Any], tensors: list[Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("none")
    for tensor in tensors:
        shape = _shape_in_bytes(tensor)
        dtype: Any = np.dtype(np.float32 if tensor.type == "F32" else np.uint8)
        raw = None if tensor.type == "F32" else gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for tensor in tensors:
        writer.write_tensor_data(_values(rng, tensor))
    writer.close()


def _shape_in_bytes(tensor: Tensor) -> tuple[int, ...]:
    if tensor.type == "F32":
        return tensor.shape
    return (*tensor.shape[:-1], tensor.shape[-1] // 32 * BLOCK_BYTES[tensor.type])


def _values(rng: np.random.Generator, tensor: Tensor) -> Any:
    shape = _shape_in_bytes(tensor)
    if tensor.type == "F32":
        if tensor.value is not None or len(shape) == 1:
            return np.full(shape, 1 if tensor.value is None else tensor.value, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // BLOCK_BYTES[tensor.type], BLOCK_BYTES[tensor.type]), np.uint8)
    blocks[:, :2] = np.array([WEIGHT_STD / CODE_STD[tensor.type]], np.float16).view(np.uint8)
    return blocks.reshape(shape)
