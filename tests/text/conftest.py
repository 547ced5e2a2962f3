"""Small vocabularies of every kind, and the default model's real one if it is available."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import TokenizerFiles
from quire.weights.opening import open_checkpoint
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


@contextmanager
def plain_arrays() -> Iterator[None]:
    """Speed up the gguf package: it slices a mapped file 200,000 times, which takes seconds with numpy's memmap."""
    with pytest.MonkeyPatch.context() as patch:
        mapped = np.memmap
        patch.setattr(np, "memmap", lambda *args, **options: np.asarray(mapped(*args, **options)))
        yield


@pytest.fixture(scope="session")
def default_files(default_model: Path) -> TokenizerFiles:
    with closing(open_checkpoint(default_model)) as checkpoint:
        return checkpoint.tokenizer_files()


@pytest.fixture(scope="session")
def transformers_tokenizer(default_model: Path) -> Any:
    """The default model's tokenizer as transformers reads it from the GGUF."""
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    cuts = pytest.importorskip("tokenizers").pre_tokenizers
    with plain_arrays():
        loaded = transformers.AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    # transformers' GGUF reader ignores that this model splits off every digit.
    loaded.backend_tokenizer.pre_tokenizer = cuts.Sequence([cuts.Digits(True), cuts.ByteLevel(add_prefix_space=False)])
    return loaded


@pytest.fixture(scope="session")
def default_tokenizer(default_files: TokenizerFiles) -> Tokenizer:
    assert default_files.gguf is not None
    return Tokenizer.from_gguf(default_files.gguf)
