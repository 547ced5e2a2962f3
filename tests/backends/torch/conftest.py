"""Fixtures for tests of the torch backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.torch.kernels.device import DEVICE


@pytest.fixture(autouse=True, scope="package")
def _interpreter(pytestconfig: pytest.Config) -> Iterator[None]:
    if DEVICE == "cuda":
        yield
        return
    from tests.backends.torch.interpreter import faster_interpreter

    with faster_interpreter(checks_overflow=pytestconfig.getoption("--nightly")):
        yield
