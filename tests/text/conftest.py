"""Small vocabularies of every kind, and the default model's real one if it is available."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_gguf, byte_level_json, sentencepiece_gguf


@pytest.fixture(scope="session")
def json_tokenizer() -> Tokenizer:
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    return Tokenizer.from_json(json.dumps(byte_level_json()).encode(), config)


@pytest.fixture(scope="session")
def gguf_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_gguf())


@pytest.fixture(scope="session")
def spm_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_gguf())


@pytest.fixture(scope="session")
def default_gguf_path(default_model: Path) -> Path:
    return default_model


@contextmanager
def plain_arrays() -> Iterator[None]:
    """Speed up the gguf package: it slices a mapped file 200,000 times, which takes seconds with numpy's memmap."""
    with pytest.MonkeyPatch.context() as patch:
        mapped = np.memmap
        patch.setattr(np, "memmap", lambda *args, **options: np.asarray(mapped(*args, **options)))
        yield


@pytest.fixture(scope="session")
def default_gguf(default_gguf_path: Path) -> dict[str, Any]:
    """The tokenizer.* metadata of the default model."""
    import gguf

    with plain_arrays():
        fields = gguf.GGUFReader(default_gguf_path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def transformers_tokenizer(default_gguf_path: Path) -> Any:
    """The default model's tokenizer as transformers reads it from the GGUF."""
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    cuts = pytest.importorskip("tokenizers").pre_tokenizers
    with plain_arrays():
        loaded = transformers.AutoTokenizer.from_pretrained(default_gguf_path.parent, gguf_file=default_gguf_path.name)
    # transformers' GGUF reader ignores that this model splits off every digit.
    loaded.backend_tokenizer.pre_tokenizer = cuts.Sequence([cuts.Digits(True), cuts.ByteLevel(add_prefix_space=False)])
    return loaded


@pytest.fixture(scope="session")
def default_tokenizer(default_gguf: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(default_gguf)
