"""Evaluates the parameters of a model module by module, and converts errors of MLX and mlx-lm to quire's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from quire.backends.base import Progress
from quire.backends.support import describe_error
from quire.errors import ModelFileError, QuireError, UnsupportedModel

_MISSING = re.compile(r"^ModelArgs.__init__\(\) missing \d+ required positional arguments?: ([\w', ]{1,300})")


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise `ModelFileError` instead of the errors of MLX and mlx-lm about a damaged or forged model.

    mlx-lm checks no config: a setting that its code does not expect fails anywhere, with an error of Python.
    """
    try:
        yield
    except (QuireError, MemoryError):
        raise
    except Exception as error:
        message = str(error)
        if isinstance(error, RuntimeError) and "alloc" in message:  # "[malloc] Unable to allocate 8 bytes."
            raise MemoryError(message) from None
        missing = _MISSING.search(message)
        problem = f"config.json has no {missing[1]}" if missing else "its code does not accept this config.json"
        text = describe_error(error, problem)
        is_setting = isinstance(error, ValueError) and not message.startswith("Expected shape")
        if text == problem or is_setting:
            raise UnsupportedModel(f"{path}: mlx-lm {mlx_lm.__version__} does not run it: {text}") from error
        raise ModelFileError(f"{path}: mlx-lm cannot load it: {text}") from error


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
