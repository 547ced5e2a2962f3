"""Fixtures for tests of the native backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.backends.native.library import NativeUnavailable, choose_kernels, kernels_available
from quire.backends.native.model import Engine


def _variants() -> list[str]:
    """Without the library, each test fails by itself instead of the collection of all tests."""
    try:
        return kernels_available()
    except NativeUnavailable:
        return ["none"]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.fixture(params=_variants())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each variant of the hot loops that this machine runs, in turn."""
    choose_kernels(request.param)
    yield request.param
    choose_kernels(kernels_available()[0])
