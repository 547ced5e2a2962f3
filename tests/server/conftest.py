"""Fixtures of all tests that speak to a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.rig import close_sockets


@pytest.fixture(autouse=True)
def sockets_are_closed() -> Iterator[None]:
    """Whatever happened, a test leaves no connection and no request to the next one."""
    yield
    close_sockets()
