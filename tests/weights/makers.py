"""Tiny handmade models on disk, so small that two thousand of them can be broken and opened in a minute."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 64, 96, 4, 2, 16, 64, 2

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8  # type numbers of GGUF


# Bytes of the scale, or of the scale and the minimum, in a block of 32 or 256 weights.
SCALE_BYTES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), slice(0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), slice(0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q6_K": slice(208, 210),
    "TQ1_0": slice(52, 54),
    "TQ2_0": slice(64, 66),
}


def set_scales(kind: str, blocks: NDArray[np.uint8], scales: NDArray[np.floating[Any]]) -> None:
    """Write scales and minima [N, 2] into blocks [N, bytes]. MXFP4 gets the power of two below the scale."""
    halves = scales.astype("<f2")
    if kind in SCALE_BYTES:
        place = SCALE_BYTES[kind]
        blocks[:, place] = halves.view(np.uint8)[:, : place.stop - place.start]
    elif kind == "MXFP4":
        blocks[:, 0] = np.frexp(np.maximum(np.abs(scales[:, 0]), 2.0**-22))[1] + 126
    else:  # IQ1_M: the highest four bits of each of four numbers
        assert kind == "IQ1_M"
        numbers = np.ascontiguousarray(blocks[:, 48:56]).view("<u2") & 0x0FFF
        bits = halves[:, :1].copy().view("<u2") >> np.arange(0, 16, 4, dtype=np.uint16)
        blocks[:, 48:56] = (numbers | bits << 12).view(np.uint8)


class Tensor(NamedTuple):
    dims: tuple[int, ...]  # in GGUF's order: columns first
    kind: int
    data: bytes
    offset: int | None = None  # None: the next free one


# GGUF


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def encoded(value: Any) -> bytes:
    """Encode a value after its type; bytes are used as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    head = struct.pack("<I", 9)
    if value and isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(text(one) for one in value)
    if value and isinstance(value[0], bool):
        return head + struct.pack(f"<IQ{len(value)}B", 7, len(value), *value)
    return head + struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)


def make_gguf(
    keys: Sequence[tuple[str | bytes, Any]], tensors: Sequence[tuple[str | bytes, Tensor]], alignment: int = 32
) -> bytes:
    """Make a file as llama.cpp would write it, or, with other arguments, one it never would."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(text(key) + encoded(value) for key, value in keys)
    body = b""
    for name, one in tensors:
        offset = len(body) if one.offset is None else one.offset
        head += text(name) + struct.pack(f"<I{len(one.dims)}QIQ", len(one.dims), *one.dims, one.kind, offset)
        body += one.data + b"\0" * (-len(one.data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body


def llama_keys(**changes: Any) -> list[tuple[str | bytes, Any]]:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return [(key, value) for key, value in keys.items() if value is not None]


def weights(rng: np.random.Generator, *dims: int, kind: int = F32) -> Tensor:
    """Make random numbers in a type that needs no quantiser: scales of 1/64 before random codes."""
    count = int(np.prod(dims))
    if kind in (F32, F16):
        data = (rng.standard_normal(count) / 8).astype("<f4" if kind == F32 else "<f2").tobytes()
        return Tensor(dims, kind, data)
    code_bytes = 16 if kind == Q4_0 else 32
    scale = struct.pack("<e", 1 / 64)
    codes = rng.integers(0, 256, (count // 32, code_bytes), np.uint8)
    return Tensor(dims, kind, b"".join(scale + row.tobytes() for row in codes))


def llama_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors by GGUF name; the rows of queries and keys are arbitrary."""
    rng = np.random.default_rng(seed)
    tensors = {
        "token_embd.weight": weights(rng, HIDDEN, VOCAB, kind=Q8_0),
        "output_norm.weight": weights(rng, HIDDEN),
    }
    for i in range(LAYERS):
        layer = {
            "attn_norm": weights(rng, HIDDEN),
            "attn_q": weights(rng, HIDDEN, HEADS * HEAD, kind=Q4_0),
            "attn_k": weights(rng, HIDDEN, KV_HEADS * HEAD, kind=Q4_0),
            "attn_v": weights(rng, HIDDEN, KV_HEADS * HEAD, kind=F16),
            "attn_output": weights(rng, HEADS * HEAD, HIDDEN, kind=Q4_0),
            "ffn_norm": weights(rng, HIDDEN),
            "ffn_gate": weights(rng, HIDDEN, FFN, kind=Q4_0),
            "ffn_up": weights(rng, HIDDEN, FFN, kind=Q4_0),
            "ffn_down": weights(rng, FFN, HIDDEN, kind=Q8_0),
        }
        tensors |= {f"blk.{i}.{name}.weight": one for name, one in layer.items()}
    return tensors


EXPERTS = 4


def tiny_gguf(**changes: Any) -> bytes:
    return make_gguf(llama_keys(**changes), list(llama_tensors().items()))


# A folder of safetensors

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, "torch_dtype": "float32", **changes}


