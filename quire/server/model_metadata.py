"""Metadata of a model, read from its files without loading it. Knows no protocol."""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.text.reasoning import find_reasoning
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.hub import NO_DEFAULTS, known_generation, size_of
from quire.weights.opening import open_checkpoint
from quire.weights.spec import GenerationDefaults, ModelSpec
from quire.weights.tensors import num_weights

if TYPE_CHECKING:
    from quire.server.models import Model


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Metadata of a model's files. `spec` is None if they cannot be read; loading the model reports the cause."""

    format: str
    num_bytes: int
    modified_s: float
    digest: str  # of the files' name, size and modification time; hashing the content would be slow
    spec: ModelSpec | None = None
    template: str | None = None
    defaults: GenerationDefaults = NO_DEFAULTS
    num_parameters: int = 0  # 0: not known

    @property
    def can_think(self) -> bool:
        return find_reasoning(self.template) is not None


async def facts_of(model: Model) -> ModelFacts:
    """Return the metadata, cached until the files change."""
    path, load_format = model.config.path, model.config.engine.load_format
    return await asyncio.to_thread(lambda: _read(path, load_format, *_size_and_mtime(path)))


def _size_and_mtime(path: Path) -> tuple[int, float]:
    try:
        return size_of(path), path.stat().st_mtime
    except OSError:
        return 0, 0.0


@lru_cache(maxsize=256)
def _read(path: Path, load_format: str, num_bytes: int, modified_s: float) -> ModelFacts:
    is_gguf = path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").exists())
    digest = hashlib.sha256(f"{path.name} {num_bytes} {modified_s}".encode()).hexdigest()
    form = "gguf" if is_gguf else "safetensors"
    try:
        checkpoint = open_checkpoint(path, load_format)
    except QuireError:
        return ModelFacts(form, num_bytes, modified_s, digest)
    try:
        template = checkpoint.tokenizer_files().chat_template
        defaults = checkpoint.generation
        if defaults == NO_DEFAULTS:  # same fallback as `ModelText.open`
            defaults = known_generation(path)
        num_parameters = _count_parameters(checkpoint)
        return ModelFacts(form, num_bytes, modified_s, digest, checkpoint.spec, template, defaults, num_parameters)
    except QuireError:
        return ModelFacts(form, num_bytes, modified_s, digest, checkpoint.spec)
    finally:
        checkpoint.close()


def _count_parameters(checkpoint: Checkpoint) -> int:
    """Return the number of weights; 0 for weights that MLX has packed, because their shapes do not show it."""
    spec = checkpoint.spec
    if not spec.unsupported:
        return num_weights(spec)
    if spec.quantization not in DTYPES:
        return 0
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
