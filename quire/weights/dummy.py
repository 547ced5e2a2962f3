"""A model without weights: the parameters of config.json and the tokenizer beside it (`--load-format dummy`).

For benchmarks of model shapes without a download. The backend generates random weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType, TokenizerFiles
from quire.weights.config import DTYPES
from quire.weights.folder import ModelFolder
from quire.weights.spec import OTHER
from quire.weights.tensors import expected_tensors

TYPE = TensorType.BF16  # assumed type of the weights if config.json does not contain it
ITEM_BYTES = 2


class DummyCheckpoint:
    """A `Checkpoint` that lists the tensors its model would have, but cannot read them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._folder = ModelFolder(folder)
        self.spec = self._folder.spec(TYPE)
        if self.spec.quantization not in DTYPES:  # random weights of a packed type have no use
            raise UnsupportedModel(self.spec.unsupported)
        self.generation = self._folder.generation()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, TYPE, shape, math.prod(shape) * ITEM_BYTES)
            for name, shape in (expected_tensors(self.spec) if self.spec.family != OTHER else {}).items()
        }

    def read(self, name: str) -> RawTensor:
        raise ModelFileError(f"{self.path}: {name} cannot be read: with load_format = dummy there are no weights")

    def tokenizer_files(self) -> TokenizerFiles:
        return self._folder.tokenizer_files()

    def close(self) -> None:
        pass
