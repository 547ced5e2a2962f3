"""The parameters of a model: their evaluation, module by module, and how layers are quantised.

Errors of MLX and mlx-lm are converted to quire's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from quire.backends.base import Progress
from quire.backends.support import describe_error
from quire.errors import ModelFileError, QuireError, UnsupportedModel

_MISSING = re.compile(r"^ModelArgs.__init__\(\) missing \d+ required positional arguments?: ([\w', ]{1,300})")
_TENSORS = ("Expected shape", "Missing ", "Received ")  # messages about the file's tensors


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
        is_setting = isinstance(error, ValueError) and not message.startswith(_TENSORS)
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


GROUP_SIZES = (64, 32)  # the first that divides a layer's input is used, as mlx-lm's default is 64


class Layout(NamedTuple):
    """How the weights of one layer are stored."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        if self.mode != "affine":
            return self.mode  # the other modes have one size each
        return f"{self.bits} bits (affine, groups of {self.group_size})"


def choose_layout(num_columns: int, bits: int) -> Layout | None:
    """Return the layout for a matrix of that many columns, or None if no group size divides them."""
    sizes = [size for size in GROUP_SIZES if num_columns % size == 0]
    return Layout(bits, sizes[0]) if sizes else None


def quantize_layers(model: Module, bits: int) -> None:
    """Quantise linear layers, experts and embeddings, unless the model's `quant_predicate` decides otherwise."""
    decide = getattr(model, "quant_predicate", lambda *_: True)

    def choose(path: str, layer: Module) -> bool | dict[str, Any]:
        layout = choose_layout(layer.weight.shape[-1], bits) if hasattr(layer, "to_quantized") else None
        chosen = decide(path, layer) if layout is not None else False
        if layout is None or not chosen:
            return False
        settings = layout._asdict() | (chosen if isinstance(chosen, dict) else {})
        return settings if layer.weight.shape[-1] % settings["group_size"] == 0 else False

    quantize(model, class_predicate=choose)


def set_layouts(model: Module, layouts: Mapping[str, Layout]) -> None:
    """Replace the layers at these paths by quantised ones. Their weights are undefined until they are loaded."""
    quantize(model, class_predicate=lambda path, _: layouts[path]._asdict() if path in layouts else False)


def main_layout(model: Module) -> Layout | None:
    """Return the layout of most of the weights, or None if no layer is quantised."""
    num_bytes: Counter[Layout] = Counter()
    for layer in model.modules():
        if hasattr(layer, "bits") and hasattr(layer, "group_size"):
            num_bytes[Layout(layer.bits, layer.group_size, getattr(layer, "mode", "affine"))] += layer.weight.nbytes
    return num_bytes.most_common(1)[0][0] if num_bytes else None


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
