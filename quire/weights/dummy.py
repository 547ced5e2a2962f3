"""A model without its weights: the facts of a config.json and the words beside it (`--load-format dummy`).

For benchmarks of shapes nobody has to download. A backend makes the weights up, where it wants them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ModelFileError
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType, TokenizerFiles
from quire.weights.folder import ModelFolder
from quire.weights.names import expected_tensors

TYPE = TensorType.BF16  # what the weights would be stored as, where config.json does not say
ITEM_BYTES = 2


class DummyCheckpoint:
    """A `Checkpoint` that lists the tensors its model would have, and has none of them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._folder = ModelFolder(folder)
        self.spec = self._folder.spec(TYPE)
        self.generation = self._folder.generation()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, TYPE, shape, math.prod(shape) * ITEM_BYTES)
            for name, shape in expected_tensors(self.spec).items()
        }

    def read(self, name: str) -> RawTensor:
        raise ModelFileError(f"{self.path}: {name} cannot be read: load_format is dummy, so there are no weights")

    def tokenizer_files(self) -> TokenizerFiles:
        return self._folder.tokenizer_files()

    def close(self) -> None:
        pass
