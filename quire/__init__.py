"""quire: an LLM inference engine and server for many concurrent users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.generation import GenerationOutput, GenerationParams
    from quire.engine.llm import LLM

__all__ = ["LLM", "GenerationOutput", "GenerationParams", "__version__"]

# Imported on first access, so `import quire` and `quire --help` do not load the engine.
_PUBLIC = {
    "LLM": "quire.engine.llm",
    "GenerationOutput": "quire.engine.generation",
    "GenerationParams": "quire.engine.generation",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
