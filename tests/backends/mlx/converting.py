"""Writes the default model as mlx-lm's converter would: a folder with quantised safetensors and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import tokenizers

from quire.backends.mlx.loading import find_classes
from quire.backends.mlx.spec_model import config_from_spec
from quire.text.vocab_spec import gguf_vocab
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import transformers_parameters


def write_mlx_folder(
    folder: Path, source: Path, *, bits: int = 4, group_size: int = 32, embedding_bits: int | None = 8
) -> Path:
    """Convert a GGUF file of a llama model. `embedding_bits`: for the embedding, if it has its own quantisation.

    The defaults keep nearly all precision of the default model's file: 4 bits in groups of 32, and 8 for the embedding.
    With groups of 64 this small model no longer answers that Paris is the capital of France.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(source)
    config = {**config_from_spec(checkpoint.spec), "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    _write_tokenizer(folder, checkpoint, config)
    model_class, arguments = find_classes(config)
    model = model_class(arguments.from_dict(config))
    names = transformers_parameters(checkpoint.spec)  # mlx-lm has the same; none of a llama's is fused
    model.load_weights(
        [(name, mx.array(to_float32(checkpoint.read(own))).astype(mx.float16)) for name, (own,) in names.items()]
    )
    checkpoint.close()

    def choose(path: str, _layer: object) -> bool | dict[str, Any]:
        if embedding_bits is None or not path.endswith("embed_tokens"):
            return True
        return {"bits": embedding_bits, "group_size": group_size, "mode": "affine"}

    model, config = mlx_lm.utils.quantize_model(model, config, group_size, bits, quant_predicate=choose)
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    return folder


def _write_tokenizer(folder: Path, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, and add the special tokens to `config`."""
    files = checkpoint.tokenizer_files()
    assert files.gguf is not None
    vocab = gguf_vocab(files.gguf)
    parts = {"version": "1.0", "truncation": None, "padding": None, **vocab.spec}
    tokenizers.Tokenizer.from_str(json.dumps(parts)).save(str(folder / "tokenizer.json"))
    tokens = files.gguf["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[token_id] for name, token_id in vocab.named.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": files.chat_template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config["eos_token_id"] = list(vocab.eos_ids)
    config["bos_token_id"] = vocab.named.get("bos")
