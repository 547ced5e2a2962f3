"""Makes small GGUF models with the mixture of types of Q4_K_M files, or with all matrices in one type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.weights.checkpoint import TensorType
from quire.weights.gguf import BLOCKS, FILE_TYPES
from tests.weights.makers import EXPERTS, VOCAB, Tensor, llama_keys, make_gguf, moe_keys, set_scales

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 256, 256, 2, 4, 2
F32 = TensorType.F32
NUMBERS = {kind: number for number, (kind, _block) in FILE_TYPES.items()}
# Scale and minimum of blocks of random bytes whose weights are about 0.05.
SCALES = {
    "Q4_K": (4e-4, 3e-3), "Q5_K": (2e-4, 3e-3), "Q6_K": (4e-5, 0.0), "MXFP4": (0.02, 0.0), "Q4_0": (0.01, 0.0),
    "Q4_1": (0.01, -0.08), "Q5_0": (0.005, 0.0), "Q5_1": (0.005, -0.08), "Q8_0": (7e-4, 0.0),
}  # fmt: skip


def random_blocks(rng: np.random.Generator, kind: TensorType, rows: int, columns: int) -> Tensor:
    """Make a matrix of random codes, or of random numbers."""
    if kind is F32:
        return Tensor(
            (columns, rows), NUMBERS[F32], (rng.standard_normal((rows, columns)) / 20).astype("<f4").tobytes()
        )
    block = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows * columns // block.num_elements, block.num_bytes), np.uint8)
    set_scales(kind, blocks, rng.uniform(0.5, 1.5, (len(blocks), 2)) * SCALES[kind])
    return Tensor((columns, rows), NUMBERS[kind], blocks.tobytes())


def k_quants(kind: str | None = None, num_layers: int = LAYERS) -> bytes:
    """Make a llama model in Q4_K, with values, down projections and the head in Q6_K; or all of it in `kind`."""
    rng = np.random.default_rng(0)
    most, others = (TensorType(kind), TensorType(kind)) if kind else (TensorType.Q4_K, TensorType.Q6_K)
    ones = Tensor((HIDDEN,), NUMBERS[F32], np.ones(HIDDEN, "<f4").tobytes())
    tensors = {
        "token_embd.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output.weight": random_blocks(rng, others, VOCAB, HIDDEN),
        "output_norm.weight": ones,
    }
    head_size = HIDDEN // HEADS
    for i in range(num_layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": ones,
            f"blk.{i}.ffn_norm.weight": ones,
            f"blk.{i}.attn_q.weight": random_blocks(rng, most, HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": random_blocks(rng, most, KV_HEADS * head_size, HIDDEN),
            f"blk.{i}.attn_v.weight": random_blocks(rng, others, KV_HEADS * head_size, HIDDEN),
            f"blk.{i}.attn_output.weight": random_blocks(rng, most, HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": random_blocks(rng, most, FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": random_blocks(rng, most, FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": random_blocks(rng, others, HIDDEN, FFN),
        }
    keys = llama_keys(
        llama__block_count=num_layers,
        llama__embedding_length=HIDDEN,
        llama__feed_forward_length=FFN,
        llama__attention__head_count=HEADS,
        llama__attention__head_count_kv=KV_HEADS,
    )
    return make_gguf(keys, list(tensors.items()))


def write_k_quants(folder: Path, kind: str | None = None) -> Path:
    path = folder / f"{kind or 'mixed'}.gguf"
    path.write_bytes(k_quants(kind))
    return path


def write_expert_quants(folder: Path, types: Sequence[tuple[str, str]]) -> Path:
    """Write a mixture of experts. `types`: of gates and ups, and of downs, in each layer; other matrices are F32."""
    rng = np.random.default_rng(0)
    head_size = HIDDEN // HEADS

    def ones(count: int) -> Tensor:
        return Tensor((count,), NUMBERS[F32], np.ones(count, "<f4").tobytes())

    def stack(kind: str, rows: int, columns: int) -> Tensor:
        whole = random_blocks(rng, TensorType(kind), EXPERTS * rows, columns)
        return whole._replace(dims=(columns, rows, EXPERTS))

    tensors = {
        "token_embd.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output_norm.weight": ones(HIDDEN),
    }
    for i, (gate_up, down) in enumerate(types):
        layer = {
            "attn_norm": ones(HIDDEN),
            "ffn_norm": ones(HIDDEN),
            "attn_q_norm": ones(head_size),
            "attn_k_norm": ones(head_size),
            "attn_q": random_blocks(rng, F32, HIDDEN, HIDDEN),
            "attn_k": random_blocks(rng, F32, KV_HEADS * head_size, HIDDEN),
            "attn_v": random_blocks(rng, F32, KV_HEADS * head_size, HIDDEN),
            "attn_output": random_blocks(rng, F32, HIDDEN, HIDDEN),
            "ffn_gate_inp": random_blocks(rng, F32, EXPERTS, HIDDEN),
            "ffn_gate_exps": stack(gate_up, FFN, HIDDEN),
            "ffn_up_exps": stack(gate_up, FFN, HIDDEN),
            "ffn_down_exps": stack(down, HIDDEN, FFN),
        }
        tensors |= {f"blk.{i}.{name}.weight": one for name, one in layer.items()}
    keys = moe_keys(
        qwen3moe__block_count=len(types),
        qwen3moe__embedding_length=HIDDEN,
        qwen3moe__expert_feed_forward_length=FFN,
        qwen3moe__attention__head_count=HEADS,
        qwen3moe__attention__head_count_kv=KV_HEADS,
        qwen3moe__attention__key_length=head_size,
    )
    path = folder / "experts.gguf"
    path.write_bytes(make_gguf(keys, list(tensors.items())))
    return path
