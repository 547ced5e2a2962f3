"""A tiny model as `mlx_lm.convert` writes it: packed weights, their scales, and MLX's fields in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from tests.tiny import write_tiny_model


def write_mlx_model(folder: Path, *, bits: int = 4, group_size: int = 32, mode: str = "affine") -> Path:
    """Write a llama of 2 layers with random quantised weights, a tokenizer and a chat template in its own file."""
    write_tiny_model(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "eos_token_id": [2, 3]}
    names = llama.ModelArgs.__dataclass_fields__
    model = llama.Model(llama.ModelArgs(**{name: value for name, value in config.items() if name in names}))
    quantize(model, group_size=group_size, bits=bits, mode=mode)
    quantization = {"group_size": group_size, "bits": bits, "mode": mode}
    config |= {"quantization": quantization, "quantization_config": quantization}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
