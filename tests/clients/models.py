"""Files of the default model for some clients.

Its tokenizer, for clients that count tokens themselves; and the model with a context of 32,768 tokens, for agents whose
first prompt is longer than the original 8192.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.model_text import ModelText
from quire.text.vocab_spec import gguf_vocab
from quire.weights.hub import DEFAULT_MODEL, resolve
from quire.weights.opening import open_checkpoint

FACTOR = 4
HEAD_SIZE = 64
_UINT32, _FLOAT32 = 4, 6  # types of GGUF values


def default_tokenizer() -> str:
    """The default model's tokenizer as tokenizer.json."""
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL))
    metadata = checkpoint.tokenizer_files().gguf
    assert metadata is not None
    spec = json.dumps(gguf_vocab(metadata).spec)
    checkpoint.close()
    return spec


def write_tokenizer(folder: Path) -> None:
    """Write the default model's tokenizer in the two files that `transformers` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ModelText.open(resolve(DEFAULT_MODEL))
    (folder / "tokenizer.json").write_text(default_tokenizer())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **text.tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text.close()


def write_long_model(folder: Path) -> Path:
    """Write the model with a long context, unless it exists. Returns its path.

    Two values of the GGUF file's header are overwritten: the context length, and the base of the rotary embedding,
    which is increased by NTK-aware scaling. The answers are worse than the original model's, but only the protocol is
    tested.
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
    """Change one value of the header in place: after the key come 4 bytes of type and 4 bytes of value."""
    at = data.index(key) + len(key)
    assert struct.unpack_from("<I", data, at) == (kind,), f"{key!r} has another type"
    (old,) = struct.unpack_from(layout, data, at + 4)
    struct.pack_into(layout, data, at + 4, change(old))
