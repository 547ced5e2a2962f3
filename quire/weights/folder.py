"""A model folder in Hugging Face's layout, without its weights: config.json, generation_config.json, tokenizer files.

Only files of the folder itself are opened, whatever names a file contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError
from quire.weights.checkpoint import TokenizerFiles
from quire.weights.config import has_packed_experts, name_architecture, read_generation
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.fields import Fields, member, read_bounded, read_json
from quire.weights.other import find_unsupported, read_spec
from quire.weights.quantization import read_quantization
from quire.weights.spec import GenerationDefaults, ModelSpec

MAX_TOKENIZER_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 4 << 20


class ModelFolder:
    """The contents of the folder's small files. Checkpoints add the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config_path = member(path, "config.json")
        self.config = read_json(self._config_path)
        fields = Fields(str(self._config_path), self.config)
        self.architecture = name_architecture(fields)
        self.unsupported = find_unsupported(fields)  # why quire's own equations do not run it; empty: they may
        self.family = None if self.unsupported else BY_ARCHITECTURE[self.architecture]  # None: quire has no equations
        # None: the weights are plain, or quire does not read them. MXFP4 is a layout of one family.
        is_packed = self.family is not None and not has_packed_experts(fields)
        self.quantization = read_quantization(fields) if is_packed else None
        self.is_multimodal = self.family is not None and self.architecture in self.family.nested
        self._generation = self._json("generation_config.json")
        self.generation: GenerationDefaults = read_generation(self._generation, str(path / "generation_config.json"))

    def read_spec(self, quantization: str) -> ModelSpec:
        return read_spec(self.config, self._generation, str(self._config_path), quantization)

    def close(self) -> None:
        """Free the weights, if there are any."""

    def tokenizer_files(self) -> TokenizerFiles:
        config = self._json("tokenizer_config.json")
        words = self.path / "tokenizer.json"
        return TokenizerFiles(
            tokenizer_json=read_bounded(member(self.path, words.name), MAX_TOKENIZER_BYTES) if words.exists() else None,
            gguf=None,
            config=config,
            chat_template=self._chat_template(config),
        )

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(member(self.path, name)) if (self.path / name).exists() else {}

    def _chat_template(self, config: Mapping[str, Any]) -> str | None:
        """Return the template: from its own file, else tokenizer_config.json, else chat_template.json."""
        path = self.path / "chat_template.jinja"
        if path.exists():
            try:
                return read_bounded(member(self.path, path.name), MAX_TEMPLATE_BYTES).decode()
            except UnicodeDecodeError as error:
                raise ModelFileError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
        template = config.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if isinstance(template, list):  # several named templates
            named = [one.get("template") for one in template if isinstance(one, dict) and one.get("name") == "default"]
            template = named[0] if named else None
        return Fields(str(self.path), {"chat_template": template}).find_text("chat_template")
