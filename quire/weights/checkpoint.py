"""The interface of a checkpoint in any format: named tensors, read one at a time from a mapped file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from quire.errors import ModelFileError
from quire.weights.spec import GenerationDefaults, ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.weights.packed import PackedMatrix


class TensorType(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ1_S = "IQ1_S"
    IQ1_M = "IQ1_M"
    IQ2_XXS = "IQ2_XXS"
    IQ2_XS = "IQ2_XS"
    IQ2_S = "IQ2_S"
    IQ3_XXS = "IQ3_XXS"
    IQ3_S = "IQ3_S"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"
    TQ1_0 = "TQ1_0"
    TQ2_0 = "TQ2_0"
    MXFP4 = "MXFP4"
    # PACKED_TYPES: `Checkpoint.read` returns F32 for these.
    FP8 = "FP8"
    INT8 = "INT8"
    INT4 = "INT4"


class Block(NamedTuple):
    """The smallest unit of a quantised row."""

    num_elements: int
    num_bytes: int


# The types that are read, by their number in a GGUF file. A type that is not here is refused by name.
FILE_TYPES: dict[int, tuple[TensorType, Block]] = {
    0: (TensorType.F32, Block(1, 4)),
    1: (TensorType.F16, Block(1, 2)),
    2: (TensorType.Q4_0, Block(32, 18)),
    3: (TensorType.Q4_1, Block(32, 20)),
    6: (TensorType.Q5_0, Block(32, 22)),
    7: (TensorType.Q5_1, Block(32, 24)),
    8: (TensorType.Q8_0, Block(32, 34)),
    10: (TensorType.Q2_K, Block(256, 84)),
    11: (TensorType.Q3_K, Block(256, 110)),
    12: (TensorType.Q4_K, Block(256, 144)),
    13: (TensorType.Q5_K, Block(256, 176)),
    14: (TensorType.Q6_K, Block(256, 210)),
    16: (TensorType.IQ2_XXS, Block(256, 66)),
    17: (TensorType.IQ2_XS, Block(256, 74)),
    18: (TensorType.IQ3_XXS, Block(256, 98)),
    19: (TensorType.IQ1_S, Block(256, 50)),
    20: (TensorType.IQ4_NL, Block(32, 18)),
    21: (TensorType.IQ3_S, Block(256, 110)),
    22: (TensorType.IQ2_S, Block(256, 82)),
    23: (TensorType.IQ4_XS, Block(256, 136)),
    29: (TensorType.IQ1_M, Block(256, 56)),
    30: (TensorType.BF16, Block(1, 2)),
    34: (TensorType.TQ1_0, Block(256, 54)),
    35: (TensorType.TQ2_0, Block(256, 66)),
    39: (TensorType.MXFP4, Block(32, 17)),
}
BLOCKS: dict[TensorType, Block] = dict(FILE_TYPES.values())


PACKED_TYPES = (TensorType.FP8, TensorType.INT8, TensorType.INT4)  # of safetensors with scales beside the codes


class TensorInfo(NamedTuple):
    name: str  # quire's name, see `quire.weights.tensors`: layers.0.q_proj.weight
    type: TensorType
    shape: tuple[int, ...]  # rows first
    num_bytes: int  # in the file, with scales


class RawTensor(NamedTuple):
    """A tensor as stored in the file, with rows in the order that `RopeSpec` rotates."""

    info: TensorInfo
    data: NDArray[np.uint8]  # [rows, bytes per row] or [bytes]; read-only, mapped from the file where possible


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The data from which the text layer builds a tokenizer, as plain values."""

    tokenizer_json: bytes | None  # tokenizer.json, or
    gguf: Mapping[str, Any] | None  # the tokenizer.ggml.* keys of a GGUF file
    config: Mapping[str, Any]  # tokenizer_config.json, or {}
    chat_template: str | None


class Checkpoint(Protocol):
    path: Path
    spec: ModelSpec
    generation: GenerationDefaults
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> RawTensor: ...

    def read_packed(self, name: str) -> PackedMatrix | None:
        """Return a matrix of few bits with its codes unchanged; None: it is stored in another type, use `read`."""

    def tokenizer_files(self) -> TokenizerFiles: ...

    def close(self) -> None: ...


class FileMap(mmap.mmap):
    """A file mapped read-only, which can also be read without the map.

    If another program truncates the file, a signal ends a process that uses the map. The server itself therefore only
    uses `copy`, which raises an error. Workers use the map: the server survives the end of a worker.
    """

    path: Path
    _handle = -1  # also of an object whose file could not be mapped

    def __new__(cls, path: Path) -> Self:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self = super().__new__(cls, handle, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(handle)
            raise
        self.path, self._handle = path, handle
        return self

    def copy(self, offset: int, num_bytes: int) -> bytes:
        """Read a part of the file. Raises ModelFileError if the file has become shorter."""
        data = bytearray()
        try:
            while len(data) < num_bytes and (
                piece := os.pread(self._handle, num_bytes - len(data), offset + len(data))
            ):
                data += piece
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        if len(data) < num_bytes:
            raise ModelFileError(f"{self.path}: was truncated while it was read, at {offset + len(data)}")
        return bytes(data)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        super().close()

    def __del__(self) -> None:
        with suppress(BufferError):
            self.close()


def map_file(path: Path) -> FileMap:
    """Map a file read-only. Its bytes are not read yet."""
    if not path.is_file():  # opening a pipe would block
        raise ModelFileError(f"{path}: cannot be read: no such file, or not a regular file")
    try:
        return FileMap(path)
    except ValueError:
        raise ModelFileError(f"{path}: is empty") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
