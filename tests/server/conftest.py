"""Fixtures of all tests that talk to a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.rig import close_sockets


@pytest.fixture(autouse=True)
def sockets_are_closed() -> Iterator[None]:
    """A test leaves no connection and no request to the next one, even if it fails."""
    yield
    close_sockets()
