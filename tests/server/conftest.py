"""Fixtures of all tests that talk to a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.rig import FAKE, Server, close_sockets, serving


@pytest.fixture(scope="session")
def plain_server(tiny_model: Path) -> Iterator[Server]:
    """A fake model without keys, for tests that need no server of their own. Each process of the run starts one."""
    with serving(str(tiny_model), *FAKE) as server:
        yield server


@pytest.fixture(scope="session")
def real_server(default_model: Path) -> Iterator[Server]:
    """The default model without keys."""
    del default_model  # is here now
    with serving("--num-blocks", "400") as server:
        yield server


@pytest.fixture(autouse=True)
def sockets_are_closed() -> Iterator[None]:
    """A test leaves no connection and no request to the next one, even if it fails."""
    yield
    close_sockets()
