"""The supported families. To add one, write a file with the equations that differ and add a row here."""

from __future__ import annotations

from quire.backends.torch.models.gemma3 import Gemma3Model
from quire.backends.torch.models.llama import LlamaModel
from quire.backends.torch.models.qwen3 import Qwen3Model

MODELS: dict[str, type[LlamaModel]] = {
    "llama": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
    "gemma3": Gemma3Model,
    "phi3": LlamaModel,
}
