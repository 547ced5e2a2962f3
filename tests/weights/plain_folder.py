"""Writes a GGUF file of a llama model as a folder of plain safetensors with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from quire.text.vocab_spec import gguf_vocab
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import transformers_parameters
from tests.weights.layouts import write_tensors
from tests.weights.makers import Stored


def write_plain_folder(folder: Path, source: Path) -> Path:
    """Write the weights of `source`, whatever their type, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(source)
    names = transformers_parameters(checkpoint.spec)  # none of a llama's is fused
    tensors = {name: Stored("F32", to_float32(checkpoint.read(own)).astype("<f4")) for name, (own,) in names.items()}
    write_tensors(folder, {**_config(checkpoint), **_write_tokenizer(folder, checkpoint)}, tensors)
    checkpoint.close()
    return folder


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    attention, mlp = spec.attention, spec.layers[0].mlp
    assert attention.rope is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": spec.is_tied,
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json, and return the special tokens for config.json."""
    files = checkpoint.tokenizer_files()
    assert files.gguf is not None
    vocab = gguf_vocab(files.gguf)
    parts = {"version": "1.0", "truncation": None, "padding": None, **vocab.spec}
    tokenizers.Tokenizer.from_str(json.dumps(parts)).save(str(folder / "tokenizer.json"))
    tokens = files.gguf["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[token_id] for name, token_id in vocab.named.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": files.chat_template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"eos_token_id": list(vocab.eos_ids), "bos_token_id": vocab.named.get("bos")}


def read_all(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return all tensors of a checkpoint in float32, under quire's names."""
    checkpoint = open_checkpoint(path)
    found = {name: to_float32(checkpoint.read(name)) for name in checkpoint.tensors}
    checkpoint.close()
    return found
