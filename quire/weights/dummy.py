"""A model without weights: the parameters of config.json and the tokenizer beside it (`--load-format dummy`).

For benchmarks of model shapes without a download. The backend generates random weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType, TokenizerFiles
from quire.weights.config import DTYPES, has_packed_experts
from quire.weights.fields import Fields
from quire.weights.folder import ModelFolder
from quire.weights.gpt_oss import BLOCK_BYTES, GROUP
from quire.weights.packed import PackedMatrix
from quire.weights.spec import OTHER
from quire.weights.tensors import expected_tensors

TYPE = TensorType.BF16  # assumed type of the weights if config.json does not contain it
ITEM_BYTES = 2


def _info(name: str, shape: tuple[int, ...], *, is_packed: bool) -> TensorInfo:
    if is_packed and shape[1] % GROUP == 0:
        return TensorInfo(name, TensorType.MXFP4, shape, math.prod(shape) // GROUP * BLOCK_BYTES)
    return TensorInfo(name, TYPE, shape, math.prod(shape) * ITEM_BYTES)


class DummyCheckpoint:
    """A `Checkpoint` that lists the tensors its model would have, but cannot read them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._folder = ModelFolder(folder)
        self.spec = self._folder.spec(TYPE)
        if self.spec.quantization not in DTYPES:  # random weights of a packed type have no use
            raise UnsupportedModel(self.spec.unsupported)
        self.generation = self._folder.generation()
        is_packed = self.spec.family != OTHER and has_packed_experts(Fields(str(folder), self._folder.config))
        if is_packed:
            self.spec = replace(self.spec, quantization=TensorType.MXFP4)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _info(name, shape, is_packed=is_packed and ".experts." in name and len(shape) == 2)
            for name, shape in (expected_tensors(self.spec) if self.spec.family != OTHER else {}).items()
        }

    def read(self, name: str) -> RawTensor:
        raise ModelFileError(f"{self.path}: {name} cannot be read: with load_format = dummy there are no weights")

    def read_packed(self, name: str) -> PackedMatrix | None:
        """None: a backend invents the weights itself."""
        del name
        return None

    def tokenizer_files(self) -> TokenizerFiles:
        return self._folder.tokenizer_files()

    def close(self) -> None:
        pass
