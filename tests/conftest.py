"""Environment, fixtures and collection options shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from quire.errors import QuireError
from quire.weights.hub import DEFAULT_MODEL, pull
from tests.costs import Collector, Recorder
from tests.selection import MARKERS, is_slow, select
from tests.tiny import write_tiny_model

# Test files run in parallel, one per core. More threads would compete for the same core, also in child processes.
os.environ["OMP_NUM_THREADS"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
    # The tests start hundreds of processes, so bytecode is cached even if the environment disables it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["QUIRE_STATE_DIR"] = "none"  # tests must not use the stored files and batches of this user
os.environ["QUIRE_SERVER"] = "none"  # tests must not use a server that runs on port 8000 of this machine

# Collecting the tests creates millions of objects that live until the end, and tests create more than a server does.
gc.disable()
# A shell that runs the tests in the background makes them ignore SIGINT, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline: examples take longer on a busy machine.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("first failure", settings.get_profile("any speed"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("QUIRE_TEST_PROFILE", "any speed"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Path of the default model, downloaded if necessary. Tests that need it fail without it; they do not skip."""
    try:
        return pull()  # downloads nothing if the model is in the cache
    except QuireError as error:
        pytest.fail(f"these tests need the default model {DEFAULT_MODEL}, which could not be downloaded: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a complete small model with random weights, for tests that do not need meaningful output."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines (`pytest.mark.anyio`)."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip slow test files")
    parser.addoption("--nightly", action="store_true", help="run all tests, also those marked with nightly")
    parser.addoption("--left-out", action="store_true", help="run only the tests that `make test` leaves out")
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what each test took to FILE (tests/costs.py)")


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if os.environ.get("COVERED_TESTS"):
        from tests.mutations import TestContexts

        config.pluginmanager.register(TestContexts())
    path: Path | None = config.getoption("--costs")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if path is not None and not is_worker:
        config.pluginmanager.register(Collector(path.absolute()))
    if path is not None and (is_worker or not config.getoption("numprocesses")):
        config.pluginmanager.register(Recorder())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files with --quick, without importing them. None: default of pytest."""
    return True if config.getoption("--quick") and is_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left_out = select(items, config.getoption("--nightly"))
    if config.getoption("--left-out"):
        items[:], left_out = left_out, items[:]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Exclude objects created so far from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
