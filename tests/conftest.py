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


# CPU seconds of the files that take long, of all their processes. Exact figures do not matter.
SLOW_FILES_S = {
    "sim/test_worlds.py": 90,
    "server/test_chaos.py": 60,
    "test_docs.py": 53,
    "test_benchmarks.py": 49,
    "test_smollm2.py": 44,
    "backends/torch/test_cuda.py": 44,
    "backends/native/test_precision.py": 43,
    "test_types.py": 37,
    "backends/torch/test_compiling.py": 31,
    "server/test_schemathesis.py": 31,
    "backends/native/test_invariance.py": 27,
    "server/test_page.py": 27,
    "backends/torch/test_models.py": 25,
    "server/test_tools_client.py": 24,
    "server/test_hostile.py": 23,
    "sim/test_mutants.py": 23,
    "backends/native/test_models.py": 22,
    "server/test_models.py": 22,
    "engine/test_grammars.py": 20,
    "server/test_cli_replay.py": 20,
    "backends/torch/kernels/test_sampling.py": 18,
    "cli/test_generate.py": 17,
    "server/test_two_models.py": 16,
    "text/test_tokenizer.py": 16,
    "test_wheel.py": 16,
    "text/test_chat.py": 15,
    "server/test_access.py": 14,
    "server/test_openai_client.py": 14,
    "backends/torch/kernels/test_attention.py": 12,
    "server/test_responses_client.py": 12,
    "cli/test_pull.py": 15,
    "cli/test_serve.py": 11,
    "server/test_anthropic_client.py": 11,
    "server/test_ollama_client.py": 11,
    "text/test_rendering.py": 11,
    "engine/test_worker.py": 10,
    "engine/test_client.py": 10,
    "weights/test_hub.py": 10,
    "cli/test_doctor.py": 10,
    "cli/test_bench.py": 10,
    "server/test_watch.py": 10,
    "server/test_cli_remote.py": 9,
    "backends/torch/kernels/test_rope.py": 9,
    "cli/test_sim.py": 8,
    "backends/native/test_kernels.py": 8,
    "weights/test_config.py": 8,
    "backends/torch/test_work.py": 8,
    "backends/torch/kernels/test_linear.py": 8,
    "weights/test_fuzz.py": 7,
    "server/test_agents_golden.py": 8,
    "server/test_service.py": 7,
    "backends/native/test_runner.py": 7,
    "server/test_cli_top.py": 7,
    "engine/test_bench.py": 7,
    "backends/torch/test_loading.py": 7,
    "text/test_hostile_files.py": 6,
    "text/test_tool_formats.py": 6,
    "backends/native/test_sampling.py": 6,
    "engine/test_supervise.py": 6,
    "cli/test_chat.py": 5,  # from here on: what needs the default model, or waits for most of its time
    "server/test_connections.py": 4,
    "server/test_grafana.py": 3,
}
LINT = "test_types.py"  # slow, and still part of `make check`
FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that take long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, slow files are not even imported. None: as pytest decides."""
    name = name_of(collection_path)
    return True if config.getoption("--quick") and name in SLOW_FILES_S and name != LINT else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: files run side by side, and one that begins last is waited for by everybody."""
    items.sort(key=lambda item: -SLOW_FILES_S.get(name_of(item.path), 0))


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


def pytest_collection_finish() -> None:
    """What stands by now stays to the end: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
