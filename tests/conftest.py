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


# CPU seconds of slow test files, including their child processes. Approximate values are enough.
SLOW_FILES_S = {
    "gauntlet/test_first_rows.py": 120,
    "gauntlet/test_last_rows.py": 120,
    "gauntlet/test_gauntlet.py": 10,
    "test_drafts.py": 35,
    "test_quantized_equality.py": 150,
    "backends/torch/test_gguf_types.py": 60,
    "backends/torch/test_fp8_kv.py": 25,
    "backends/torch/kernels/test_packed_linear.py": 25,
    "backends/torch/kernels/test_packed_products.py": 20,
    "weights/test_quantizing.py": 40,
    "weights/test_quantized_models.py": 25,
    "weights/test_packed.py": 15,
    "sim/test_worlds.py": 90,
    "server/test_chaos.py": 60,
    "test_docs.py": 53,
    "test_benchmarks.py": 49,
    "test_smollm2.py": 44,
    "backends/torch/test_cuda.py": 80,
    "backends/native/test_precision.py": 43,
    "backends/mlx/test_loading.py": 75,
    "backends/mlx/test_models.py": 70,
    "backends/torch/test_transformers_model.py": 55,
    "backends/test_unsupported_models.py": 15,
    "backends/test_long_rope.py": 10,
    "backends/mlx/test_smollm2.py": 30,
    "backends/mlx/test_paged_decode.py": 30,
    "backends/mlx/test_build.py": 15,
    "server/test_mlx.py": 25,
    "backends/mlx/test_runner.py": 10,
    "engine/tiers/test_restart.py": 40,
    "test_types.py": 37,
    "backends/torch/test_compiling.py": 31,
    "server/test_batches.py": 50,
    "server/test_schemathesis.py": 31,
    "cli/test_batch.py": 30,
    "backends/native/test_invariance.py": 27,
    "backends/native/test_first_examples.py": 100,
    "server/test_page.py": 27,
    "server/test_disk_cache.py": 27,
    "backends/torch/test_models.py": 25,
    "server/test_tools_client.py": 24,
    "server/test_hostile.py": 23,
    "sim/test_mutants.py": 23,
    "backends/native/test_models.py": 22,
    "server/test_models.py": 22,
    "engine/tiers/test_crashes.py": 20,
    "engine/test_grammars.py": 20,
    "engine/test_grammar_trial.py": 15,
    "engine/test_fingerprint.py": 15,
    "server/test_fingerprint.py": 12,
    "server/test_cli_replay.py": 20,
    "backends/torch/kernels/test_sampling.py": 18,
    "cli/test_generate.py": 17,
    "server/test_two_models.py": 16,
    "text/test_tokenizer.py": 16,
    "test_wheel.py": 16,
    "text/test_chat_template.py": 15,
    "text/test_call_syntaxes.py": 15,
    "server/test_family_formats.py": 15,
    "server/test_access.py": 14,
    "server/test_openai_client.py": 14,
    "backends/torch/kernels/test_attention.py": 12,
    "server/test_responses_client.py": 12,
    "cli/test_pull.py": 15,
    "server/test_markdown.py": 15,
    "cli/test_terminal.py": 30,
    "engine/tiers/test_damage.py": 11,
    "engine/tiers/test_engine_tiers.py": 12,
    "engine/tiers/test_transfers.py": 5,
    "server/test_kv_events.py": 25,
    "engine/test_event_publisher.py": 10,
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
    "weights/test_fuzz.py": 60,
    "server/test_agents_golden.py": 8,
    "server/test_model_service.py": 7,
    "backends/native/test_runner.py": 7,
    "server/test_cli_top.py": 7,
    "bench/test_bench.py": 7,
    "backends/torch/test_loading.py": 7,
    "text/test_hostile_files.py": 6,
    "text/test_tool_formats.py": 6,
    "backends/native/test_sampling.py": 6,
    "engine/test_supervise.py": 6,
    "backends/torch/test_cuda_windows.py": 151,
    "backends/torch/test_block_io.py": 99,
    "backends/torch/test_mxfp4_experts.py": 89,
    "backends/torch/test_quantized_experts.py": 72,
    "backends/torch/test_expert_loading.py": 71,
    "simulator/test_cluster.py": 41,
    "sim/test_shares.py": 39,
    "cli/test_bench_fairness.py": 22,
    "backends/torch/test_bf16.py": 22,
    "backends/torch/kernels/test_delta_net.py": 21,
    "engine/test_grammar_masks.py": 17,
    "backends/native/test_long_contexts.py": 17,
    "backends/torch/test_experts.py": 12,
    "backends/native/test_states.py": 11,
    "backends/torch/test_states.py": 8,
    "backends/torch/kernels/test_fp8_kv.py": 8,
    "simulator/test_simulator.py": 6,
    "server/test_hybrid_memory.py": 6,
    "backends/native/test_threads.py": 6,
    "server/test_requests.py": 5,
    "backends/torch/test_gpt_oss.py": 5,
    "backends/mlx/test_sampling.py": 5,
    "test_deploy.py": 4,
    "simulator/test_agents.py": 4,
    "cli/test_chat.py": 5,  # this and the following need the default model, or wait most of the time
    "server/test_connections.py": 12,
    "server/test_grafana.py": 3,
    "scale/test_replica.py": 2,  # this and the following start many processes: not beside the slowest files
    "scale/test_deployments.py": 2,
    "scale/test_smg.py": 2,
    "scale/test_clients.py": 1,
    "scale/test_deploy.py": 1,
}
LINT = "test_types.py"  # slow, but part of `make check`
FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip slow test files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files with --quick, without importing them. None: default of pytest."""
    name = name_of(collection_path)
    return True if config.getoption("--quick") and name in SLOW_FILES_S and name != LINT else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first. Files run in parallel, and a slow one that starts last would delay the end."""
    items.sort(key=lambda item: -SLOW_FILES_S.get(name_of(item.path), 0))


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


def pytest_collection_finish() -> None:
    """Exclude objects created so far from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()
