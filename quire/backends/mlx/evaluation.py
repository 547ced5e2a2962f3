"""Evaluates the parameters of a model module by module, and converts errors of MLX and mlx-lm to quire's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from quire.backends.base import Progress
from quire.errors import ModelFileError, QuireError
from quire.weights.fields import show


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise `ModelFileError` instead of the errors of MLX and mlx-lm about a damaged or forged model."""
    try:
        yield
    except (QuireError, MemoryError):
        raise
    except Exception as error:
        message = str(error)
        if isinstance(error, RuntimeError) and "alloc" in message:  # "[malloc] Unable to allocate 8 bytes."
            raise MemoryError(message) from None
        raise ModelFileError(f"{path}: mlx-lm cannot load it: {type(error).__name__}: {show(message)}") from error


def flat_parameters(model: Module) -> list[tuple[str, mx.array]]:
    """Return the parameters with their paths, in the order of the modules."""
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def num_bytes(model: Module) -> int:
    """Return the memory of a model's parameters. Evaluates nothing."""
    return sum(array.nbytes for _, array in flat_parameters(model))


def evaluate(model: Module, path: Path, progress: Progress | None) -> None:
    """Compute every parameter, module by module. The inputs of a module are freed before the next one."""
    total, done = num_bytes(model), 0
    for _, piece in groupby(flat_parameters(model), key=lambda item: item[0].rpartition(".")[0]):
        arrays = [array for _, array in piece]
        with file_errors(path):
            mx.eval(arrays)
        done += sum(array.nbytes for array in arrays)
        if progress is not None:
            progress(done, total)
