"""What tests of every room share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from quire.errors import QuireError
from quire.weights.hub import DEFAULT_MODEL, pull
from tests.tiny import write_tiny_model

# Test files run side by side, one a core. Threads that share a core wait for each other, here and in child processes.
os.environ["OMP_NUM_THREADS"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # must stand before Triton is imported anywhere
# Hundreds of processes start here: what they import is compiled once, whatever this shell thinks of that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["QUIRE_SERVER"] = "none"  # what runs on this machine's port 8000 is nobody's business here

# A shell that runs the tests in the background tells them to ignore ^C, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Examples may take as long as a busy machine needs for them.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model, fetched if need be. Tests that want it mean it: without it they fail, they do not skip."""
    try:
        return pull()  # only looks, where it is here already
    except QuireError as error:
        pytest.fail(f"these tests need the default model {DEFAULT_MODEL}, and it could not be fetched: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model of random weights, for what does not need sense."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


LONG_FILES = (
    "test_worlds.py",
    "test_mutants.py",
    "test_smollm2.py",
    "test_docs.py",
    "test_chaos.py",
    "test_hostile.py",
    "test_cuda.py",
    "test_compiling.py",
    "test_precision.py",
    "test_invariance.py",
    "test_wheel.py",
    "test_types.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: files run side by side, and one that begins last is waited for by everybody."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def pytest_collection_finish() -> None:
    """What stands by now stays to the end: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
