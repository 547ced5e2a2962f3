"""A complete model that loads quickly: two layers of random weights, a trained tokenizer, a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.weights.config import spec_from_config
from quire.weights.tensors import expected_tensors, transformers_parameters
from tests.text.vocabularies import byte_level_json
from tests.weights.makers import safetensors_bytes

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    max_model_len: int = 4096,
    template: str = TEMPLATE,
    special: Sequence[str] = (),
) -> Path:
    """Write a llama model with 2 layers, hidden size 64, 4 heads and 2 KV heads. `special`: further special tokens."""
    words = byte_level_json()
    first = max(token["id"] for token in words["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    words["added_tokens"] += [
        {"id": first + i, "content": content, "special": True, **flags} for i, content in enumerate(special)
    ]
    vocab_size = max(*words["model"]["vocab"].values(), *(token["id"] for token in words["added_tokens"])) + 1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(seed)
    spec = spec_from_config(config, {}, "tiny", "F32")
    names = {own: name for name, (own,) in transformers_parameters(spec).items()}
    arrays = {
        names[own]: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for own, shape in expected_tensors(spec).items()
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays))
    return folder
