"""Whether the backend that `auto` selects here runs a model, for commands that load nothing."""

from __future__ import annotations

from quire.backends.support import mlx_hint
from quire.engine.composition import EngineConfig, choose_backend


def find_backend_problem(unsupported: str) -> str:
    """Return why `--backend auto` does not run a model, from `ModelSpec.unsupported`; empty: it may run it."""
    if not unsupported or choose_backend(EngineConfig()) == "mlx":
        return ""
    return f"{unsupported}{mlx_hint()}"
