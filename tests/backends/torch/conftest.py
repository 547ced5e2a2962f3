"""What tests of the torch backend share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backends.torch.kernels.device import DEVICE


@pytest.fixture(autouse=True, scope="package")
def _patched_once() -> Iterator[None]:
    """The interpreter patches the language for every launch, and every call inside a kernel: once is enough, and
    several times faster. Nothing else here uses the language."""
    if DEVICE == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    scope = original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    unpatched: Any = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _fn: unpatched
    yield
    interpreter._patch_lang = original
    scope.restore()