def llama_arrays(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return arrays by Hugging Face name, written out so that the table under test is not used."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"model.layers.{i}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


class Stored(NamedTuple):
    dtype: str
    array: NDArray[Any]  # bfloat16 and FP8 as their bits


def mixed_safetensors(tensors: Mapping[str, Stored]) -> bytes:
    """Write safetensors by hand, so that bfloat16 and invalid data are possible."""
    header, body = {}, bytearray()
    for name, (dtype, array) in tensors.items():
        data = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(body)


def safetensors_bytes(arrays: Mapping[str, NDArray[Any]], dtype: str = "F32") -> bytes:
    return mixed_safetensors({name: Stored(dtype, array) for name, array in arrays.items()})


def write_folder(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
    *,
    dtype: str = "F32",
    num_shards: int = 1,
) -> Path:
    folder.mkdir(exist_ok=True)
    arrays = llama_arrays() if arrays is None else arrays
    (folder / "config.json").write_text(json.dumps(config() if settings is None else settings))
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays, dtype))
        return folder
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: array for n, (key, array) in enumerate(arrays.items()) if n % num_shards == i}
        (folder / name).write_bytes(safetensors_bytes(part, dtype))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# A mixture of experts

EXPERT = 96  # rows of one


def moe_config(**changes: Any) -> dict[str, Any]:
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT}
    return config("Qwen3MoeForCausalLM", **{**experts, "norm_topk_prob": True, "head_dim": HEAD, **changes})


def moe_arrays(seed: int = 0, *, is_stacked: bool = False) -> dict[str, NDArray[np.float32]]:
    """Return the arrays of Qwen's mixture by Hugging Face name, an expert's alone or those of all in one."""
    rng = np.random.default_rng(seed)
    arrays = {name: array for name, array in llama_arrays(seed).items() if ".mlp." not in name}

    def add(name: str, *shape: int) -> None:
        arrays[name] = rng.standard_normal(shape).astype(np.float32)

    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        add(f"{layer}.self_attn.q_norm.weight", HEAD)
        add(f"{layer}.self_attn.k_norm.weight", HEAD)
        add(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        if is_stacked:
            add(f"{layer}.mlp.experts.gate_up_proj", EXPERTS, 2 * EXPERT, HIDDEN)
            add(f"{layer}.mlp.experts.down_proj", EXPERTS, HIDDEN, EXPERT)
            continue
        for expert in range(EXPERTS):
            add(f"{layer}.mlp.experts.{expert}.gate_proj.weight", EXPERT, HIDDEN)
            add(f"{layer}.mlp.experts.{expert}.up_proj.weight", EXPERT, HIDDEN)
            add(f"{layer}.mlp.experts.{expert}.down_proj.weight", HIDDEN, EXPERT)
    return arrays


def moe_keys(**changes: Any) -> list[tuple[str | bytes, Any]]:
    experts = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT}
    keys = {str(key).replace("llama.", "qwen3moe."): value for key, value in llama_keys()}
    keys |= {"general.architecture": "qwen3moe", "qwen3moe.attention.key_length": HEAD}
    keys |= {f"qwen3moe.{key}": value for key, value in experts.items()}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return list(keys.items())


def moe_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of Qwen's mixture by GGUF name: a stack for each of an expert's three matrices."""
    rng = np.random.default_rng(seed)
    dense = ("ffn_gate", "ffn_up", "ffn_down")
    tensors = {name: one for name, one in llama_tensors(seed).items() if not name.split(".")[-2].startswith(dense)}
    for i in range(LAYERS):
        layer = {
            "attn_q_norm": weights(rng, HEAD),
            "attn_k_norm": weights(rng, HEAD),
            "ffn_gate_inp": weights(rng, HIDDEN, EXPERTS),
            "ffn_gate_exps": weights(rng, HIDDEN, EXPERT, EXPERTS, kind=Q4_0),
            "ffn_up_exps": weights(rng, HIDDEN, EXPERT, EXPERTS, kind=Q4_0),
            "ffn_down_exps": weights(rng, EXPERT, HIDDEN, EXPERTS, kind=Q8_0),
        }
        tensors |= {f"blk.{i}.{name}.weight": one for name, one in layer.items()}
    return tensors


TRUNCATED = """
import os, sys
from pathlib import Path
from quire.errors import ModelFileError
from quire.weights.checkpoint import FileMap
from quire.weights.opening import open_checkpoint

new = FileMap.__new__
def truncated(cls, path):
    made = new(cls, path)
    os.truncate(path, int(sys.argv[2]))  # by another program
    return made
FileMap.__new__ = truncated
try:
    open_checkpoint(Path(sys.argv[1]))
except ModelFileError as error:
    print(error)
"""


def check_truncated(path: Path, num_bytes: int) -> None:
    """A file that another program truncates while it is opened is refused.

    The server opens models too: the signal that ends a process which uses the map would end it.
    """
    command = [sys.executable, "-c", TRUNCATED, str(path), str(num_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "was truncated while it was read" in done.stdout
