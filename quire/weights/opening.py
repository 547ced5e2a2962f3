"""Opens the checkpoint at a path.

`--load-format dummy` opens a model without weights: the parameters of config.json and the tokenizer beside it, for
benchmarks of model shapes without a download. The backend generates random weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ModelFileError, ModelNotFound, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.config import DTYPES, has_packed_experts
from quire.weights.fields import Fields
from quire.weights.folder import ModelFolder
from quire.weights.gguf import GgufCheckpoint, is_later_part, part_paths
from quire.weights.safetensors import UNSAFE_SUFFIXES, SafetensorsCheckpoint
from quire.weights.tensors import expected_tensors

if TYPE_CHECKING:
    from quire.weights.packed import PackedMatrix

TYPE = TensorType.BF16  # assumed type of the weights if config.json does not contain it


def _info(name: str, shape: tuple[int, ...], *, is_packed: bool) -> TensorInfo:
    kind = TensorType.MXFP4 if is_packed and shape[1] % BLOCKS[TensorType.MXFP4].num_elements == 0 else TYPE
    block = BLOCKS[kind]
    return TensorInfo(name, kind, shape, math.prod(shape) // block.num_elements * block.num_bytes)


class DummyCheckpoint(ModelFolder):
    """A `Checkpoint` that lists the tensors its model would have, but cannot read them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.spec = self.read_spec(TYPE)
        if self.spec.quantization not in DTYPES:  # random weights of a packed type have no use
            raise UnsupportedModel(self.spec.unsupported)
        is_packed = self.family is not None and has_packed_experts(Fields(str(folder), self.config))
        if is_packed:
            self.spec = replace(self.spec, quantization=TensorType.MXFP4)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _info(name, shape, is_packed=is_packed and ".experts." in name and len(shape) == 2)
            for name, shape in (expected_tensors(self.spec) if self.family is not None else {}).items()
        }

    def read(self, name: str) -> RawTensor:
        raise ModelFileError(f"{self.path}: {name} cannot be read: with load_format = dummy there are no weights")

    def read_packed(self, name: str) -> PackedMatrix | None:
        """None: a backend invents the weights itself."""


LOAD_FORMATS = ("auto", "dummy")  # the weights in the files; random weights in the shapes of config.json
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """Open a folder of safetensors, a `.gguf` file, or a folder with one GGUF model. The caller closes it."""
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder")
    has_config = (path / "config.json").exists()
    if load_format == "dummy":
        if not has_config:
            raise ModelFileError(f"{path}: is not a folder with config.json, which load_format = 'dummy' needs")
        return DummyCheckpoint(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path) if has_config else GgufCheckpoint(_only_gguf(path))
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.suffix in UNSAFE_SUFFIXES:
        raise ModelFileError(f"{path}: a format that can run code when read; convert to safetensors")
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path}: contains weights only; open its folder, which also holds config.json")
    raise ModelFileError(f"{path}: is neither a .gguf file nor a folder with config.json")


def weight_files(path: Path, load_format: str = "auto") -> list[Path]:
    """Return the files that determine the results of a model: its weights and config.json, or all parts of a GGUF."""
    if path.is_dir() and (path / "config.json").exists():
        weights = [] if load_format == "dummy" else sorted(path.glob("*.safetensors"))
        return [path / "config.json", *weights]
    first = _only_gguf(path) if path.is_dir() else path
    return part_paths(first)


def text_files(path: Path) -> list[Path]:
    """Return the files beside the weights that determine prompts and default sampling. A GGUF has them inside."""
    return [path / name for name in TEXT_FILES if (path / name).exists()] if (path / "config.json").exists() else []


def _only_gguf(folder: Path) -> Path:
    """Return the GGUF file in a folder; of a split model, its first part."""
    files = sorted(folder.glob("*.gguf"))
    first = [file for file in files if not is_later_part(file)]
    if len(first) == 1:
        return first[0]
    if not first:
        raise ModelFileError(f"{folder}: holds neither config.json nor a .gguf file")
    raise ModelFileError(f"{folder}: holds {len(first)} GGUF models; name one: {', '.join(one.name for one in first)}")
