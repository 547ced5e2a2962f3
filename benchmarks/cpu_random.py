"""GGUF files with random weights in the shape of a model, for `cpu.py`. Written once into quire's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.weights.hub import cache_dir

WEIGHT_STD = 0.02
CODE_STD = {"Q4_0": 4.6, "Q8_0": 73.9}  # of codes that are all equally frequent
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first
    type: str
    value: float | None = None  # of all elements; None: 1 for vectors, random for matrices


def find_or_write(
    file_name: str, architecture: str, tensors: Iterable[Tensor], describe: Callable[[Any], None]
) -> Path:
    """Return the file. `describe` adds the architecture's fields to a GGUF writer."""
    path = cache_dir() / "benchmarks" / file_name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write(partial, architecture, list(tensors), describe)
        partial.rename(path)
    return path


def _write(path: Path, architecture: str, tensors: list[Tensor], describe: Callable[[Any], None]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    describe(writer)
    writer.add_tokenizer_model("none")
    for tensor in tensors:
        shape = _shape_in_bytes(tensor)
        dtype: Any = np.dtype(np.float32 if tensor.type == "F32" else np.uint8)
        raw = None if tensor.type == "F32" else gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for tensor in tensors:
        writer.write_tensor_data(_values(rng, tensor))
    writer.close()


def _shape_in_bytes(tensor: Tensor) -> tuple[int, ...]:
    if tensor.type == "F32":
        return tensor.shape
    return (*tensor.shape[:-1], tensor.shape[-1] // 32 * BLOCK_BYTES[tensor.type])


def _values(rng: np.random.Generator, tensor: Tensor) -> Any:
    shape = _shape_in_bytes(tensor)
    if tensor.type == "F32":
        if tensor.value is not None or len(shape) == 1:
            return np.full(shape, 1 if tensor.value is None else tensor.value, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // BLOCK_BYTES[tensor.type], BLOCK_BYTES[tensor.type]), np.uint8)
    blocks[:, :2] = np.array([WEIGHT_STD / CODE_STD[tensor.type]], np.float16).view(np.uint8)
    return blocks.reshape(shape)
