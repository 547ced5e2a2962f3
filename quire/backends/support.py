"""Which models the backends run, without loading one. mlx-lm has more architectures than quire's own equations."""

from __future__ import annotations

import importlib.util
import re
import resource
from pathlib import Path

from quire.backends.machine import is_apple_silicon
from quire.errors import UnsupportedModel
from quire.weights.fields import show
from quire.weights.spec import ModelSpec


def refuse_unsupported(spec: ModelSpec) -> None:
    """Raise if quire's own equations do not run the model: for every backend but mlx and fake."""
    if spec.unsupported:
        raise UnsupportedModel(f"{spec.unsupported}{mlx_hint()}")


def mlx_hint() -> str:
    """Return advice to try the mlx backend, on machines that can run it."""
    if importlib.util.find_spec("mlx_lm") is not None:
        return ". The mlx backend may run it: --backend mlx"
    if is_apple_silicon():
        return ". The mlx backend may run it: install mlx-lm, then use --backend mlx"
    return ""


def find_mlx_problem(model_type: object) -> str:
    """Return why mlx-lm does not run a `model_type` of config.json; empty: it may run it.

    mlx-lm has a module for each type, and a table of types that use another's module. Importing the table takes
    seconds, so the module is looked for first.
    """
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return "mlx-lm is not installed"
    if isinstance(model_type, str) and re.fullmatch(r"[\w-]{1,100}", model_type, re.ASCII):
        if (Path(package.submodule_search_locations[0]) / "models" / f"{model_type}.py").is_file():
            return ""
        import_mlx_lm()
        from mlx_lm.utils import MODEL_REMAPPING

        if model_type in MODEL_REMAPPING:
            return ""
    return f"mlx-lm has no models of type {show(model_type)}"


def import_mlx_lm() -> None:
    """Import mlx-lm without its side effect: it lowers the process's limit of open files for good."""
    set_limits = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = set_limits
