"""Files of the default model as some clients want them: its tokenizer for those that count tokens themselves, and the
model with a context of 32,768 tokens for agents, whose first prompt is longer than its own 8192.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.model_text import ModelText
from quire.weights.hub import DEFAULT_MODEL, resolve

FACTOR = 4
HEAD_SIZE = 64
_UINT32, _FLOAT32 = 4, 6  # types of GGUF values


def write_tokenizer(folder: Path) -> None:
    """The default model's, in the two files that `transformers` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ModelText.open(resolve(DEFAULT_MODEL))
    (folder / "tokenizer.json").write_text(text.tokenizer._full.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **text.tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text.close()


def write_long_model(folder: Path) -> Path:
    """The path of the file, which is written once.

    Two values of the GGUF file's header are overwritten: the length, and the base of the rotary embedding, raised as
    NTK-aware scaling has it. The answers are worse than the model's own; what is tested with it is the protocol.
    """
    source = resolve()
    target = folder / f"{source.stem}-long.gguf"
    if target.exists():
        return target
    data = bytearray(source.read_bytes())
    _overwrite(data, b"llama.context_length", _UINT32, "<I", lambda length: length * FACTOR)
    scale = FACTOR ** (HEAD_SIZE / (HEAD_SIZE - 2))
    _overwrite(data, b"llama.rope.freq_base", _FLOAT32, "<f", lambda base: base * scale)
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target


def _overwrite(data: bytearray, key: bytes, kind: int, layout: str, change: Callable[[Any], Any]) -> None:
    """One value of the header, in place: the key, a type of 4 bytes, 4 bytes of value."""
    at = data.index(key) + len(key)
    assert struct.unpack_from("<I", data, at) == (kind,), f"{key!r} has another type"
    (old,) = struct.unpack_from(layout, data, at + 4)
    struct.pack_into(layout, data, at + 4, change(old))
