"""Whether the backend that this machine chooses runs a model. Commands that load nothing report it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from quire.backends.base import mlx_hint
from quire.weights.fields import show


def chooses_mlx() -> bool:
    """Whether `--backend auto` is mlx on this machine."""
    from quire.engine.composition import EngineConfig, choose_backend

    return choose_backend(EngineConfig()) == "mlx"


def find_backend_problem(unsupported: str) -> str:
    """Return why the chosen backend does not run a model, from `ModelSpec.unsupported`; empty: it may run it."""
    return f"{unsupported}{mlx_hint()}" if unsupported and not chooses_mlx() else ""


def find_mlx_problem(model_type: object) -> str:
    """Return why mlx-lm does not have a type of model, which config.json names; empty: it has it.

    mlx-lm has a module of that name for each type, and a table of other names, whose import takes seconds.
    """
    problem = f"mlx-lm has no models of type {show(model_type)}"
    package = importlib.util.find_spec("mlx_lm")
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w-]{1,100}", model_type, re.ASCII):
        return problem
    if package is None or not package.submodule_search_locations:
        return "mlx-lm is not installed"
    if (Path(package.submodule_search_locations[0]) / "models" / f"{model_type}.py").is_file():
        return ""
    from mlx_lm.utils import MODEL_REMAPPING

    return "" if model_type in MODEL_REMAPPING else problem
