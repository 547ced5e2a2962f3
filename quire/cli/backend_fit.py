"""Whether the backend that `auto` selects here runs a model, for commands that load nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.backends.support import find_mlx_problem, find_transformers_problem, mlx_hint, transformers_hint
from quire.engine.composition import EngineConfig, choose_backend
from quire.errors import QuireError
from quire.weights.config import DTYPES
from quire.weights.fields import read_json
from quire.weights.folder import member
from quire.weights.spec import ModelSpec


def find_backend_problem(unsupported: str, config: Mapping[str, Any] | None = None) -> str:
    """Return why `--backend auto` does not run a model; empty: it may run it.

    `unsupported` is `ModelSpec.unsupported`. `config` holds the contents of config.json, if there is one: transformers
    may run the model. Asking transformers takes seconds.
    """
    if not unsupported:
        return ""
    if choose_backend(EngineConfig()) == "mlx":
        return "" if config is None else find_mlx_problem(config.get("model_type"))
    problem = "" if config is None else find_transformers_problem(config)
    if config is not None and not problem:
        return ""
    if problem and problem in unsupported:  # layers that no backend runs
        return unsupported
    has_mlx = config is None or not find_mlx_problem(config.get("model_type"))
    hint = mlx_hint() if has_mlx else ""
    return f"{unsupported}{f'; {problem}' if problem else transformers_hint()}{hint}"


def needs_mlx(spec: ModelSpec) -> bool:
    """Return whether a model runs with mlx-lm, if at all: transformers runs weights of 16 bits on other backends."""
    return bool(spec.unsupported) and (spec.quantization not in DTYPES or choose_backend(EngineConfig()) == "mlx")


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return config.json of a model folder; None for a file, or if it cannot be read."""
    try:
        return read_json(member(path, "config.json")) if path.is_dir() else None
    except QuireError:
        return None
