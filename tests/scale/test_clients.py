"""The tests of the official clients, unchanged, through a Ray cluster.

With one replica, because some of them expect that a prompt is cached after its first request, or kill the only worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly  # test_deploy.py has a cluster, and tests/server runs the clients
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_official_clients_work_unchanged(client: str, default_model: Path) -> None:
    del default_model  # is here now
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/server/test_{client}_client.py"],
        env={**os.environ, "QUIRE_TEST_REPLICAS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
